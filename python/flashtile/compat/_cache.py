"""``flashtile.attention_kvcache`` in flash-attn's terms."""

import contextlib

import torch
from torch import Tensor

from .._core import has_memory, is_compiling, refuse_gradients_into, require_own_elements, require_shape, share_elements
from .._fp8 import dequantized
from .._padding import contiguous, last_size, padded
from ..kvcache import attention_kvcache, require_place_over_cache
from ._chunks import begins_of, length_of, parts_of
from ._common import (
    flag,
    has_8_bits,
    index_within,
    integer,
    require_descales,
    require_place,
    require_rank,
    require_table,
    require_tensors,
    softcap_of,
    window_of,
    written,
)
from ._ragged import check_lengths, dense_results, equal_lengths, those_first
from ._rotation import angles_at, check_angles, positions_of, rotated


def attend_cache(
    function,
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    *,
    cache_seqlens,
    block_table=None,
    cache_batch_idx=None,
    leftpad=None,
    rotary_cos=None,
    rotary_sin=None,
    rotary_interleaved=True,
    rotary_seqlens=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    causal,
    softmax_scale,
    window_size,
    attention_chunk=0,
    softcap,
    num_splits=0,
    batch_invariant=None,
    alibi_slopes=None,
    sinks=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    out=None,
    return_lse,
):
    """Out, or (out, lse). As in flash-attn, head dimensions need not be multiples of 8: caches are copied then, and
    back where k is given, and so are results where `out` is given. There is no backward, which only backward says.
    Descales have no effect on caches of 16 bits, nor that of q on a q of 16 bits."""
    if cache_seqlens is None:
        if k is not None:
            raise ValueError(f"{function}: cache_seqlens is None, expected a tensor or an int, since k is given")
        cache_seqlens = _rows(k_cache) * (1 if block_table is None else last_size(block_table))
    if rotary_cos is None and rotary_sin is not None:
        raise ValueError(f"{function}: rotary_cos is None, expected a tensor, since rotary_sin is given")
    if rotary_cos is not None and k is None:
        raise ValueError(f"{function}: k is None, expected new keys, since rotary_cos is given")
    if rotary_seqlens is cache_seqlens:
        rotary_seqlens = None  # the default
    chunk = length_of(function, attention_chunk)
    if not has_8_bits(k_cache):
        q_descale = k_descale = v_descale = None
    elif has_8_bits(q):
        q = _as_16_bits(q, k_cache, out)  # descales come later
    else:
        q_descale = None
    stored = has_8_bits(k) and all(getattr(x, "dtype", None) is k.dtype for x in (v, k_cache, v_cache))
    if stored and isinstance(q, Tensor):
        k, v = k.to(q.dtype), v.to(q.dtype)  # which holds each number, and the cache gets it again
    odd = last_size(k_cache) % 8 != 0 or last_size(v_cache) % 8 != 0
    call = dict(
        q=contiguous(q),
        k_cache=k_cache,
        v_cache=v_cache,
        cache_seqlens=contiguous(cache_seqlens),
        k_new=contiguous(k),
        v_new=contiguous(v),
        block_table=contiguous(block_table),
        cache_batch_idx=contiguous(cache_batch_idx),
        leftpad=contiguous(leftpad),
        rotary_cos=contiguous(rotary_cos),
        rotary_sin=contiguous(rotary_sin),
        rotary_interleaved=flag(function, "rotary_interleaved", rotary_interleaved),
        cu_seqlens_q=contiguous(cu_seqlens_q),
        causal=flag(function, "causal", causal),
        window=window_of(function, window_size),
        scale=softmax_scale,
        softcap=softcap_of(softcap),
        num_splits=max(integer(function, "num_splits", num_splits), 0),
        batch_invariant=batch_invariant,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        k_descale=k_descale,
        v_descale=v_descale,
        out=None if odd or chunk > 0 else out,
        return_lse=return_lse,
    )
    apart = chunk > 0 or stored or (k is not None and cu_seqlens_q is not cu_seqlens_k_new)
    turned = rotary_cos is not None and (apart or rotary_seqlens is not None or not _rotates_alike(call))
    named = block_table is not None and cache_batch_idx is not None
    scaled = q_descale is not None
    descales = (q_descale, k_descale, v_descale)
    inputs = _differentiated(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, alibi_slopes, sinks, *descales)
    if not (apart or turned or named or odd or scaled or inputs):
        return attention_kvcache(**call)
    if call["out"] is None:
        _require_place(function, out, q, v_cache, k_cache=k_cache, k=k, v=v)
    else:  # which a kernel writes to, but caches may have been written by then
        refuse_gradients_into(function, out)
        require_place_over_cache(function, out, q, k_cache, v_cache, k, v)
    with torch.no_grad() if inputs else contextlib.nullcontext():
        if named:
            _name_rows(function, call)
        if odd:
            if k is not None:
                _require_caches(function, call)
            _pad(call)
        if apart or turned or scaled:
            begins = contiguous(cu_seqlens_k_new)
            result = _attend_in_steps(function, call, chunk, apart, turned, stored, q_descale, rotary_seqlens, begins)
        else:
            result = attention_kvcache(**call)
        if odd:
            result = _without_padding(call, result, k_cache, v_cache, appended=k is not None)
        result = written(function, "out", out, result)
    if not inputs:
        return result
    if isinstance(result, Tensor):
        return _Undifferentiable.apply(function, result, *inputs)
    return tuple(_Undifferentiable.apply(function, x, *inputs) for x in result)


