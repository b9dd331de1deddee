"""flashtile.compat: a call that is refused has written nothing, neither its caches nor its results."""

import pytest
import torch
from cases import F16
from theirs import assert_refuses, fa2, fa3

from flashtile.compat import sgl_kernel, vllm_flash_attn
from flashtile.compat.layers import rotary

BEGINS = torch.tensor([0, 3], dtype=torch.int32)
HELD = torch.tensor([3], dtype=torch.int32)
COPIED = [(20, {}), (16, dict(attention_chunk=4)), (20, dict(attention_chunk=4))]
NO_PLACES = {
    "expanded": (ValueError, "has stride 0 in dimension ., expected memory of its own"),
    "overlapping": (ValueError, r"has strides \(.*\), expected memory of its own"),
    "elsewhere": (ValueError, "is on meta, expected cpu"),
    "learning": (NotImplementedError, "is .* a gradient|is a tensor that requires grad"),
    "rounded": (TypeError, "has dtype torch.float16, expected torch.float32"),
    "short": (ValueError, "has shape"),
}
each_that_is_none = pytest.mark.parametrize("what", NO_PLACES)


def no_place(what, *shape):
    if what == "expanded":
        return torch.zeros(*shape[:-2], 1, shape[-1]).expand(shape)
    if what == "overlapping":
        return torch.zeros(1000).as_strided(shape, (*torch.empty(shape).stride()[:-2], 8, 1))
    return {
        "elsewhere": torch.zeros(shape, device="meta"),
        "learning": torch.zeros(shape, requires_grad=True),
        "rounded": torch.zeros(shape, dtype=F16),
        "short": torch.zeros(*shape[:-1], shape[-1] - 1),
    }[what]


def cached(head_dim, rows=2):
    """q, caches of zeros, new keys and values."""
    q, k, v = torch.randn(3, 1, rows, 2, head_dim)
    return q, torch.zeros(1, 8, 2, head_dim), torch.zeros(1, 8, 2, head_dim), k, v


@each_that_is_none
@pytest.mark.parametrize("head_dim, options", COPIED)
def test_what_is_no_place_changes_no_cache(head_dim, options, what):
    q, *caches, k, v = cached(head_dim)
    error, message = NO_PLACES[what]
    place = no_place(what, *q.shape)
    options = dict(cache_seqlens=HELD, out=place) | options
    assert_refuses(sgl_kernel.flash_attn_with_kvcache, error, f"out ({message})", q, *caches, k, v, **options)
    assert not any(x.any() for x in caches)


def test_what_no_kernel_writes_to_changes_no_cache():
    """Where new rows are appended by a call of their own, and a kernel writes to the place itself."""
    q, *caches, k, v = cached(16)
    rows = dict(k=k[0], v=v[0], cu_seqlens_k_new=torch.tensor([0, 2], dtype=torch.int32))
    place = torch.zeros(1, 2, 2, 32)[..., ::2]
    message = "out has stride 2 in its last dimension, expected 1"
    function = sgl_kernel.flash_attn_with_kvcache
    assert_refuses(function, ValueError, message, q, *caches, cache_seqlens=HELD, out=place, **rows)
    learns = torch.zeros(1, 2, 2, 16, requires_grad=True)
    message = "out is given and a gradient is asked for"
    assert_refuses(function, NotImplementedError, message, q, *caches, cache_seqlens=HELD, out=learns, **rows)
    assert not any(x.any() for x in caches)
    apart = torch.zeros(1, 2, 2, 40)[..., ::2]  # a copy gets there
    q, *caches, k, v = cached(20)
    given = q, *caches, k, v
    function(*given, cache_seqlens=HELD, out=apart)
    assert torch.equal(apart, function(*given, cache_seqlens=HELD))


@each_that_is_none
@pytest.mark.parametrize("head_dim", [16, 20])
def test_no_places_of_what_is_in_no_cache(head_dim, what):
    x = torch.randn(3, 2, head_dim)
    error, message = NO_PLACES[what]
    place = no_place(what, *x.shape)
    dense, parts = x[None], (torch.randn(2, *x.shape), torch.randn(2, 3, 2))
    calls = [(fa3._flash_attn_forward, dense, dense, dense)]
    if what != "rounded":
        calls.append((fa3.flash_attn_combine, *(part[:, None] for part in parts)))
    for function, *given in calls:
        name = "out_" if function is fa3._flash_attn_forward else "out"
        assert_refuses(function, error, f"{name} ({message})", *given, **{name: place[None]})
    if head_dim == 20:
        for module, given in ((sgl_kernel, (BEGINS, BEGINS)), (vllm_flash_attn, (3, BEGINS, 3, BEGINS))):
            assert_refuses(module.flash_attn_varlen_func, error, f"out ({message})", x, x, x, *given, out=place)


