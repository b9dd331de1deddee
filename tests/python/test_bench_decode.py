"""The benchmark of one token over a cache: its cases, its pages, its peers, its records. No test looks at a time."""

import json
import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import flashtile
from flashtile.bench import command, decode, further, report, run, suites, timing
from flashtile.bench.cases import Case, Work, make_inputs, visible
from flashtile.bench.oracle import attention_float64, attention_sdpa
from flashtile.bench.peers import OURS, Peer, contestant

CPU = torch.device("cpu")
EFFORT = timing.Effort(seconds=0, min_rounds=2, max_rounds=2)
CASE = Case.decode(3, 128, 4, 2, 16, dtype="float32")
FORMS = [name for name in decode.CACHE_FORMS if name not in decode.PREFILL_FORMS]  # of suite decode


def outside_bare(q, k_cache, v_cache, *, cache_seqlens, causal):
    assert q.shape[1] == 1 and causal is True
    assert cache_seqlens.dtype == torch.int32 and cache_seqlens.tolist() == [k_cache.shape[1]] * q.shape[0]
    heads_first = (t.transpose(1, 2) for t in (q, k_cache, v_cache))
    return scaled_dot_product_attention(*heads_first, enable_gqa=True).transpose(1, 2)


def outside_tuple(q, k_cache, v_cache, **options):
    return outside_bare(q, k_cache, v_cache, **options), "lse"


def outside_first_half(q, k_cache, v_cache, *, cache_seqlens, causal):
    half = k_cache.shape[1] // 2
    return outside_bare(q, k_cache[:, :half], v_cache[:, :half], cache_seqlens=cache_seqlens // 2, causal=causal)


def scaled_wrongly(q, k_cache, v_cache, **options):
    return flashtile.attention_kvcache(q, k_cache, v_cache, scale=1.05 / math.sqrt(q.shape[-1]), **options)


def wrong_in_pages(q, k_cache, v_cache, *, block_table=None, **options):
    wrongly = {} if block_table is None else {"block_table": block_table.flip(0)}
    return flashtile.attention_kvcache(q, k_cache, v_cache, **wrongly, **options)


def entries_with(peers, case=CASE):
    (cell,) = run.run_cases([case], CPU, EFFORT, flashtile.attention_kvcache, peers)
    return {entry.name: entry for entry in cell.entries}


def timed_cell(case, **medians):
    names = {"page_16": "page 16", "page_64": "page 64"}
    return run.Cell(case, [run.Entry(names.get(name, name), timing.Timing(t, t, t, 1)) for name, t in medians.items()])


def test_a_decode_sees_all_and_moves_every_byte_once():
    assert str(CASE) == "B3 S1/128 H4/2 D16 causal f32 decode"
    assert visible(CASE, CPU).all() and CASE.is_full and CASE.is_square_band
    assert CASE.flops == 4 * 3 * 4 * 128 * 16
    assert CASE.bytes == sum(t.nbytes for t in make_inputs(CASE, CPU))  # dout is as large as the output
    assert further.mask_function(CASE) is None


def test_sdpa_sees_all_without_a_mask(monkeypatch):
    inputs, given = make_inputs(CASE, CPU), {}
    out = attention_sdpa(*inputs[:3], CASE)
    torch.testing.assert_close(out.double(), attention_float64(*inputs[:3], CASE), atol=1e-5, rtol=1e-5)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *x, **o: given.update(o) or x[0])
    attention_sdpa(*inputs[:3], CASE)
    assert given == {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "enable_gqa": True}


