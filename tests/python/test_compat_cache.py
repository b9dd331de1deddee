"""flash_attn_with_kvcache of flashtile.compat: caches as flash-attn's two interfaces know them."""

import dataclasses
import functools
import math

import cached
import pytest
import torch
from cached import Cached, ints
from cases import BF16, F16, F32, on_devices
from compare import assert_accurate, assert_bitwise, largest, score_rounding
from test_kvcache import check as check_cache
from theirs import SMALL, assert_refuses, attend_seen, fa2, fa3, in_their_terms, of_each_module, seen_in_chunks

import flashtile
from flashtile.compat import _cache

ROTATED = dict(rotary=32, seqlen_q=5, new=5)
CACHES = [
    Cached("one_token", dtype=BF16, new=1, causal=False, rotary=32, interleaved=False),
    Cached("append", dtype=F16, **ROTATED, indexed=True),
    Cached("window", dtype=F32, causal=False, window=(30, 2), softcap=9.0, scale=0.2, interleaved=False, **ROTATED),
    Cached("pages", dtype=F32, seqlen_q=3, new=7, page_size=16, head_dim_v=40, leftpad=(3, 0, 0, 50)),
]
OF_2_ALONE = [Cached("slopes", dtype=F32, seqlen_q=3, alibi="per batch and head", num_splits=3)]
OF_3_ALONE = [Cached("ragged", dtype=F32, lengths_q=(3, 0, 1, 20), new=0, rotary=32, tail=4)]
OF_3_ALONE += [Cached("ragged_pages", dtype=F32, lengths_q=(3, 0, 1, 20), page_size=3, causal=False)]


def with_kvcache_2(return_lse=False, **options):
    return fa2.flash_attn_with_kvcache(**in_their_terms(options), return_softmax_lse=return_lse)


def with_kvcache_3(return_lse=False, block_table=None, **options):
    table = options.get("cu_seqlens_q") if "k_new" in options else None
    options = in_their_terms(options) | {"page_table": block_table, "cu_seqlens_k_new": table}
    result = fa3.flash_attn_with_kvcache(**options, return_softmax_lse=return_lse)
    if not return_lse:
        return result
    out, lse, *partial = result
    assert [x.numel() for x in partial] == [0, 0]  # as in the original, where keys are not divided
    return out, lse


@pytest.mark.parametrize("case, device", on_devices(CACHES + OF_2_ALONE))
def test_caches_2(case, device):
    check_cache(case, device, with_kvcache_2)


@pytest.mark.parametrize("case, device", on_devices(CACHES + OF_3_ALONE))
def test_caches_3(case, device):
    check_cache(case, device, with_kvcache_3)


@of_each_module
def test_caches_are_full_by_default(module):
    q, k, v = SMALL.tensors()
    assert_bitwise(module.flash_attn_with_kvcache(q, k, v), flashtile.attention(q, k, v))
    pages = torch.tensor([[1, 0]], dtype=torch.int32)
    paged = {"block_table" if module is fa2 else "page_table": pages}
    rows = [x.flip(0).flatten(0, 1)[None] for x in (k, v)]
    assert_bitwise(module.flash_attn_with_kvcache(q[:1], k, v, **paged), flashtile.attention(q[:1], *rows))


def test_cache_lengths_may_be_an_int():
    arguments = Cached("equal", dtype=F32, held=(60, 60), new=1).arguments()
    caches = {name: arguments[name].clone() for name in ("k_cache", "v_cache")}
    expected = flashtile.attention_kvcache(**(arguments | caches))
    assert_bitwise(with_kvcache_2(**(arguments | {"cache_seqlens": 60})), expected)


def test_varlen_with_pages():
    case = Cached("pages", dtype=F32, lengths_q=(3, 0, 1, 20), page_size=16, alibi="per head")
    arguments = in_their_terms(case.arguments())
    begins = torch.nn.functional.pad(arguments.pop("cache_seqlens").cumsum(0), (1, 0)).int()
    q, k, v, cu_seqlens_q = (arguments.pop(name) for name in ("q", "k_cache", "v_cache", "cu_seqlens_q"))
    function = functools.partial(fa2.flash_attn_varlen_func, q, k, v, cu_seqlens_q, begins, 20, 130, **arguments)
    out, lse, nothing = function(return_attn_probs=True)
    assert nothing.numel() == 0
    for found, expected in zip((out, lse), cached.attention(case.arguments()), strict=True):
        assert_accurate(found, expected, expected, slack=2e-6)
    with pytest.raises(
        NotImplementedError, match=r"^flash_attn_varlen_func: dropout_p is 0\.1, expected 0.*block_table"
    ):
        function(dropout_p=0.1)


