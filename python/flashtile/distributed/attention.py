"""Attention over a sequence that lies on several ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _C
from .._autograd import cast_as_eager_calls_do, refuse_tangents
from .._core import as_float32, require_tensors
from .._options import attention_options
from ..attention import Window
from ..attention import attention as local_attention
from ..masks import ColumnMask
from ..varlen import attention_varlen as local_attention_varlen
from ._agree import rows_of_ranks
from ._choose import METHODS, Shape, bandwidth_of, choices, choose
from ._dtensor import is_dtensor, with_local
from ._exchange import Group
from ._local import Local, table_on
from ._pairs import Band
from ._share import Attend, Share
from .layout import Layout

_FUNCTION = "distributed.attention"
_RAGGED = "distributed.attention_varlen"
_OPTIONS: dict[str, Any] = dict(
    causal=False, window=None, scale=None, softcap=0.0, alibi_slopes=None, sinks=None, dropout_p=0.0, seed=None,
    deterministic=None, return_lse=False,
)  # fmt: skip
_DROPOUT_P = list(_OPTIONS).index("dropout_p")


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
        TypeError, ValueError, NotImplementedError: what the local function raises; or ranks disagree: the message names
            the rank and the argument, and all ranks raise. This is asked once for each configuration of shapes, dtypes
            and options, as it takes a message and waits for it; a rank that changes them by itself later, or that makes
            no call, leaves the others waiting.

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

        return with_local(_FUNCTION, q, k, v, 1, call)
    if group_size(group) == 1:
        return local_attention(q, k, v, mask=mask, **options)
    return _attend(_FUNCTION, q, k, v, Group(group), layout, method, ulysses_degree, mask, None, options)


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

        return with_local(_RAGGED, q, k, v, 0, call)
    if group_size(group) == 1:
        begins = _table(cu_seqlens_q, q), _table(cu_seqlens_k, q)
        options |= dict(cu_seqlens_q=begins[0], cu_seqlens_k=begins[1])
        return local_attention_varlen(q, k, v, mask=mask, **options)
    documents = cu_seqlens_q, cu_seqlens_k
    return _attend(_RAGGED, q, k, v, Group(group), layout, method, ulysses_degree, mask, documents, options)


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
    if group_size(group) == 1:
        return "flashtile.distributed plan: one rank, the local function"
    options = {**_OPTIONS, **options}
    documents = None if cu_seqlens_q is None else (cu_seqlens_q, cu_seqlens_k)
    function = _FUNCTION if documents is None else _RAGGED
    group = Group(group)
    share, *_, shape = _prepared(function, q, k, v, group, layout, method, ulysses_degree, mask, documents, options)
    bandwidth = bandwidth_of(group.size)
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


def _documents(function: str, q: tuple[int, ...], k: tuple[int, ...]) -> tuple[int, ...]:
    """Where documents begin, from cu_seqlens_q and cu_seqlens_k."""
    for name, begins in ("cu_seqlens_q", q), ("cu_seqlens_k", k):
        if not begins or begins[0] != 0 or any(a > b for a, b in itertools.pairwise(begins)):
            raise ValueError(
                f"{function}: {name} is {_C.described(begins)}, expected 0 and numbers that never decrease"
            )
    if q != k:
        raise NotImplementedError(
            f"{function}: cu_seqlens_k is {_C.described(k)}, expected cu_seqlens_q, which is {_C.described(q)}; "
            "nearest supported: sequences with as many keys as queries"
        )
    return q


def group_size(group: Any) -> int:
    """1 where there is no group at all, so that one program serves one process and many."""
    return dist.get_world_size(group) if group is not None or dist.is_initialized() else 1


def _attend(function, q, k, v, group, layout, method, degree, mask, documents, options):
    share, tensors, sinks, _ = _prepared(function, q, k, v, group, layout, method, degree, mask, documents, options)
    out, lse = Attend.apply(*tensors, sinks, share)
    if documents is not None:
        # Whose gradients need no copies, as those of out[0] would.
        out, lse = out.squeeze(0), None if lse is None else lse.squeeze(0)
    return out if lse is None else (out, lse)


_MOST_PREPARED = 1024


def _prepared(function, q, k, v, group, layout, method, degree, mask, documents, options):
    """The caller's share, q, k and v as (B, S_local, H, D), the sinks, and what the method was chosen by."""
    given, failure = (q, k, v), None
    try:
        given = q, k, v = cast_as_eager_calls_do(q, k, v)
        require_tensors(function, q=q, k=k, v=v)
        refuse_tangents(function, q=q, k=k, v=v)
        if documents is not None:
            documents = tuple(tuple(x.tolist() if isinstance(x, Tensor) else x) for x in documents)
    except Exception as refusal:
        failure = refusal
    key = None if failure else _key_of(function, *given, layout, method, degree, mask, documents, options)
    prepared = group.known.prepared
    known = None if key is None else prepared.get(key)
    if known is None:
        known = _prepare(function, *given, group, layout, method, degree, mask, documents, options, failure)
        if key is not None:
            if len(prepared) == _MOST_PREPARED:
                prepared.clear()
            prepared[key] = known
    tensors = given if documents is None else tuple(x[None] for x in given)
    sinks = None if options["sinks"] is None else as_float32(options["sinks"])
    return known[0], tensors, sinks, known[1]