def attend_used_queries(
    function, q, k_cache, v_cache, k=None, v=None, *, seqused_q=None, cu_seqlens_q=None, out=None, **options
):
    """`attend_cache`, of the first seqused_q queries of each sequence; others have out = 0 and lse = -inf. These stand
    behind all sequences then, where rows are of none."""
    if seqused_q is None:
        return attend_cache(function, q, k_cache, v_cache, k, v, cu_seqlens_q=cu_seqlens_q, out=out, **options)
    _require_place(function, out, _as_16_bits(q, k_cache, out), v_cache, k_cache=k_cache, k=k, v=v)
    sizes = None
    if cu_seqlens_q is None:
        require_rank(function, 4, "(B, S_q, H_q, D)", q=q)
        sizes, q, cu_seqlens_q = q.shape[:2], q.flatten(0, 1), equal_lengths(q)
    require_rank(function, 3, "(T_q, H_q, D), since cu_seqlens_q is given", q=q)
    require_table(function, "(B + 1)", cu_seqlens_q=cu_seqlens_q)
    require_table(function, "(B)", cu_seqlens_q.shape[0] - 1, seqused_q=seqused_q)
    check_lengths(function, q.shape[0], "T_q", cu_seqlens_q=cu_seqlens_q, seqused_q=seqused_q)
    order, begins = those_first(q.shape[0], cu_seqlens_q, None, seqused_q)
    if out is not None:  # of whose dtype the result is where q has 8 bits
        options |= dict(out=out.new_empty((*q.shape[:-1], last_size(v_cache))))
    result = attend_cache(function, q[order], k_cache, v_cache, k, v, cu_seqlens_q=begins, **options)
    back = order.argsort()
    result = result[back] if isinstance(result, Tensor) else (result[0][back], result[1][:, back])
    return written(function, "out", out, result if sizes is None else dense_results(result, sizes))


def _as_16_bits(q, k_cache, out):
    """A q of 8 bits over a cache of such as the dtype of the result, which holds each number."""
    return q.to(getattr(out, "dtype", torch.bfloat16)) if has_8_bits(q) and has_8_bits(k_cache) else q


def _require_place(function, out, q, v_cache, **read):
    if out is not None:
        require_tensors(function, q=q, v_cache=v_cache)
        shape = (*q.shape[:-1], last_size(v_cache))
        require_place(function, "out", out, shape, q.dtype, q.device, q=q, v_cache=v_cache, **read)


def _rotates_alike(call):
    """flash-attn counts positions of queries, as those of new keys, from the first of these on; without a mask all have
    that of the first. flashtile gives each that of the key which it meets on the diagonal."""
    if call["cu_seqlens_q"] is not None:
        return _masked(call)
    queries = _rows(call["q"])
    return queries == _rows(call["k_new"]) and (queries == 1 or _masked(call))


def _masked(call):
    return call["window"] is not None or call["causal"]


def _differentiated(*inputs):
    """Those that require a gradient, where gradients are enabled. A graph has no backward that could refuse; there,
    flashtile refuses them."""
    if not torch.is_grad_enabled() or is_compiling():
        return ()
    return [x for x in inputs if x is not None and getattr(x, "requires_grad", False)]


class _Undifferentiable(torch.autograd.Function):
    """A result of inputs that require a gradient, which there is none of."""

    @staticmethod
    def forward(ctx, function, result, *inputs):
        ctx.function = function
        return result.view_as(result)

    @staticmethod
    def backward(ctx, dresult):
        raise NotImplementedError(
            f"{ctx.function}: a gradient is asked for, expected none, since attention over a cache has no backward; "
            "nearest supported: flash_attn_varlen_func of keys and values that are in no cache"
        )


# From here on, steps change `call`, the keyword arguments of flashtile.attention_kvcache.


