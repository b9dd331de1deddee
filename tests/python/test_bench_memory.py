"""Suite memory and --profile: formulas by hand, what is stored and shown; a GPU's bytes against the formula."""

import os

import pytest
import torch
from test_bench import EFFORT, scaled_wrongly

import flashtile
from flashtile import _capability
from flashtile._refusal import Refusal
from flashtile.bench import command, memory, profile, report, run, suites, timing
from flashtile.bench.cases import Case, Work
from flashtile.bench.peers import OURS
from flashtile.cli import main

CPU = torch.device("cpu")
MIB = 2**20


def case_of(work, **options):
    return Case(2, 24, 40, 4, 2, 64, 32, dtype="bfloat16", causal=True, work=work, **options)


@pytest.mark.parametrize("hopper", [False, True])
def test_the_formula_by_hand(hopper, monkeypatch):
    monkeypatch.setattr(_capability, "of_device", lambda: 90 if hopper else 80)
    rows, out = 2 * 4 * 24, 2 * 4 * 24 * 32 * 2
    gradients = 2 * (4 * 24 * 64 + 2 * 40 * 64 + 2 * 40 * 32) * 2
    assert memory.formula_bytes(case_of(Work.FORWARD)) == out
    assert memory.formula_bytes(case_of(Work.FORWARD_WITH_GRAD)) == out + 8 * rows
    assert memory.formula_bytes(case_of(Work.BACKWARD)) == gradients + 4 * (64 + 4) * rows
    wide = Case.square(1, 10, 3, 256, work=Work.BACKWARD)
    assert memory.formula_bytes(wide) == 3 * 30 * 256 * 2 + 30 * (16 if hopper else 4 * 260)


def fake_peaks(monkeypatch, **bytes_of):
    """The contestants really run; their bytes are made up."""

    def peak_bytes(contestant, device):
        contestant.call()
        return bytes_of[contestant.name]

    monkeypatch.setattr(memory, "peak_bytes", peak_bytes)


def test_bytes_take_the_place_of_times(monkeypatch):
    fake_peaks(monkeypatch, flashtile=MIB, SDPA=3 * MIB)
    cases = [Case.square(1, 32, 2, 16, dtype="float32", causal=True, work=work) for work in suites.MEMORY]
    cells = list(run.run_memory_cases(cases, CPU, flashtile.attention))
    record = report.to_record("memory", {}, cells)
    for case, cell in zip(cases, record["cells"], strict=True):
        assert {name: result["peak_bytes"] for name, result in cell["results"].items()} == {
            OURS: MIB,
            "SDPA": 3 * MIB,
            memory.FORMULA: memory.formula_bytes(case),
        }
        assert cell["ratios"]["SDPA"] == 3.0
    grid = report.Grid(record)
    assert "MiB beyond the inputs" in grid.title and "spread" not in grid.title
    assert grid.rows[0][grid.words : grid.words + 2] == ["1.0", "3.0"]
    assert report.peer_names(record) == ["SDPA"]


def test_what_is_recorded_by_autograd_is_measured_so(monkeypatch):
    recorded = []

    def attention(q, k, v, **options):
        recorded.append(torch.is_grad_enabled() and q.requires_grad)
        return flashtile.attention(q, k, v, **options)

    fake_peaks(monkeypatch, flashtile=1, SDPA=1)
    for work, expected in ((Work.FORWARD, False), (Work.FORWARD_WITH_GRAD, True)):
        list(run.run_memory_cases([Case.square(1, 8, 2, 16, dtype="float32", work=work)], CPU, attention))
        assert recorded[-1] is expected


def test_the_suite_grows_one_sequence():
    cases = suites.cases("memory")
    assert len(cases) == len(set(cases)) == 27
    assert {case.batch for case in cases} == {1} and {case.work for case in cases} == set(suites.MEMORY)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_it_is_refused():
    with pytest.raises(Refusal, match="suite memory needs a CUDA device"):
        command.measure("memory")


def test_profile_prints_a_table_for_each_case_and_times_nothing(capsys, monkeypatch):
    for name in profile.OUTSIDE:
        monkeypatch.delenv(name, raising=False)
    cases = [Case.square(1, 32, 2, 16, dtype="float32", work=work) for work in suites.TRAINING]
    assert command.measure("cpu", cases=cases, profile=True) == 0
    shown = capsys.readouterr().out
    for case in cases:
        assert str(case) in shown and f"{OURS}: {case}" in shown
    assert shown.count("Self CPU time total") == 2 and "nsys profile" in shown and "GFLOP" not in shown


def test_profile_leaves_the_interface_to_a_profiler_from_outside(capsys, monkeypatch):
    monkeypatch.setitem(os.environ, profile.OUTSIDE[0], "1")
    case = Case.square(1, 32, 2, 16, dtype="float32")
    assert command.measure("cpu", cases=[case], profile=True) == 0
    assert "CPU time total" not in capsys.readouterr().out


def test_profile_still_checks(capsys):
    case = Case.square(1, 32, 2, 16, dtype="float32")
    assert command.measure("cpu", cases=[case], profile=True, attention=scaled_wrongly) == 1
    assert "flashtile is WRONG on" in capsys.readouterr().out


@pytest.mark.parametrize("more", [["--json", "x.json"], ["--plots", "x"], ["--suite", "host"]])
def test_profile_refuses_what_asks_for_times(more, capsys):
    assert main(["bench", "--profile", *more]) == 2
    assert "--profile times nothing" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.usefixtures("much_memory")  # the peers' scores
def test_flashtile_takes_what_the_formula_says(tmp_path):
    """Up to the rounding of rows to tiles and of allocations to 512 bytes; scores alone would take more. There are
    tiles enough for a GPU: of fewer, thread blocks share some, and leave partial results."""
    path = tmp_path / "gpu.json"
    cases = [
        Case.square(4, 2048, 16, head_dim, causal=True, work=work)
        for work in suites.MEMORY
        for head_dim in (64, 128, 256)
    ]
    assert command.measure("memory", cases=cases, json_path=path) == 0
    for cell in report.read(path)["cells"]:
        found, formula = (cell["results"][name]["peak_bytes"] for name in (OURS, memory.FORMULA))
        assert 0.95 * formula <= found <= 1.05 * formula + 2**16, cell["name"]


@pytest.mark.gpu
def test_profile_on_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(timing, "QUICK_EFFORT", EFFORT)
    assert command.measure("forward", quick=True, profile=True) == 0
    assert "Self CUDA time total" in capsys.readouterr().out
