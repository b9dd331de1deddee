"""The calls that vLLM's and SGLang's backends make, in every combination of arguments that they pass, beside float64:
flashtile.compat.vllm_flash_attn and flashtile.compat.sgl_kernel."""

import functools
import itertools
import math

import cached
import pytest
import torch
from cached import Cached, ints
from cases import BF16, DEVICE_PARAMS, F16, F32, Case
from compare import assert_accurate, assert_bitwise, score_rounding
from ragged import Ragged
from ragged import attention as ragged_attention
from test_kvcache_fp8 import E4M3, E5M2, in_8_bits, numbers, whole
from traced import compiled, quiet

import flashtile
from flashtile.compat import sgl_kernel, vllm_flash_attn

pytestmark = quiet
each_device = pytest.mark.parametrize("device", DEVICE_PARAMS)
each_module = pytest.mark.parametrize("module", [vllm_flash_attn, sgl_kernel], ids=["vllm", "sglang"])

STAGES = {  # how many queries sequences have, and how many keys: those of the queries are in the cache already
    "decode": dict(lengths_q=(1, 1, 1), held=(97, 1, 130)),
    "prefill": dict(lengths_q=(33, 5, 17), held=(33, 5, 17)),
    "mixed": dict(lengths_q=(1, 40, 7), held=(65, 90, 7)),
    "graph": dict(lengths_q=(1, 1, 0, 0), held=(65, 20, 0, 0), tail=2),  # padded to the size that was captured
    "drafts": dict(lengths_q=(4, 4, 4), held=(70, 4, 33)),
}
BIASES = {"none": {}, "alibi": dict(alibi="per head"), "sinks": dict(sinks=0.0)}
MATRIX = [
    Cached(f"{stage}_{i}", dtype=(F16, BF16)[i % 2], page_size=16, window=window, softcap=softcap, **sizes, **bias)
    for i, ((stage, sizes), window, softcap, bias) in enumerate(
        itertools.product(STAGES.items(), [None, (20, 0)], [0.0, 5.0], BIASES.values())
    )
]


def in_one_buffer(k_cache, v_cache, layout):
    """As vLLM keeps them: pages of rows of heads or of heads of rows, and in these keys beside values."""
    both = torch.cat((k_cache, v_cache), -1)
    if layout == "HND":
        both = both.transpose(1, 2).contiguous().transpose(1, 2)
    return both.split((k_cache.shape[-1], v_cache.shape[-1]), -1)


def by_vllm(given, **others):
    window = given["window"]
    return vllm_flash_attn.flash_attn_varlen_func(
        q=given["q"],
        k=given["k_cache"],
        v=given["v_cache"],
        cu_seqlens_q=given["cu_seqlens_q"],
        max_seqlen_q=int(given["cu_seqlens_q"].diff().max()),
        seqused_k=given["cache_seqlens"],
        max_seqlen_k=int(given["cache_seqlens"].max()),
        softmax_scale=given["scale"],
        causal=given["causal"],
        alibi_slopes=given.get("alibi_slopes"),
        window_size=[-1, -1] if window is None else list(window),
        block_table=given["block_table"],
        softcap=given["softcap"],
        s_aux=given.get("sinks"),
        **others,
    )


def by_sglang(given, return_softmax_lse=False, **others):
    result = sgl_kernel.flash_attn_with_kvcache(
        q=given["q"],
        k_cache=given["k_cache"],
        v_cache=given["v_cache"],
        page_table=given["block_table"],
        cache_seqlens=given["cache_seqlens"],
        cu_seqlens_q=given["cu_seqlens_q"],
        cu_seqlens_k_new=torch.nn.functional.pad(given["cache_seqlens"].cumsum(0), (1, 0)).int(),
        max_seqlen_q=int(given["cu_seqlens_q"].diff().max()),
        softmax_scale=given["scale"],
        causal=given["causal"],
        window_size=given["window"] or (-1, -1),
        softcap=given["softcap"],
        return_softmax_lse=return_softmax_lse,
        sinks=given.get("sinks"),
        **others,
    )
    if not return_softmax_lse:
        return result
    out, lse, *rest = result
    assert [x.numel() for x in rest] == [0, 0]
    return out, lse


