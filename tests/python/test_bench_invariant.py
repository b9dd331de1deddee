"""Suite invariant of the benchmark: what is timed, and who."""

import pytest
import torch
from test_bench import CPU

from flashtile._refusal import Refusal
from flashtile.bench import invariant, plots, report, run, suites, timing
from flashtile.bench.cases import Case, Work
from flashtile.bench.peers import OURS
from flashtile.bench.rivals import attention_of_any

QUICK = timing.Effort(seconds=0, min_rounds=2, max_rounds=2)


def test_the_stages_of_a_sequence():
    cases = suites.cases("invariant")
    assert len(cases) == len(set(cases)) == 22 and all(case.causal for case in cases)
    assert {case.work for case in cases} == {Work.FORWARD, Work.BACKWARD, Work.PREFILL, Work.DECODE}
    assert any(case.lengths for case in cases) and {case.dtype for case in cases} == {"bfloat16"}
    on_cpu = suites.cases("invariant", device_type="cpu", dtype="float16")
    assert max(case.seqlen_k for case in on_cpu) < 8192


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 16, 16, 4, 2, 16, 16, dtype="float32", causal=True, work=Work.BACKWARD),
        Case.ragged((9, 4), 4, 2, 16, dtype="float32", causal=True),
        Case.prefill(2, 8, 40, 4, 2, 16, dtype="float32", page_size=16),
        Case.decode(3, 40, 4, 2, 16, dtype="float32", page_size=16),
    ],
    ids=str,
)
def test_flashtile_runs_with_batch_invariant_and_without(case):
    asked = []

    def attention(*tensors, batch_invariant, **arguments):
        asked.append(batch_invariant)
        return attention_of_any(*tensors, batch_invariant=batch_invariant, **arguments)

    (cell,) = run.run_cases([case], CPU, QUICK, attention, usual=invariant.peers_of)
    names = [entry.name for entry in cell.entries]
    assert names == [OURS, invariant.FREE] + (["SDPA"] if case.lengths is None else [])
    assert not any(entry.wrong or entry.refusal for entry in cell.entries)
    assert set(asked) == {True, False} and asked[0] is True
    record = report.to_record("invariant", {}, [cell])
    assert f"{invariant.FREE}, {case.work.value}" in record["summary"]


def test_there_is_no_curve():
    with pytest.raises(Refusal, match="--plots is given with suite 'invariant'"):
        plots.check("invariant")


@pytest.mark.gpu
def test_fa2_runs_beside():
    case = Case.square(1, 128, 2, 64, dtype="bfloat16", causal=True)
    (cell,) = run.run_cases([case], torch.device("cuda"), QUICK, attention_of_any, usual=invariant.peers_of)
    assert [entry.name for entry in cell.entries if entry.timing] == [OURS, invariant.FREE, "SDPA FA2"]
