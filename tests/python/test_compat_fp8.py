"""FlashAttention-3's functions of flashtile.compat, of 8-bit numbers: beside flashtile's own, to the bit, and beside
float64 attention of the numbers times their descales."""

import pytest
import reference
import torch
from cached import ints
from cases import BF16, DEVICE_PARAMS, F16, F32
from compare import assert_bitwise
from theirs import assert_refuses, attend_seen, fa3, seen_in_chunks

import flashtile

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = ("q_descale", "k_descale", "v_descale")
BATCH, HEADS_Q, HEADS_K = 3, 4, 2
TOLERANCE = 0.04  # of weights that are rounded to four bits
each_device = pytest.mark.parametrize("device", DEVICE_PARAMS)
FINITE = {E4M3: [n for n in range(256) if n % 128 < 127], E5M2: [n for n in range(256) if n % 128 < 124]}  # bytes


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def operands(device, seqlen_q=50, seqlen_k=90, head_dim=32, head_dim_v=32):
    sizes = ((seqlen_q, HEADS_Q, head_dim), (seqlen_k, HEADS_K, head_dim), (seqlen_k, HEADS_K, head_dim_v))
    q, k, v = (normal(BATCH, *size, seed=seed).mul(8).to(E4M3).to(device) for seed, size in enumerate(sizes))
    return q, k, v, {name: (0.05 + 0.1 * normal(BATCH, HEADS_K, seed=9).abs()).to(device) for name in NAMES}


def whole(x, descale):
    """Numbers of (B, S, H, D) times their descales, float64."""
    return x.double() * descale.repeat_interleave(x.shape[2] // HEADS_K, 1)[:, None, :, None].double()


def assert_close(out, expected, tolerance=TOLERANCE):
    assert out.dtype is BF16 and out.shape == expected.shape
    assert float((out.double() - expected).norm() / expected.norm()) < tolerance


def in_rows(lengths, *tensors):
    """The first rows of each sequence one behind the other, and where sequences begin."""
    rows = [torch.cat([x[b, :n] for b, n in enumerate(lengths)]) for x in tensors]
    return *rows, ints([sum(lengths[:b]) for b in range(len(lengths) + 1)], tensors[0].device)


@each_device
@pytest.mark.parametrize("head_dim_v", [32, 20])
def test_dense(head_dim_v, device):
    q, k, v, descales = operands(device, head_dim_v=head_dim_v)
    out, lse = fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **descales)
    assert lse.dtype is F32
    expected, _ = reference.attention(*map(whole, (q, k, v), descales.values()), causal=True)
    assert_close(out, expected)
    padded = torch.nn.functional.pad(v.float(), (0, -head_dim_v % 8)).to(E4M3)
    same = flashtile.attention(q, k, padded, causal=True, return_lse=True, **descales)
    assert_bitwise(out, same[0][..., :head_dim_v], "out")
    assert_bitwise(lse, same[1], "lse")
    assert_bitwise(fa3.flash_attn_func(q, k, v), fa3.flash_attn_func(q, k, v, **dict.fromkeys(NAMES)))
    place = torch.empty_like(out)
    assert fa3._flash_attn_forward(q, k, v, out_=place, causal=True, **descales)[0] is place
    assert_bitwise(place, out)
    message = "out_ has dtype torch.float16, expected torch.bfloat16"
    assert_refuses(fa3._flash_attn_forward, TypeError, message, q, k, v, out_=place.half())


@each_device
def test_packed(device):
    q, k, v, descales = operands(device, seqlen_q=90)
    out = fa3.flash_attn_qkvpacked_func(torch.cat((q, k, v), 2), num_heads_q=HEADS_Q, **descales)
    assert_bitwise(out, flashtile.attention(q, k, v, **descales))


@each_device
def test_ragged(device):
    q, k, v, descales = operands(device)
    rows_q, begins_q = in_rows((50, 0, 13), q)
    rows_k, rows_v, begins_k = in_rows((70, 20, 90), k, v)
    tables = dict(cu_seqlens_q=begins_q, cu_seqlens_k=begins_k)
    call = dict(q=rows_q, k=rows_k, v=rows_v, window_size=(20, 5), **tables, **descales)
    out = fa3.flash_attn_varlen_func(**call, max_seqlen_q=50, max_seqlen_k=90)
    expected = flashtile.attention_varlen(rows_q, rows_k, rows_v, window=(20, 5), **tables, **descales)
    assert_bitwise(out, expected)
    out = fa3.flash_attn_varlen_func(q, k, v, None, None, 50, 90, **descales)  # both sides are dense
    assert_close(out, reference.attention(*map(whole, (q, k, v), descales.values()))[0])


@each_device
@pytest.mark.parametrize("chunk", [1, 16, 1000])
def test_chunks(chunk, device):
    q, k, v, descales = operands(device)
    out = fa3.flash_attn_func(q, k, v, causal=True, attention_chunk=chunk, **descales)
    seen = seen_in_chunks(50, 90, chunk, causal=True, device=device)
    exact = [attend_seen(*x, seen)[0] for x in zip(*map(whole, (q, k, v), descales.values()), strict=True)]
    assert_close(out, torch.stack(exact))


