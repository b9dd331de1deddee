"""The benchmark of shared prefixes and mixed batches: its cases, its pages, its judgement. No test looks at a time."""

import collections
import dataclasses
import json
import random

import pytest
import torch
from test_bench import timed_cell

import flashtile
from flashtile.bench import columns, command, decode, found, further, report, run, serving, suites, timing
from flashtile.bench.cases import Case, Work, make_inputs, visible
from flashtile.bench.oracle import attention_float64
from flashtile.bench.peers import OURS
from flashtile.masks import ColumnMask

CPU = torch.device("cpu")
EFFORT = timing.Effort(seconds=0, min_rounds=2, max_rounds=2)
CASCADE = Case.cascade(3, 64, 48, 4, 2, 16, dtype="float32")
MIXED = Case.mixed((24, 40, 1, 1), (100, 40, 70, 1), 4, 2, 16, dtype="float32")
TREE = Case.tree("fan_out_tree", 2, 8, 50, 4, 2, 16, dtype="float32")
TREES = Case.tree("random_tree", 3, 16, 70, 4, 2, 16, dtype="float32", page_size=16)


def entries(case, attention=serving.attention_of_serving):
    (cell,) = run.run_cases([case], CPU, EFFORT, attention)
    return {entry.name: entry for entry in cell.entries}


