"""Laws that tie attention_kvcache to attention and to itself: pages, sequences, chunks, splits, layouts and threads
change nothing."""

import dataclasses
import math

import cached
import pytest
import torch
from cached import Cached, ints, results, with_own_caches
from cases import BF16, DEVICE_PARAMS, F16, F32, LAYOUTS, lay_out, on_devices
from compare import assert_bitwise, assert_same, largest

import flashtile
from flashtile import _C
from flashtile._options import SCORES

RAGGED = dict(lengths_q=(1, 0, 70, 17, 5), held=(90, 40, 0, 130, 600), new=0)
LAWS = [
    Cached("decode", dtype=BF16, held=(700, 40, 0, 1300), new=1, head_dim=128, heads_q=8),
    Cached("full", dtype=F32, seqlen_q=5, causal=False, leftpad=(50, 0, 0, 130)),
    Cached("prefill", dtype=F16, seqlen_q=70, new=70, page_size=16, rotary=32, leftpad=(50, 40, 0, 9)),
    Cached("window", dtype=BF16, seqlen_q=17, new=20, window=(30, 4), page_size=64, head_dim=72, head_dim_v=40),
    Cached("ragged", dtype=BF16, page_size=3, rotary=64, interleaved=False, heads_q=6, tail=9, **RAGGED),
    Cached("ragged_window", dtype=F16, window=(100, 0), indexed=True, alibi="per head", softcap=9.0, **RAGGED),
    Cached("everything", dtype=F16, seqlen_q=3, new=3, alibi="per head", sinks=0.0, softcap=8.0, scale=0.2, rotary=16),
    Cached("wide", dtype=BF16, seqlen_q=9, new=9, head_dim=256, heads_q=16, page_size=16, held=(300, 90, 1)),
    Cached("many", dtype=BF16, seqlen_q=150, new=150, heads_q=16, heads_k=2, held=(300, 1, 0), rotary=32, sinks=0.0),
]
each_law = pytest.mark.parametrize("case, device", on_devices(LAWS))
FIXED = [dict(batch_invariant=True), dict(num_splits=1), dict(num_splits=3)]  # what fixes the order of sums
each_fixed = pytest.mark.parametrize("fixed", FIXED, ids=str)


def assert_close(found, expected):
    """To the bit on the CPU; elsewhere another kernel may serve it, or other splits."""
    for what, x in expected.items():
        if x.is_cuda and what in ("out", "lse"):
            eps = torch.finfo(F32 if what == "lse" else x.dtype).eps
            torch.testing.assert_close(found[what], x, rtol=0, atol=8 * eps * max(largest(x), 1))
        else:
            assert_bitwise(found[what], x, what)


@each_fixed
@each_law
@pytest.mark.parametrize("page_size", [1, 3, 4, 16, 24, 64, 256])
def test_pages_are_a_contiguous_cache(case, device, page_size, fixed):
    """Whatever the pages' size and order."""
    contiguous = dataclasses.replace(case, page_size=None, **fixed)
    found = results(dataclasses.replace(case, page_size=page_size, **fixed).arguments(device))
    expected = results(contiguous.arguments(device))
    assert_same({what: found[what] for what in ("out", "lse")}, {what: expected[what] for what in ("out", "lse")})


@pytest.mark.parametrize("layout", ("heads first", "sequence first", "gaps", "packed", "beside"))
@pytest.mark.parametrize("page_size", [None, 3, 16])
@pytest.mark.parametrize("invariant", [False, True])
@each_law
def test_a_cache_may_lie_as_it_likes(case, device, invariant, page_size, layout):
    """Heads before rows, and keys beside values, too, as FlashInfer keeps them; new rows are written there."""
    given = dataclasses.replace(case, page_size=page_size, batch_invariant=invariant).arguments(device)
    caches = [given["k_cache"], given["v_cache"]]
    if layout == "beside":
        room = [torch.full((len(x), 2, *x.shape[2:0:-1], x.shape[3]), math.nan).to(x) for x in caches]
        laid_out = [x[:, i].transpose(1, 2).copy_(y) for i, (x, y) in enumerate(zip(room, caches, strict=True))]
    else:
        laid_out = [lay_out(x, layout) for x in caches]
    found = results(given | dict(zip(("k_cache", "v_cache"), laid_out, strict=True)))
    (assert_same if invariant else assert_close)(found, results(given))


@each_fixed
@each_law
def test_a_sequence_is_as_alone(case, device, fixed):
    given = case.arguments(device) | fixed
    together = results(given)
    queries = cached.spans(case.batch, case.seqlen_q, given.get("cu_seqlens_q"))
    for b, rows in enumerate(queries):
        found = results(sequence(given, b))
        if "cu_seqlens_q" in given:
            expected = dict(out=together["out"][rows], lse=together["lse"][:, rows])
        else:
            expected = dict(out=together["out"][b : b + 1], lse=together["lse"][b : b + 1])
        assert_same({what: found[what] for what in expected}, expected)


