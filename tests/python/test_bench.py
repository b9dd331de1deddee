"""The benchmark's own parts: its mask, its oracle, its suites, its runs, its records. No test looks at a time."""

import dataclasses
import itertools
import json
import math

import pytest
import torch

from flashtile._refusal import Refusal
from flashtile.bench import command, report, run, suites, timing
from flashtile.bench.cases import Case, Work, make_inputs, visible
from flashtile.bench.oracle import Oracle, Verdict, attention_float64, attention_sdpa, results
from flashtile.bench.peers import OURS, Contestant

CPU = torch.device("cpu")
EFFORT = timing.Effort(seconds=0, min_rounds=2, max_rounds=2)
TINY = [Case(2, 9, 17, 4, 2, 16, 8, dtype="float32", causal=True, work=work) for work in (Work.FORWARD, Work.BACKWARD)]


def scaled_wrongly(q, k, v, **options):
    import flashtile

    return flashtile.attention(q, k, v, scale=1.05 / math.sqrt(q.shape[-1]), **options)


def unsupported(q, k, v, **options):
    raise NotImplementedError("attention: no kernel serves this")


def timed_cell(case=TINY[0], **medians):
    return run.Cell(case, [run.Entry(name, timing.Timing(t, t, t, 1) if t else None) for name, t in medians.items()])


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(3, 3), (2, 5), (5, 2)])
def test_visible_is_the_contracts_mask(seqlen_q, seqlen_k):
    for causal, left, right in itertools.product((False, True), (None, 0, 1), (None, 0, 2)):
        case = Case(1, seqlen_q, seqlen_k, 1, 1, 8, 8, causal=causal, window=(left, right))
        found = visible(case, CPU)
        for i, j in itertools.product(range(seqlen_q), range(seqlen_k)):
            distance = j - (i + seqlen_k - seqlen_q)
            expected = (not causal or distance <= 0) and -(left if left is not None else 99) <= distance
            expected = expected and distance <= (right if right is not None else 99)
            assert found[i, j] == expected, (case, i, j)
        assert torch.equal(visible(case, CPU, 1, seqlen_q), found[1:])


def test_float64_attention_by_hand():
    # One key is visible to row 0 (its own value comes out), two equal ones to row 1 (their mean does).
    q, k = torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8)
    v = torch.tensor([[1.0] * 8, [3.0] * 8]).view(1, 2, 1, 8)
    out = attention_float64(q, k, v, Case.square(1, 2, 1, 8, causal=True))
    assert out.dtype == torch.float64
    assert out[0, :, 0, 0].tolist() == [1.0, 2.0]


def test_float64_attention_of_a_row_that_sees_nothing_is_zero_with_zero_gradients():
    case = Case(1, 3, 1, 1, 1, 8, 8, dtype="float32", causal=True)  # rows 0 and 1 stand before the only key
    found = results(attention_float64, make_inputs(case, CPU), case, gradients=True)
    assert torch.all(found["out"][0, :2] == 0)
    assert torch.all(found["dq"][0, :2] == 0)
    assert all(torch.isfinite(tensor).all() for tensor in found.values())


def test_sdpa_agrees_with_float64_attention_on_masks_it_has_no_name_for():
    for case in (TINY[0], Case(1, 12, 12, 2, 2, 8, 8, dtype="float32", window=(2, 3))):
        inputs = make_inputs(case, CPU)
        torch.testing.assert_close(
            attention_sdpa(*inputs[:3], case).double(), attention_float64(*inputs[:3], case), atol=1e-5, rtol=1e-5
        )


def test_oracle_passes_what_is_exact_and_fails_what_is_not():
    case = TINY[1]
    inputs = make_inputs(case, CPU)
    oracle = Oracle(inputs, case, gradients=True)
    found = results(attention_sdpa, inputs, case, gradients=True)
    assert [verdict.name for verdict in oracle.judge(found)] == ["out", "dq", "dk", "dv"]
    assert all(verdict.ok for verdict in oracle.judge(found))
    for name in found:
        wrong = found | {name: found[name] + 1e-3}
        assert [verdict.name for verdict in oracle.judge(wrong) if not verdict.ok] == [name]