def _key_of(function, q, k, v, layout, method, degree, mask, documents, options):
    """What a call is, if it has no tensor but q, k and v and nothing else that differs from call to call: the next one
    like it is prepared as this one was."""
    options = tuple(options.values())
    if mask is not None or any(isinstance(x, Tensor) for x in options) or options[_DROPOUT_P]:
        return None
    wanted = torch.is_grad_enabled() and (q.requires_grad, k.requires_grad, v.requires_grad)
    try:
        of_tensors = tuple((x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16) for x in (q, k, v))
        key = function, layout, method, degree, of_tensors, wanted, documents, options
        hash(key)
    except (TypeError, RuntimeError):  # a list for a tuple, or tensors that have no memory
        return None
    return key


def _prepare(function, q, k, v, group, layout, method, degree, mask, documents, options, failure):
    """The caller's share, and what the method was chosen by, once all ranks agree; `failure` is what was wrong so
    far."""
    given, rows = {}, (0, 0)
    try:
        if failure is not None:
            raise failure
        if documents is not None:
            documents = _documents(function, *documents)
        _check(function, q, k, v, mask, documents, options, layout, method)
        rows = q.shape[-3], k.shape[-3]
        given = _description(q, k, v, layout, method, degree, mask, documents is not None, options)
    except Exception as refusal:
        failure = refusal
    counts = rows_of_ranks(function, group, rows, given, failure)
    queries, keys = (
        _layout_of(function, layout, name, [count[side] for count in counts]) for side, name in ((0, "q"), (1, "k"))
    )
    _check_lengths(function, queries, keys, mask, documents)
    tensors = tuple(x if documents is None else x[None] for x in (q, k, v))
    return _share(function, group, tensors, queries, keys, mask, documents, options, method, degree)