# ---- caches


def cache_of(k, v):
    return dict(k_cache=k.clone(), v_cache=v.clone(), cache_seqlens=ints((70, 0, 85), k.device))


def folded(descales):
    """Those of keys, where queries that have not been multiplied meet them."""
    return dict(k_descale=descales["k_descale"] * descales["q_descale"], v_descale=descales["v_descale"])


def scaled(q, descale):
    """What queries of 8 bits become."""
    return (q.float() * descale.repeat_interleave(HEADS_Q // HEADS_K, 1)[:, None, :, None]).to(BF16)


def cache_descales(descales):
    return {name: descales[name] for name in ("k_descale", "v_descale")}


@each_device
@pytest.mark.parametrize("stored", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [F16, BF16, E4M3])
def test_caches(dtype, stored, device):
    q, k, v, descales = operands(device, seqlen_q=2)
    k, v = k.float().to(stored), v.float().to(stored)
    q = q if dtype is E4M3 else q.to(dtype)  # descales of q have no effect on 16 bits
    q_16 = scaled(q, descales["q_descale"]) if dtype is E4M3 else q
    cache, expected = cache_of(k, v), cache_of(k, v)
    own = dict(causal=True, **expected, **cache_descales(descales))
    narrow = own | folded(descales) if dtype is E4M3 else own
    bare = q.to(q_16.dtype)
    out = fa3.flash_attn_with_kvcache(q, causal=True, **cache, **descales)
    assert_bitwise(out, flashtile.attention_kvcache(bare, **narrow))
    rows, begins = in_rows((2, 0, 1), q)
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        rows, causal=True, cu_seqlens_q=begins, return_softmax_lse=True, **cache, **descales
    )
    rows, _ = in_rows((2, 0, 1), bare)
    same = flashtile.attention_kvcache(rows, cu_seqlens_q=begins, return_lse=True, **narrow)
    assert_bitwise(out, same[0], "out")
    assert_bitwise(lse, same[1], "lse")
    # New rows of 16 bits are divided by their descales.
    new = {name: normal(BATCH, 2, HEADS_K, 32, seed=seed).to(q_16) for seed, name in enumerate(("k", "v"))}
    out = fa3.flash_attn_with_kvcache(q, causal=True, **cache, **new, **descales)
    same = flashtile.attention_kvcache(q_16, **own, **{f"{name}_new": x for name, x in new.items()})
    assert_bitwise(out, same)
    for name, before in (("k_cache", k), ("v_cache", v)):
        assert_bitwise(cache[name].view(torch.uint8), expected[name].view(torch.uint8), name)
        assert not torch.equal(cache[name].view(torch.uint8), before.view(torch.uint8))


@each_device
@pytest.mark.parametrize("stored", [E4M3, E5M2])
@pytest.mark.parametrize("kind", ["none", "one", "heads", "rows"])
def test_new_rows_of_the_caches_numbers_are_stored_as_they_are(kind, stored, device):
    """Each finite number, whatever its descale is; a zero may lose its sign."""
    numbers = torch.tensor(FINITE[stored], dtype=torch.uint8).repeat(2)[:256].view(1, 8, HEADS_K, 16).to(device)
    rows = numbers.shape[1]
    q = normal(1, 1, HEADS_Q, 16).to(device, E4M3)
    shape = dict(one=(1,), heads=(1, HEADS_K), rows=(1, rows + 3, HEADS_K))
    for descale in (1.0, 0.3, 1 / 448, 7e-39, 1e30, 0.0, -3.7):
        k_cache, v_cache = torch.zeros(2, 1, rows + 3, HEADS_K, 16, device=device).to(stored)
        given = torch.full(shape[kind], descale, device=device) if kind != "none" else None
        k, v = numbers.view(stored), numbers.flip(1).view(stored)
        fa3.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=3, k_descale=given, v_descale=given)
        for cache, new in ((k_cache, k), (v_cache, v)):
            assert_bitwise(cache[:, 3:].float(), new.float())
            assert not cache[:, :3].float().any()
        if given is not None:
            assert (given == descale).all()