def test_a_nan_is_never_ok():
    assert not Verdict("out", error=math.nan, torch_error=1.0, slack=1.0).ok


def test_flops_by_the_usual_convention():
    full = Case.square(2, 128, 4, 64)
    assert full.flops == 4 * 2 * 4 * 128**2 * 64
    assert dataclasses.replace(full, causal=True).flops == full.flops / 2
    assert dataclasses.replace(full, work=Work.BACKWARD).flops == 2.5 * full.flops
    assert dataclasses.replace(full, window=(0, 0)).flops == 4 * 2 * 4 * 128 * 64


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_gpu_suites_hold_the_tokens_and_the_width_constant(name):
    assert len(suites.cases(name)) == 20
    assert len(suites.cases(name, full=True)) == 38
    for case in suites.cases(name, full=True):
        assert case.batch * case.seqlen_q == 16384
        assert case.heads_q != case.heads_k or case.heads_q * case.head_dim == 2048
        assert case.work is Work(name)


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_gpu_suites_end_with_the_shapes_of_llama(name):
    grouped = [case for case in suites.cases(name, dtype="float16") if case.heads_q != case.heads_k]
    assert grouped == suites.cases(name, dtype="float16", full=True)[-2:]
    work = Work(name).value
    assert [str(case) for case in grouped] == [f"B2 S8192 H{heads}/8 D128 causal f16 {work}" for heads in (32, 64)]


def test_cpu_suite():
    cases = suites.cases("cpu")
    assert len(cases) == len(set(cases)) == 16
    assert {(case.batch, case.heads_q, case.seqlen_q) for case in cases} == {(2, 8, 2048)}


def test_every_suite_has_a_quick_form():
    for name in suites.NAMES:
        assert suites.quick(name, device_type="cpu")


def test_an_unknown_suite_is_named():
    with pytest.raises(
        ValueError,
        match=r"suite is 'speed', expected one of forward, backward, varlen, masks, decode, prefill, serving, fp8",
    ):
        suites.cases("speed")


def test_every_contestant_runs_in_every_round():
    calls = []
    contestants = [Contestant(name, lambda name=name: calls.append(name)) for name in "abc"]
    effort = timing.Effort(seconds=0, min_rounds=40, max_rounds=90)
    timings = timing.time_device(contestants, CPU, effort)
    assert [taken.rounds for taken in timings] == [40, 40, 40]
    measured = "".join(calls[-3 * 40 :])
    assert {"".join(sorted(measured[i : i + 3])) for i in range(0, len(measured), 3)} == {"abc"}
    pairs = set(itertools.pairwise(measured))
    assert pairs == set(itertools.permutations("abc", 2)), "after each of the others, and never after itself"


def test_rounds_follow_the_effort():
    effort = timing.Effort(seconds=1.0, min_rounds=3, max_rounds=50)
    assert [effort.rounds(seconds) for seconds in (10.0, 0.1, 1e-6, 0.0)] == [3, 10, 50, 50]


def test_timing_is_a_median_with_its_spread():
    taken = timing.Timing.of([5.0, 1.0, 2.0, 3.0, 100.0, 4.0])
    assert taken.median == 3.5
    assert taken.low == 2.0 and taken.high == 5.0


def test_summary_is_the_geometric_mean_and_the_minimum():
    def cell(ours, theirs):
        entries = [run.Entry(OURS, timing.Timing(ours, ours, ours, 1))]
        return run.Cell(TINY[0], [*entries, run.Entry("SDPA", timing.Timing(theirs, theirs, theirs, 1))])

    refused = run.Cell(TINY[0], [run.Entry(OURS, refusal="no"), cell(1, 1).entries[1]])
    summary = run.summary([cell(1.0, 2.0), cell(2.0, 1.0), cell(1.0, 8.0), refused])
    assert summary == {"SDPA": {"geomean": pytest.approx(2.0), "min": 0.5, "cells": 3}}


