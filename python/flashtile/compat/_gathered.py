"""A rank's rows over keys of all ranks, which it gathers at once: as Llama 3 was trained (Dubey et al. 2024)."""

import torch

from .. import _C
from .._autograd import cast_as_eager_calls_do, refuse_slopes_that_learn, refuse_tangents
from .._core import forward_with_state, gradients
from .._invariance import is_batch_invariant
from .._ops import differentiable_once
from .._options import attention_options
from ..distributed._agree import agree
from ..distributed._exchange import Group
from ..distributed._prepare import description
from ..distributed._rows import Sums
from ..varlen import attention_varlen as local_attention_varlen

_FUNCTION = "attention_varlen"


def attend_gathered(q, k, v, *, group, keys, cu_seqlens_q, cu_seqlens_k, return_lse, seed, **options):
    """``flashtile.attention_varlen`` of the caller's q, (T_q, H_q, D), over `keys` = (begin, end) of the rows of k and
    v of all ranks, one behind the other. All have as many rows of these, and the same options, or all raise; each has
    sequences, keys and a seed of its own."""
    group, given, failure = Group(group), {}, None
    try:
        q, k, v = cast_as_eager_calls_do(q, k, v)
        refuse_tangents(_FUNCTION, q=q, k=k, v=v)
        if options["alibi_slopes"] is not None:
            refuse_slopes_that_learn(_FUNCTION, options["alibi_slopes"])
        tables = dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        # The gathered keys are not there yet. These have their shape, and nobody reads them.
        wanted = (x.new_empty(1, *x.shape[1:]).expand(keys[1] - keys[0], -1, -1) for x in (k, v))
        _C.explain(local_attention_varlen, None, q, *wanted, **tables, return_lse=return_lse, seed=seed, **options)
        given = {"the number of k's rows": len(k), **description(q, k, v, options, ragged=True)}
    except Exception as refusal:
        failure = refusal
    rows = len(k), len(k)  # of queries each rank may have any number: the others need not know
    agree(_FUNCTION, group, rows, given, failure, on_cpu=not q.is_cuda)
    options = attention_options(
        **options, seed=seed, batch_invariant=is_batch_invariant(), sequences=(cu_seqlens_q, cu_seqlens_k, None, None)
    )
    out, lse = _AttendGathered.apply(q, k, v, group, keys, options)
    return (out, lse) if return_lse else out


class _AttendGathered(torch.autograd.Function):
    """What stays for backward is the caller's own: keys are gathered a second time there."""

    @staticmethod
    def forward(ctx, q, k, v, group, keys, options):
        out, lse, state = forward_with_state(q, *_gathered(group, keys, k, v), options)
        ctx.save_for_backward(q, k, v, out, state)
        ctx.given = group, keys, options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        compute = _gradients_with_graph if torch.is_grad_enabled() else _gradients
        return (*compute(*ctx.given, ctx.needs_input_grad, dout, dlse, *ctx.saved_tensors), None, None, None)


def _gradients(group, keys, options, needed, dout, dlse, q, k, v, out, state):
    of_keys = needed[1] or needed[2]
    given = q, *_gathered(group, keys, k, v)
    dq, dk, dv, _ = gradients((needed[0], of_keys, of_keys, False), dout, dlse, *given, out, state, options)
    if of_keys:
        dk, dv = _summed(group, keys, len(k), dk, dv)
    return dq, dk if needed[1] else None, dv if needed[2] else None


_gradients_with_graph = differentiable_once(_gradients)


def _gathered(group, keys, *tensors):
    """Rows `keys` of what all ranks have of each tensor."""
    everyone = range(group.size)
    mine = [x.detach().contiguous() for x in tensors]
    come = {rank: [torch.empty_like(x) for x in mine] for rank in everyone}
    group.exchange(dict.fromkeys(everyone, mine), come).wait()
    wanted = [slice(*_within(keys, rank, len(mine[0]))) for rank in everyone]
    parts = zip(*(come[rank] for rank in everyone), strict=True)  # of each tensor those of all ranks
    return [torch.cat([x[rows] for x, rows in zip(of, wanted, strict=True)]) for of in parts]


def _summed(group, keys, rows, *tensors):
    """The way back: for the caller's rows the sums of what all ranks have, in float32, in the order of the ranks."""
    everyone = range(group.size)
    # What ranks have of each other's rows nobody knows but them, so zeros travel too.
    sends = {rank: [_all_rows(x, keys, rank, rows) for x in tensors] for rank in everyone}
    shapes = [torch.Size((rows, *x.shape[1:])) for x in tensors]
    come = {rank: [x.new_empty(shape) for x, shape in zip(tensors, shapes, strict=True)] for rank in everyone}
    group.exchange(sends, come).wait()
    found = []
    for i, x in enumerate(tensors):
        total = Sums(come[0][i][None])
        for rank in everyone:
            total.add(0, rows, come[rank][i][None])
        found.append(total.finish(x.dtype)[0])
    return found


def _within(keys, rank, rows):
    """Which rows of a rank are among `keys`."""
    first = rank * rows
    begin = min(max(keys[0] - first, 0), rows)
    return begin, max(min(keys[1] - first, rows), begin)


def _all_rows(x, keys, rank, rows):
    """The part of `x`, which has the rows `keys`, for the rows of a rank: zeros where it has none."""
    begin, end = _within(keys, rank, rows)
    whole = x.new_zeros(rows, *x.shape[1:])
    if begin < end:
        first = rank * rows + begin - keys[0]
        whole[begin:end] = x[first : first + end - begin]
    return whole