@of_each_module
def test_splits_are_passed_on(module, monkeypatch):
    passed = []
    monkeypatch.setattr(_cache, "attention_kvcache", lambda *args, num_splits, **options: passed.append(num_splits))
    for num_splits in (0, 1, 5, -1):
        module.flash_attn_with_kvcache(*SMALL.tensors(), num_splits=num_splits)
    assert passed == [0, 1, 5, 0]


# ---- what flashtile.attention_kvcache does by other rules, or not at all


@dataclasses.dataclass(frozen=True)
class Theirs(Cached):
    """As flash-attn would call it."""

    lengths_new: tuple | None = None  # of new keys, ragged, whatever the queries are
    dense_new: int | None = None  # so many new keys in each sequence, where queries are ragged
    rotary_first: tuple | None = None  # rotary_seqlens
    chunk: int = 0

    def added(self):
        if self.lengths_new is not None:
            return self.lengths_new
        return super().added() if self.dense_new is None else (self.dense_new,) * len(self.held)

    def given(self, device="cpu", module=fa3):
        given = super().arguments(device)
        generator = torch.Generator().manual_seed(5)
        sizes = {"k": self.head_dim, "v": self.head_dim_v or self.head_dim}
        rows = None if self.lengths_new is None else (sum(self.lengths_new) + 2,)
        rows = rows if self.dense_new is None else (self.batch, self.dense_new)
        for name, dim in sizes.items() if rows else ():
            new = torch.randn(*rows, self.heads_k, dim, generator=generator).to(device, self.dtype)
            given[f"{name}_new"] = new
        given = in_their_terms(given)
        if module is fa3:
            given["page_table"] = given.pop("block_table", None)
        if self.lengths_new is not None:
            given["cu_seqlens_k_new"] = ints([sum(self.lengths_new[:b]) for b in range(self.batch + 1)], device)
        if self.rotary_first is not None:
            given["rotary_seqlens"] = ints(self.rotary_first, device)
        if self.chunk:
            given["attention_chunk"] = self.chunk
        return given


def rows_of(x, begins):
    """[(rows, H, D)] of each sequence."""
    if begins is None:
        return list(x)
    return [x[slice(*ends)] for ends in zip(begins.tolist(), begins.tolist()[1:], strict=False)]


def their_formula(given, dtype=torch.float64):
    """([(out, lse) of each sequence], k_cache, v_cache), by the words of flash-attn's docstring. Nothing is changed."""
    k_cache, v_cache = given["k_cache"].clone(), given["v_cache"].clone()
    table, index = given.get("page_table"), given.get("cache_batch_idx")
    if table is not None and index is not None:
        table, index = table[index.long()], None
    queries = rows_of(given["q"], given.get("cu_seqlens_q"))
    new = {x: rows_of(given[x], given.get("cu_seqlens_k_new")) if x in given else None for x in "kv"}
    window = tuple(None if n < 0 else n for n in given["window_size"])
    masked = given["causal"] or window != (None, None) or given.get("attention_chunk", 0) > 0
    results = []
    for b, held in enumerate(given["cache_seqlens"].tolist()):
        q, end = queries[b], held
        if new["k"] is not None:
            k, v = new["k"][b], new["v"][b]
            end = held + len(k)
            if "rotary_cos" in given:
                first = int(given.get("rotary_seqlens", given["cache_seqlens"])[b])
                angles = (given["rotary_cos"], given["rotary_sin"], given["rotary_interleaved"])
                k = cached.rotated(k, first + torch.arange(len(k), device=k.device), *angles)
                counted = torch.arange(len(q), device=q.device) * masked
                q = cached.rotated(q, first + counted, *angles)
            place = tuple(x[held:] for x in cached.places(b, end, k_cache.shape[1], table, index))
            k_cache[place], v_cache[place] = k, v
        first = int(given["cache_leftpad"][b]) if given.get("cache_leftpad") is not None else 0
        place = tuple(x[first:] for x in cached.places(b, end, k_cache.shape[1], table, index))
        keys = k_cache[place]
        seen = seen_in_chunks(
            len(q), len(keys), given.get("attention_chunk", 0), given["causal"], window, device=q.device
        )
        scale, softcap = given.get("softmax_scale"), given.get("softcap", 0.0)
        results.append(attend_seen(q, keys, v_cache[place], seen, scale, softcap, dtype))
    return results, k_cache, v_cache