def test_the_best_peer_is_chosen_cell_by_cell():
    cells = [
        timed_cell(flashtile=1.0, a=2.0, b=8.0),
        timed_cell(flashtile=1.0, a=3.0, b=0.5),
        timed_cell(flashtile=2.0, a=16.0, b=None),
        timed_cell(flashtile=None, a=1.0, b=1.0),
    ]
    assert run.against_the_best(cells) == {"geomean": pytest.approx(2.0), "min": 0.5, "cells": 3}
    assert run.against_the_best(cells[2:]) is None  # one peer is its own best
    assert run.against_the_best([]) is None


def test_the_forward_record_names_the_best_peer_and_the_part_of_a_matmul():
    def cell(seqlen, head_dim, tflops, **options):
        case = Case.square(1, seqlen, 1, head_dim, **options)
        time = case.flops / tflops / 1e12 if tflops else None
        return timed_cell(case, flashtile=time, a=1.0, b=2.0)

    cells = [
        cell(64, 128, 80),
        cell(128, 128, 50),
        cell(256, 128, 90, causal=True),
        cell(256, 128, 90, window=(3, None)),
        cell(128, 64, 40),
        cell(32, 256, 20),
        cell(128, 256, None),
    ]
    record = report.to_record("forward", {"matmul_tflops": 100.0}, cells)
    assert record["summary"][report.BEST_PEER] == record["summary"]["a"]
    assert record["summary"][report.OF_MATMUL] == {
        "S128": {"D64": pytest.approx(0.4), "D128": pytest.approx(0.5)},
        "S32": {"D256": pytest.approx(0.2)},
    }
    lines = report.summary_lines(record)
    assert [line.split(":")[0] for line in lines[:3]] == ["against a", "against b", "against the best of all peers"]
    assert lines[2].endswith(", 6 cells")
    assert lines[3:] == [
        "of an 8192³ matmul at S128 full: D64 0.40, D128 0.50",
        "of an 8192³ matmul at S32 full: D256 0.20",
    ]


def test_a_record_without_a_matmul_or_of_another_suite_says_nothing_of_it():
    cells = [timed_cell(Case.square(1, 8, 1, 8), flashtile=1.0, a=2.0, b=3.0)]
    assert set(report.to_record("forward", {}, cells)["summary"]) == {"a", "b", report.BEST_PEER}
    assert set(report.to_record("backward", {"matmul_tflops": 100.0}, cells)["summary"]) == {"a", "b"}


def test_measure_stores_what_it_shows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(timing, "CPU_EFFORT", EFFORT)
    monkeypatch.setenv("FLASHTILE_COMMIT", "0123456789abcdef")
    path = tmp_path / "results" / "cpu.json"
    assert command.measure("cpu", cases=TINY, json_path=path) == 0
    shown = capsys.readouterr().out
    record = json.loads(path.read_text())
    assert record["machine"]["commit"] == "0123456789abcdef"
    assert record["machine"]["torch"] == torch.__version__
    assert record["summary"]["SDPA"]["cells"] == 2
    for case, cell in zip(TINY, record["cells"], strict=True):
        assert cell["flops"] == case.flops
        assert cell["name"] == str(case) and case.shape_name in shown
        assert set(cell["results"]) == {OURS, "SDPA"}
        for result in cell["results"].values():
            assert 0 < result["low_us"] <= result["median_us"] <= result["high_us"]
        ratio = cell["results"]["SDPA"]["median_us"] / cell["results"][OURS]["median_us"]
        assert cell["ratios"]["SDPA"] == pytest.approx(ratio)