def sequence(given, b):
    """Arguments of sequence b alone."""
    one = slice(b, b + 1)
    alone = dict(given)
    for name in ("q", "k_new", "v_new"):
        if name in given:
            alone[name] = cached.rows_of(given, name)[b] if "cu_seqlens_q" in given else given[name][one]
    if "cu_seqlens_q" in given:
        alone["cu_seqlens_q"] = ints([0, len(alone["q"])], alone["q"].device)
    for name in ("cache_seqlens", "leftpad", "block_table", "cache_batch_idx"):
        if name in given:
            alone[name] = given[name][one]
    if "block_table" not in given and "cache_batch_idx" not in given:
        alone["cache_batch_idx"] = ints([b], given["q"].device)
    if given.get("alibi_slopes") is not None and given["alibi_slopes"].dim() == 2:
        alone["alibi_slopes"] = given["alibi_slopes"][one]
    return alone


CHUNKED = [
    Cached("causal", dtype=BF16, seqlen_q=200, new=200, head_dim=128, heads_q=8, held=(300, 1, 0)),
    Cached("rotary", dtype=F16, seqlen_q=200, new=200, rotary=64, page_size=16, leftpad=(50, 40, 0, 9), sinks=0.0),
    Cached("window", dtype=F32, seqlen_q=200, new=200, window=(70, 0), page_size=3, heads_q=6, head_dim=72),
    Cached("alibi", dtype=BF16, seqlen_q=200, new=200, alibi="per head", softcap=9.0, indexed=True, head_dim=256),
]


@pytest.mark.parametrize("chunks", [(1,) * 3 + (197,), (64, 64, 72), (130, 70), (2, 17, 5, 100, 76)], ids=str)
@pytest.mark.parametrize("case, device", on_devices(CHUNKED))
def test_chunks_of_a_prefill(case, device, chunks):
    """To the bit where that is asked for: a row does not know with which others it comes."""
    whole = results(case.arguments(device) | dict(batch_invariant=True))
    given = with_own_caches(case.arguments(device) | dict(batch_invariant=True))
    first, parts = 0, []
    for length in chunks:
        rows = slice(first, first + length)
        part = {name: given[name][:, rows] for name in ("q", "k_new", "v_new")}
        part["cache_seqlens"] = given["cache_seqlens"] + first
        parts.append(flashtile.attention_kvcache(**given | part, return_lse=True))
        first += length
    outs, lses = zip(*parts, strict=True)
    found = dict(out=torch.cat(outs, dim=1), lse=torch.cat(lses, dim=2))
    assert_same(found | {name: given[name] for name in ("k_cache", "v_cache")}, whole)


@pytest.mark.parametrize("case, device", on_devices(LAWS))
def test_ragged_queries_are_dense_ones(case, device):
    if case.lengths_q is not None or (case.new is not None and case.new != case.seqlen_q):
        case = dataclasses.replace(case, lengths_q=None, tail=0, seqlen_q=17, new=17)
    given = case.arguments(device) | dict(batch_invariant=True)
    expected = results(given)
    flat = {name: given[name].flatten(0, 1) for name in ("q", "k_new", "v_new") if name in given}
    begins = ints([b * case.seqlen_q for b in range(case.batch + 1)], device)
    found = results(given | flat | dict(cu_seqlens_q=begins))
    found["out"] = found["out"].view_as(expected["out"])
    found["lse"] = found["lse"].unflatten(1, (case.batch, case.seqlen_q)).transpose(0, 1)
    assert_same(found, expected)


@each_law
def test_appending_first_is_the_same(case, device):
    """Rows that the cache held already, and those that a call has brought along."""
    given = case.arguments(device) | dict(batch_invariant=True)
    if "k_new" not in given:
        return
    expected = results(given)
    after = {name: x for name, x in given.items() if name not in ("k_new", "v_new")}
    after |= {name: expected[name] for name in ("k_cache", "v_cache")}
    after["cache_seqlens"] = ints([end for _, end in cached.counted(given)], device)
    assert_same(results(after), expected)


@pytest.mark.parametrize("case, device", on_devices([case for case in LAWS if not case.lengths_q and not case.leftpad]))
def test_a_full_cache_is_attention(case, device):
    case = dataclasses.replace(case, held=(150,) * 3, page_size=None, new=None, rotary=0, room=0, seqlen_q=40)
    given = case.arguments(device)
    dense = {x.name: given[x.name] for x in SCORES if x.name in given}
    out, lse = flashtile.attention(given["q"], given["k_cache"], given["v_cache"], return_lse=True, **dense)
    assert_close(results(given), dict(out=out, lse=lse))


@pytest.mark.parametrize("case, device", on_devices(LAWS))
def test_splits_agree(case, device):
    given = case.arguments(device)
    automatic = results(given)
    for num_splits in range(1, 8):
        assert_close(results(given | dict(num_splits=num_splits)), automatic)
    assert_close(results(given | dict(batch_invariant=True)), automatic)


