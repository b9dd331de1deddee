"""Attention over a sequence that lies on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .. import _C
from ..attention import Window
from ..attention import attention as local_attention
from ..masks import ColumnMask
from ..varlen import attention_varlen as local_attention_varlen
from ._choose import choices
from ._dtensor import is_dtensor, local_of, with_local
from ._exchange import Group
from ._local import table_on
from ._prepare import FUNCTION, OPTIONS, RAGGED, prepare
from ._share import Attend, anchors_of
from .layout import Layout


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    layout: str | Layout = "zigzag",
    method: str = "auto",
    ulysses_degree: int | None = None,
    causal: bool = False,
    window: Window = None,
    mask: ColumnMask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`flashtile.attention` of a sequence whose rows lie on the ranks of a process group, some on each.

    Every rank of the group calls it with its own rows, and gets the results of these. They are those of the local
    function on the whole sequence: in each rank's rows, up to the rounding of results over parts of the keys, which are
    summed in float32. Where autograd runs its backward, every rank must.

    Args:
        q: (B, S_local, H_q, D), the caller's rows of the sequence, one behind the other in the order of the sequence:
            what :func:`shard` makes of the whole. Ranks may have different numbers of rows, or none. float8_e4m3fn is
            not served. Or q, k and v are DTensors with one Shard(1), whose mesh dimension is the group, and whose
            layout is contiguous; results are DTensors then.
        k: (B, S_local, H_k, D). The sequence of keys may have another length, then it is laid out by itself.
        v: (B, S_local, H_k, D_v).
        group: a process group of torch.distributed, with NCCL for CUDA tensors (with gloo they take the way through the
            host's memory), or gloo for those of a CPU; by default the default group. A group of one, or no process
            group at all, makes this the local function.
        layout: which rows each rank has: ``"zigzag"``, chunks r and 2R - 1 - r of 2R for rank r of R (also called
            ``"head_tail"``), which a causal mask gives equal work; ``"contiguous"``, chunk r of R; or a
            :class:`Layout`. A layout that is named is of ceil(S / 2R) or ceil(S / R) rows a chunk.
        method: how rows meet the keys of other ranks: ``"ring"``, keys and values pass from rank to rank while they are
            attended to; ``"all_gather"``, each rank gets those that its rows see at once; ``"ulysses"``, ranks exchange
            rows for heads, and each attends to the whole sequence with some of them; ``"ulysses_ring"``, neighbouring
            ranks exchange heads, and keys travel between such sets; ``"auto"``, whichever takes least time by a count
            of bytes and FLOPs, which :func:`explain` prints.
        ulysses_degree: how many neighbouring ranks exchange heads, a divisor of the group's size.
        causal: as in the local function, of the whole sequence, as the next.
        window: (left, right).
        mask: of the whole sequence, the same on all ranks.
        scale: as in the local function, as softcap and deterministic.
        alibi_slopes: the same on all ranks, as sinks.
        sinks: their gradient is that of the caller's rows: that of the whole call is the sum over ranks, as for every
            parameter that ranks share.
        dropout_p: the weights that are dropped are those that the local function drops with this seed. With keys that
            travel, chunks must begin at multiples of 16.
        seed: the same on all ranks; where there is dropout, it must be given.
        return_lse: also return lse.

    Returns:
        out, (B, S_local, H_q, D_v), of the caller's rows; with ``return_lse`` the pair (out, lse), lse being (B, H_q,
        S_local), float32. Both are differentiable with respect to q, k, v and sinks, once.

    Raises:
        TypeError, ValueError, NotImplementedError: what the local function raises; or batch_invariant_mode is on; or
            ranks disagree: the message names the rank and the argument, and all ranks raise. Over NCCL this is asked
            once for each configuration of local shapes, dtypes and options, as it waits for a message. So a rank that
            changes them by itself later, or that makes no call, leaves the others waiting; and where S changes to what
            ranks cannot divide, so that some have as many rows as before, the layout must be a :class:`Layout`.

    Example:
        >>> import torch
        >>> from flashtile import distributed
        >>> q = torch.randn(1, 64, 8, 32)  # on each rank of `torchrun` the same
        >>> k, v = torch.randn(2, 1, 64, 2, 32)
        >>> mine = [distributed.shard(x, 1) for x in (q, k, v)]
        >>> out = distributed.attention(*mine, causal=True)
        >>> distributed.unshard(out, 1).shape
        torch.Size([1, 64, 8, 32])

    Sources: Ring Attention (Liu et al. 2023, arXiv:2310.01889), with the chunks that Llama 3 (Dubey et al. 2024,
    arXiv:2407.21783) has for balance; DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509); both at once, USP (Fang
    and Zhao 2024, arXiv:2405.07719).
    """
    options: dict[str, Any] = dict(
        causal=causal, window=window, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        dropout_p=dropout_p, seed=seed, deterministic=deterministic, return_lse=return_lse,
    )  # fmt: skip
    if is_dtensor(q):
        parallel: dict[str, Any] = dict(method=method, ulysses_degree=ulysses_degree, mask=mask)

        def call(q: Tensor, k: Tensor, v: Tensor, group: Any) -> Any:
            return attention(q, k, v, group=group, layout="contiguous", **parallel, **options)

        return with_local(FUNCTION, q, k, v, 1, dropout_p, call)
    if group_size(group) == 1:
        return local_attention(q, k, v, mask=mask, **options)
    return _attend(FUNCTION, q, k, v, Group(group), layout, method, ulysses_degree, mask, None, options)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | Sequence[int],
    cu_seqlens_k: Tensor | Sequence[int],
    group: Any = None,
    layout: str | Layout = "zigzag",
    method: str = "auto",
    ulysses_degree: int | None = None,
    causal: bool = False,
    window: Window = None,
    mask: ColumnMask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`flashtile.attention_varlen` of a ragged batch whose rows lie on the ranks of a process group.

    As :func:`attention`, of T rows that are several sequences one behind the other. Sequences may have any lengths, and
    may lie on any number of ranks: chunks are cut without regard to where they begin. :meth:`Layout.balanced` makes
    chunks that have equal work. Arguments that are not listed are those of :func:`attention`.

    Args:
        q: (T_local, H_q, D), the caller's rows of all T.
        k: (T_local, H_k, D), of the same rows.
        v: (T_local, H_k, D_v).
        cu_seqlens_q: (B + 1), where each sequence begins among all T rows, and where the last one ends, the same on all
            ranks. The host reads it, and waits for a GPU that has it: a tensor on the CPU, or a tuple, spares that.
        cu_seqlens_k: the same again: sequences have as many keys as queries.
        mask: of the whole batch, as `ColumnMask.concatenate` makes it.
        dropout_p: where keys travel, chunks must begin at multiples of 16 rows of the sequence that they cut.

    Returns:
        out, (T_local, H_q, D_v); with ``return_lse`` the pair (out, lse), lse being (H_q, T_local), float32. Rows
        behind the last sequence have out = 0 and lse = -inf.

    Raises:
        NotImplementedError: also where cu_seqlens_q and cu_seqlens_k differ.
        TypeError, ValueError: as :func:`attention`.

    Example:
        >>> import torch
        >>> from flashtile import distributed
        >>> q, k, v = torch.randn(3, 64, 4, 32)
        >>> cu_seqlens = (0, 10, 37, 64)
        >>> mine = [distributed.shard(x, 0) for x in (q, k, v)]
        >>> distributed.attention_varlen(*mine, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, causal=True).shape
        torch.Size([64, 4, 32])
    """
    options: dict[str, Any] = dict(
        causal=causal, window=window, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        dropout_p=dropout_p, seed=seed, deterministic=deterministic, return_lse=return_lse,
    )  # fmt: skip
    if is_dtensor(q):
        parallel: dict[str, Any] = dict(method=method, ulysses_degree=ulysses_degree, mask=mask)
        parallel |= dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)

        def call(q: Tensor, k: Tensor, v: Tensor, group: Any) -> Any:
            return attention_varlen(q, k, v, group=group, layout="contiguous", **parallel, **options)

        return with_local(RAGGED, q, k, v, 0, dropout_p, call)
    if group_size(group) == 1:
        begins = _table(cu_seqlens_q, q), _table(cu_seqlens_k, q)
        options |= dict(cu_seqlens_q=begins[0], cu_seqlens_k=begins[1])
        return local_attention_varlen(q, k, v, mask=mask, **options)
    documents = cu_seqlens_q, cu_seqlens_k
    return _attend(RAGGED, q, k, v, Group(group), layout, method, ulysses_degree, mask, documents, options)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | Sequence[int] | None = None,
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
    group: Any = None,
    layout: str | Layout = "zigzag",
    method: str = "auto",
    ulysses_degree: int | None = None,
    mask: ColumnMask | None = None,
    **options: Any,
) -> str:
    """What a call of :func:`attention`, or with `cu_seqlens_q` of :func:`attention_varlen`, would do, and what the
    methods are expected to take: for each of them the time of the rank that takes longest, how much of it is computing,
    and what a rank sends. Every rank of the group must call it. Arguments are those of the call.

    >>> import torch
    >>> from flashtile import distributed
    >>> q = torch.randn(1, 64, 8, 32)
    >>> print(distributed.explain(q, q, q, causal=True))
    flashtile.distributed plan: one rank, the local function
    """
    documents = None if cu_seqlens_q is None else (cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k)
    function = FUNCTION if documents is None else RAGGED
    unknown = ", ".join(sorted(options.keys() - OPTIONS.keys()))
    if unknown:
        raise TypeError(f"distributed.explain: {unknown} is given, expected arguments of {function}")
    options = {**OPTIONS, **options}
    if is_dtensor(q):
        dim, layout = 1 if documents is None else 0, "contiguous"
        q, k, v, group = local_of(function, q, k, v, dim, options["dropout_p"])
    if group_size(group) == 1:
        return "flashtile.distributed plan: one rank, the local function"
    group = Group(group)
    share, *_, shape, agreement = prepare(
        function, q, k, v, group, layout, method, ulysses_degree, mask, documents, options
    )
    bandwidth = agreement.bandwidth
    taken = next(x for x in choices(shape, bandwidth) if (x.degree, x.inner) == (share.degree, share.inner))
    what = "forward and backward" if shape.differentiable else "forward"
    lines = [
        f"flashtile.distributed plan: {taken.name} on {group.size} ranks, {what}",
        f"  {'':<24}{'time':>13}{'computing':>15}{'sent by a rank':>15}",
        *(f"{'> ' if x == taken else '  '}{x}" for x in choices(shape, bandwidth)),
        f"  expected of the slowest rank, of an H200, at {bandwidth / 1e9:.0f} GB/s between ranks",
    ]
    return "\n".join(lines)


def _table(cu_seqlens: Tensor | Sequence[int], q: Tensor) -> Tensor:
    return cu_seqlens if isinstance(cu_seqlens, Tensor) else table_on(q.device, cu_seqlens)


def group_size(group: Any) -> int:
    """1 where there is no group at all, so that one program serves one process and many."""
    kinds: Any = (dist.ProcessGroup, type(dist.GroupMember.NON_GROUP_MEMBER))
    if group is not None and not isinstance(group, kinds):
        raise TypeError(f"flashtile.distributed: group is {_C.described(group)}, expected a process group or None")
    size = dist.get_world_size(group) if group is not None or dist.is_initialized() else 1
    if size < 1:
        raise ValueError("flashtile.distributed: group is one without the caller, expected one that it is a member of")
    return size


def _attend(function, q, k, v, group, layout, method, degree, mask, documents, options):
    share, tensors, sinks, *_ = prepare(function, q, k, v, group, layout, method, degree, mask, documents, options)
    out, lse = Attend.apply(*tensors, sinks, share, *anchors_of(share, *tensors, sinks))
    if documents is not None:
        # Whose gradients need no copies, as those of out[0] would.
        out, lse = out.squeeze(0), None if lse is None else lse.squeeze(0)
    return out if lse is None else (out, lse)