def test_what_is_wrong_is_not_timed_and_fails_the_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(timing, "CPU_EFFORT", EFFORT)
    path = tmp_path / "cpu.json"
    assert command.measure("cpu", cases=TINY, json_path=path, attention=scaled_wrongly) == 1
    assert "flashtile is WRONG on" in capsys.readouterr().out
    for cell in json.loads(path.read_text())["cells"]:
        assert "median_us" not in cell["results"][OURS]
        assert "median_us" in cell["results"]["SDPA"]
        assert cell["ratios"] == {}


def test_what_is_unsupported_is_said_and_not_timed(capsys, monkeypatch):
    monkeypatch.setattr(timing, "CPU_EFFORT", EFFORT)
    assert command.measure("cpu", cases=TINY[:1], attention=unsupported) == 0
    assert f"flashtile did not run {TINY[0]}: attention: no kernel serves this" in capsys.readouterr().out


def test_host_suite_measures_both_calls(capsys, monkeypatch):
    monkeypatch.setattr(timing, "HOST_EFFORT", EFFORT)
    works = (Work.FORWARD_WITH_GRAD, Work.COMPILED)
    assert command.measure("host", cases=[Case.square(1, 1, 2, 8, work=work) for work in works]) == 0
    printed = capsys.readouterr().out
    assert "µs of host time a call" in printed
    assert all(work.value in printed for work in works)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_gpu_suite_without_a_gpu_is_refused():
    with pytest.raises(Refusal, match="needs a CUDA device"):
        command.measure("forward")


def test_stored_runs_become_a_table_on_a_page(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "CPU_EFFORT", EFFORT)
    monkeypatch.setenv("FLASHTILE_COMMIT", "0123456789abcdef")
    stored, page = tmp_path / "cpu.json", tmp_path / "README.md"
    command.measure("cpu", cases=TINY, json_path=stored)
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    for _ in range(2):  # the second time replaces the first
        assert command.show_stored([stored], page) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n")
    assert "old" not in text and "0123456789ab" in text
    rows = [line for line in text.splitlines() if line.startswith("| B")]
    assert [row.split(" | ")[0] for row in rows] == [f"| {case.shape_name}" for case in TINY]


def test_a_page_without_marks_is_left_alone(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("no marks")
    with pytest.raises(ValueError, match=r"README\.md has no <!-- results:begin -->"):
        report.publish("text", page)
    assert page.read_text() == "no marks"


def test_a_record_of_another_format_is_refused(tmp_path):
    path = tmp_path / "old.json"
    path.write_text('{"format": 0}')
    with pytest.raises(ValueError, match=r"old\.json has format 0, expected 1"):
        report.read(path)


def test_a_run_of_the_ladder_is_refused(tmp_path):
    path = tmp_path / "ladder.json"
    path.write_text('{"format": 1, "suite": "ladder"}')
    with pytest.raises(ValueError, match=r"^bench: .*ladder\.json has suite 'ladder', expected one of forward, "):
        command.show_stored([path], None)


@pytest.mark.parametrize(
    "commit, shown",
    [
        ("", "an unknown commit"),
        ("73b236c", "73b236c"),
        ("0123456789abcdef", "0123456789ab"),
        ("0123456789abcdef-dirty", "0123456789ab-dirty"),
    ],
)
def test_a_page_says_at_which_commit(commit, shown):
    machine = {"device": "GPU", "date": "2026-11-23", "flashtile": "1", "torch": "2", "commit": commit}
    assert f"flashtile 1 at {shown}, torch 2" in report.source({"machine": machine, "suite": "forward"})


@pytest.mark.gpu
@pytest.mark.parametrize("suite", ["forward", "backward", "host"])
def test_gpu_suites(suite, tmp_path):
    path = tmp_path / "gpu.json"
    assert command.measure(suite, quick=True, json_path=path) == 0
    record = json.loads(path.read_text())
    assert record["machine"]["device"] == torch.cuda.get_device_name()
    assert record["machine"]["matmul_tflops"] > 0
    for cell in record["cells"]:
        timed = {name for name, result in cell["results"].items() if "median_us" in result}
        assert len(timed) >= 2, cell
        assert OURS in timed or "refusal" in cell["results"][OURS]
