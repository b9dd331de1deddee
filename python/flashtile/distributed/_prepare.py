"""What is found out about a call before any rank computes: whether its arguments are right, whether all ranks agree, by
which method they go, and what the caller's part is."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
from torch import Tensor

from .. import _C
from .._autograd import cast_as_eager_calls_do, refuse_tangents
from .._core import as_float32, require_tensors
from .._invariance import is_batch_invariant
from .._options import attention_options
from ..attention import attention as local_attention
from ..masks import ColumnMask
from ..varlen import attention_varlen as local_attention_varlen
from ._agree import agree
from ._choose import METHODS, Shape, bandwidth_of, choose
from ._local import Local
from ._pairs import Band
from ._share import Share
from .layout import Layout, require_layout, require_rows

FUNCTION = "distributed.attention"
RAGGED = "distributed.attention_varlen"
OPTIONS: dict[str, Any] = dict(
    causal=False, window=None, scale=None, softcap=0.0, alibi_slopes=None, sinks=None, dropout_p=0.0, seed=None,
    deterministic=None, return_lse=False,
)  # fmt: skip
_DROPOUT_P = list(OPTIONS).index("dropout_p")
_MOST_PREPARED = 1024  # calls that are remembered


def prepare(function, q, k, v, group, layout, method, degree, mask, documents, options):
    """The caller's share, q, k and v as (B, S_local, H, D), the sinks, and what the method was chosen by, a Shape and
    an Agreement."""
    given, failure = (q, k, v), None
    try:
        given = q, k, v = cast_as_eager_calls_do(q, k, v)
        require_tensors(function, q=q, k=k, v=v)
        refuse_tangents(function, q=q, k=k, v=v)
        _check_kinds(function, layout, method, degree)
        if documents is not None:
            names = ("cu_seqlens_q", "cu_seqlens_k")
            documents = tuple(_integers(function, *x) for x in zip(names, documents, strict=True))
        if is_batch_invariant():
            raise NotImplementedError(
                f"{function}: batch_invariant_mode is on, expected results of one call, not of parts on several ranks; "
                "nearest supported: batch_invariant_mode(False)"
            )
    except Exception as refusal:
        failure = refusal
    key = None if failure else _key_of(function, *given, layout, method, degree, mask, documents, options)
    prepared = group.known.prepared
    known, asks = None if key is None else prepared.get(key), False
    on_cpu = not any(getattr(x, "is_cuda", False) for x in given)
    if known is not None and not group.all_say(known[2].number, on_cpu):
        known, asks = None, True
    if known is None:
        known = _prepare(
            function, *given, group, layout, method, degree, mask, documents, options, failure, on_cpu, asks
        )
        if key is not None:
            if len(prepared) == _MOST_PREPARED:
                prepared.clear()
            prepared[key] = known
    tensors = given if documents is None else tuple(x[None] for x in given)
    sinks = None if options["sinks"] is None else as_float32(options["sinks"])
    share, shape, agreement = known
    return share, tensors, sinks, shape, agreement


def _check_kinds(function, layout, method, degree):
    """What is asked of each call, so that a call like one before is like it."""
    require_layout(function, layout)
    if not isinstance(method, str):
        raise TypeError(f"{function}: method is {_C.described(method)}, expected a str")
    if degree is not None and (isinstance(degree, bool) or not isinstance(degree, int)):
        raise TypeError(f"{function}: ulysses_degree is {_C.described(degree)}, expected an int or None")


def _integers(function, name, begins):
    try:
        return tuple(map(operator.index, begins.tolist() if isinstance(begins, Tensor) else begins))
    except TypeError:
        message = f"{function}: {name} is {_C.described(begins)}, expected integers, or a tensor of them"
        raise TypeError(message) from None


def _key_of(function, q, k, v, layout, method, degree, mask, documents, options):
    """What a call is, if it has no tensor but q, k and v and nothing else that differs from call to call: the next one
    like it is prepared as this one was."""
    options = tuple(options.values())
    if mask is not None or any(isinstance(x, Tensor) for x in options) or options[_DROPOUT_P]:
        return None
    wanted = torch.is_grad_enabled() and (q.requires_grad, k.requires_grad, v.requires_grad)
    try:
        of_tensors = tuple((x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16) for x in (q, k, v))
        kinds = tuple(map(type, options))  # since 1 is True, and 1.0 too
        key = function, layout, method, degree, of_tensors, wanted, documents, options, kinds
        hash(key)
    except (TypeError, RuntimeError):  # a list for a tuple, or tensors that have no memory
        return None
    return key


def _prepare(function, q, k, v, group, layout, method, degree, mask, documents, options, failure, on_cpu, asks):
    """The caller's share, and what the method was chosen by, once all ranks agree; `failure` is what was wrong so far,
    and `asks` whether all know that they have to ask."""
    given, rows = {}, (0, 0)
    try:
        if failure is not None:
            raise failure
        if documents is not None:
            documents = _documents(function, *documents)
        _check(function, q, k, v, mask, documents, options, layout, method)
        rows = q.shape[-3], k.shape[-3]
        given = {
            **description(q, k, v, options, ragged=documents is not None),
            "layout": layout,
            "method": (method, degree),
            "mask": None if mask is None else tuple(mask.ranges.shape),
        }
    except Exception as refusal:
        failure = refusal
    agreement = agree(function, group, rows, given, failure, on_cpu=on_cpu, asks=asks)
    queries, keys = (
        _layout_of(function, layout, name, [count[side] for count in agreement.rows])
        for side, name in ((0, "q"), (1, "k"))
    )
    _check_lengths(function, queries, keys, mask, documents)
    tensors = tuple(x if documents is None else x[None] for x in (q, k, v))
    bandwidth = agreement.bandwidth
    found = _share(function, group, tensors, queries, keys, mask, documents, options, method, degree, bandwidth)
    return *found, agreement


def _share(function, group, tensors, queries, keys, mask, documents, options, method, degree, bandwidth):
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
    choice = choose(function, shape, method, degree, bandwidth)
    share = Share(group, queries, keys, local, q.shape[2], k.shape[2], choice.degree, choice.inner, returns_lse)
    return share, shape


def share_of(group, tensors, layout, method, documents=None, options=None):
    """The share of a rank of `group`, all of whose ranks have as many rows as these tensors (B, S_local, H, D)."""
    queries, keys = (Layout.of(layout, x.shape[1] * group.size, group.size) for x in tensors[:2])
    given = {**OPTIONS, **(options or {})}
    bandwidth = bandwidth_of(group.size)
    return _share(FUNCTION, group, tensors, queries, keys, None, documents, given, method, None, bandwidth)[0]


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
    if mask is not None:
        _check_mask(function, mask, q, k, 1 if documents else q.shape[0])
    if documents is None:
        _C.explain(local_attention, None, q, k, v, **options)
    else:
        table = q.new_zeros(len(documents), dtype=torch.int32)  # of sequences that may as well be empty
        _C.explain(local_attention_varlen, None, q, k, v, cu_seqlens_q=table, cu_seqlens_k=table, **options)


def _check_mask(function, mask, q, k, entries):
    heads_q, heads_k = q.shape[-2], k.shape[-2]
    shape, expected = tuple(mask.ranges.shape), "(1 or B, 1 or H_k or H_q, S_k, 4)"
    if shape[0] not in (1, entries):
        raise ValueError(f"{function}: mask has shape {shape}, expected 1 or B = {entries} entries in {expected}")
    if shape[1] not in (1, heads_k, heads_q):
        heads = f"1, H_k = {heads_k} or H_q = {heads_q} heads"
        raise ValueError(f"{function}: mask has shape {shape}, expected {heads} in {expected}")
    if mask.ranges.device != q.device:
        raise ValueError(f"{function}: mask is on {mask.ranges.device}, expected {q.device}, as q")


def description(q, k, v, options, *, ragged):
    """What has to be the same on all ranks of operands and options of a call."""
    sizes = {name: (None if ragged else x.shape[0], *x.shape[-2:]) for name, x in (("q", q), ("k", k), ("v", v))}
    leaves = (q, k, v, options.get("sinks"))
    wanted = [torch.is_grad_enabled() and getattr(x, "requires_grad", False) for x in leaves]
    return {
        **{f"{name}'s batch, heads and head dimension": size for name, size in sizes.items()},
        "q's dtype": q.dtype,
        "the gradients wanted of q, k, v, sinks": str(wanted),
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


def _told(value):
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else value


def _layout_of(function, layout, name, rows):
    found = Layout.of(layout, sum(rows), len(rows)) if isinstance(layout, str) else layout
    if found.ranks != len(rows):
        raise ValueError(f"{function}: layout is of {found.ranks} ranks, expected {len(rows)}, as the group")
    require_rows(function, name, found, rows)
    return found
