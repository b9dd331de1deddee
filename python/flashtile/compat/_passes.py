"""A backward pass by itself, as libraries ask for it that do autograd's part: those of context parallelism."""

import operator

import torch

from .._autograd import is_traced
from .._core import gradients, require_shape, require_shape_and_dtype
from .._invariance import is_batch_invariant
from .._ops import gradient_operator
from .._options import SEED, attention_options, replaced
from .._padding import contiguous, last_size, padded, require_values
from ._common import flag, require_place, require_rank, require_tensors, softcap_of, window_of
from ._ragged import equal_lengths


@torch.no_grad()
def run_backward(
    function,
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    places,
    *,
    softmax_scale,
    causal,
    window_size,
    softcap,
    deterministic,
    alibi_slopes=None,
    dropout_p=0.0,
    seed=None,
    sequences=None,
):
    """Writes the gradients of q, k and v into `places`, each a tensor or None, and returns softmax_d: Σ dout · out of
    each row, float32, of softmax_lse's shape. k and v may be a part of the keys that `out` and `softmax_lse` are the
    results of; the gradients are those that this part has."""
    require_tensors(function, q=q, k=k, v=v, out=out, softmax_lse=softmax_lse, dout=dout)
    _check_results(function, q, v, dout=dout, out=out, softmax_lse=softmax_lse)
    for (name, place), x in zip(places.items(), (q, k, v), strict=True):
        if place is not None:
            require_place(function, name, place, x.shape, x.dtype, x.device)
    *given, lse = dout, q, k, v, out, softmax_lse
    if sequences is not None:
        *given, lse, sequences = _as_ragged(function, *given, lse, sequences)
    given = [contiguous(x) for x in given]
    if last_size(q) == last_size(k) and last_size(dout) == last_size(v) == last_size(out):
        if softmax_scale is None and last_size(q) % 8 != 0:
            softmax_scale = last_size(q) ** -0.5
        given = [padded(x) for x in given]
    options = attention_options(
        alibi_slopes=alibi_slopes,
        causal=flag(function, "causal", causal),
        window=window_of(function, window_size),
        scale=softmax_scale,
        softcap=softcap_of(softcap),
        dropout_p=dropout_p,
        seed=seed,
        deterministic=flag(function, "deterministic", deterministic) or None,
        batch_invariant=is_batch_invariant(),
        sequences=sequences,
    )
    needed = (True, True, True, False)  # there are no sinks
    given = (needed, given[0], None, *given[1:], lse.contiguous())
    if is_traced():
        found = gradient_operator(function, *given, options)
    else:
        if seed is not None:  # which may be a tensor, as operators want it
            options = replaced(options, SEED, operator.index(seed))
        found = gradients(*given, options)
    for place, gradient in zip(places.values(), found[:3], strict=True):
        if place is not None:
            place.copy_(gradient[..., : place.shape[-1]].reshape(place.shape))
    return (dout.float() * out).sum(-1).transpose(-1, -2)


def _check_results(function, q, v, *, softmax_lse, **outs):
    """What the forward has left, in the terms of the caller: a dense side may be flattened before flashtile sees it."""
    if q.dim() < 3 or v.dim() == 0:
        return  # flashtile says so
    *batch, rows, heads, _ = q.shape
    for name, x in outs.items():
        require_shape(function, name, x, (*q.shape[:-1], v.shape[-1]))
    require_shape_and_dtype(function, "softmax_lse", softmax_lse, (*batch, heads, rows), torch.float32)


def _as_ragged(function, dout, q, k, v, out, lse, sequences):
    """All of them and the tables, where a side without cu_seqlens is dense."""
    cu_seqlens_q, cu_seqlens_k, *used = sequences
    if cu_seqlens_q is None:
        require_rank(function, 4, "(B, S_q, H_q, D), since cu_seqlens_q is None", q=q)
        cu_seqlens_q, lse = equal_lengths(q), lse.transpose(0, 1).flatten(1)
        dout, q, out = (x.flatten(0, 1) for x in (dout, q, out))
    if cu_seqlens_k is None:
        require_rank(function, 4, "(B, S_k, H_k, D), since cu_seqlens_k is None", k=k)
        require_values(function, k, v)
        cu_seqlens_k = equal_lengths(k)
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    return dout, q, k, v, out, lse, (cu_seqlens_q, cu_seqlens_k, *used)