def check_theirs(case, device, module=fa3):
    given = case.given(device, module)
    known = given | {"page_table": given.get("block_table", given.get("page_table"))}
    exact, k_cache, v_cache = their_formula(known)
    rough, rough_lse = their_formula(known, case.dtype)[0], their_formula(known, F32)[0]
    mine = {name: given[name].clone() for name in ("k_cache", "v_cache")}
    out, lse, *_ = module.flash_attn_with_kvcache(**(given | mine), return_softmax_lse=True)
    eps = torch.finfo(case.dtype).eps
    assert_bitwise(mine["v_cache"], v_cache, "v_cache")
    torch.testing.assert_close(mine["k_cache"], k_cache, rtol=eps, atol=1e-6, equal_nan=True)
    assert out.dtype is case.dtype and lse.dtype is F32
    ragged = given.get("cu_seqlens_q")
    lses = list(lse) if ragged is None else [x.T for x in rows_of(lse.T, ragged)]
    outs = rows_of(out, ragged)
    assert len(outs) == len(exact)
    # Elements of rotated queries and keys may be rounded to the other side than the formula's.
    turned = 2 * eps * case.head_dim**-0.5 * largest(given["q"]) * largest(k_cache) if case.rotary else 0.0
    for b, (best, best_lse) in enumerate(exact):
        slack = 2 * score_rounding(best_lse, best) + 2 * turned * largest(best)
        assert_accurate(outs[b], best, rough[b][0], f"out[{b}]", slack=slack)
        assert_accurate(lses[b], best_lse, rough_lse[b][1], f"lse[{b}]", slack=2 * score_rounding(best_lse) + turned)
    if ragged is not None:  # rows behind the last sequence
        assert not out[ragged[-1] :].any() and (lse[:, ragged[-1] :] == -math.inf).all()


