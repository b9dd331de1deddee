"""`flashtile ladder`: its table, and what it reads from ncu."""

import dataclasses
import io
import math
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from flashtile._refusal import Refusal
from flashtile.bench import machine, report
from flashtile.bench.cases import Case
from flashtile.bench.run import Entry
from flashtile.reference import RUNGS, command, flash2, record, rung

CPU = torch.device("cpu")
SMALL = Case(1, 40, 60, 2, 1, 16, 16, dtype="float32", causal=True)
PAGE = Path(__file__).parents[2] / "docs" / "ladder.md"
STORED = sorted((PAGE.parents[1] / "benchmarks" / "results").glob("h200-ladder-*.json"))


@pytest.fixture
def shown(monkeypatch):
    text = io.StringIO()
    monkeypatch.setattr(command, "wide_console", lambda: Console(file=text, width=200))
    return text


def test_the_table_has_every_rung(shown):
    assert command.show(SMALL, CPU, quick=True) == 0
    lines = shown.getvalue().splitlines()
    for each in RUNGS:
        (line,) = [line for line in lines if line.split()[:1] == [str(each.number)]]
        if reason := each.available(CPU):
            assert "—" in line and f"{each.key} did not run {SMALL}: {reason}" in lines
        else:
            assert f" {each.bytes_moved(SMALL) / 1e6:,.1f} " in line and "—" not in line


def test_the_table_fits_a_terminal_of_100_columns(capsys):
    """Of a run whose numbers are as long as they get."""
    rungs = [dataclasses.replace(each, bytes_moved=lambda case: 10**10 - 1) for each in RUNGS]
    run = record.to_record({}, SMALL, {each.key: Entry(each.key) for each in rungs}, rungs)
    (cell,) = run["cells"]
    cell["bytes"] = 1e5
    for result in cell["results"].values():
        result |= dict(median_us=999.99e3, low_us=9.9e2, high_us=1e6, tflops=1.23e-5)
        result["errors"]["out"] = {"found": 1.2e-7, "allowed": 3.4e-7, "ok": True}
    Console(width=200).print(record.table(run))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > len(cell["results"]) and max(map(len, map(str.rstrip, lines))) <= 100
    assert all("…" not in line for line in lines)


def test_what_is_too_large_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setattr(machine, "free_memory", lambda device: 2 * SMALL.bytes - 1)
    expected = re.escape(f"ladder: {SMALL} takes at least")
    with pytest.raises(Refusal, match=expected):
        command.show(SMALL, CPU, quick=True)
    with pytest.raises(Refusal, match=expected):
        command.once(["standard"], SMALL, CPU)


def test_a_wrong_rung_is_not_timed(shown):
    wrong = dataclasses.replace(
        rung("flash2"), attention=lambda q, k, v, causal: flash2.attention(q, k, v, causal=False)
    )
    assert command.show(SMALL, CPU, quick=True, rungs=[wrong]) == 1
    assert re.search(r"3 +FlashAttention-2, PyTorch +— +—.*WRONG", shown.getvalue())
    assert f"flash2 is WRONG on {SMALL}: out is off by" in shown.getvalue()


def test_fp8_is_judged_by_attention_of_its_inputs_and_of_its_numbers(shown, tmp_path):
    """And not timed if it is near neither, or near the inputs alone by the largest error, and not by a tile's."""
    right = rung("fp8")

    def found_with(factor, case=SMALL):
        wrong = dataclasses.replace(right, of_numbers=lambda *x, **options: factor * right.of_numbers(*x, **options))
        status = command.show(case, CPU, quick=True, rungs=[wrong], json_path=tmp_path / "run.json")
        (cell,) = report.read(tmp_path / "run.json")["cells"]
        return status, cell["results"]["fp8"]

    status, found = found_with(1)
    of_inputs, of_tile = found["errors"]["out"], found["errors"]["a tile of 128 rows of out"]
    assert status == 0 and "median_us" in found
    assert 1e-3 < of_inputs["found"] < of_inputs["allowed"] < 1 and of_tile["found"] < of_tile["allowed"] == 1 / 16
    assert re.search(rf"10 +flashtile, fp8 +[\d.]+ (ms|µs) .* {of_inputs['found']:.1e} +{of_inputs['allowed']:.1e}\n",
                     shown.getvalue())  # fmt: skip
    for factor, wrong in ((1.08, {"a tile of 128 rows of out"}), (2, {"out", "a tile of 128 rows of out"})):
        status, found = found_with(factor)
        assert status == 1 and "median_us" not in found
        assert {name for name, of in found["errors"].items() if not of["ok"]} == wrong
        assert re.search(r"10 +flashtile, fp8 +— +—.* WRONG +\S+\n", shown.getvalue())
    assert f"fp8 is WRONG on {SMALL}: a tile of 128 rows of out is off by" in shown.getvalue()
    for sizes in ((1, 300, 60, 2, 1), (1, 1, 60, 2, 2), (2, 1, 1, 1, 1)):  # tiles that see nothing, a row, a key
        assert found_with(1, Case(*sizes, 16, 16, dtype="float32", causal=True))[0] == 0, sizes