def test_the_suite():
    cases = suites.cases("decode")
    assert len(cases) == len(set(cases)) == 3 * 7
    assert all(case.work is Work.DECODE and case.causal and case.seqlen_q == 1 for case in cases)
    assert [str(case) for case in cases[:2]] == [
        "B1 S1/8192 H32/8 D128 causal bf16 decode",
        "B1 S1/131072 H32/8 D128 causal bf16 decode",
    ]
    for case, whole in zip(suites.cases("decode", device_type="cpu"), cases, strict=True):
        assert (case.batch, case.seqlen_k, case.heads_k) == (whole.batch, whole.seqlen_k // 8, whole.heads_k // 8)
        assert case.seqlen_k % max(decode.PAGE_SIZES) == 0


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_pages_hold_every_row_where_the_table_says(page_size):
    inputs = make_inputs(CASE, CPU)
    k_pages, v_pages, table = decode.in_pages(inputs.k, inputs.v, page_size)
    assert k_pages.shape == (3 * 128 // page_size, page_size, 2, 16)
    assert table.shape == (3, 128 // page_size) and table.dtype == torch.int32
    assert sorted(table.flatten().tolist()) == list(range(len(k_pages))) != table.flatten().tolist()
    for pages, rows in ((k_pages, inputs.k), (v_pages, inputs.v)):
        assert torch.equal(pages[table].flatten(1, 2), rows)


def test_every_contestant_has_a_cache_of_its_own():
    """Memory that another has just read would be found sooner."""
    inputs, seen = make_inputs(CASE, CPU), []

    def spy(q, k, v, case):
        seen.append((k, v))
        return q

    for _ in range(2):
        contestant(Peer("spy", spy), inputs, CASE).call()
    assert len({x.data_ptr() for x in (*inputs[1:3], *seen[0], *seen[1])}) == 6
    for caches in seen:
        assert all(torch.equal(x, given) for x, given in zip(caches, inputs[1:3], strict=True))


@pytest.mark.parametrize("function", ["outside_bare", "outside_tuple"])
def test_all_are_checked_and_timed(function):
    found = entries_with([further.outside_peer(f"Mine={__name__}:{function}")])
    assert list(found) == [OURS, "page 16", "page 64", "SDPA", "Mine"]
    for entry in found.values():
        assert not entry.wrong and entry.timing.rounds == EFFORT.min_rounds
        assert [verdict.name for verdict in entry.verdicts] == ["out"]


def test_a_peer_that_is_wrong_is_not_timed():
    found = entries_with([further.outside_peer(f"Mine={__name__}:outside_first_half")])
    assert found["Mine"].wrong and found["Mine"].timing is None
    assert found[OURS].timing


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_gets_no_mask(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    (flex,) = further.further_peers("decode", flex=True)
    found = entries_with([flex], Case.decode(2, 64, 4, 2, 16, dtype="float32"))
    assert not found["Flex"].wrong and found["Flex"].timing


def test_on_a_gpu_a_graph_and_the_backends_that_serve_decoding_run_too():
    names = [peer.name for peer in decode.cache_peers_of("cuda", outside_bare, CASE)]
    assert names == [*FORMS, "SDPA FA2", "SDPA cuDNN"]
    for taken in (*names, "of read", "best peer"):
        with pytest.raises(ValueError, match="expected a name that is not taken"):
            further.further_peers("decode", [f"{taken}=math:sqrt"])


CHUNK = Case.prefill(2, 24, 64, 4, 2, 16, dtype="float32")


def outside_chunk(q, k_cache, v_cache, *, cache_seqlens, causal):
    assert q.shape[1] == 24 and causal is True and cache_seqlens.tolist() == [64, 64]
    return attention_float64(q, k_cache, v_cache, CHUNK).float()


def test_a_chunk_sees_what_is_before_it_and_its_own_triangle():
    assert str(CHUNK) == "B2 S24/64 H4/2 D16 causal f32 prefill"
    pairs = 24 * 40 + 24 * 25 // 2
    assert int(visible(CHUNK, CPU).sum()) == pairs and not CHUNK.is_full and not CHUNK.is_square_band
    assert CHUNK.flops == 4 * 2 * 4 * pairs * 16
    inputs = make_inputs(CHUNK, CPU)
    out = decode.attention_lower_right(*inputs[:3], CHUNK)
    torch.testing.assert_close(out.double(), attention_float64(*inputs[:3], CHUNK), atol=1e-5, rtol=1e-5)


def test_the_suite_of_chunks():
    cases = suites.cases("prefill")
    assert len(cases) == len(set(cases)) == 3 * 3
    assert all(case.work is Work.PREFILL and 1 < case.seqlen_q < case.seqlen_k for case in cases)
    assert str(cases[1]) == "B4 S512/8192 H32/8 D128 causal bf16 prefill"
    names = [peer.name for peer in decode.cache_peers_of("cuda", outside_bare, CHUNK)]
    assert names == [*decode.CACHE_FORMS, "SDPA FA2"]
    found = entries_with(further.further_peers("prefill", [f"Mine={__name__}:outside_chunk"]), CHUNK)
    assert list(found) == [OURS, "page 16", "page 64", "page 1", "heads first", "SDPA", "Mine"]
    assert all(entry.timing and not entry.wrong for entry in found.values())
    record = report.to_record("prefill", {}, [timed_cell(CHUNK, flashtile=1.0, page_16=2.0, a=1.0, b=0.5)])
    assert record["summary"]["best peer"]["min"] == 0.5


def test_the_record_compares_forms_peers_and_reading():
    large, small = Case.decode(128, 8192, 32, 8, 128), Case.decode(1, 8192, 32, 8, 128)
    assert small.bytes < report.LARGE <= large.bytes
    second = large.bytes / 4e12  # a time at 4000 GB/s
    cells = [
        timed_cell(large, flashtile=second, page_16=2 * second, page_64=second, graph=second / 2, a=4 * second),
        timed_cell(small, flashtile=1.0, page_16=1.0, page_64=0.5, a=1.0, b=2.0),
        timed_cell(small, page_16=1.0, a=1.0),
    ]
    record = report.to_record("decode", {"read_gb_s": 5000.0}, cells)
    summary = record["summary"]
    assert set(summary) == {"a", "b", "best peer", "forms", "of read"}
    assert summary["best peer"] == {"geomean": pytest.approx(2.0), "min": pytest.approx(1.0), "cells": 2}
    assert summary["of read"] == {"geomean": pytest.approx(0.8), "min": pytest.approx(0.8), "cells": 1}
    assert {form: (of["min"], of["cells"]) for form, of in summary["forms"].items()} == {
        "page 16": (pytest.approx(0.5), 2),
        "page 64": (pytest.approx(1.0), 2),
        "graph": (pytest.approx(2.0), 1),
    }
    assert record["cells"][0]["bytes"] == large.bytes
    assert record["cells"][0]["results"][OURS]["gb_s"] == pytest.approx(4000)
    grid = report.Grid(record)
    assert grid.title.endswith("GB/s of K, V, Q and O, median ± spread")
    assert grid.header[-4:] == ["/ a", "/ b", "/ best peer", "of read"]
    assert grid.rows[0][-4:] == ["4.00×", "—", "4.00×", "0.80"] and grid.rows[2][-1] == "—"
    assert report.summary_lines(record)[-4:] == [
        "rate of page 16 over that of a contiguous cache: geometric mean 0.71×, minimum 0.50×, 2 cells",
        "rate of page 64 over that of a contiguous cache: geometric mean 1.41×, minimum 1.00×, 2 cells",
        "rate of graph over that of eager calls: geometric mean 2.00×, minimum 2.00×, 1 cells",
        "of the 5000.0 GB/s of reading alone, at least 512 MiB: geometric mean 0.80×, minimum 0.80×, 1 cells",
    ]


def test_measure_stores_what_it_shows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(timing, "QUICK_EFFORT", EFFORT)
    path = tmp_path / "decode.json"
    assert command.measure("decode", dtype="float16", quick=True, json_path=path) == 0
    shown, record = capsys.readouterr().out, json.loads(path.read_text())
    for case, cell in zip(suites.quick("decode", dtype="float16"), record["cells"], strict=True):
        assert cell["name"] == str(case) and case.shape_name in shown
        assert {OURS, "page 16", "page 64"} <= {name for name, of in cell["results"].items() if "gb_s" in of}
    assert {"page 16", "page 64"} <= set(record["summary"]["forms"])


@pytest.mark.parametrize("attention, wrong", [(scaled_wrongly, OURS), (wrong_in_pages, "page 16")])
def test_what_is_wrong_in_any_form_fails_the_run(attention, wrong, capsys, monkeypatch):
    monkeypatch.setattr(timing, "CPU_EFFORT", EFFORT)
    monkeypatch.setattr(timing, "DECODE_EFFORT", EFFORT)
    assert command.measure("decode", cases=[Case.decode(2, 128, 4, 2, 64)], attention=attention) == 1
    assert f"{wrong} is WRONG on" in capsys.readouterr().out


def test_a_form_without_room_for_its_caches_is_a_note(capsys, monkeypatch):
    def without_room(*caches, **options):
        if "block_table" in options:
            raise torch.OutOfMemoryError("tried to allocate pages")
        return flashtile.attention_kvcache(*caches, **options)

    monkeypatch.setattr(timing, "CPU_EFFORT", EFFORT)
    monkeypatch.setattr(timing, "DECODE_EFFORT", EFFORT)
    assert command.measure("decode", cases=[Case.decode(2, 128, 4, 2, 64)], attention=without_room) == 0
    assert "page 16 did not run" in capsys.readouterr().out


@pytest.mark.usefixtures("much_memory")
@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    path = tmp_path / "gpu.json"
    assert command.measure("decode", quick=True, json_path=path, peers=[f"Mine={__name__}:outside_bare"]) == 0
    record = json.loads(path.read_text())
    assert record["machine"]["read_gb_s"] > 0
    for cell in record["cells"]:
        timed = {name for name, result in cell["results"].items() if "median_us" in result}
        assert {*FORMS, "Mine"} <= timed, cell


@pytest.mark.gpu
def test_a_graph_is_captured_once_and_reads_what_is_there_when_it_is_replayed():
    calls = []

    def counted(q, k, v, case):
        calls.append(case)
        return attention_sdpa(q, k, v, case)

    case = Case.decode(2, 64, 4, 4, 64)
    inputs = make_inputs(case, torch.device("cuda"))
    graph = Peer("graph", decode.Replayed(counted))
    for factor in (1, 2):
        inputs.v.mul_(factor)
        assert torch.equal(graph.attention(*inputs[:3], case), attention_sdpa(*inputs[:3], case))
    assert len(calls) == 2  # once beforehand, once for the capture
