"""flashtile.compat: what is refused, and what messages say."""

import functools
import inspect
import re

import numpy
import pytest
import torch
from cases import F16
from theirs import SMALL, assert_refuses, fa2, fa3, of_each_module, packed

from flashtile.compat import bert_padding, sgl_kernel
from flashtile.compat.layers import rotary

WITH_QV = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "_flash_attn_forward")


@pytest.mark.parametrize("name", WITH_QV)
def test_unserved_arguments(name):
    function = getattr(fa3, name)
    required = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    message = r"qv is a tensor of shape \(2, 2\), expected None; nearest supported: "
    assert_refuses(function, NotImplementedError, message, *required, qv=torch.ones(2, 2))


def test_bad_arguments_are_named():
    (q, k, v), packs = SMALL.tensors(), packed(*SMALL.tensors())
    rotary = dict(rotary_cos=torch.ones(40, 8), rotary_sin=torch.ones(40, 8))
    parts = (torch.zeros(2, *q.shape), torch.zeros(2, *q.shape[:3]))
    for function, message, *args in [
        (fa2.flash_attn_with_kvcache, "cache_seqlens is None, expected", q, k, v, k, v),
        (fa2.flash_attn_qkvpacked_func, r"qkv has shape \(2, 20, 2, 16\), expected \(B, S, 3", q),
        (fa2.flash_attn_kvpacked_func, r"kv has shape \(2, 20, 3, 2, 16\), expected \(B, S_k, 2, H_k, D", q, packs),
        (fa2.flash_attn_varlen_kvpacked_func, "kv has shape", q[0], k, *[None] * 4),
        (fa2.flash_attn_varlen_qkvpacked_func, "qkv has shape", q[0], None, None),
        (fa3.flash_attn_qkvpacked_func, "qkv has shape", q),
        (fa3.flash_attn_combine, r"out has shape \(2, 20, 2, 8\), expected \(2, 20, 2, 16\)", *parts, q[..., :8]),
        (bert_padding.unpad_input, r"attention_mask has shape \(2, 9\), expected \(2, 20\)", q, torch.ones(2, 9)),
        (bert_padding.unpad_input, "unused_mask has shape", q, q[..., 0, 0], q),
    ]:
        assert_refuses(function, ValueError, message, *args)
    assert_refuses(fa3.flash_attn_with_kvcache, ValueError, "k is None, expected new keys", q, k, v, **rotary)
    for heads in (1, 3):
        message = rf"qkv has shape .* expected \(B, S, H_q \+ 2 · H_k, D\), H_q being num_heads_q = {heads}"
        assert_refuses(fa3.flash_attn_qkvpacked_func, ValueError, message, q, num_heads_q=heads)
    message = "out has dtype torch.float32, expected torch.float16"
    assert_refuses(fa3.flash_attn_combine, TypeError, message, *parts, q, F16)
    for function, name, *args in [
        (fa2.flash_attn_kvpacked_func, "kv", q, [k, v]),
        (fa3.flash_attn_combine, "lse_partial", parts[0], [k, v]),
        (fa3.flash_attn_combine, "out", *parts, [k]),
        (bert_padding.unpad_input, "attention_mask", q, [[True]]),
        (bert_padding.unpad_input, "hidden_states", [q], k[..., 0, 0]),
    ]:
        assert_refuses(function, TypeError, f"{name} is of type list, expected a torch.Tensor", *args)
    message = "qkv is of type NoneType, expected a torch.Tensor"
    assert_refuses(fa3.flash_attn_qkvpacked_func, TypeError, message, None, num_heads_q=2)
    message = "cu_seqlens_k is of type list, expected a torch.Tensor"
    assert_refuses(fa2.flash_attn_varlen_func, TypeError, message, q[0], k, v, None, [0], 1, 1, block_table=k)


