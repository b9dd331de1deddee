"""Suite max-logits of the benchmark: what is timed, and who."""

import pytest
import torch
from test_bench import CPU
from test_bench_invariant import QUICK

from flashtile.bench import largest, report, run, suites
from flashtile.bench.cases import Case, Work
from flashtile.bench.peers import OURS
from flashtile.bench.rivals import attention_of_any


def test_what_is_timed():
    cases = suites.cases("max-logits")
    assert len(cases) == len(set(cases)) == 66
    assert {case.work for case in cases} == {Work.FORWARD, Work.PREFILL, Work.DECODE}
    assert {case.head_dim for case in cases} == {64, 96, 128, 192, 256}
    on_cpu = suites.cases("max-logits", device_type="cpu", dtype="float16")
    assert max(case.seqlen_k for case in on_cpu if case.lengths is None) == 2048


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "case",
    [
        Case(2, 16, 16, 4, 2, 64, 64, dtype="float16", causal=True),
        Case.ragged((9, 4), 4, 2, 64, dtype="float16", causal=True),
        Case(1, 64, 64, 4, 2, 64, 64, dtype="float16", columns="causal_document"),
        Case.prefill(2, 8, 40, 4, 2, 64, dtype="float16", page_size=16),
        Case.decode(3, 40, 4, 2, 64, dtype="float16", page_size=16),
    ],
    ids=str,
)
def test_flashtile_runs_with_return_max_logits_and_without(case, device):
    asked = []

    def attention(*tensors, **arguments):
        asked.append(arguments.get("return_max_logits", False))
        return attention_of_any(*tensors, **arguments)

    where = CPU if device == "cpu" else torch.device(device)
    (cell,) = run.run_cases([case], where, QUICK, attention, usual=largest.peers_of)
    assert [entry.name for entry in cell.entries] == [OURS, largest.WITHOUT]
    assert not any(entry.wrong or entry.refusal for entry in cell.entries)
    assert set(asked) == {True, False} and asked[0] is True
    record = report.to_record("max-logits", {}, [cell])
    assert f"{largest.WITHOUT}, {case.work.value}" in record["summary"]