def test_fp8_says_which_case_it_does_not_run(shown):
    case = Case(1, 40, 60, 2, 1, 40, 40, dtype="float32")
    assert command.show(case, CPU, quick=True, rungs=[rung("fp8"), rung("standard")]) == 0
    assert f"fp8 did not run {case}: has D = 40 and D_v = 40, expected multiples of 16" in shown.getvalue()
    assert command.once(["fp8", "standard"], case, CPU) == 0


def test_rounding_is_not_timed(shown, monkeypatch):
    """Once for who is timed, and once for who judges."""
    rounded, timed = [], []
    right = rung("fp8")
    counting = dataclasses.replace(
        right,
        rounding=lambda *inputs: rounded.append(len(timed)) or right.rounding(*inputs),
        of_numbers=lambda *x, **options: timed.append(1) or right.of_numbers(*x, **options),
    )
    assert command.show(SMALL, CPU, quick=True, rungs=[counting]) == 0
    assert rounded == [0, 0] and len(timed) > 3
    rounded.clear()
    monkeypatch.setattr(command, "rung", lambda key: counting)
    assert command.once(["fp8"], SMALL, CPU) == 0
    assert rounded == [len(timed) - 2]


def test_a_rung_that_refuses_a_case_says_so(shown):
    def refuse(q, k, v, causal):
        raise NotImplementedError("flash2: not this one, but 'flashtile[triton]'")

    refusing = dataclasses.replace(rung("flash2"), attention=refuse)
    assert command.show(SMALL, CPU, quick=True, rungs=[refusing]) == 0
    assert "flash2: not this one, but 'flashtile[triton]'" in shown.getvalue()


def test_measuring_needs_a_gpu():
    with pytest.raises(Refusal, match="--measure needs an NVIDIA GPU"):
        command.show(SMALL, CPU, measure=True)


COUNTED = [rung(key) for key in ("standard", "flash1", "flash2")]
DRAM, L2 = command.METRICS


def ncu_output(ran, values):
    """What ncu and `once` print when `ran` ran, and a range has each of `values`, (DRAM, L2), as ncu writes them."""
    lines = ["==PROF== Connected to process 7 (/usr/bin/python3)"]
    for i, each in enumerate(ran):
        reported = f"{each.key} ran once: {each.bytes_moved(SMALL)} bytes by formula"
        lines += [f'==PROF== Profiling "range" - {i}: Application replay pass 1', reported]
    lines.append("==PROF== Disconnected from process 7")
    if values:
        lines.append('"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"')
    for i, found in enumerate(values):
        for metric, value in zip((DRAM, L2), found, strict=True):
            lines.append(f'"{i}","7","range","Command line profiler metrics","{metric}","byte","{value}"')
    return "\n".join(lines) + "\n"


def test_every_rung_has_the_counts_of_its_range():
    output = ncu_output(COUNTED, [("1,024", "2,048"), ("12", "n/a"), ("3.5", "4")])
    assert command.counts_in(output, COUNTED) == {
        "standard": {DRAM: 1024, L2: 2048},
        "flash1": {DRAM: 12},
        "flash2": {DRAM: 3.5, L2: 4},
    }


def test_ranges_go_by_their_numbers():
    many = [dataclasses.replace(COUNTED[0], key=f"rung{i}") for i in range(12)]
    output = ncu_output(many, [(str(i), "0") for i in range(12)])
    header = output.index('"ID"')
    table = output[header:].splitlines()
    backwards = output[:header] + "\n".join([table[0], *table[:0:-1]])
    for text in (output, backwards):
        counts = command.counts_in(text, many)
        assert [counts[each.key][DRAM] for each in many] == list(range(12))


def test_a_rung_that_did_not_run_has_no_range():
    output = ncu_output([COUNTED[0], COUNTED[2]], [("1", "2"), ("3", "4")])
    assert command.counts_in(output, COUNTED) == {"standard": {DRAM: 1, L2: 2}, "flash2": {DRAM: 3, L2: 4}}


NO_RIGHTS = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters"