@each_device
@pytest.mark.parametrize("how", ["dense", "ragged", "pages", "chunks", "odd"])
def test_new_rows_count(how, device):
    q, k, v, descales = operands(device, seqlen_q=5, head_dim=12 if how == "odd" else 32)
    exact_q = scaled(q, descales["q_descale"]).double()
    cache, given = cache_of(k, v), {}
    ends = ints((75, 5, 90), device)
    new = [normal(BATCH, 5, HEADS_K, x.shape[3], seed=7).to(device, E4M3) for x in (k, v)]
    for b, held in enumerate((70, 0, 85)):
        for x, rows in zip((k, v), new, strict=True):
            x[b, held : held + 5] = rows[b]  # a cache that has them
    if how == "ragged":
        given["cu_seqlens_q"] = given["cu_seqlens_k_new"] = ints((0, 5, 10, 15), device)
        q, *new = (x.flatten(0, 1) for x in (q, *new))
    if how == "pages":  # of 30 rows
        given["page_table"] = ints(range(9), device).flip(0).view(3, 3)
        cache |= {x: cache[x].view(9, 30, HEADS_K, -1).flip(0) for x in ("k_cache", "v_cache")}
    chunk = 16 if how == "chunks" else 0
    call = dict(causal=True, attention_chunk=chunk, **descales, **given)
    out = fa3.flash_attn_with_kvcache(q, k=new[0], v=new[1], **cache, **call)
    expected = []
    exact = exact_q, whole(k, descales["k_descale"]), whole(v, descales["v_descale"])
    for queries, keys, values, end in zip(*exact, ends.tolist(), strict=True):
        seen = seen_in_chunks(5, end, chunk, causal=True, device=device)
        expected.append(attend_seen(queries, keys[:end], values[:end], seen)[0])
    assert_close(out.view(BATCH, 5, HEADS_Q, -1), torch.stack(expected), 0.01)
    if how != "pages":
        for name, x in (("k_cache", k), ("v_cache", v)):
            assert_bitwise(cache[name].view(torch.uint8), x.view(torch.uint8), name)
    k_cache, v_cache, held = cache.values()
    assert_bitwise(fa3._flash_attn_forward(q, k_cache, v_cache, *new, seqused_k=held, **call)[0], out)


@each_device
def test_rotation(device):
    """Of numbers without their descales, by tables of their dtype, as the original wants them: quarter turns, after
    which nothing is rounded."""
    q, k, v, descales = operands(device, seqlen_q=2)
    new = [normal(BATCH, 2, HEADS_K, 32, seed=7).to(device, E4M3) for _ in "kv"]
    turns = torch.arange(800).view(100, 8).square() % 7 % 4
    tables = [torch.tensor(x)[turns].to(device, E4M3) for x in ((1.0, 0.0, -1.0, 0.0), (0.0, 1.0, 0.0, -1.0))]
    angles = dict(zip(("rotary_cos", "rotary_sin"), tables, strict=True))
    cache, expected = cache_of(k, v), cache_of(k, v)
    out = fa3.flash_attn_with_kvcache(q, k=new[0], v=new[1], causal=True, **cache, **angles, **descales)
    q, *new = (x.to(BF16) for x in (scaled(q, descales["q_descale"]), *new))
    angles = {name: x.to(BF16) for name, x in angles.items()}
    flashtile.attention_kvcache(q, k_new=new[0], v_new=new[1], **expected, **angles)
    for name in ("k_cache", "v_cache"):
        assert_bitwise(cache[name].float(), expected[name].float(), name)
    expected["cache_seqlens"] += 2
    same = flashtile.attention_kvcache(q, **expected, **angles, **cache_descales(descales))
    assert_close(out, same.double(), 0.01)


@each_device
def test_no_effect_on_16_bits(device):
    """As in the original, whose callers pass them on whatever the numbers are."""
    q, k, v = (x.to(BF16) for x in operands(device)[:3])
    descales = dict.fromkeys(NAMES, torch.full((BATCH, HEADS_K), 7.0, device=device))
    assert_bitwise(fa3.flash_attn_func(q, k, v, **descales), flashtile.attention(q, k, v))
    assert_bitwise(fa3.flash_attn_with_kvcache(q, k, v, **descales), flashtile.attention(q, k, v))


def test_refusals():
    q, k, v, descales = operands("cpu", seqlen_q=2)
    message = r"q_descale has shape \(2, 2\), expected \(3, 2\) = \(B, H_k\)"
    wrong = dict(q_descale=torch.ones(2, 2))
    assert_refuses(fa3.flash_attn_func, ValueError, message, q, k, v, attention_chunk=5, **wrong)
    assert_refuses(fa3.flash_attn_with_kvcache, ValueError, message, q, k, v, **wrong)
    message = "v_descale has dtype torch.float64, expected (torch.)?float32"
    wrong = dict(v_descale=torch.ones(3, 2).double())
    assert_refuses(fa3.flash_attn_func, TypeError, message, q, k, v, attention_chunk=5, **wrong)
    assert_refuses(fa3.flash_attn_func, TypeError, message, q, k, v, name="attention", **wrong)
    message = "k has dtype torch.float8_e4m3fn, expected torch.bfloat16, or that of v and both caches"
    cache = dict(k_cache=k, v_cache=v, cache_seqlens=3)
    assert_refuses(fa3.flash_attn_with_kvcache, TypeError, message, q, k=k, v=v.to(BF16), attention_chunk=5, **cache)
    message = "a gradient is asked for, expected none"
    wrong = descales | dict(k_descale=torch.ones(3, 2, requires_grad=True))
    assert_refuses(fa3.flash_attn_func, NotImplementedError, message, q, k, v, name="attention", **wrong)
    out = fa3.flash_attn_with_kvcache(q, k, v, **wrong)
    with pytest.raises(NotImplementedError, match=f"^flash_attn_with_kvcache: {message}"):
        out.sum().backward()