def place_for(q, head_dim_v, dtype=None):
    """A larger buffer, full of NaN, and its first rows."""
    buffer = torch.full((len(q) + 3, q.shape[1], head_dim_v), math.nan, dtype=dtype or q.dtype, device=q.device)
    return buffer, buffer[: len(q)]


def check(case, call, given, now, **options):
    """`now` are arguments of the formula."""
    head_dim_v = given["v_cache"].shape[-1]
    buffer, place = place_for(given["q"], head_dim_v, case.dtype)
    out, lse = call(given, out=place, return_softmax_lse=True, **options)
    exact_out, exact_lse = cached.attention(now(torch.float64))
    rough_out, _ = cached.attention(now(case.dtype), dtype=case.dtype)
    _, rough_lse = cached.attention(now(case.dtype), dtype=F32)
    assert out is place and buffer[len(place) :].isnan().all()
    assert_accurate(out, exact_out, rough_out, "out", 2 * score_rounding(exact_lse, exact_out))
    assert_accurate(lse, exact_lse, rough_lse, "lse", 2 * score_rounding(exact_lse))
    again = torch.empty_like(place)
    assert call(given, out=again, **options) is again
    assert_bitwise(again, out)
    assert_bitwise(call(given, **options), out.to(BF16) if given["q"].dtype is E4M3 else out)


def by_each(cases):
    """SGLang has no alibi_slopes."""
    pairs = [(case, call) for case in cases for call in (by_vllm, by_sglang)]
    return [(case, call) for case, call in pairs if case.alibi is None or call is by_vllm]


@pytest.mark.parametrize("layout", ["apart", "NHD", "HND"])
@pytest.mark.parametrize("case, call", by_each(MATRIX), ids=lambda x: getattr(x, "__name__", str(x)))
@each_device
def test_caches(device, case, call, layout):
    given = case.arguments(device)
    if layout != "apart":
        given["k_cache"], given["v_cache"] = in_one_buffer(given["k_cache"], given["v_cache"], layout)
    how = dict(scheduler_metadata=ints((0,), device), num_splits=16)
    how |= dict(fa_version=2 if case.sinks is None else 3) if call is by_vllm else dict(ver=3)
    check(case, call, given, lambda dtype: given, **how)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("call", [by_vllm, by_sglang])
@pytest.mark.parametrize("head_dims", [(64, 128), (192, 128), (80, 80), (60, 36)], ids=str)
def test_pages_and_head_dimensions(head_dims, call, page_size):
    head_dim, head_dim_v = head_dims
    sizes = dict(page_size=page_size, head_dim=head_dim, head_dim_v=head_dim_v, heads_q=8, sinks=0.0)
    case = Cached("sizes", dtype=F32, window=(30, 0), **STAGES["mixed"], **sizes)
    given = case.arguments()
    check(case, call, given, lambda dtype: given)


@pytest.mark.parametrize("numbers_of", [F32, E4M3], ids=str)
def test_compiled(numbers_of):
    """In one graph."""
    torch.compiler.reset()
    given = Cached("mixed", dtype=F32, page_size=16, sinks=0.0, **STAGES["mixed"]).arguments()
    if numbers_of is E4M3:
        given, _ = of_8_bits(given, "heads", E4M3, "cpu")
    scales = descales(given)
    q, k, v, begins, held, table = (
        given[name] for name in ("q", "k_cache", "v_cache", "cu_seqlens_q", "cache_seqlens", "block_table")
    )

    def both(q, *places):
        common = dict(causal=True, **scales)
        vllm = dict(seqused_k=held, block_table=table, s_aux=given["sinks"], out=places[0])
        vllm_flash_attn.flash_attn_varlen_func(q, k, v, 40, begins, 90, **vllm, **common)
        sglang = dict(cu_seqlens_q=begins, cache_seqlens=held, page_table=table, sinks=given["sinks"], out=places[1])
        sgl_kernel.flash_attn_with_kvcache(q, k, v, **sglang, **common)
        return places

    places, expected = torch.empty(2, 2, len(q), 4, 64)
    compiled(both)(q, *places)
    both(q, *expected)
    for found, same in zip(places, expected, strict=True):
        assert_bitwise(found, same)