@pytest.mark.parametrize(
    "output, reason",
    [
        ("", "0 rungs ran, and ncu counted 0 ranges"),
        (ncu_output(COUNTED, []), "3 rungs ran, and ncu counted 0 ranges"),
        (ncu_output(COUNTED, [("1", "2")] * 2), "3 rungs ran, and ncu counted 2 ranges"),
        (ncu_output(COUNTED[:1], [("1", "2")] * 2), "1 rungs ran, and ncu counted 2 ranges"),
        (NO_RIGHTS + "\n" + ncu_output(COUNTED, []), NO_RIGHTS),
    ],
)
def test_ranges_that_cannot_be_told_apart(output, reason):
    with pytest.raises(ValueError, match=f"^{reason}"):
        command.counts_in(output, COUNTED)


@pytest.fixture
def ncu(monkeypatch):
    """Makes a program of Python stand in for ncu, and this CPU for a GPU."""
    entries, describe = command._entries, machine.describe
    monkeypatch.setattr(command, "_entries", lambda case, device, quick, rungs: entries(case, CPU, quick, rungs))
    monkeypatch.setattr(machine, "describe", lambda device: describe(CPU))
    monkeypatch.setattr(machine, "gpu_readings", lambda device: {})
    monkeypatch.setattr(machine, "free_memory", lambda device: math.inf)
    return lambda program: monkeypatch.setattr(command, "NCU", (sys.executable, "-c", program))


def measured(rungs, **options):
    return command.show(SMALL, torch.device("cuda"), quick=True, measure=True, rungs=rungs, **options)


def test_ncu_and_what_it_runs_are_stopped(ncu, monkeypatch, capsys):
    """What ncu runs holds the pipe too: were it not stopped, its end would have to be waited for."""
    sleeping = "import time; print('begun', flush=True); time.sleep(10**6)"
    ncu(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleeping!r}])")
    monkeypatch.setattr(command, "NCU_SECONDS", 2)
    assert command.count(COUNTED, SMALL) == {}
    said = capsys.readouterr().err
    assert "--measure: ==ERROR== ncu was stopped after 2 seconds" in said
    assert "ncu's last lines:" in said and "begun" in said


def test_where_ncu_fails_the_times_are_shown_and_its_error(ncu, shown, capsys):
    ncu(f"import sys; sys.exit({NO_RIGHTS!r})")
    assert measured(COUNTED) == 1
    assert re.search(r"3 +FlashAttention-2, PyTorch +[\d.]+ (ms|µs)", shown.getvalue())
    assert NO_RIGHTS in capsys.readouterr().err


def test_what_ncu_counts_is_shown(ncu, shown, capsys):
    ncu(f"print({ncu_output(COUNTED, [('1,500,000', '2,500,000')] * 3)!r})")
    assert measured(COUNTED) == 0
    assert re.search(r"3 +FlashAttention-2, PyTorch +[\d.]+ MB +1\.5 MB +2\.5 MB", shown.getvalue())
    assert capsys.readouterr().err == ""


def test_a_rung_that_ncu_misses_does_not_spoil_the_others(ncu, shown, capsys, tmp_path):
    ncu(f"print({ncu_output(COUNTED[1:], [('1,500,000', '2,500,000')] * 2)!r}); print('left out')")
    assert measured(COUNTED, json_path=tmp_path / "run.json") == 1
    assert re.search(r"1 +standard attention +[\d.]+ MB +— +—", shown.getvalue())
    assert re.search(r"3 +FlashAttention-2, PyTorch +[\d.]+ MB +1\.5 MB +2\.5 MB", shown.getvalue())
    assert "left out" in capsys.readouterr().err
    assert command.show_stored(tmp_path / "run.json", None) == 0
    table = rows(capsys.readouterr().out)
    assert table[0][-2:] == ["HBM carried", "L2 was asked for"]
    assert [row[-2:] for row in table[2:]] == [["—", "—"], ["1.5 MB", "2.5 MB"], ["1.5 MB", "2.5 MB"]]


def rows(text):
    """The cells of a Markdown table: its header, the ruler, its rows."""
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]