TURNED = dict(rotary=32, head_dim=64)
OTHER_POSITIONS = [
    Theirs("more_queries", seqlen_q=5, new=3, dtype=F32, **TURNED),
    Theirs("more_keys", seqlen_q=3, new=7, dtype=F16, window=(30, 2), causal=False, interleaved=False, **TURNED),
    Theirs("no_mask", seqlen_q=5, new=5, dtype=BF16, causal=False, leftpad=(3, 0, 0, 50), **TURNED),
    Theirs("no_mask_pages", seqlen_q=5, new=2, dtype=F32, causal=False, page_size=16, interleaved=False, **TURNED),
    Theirs("one_query", seqlen_q=1, new=4, dtype=F32, causal=False, indexed=True, rotary=64),
]
RAGGED_NEW = dict(lengths_q=(3, 0, 1, 20), lengths_new=(5, 2, 0, 20))
OF_3_BY_OTHER_RULES = [
    Theirs("rotary_seqlens", seqlen_q=5, new=5, dtype=F32, rotary_first=(7, 300, 0, 12), **TURNED),
    Theirs("rotary_seqlens_no_mask", seqlen_q=5, new=2, causal=False, rotary_first=(7, 300, 0, 12), **TURNED),
    Theirs("ragged_new", dtype=F32, tail=4, **RAGGED_NEW),
    Theirs("ragged_new_full", dtype=BF16, causal=False, page_size=16, leftpad=(99, 0, 0, 131), **RAGGED_NEW),
    Theirs("ragged_new_rotary", dtype=F32, tail=4, window=(40, None), indexed=True, **RAGGED_NEW, **TURNED),
    Theirs(
        "ragged_rotary_no_mask", dtype=F16, causal=False, lengths_q=(3, 0, 1, 2), lengths_new=(3, 0, 1, 2), **TURNED
    ),
    Theirs("ragged_new_dense_queries", dtype=F32, seqlen_q=3, lengths_new=(5, 2, 0, 20), **TURNED),
    Theirs("dense_new_ragged_queries", dtype=F32, lengths_q=(3, 0, 1, 20), dense_new=4, page_size=3, **TURNED),
]
CHUNKS = [
    Theirs("chunk", dtype=F32, seqlen_q=40, chunk=16),
    Theirs("chunk_one_query", dtype=BF16, chunk=7, softcap=5.0, indexed=True),
    Theirs("chunk_full", dtype=F32, seqlen_q=50, causal=False, chunk=30, leftpad=(3, 0, 0, 50), page_size=16),
    Theirs("chunk_window", dtype=F32, seqlen_q=50, causal=False, window=(9, 4), chunk=13, scale=0.3),
    Theirs("chunk_append", dtype=F32, seqlen_q=5, new=9, chunk=20, leftpad=(99, 0, 4, 50), **TURNED),
    Theirs("chunk_alone_append", dtype=F32, seqlen_q=5, new=5, causal=False, chunk=20, **TURNED),
    Theirs("chunk_ragged", dtype=F32, tail=4, chunk=6, page_size=3, **RAGGED_NEW, **TURNED),
    Theirs("chunk_of_one", dtype=F32, seqlen_q=5, chunk=1),
    Theirs("chunk_of_all", dtype=F32, seqlen_q=45, chunk=2**40),
    Theirs("chunk_no_sequence", dtype=F32, held=(), chunk=5),
]
ODD_DIMS = [
    Theirs("odd", dtype=F32, head_dim=20, head_dim_v=13, seqlen_q=3, new=7),
    Theirs("odd_rotary", dtype=F16, head_dim=36, seqlen_q=5, new=5, rotary=32, page_size=16),
    Theirs("odd_values", dtype=BF16, head_dim=24, head_dim_v=59, seqlen_q=2, new=2, indexed=True, causal=False),
    Theirs("odd_nothing_new", dtype=F32, head_dim=59, scale=0.1),
]


@pytest.mark.parametrize("case, device", on_devices(OTHER_POSITIONS + ODD_DIMS))
def test_their_rules_2(case, device):
    check_theirs(case, device, fa2)


@pytest.mark.parametrize("case, device", on_devices(OTHER_POSITIONS + ODD_DIMS + OF_3_BY_OTHER_RULES + CHUNKS))
def test_their_rules_3(case, device):
    check_theirs(case, device, fa3)


def test_the_fast_way_is_kept(monkeypatch):
    """Where flashtile's rules are the same, it is called once, with all arguments."""
    calls = []
    monkeypatch.setattr(_cache, "attention_kvcache", lambda q, **given: calls.append(given))
    for fields in (
        dict(seqlen_q=5, new=5),
        dict(seqlen_q=5, new=5, causal=False, window=(9, None)),
        dict(new=1, causal=False),
        dict(lengths_q=(3, 0, 1, 20), new=0),
    ):
        given = Theirs("fast", dtype=F32, rotary=32, **fields).given()
        tables = {"cu_seqlens_k_new": given.get("cu_seqlens_q"), "rotary_seqlens": given["cache_seqlens"]}
        fa3.flash_attn_with_kvcache(**given, **tables)
        assert len(calls) == 1
        call = calls.pop()
        assert call["rotary_cos"] is given["rotary_cos"] and call["k_new"] is given["k"]


def test_rows_of_a_page_table_are_named():
    case = Theirs("pages", dtype=F32, seqlen_q=3, new=3, page_size=16)
    given = case.given()
    order = ints([2, 0, 3, 1])
    table = torch.empty_like(given["page_table"])
    table[order.long()] = given["page_table"]
    mixed = given | {"page_table": table}
    results = []
    for arguments in (given, mixed | {"cache_batch_idx": order}):
        caches = {name: given[name].clone() for name in ("k_cache", "v_cache")}
        results.append([fa3.flash_attn_with_kvcache(**(arguments | caches)), *caches.values()])
    for found, expected in zip(*results, strict=True):
        assert_bitwise(found, expected)
    message = "an entry of cache_batch_idx is 4, expected a row of block_table, which has 4"
    assert_refuses(fa3.flash_attn_with_kvcache, ValueError, message, **mixed, cache_batch_idx=order + 1)