@each_law
def test_what_does_not_count_may_hold_anything(case, device):
    given = case.arguments(device)
    expected = results(given)
    unused = {name: given[name].isnan() for name in ("q", "k_cache", "v_cache")}
    for junk in (0.0, math.inf, -1e4):
        changed = {name: torch.where(rows, junk, given[name]) for name, rows in unused.items()}
        found = results(given | changed)
        written = {
            name: torch.where(unused[name] & (found[name] == junk), math.nan, found[name])
            for name in unused
            if name != "q"
        }
        assert_same(found | written, expected)


@each_law
def test_runs_agree_bitwise(case, device):
    given = case.arguments(device)
    first = results(given)
    for _ in range(10):
        assert_same(results(given), first)


@pytest.mark.parametrize("threads", [2, 3, 7])
@pytest.mark.parametrize("case", LAWS, ids=str)
def test_thread_counts_agree_bitwise(case, threads):
    given = case.arguments()
    expected = results(given)
    try:
        torch.set_num_threads(threads)
        assert_same(results(given), expected)
    finally:
        torch.set_num_threads(1)


@each_law
def test_both_ways_into_the_module_agree(case, device):
    """By the exchange table, and by Python attributes as with a PyTorch older than 2.10."""
    given = case.arguments(device)
    expected = results(given)
    _C._enable_exchange(False)
    try:
        assert_same(results(given), expected)
    finally:
        _C._enable_exchange(True)


@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("case, device", on_devices([LAWS[2], LAWS[4]]))
def test_layouts_agree_bitwise(case, device, layout, attention_kvcache):
    expected = results(case.arguments(device))
    found = results(dataclasses.replace(case, layout=layout).arguments(device), attention_kvcache)
    assert_same(found, expected)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_one_length_for_all(device):
    for more in ({}, dict(lengths_q=(1, 1, 1))):
        given = Cached("even", dtype=F16, held=(40, 40, 40), new=1, **more).arguments(device)
        assert_same(results(given | dict(cache_seqlens=40)), results(given))


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("options", [{}, dict(window=(20, 0)), dict(batch_invariant=True)], ids=str)
@pytest.mark.parametrize(
    "batch, heads_k, group, capacity, head_dim",
    [(32, 1, 1, 90, 64), (33, 5, 1, 300, 128), (64, 43, 1, 195, 64), (70, 6, 4, 60, 256), (1025, 2, 1, 40, 64),
     (2500, 1, 8, 64, 128), (264, 8, 1, 700, 64), (140, 8, 1, 1100, 128)],
)  # fmt: skip
def test_many_sequences(batch, heads_k, group, capacity, head_dim, options, device):
    """More than a warp, and a section of lanes, looks at once; short ones, of which a warp takes a tile. As a ragged
    batch, and with the largest logits, a GPU has other code for the same."""
    if device == "cpu" and batch * capacity * heads_k > 400_000:
        batch //= 4
    generator = torch.Generator().manual_seed(batch)
    q, k, v = (
        torch.randn(batch, rows, heads, head_dim, generator=generator).to(device, BF16)
        for rows, heads in ((1, heads_k * group), (capacity, heads_k), (capacity, heads_k))
    )
    held = torch.randint(0, capacity + 1, (batch,), generator=generator)
    held[-1] = capacity
    given = dict(k_cache=k, v_cache=v, cache_seqlens=held.int().to(device), return_lse=True, **options)
    begins = torch.arange(batch + 1, dtype=torch.int32, device=device)
    out, lse = flashtile.attention_kvcache(q[:, 0], cu_seqlens_q=begins, **given)
    forms = [flashtile.attention_kvcache(q, **given), (out[:, None], lse.T[..., None])]
    if "batch_invariant" not in options:
        forms.append(flashtile.attention_kvcache(q, return_max_logits=True, **given)[:2])
    keys = torch.arange(capacity, device=device)
    begin = (held - 21).clamp(min=0).to(device)[:, None] if "window" in options else 0
    seen = (keys >= begin) & (keys < held.to(device)[:, None])
    scores = torch.einsum("bgkd,bskd->bkgs", q.float().view(batch, heads_k, group, -1).transpose(1, 2), k.float())
    scores = (scores * head_dim**-0.5).masked_fill(~seen[:, None, None], -math.inf)
    out = torch.einsum("bkgs,bskd->bkgd", scores.softmax(-1).nan_to_num(0), v.float()).flatten(1, 2)[:, None]
    expected = dict(out=out.to(BF16), lse=scores.logsumexp(-1).flatten(1, 2)[..., None])
    for what, x in (pair for found in forms for pair in zip(("out", "lse"), found, strict=True)):
        eps = torch.finfo(BF16 if what == "out" else F32).eps
        finite = expected[what].nan_to_num(neginf=0)
        torch.testing.assert_close(x.nan_to_num(neginf=0), finite, rtol=0, atol=8 * eps * max(largest(finite), 1))
