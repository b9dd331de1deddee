"""The benchmark of column masks: its kinds, its oracle, its peers, its records. No test looks at a time."""

import dataclasses
import importlib
import json
import types

import pytest
import torch
from test_bench import CPU, EFFORT, timed_cell
from test_bench_varlen import outside_bare

import flashtile
from flashtile._refusal import Refusal
from flashtile.bench import columns, command, found, further, masked, oracle, plots, report, run, suites, timing
from flashtile.bench.cases import TRAINING, Case, Work, make_inputs, visible
from flashtile.bench.oracle import attention_float64, attention_sdpa, results
from flashtile.bench.peers import OURS, Peer
from flashtile.bench.serving import CAUSAL
from flashtile.compat import flash_attn_interface

EXPRESSED = {
    "full": "band",
    "causal": "band",
    "sliding_window": "band",
    "document": "varlen",
    "causal_document": "varlen",
}
each_kind = pytest.mark.parametrize("kind", (*columns.KINDS, *columns.TREES))


def small(kind, batch=2, seqlen=96, **options):
    return Case(batch, seqlen, seqlen, 4, 2, 16, 16, **{"dtype": "float32", "columns": kind} | options)


def dense_of(case):
    return columns.mask_of(case, CPU).to_dense()[:, 0].expand(case.batch, -1, -1)


def entries_with(peers, case, attention=flashtile.attention):
    (cell,) = run.run_cases([case], CPU, EFFORT, attention, peers)
    return {entry.name: entry for entry in cell.entries}


def test_there_are_twelve_kinds():
    assert len(columns.KINDS) == 12 and {*columns.KINDS, *columns.TREES} == {*columns.ALIKE, *columns.DRAWN}


@each_kind
@pytest.mark.parametrize("seqlen", [96, 256, 8192])
def test_a_kind_is_legal_and_every_row_sees_something(kind, seqlen):
    case = small(kind, batch=3, seqlen=seqlen)
    mask = columns.mask_of(case, CPU)
    mask.check()
    assert len(mask.ranges) == (3 if kind in columns.DRAWN else 1)
    if seqlen < 8192:
        assert dense_of(case).any(-1).all()
    assert (mask.sparsity() == 0) == (kind == "full")


@each_kind
def test_a_kind_repeats_and_an_entry_does_not_depend_on_how_many_there_are(kind):
    drawn = columns.mask_of(small(kind, batch=3), CPU).ranges
    columns._mask.cache_clear()
    assert torch.equal(columns.mask_of(small(kind, batch=3), CPU).ranges, drawn)
    assert torch.equal(columns.mask_of(small(kind, batch=1), CPU).ranges, drawn[-1:])
    assert kind in columns.ALIKE or not torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize("seqlen, least, most", [(256, 3, 7), (8192, 3, 7), (32768, 10, 14)])
def test_documents_are_of_unlike_lengths_that_fill_the_sequence(seqlen, least, most):
    for source in columns._sources(20, seqlen):
        lengths = columns.documents(seqlen, source)
        assert least <= len(lengths) <= most and sum(lengths) == seqlen
        assert min(lengths) >= seqlen // (4 * most) and len(set(lengths)) > 1


def test_each_row_of_the_later_half_evicts_a_key():
    evicted_at = columns.mask_of(small("random_eviction", batch=1, seqlen=256), CPU).ranges[0, 0, :, 2]
    gone = evicted_at[evicted_at > 0]
    assert 64 < len(gone) <= 128 and gone.min() >= 128


@each_kind
def test_flops_are_those_of_the_pairs_that_see_each_other(kind):
    case = small(kind, batch=3)
    assert case.flops == 4 * case.heads_q * case.head_dim * int(dense_of(case).sum())
    assert dataclasses.replace(case, work=Work.BACKWARD).flops == 2.5 * case.flops


@each_kind
def test_the_mask_written_out_is_the_last_entrys(kind):
    case = small(kind)
    assert torch.equal(visible(case, CPU), dense_of(case)[-1])
    assert torch.equal(visible(case, CPU, 30, 70), dense_of(case)[-1, 30:70])


def test_a_case_is_named_by_its_kind():
    case = small("share_question")
    assert case.mask_name == "share_question" and not case.is_full and not case.is_square_band
    assert str(small("causal_document", work=Work.BACKWARD)) == "B2 S96 H4/2 D16 causal_document f32 backward"


@pytest.mark.parametrize("kind", masked.BANDS)
def test_a_band_is_the_same_mask(kind):
    case = small(kind)
    band = masked.as_band(case)
    assert not band.columns and torch.equal(visible(band, CPU), visible(case, CPU))


@pytest.mark.parametrize("kind", masked.OF_DOCUMENTS)
def test_documents_are_the_same_mask(kind):
    case = small(kind, work=Work.BACKWARD)
    ragged = masked.as_documents(case)
    assert (ragged.seqlen_q, ragged.batch, ragged.work) == (2 * 96, len(ragged.lengths), Work.BACKWARD)
    blocks = torch.block_diag(*(visible(alone, CPU).int() for alone, _, _ in ragged.sequences())).bool()
    assert torch.equal(blocks, torch.block_diag(*dense_of(case).int()).bool())
    assert ragged.flops == case.flops