@of_each_module
def test_what_is_refused_changes_no_cache(module):
    """Also where rows are appended apart from attention."""
    for fields, wrong, error in (
        (dict(**RAGGED_NEW), dict(softmax_scale="x"), TypeError),
        (dict(**RAGGED_NEW), dict(q=torch.zeros(24, 3, 64)), ValueError),
        (dict(**RAGGED_NEW), dict(cu_seqlens_q=ints([0, 5, 3, 4, 24])), ValueError),
        (dict(**RAGGED_NEW), dict(cu_seqlens_k_new=ints([0, 5, 3, 4, 24])), ValueError),
        (dict(**RAGGED_NEW), dict(cache_leftpad=ints([0, 0, 0, 999])), ValueError),
        (dict(**RAGGED_NEW), dict(cache_seqlens=ints([0, 0, 0, 999])), ValueError),
        (dict(**RAGGED_NEW, **TURNED), dict(rotary_cos=torch.ones(20, 16), rotary_sin=torch.ones(20, 16)), ValueError),
        (dict(seqlen_q=5, new=9, chunk=20), dict(q=torch.zeros(4, 5, 3, 64)), ValueError),
        (dict(seqlen_q=5, new=9, head_dim=20), dict(v=torch.zeros(4, 9, 2, 21)), ValueError),
        (dict(seqlen_q=5, new=9, head_dim=20), dict(k=torch.zeros(4, 9, 2, 22)), ValueError),
    ):
        if module is fa2 and not fields.get("head_dim") == 20:
            continue
        given = Theirs("refused", dtype=F32, **fields).given(module=module)
        before = {name: given[name].clone() for name in ("k_cache", "v_cache")}
        with pytest.raises(error) as raised:
            module.flash_attn_with_kvcache(**(given | wrong))
        assert str(raised.value).isprintable(), raised.value
        for name, cache in before.items():
            assert_bitwise(given[name], cache, name)


@of_each_module
def test_only_backward_refuses_a_gradient(module):
    given = Theirs("gradients", dtype=F32, seqlen_q=3, new=3).given(module=module)
    expected = module.flash_attn_with_kvcache(**given, return_softmax_lse=True)
    given["q"].requires_grad_()
    found = module.flash_attn_with_kvcache(**given, return_softmax_lse=True)
    for x, y in zip(found, expected, strict=True):
        assert_bitwise(x.detach(), y)
    message = "^flash_attn_with_kvcache: a gradient is asked for, expected none"
    for result in (*found[:2], module.flash_attn_with_kvcache(**given)):
        assert result.requires_grad
        with pytest.raises(NotImplementedError, match=message):
            result.sum().backward()
    given["k_cache"].requires_grad_()  # a leaf, that is written in place
    assert module.flash_attn_with_kvcache(**given).requires_grad
    with torch.no_grad():
        assert not module.flash_attn_with_kvcache(**given).requires_grad


def test_varlen_with_pages_and_gradients():
    case = Cached("pages", dtype=F32, lengths_q=(3, 0, 1, 20), page_size=16)
    given = in_their_terms(case.arguments())
    begins = torch.nn.functional.pad(given["cache_seqlens"].cumsum(0), (1, 0)).int()
    q = given["q"].requires_grad_()
    sequences = (given["cu_seqlens_q"], begins, 20, 130)
    out = fa2.flash_attn_varlen_func(
        q, given["k_cache"], given["v_cache"], *sequences, block_table=given["block_table"]
    )
    exact, _ = cached.attention(case.arguments() | {"causal": False})
    assert_accurate(out.detach(), exact, exact, slack=2e-6)
    with pytest.raises(NotImplementedError, match=r"^flash_attn_varlen_func: a gradient is asked for, .*"):
        out.sum().backward()