def test_numbers_that_are_none():
    q, k, v = SMALL.tensors()
    refuses = functools.partial(assert_refuses, fa3.flash_attn_qkvpacked_func)
    refuses(ValueError, "num_heads_q is -2, expected an int of at least 0", q, num_heads_q=-2)
    refuses(TypeError, "num_heads_q is 'two', expected an int", q, num_heads_q="two")
    for module in (fa2, fa3):
        refuses = functools.partial(assert_refuses, module.flash_attn_with_kvcache, TypeError)
        refuses("num_splits is None, expected an int", q, k, v, num_splits=None)
        refuses("num_splits is 1.5, expected an int", q, k, v, num_splits=1.5)
    table, begins = torch.zeros(1, 2, dtype=torch.int32), torch.tensor([0, 20], dtype=torch.int32)
    refuses = functools.partial(assert_refuses, fa2.flash_attn_varlen_func)
    refuses(
        ValueError,
        r"cu_seqlens_k has shape \(\), expected \(B \+ 1\)",
        q[0],
        k,
        v,
        begins,
        begins[0],
        1,
        1,
        block_table=table,
    )
    refuses(TypeError, "cu_seqlens_k has dtype torch.int64", q[0], k, v, begins, begins.long(), 1, 1, block_table=table)


@of_each_module
def test_windows_that_are_none(module):
    q, k, v = SMALL.tensors()
    for window_size in (
        5,
        (1,),
        (1, 2, 3),
        "12",
        (1.5, 2),
        ("a", "b"),
        torch.tensor([1.0, 2.0]),
        numpy.arange(3),
        {1: 2},
    ):
        for function in (module.flash_attn_func, module.flash_attn_with_kvcache):
            message = "window_size is .*, expected two integers"
            assert_refuses(function, TypeError, message, q, k, v, window_size=window_size)


def test_combine_writes_no_integers():
    parts = (torch.rand(2, 2, 20, 2, 16), torch.rand(2, 2, 20, 2))
    refuses = functools.partial(assert_refuses, fa3.flash_attn_combine)
    place = torch.zeros(2, 20, 2, 16, dtype=torch.int64)
    refuses(TypeError, "out has dtype torch.int64, expected a floating dtype", *parts, place)
    assert not place.any()
    for dtype in ("float16", numpy.float16, 16, torch.int32, torch.complex64):
        refuses(TypeError, "out_dtype is .*, expected a floating torch.dtype", *parts, out_dtype=dtype)


def test_parts_that_do_not_fit_are_named_as_given():
    outs, lses = torch.rand(2, 2, 20, 3, 16), torch.rand(2, 2, 20, 3)
    refuses = functools.partial(assert_refuses, fa3.flash_attn_combine)
    for lse in (lses[:, 0, 0, 0], lses.mT, lses[:, :1]):
        message = r"lse_partial has shape .*, expected \(2, 2, 20, 3\) = \(N, B, S_q, H_q\)"
        refuses(ValueError, message, outs, lse)
    for out in (outs[0, 0], outs[:0], torch.rand(())):
        message = r"out_partial has shape .*, expected \(N, B, S_q, H_q, D_v\) with N of at least 1"
        refuses(ValueError, message, out, lses)
    refuses(TypeError, "out_partial has dtype torch.int32, expected a floating dtype", outs.int(), lses)
    for dtype in (torch.int64, torch.float8_e4m3fn):
        message = f"lse_partial has dtype {dtype}, expected a floating dtype of more than 8 bits"
        refuses(TypeError, message, outs, lses.to(dtype))
    refuses(ValueError, "lse_partial is on meta, expected cpu", outs, lses.to("meta"))


@pytest.mark.parametrize("ragged", [False, True])
def test_what_a_forward_left_is_named_as_given(ragged):
    """Also where a dense side stands beside a ragged one."""
    q, k, v = SMALL.tensors()
    used = dict(sequed_k=torch.tensor([20, 20], dtype=torch.int32)) if ragged else {}
    legal = dict(dout=q, q=q, k=k, v=v, out=q, softmax_lse=torch.zeros(2, 2, 20))
    refuses = functools.partial(assert_refuses, fa3._flash_attn_backward)
    for name in ("dout", "out"):
        message = rf"{name} has shape \(4, 10, 2, 16\), expected \(2, 20, 2, 16\)"
        refuses(ValueError, message, **legal | {name: q.reshape(4, 10, 2, 16)}, **used)
    lse = legal.pop("softmax_lse")
    for wrong in (lse[..., :19], lse[:1], lse.mT, lse[0]):
        message = r"softmax_lse has shape .*, expected \(2, 2, 20\)"
        refuses(ValueError, message, **legal, softmax_lse=wrong, **used)
    refuses(TypeError, "softmax_lse has dtype torch.float64, expected", **legal, softmax_lse=lse.double(), **used)


