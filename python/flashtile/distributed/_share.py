"""One rank's part in an attention whose rows lie on many: forward and backward, behind autograd."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .._ops import differentiable_once
from .._options import ALIBI_SLOPES, replaced
from ._exchange import Group
from ._heads import Heads, Ulysses
from ._keys import AllGather, Members, Ring
from ._local import Local, Saved
from .layout import Layout, Runs, common, of_sets, rows_of, together

INNER: dict[str, type[Ring] | type[AllGather]] = {"ring": Ring, "all_gather": AllGather}


@dataclass(frozen=True)
class Share:
    """What a rank knows of a call: the same on all ranks, but for its place. Ulysses exchanges rows for heads among
    `degree` neighbouring ranks; keys travel, by `inner`, among ranks that have the same heads."""

    group: Group
    queries: Layout
    keys: Layout
    local: Local  # of all heads; `rows` are not yet those of the caller
    heads_q: int
    heads_k: int
    degree: int
    inner: str
    returns_lse: bool

    @property
    def neighbours(self) -> range:
        first = self.group.rank - self.place
        return range(first, first + self.degree)

    @property
    def place(self) -> int:
        """The caller's among the neighbours."""
        return self.group.rank % self.degree

    @cached_property
    def heads(self) -> Heads:
        return Heads.of(self.heads_q, self.heads_k, self.degree)

    @cached_property
    def ulysses(self) -> Ulysses:
        return Ulysses(self.group, self.neighbours, self.place, self.heads)

    def of_neighbours(self, layout: Layout) -> list[Runs]:
        """The rows of each of the neighbours."""
        return [layout.runs[rank] for rank in self.neighbours]

    def rows_that_count(self) -> int:
        """How many of the neighbours' rows belong to a document: all but those behind the last."""
        end = self.queries.length if self.local.documents is None else self.local.documents[-1]
        return rows_of(common(together(self.of_neighbours(self.queries)), ((0, end),)))

    @cached_property
    def attends(self) -> Ring | AllGather:
        """How keys travel, for the caller's heads."""
        index = self.group.rank // self.degree
        queries, keys = of_sets(self.queries, self.degree), of_sets(self.keys, self.degree)
        ranks = tuple(range(self.place, self.group.size, self.degree))
        heads = self.heads
        of_q, of_k = heads.queries[self.place], heads.keys[self.place]
        options, ranges = self.local.options, self.local.ranges
        if options[ALIBI_SLOPES] is not None:
            options = replaced(options, ALIBI_SLOPES, options[ALIBI_SLOPES][..., slice(*of_q)])
        if ranges is not None and ranges.shape[1] > 1:
            ranges = ranges[:, slice(*(of_q if ranges.shape[1] == self.heads_q else of_k))]
        local = replace(self.local, rows=queries.runs[index], options=options, ranges=ranges, first_head=of_q[0])
        return INNER[self.inner](Members(self.group, ranks, index, queries, keys), local)


class Attend(torch.autograd.Function):
    """(out, lse, or None where nobody asked for it) of a rank's rows, of tensors (B, S_local, H, D)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, share: Share, *anchors: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        queries, keys = share.of_neighbours(share.queries), share.of_neighbours(share.keys)
        ulysses, heads = share.ulysses, share.heads
        if share.degree > 1:
            sides = (heads.queries, heads.keys, heads.keys)
            q, k, v = ulysses.to_heads((q, k, v), (queries, keys, keys), sides)
        of_heads = None if sinks is None else sinks[slice(*heads.queries[share.place])]
        total = share.attends.forward(q, k, v)
        if of_heads is not None:
            total.add_sinks(of_heads, share.rows_that_count())
        out, state = total.finish()
        lse = total.lse_of(state) if share.returns_lse or of_heads is not None else None
        ctx.share, ctx.sinks_dtype = share, None if sinks is None else sinks.dtype
        ctx.save_for_backward(q, k, v, out, None if of_heads is None else lse, state, of_heads, *anchors)
        ctx.set_materialize_grads(False)
        if share.degree > 1:
            out = ulysses.to_rows(out, queries, heads.queries, share.heads_q)
        if lse is None or not share.returns_lse:
            return out, None
        if share.degree > 1:
            lse = ulysses.to_rows(_rows_first(lse), queries, heads.queries, share.heads_q)[..., 0].transpose(1, 2)
        return out, lse.contiguous()

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        compute = _gradients_with_graph if torch.is_grad_enabled() else _gradients
        needed = ctx.needs_input_grad
        found = compute(ctx.share, needed[:4], ctx.sinks_dtype, dout, dlse, *ctx.saved_tensors)
        return (*found, *[None] * (len(needed) - 4))


def anchors_of(share: Share, *tensors: Tensor | None) -> list[Tensor]:
    """What ulysses saves are rows of several ranks, of which autograd does not know that q, k and v are among them.
    These stand for them, without an element: gradients that are differentiated once more depend on them."""
    if share.degree == 1 or not torch.is_grad_enabled():
        return []
    return [x[:0].clone() for x in tensors if x is not None]


def _gradients(
    share: Share,
    needed: tuple[bool, bool, bool, bool],
    sinks_dtype: torch.dtype | None,
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    state: Tensor,
    sinks: Tensor | None,
    *anchors: Tensor,
) -> tuple[Tensor | None, ...]:
    """Of q, k, v and sinks."""
    queries, keys = share.of_neighbours(share.queries), share.of_neighbours(share.keys)
    ulysses, heads = share.ulysses, share.heads
    if share.degree > 1:
        # All ranks must send, so one that has no gradient sends zeros.
        rows, all_heads = rows_of(queries[share.place]), share.heads_q
        dout = q.new_zeros(q.shape[0], rows, all_heads, v.shape[-1]) if dout is None else dout
        (dout,) = ulysses.to_heads([dout.to(q.dtype)], [queries], [heads.queries])
        if share.returns_lse:
            dlse = state.new_zeros(q.shape[0], all_heads, rows) if dlse is None else dlse
            (dlse,) = ulysses.to_heads([_rows_first(dlse)], [queries], [heads.queries])
            dlse = dlse[..., 0].transpose(1, 2).contiguous()
    if dout is None:
        dout = torch.zeros_like(out)
    # What several ranks have for a KV head is summed yet.
    of_keys = torch.float32 if heads.replicates else q.dtype
    found = share.attends.backward(Saved(needed[:3], dout, dlse, out, state), q, k, v, of_keys)
    dsinks = None
    if sinks is not None and lse is not None and needed[3]:
        count = share.rows_that_count()
        shares = (sinks.float()[:, None] - lse[..., :count]).exp()  # (B, H, S)
        delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)[..., :count]
        of_heads = (shares * (delta.neg() if dlse is None else dlse[..., :count] - delta)).sum((0, 2))
        dsinks = of_heads.new_zeros(share.heads_q)
        dsinks[slice(*heads.queries[share.place])] = of_heads
        dsinks = dsinks.to(sinks_dtype)
    if share.degree > 1:
        dq, dk, dv = found
        dq = ulysses.to_rows(dq, queries, heads.queries, share.heads_q)
        dk, dv = (ulysses.to_rows(x, keys, heads.keys, share.heads_k) for x in (dk, dv))
        found = dq, dk, dv
    gradients = [x.to(q.dtype) if wanted else None for x, wanted in zip(found, needed[:3], strict=True)]
    return (*gradients, dsinks)


_gradients_with_graph = differentiable_once(_gradients)


def _rows_first(x: Tensor) -> Tensor:
    """(B, H, S) as (B, S, H, 1)."""
    return x.transpose(1, 2)[..., None]