def test_cases_have_names_and_count_what_is_seen():
    assert str(CASCADE) == "B3 S1/112 prefix 64 H4/2 D16 causal f32 cascade"
    assert str(MIXED) == "4×(1…40) over 4×(1…100) H4/2 D16 causal f32 mixed"
    assert str(TREE) == "B2 S8/50 H4/2 D16 fan_out_tree + causal f32 tree"
    assert str(TREES) == "B3 S16/70 H4/2 D16 page 16 random_tree + causal f32 tree"
    assert CASCADE.flops == 4 * 4 * 16 * 3 * 112
    assert MIXED.flops == 4 * 4 * 16 * ((24 * 77 + 24 * 23 // 2) + 40 * 41 // 2 + 70 + 1)
    assert [(rows.stop, keys.stop) for _, rows, keys in MIXED.sequences()] == [
        (24, 100),
        (64, 140),
        (65, 210),
        (66, 211),
    ]
    for alone, rows, keys in MIXED.sequences():
        assert (alone.seqlen_q, alone.seqlen_k) == (rows.stop - rows.start, keys.stop - keys.start)
        assert alone.lengths is None and alone.held is None and alone.causal


def test_sequences_begin_alike():
    inputs = make_inputs(CASCADE, CPU)
    for x in (inputs.k, inputs.v):
        assert torch.equal(x[:, :64], x[:1, :64].expand(3, -1, -1, -1))
        assert not torch.equal(x[0, 64:], x[1, 64:])


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_pages_hold_every_row_where_the_table_says(page_size):
    inputs = make_inputs(MIXED, CPU)
    k_pages, v_pages, table = serving.in_pages(inputs.k, inputs.v, MIXED.held, page_size)
    for pages, rows in ((k_pages, inputs.k), (v_pages, inputs.v)):
        for b, (_, _, keys) in enumerate(MIXED.sequences()):
            found = pages[table[b].long()].flatten(0, 1)[: MIXED.held[b]]
            assert torch.equal(found, rows[keys])


def test_all_are_checked_and_timed():
    assert list(entries(CASCADE)) == [OURS, "one call", "SDPA"]
    assert list(entries(MIXED)) == [OURS, "two calls", "page 64", "two calls page 64"]
    assert list(entries(TREE)) == list(entries(TREES)) == [OURS, "causal"]
    for case in (CASCADE, MIXED, TREE, TREES):
        for name, entry in entries(case).items():
            assert not entry.wrong and entry.timing.rounds == EFFORT.min_rounds
            assert name in ("SDPA", serving.CAUSAL, *decode.OURS_ALL)


@pytest.mark.parametrize("case", [CASCADE, MIXED, TREE, TREES], ids=str)
def test_what_is_wrong_is_seen(case):
    """A scale that is off, in whichever call."""

    def wrongly(*tensors, **arguments):
        return serving.attention_of_serving(*tensors, scale=1.05 * case.head_dim**-0.5, **arguments)

    assert all(entry.wrong and entry.timing is None for name, entry in entries(case, wrongly).items() if name != "SDPA")


def test_the_shared_pages_are_read_from_one_place():
    """What is spoiled in the pages of the others is not seen: their tables name the first one's."""
    inputs, tables = make_inputs(CASCADE, CPU), []

    def spy(*tensors, **arguments):
        tables.append(arguments)
        return serving.attention_of_serving(*tensors, **arguments)

    for in_parts in (True, False):
        out = serving.Prefixed(spy, CASCADE, in_parts)(*inputs[:3], CASCADE)
        torch.testing.assert_close(out.double(), attention_float64(*inputs[:3], CASCADE), rtol=0, atol=1e-5)
    whole = torch.cat([tables[0]["prefix_table"].expand(3, -1), tables[0]["block_table"]], dim=1)
    assert torch.equal(whole, tables[1]["block_table"]) and len(whole[:, :4].unique()) == 4


def test_a_tree_of_fan_outs():
    assert columns.fan_out_tree(8) == [-1, 0, 1, 1, 0, 4, 0, 0]
    assert columns.fan_out_tree(16) == [-1, 0, 1, 2, 2, 1, 5, 0, 7, 7, 0, 10, 10, 0, 13, 13]
    parents = columns.fan_out_tree(64)
    followed = sorted(collections.Counter(parents).values())
    assert parents.count(-1) == 1 and parents.count(0) == 4 and set(followed) == {1, 2, 4}


@pytest.mark.parametrize("count", [1, 8, 16, 64])
def test_a_random_tree_is_a_tree_of_its_own(count):
    trees = [columns.random_tree(count, random.Random(seed)) for seed in (0, 0, 1)]
    for parents in trees:
        assert len(parents) == count and parents.count(-1) == 1
        ColumnMask.tree(parents)  # refuses what is in no depth-first order
    assert trees[0] == trees[1] and (count == 1 or trees[0] != trees[2])


@pytest.mark.parametrize("case", [TREE, TREES], ids=str)
def test_drafts_see_the_keys_before_the_tree_and_their_ancestors(case):
    dense = columns.mask_of(case, CPU).to_dense()[:, 0].expand(case.batch, -1, -1)
    seen = visible(case, CPU)
    assert seen[:, : case.seqlen_k - case.seqlen_q].all()
    assert torch.equal(seen[:, case.seqlen_k - case.seqlen_q :], dense[-1])
    assert torch.equal(visible(case, CPU, 3, 7), seen[3:7])
    pairs = case.batch * case.seqlen_q * (case.seqlen_k - case.seqlen_q) + int(dense.sum())
    assert case.flops == 4 * case.heads_q * case.head_dim * pairs
    assert seen.sum() < visible(serving.without_mask(case), CPU).sum()


@pytest.mark.parametrize("case", [TREE, TREES], ids=str)
def test_a_tree_and_the_call_beside_it_differ_in_the_mask_alone(case):
    asked = []

    def spy(*tensors, **arguments):
        asked.append((tensors, arguments))
        return serving.attention_of_serving(*tensors, **arguments)

    inputs = make_inputs(case, CPU)
    for peer in serving.serving_peers_of("cpu", spy, case):
        peer.attention(*inputs[:3], peer.asked(case) if peer.asked else case)
    (tree, of_tree), (chain, of_chain) = asked
    assert of_tree.pop("mask") is columns.mask_of(case, CPU)
    for x, y in zip((*tree, *of_tree.values()), (*chain, *of_chain.values()), strict=True):
        assert torch.equal(torch.as_tensor(x), torch.as_tensor(y))
    assert of_tree.keys() == of_chain.keys() and of_tree["causal"]
    assert ("block_table" in of_tree) == (case.page_size > 0)


def test_the_mask_of_another_tree_is_seen():
    """That of all sequences but the last, which is judged, may be anything."""

    def of_the_first(*tensors, mask=None, **arguments):
        if mask is not None:
            arguments["mask"] = dataclasses.replace(mask, ranges=mask.ranges[:1])
        return serving.attention_of_serving(*tensors, **arguments)

    assert not any(entry.wrong for entry in entries(TREE, of_the_first).values())
    found = entries(TREES, of_the_first)
    assert found[OURS].wrong and not found[serving.CAUSAL].wrong


def test_the_ratio_of_a_tree_is_in_the_table():
    cells = [timed_cell(TREE, flashtile=1.0, causal=0.98), timed_cell(TREES, flashtile=2.0, causal=1.0)]
    record = report.to_record("serving", {}, cells)
    assert record["summary"] == {"causal": {"geomean": pytest.approx(0.7), "min": 0.5, "cells": 2}}
    grid = report.Grid(record)
    assert grid.header[-1] == "/ causal" and [row[-1] for row in grid.rows] == ["0.98×", "0.50×"]
    assert report.peer_names(record) == []  # it is flashtile's own


def test_the_suite():
    cases = suites.cases("serving")
    assert len(cases) == len(set(cases)) == 3 * 2 + 2 * 4 + 2 * 3 * 3 * 3 * 2
    assert [str(case) for case in (cases[0], cases[6], cases[14], cases[-1])] == [
        "B64 S1/8704 prefix 8192 H32/8 D128 causal bf16 cascade",
        "4×512+64×1 over 68×(4114…16060) H32/8 D128 causal bf16 mixed",
        "B1 S6/2048 H32/8 D64 fan_out_tree + causal bf16 tree",
        "B64 S64/8192 H32/8 D128 page 16 random_tree + causal bf16 tree",
    ]
    for case in [*cases, *suites.cases("serving", device_type="cpu")]:
        assert case.prefix % max(decode.PAGE_SIZES) == 0 and case.work in (Work.CASCADE, Work.MIXED, Work.TREE)
        assert case.work is not Work.TREE or case.seqlen_q < case.seqlen_k
    assert "serving" in found.SUITES and "serving" not in further.PEER_SUITES


def test_the_command_and_its_record(tmp_path, capsys):
    path = tmp_path / "serving.json"
    assert command.measure("serving", quick=True, json_path=path) == 0
    record = json.loads(path.read_text())
    assert record["suite"] == "serving"
    assert {cell["case"]["work"] for cell in record["cells"]} == {"cascade", "mixed", "tree"}
    assert {"one call", "two calls", "causal", "SDPA"} <= set(record["summary"])
    text = report.markdown(report.read(path))
    assert all(f"against {name}" in text for name in ("one call", "two calls", "causal"))
    with pytest.raises(flashtile._refusal.Refusal, match="its cells are on no curve"):
        command.measure("serving", quick=True, plots_folder=tmp_path)


def test_no_other_package_is_asked_for_a_tree():
    with pytest.raises(NotImplementedError, match="FA3 is not asked for column masks here"):
        found.Adapted("FA3", None)(*make_inputs(TREE, CPU)[:3], TREE)


def test_functions_of_pages_without_ragged_queries_refuse_a_mixed_batch():
    class Module:
        @staticmethod
        def flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=None, block_table=None, causal=False):
            raise AssertionError

    inputs = make_inputs(MIXED, CPU)
    with pytest.raises(NotImplementedError, match="takes no ragged queries"):
        found.FlashAttention(Module)(*inputs[:3], MIXED)
    with pytest.raises(NotImplementedError, match="xFormers is not asked for mixed batches here"):
        found.Adapted("xFormers", found.XFormers(Module))(*inputs[:3], MIXED)


def test_functions_of_pages_with_ragged_queries_are_called_as_flash_attention_3_wants_it():
    class Module:
        @staticmethod
        def flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=None, page_table=None, cu_seqlens_q=None, max_seqlen_q=None, causal=False
        ):
            assert max_seqlen_q == 40 and causal
            given = dict(cache_seqlens=cache_seqlens, cu_seqlens_q=cu_seqlens_q)
            return flashtile.attention_kvcache(q, k_cache, v_cache, block_table=page_table, **given)

    inputs = make_inputs(MIXED, CPU)
    theirs = found.Adapted("FA3", found.FlashAttention(Module))
    expected = serving.Mixed(serving.attention_of_serving, 16).together(*inputs[:3], MIXED)
    assert torch.equal(theirs(*inputs[:3], MIXED), expected)