def test_a_stored_run_has_all_that_is_printed(shown, tmp_path):
    path = tmp_path / "results" / "run.json"
    assert command.show(SMALL, CPU, quick=True, json_path=path) == 0
    run = report.read(path)
    assert run["suite"] == "ladder" and run["machine"]["device"] == machine.describe(CPU)["device"]
    (cell,) = run["cells"]
    assert Case(**cell["case"] | {"work": SMALL.work}) == SMALL and cell["bytes"] == SMALL.bytes
    assert list(cell["results"]) == [each.key for each in RUNGS]
    for each in RUNGS:
        found = cell["results"][each.key]
        assert (found["number"], found["title"]) == (each.number, each.title)
        if reason := each.available(CPU):
            assert found["refusal"] == reason and "median_us" not in found
        else:
            assert 0 < found["low_us"] <= found["median_us"] <= found["high_us"]
            assert found["formula_bytes"] == each.bytes_moved(SMALL)
            assert 0 < found["errors"]["out"]["found"] <= found["errors"]["out"]["allowed"]


def test_a_stored_run_becomes_the_table_of_the_page(shown, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHTILE_COMMIT", "0123456789abcdef")
    path, page = tmp_path / "run.json", tmp_path / "ladder.md"
    refusing = dataclasses.replace(COUNTED[2], available=lambda device: "needs more")
    command.show(SMALL, CPU, quick=True, json_path=path, rungs=[*COUNTED[:2], refusing])
    run = report.read(path)
    results = run["cells"][0]["results"]
    for key, error in {"standard": 0.00044, "flash1": 0.011}.items():
        results[key]["errors"]["out"] |= dict(found=error, ok=True)
    results["standard"] |= dict(median_us=1234567.0, low_us=1234567.0, high_us=1234567.0, tflops=0.7654)
    results["flash1"] |= dict(median_us=20.0, low_us=19.0, high_us=22.0, tflops=591.3, formula_bytes=2215e6)
    report.write(path, run)
    shutil.copy(PAGE, page)
    for _ in range(2):  # the second time replaces the first
        assert command.show_stored(path, page) == 0
    (before, _, after), (kept_before, text, kept_after) = (
        re.split(f"{report.BEGIN}\n(.*)\n{report.END}", each.read_text(), flags=re.DOTALL) for each in (PAGE, page)
    )
    assert (kept_before, kept_after) == (before, after)
    assert text.startswith(f"{SMALL}; the least is 0.0 MB. Measured on ") and "at 0123456789ab, torch" in text
    assert rows(text) == [
        ["rung", "time", "TFLOP/s", "error", "bytes by formula"],
        ["---|---|---:|---:|---:|---:"],
        ["1", "standard attention", "1,234.57 ms ±0%", "0.765", "4.4e-04", "0.1 MB"],
        ["2", "FlashAttention-1, PyTorch", "20.0 µs ±8%", "591", "1.1e-02", "2,215.0 MB"],
    ]
    assert text.endswith(f"\n- flash2 did not run {SMALL}: needs more")


def test_a_run_of_the_benchmark_is_refused(tmp_path):
    path = tmp_path / "cpu.json"
    report.write(path, report.to_record("cpu", {}, []))
    with pytest.raises(ValueError, match=r"^ladder: .*cpu\.json has suite 'cpu', expected 'ladder'"):
        command.show_stored(path, None)


@pytest.mark.skipif(not STORED, reason="no run of an H200 is stored")
def test_the_page_shows_the_newest_stored_run(tmp_path):
    page = tmp_path / "ladder.md"
    shutil.copy(PAGE, page)
    command.show_stored(STORED[-1], page)
    assert page.read_text() == PAGE.read_text()


def test_once_runs_each_rung_and_leaves_out_what_fails(capsys):
    assert command.once(["flash2", "sm80", "standard"], SMALL, CPU) == 0
    said = capsys.readouterr()
    assert [line.split()[0] for line in said.out.splitlines()] == ["flash2", "standard"]
    assert "leaves out 'sm80': sm80: needs an NVIDIA GPU" in said.err
    assert command.once(["sm80"], SMALL, CPU) == 2
    with pytest.raises(ValueError, match="rung is 'flash3'"):
        command.once(["flash2", "flash3"], SMALL, CPU)


def test_what_once_prints_is_what_is_looked_for(capsys):
    command.once([each.key for each in COUNTED], SMALL, CPU)
    assert capsys.readouterr().out.splitlines() == [
        line for line in ncu_output(COUNTED, []).splitlines() if "ran once" in line
    ]


def test_the_command_for_ncu_asks_for_the_same_case(monkeypatch):
    from flashtile import cli

    seen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "once", lambda *asked: seen.append(asked) or 0)
    words = command.ncu_command(["flash1", "flash-decoding++"], SMALL)
    assert words[:3] == ["ncu", "--replay-mode", "app-range"]
    assert cli.main(words[words.index("ladder") :]) == 0
    assert seen == [(["flash1", "flash-decoding++"], SMALL, torch.device("cuda"))]