# ---- numbers of 8 bits


def of_8_bits(given, kind, stored, device):
    """The same with caches of 8-bit numbers and queries of e4m3, and what they stand for, exactly in 16 bits."""
    given = in_8_bits(given, kind, stored)
    shape = len(given["cache_seqlens"]), given["k_cache"].shape[2]
    descale = (2.0 ** torch.randint(-5, -1, shape, generator=torch.Generator().manual_seed(4))).to(device)
    q = numbers(given["q"].float() * 8, E4M3)

    def meant(dtype):
        found = whole(given, dtype)
        per_head = descale.double().repeat_interleave(q.shape[1] // shape[1], 1)
        rows = torch.repeat_interleave(per_head, given["cu_seqlens_q"].diff(), 0, output_size=len(q))
        return found | dict(q=(q.double() * rows[..., None]).to(dtype))

    return given | dict(q=q, q_descale=descale), meant


def descales(given, expanded=()):
    """vLLM expands those that are one number."""
    found = {name: given[name] for name in ("q_descale", "k_descale", "v_descale") if name in given}
    return {name: x.reshape(1, 1).expand(expanded) if expanded and x.numel() == 1 else x for name, x in found.items()}


@pytest.mark.parametrize("kind", ["none", "all", "heads"])
@pytest.mark.parametrize("stored", [E4M3, E5M2])
@pytest.mark.parametrize(
    "case, call",
    by_each(
        Cached(f"{stage}_{name}", dtype=BF16, page_size=16, softcap=5.0, window=(40, 0), **STAGES[stage], **bias)
        for stage in ("decode", "prefill", "mixed", "drafts")
        for name, bias in BIASES.items()
    ),
    ids=lambda x: getattr(x, "__name__", str(x)),
)
@each_device
def test_8_bits(device, case, call, stored, kind):
    """Of queries too, as both engines quantize them, and with queries of 16 bits."""
    given = case.arguments(device)
    batch_and_heads = (case.batch, case.heads_k) if kind == "all" else ()
    narrow, meant = of_8_bits(given, kind, stored, device)
    check(case, call, narrow, meant, **descales(narrow, batch_and_heads))
    wide = narrow | dict(q=given["q"])
    check(case, call, wide, lambda dtype: whole(wide, dtype), **descales(wide, batch_and_heads))


def test_out_says_which_16_bits_8_bits_become():
    given = Cached("decode", dtype=F16, page_size=16, **STAGES["decode"]).arguments()
    given, _ = of_8_bits(given, "heads", E4M3, "cpu")
    _, place = place_for(given["q"], 64, F16)
    by_vllm(given, out=place, **descales(given))
    keys = dict(k_descale=given["k_descale"] * given["q_descale"], v_descale=given["v_descale"])
    names = ("k_cache", "v_cache", "cache_seqlens", "block_table", "cu_seqlens_q")
    own = {name: given[name] for name in names}
    assert_bitwise(place, flashtile.attention_kvcache(given["q"].to(F16), **own, **keys))


@each_module
def test_descales_have_no_effect_on_16_bits(module):
    """vLLM passes them always."""
    case = Cached("decode", dtype=F16, page_size=16, **STAGES["decode"])
    given, call = case.arguments(), by_vllm if module is vllm_flash_attn else by_sglang
    layer = dict.fromkeys(("q_descale", "k_descale", "v_descale"), torch.tensor(7.0).expand(3, 2))
    assert_bitwise(call(given, **layer), call(given))


# ---- keys that are in no pages: encoders, prefill of latent attention, the new tokens of context parallelism

SEQUENCES = [
    Ragged(f"{name}_{i}", dtype=(F16, BF16)[i % 2], causal=causal, **fields)
    for i, ((name, fields), causal) in enumerate(
        itertools.product(
            {
                "plain": {},
                "window": dict(window=(20, 0)),
                "softcap": dict(softcap=5.0),
                "alibi": dict(alibi="per head"),
                "sinks": dict(sinks=0.0),
                "latent": dict(head_dim=192, head_dim_v=128, heads_q=4, heads_k=4),
                "padded": dict(tail=5, used_k=(90, 40, 0, 130, 0)),
            }.items(),
            [False, True],
        )
    )
]


@pytest.mark.parametrize("case, call", by_each(SEQUENCES), ids=lambda x: getattr(x, "__name__", str(x)))
@each_device
def test_sequences(device, case, call):
    q, k, v = case.tensors(device)
    exact, exact_lse = ragged_attention(q, k, v, **case.options(device))
    rough, _ = ragged_attention(q, k, v, **case.options(device), dtype=case.dtype)
    _, rough_lse = ragged_attention(q, k, v, **case.options(device), dtype=F32)
    given = case.options(device)
    sinks, slopes, window = given.pop("sinks", None), given.pop("alibi_slopes", None), given.pop("window")
    given["softmax_scale"] = given.pop("scale")
    buffer, place = place_for(q, v.shape[-1])
    given |= dict(max_seqlen_q=130, max_seqlen_k=130, window_size=window or (-1, -1), return_softmax_lse=True)
    if call is by_vllm:
        function, scores = vllm_flash_attn.flash_attn_varlen_func, dict(s_aux=sinks, alibi_slopes=slopes)
    else:
        function, scores = sgl_kernel.flash_attn_varlen_func, dict(sinks=sinks)
    out, lse, *_ = function(q, k, v, **given, **scores, out=place)
    assert out is place and buffer[len(place) :].isnan().all()
    assert_accurate(out, exact, rough, "out", 2 * score_rounding(exact_lse, exact))
    assert_accurate(lse, exact_lse, rough_lse, "lse", 2 * score_rounding(exact_lse))


@each_module
def test_dense_keys_of_which_some_count(module):
    """Without cu_seqlens_k."""
    case = Cached("dense", dtype=F32, **STAGES["mixed"])
    given = case.arguments()
    expected, _ = cached.attention(given)
    _, place = place_for(given["q"], 64)
    begins, held = given["cu_seqlens_q"], given["cache_seqlens"]
    given["k_cache"][:, 90:], given["v_cache"][:, 90:] = math.nan, math.nan
    call = functools.partial(module.flash_attn_varlen_func, given["q"], given["k_cache"], given["v_cache"])
    call(
        cu_seqlens_q=begins, cu_seqlens_k=None, max_seqlen_q=40, max_seqlen_k=90, seqused_k=held, causal=True, out=place
    )
    torch.testing.assert_close(place.double(), expected, rtol=0, atol=1e-5)


@each_device
def test_of_e4m3_sequences(device):
    """Out is of the dtype of the place."""
    q, k, v = (x.mul(4).to(E4M3) for x in Case("fp8", dtype=BF16, batch=1).tensors(device))
    q, k, v = q[0], k[0], v[0]
    begins = [ints((0, len(x)), device) for x in (q, k)]
    scales = {name: torch.full((1, 1), 0.1, device=device) for name in ("q_descale", "k_descale", "v_descale")}
    for dtype in (BF16, F16):
        _, place = place_for(q, 64, dtype)
        given = dict(max_seqlen_q=65, max_seqlen_k=97, causal=True, out=place, **scales)
        vllm_flash_attn.flash_attn_varlen_func(q, k, v, cu_seqlens_q=begins[0], cu_seqlens_k=begins[1], **given)
        own = dict(cu_seqlens_q=begins[0], cu_seqlens_k=begins[1], causal=True, out_dtype=dtype, **scales)
        assert_bitwise(place, flashtile.attention_varlen(q, k, v, **own))


# ---- keys in parts


@each_device
@pytest.mark.parametrize("kind", [None, "all"])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_cascade(softcap, kind, device):
    """vLLM reads the pages that sequences begin with in common once, for all queries."""
    sizes = dict(lengths_q=(1, 20, 6), held=(97, 60, 130), shared=True)
    case = Cached("cascade", dtype=BF16, page_size=16, softcap=softcap, **sizes)
    given, prefix = case.arguments(device), 32
    given["block_table"][1:, : prefix // 16] = given["block_table"][0, : prefix // 16]
    if kind is not None:  # one descale of all queries, of all keys, of all values
        given = in_8_bits(given, kind, E4M3) | dict(q=numbers(given["q"].float() * 8, E4M3))
        given["q_descale"] = torch.tensor(0.125, device=device)
    scales, lone = descales(given, (3, 2)), descales(given, (1, 2))

    def meant(dtype):
        one = {name: x for name, x in given.items() if name != "q_descale"}
        return whole(one, dtype) | dict(q=given["q"].to(dtype) * given.get("q_descale", 1))

    queries = len(given["q"])
    whole_prefix = dict(cu_seqlens_q=ints((0, queries), device), cache_seqlens=ints((prefix,), device), causal=False)
    first = by_vllm(given | whole_prefix | dict(block_table=given["block_table"][:1]), return_softmax_lse=True, **lone)
    rest = dict(cache_seqlens=given["cache_seqlens"] - prefix, block_table=given["block_table"][:, prefix // 16 :])
    second = by_vllm(given | rest, return_softmax_lse=True, **scales)
    out, lse = flashtile.combine(*zip(first, second, strict=True))
    exact_out, exact_lse = cached.attention(meant(torch.float64))
    rough_out, _ = cached.attention(meant(BF16), dtype=BF16)
    assert_accurate(out, exact_out, rough_out, "out", 2 * score_rounding(exact_lse, exact_out))
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-3)


@pytest.mark.parametrize("ranks", [2, 3])
def test_context_on_several_ranks(ranks):
    """Decode context parallelism: rank r has every so many-th key from r on, and new keys are no rank's yet."""
    lengths, context = (1, 5, 3), (30, 17, 1)
    q, k, v = torch.randn(3, 60, 4, 64, generator=torch.Generator().manual_seed(1)).unbind()
    begins = ints((0, 1, 6, 9))
    generator = torch.Generator().manual_seed(2)
    old_k, old_v = torch.randn(2, 3, 30, 4, 64, generator=generator)
    q, k, v = q[:9], k[:9], v[:9]
    parts = []
    for rank in range(ranks):
        local = ints([len(range(rank, n, ranks)) for n in context])
        mine = [x[:, rank::ranks].reshape(-1, 1, 4, 64) for x in (old_k, old_v)]
        table = torch.arange(len(mine[0]), dtype=torch.int32).view(3, -1)
        group = dict(cp_world_size=ranks, cp_rank=rank, cp_tot_seqused_k=ints(context))
        given = dict(seqused_k=local, max_seqlen_k=30, block_table=table, window_size=[-1, -1], return_softmax_lse=True)
        given |= dict(max_seqlen_q=5, cu_seqlens_q=begins, causal=False, **group)
        parts.append(vllm_flash_attn.flash_attn_varlen_func(q, *mine, **given))
    new = dict(cu_seqlens_q=begins, max_seqlen_q=5, cu_seqlens_k=begins, max_seqlen_k=5, causal=True)
    parts.append(vllm_flash_attn.flash_attn_varlen_func(q, k, v, **new, return_softmax_lse=True))
    out, _ = flashtile.combine(*zip(*parts, strict=True))
    for b, (first, last) in enumerate(itertools.pairwise(begins.tolist())):
        rows = slice(first, last)
        keys, values = (torch.cat((x[b, : context[b]], y[rows]))[None] for x, y in ((old_k, k), (old_v, v)))
        exact, _ = cached.reference.attention(q[None, rows], keys, values, causal=True)
        assert lengths[b] == last - first
        torch.testing.assert_close(out[rows].double(), exact[0], rtol=0, atol=1e-5)


def test_one_query_sees_all_keys_of_a_rank():
    given = Cached("decode", dtype=F32, page_size=16, **STAGES["decode"]).arguments()
    assert_bitwise(by_vllm(given, cp_world_size=4, cp_rank=2, cp_tot_seqused_k=ints((400, 3, 600))), by_vllm(given))