def test_new_keys_that_are_rotated_are_named():
    q, k_cache, v_cache = SMALL.tensors()
    angles, before = torch.rand(2, 40, 8), k_cache.clone()
    given = dict(cache_seqlens=3, rotary_cos=angles[0], rotary_sin=angles[1])
    new = torch.rand(2, 1, 2, 16)
    refuses = functools.partial(assert_refuses, fa2.flash_attn_with_kvcache, ValueError)
    for k in (new[..., :15], new[:, :, :1], torch.rand(3, 1, 2, 16), torch.rand(1, 1, 2, 16)):
        message = r"k has shape \(., 1, ., ..\), expected \(2, 1, 2, 16\)"
        refuses(message, q[:, :2], k_cache, v_cache, k, new, **given)
    message = r"k has shape \(2, 2, 15\), expected \(2, 2, 16\)"
    rows = dict(k=new[:, 0, :, :15], v=new[:, 0], cu_seqlens_k_new=torch.tensor([0, 1, 2], dtype=torch.int32))
    assert_refuses(fa3.flash_attn_with_kvcache, ValueError, message, q, k_cache, v_cache, **rows, **given)
    assert torch.equal(k_cache, before)


def test_a_chunk_of_two_lengths():
    q, k, v = SMALL.tensors()
    begins = torch.tensor([0, 20], dtype=torch.int32)
    message = r"attention_chunk is a tensor of shape \(2,\), expected an int of at least 0"
    chunk = dict(attention_chunk=torch.tensor([1, 2]))
    assert_refuses(sgl_kernel.flash_attn_with_kvcache, TypeError, message, q, k, v, cache_seqlens=3, **chunk)
    assert_refuses(sgl_kernel.flash_attn_varlen_func, TypeError, message, q[0], k[0], v[0], begins, begins, **chunk)


def test_flashtile_names_what_no_wrapper_looks_at():
    q, k, v = SMALL.tensors()
    refuses = functools.partial(assert_refuses, fa2.flash_attn_func, name="attention")
    refuses(ValueError, "k has shape", q, k[..., :12], v)  # where operands might be padded
    refuses(TypeError, "k is of type NoneType", q, None, v)
    refuses(TypeError, "softcap is None", q, k, v, softcap=None)
    for module in (fa2, fa3):
        refuses = functools.partial(assert_refuses, module.flash_attn_with_kvcache, name="attention_kvcache")
        refuses(ValueError, "k_new has shape", q, k, v, k[1:], v, cache_seqlens=3)
        refuses(ValueError, "q has shape", q[0, 0, 0], k, v)
        refuses(TypeError, "k_cache is of type NoneType", q, None, v)
        refuses(TypeError, "q is of type NoneType", None, k, v)
        refuses(ValueError, "k_cache has shape", q, k[0, 0, 0], v)


# ---- every argument of every function