def test_the_suite():
    cases, full = (suites.cases("masks", full=full) for full in (False, True))
    assert len(cases) == len(set(cases)) == 2 * (3 * 12 + 4)
    assert len(full) == len(set(full)) == 2 * (2 * 2 * 3 * 12 + 12) and set(cases) < set(full)
    for case in full:
        assert case.batch * case.seqlen_q == 32768 and case.seqlen_q in (8192, 32768) and not case.causal
    assert [str(case) for case in (cases[0], cases[35], cases[36], cases[-1])] == [
        "B4 S8192 H32/8 D64 full bf16 forward",
        "B4 S8192 H8 D256 random_eviction bf16 forward",
        "B1 S32768 H16 D128 causal bf16 forward",
        "B1 S32768 H16 D128 share_question bf16 backward",
    ]
    for case, whole in zip(suites.cases("masks", device_type="cpu"), cases, strict=True):
        assert (case.seqlen_q, case.heads_q) == (whole.seqlen_q // 8, whole.heads_q // 8)


@each_kind
@pytest.mark.parametrize("work", TRAINING)
def test_all_are_checked_and_timed(kind, work):
    found = entries_with([], small(kind, work=work))
    assert list(found) == [OURS, *([EXPRESSED[kind]] if kind in EXPRESSED else [])]
    for entry in found.values():
        assert not entry.wrong and entry.timing.rounds == EFFORT.min_rounds
        assert len(entry.verdicts) == (1 if work is Work.FORWARD else 4)


def next_kind(q, k, v, *, causal, mask):
    return flashtile.attention(q, k, v, causal=True)


def one_column_more(q, k, v, *, causal, mask):
    ranges = mask.ranges.clone()
    ranges[-1, :, 5] = 0
    return flashtile.attention(q, k, v, causal=causal, mask=dataclasses.replace(mask, ranges=ranges))


@pytest.mark.parametrize("attention", [next_kind, one_column_more])
@pytest.mark.parametrize("work", TRAINING)
def test_what_is_wrong_fails_the_run(attention, work, capsys, monkeypatch):
    monkeypatch.setattr(timing, "CPU_EFFORT", EFFORT)
    assert command.measure("masks", cases=[small("causal_document", work=work)], attention=attention) == 1
    assert "flashtile is WRONG on" in capsys.readouterr().out


def refused(q, k, v, **options):
    raise NotImplementedError("attention: no kernel takes a mask")


def test_what_is_not_served_is_said(capsys, monkeypatch):
    monkeypatch.setattr(timing, "CPU_EFFORT", EFFORT)
    assert command.measure("masks", cases=[small("document")], attention=refused) == 0
    said = capsys.readouterr().out
    assert "flashtile did not run B2 S96 H4/2 D16 document f32 forward: attention: no" in said


@pytest.mark.parametrize("kind", ["share_question", "global_sliding_window"])
def test_both_formulas_are_the_same_in_blocks_of_rows(kind, monkeypatch):
    case = small(kind, batch=1, work=Work.BACKWARD)
    inputs = make_inputs(case, CPU)
    whole = results(attention_float64, inputs, case, gradients=True)
    q, k, v = (t.transpose(1, 2) for t in inputs[:3])
    by_mask = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense_of(case), enable_gqa=True)
    torch.testing.assert_close(whole["out"].float(), by_mask.transpose(1, 2), rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(oracle, "ROWS_AT_A_TIME", 40)
    for attention in (attention_float64, attention_sdpa):
        parts = results(attention, inputs, case, gradients=True)
        for name, exact in whole.items():
            torch.testing.assert_close(parts[name].double(), exact.double(), rtol=1e-5, atol=1e-5)


@each_kind
def test_flex_gets_the_mask(kind):
    case = small(kind, batch=3, seqlen=300)
    seen = further.column_function(case, CPU)
    batch, row, column = torch.meshgrid(torch.arange(3), torch.arange(300), torch.arange(300), indexing="ij")
    dense = dense_of(case)
    assert torch.equal(seen(batch, torch.zeros_like(batch), row, column), dense)
    blocks = further.block_mask(case, CPU)
    assert len(blocks.kv_num_blocks) == (3 if kind in columns.DRAWN else 1)
    padded = torch.nn.functional.pad(dense, (0, 84, 0, 84)).unflatten(2, (3, 128)).unflatten(1, (3, 128))
    assert torch.equal(blocks.to_dense()[:, 0].bool().expand(3, -1, -1), padded.any(-1).any(2))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", ["causal", "causal_document"])
def test_flex_is_checked_and_timed(kind, monkeypatch):
    compile_others = torch.compile  # FlexAttention that is not compiled calls it too
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, **options: (
            function if function is further.flex_attention else compile_others(function, **options)
        ),
    )
    found = entries_with(further.further_peers("masks", flex=True), small(kind))
    assert not found["Flex"].wrong and found["Flex"].timing