def _share(function, group, tensors, queries, keys, mask, documents, options, method, degree):
    q, k, v = tensors  # (B, S_local, H, D)
    band = Band.of(options["causal"], options["window"], keys.length - queries.length if documents is None else 0)
    local_options = {**options, "causal": False, "sinks": None, "window": None}
    returns_lse = local_options.pop("return_lse")
    sharers = max(q.shape[2] // max(k.shape[2], 1), 1)
    ranges = None if mask is None else mask.ranges
    local = Local((), band, documents, attention_options(**local_options), ranges, sharers=sharers, entries=q.shape[0])
    differentiable = torch.is_grad_enabled() and any(
        x.requires_grad for x in (*tensors, options["sinks"]) if x is not None
    )
    sizes = q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.element_size()
    shape = Shape(queries, keys, band, documents, local.places(), *sizes, differentiable)
    choice = choose(function, shape, method, degree)
    share = Share(group, queries, keys, local, q.shape[2], k.shape[2], choice.degree, choice.inner, returns_lse)
    return share, shape


def share_of(group, tensors, layout, method, documents=None, options=None):
    """The share of a rank of `group`, all of whose ranks have as many rows as these tensors (B, S_local, H, D)."""
    queries, keys = (Layout.of(layout, x.shape[1] * group.size, group.size) for x in tensors[:2])
    given = {**_OPTIONS, **(options or {})}
    return _share(_FUNCTION, group, tensors, queries, keys, None, documents, given, method, None)[0]


def _check(function, q, k, v, mask, documents, options, layout, method):
    """Raises what the local function would, and more."""
    if method not in METHODS:
        raise ValueError(f"{function}: method is {method!r}, expected one of {', '.join(map(repr, METHODS))}")
    if q.dtype == torch.float8_e4m3fn:
        raise NotImplementedError(
            f"{function}: q has dtype float8_e4m3fn, expected 16 or 32 bits; nearest supported: x.to(torch.bfloat16)"
        )
    if options["dropout_p"] and options["seed"] is None:
        raise ValueError(f"{function}: seed is None, expected an int, the same on all ranks, as dropout_p is given")
    if mask is not None and not isinstance(mask, ColumnMask):
        raise TypeError(f"{function}: mask is {_C.described(mask)}, expected a flashtile.masks.ColumnMask or None")
    if mask is not None and (mask.cu_seqlens is not None) != (documents is not None):
        raise ValueError(f"{function}: mask is {mask}, expected one of {'a ragged' if documents else 'a dense'} batch")
    if documents is None:
        _C.explain(local_attention, None, q, k, v, **options)
    else:
        table = q.new_zeros(2, dtype=torch.int32)  # of one sequence, which may as well be empty
        _C.explain(local_attention_varlen, None, q, k, v, cu_seqlens_q=table, cu_seqlens_k=table, **options)


def _description(q, k, v, layout, method, degree, mask, ragged, options):
    """What has to be the same on all ranks, as text."""
    sizes = {name: (None if ragged else x.shape[0], *x.shape[-2:]) for name, x in (("q", q), ("k", k), ("v", v))}
    leaves = (q, k, v, options["sinks"])
    wanted = [torch.is_grad_enabled() and getattr(x, "requires_grad", False) for x in leaves]
    return {
        **{f"{name}'s batch, heads and head dimension": size for name, size in sizes.items()},
        "q's dtype": q.dtype,
        "the gradients wanted of q, k, v, sinks": str(wanted),
        "layout": layout,
        "method": (method, degree),
        "mask": None if mask is None else tuple(mask.ranges.shape),
        **{name: _told(value) for name, value in options.items()},
    }


def _check_lengths(function, queries, keys, mask, documents):
    """What only the whole sequence shows; all ranks find the same."""
    if documents is not None and (queries != keys or documents[-1] > queries.length):
        raise ValueError(
            f"{function}: cu_seqlens ends at {documents[-1]}, with {queries.length} query rows and {keys.length} keys "
            "on all ranks, expected as many keys as rows, and no fewer than that"
        )
    if mask is None:
        return
    columns = mask.ranges.shape[2]
    if columns != keys.length or mask.seqlen_q not in (None, queries.length):
        raise ValueError(f"{function}: mask is {mask}, expected S_q = {queries.length} and S_k = {keys.length}")


def _told(value):
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else value


def _layout_of(function, layout, name, rows):
    found = Layout.of(layout, sum(rows), len(rows)) if isinstance(layout, str) else layout
    if found.ranks != len(rows):
        raise ValueError(f"{function}: layout is of {found.ranks} ranks, expected {len(rows)}, as the group")
    for rank, count in enumerate(rows):
        if found.rows(rank) != count:
            raise ValueError(
                f"{function}: {name} has {count} rows on rank {rank}, expected {found.rows(rank)}, as the layout"
            )
    return found