def calls():
    """{name: (function, legal keyword arguments)}."""
    q, k, v = SMALL.tensors()
    qkv = packed(q, k, v)
    rows = dict(q=q[0], k=k[0], v=v[0])
    begins, held = torch.tensor([0, 8, 20], dtype=torch.int32), torch.tensor([4, 9], dtype=torch.int32)
    tables = dict(cu_seqlens_q=begins, cu_seqlens_k=begins, max_seqlen_q=12, max_seqlen_k=12)
    pages = dict(block_table=torch.tensor([[0, 1], [1, 0]], dtype=torch.int32))
    used = torch.tensor([4, 10], dtype=torch.int32)
    angles = torch.rand(20, 8)
    turned = dict(rotary_cos=angles, rotary_sin=angles)
    cache = dict(k_cache=k, v_cache=v, k=k[:, :3], v=v[:, :3], cache_seqlens=held)
    new_rows = dict(k=k[0, :6], v=v[0, :6], cu_seqlens_k_new=torch.tensor([0, 1, 6], dtype=torch.int32))
    new_small = new_rows | {x: new_rows[x].to(torch.float8_e4m3fn) for x in "kv"}
    asks = dict(dropout_p=0.5, return_attn_probs=True)
    scores = dict(dropout_p=0.1, softmax_scale=0.25, causal=True, softcap=0.0, alibi_slopes=torch.rand(2))
    scores |= dict(window_size_left=3, window_size_right=-1)
    scores_3 = dict(window_size_left=3, window_size_right=-1, is_causal=True)
    whole = dict(dout=q, q=q, k=k, v=v, out=q, softmax_lse=torch.zeros(2, 2, 20))
    whole |= {f"d{x}": torch.empty_like(q) for x in "qkv"}
    in_rows = {name: x[0] for name, x in whole.items()}
    state = dict(rng_state=torch.zeros(2, dtype=torch.int64), deterministic=False)
    padding = torch.tensor([[1] * 20, [0] * 20])
    small = {name: x.to(torch.float8_e4m3fn) for name, x in whole.items() if name in ("q", "k", "v")}
    small |= {f"{x}_descale": torch.rand(2, 2) for x in "qkv"}
    small_rows = small | {x: small[x][0] for x in "qkv"}
    small_cache = small | {f"{x}_cache": small[x].clone() for x in "kv"} | dict(cache_seqlens=held)
    small_cache |= {x: small[x][:, :3] for x in "qkv"}
    parts = dict(out_partial=torch.rand(2, 2, 20, 2, 16), lse_partial=torch.rand(2, 2, 20, 2))
    plan = list(inspect.signature(fa3.get_scheduler_metadata).parameters)[:6]
    cached_2, cached_3 = fa2.flash_attn_with_kvcache, fa3.flash_attn_with_kvcache
    ragged_2, ragged_3 = fa2.flash_attn_varlen_func, fa3.flash_attn_varlen_func
    concatenated = bert_padding.unpad_input_for_concatenated_sequences
    return {
        "2_dense": (fa2.flash_attn_func, dict(q=q, k=k, v=v, **asks)),
        "2_kv": (fa2.flash_attn_kvpacked_func, dict(q=q, kv=packed(k, v))),
        "2_qkv": (fa2.flash_attn_qkvpacked_func, dict(qkv=qkv)),
        "2_ragged": (ragged_2, rows | tables | asks),
        "2_pages": (ragged_2, dict(q=q[0], k=k, v=v, **tables, **pages)),
        "2_ragged_kv": (fa2.flash_attn_varlen_kvpacked_func, dict(q=q[0], kv=packed(k[0], v[0]), **tables)),
        "2_ragged_qkv": (fa2.flash_attn_varlen_qkvpacked_func, dict(qkv=qkv[0], cu_seqlens=begins, max_seqlen=12)),
        "2_cache": (cached_2, dict(q=q[:, :3], causal=True, **cache, **turned)),
        "2_cache_other_positions": (cached_2, dict(q=q[:, :5], **cache, **turned)),
        "2_forward": (fa2._flash_attn_forward, dict(q=q, k=k, v=v, return_softmax=True, **scores)),
        "2_ragged_forward": (fa2._flash_attn_varlen_forward, rows | tables | scores),
        "2_backward": (fa2._flash_attn_backward, whole | scores | state),
        "2_ragged_backward": (fa2._flash_attn_varlen_backward, in_rows | tables | scores | state),
        "3_dense": (fa3.flash_attn_func, dict(q=q, k=k, v=v)),
        "3_chunks": (fa3.flash_attn_func, dict(q=q, k=k, v=v, attention_chunk=6)),
        "3_qkv": (fa3.flash_attn_qkvpacked_func, dict(qkv=torch.cat((q, k, v), 2), num_heads_q=2)),
        "3_ragged": (ragged_3, rows | tables | dict(seqused_q=used, seqused_k=used)),
        "3_ragged_chunks": (ragged_3, rows | tables | dict(seqused_k=used, attention_chunk=6)),
        "3_dense_queries": (ragged_3, tables | dict(q=q, k=k[0], v=v[0], cu_seqlens_q=None)),
        "3_cache": (cached_3, dict(q=q[:, :3], **cache)),
        "3_cache_chunks": (cached_3, dict(q=q[:, :3], attention_chunk=6, **cache, **turned)),
        "3_cache_ragged": (cached_3, cache | turned | new_rows | dict(q=q[0], cu_seqlens_q=begins)),
        "3_8_bits": (fa3.flash_attn_func, small),
        "3_8_bits_chunks": (fa3.flash_attn_func, small | dict(attention_chunk=6)),
        "3_8_bits_ragged_chunks": (ragged_3, small_rows | tables | dict(attention_chunk=6)),
        "3_8_bits_cache": (cached_3, small_cache),
        "3_8_bits_cache_chunks": (cached_3, small_cache | turned | dict(attention_chunk=6)),
        "3_8_bits_cache_ragged": (cached_3, small_cache | new_small | dict(q=small["q"][0], cu_seqlens_q=begins)),
        "3_8_bits_forward": (fa3._flash_attn_forward, small | dict(out_=torch.empty_like(q, dtype=torch.bfloat16))),
        "3_forward": (fa3._flash_attn_forward, dict(q=q, k=k, v=v, out_=torch.empty_like(q))),
        "3_backward": (fa3._flash_attn_backward, whole | scores_3),
        "3_ragged_backward": (
            fa3._flash_attn_backward,
            in_rows | tables | scores_3 | dict(sequed_q=used, sequed_k=used),
        ),
        "3_combine": (fa3.flash_attn_combine, parts | dict(out=torch.empty_like(q))),
        "3_plan": (fa3.get_scheduler_metadata, dict.fromkeys(plan, 2) | dict(cache_seqlens=held)),
        "pad": (bert_padding.pad_input, dict(hidden_states=q[0], indices=torch.arange(20), batch=2, seqlen=20)),
        "unpad": (bert_padding.unpad_input, dict(hidden_states=q, attention_mask=padding, unused_mask=padding)),
        "unpad_lengths": (concatenated, dict(hidden_states=q, attention_mask_in_length=padding)),
        "rows": (bert_padding.index_first_axis, dict(x=q, indices=torch.arange(2))),
        "put_rows": (bert_padding.index_put_first_axis, dict(values=q, indices=torch.arange(2), first_axis_dim=4)),
        "turn": (rotary.apply_rotary_emb, dict(x=q, cos=angles, sin=angles)),
        "turn_rows": (rotary.apply_rotary_emb, dict(x=q[0], cos=angles, sin=angles, cu_seqlens=begins, max_seqlen=12)),
        "turn_qkv": (rotary.apply_rotary_emb_qkv_, dict(qkv=qkv, cos=angles, sin=angles, cos_k=angles, sin_k=angles)),
        "turn_kv": (rotary.apply_rotary_emb_kv_, dict(kv=packed(k, v), cos=angles, sin=angles)),
    }