def _name_rows(function, call):
    """cache_batch_idx names rows of block_table, which flashtile has one of for each sequence."""
    table, index = call["block_table"], call["cache_batch_idx"]
    require_rank(function, 2, "(B_cache, pages of a sequence)", block_table=table)
    require_table(function, "(B)", cache_batch_idx=index)
    rows = index_within(function, "an entry of cache_batch_idx", index, table.shape[0], "block_table")
    call.update(block_table=table[rows], cache_batch_idx=None)


def _require_caches(function, call):
    """What flashtile says of caches that rows are written to, before it gets copies of them."""
    k_cache, v_cache, k_new, v_new = (call[name] for name in ("k_cache", "v_cache", "k_new", "v_new"))
    require_tensors(function, k_cache=k_cache, v_cache=v_cache, k=k_new, v=v_new)
    expected = "a cache of its own memory, as k_new is given"
    for name in ("k_cache", "v_cache"):
        require_own_elements(function, name, call[name], expected)
    alike = call["rotary_cos"] is None and _is_same(k_cache, v_cache) and _is_same(k_new, v_new)
    if share_elements(k_cache, v_cache) and not alike:  # else both get the same rows
        raise ValueError(f"{function}: v_cache shares memory with k_cache, expected {expected}")


def _is_same(x, y):
    return x is y or (has_memory(x, y) and (x.data_ptr(), x.shape, x.stride()) == (y.data_ptr(), y.shape, y.stride()))


def _pad(call):
    """Head dimensions to multiples of 8, unless they differ, which flashtile refuses."""
    dims = [last_size(call[name]) for name in ("k_cache", "v_cache")]
    new = dims if call["k_new"] is None else [last_size(call[name]) for name in ("k_new", "v_new")]
    if last_size(call["q"]) != dims[0] or new != dims:
        return
    if call["scale"] is None and dims[0] > 0:
        call["scale"] = dims[0] ** -0.5
    for name in ("q", "k_cache", "v_cache", "k_new", "v_new"):
        call[name] = padded(call[name])


def _without_padding(call, result, k_cache, v_cache, appended):
    for cache, copy in ((k_cache, call["k_cache"]), (v_cache, call["v_cache"])):
        if appended and copy is not cache:
            cache.copy_(copy[..., : cache.shape[-1]])
    head_dim_v = v_cache.shape[-1]
    if isinstance(result, Tensor):
        return result[..., :head_dim_v]
    out, lse = result
    return out[..., :head_dim_v], lse


def _attend_in_steps(function, call, chunk, apart, turned, stored, q_descale, rotary_seqlens, cu_seqlens_k_new):
    """What flash-attn does by other rules is done before flashtile is called."""
    batch = _check_queries(function, call)
    if q_descale is not None:
        _scale_queries(function, call, q_descale, batch)
    if call["k_new"] is not None:
        _check_new_rows(function, call, cu_seqlens_k_new, batch)
    if not isinstance(call["cache_seqlens"], Tensor):
        device = call["q"].device
        call["cache_seqlens"] = torch.full((batch,), call["cache_seqlens"], dtype=torch.int32, device=device)
    if turned:
        first = call["cache_seqlens"] if rotary_seqlens is None else rotary_seqlens
        require_table(function, "(B)", batch, rotary_seqlens=first)
        _rotate(function, call, first, cu_seqlens_k_new, counted=chunk > 0 or _masked(call))
    if call["k_new"] is not None and apart:
        _append(call, cu_seqlens_k_new, stored)
    if chunk == 0:
        return attention_kvcache(**call)
    sizes = _divide(call, chunk)
    result = attention_kvcache(**call)
    return result if sizes is None else dense_results(result, sizes)


def _check_queries(function, call):
    """Before anything is written, flashtile says what is wrong with them, for no head, and with what each head has, for
    no row. Rows that leftpad hides may be new ones; then it is looked at when they are appended. Returns B."""
    q, cu_seqlens = call["q"], call["cu_seqlens_q"]
    if cu_seqlens is None:
        require_rank(function, 4, "(B, S_q, H_q, D)", q=q)
    else:
        require_rank(function, 3, "(T_q, H_q, D), since cu_seqlens_q is given", q=q)
    nothing = dict.fromkeys("k_new v_new rotary_cos rotary_sin alibi_slopes sinks out".split()) | dict(q=q[..., :0, :])
    leftpad = call["leftpad"] if call["k_new"] is None else None
    attention_kvcache(**(call | nothing | dict(leftpad=leftpad)))
    heads, heads_k = q.shape[-2], call["k_cache"].shape[2]
    if heads % max(heads_k, 1) != 0:
        raise ValueError(f"{function}: q has {heads} heads, expected a multiple of H_k = {heads_k}")
    of_heads = {name: call[name] for name in ("alibi_slopes", "sinks")}
    if any(x is not None for x in of_heads.values()):
        of_heads |= dict(q=q[:, :0]) if cu_seqlens is None else dict(q=q[:0], cu_seqlens_q=torch.zeros_like(cu_seqlens))
        attention_kvcache(**(call | nothing | of_heads | dict(leftpad=None)))
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _check_new_rows(function, call, cu_seqlens, batch):
    k, q = call["k_new"], call["q"]
    heads = (call["k_cache"].shape[2], q.shape[-1])
    if cu_seqlens is None:
        require_rank(function, 4, "(B, S_new, H_k, D)", k=k)
        require_shape(function, "k", k, (batch, k.shape[1], *heads))
    else:
        require_rank(function, 3, "(T_new, H_k, D), since cu_seqlens_k_new is given", k=k)
        require_shape(function, "k", k, (k.shape[0], *heads))
        require_table(function, "(B + 1)", batch + 1, cu_seqlens_k_new=cu_seqlens)
    if has_8_bits(k):
        raise TypeError(f"{function}: k has dtype {k.dtype}, expected {q.dtype}, or that of v and both caches")
    if k.device != q.device:
        raise ValueError(f"{function}: k is on {k.device}, expected {q.device}")


