"""The benchmark of cases drawn at random: the space, the run, the graphs, the summary, the worst cells."""

import contextlib
import dataclasses
import json
import types

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_bench import EFFORT

import flashtile
from flashtile._refusal import Refusal
from flashtile.bench import command, drawn, further, graphs, plots, report, rivals, run, suites, timing
from flashtile.bench.cases import TRAINING, Case, Work, make_inputs
from flashtile.bench.oracle import attention_sdpa
from flashtile.bench.peers import OURS, PLAIN, Contestant, Peer, contestant

FIRST = [
    "B1 S5728 H40/5 D88 full bf16 forward",
    "B1 S5728 H40/5 D88 full bf16 backward",
    "B64 S431 H52/13 D104 full bf16 forward",
]
MACHINE = {"device": "a GPU", "date": "2026-01-02", "flashtile": "0", "commit": "", "torch": "0"}
PLAN = """\
flashtile forward plan
  problem   B=1
  kernel    sm90_first
  why       the first of all

flashtile backward plan
  kernel    sm90_second
  why       the second
"""


def test_a_seed_has_the_same_cases_everywhere():
    assert suites.cases("random", seed=7) == suites.cases("random", seed=7) != suites.cases("random", seed=8)
    assert suites.cases("random") == suites.cases("random", seed=0, dtype="float16", device_type="cpu")
    assert [str(case) for case in suites.cases("random", seed=0)[:3]] == FIRST


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31))
@example(57)  # with as many keys as queries in a case of few keys
def test_the_space_has_its_bounds(seed):
    cases = drawn.cases(seed)
    kinds = {"ragged": 0, "cross": 0, "chunk": 0, "self": 0, "prefill": 0, "decode": 0}
    for case in cases:
        kind = kind_of(case)
        kinds[kind] += case.work is not Work.BACKWARD
        longest = max(case.lengths or [max(case.seqlen_q, case.seqlen_k)])
        assert longest <= 16384 and (kind == "ragged" or longest >= 128)
        tokens = (1 if case.lengths else case.batch) * max(case.seqlen_q, case.seqlen_k)
        assert 1024 <= tokens <= 49152 and 1 <= case.batch <= 64
        assert 1 <= case.heads_k <= case.heads_q <= 64 and case.heads_q % case.heads_k == 0
        assert case.heads_k == 1 or case.heads_q // case.heads_k in (1, 2, 4, 7, 8)
        assert case.head_dim == case.head_dim_v and case.head_dim in drawn.HEAD_DIMS
        assert dataclasses.replace(case, work=Work.FORWARD).flops <= drawn.MOST_FLOPS
        one_head = case.heads_q // case.heads_k * (longest**2 if case.lengths else case.seqlen_q * case.seqlen_k)
        assert one_head <= drawn.MOST_SCORES
        given = [case.window, case.softcap, case.alibi, case.sinks, case.dropout_p]
        assert sum(map(bool, given)) <= (kind in ("self", "ragged"))
        assert case.window is None or (case.causal and 128 <= case.window[0] < longest)
        assert kind != "ragged" or (len(case.lengths) <= 64 and min(case.lengths) >= 16)
        assert kind != "cross" or (1 <= case.seqlen_k <= 256 and not case.causal)
        assert kind != "chunk" or (16 <= case.seqlen_q <= case.seqlen_k // 2 and case.causal)
        assert (case.page_size == 16) == case.over_a_cache
    alike = kinds["self"] - drawn.KINDS["self"]  # few keys that are as many as the queries, by chance
    assert 0 <= alike <= drawn.KINDS["cross"]
    assert kinds | {"self": kinds["self"] - alike, "cross": kinds["cross"] + alike} == drawn.KINDS


def kind_of(case):
    if case.over_a_cache:
        return case.work.value
    if case.lengths is not None:
        return "ragged"
    if case.seqlen_q == case.seqlen_k:
        return "self"
    return "chunk" if case.causal else "cross"


def test_the_space_is_visited_by_its_weights():
    cases = [case for seed in range(20) for case in drawn.cases(seed) if case.work is not Work.BACKWARD]
    alone = [case for case in cases if kind_of(case) == "self"]

    def share(of, holds):
        return sum(map(holds, of)) / len(of)

    assert share(cases, lambda case: case.dtype == "bfloat16") == pytest.approx(0.8, abs=0.05)
    assert share(alone, lambda case: case.seqlen_q % 16 == 0) == pytest.approx(0.5, abs=0.07)
    assert share(alone, lambda case: case.plain() != case or case.window is not None) == pytest.approx(0.33, abs=0.07)
    assert {case.head_dim for case in cases} == set(drawn.HEAD_DIMS)
    assert {case.heads_q // case.heads_k for case in cases} >= {1, 2, 4, 7, 8}
    assert any(case.seqlen_k == 1 for case in cases)


def test_a_run_has_about_ninety_forwards_and_as_many_backwards_as_have_gradients():
    cases, twice = suites.cases("random", seed=1), suites.cases("random", seed=1, full=True)
    forward = [case for case in cases if case.work is not Work.BACKWARD]
    assert len(forward) == 90 and 70 <= len(cases) - len(forward) <= 75
    assert len([case for case in twice if case.work is not Work.BACKWARD]) == 180
    for case in cases:
        has_backward = not case.over_a_cache and case.seqlen_k > 1
        assert (dataclasses.replace(case, work=Work.BACKWARD) in cases) == has_backward


def test_quick_has_every_option_and_kind(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(timing, "QUICK_EFFORT", EFFORT)
    stored, page = tmp_path / "run.json", tmp_path / "page.md"
    assert command.measure("random", quick=True, seed=3, json_path=stored) == 0
    shown, record = capsys.readouterr().out, report.read(stored)
    cases = suites.quick("random")
    assert {kind_of(case) for case in cases} == set(drawn.KINDS)
    for name, holds in (("dense", False), ("ragged", True)):
        of_kind = [case.mask_name for case in cases if (case.lengths is not None) is holds]
        for option in ("window", "softcap", "ALiBi", "sinks", "dropout"):
            assert sum(option in mask for mask in of_kind) == 2, (name, option)
    assert record["seed"] == 3 and "suite random, seed 3, the worst 10 of 30 cells" in shown
    for case, cell in zip(cases, record["cells"], strict=True):
        assert cell["name"] == str(case)
        assert "median_us" in cell["results"][OURS] and all(of["ok"] for of in cell["results"][OURS]["errors"].values())
        assert (PLAIN in cell["results"]) == (case != case.plain())
        assert cell["plan"]["kernel"].startswith("cpu_bf16") and cell["plan"]["why"]
        assert cell["graph_ratios"] == {}  # there is no GPU to have graphs
    assert set(record["summary"]["backward"]["eager"]["plain"]) == {"softcap", "ALiBi", "sinks", "dropout"}
    page.write_text(f"{report.BEGIN}{report.END}")
    assert command.show_stored([stored], page) == 0
    rows = [line for line in page.read_text().splitlines() if line.startswith("| B")]
    assert len(rows) == 10
    assert command.show_stored([stored], None, brief=True) == 0
    assert "| random |" in capsys.readouterr().out


def test_what_is_wrong_fails_the_run(capsys, monkeypatch):
    monkeypatch.setattr(timing, "CPU_EFFORT", EFFORT)

    def wrong(q, k, v, *, dropout_p=0.0, **arguments):
        return 1.1 * rivals.attention_of_any(q, k, v, **arguments)

    assert command.measure("random", cases=[Case.square(1, 32, 2, 16, softcap=30.0)], attention=wrong) == 1
    said = capsys.readouterr().out
    assert f"{OURS} is WRONG on" in said and f"{PLAIN} is WRONG on" in said


def taken(seconds):
    return timing.Timing(seconds, seconds, seconds, 1)


def cell_of(case, eager, graph=None, plan=PLAN):
    entries = [
        run.Entry(name, taken(seconds), graph=taken(graph[name]) if graph and name in graph else None)
        for name, seconds in eager.items()
    ]
    return run.Cell(case, entries, plan)


def test_the_summary_counts_cells_below_the_best_peer_and_what_options_cost():
    forward, backward = (Case.square(1, 64, 2, 64, work=work) for work in TRAINING)
    capped = dataclasses.replace(forward, softcap=30.0)
    cells = [
        cell_of(forward, {OURS: 1.0, "A": 2.0, "B": 8.0}, {OURS: 1.0, "A": 1.0, "B": 3.0}),
        cell_of(forward, {OURS: 1.0, "A": 0.95}),
        cell_of(forward, {OURS: 2.0, "A": 16.0, "B": 1.0}, {OURS: 2.0, "B": 1.0}),
        cell_of(capped, {OURS: 3.0, PLAIN: 2.0, "A": 12.0}, {OURS: 3.0, PLAIN: 1.5}),
        cell_of(forward, {"A": 1.0}),
        cell_of(capped, {OURS: 3.0, PLAIN: 1.0}),
        cell_of(Case.decode(1, 64, 2, 2, 64, page_size=16), {OURS: 1.0, "A": 4.0}),
        cell_of(backward, {OURS: 1.0, "A": 1.0}),
    ]
    record = json.loads(json.dumps(report.to_record("random", MACHINE, cells) | {"seed": 5}))
    summary = record["summary"]
    assert summary["forward"]["eager"] == {
        "geomean": pytest.approx((2 * 0.95 * 0.5 * 4 * 4) ** 0.2),
        "min": 0.5,
        "cells": 5,
        "below 1.0": pytest.approx(0.4),
        "below 0.9": pytest.approx(0.2),
        "plain": {"softcap": {"geomean": pytest.approx((1.5 * 3) ** 0.5), "max": 3.0, "cells": 2}},
    }
    assert (summary["forward"]["graph"]["geomean"], summary["forward"]["graph"]["cells"]) == (
        pytest.approx(0.5**0.5),
        2,
    )
    assert summary["forward"]["graph"]["plain"]["softcap"]["max"] == 2.0
    assert set(summary["backward"]) == {"eager"}
    assert record["cells"][0]["results"]["A"]["graph"]["median_us"] == 1e6
    assert record["cells"][7]["plan"] == {"kernel": "sm90_second", "why": "the second"}
    lines = report.summary_lines(record)
    assert lines[0] == (
        "forward, eager: against the best peer geometric mean 1.72×, 40% of 5 cells below 1.0, "
        "20% of 5 cells below 0.9, least 0.50×"
    )
    assert lines[1] == (
        "forward, eager: with softcap 2.12× the plain kernel's time (geometric mean), 3.00× at most, 2 cells"
    )
    grid = report.Grid(record)
    assert grid.title == "suite random, seed 5, the worst 6 of 8 cells"
    assert [row[1:] for row in grid.rows[:3]] == [
        ["B", "sm90_first", "the first of all", "2000000", "0.50×", "0.50×"],
        ["A", "sm90_first", "the first of all", "1000000", "0.95×", "—"],
        ["A", "sm90_second", "the second", "1000000", "1.00×", "—"],
    ]
    assert "seed 5" in report.markdown(record) and report.table(record)


def test_a_refusal_to_plan_is_told():
    refused = cell_of(Case.square(1, 8, 1, 8), {OURS: 1.0, "A": 2.0}, plan="attention: no kernel\nnearest")
    record = report.to_record("random", MACHINE, [refused])
    assert record["cells"][0]["plan"] == {"why": "attention: no kernel"}
    assert report.Grid(record).rows[0][2:4] == ["—", "attention: no kernel"]


def test_what_could_not_be_captured_is_told():
    cells = [cell_of(Case.square(1, 8, 1, 8), {OURS: 1.0, "A": 2.0}) for _ in range(2)]
    for cell in cells:
        cell.entries[1] = dataclasses.replace(cell.entries[1], graph_refusal="RuntimeError: it waits")
    record = report.to_record("random", MACHINE, cells)
    assert report.summary_lines(record)[-1] == "A could not be captured in 2 cells: RuntimeError: it waits"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_there_is_the_quick_form_alone():
    with pytest.raises(Refusal, match="suite random needs a CUDA device, and torch sees none; try --quick"):
        command.measure("random")


def test_a_seed_is_that_of_suite_random():
    with pytest.raises(Refusal, match="--seed is given with suite 'forward', expected suite 'random'"):
        command.measure("forward", seed=0)


def test_there_is_no_picture(tmp_path):
    with pytest.raises(Refusal, match="--plots is given with suite 'random', expected another"):
        command.measure("random", quick=True, plots_folder=tmp_path)
    record, path = report.to_record("random", MACHINE, []), tmp_path / "run.json"
    report.write(path, record)
    with pytest.raises(Refusal, match="--plots is given with suite 'random', expected another"):
        command.show_stored([path], None, plots_folder=tmp_path)
    with pytest.raises(Refusal):
        plots.draw(record, tmp_path / "random.svg")
    assert list(tmp_path.iterdir()) == [path]


def test_names_of_columns_are_taken():
    for name in (PLAIN, rivals.CUDNN_HEADS_FIRST):
        with pytest.raises(Refusal, match="expected a name that is not taken"):
            further.further_peers("random", [f"{name}=math:sqrt"])
    assert [peer.name for peer in further.further_peers("random", ["A=math:sqrt"], flex=True)] == ["Flex", "A"]


def test_a_contestant_that_is_not_captured_says_why(monkeypatch):
    class Graph:
        def replay(self):
            return "replayed"

    fakes = types.SimpleNamespace(
        CUDAGraph=Graph, graph=lambda graph, stream: contextlib.nullcontext(), current_stream=lambda: "a stream"
    )
    monkeypatch.setattr(graphs.torch, "cuda", fakes)

    def waits():
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    case = Case.square(1, 16, 2, 16)
    replays, refusals = graphs.captured([Contestant("A", lambda: None), Contestant("B", waits)], case)
    assert [(replay.name, replay.call()) for replay in replays] == [("A", "replayed")]
    assert refusals == {"B": "RuntimeError: operation not permitted when stream is capturing"}

    # A backward of PyTorch's with dropout may not even be tried: its replay would be an illegal access.
    case = Case.square(1, 16, 2, 16, dropout_p=0.1, work=Work.BACKWARD)
    names = (OURS, PLAIN, "SDPA FA2")
    replays, refusals = graphs.captured([Contestant(name, lambda: None) for name in names], case)
    assert [replay.name for replay in replays] == [OURS, PLAIN] and list(refusals) == ["SDPA FA2"]


def test_profiled_calls_are_those_of_the_suite(capsys):
    cases = [Case.square(1, 16, 2, 16, sinks=True), Case.decode(1, 20, 2, 2, 16, page_size=16)]
    assert command.measure("random", cases=cases, profile=True) == 0
    shown = capsys.readouterr().out
    assert f"{PLAIN}: {cases[0]}" in shown and f"{OURS}: {cases[1]}" in shown and "page 64" not in shown


@pytest.mark.gpu
@pytest.mark.parametrize("work", TRAINING)
def test_a_call_on_a_stream_of_its_own_can_be_captured(work):
    device = torch.device("cuda")
    case = Case.square(2, 64, 4, 64, causal=True, work=work)
    peers = [
        Peer(OURS, lambda q, k, v, case: flashtile.attention(q, k, v, causal=case.causal)),
        Peer("SDPA", attention_sdpa),
    ]
    with graphs.OwnStream(device)():
        inputs = make_inputs(case, device)
        contestants = [contestant(peer, inputs, case) for peer in peers]
        for who in contestants:
            for _ in range(3):
                who.call()
        replays, refusals = graphs.captured(contestants, case)
        assert not refusals and [who.name for who in replays] == [OURS, "SDPA"]
        timings = timing.time_device(replays, device, EFFORT)
    assert all(of.median > 0 for of in timings)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "GRAPH_BELOW", 1.0)  # where other processes share the GPU, calls take longer
    path = tmp_path / "gpu.json"
    assert command.measure("random", quick=True, json_path=path) == 0
    first, *others = report.read(path)["cells"]
    for cell in (first, *others):
        assert cell["results"][OURS]["graph"]["median_us"] > 0, cell["name"]
        assert cell["plan"]["kernel"].startswith("sm")
    assert any(name.startswith("SDPA") for name in first["graph_ratios"])