@pytest.mark.parametrize("what", [what for what in NO_PLACES if what != "learning"])  # nothing is recorded there
@pytest.mark.parametrize("head_dim", [16, 20])
def test_no_places_of_gradients(head_dim, what):
    x = torch.randn(1, 3, 2, head_dim)
    out, softmax_lse, *_ = fa3._flash_attn_forward(x, x, x)
    error, message = NO_PLACES[what]
    given, (dq, dk) = (x, x, x, x, out, softmax_lse), torch.zeros(2, *x.shape)
    places = dict(dq=dq, dk=dk, dv=no_place(what, *x.shape))
    assert_refuses(fa3._flash_attn_backward, error, f"dv {message}", *given, **places)
    rest = dict(dropout_p=0.0, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1)
    rest |= dict(softcap=0.0, alibi_slopes=None, deterministic=False)
    assert_refuses(fa2._flash_attn_backward, error, f"dv {message}", *given, **places, **rest)
    assert not dq.any() and not dk.any()


def test_sines_alone_change_no_cache():
    q, *caches, k, v = cached(16)
    rows = dict(k=k[0], v=v[0], cu_seqlens_k_new=torch.tensor([0, 2], dtype=torch.int32))
    for options in (dict(k=k, v=v), dict(k=k, v=v, attention_chunk=4), rows):
        options |= dict(rotary_sin=torch.randn(8, 8), cache_seqlens=HELD)
        message = "rotary_cos is None, expected a tensor, since rotary_sin is given"
        assert_refuses(fa3.flash_attn_with_kvcache, ValueError, message, q, *caches, **options)
        assert not any(x.any() for x in caches)


# ---- memory that is something else's


@pytest.mark.parametrize("head_dim, options", COPIED)
def test_places_in_what_is_read(head_dim, options):
    q, k_cache, v_cache, k, v = cached(head_dim)
    before = q.clone()
    for name, place in dict(q=q, v_cache=v_cache[:, 2:4], k_cache=k_cache[:, :2], k=k, v=v).items():
        function, message = sgl_kernel.flash_attn_with_kvcache, f"out shares memory with {name}, expected memory of its"
        given = dict(cache_seqlens=HELD, out=place, **options)
        assert_refuses(function, ValueError, message, q, k_cache, v_cache, k, v, **given)
    assert torch.equal(q, before) and not k_cache.any() and not v_cache.any()
    x = torch.randn(3, 2, 20)
    message = "out shares memory with k, expected memory of its own"
    k = torch.randn(3, 2, 20)
    assert_refuses(sgl_kernel.flash_attn_varlen_func, ValueError, message, x, k, x, BEGINS, BEGINS, out=k)


@pytest.mark.parametrize("head_dim", [16, 20])
def test_caches_in_one_place(head_dim):
    q, cache, other, k, v = cached(head_dim)
    function = fa2.flash_attn_with_kvcache
    name = "attention_kvcache" if head_dim == 16 else None
    expected = "expected a cache of its own memory, as k_new is given"
    for v_cache in (cache, cache[:, :, :1].expand_as(cache)):
        message = f"v_cache (shares memory with k_cache|has stride 0 in dimension 2), {expected}"
        assert_refuses(function, ValueError, message, q, cache, v_cache, k, v, cache_seqlens=HELD, name=name)
    message = f"v_cache has stride 0 in dimension 1, {expected}"
    expanded = torch.zeros(1, 1, 2, head_dim).expand_as(other)
    assert_refuses(function, ValueError, message, q, cache, expanded, k, v, cache_seqlens=HELD, name=name)
    assert not cache.any()


@pytest.mark.parametrize("head_dim", [16, 20])
def test_caches_side_by_side(head_dim):
    """Rows of values between rows of keys; or one cache of rows that are keys and values at the same time."""
    q, *caches, k, v = cached(head_dim)
    between = torch.zeros(1, 8, 2, 2, head_dim).unbind(2)
    out = fa2.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=HELD)
    assert torch.equal(fa2.flash_attn_with_kvcache(q, *between, k, v, cache_seqlens=HELD), out)
    assert all(map(torch.equal, between, caches))
    apart, one = cached(head_dim)[1:3], torch.zeros_like(caches[0])
    out = fa2.flash_attn_with_kvcache(q, *apart, k, k, cache_seqlens=HELD)
    assert torch.equal(fa2.flash_attn_with_kvcache(q, one, one, k, k, cache_seqlens=HELD), out)
    assert torch.equal(one, apart[0])


def test_rotation_in_place_wants_memory_for_each_row():
    cos, sin = torch.randn(2, 8, 8)
    x = torch.randn(1, 1, 2, 16).expand(1, 4, 2, 16)
    message = "{} has stride 0 in dimension 1, expected memory of its own for each row, as it is written in place"
    assert_refuses(rotary.apply_rotary_emb, ValueError, message.format("x"), x, cos, sin, inplace=True)
    kv = torch.randn(1, 1, 2, 2, 16).expand(1, 4, 2, 2, 16)
    assert_refuses(rotary.apply_rotary_emb_kv_, ValueError, message.format("kv"), kv, cos, sin)
    qkv = torch.randn(1, 1, 3, 2, 16).expand(1, 4, 3, 2, 16)
    assert_refuses(rotary.apply_rotary_emb_qkv_, ValueError, message.format("qkv"), qkv, cos, sin)
    assert torch.equal(x, x[:, :1].expand_as(x))