def _scale_queries(function, call, descale, batch):
    """What queries are multiplied with, keys can be, which have one number for each head too. Where they do not, or new
    ones are divided by it, queries are, in float32, rounded once."""
    require_descales(function, (batch, call["k_cache"].shape[2]), call["q"].device, q_descale=descale)
    of_keys = call["k_descale"]
    if call["k_new"] is None and (of_keys is None or of_keys.dim() < 3):
        call["k_descale"] = descale if of_keys is None else descale * of_keys
        return
    call["q"] = dequantized(call["q"], descale, call["cu_seqlens_q"]).to(call["q"].dtype)


def _rotate(function, call, first, cu_seqlens_k_new, counted):
    q, k = call["q"], call["k_new"]
    angles = {name: call.pop(name) for name in ("rotary_cos", "rotary_sin")}
    check_angles(function, q, **angles)
    interleaved = call["rotary_interleaved"]
    of_queries = positions_of(q, first, call["cu_seqlens_q"], counted)
    of_keys = positions_of(k, first, cu_seqlens_k_new)
    call["q"] = rotated(q, *angles_at(function, "q", of_queries, **angles), interleaved)
    call["k_new"] = rotated(k, *angles_at(function, "k", of_keys, **angles), interleaved)


def _append(call, cu_seqlens, stored):
    """Writes new rows behind those that the cache holds, without descales where they are numbers to be `stored` as they
    are. Here the new keys are queries too, each of which looks at itself, so that next to nothing is computed."""
    k, held = call["k_new"], call["cache_seqlens"]
    where = ["k_cache", "v_cache", "k_new", "v_new", "cache_seqlens", "leftpad", "block_table", "cache_batch_idx"]
    where += [] if stored else ["k_descale", "v_descale"]
    attention_kvcache(k, **{name: call[name] for name in where}, cu_seqlens_q=cu_seqlens, window=(0, 0))
    added = k.shape[1] if cu_seqlens is None else cu_seqlens.diff()
    call.update(cache_seqlens=held + added, k_new=None, v_new=None)


def _divide(call, chunk):
    """Into parts of sequences, which have the sequence's cache, with its first rows as padding. Returns the sizes of a
    dense q, (B, S_q), which is ragged then."""
    q, held, leftpad, cu_seqlens = (call[name] for name in ("q", "cache_seqlens", "leftpad", "cu_seqlens_q"))
    sizes = None
    if cu_seqlens is None:
        sizes, cu_seqlens, q = q.shape[:2], equal_lengths(q), q.flatten(0, 1)
    call.update(q=q, cu_seqlens_q=cu_seqlens)
    if held.shape[0] == 0:
        return sizes
    skipped = torch.zeros_like(held) if leftpad is None else leftpad
    sequence, (begin, _), (first, end) = parts_of(chunk, q.shape[0], cu_seqlens.diff(), held - skipped)
    call["cu_seqlens_q"] = begins_of(sequence, begin, cu_seqlens)
    call["leftpad"], call["cache_seqlens"] = ((skipped[sequence] + x).int() for x in (first, end))
    for name in ("k_descale", "v_descale"):
        if call[name] is not None and call[name].dim() == 2:
            call[name] = call[name][sequence]
    index = call["cache_batch_idx"]
    if call["block_table"] is not None:
        call["block_table"] = call["block_table"][sequence]
    else:
        call["cache_batch_idx"] = sequence.int() if index is None else index[sequence]
    return sizes


def _rows(x):
    """The size of dimension 1; 0 where there is none, for flashtile to say what is wrong."""
    return x.shape[1] if isinstance(x, Tensor) and x.dim() > 1 else 0