WRONG = {
    "None": None,
    "text": "x",
    "float": 1.5,
    "negative": -7,
    "huge": 2**70,
    "nan": float("nan"),
    "list": [[1, 2], [3]],
    "long list": list(range(999)),
    "no rank": torch.tensor(3),
    "rank 1": torch.ones(3),
    "integers": torch.ones(2, 20, 2, 16, dtype=torch.int64),
    "large": torch.ones(2, 20, 3, 17),
    "empty": torch.empty(0, dtype=torch.int32),
    "negatives": torch.tensor([0, -5, 3], dtype=torch.int32),
    "beyond": torch.tensor([900, 901], dtype=torch.int32),
    "numpy": numpy.ones((50, 50)),
    "complex": torch.ones(2, 20, 2, 16, dtype=torch.complex64),
    "sparse": torch.eye(4).to_sparse(),
    "meta": torch.ones(2, 20, 2, 16, device="meta"),
}


@pytest.mark.parametrize("name", calls())
def test_wrong_values_of_each_argument(name):
    """Each is served, or refused in one line that begins with a function's name. What the functions of flashtile say is
    looked at in their own tests."""
    function, legal = calls()[name]
    function(**legal)
    for argument in inspect.signature(function).parameters:
        for what, value in WRONG.items():
            _, given = calls()[name]
            try:
                function(**(given | {argument: value}))
            except (TypeError, ValueError, NotImplementedError) as error:
                message = str(error)
                assert re.match(r"\w+( backward)?: ", message), (argument, what, message)
                if not message.startswith("attention"):
                    assert message.isprintable() and len(message) < 400, (argument, what, message)
            except Exception as error:
                raise AssertionError(f"{argument} = {what}: {type(error).__name__}: {error}") from error