@pytest.mark.parametrize("kind", ["causal_document", "document", "prefix_document"])
@pytest.mark.parametrize("work", TRAINING)
def test_an_outside_peer_is_asked_for_documents(kind, work):
    peers = further.further_peers("masks", [f"Mine={outside_bare.__module__}:outside_bare"])
    mine = entries_with(peers, small(kind, work=work))["Mine"]
    if kind in masked.OF_DOCUMENTS:
        assert not mine.wrong and mine.timing
    else:
        assert mine.refusal == "it is asked for document and causal_document alone here"


def test_a_found_package_is_asked_for_documents(monkeypatch):
    module = types.SimpleNamespace(**vars(flash_attn_interface) | {"__file__": "", "__name__": "flash_attn_interface"})

    def import_module(name):
        if name != "flash_attn_interface":
            raise ModuleNotFoundError(name=name.split(".")[0])
        return module

    with monkeypatch.context() as patched:
        patched.setattr(importlib, "import_module", import_module)
        peers, _ = found.found_peers("masks", "cuda")
    assert [peer.name for peer in peers] == ["FA3"]
    assert entries_with(peers, small("causal_document"))["FA3"].timing
    assert "alone here" in entries_with(peers, small("causal"))["FA3"].refusal


def test_names_of_columns_are_taken():
    for name in (masked.BAND, masked.VARLEN, CAUSAL):
        with pytest.raises(Refusal, match="expected a name that is not taken"):
            further.further_peers("masks", [f"{name}=math:sqrt"])


def test_no_other_suites_peer_is_asked_for_a_mask():
    with pytest.raises(NotImplementedError, match="FA2 is not asked for column masks here"):
        found.Adapted("FA2", None)(None, None, None, small("causal"))
    outside = entries_with([Peer("Mine", further.Outside(lambda q, k, v, causal: q))], small("causal"))["Mine"]
    assert outside.refusal == "--peer: its function has no argument mask"


def test_the_record_sums_up_forward_and_backward_by_themselves():
    cells = [
        timed_cell(small("causal"), flashtile=1.0, band=0.5, Flex=2.0),
        timed_cell(small("document"), flashtile=1.0, varlen=0.8, FA3=1.5, Flex=8.0),
        timed_cell(small("causal", work=Work.BACKWARD), flashtile=1.0, band=1.0, Flex=3.0),
    ]
    machine = {"device": "a GPU", "date": "2026-01-02", "flashtile": "0", "commit": "", "torch": "0"}
    record = json.loads(json.dumps(report.to_record("masks", machine, cells)))
    assert {name: (of["geomean"], of["min"], of["cells"]) for name, of in record["summary"].items()} == {
        "band, forward": (pytest.approx(0.5), 0.5, 1),
        "Flex, forward": (pytest.approx(4.0), 2.0, 2),
        "varlen, forward": (pytest.approx(0.8), 0.8, 1),
        "FA3, forward": (pytest.approx(1.5), 1.5, 1),
        "band, backward": (pytest.approx(1.0), 1.0, 1),
        "Flex, backward": (pytest.approx(3.0), 3.0, 1),
    }
    grid = report.Grid(record)
    assert grid.header[-4:] == ["/ band", "/ Flex", "/ varlen", "/ FA3"]
    assert [row[1:3] for row in grid.rows] == [["causal", "forward"], ["document", "forward"], ["causal", "backward"]]
    assert report.peer_names(record) == ["Flex", "FA3"]  # the others are flashtile's own
    figure = plots.figure_of(record)
    assert (figure.rows, figure.columns, figure.axis) == (
        ["forward", "backward"],
        ["H 4/2, D 16\nS 96"],
        "kind of mask",
    )
    assert figure.panels["forward", "H 4/2, D 16\nS 96"].places == ["causal", "document"]


def test_measure_stores_what_it_shows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(timing, "QUICK_EFFORT", EFFORT)
    path = tmp_path / "masks.json"
    assert command.measure("masks", quick=True, json_path=path, plots_folder=tmp_path) == 0
    shown, record = capsys.readouterr().out, json.loads(path.read_text())
    for case, cell in zip(suites.quick("masks"), record["cells"], strict=True):
        assert cell["name"] == str(case) and cell["mask"] == cell["case"]["columns"] == case.columns
        assert set(cell["ratios"]) == ({EXPRESSED[case.columns]} if case.columns in EXPRESSED else set())
        assert case.columns in shown
    assert list(record["summary"]) == [f"{name}, {work.value}" for work in TRAINING for name in ("band", "varlen")]
    assert (tmp_path / "masks.svg").is_file()


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    path = tmp_path / "gpu.json"
    mine = f"Mine={outside_bare.__module__}:outside_bare"
    assert command.measure("masks", quick=True, json_path=path, peers=[mine], flex=True) == 0
    for cell in json.loads(path.read_text())["cells"]:
        assert list(cell["results"])[-2:] == ["Flex", "Mine"]
        assert "median_us" in cell["results"]["Flex"] or "refusal" in cell["results"]["Flex"]
        assert ("median_us" in cell["results"]["Mine"]) == (cell["mask"] in masked.OF_DOCUMENTS)
