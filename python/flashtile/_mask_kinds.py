"""The constructors of a ColumnMask: what is made of other representations, and the kinds of masks that have names."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._mask_arguments import (
    Lengths,
    Spans,
    checked_size,
    checked_sizes,
    checked_spans,
    require_int32,
    require_tensor,
    spans_and_gaps,
)
from ._mask_intervals import Device, arange, ranges_hiding, ranges_of_runs, spread

if TYPE_CHECKING:
    from typing_extensions import Self


class MaskKinds:
    """The base of :class:`flashtile.masks.ColumnMask`, which adds what a mask holds and tells."""

    if TYPE_CHECKING:

        def __init__(self, ranges: Tensor, seqlen_q: int | None = None) -> None: ...

    @classmethod
    def _hiding(cls, seqlen_q: int, *bounds: Tensor | int) -> Self:
        return cls(ranges_hiding(seqlen_q, *bounds), seqlen_q)

    @classmethod
    def _seen(cls, seqlen_q: int, begin: Tensor, end: Tensor | int) -> Self:
        """Each column is seen by rows [begin, end)."""
        end = end.maximum(begin) if isinstance(end, Tensor) else end
        return cls._hiding(seqlen_q, 0, begin, end, seqlen_q)

    @classmethod
    def from_startend_row_indices(cls, indices: Tensor, causal: bool, seqlen_q: int | None = None) -> Self:
        """FlashMask's tensor: int32, (B or 1, H, S_k, n), of hidden rows. It stays on its device, and is not read.

        ====== = ==================================== =====================================================
        causal n hidden from column j                 in the last dimension
        ====== = ==================================== =====================================================
        True   1 rows ≥ LTS, right of the diagonal    LTS, the lower triangle's start
        True   2 [LTS, LTE), right of the diagonal    LTS, LTE, its end
        False  2 rows ≥ LTS, rows < UTE               LTS, UTE, the upper triangle's end
        False  4 [LTS, LTE), [UTS, UTE)               LTS, LTE, UTS, UTE
        ====== = ==================================== =====================================================

        The diagonal is at the bottom right as everywhere: right of it are rows below j - (S_k - S_q), and with
        causal=True the mask hides them itself. S_q is S_k unless given. Rows that do not exist are cut off.

        >>> indices = torch.tensor([4, 4, 3, 6, 6, 6], dtype=torch.int32)[None, None, :, None]
        >>> print(ColumnMask.from_startend_row_indices(indices, causal=True).picture())
        #.....
        ##....
        ###...
        ##.#..
        ...##.
        ...###
        """
        where = "ColumnMask.from_startend_row_indices"
        require_int32(f"{where}: indices", indices)
        if not isinstance(causal, bool):
            raise TypeError(f"{where}: causal is {causal!r}, expected True or False")
        shape, counts = tuple(indices.shape), (1, 2) if causal else (2, 4)
        if len(shape) != 4 or shape[3] not in counts:
            expected = f"(B, H, S_k, {counts[0]} or {counts[1]}), since causal is {causal}"
            raise ValueError(f"{where}: indices has shape {shape}, expected {expected}")
        seqlen_k, count = shape[2:]
        seqlen_q = checked_size(f"{where}: seqlen_q", seqlen_k if seqlen_q is None else seqlen_q)
        bounds = indices.unbind(-1)
        if causal:
            lower = bounds if count == 2 else (bounds[0], seqlen_q)
            return cls._hiding(seqlen_q, *lower, 0, arange(seqlen_k, indices.device) - (seqlen_k - seqlen_q))
        return cls._hiding(seqlen_q, *(bounds if count == 4 else (bounds[0], seqlen_q, 0, bounds[1])))

    @classmethod
    def from_ranges(
        cls,
        q_ranges: Spans,
        k_ranges: Spans,
        types: Lengths | None,
        seqlen_q: int,
        seqlen_k: int,
        *,
        device: Device = None,
    ) -> Self:
        """FFA's rectangles (MagiAttention): rows of each range of q_ranges see columns of the range of k_ranges beside
        it, (R, 2) each, of half-open ranges. What several rectangles show is visible once.

        types, (R), are 0 full, 1 causal (the last row's diagonal is the last column), 2 inverse causal (columns from
        the diagonal on, which begins at the first row and column) or 3 both, that is the band between; None: all full.

        >>> print(ColumnMask.from_ranges([(0, 3), (3, 6)], [(0, 3), (0, 6)], [1, 2], 6, 6).picture())
        #.....
        ##....
        ###...
        ######
        .#####
        ..####

        Raises:
            ValueError: a column would need more than two hidden intervals, of which the first is named; or a range is
                not within the mask, or a type is none of these.
        """
        where = "ColumnMask.from_ranges"
        seqlen_q, seqlen_k = checked_size(f"{where}: seqlen_q", seqlen_q), checked_size(f"{where}: seqlen_k", seqlen_k)
        rows = checked_spans(f"{where}: q_ranges", q_ranges, seqlen_q)
        columns = checked_spans(f"{where}: k_ranges", k_ranges, seqlen_k)
        kinds = [0] * len(rows) if types is None else checked_sizes(f"{where}: types", types, most=3)
        for name, of in (("k_ranges", columns), ("types", kinds)):
            if len(of) != len(rows):
                raise ValueError(f"{where}: {name} has {len(of)} entries, expected {len(rows)}, as q_ranges")
        q_begin, q_end = torch.tensor(rows, device=device, dtype=torch.int64).reshape(-1, 2).T
        k_begin, k_end = torch.tensor(columns, device=device, dtype=torch.int64).reshape(-1, 2).T
        kind = torch.tensor(kinds, device=device, dtype=torch.int64)

        # Each rectangle shows one interval of rows to each of its columns.
        width = k_end - k_begin
        rectangle = torch.arange(len(rows), device=q_begin.device).repeat_interleave(width)
        column = torch.arange(len(rectangle), device=q_begin.device) + (k_end - width.cumsum(0))[rectangle]
        begin, end = q_begin[rectangle], q_end[rectangle]
        diagonal = column - (k_end - q_end)[rectangle]
        begin = torch.where(kind[rectangle] % 2 == 1, begin.maximum(diagonal), begin)
        diagonal = column - (k_begin - q_begin)[rectangle]
        end = torch.where(kind[rectangle] >= 2, end.minimum(diagonal + 1), end)

        # Put one behind the other, the columns are a line of S_k · S_q elements; what is hidden are the gaps between
        # intervals on it. Empty intervals cut gaps in two: at the ends of columns that is wanted, elsewhere not.
        ends_of_columns = torch.arange(seqlen_k + 1, device=begin.device) * seqlen_q
        begin, end = (column * seqlen_q + bound for bound in (begin, end))
        begin, end = begin[begin < end], end[begin < end]
        begin, order = torch.cat([ends_of_columns, begin]).sort()
        end = torch.cat([ends_of_columns, end])[order].cummax(0).values
        gap = (end[:-1] < begin[1:]).nonzero()[:, 0]
        hidden_column = end[gap] // max(seqlen_q, 1)
        first_row = hidden_column * seqlen_q
        shape = (1, 1, seqlen_k)
        hidden = hidden_column, end[gap] - first_row, begin[gap + 1] - first_row
        return cls(ranges_of_runs(where, shape, *hidden), seqlen_q)

    @classmethod
    def from_dense(cls, visible: Tensor) -> Self:
        """A mask written out: bool, (S_q, S_k), (H, S_q, S_k) or (B, H, S_q, S_k), True where a row sees a column. It
        stays on its device, and is read.

        >>> print(ColumnMask.from_dense(torch.eye(3, dtype=torch.bool)).picture())
        #..
        .#.
        ..#

        Raises:
            ValueError: a column needs more than two hidden intervals, of which the first is named; or the shape is
                none of these.
        """
        where = "ColumnMask.from_dense"
        require_tensor(f"{where}: visible", visible)
        if visible.dtype != torch.bool:
            raise TypeError(f"{where}: visible has dtype {visible.dtype}, expected torch.bool")
        if not 2 <= visible.dim() <= 4:
            expected = "(S_q, S_k), (H, S_q, S_k) or (B, H, S_q, S_k)"
            raise ValueError(f"{where}: visible has shape {tuple(visible.shape)}, expected {expected}")
        visible = visible[(None,) * (4 - visible.dim())].transpose(2, 3)  # (B, H, S_k, S_q)
        shape, seqlen_q = tuple(visible.shape[:3]), visible.shape[3]
        hidden = torch.nn.functional.pad(~visible.flatten(0, 2), (1, 1))  # (B · H · S_k, S_q + 2)
        column, begin = (hidden[:, 1:] & ~hidden[:, :-1]).nonzero().T
        _, end = (hidden[:, :-1] & ~hidden[:, 1:]).nonzero().T
        return cls(ranges_of_runs(where, shape, column, begin, end), seqlen_q)

    # The kinds. All are made on `device`; lengths and places that are tensors are read on the host.

    @classmethod
    def full(cls, seqlen_q: int, seqlen_k: int, *, device: Device = None) -> Self:
        """Hides nothing.

        >>> print(ColumnMask.full(2, 4).picture())
        ####
        ####
        """
        seqlen_k = checked_size("ColumnMask.full: seqlen_k", seqlen_k)
        return cls(torch.zeros(1, 1, seqlen_k, 4, dtype=torch.int32, device=device), seqlen_q)

    @classmethod
    def causal(cls, seqlen_q: int, seqlen_k: int, *, device: Device = None) -> Self:
        """Row i sees columns up to its diagonal, i + S_k - S_q.

        >>> print(ColumnMask.causal(4, 6).picture())
        ###...
        ####..
        #####.
        ######
        """
        seqlen_q = checked_size("ColumnMask.causal: seqlen_q", seqlen_q)
        seqlen_k = checked_size("ColumnMask.causal: seqlen_k", seqlen_k)
        return cls._seen(seqlen_q, arange(seqlen_k, device) - (seqlen_k - seqlen_q), seqlen_q)

    @classmethod
    def document(cls, lengths: Lengths, *, device: Device = None) -> Self:
        """Packed documents of these lengths, S of them in all: each token sees its own document.

        >>> print(ColumnMask.document([3, 1, 2]).picture())
        ###...
        ###...
        ###...
        ...#..
        ....##
        ....##
        """
        lengths = checked_sizes("ColumnMask.document: lengths", lengths)
        ends = list(itertools.accumulate(lengths))
        begins = [end - length for end, length in zip(ends, lengths, strict=True)]
        return cls._seen(sum(lengths), spread(begins, lengths, device), spread(ends, lengths, device))

    @classmethod
    def causal_document(cls, lengths: Lengths, *, device: Device = None) -> Self:
        """Packed documents of these lengths: each token sees its own document up to itself.

        >>> print(ColumnMask.causal_document([3, 1, 2]).picture())
        #.....
        ##....
        ###...
        ...#..
        ....#.
        ....##
        """
        lengths = checked_sizes("ColumnMask.causal_document: lengths", lengths)
        ends = list(itertools.accumulate(lengths))
        return cls._seen(sum(lengths), arange(sum(lengths), device), spread(ends, lengths, device))

    @classmethod
    def share_question(cls, groups: Iterable[tuple[int, Lengths]], *, device: Device = None) -> Self:
        """Groups (question, answers) of lengths, packed: a question, and behind it its answers. Causal; an answer sees
        its question and itself, and no other answer. As in preference and reward training.

        >>> print(ColumnMask.share_question([(2, [2, 1]), (1, [1])]).picture())
        #......
        ##.....
        ###....
        ####...
        ##..#..
        .....#.
        .....##
        """
        lengths: list[int] = []
        ends: list[int] = []
        for i, (question, answers) in enumerate(groups):
            where = f"ColumnMask.share_question: groups[{i}]"
            parts = [checked_size(f"{where}[0]", question), *checked_sizes(f"{where}[1]", answers)]
            own = [sum(lengths) + end for end in itertools.accumulate(parts)]
            ends += own[-1:] + own[1:]
            lengths += parts
        return cls._seen(sum(lengths), arange(sum(lengths), device), spread(ends, lengths, device))

    @classmethod
    def sliding_window(cls, seqlen: int, window: int, *, device: Device = None) -> Self:
        """Causal; each token sees `window` tokens, the last of which is itself: as attention's window=(window - 1, 0).

        >>> print(ColumnMask.sliding_window(6, window=3).picture())
        #.....
        ##....
        ###...
        .###..
        ..###.
        ...###
        """
        column = arange(checked_size("ColumnMask.sliding_window: seqlen", seqlen), device)
        return cls._seen(seqlen, column, column + checked_size("ColumnMask.sliding_window: window", window, least=1))

    @classmethod
    def global_sliding_window(
        cls, seqlen: int, global_tokens: int, window: tuple[int, int], *, device: Device = None
    ) -> Self:
        """The first `global_tokens` tokens see all, and all see them; the others see (left, right) tokens on either
        side of their own. Not causal. As in Longformer (Beltagy et al. 2020, arXiv:2004.05150).

        >>> print(ColumnMask.global_sliding_window(7, global_tokens=1, window=(1, 1)).picture())
        #######
        ###....
        ####...
        #.###..
        #..###.
        #...###
        #....##
        """
        where = "ColumnMask.global_sliding_window"
        column = arange(checked_size(f"{where}: seqlen", seqlen), device)
        first = checked_size(f"{where}: global_tokens", global_tokens)
        left, right = checked_sizes(f"{where}: window", window, count=2)
        end = torch.where(column < first, seqlen, column + left + 1)
        return cls._hiding(seqlen, torch.full_like(column, first), column - right, end, seqlen)

    @classmethod
    def prefix_lm(cls, seqlen: int, prefix: int, *, device: Device = None) -> Self:
        """All see the first `prefix` tokens, which see no others; the rest is causal. As in T5 and PaliGemma.

        >>> print(ColumnMask.prefix_lm(6, prefix=3).picture())
        ###...
        ###...
        ###...
        ####..
        #####.
        ######
        """
        seqlen = checked_size("ColumnMask.prefix_lm: seqlen", seqlen)
        prefix = checked_size("ColumnMask.prefix_lm: prefix", prefix, most=seqlen)
        return cls.prefix_document([(prefix, seqlen)], device=device)

    @classmethod
    def prefix_document(cls, groups: Iterable[tuple[int, int]], *, device: Device = None) -> Self:
        """Packed documents (prefix, length), each with the mask of :meth:`prefix_lm`; length counts the prefix too.

        >>> print(ColumnMask.prefix_document([(2, 4), (1, 2)]).picture())
        ##....
        ##....
        ###...
        ####..
        ....#.
        ....##
        """
        lengths: list[int] = []
        firsts: list[int] = []
        ends: list[int] = []
        for i, (prefix, length) in enumerate(groups):
            length = checked_size(f"ColumnMask.prefix_document: groups[{i}][1]", length)
            prefix = checked_size(f"ColumnMask.prefix_document: groups[{i}][0]", prefix, most=length)
            begin = sum(lengths)
            lengths += prefix, length - prefix
            firsts += begin, begin + length  # the latter is beyond, so that the column's own row counts
            ends += (begin + length,) * 2
        first = arange(sum(lengths), device).minimum(spread(firsts, lengths, device))
        return cls._seen(sum(lengths), first, spread(ends, lengths, device))

    @classmethod
    def causal_blockwise(cls, lengths: Lengths, *, device: Device = None) -> Self:
        """Packed blocks of these lengths, causal: each token sees its own block, and the last block sees all of them.
        As with many demonstrations and one query, in learning from context.

        >>> print(ColumnMask.causal_blockwise([2, 2, 2]).picture())
        #.....
        ##....
        ..#...
        ..##..
        #####.
        ######
        """
        lengths = checked_sizes("ColumnMask.causal_blockwise: lengths", lengths)
        seqlen, ends = sum(lengths), list(itertools.accumulate(lengths))
        last = seqlen - sum(lengths[-1:])
        return cls._hiding(seqlen, 0, arange(seqlen, device), spread(ends, lengths, device), last)

    @classmethod
    def random_eviction(cls, evicted_at: Tensor) -> Self:
        """Causal; key j leaves the cache at row evicted_at[..., j], the first that does not see it. int32 or int64,
        (S), (H, S) or (B, H, S); above j, or no row sees the key. It stays on its device, and is not read.

        >>> print(ColumnMask.random_eviction(torch.tensor([5, 2, 6, 4, 6, 6])).picture())
        #.....
        ##....
        #.#...
        #.##..
        #.#.#.
        ..#.##
        """
        where = "ColumnMask.random_eviction: evicted_at"
        require_tensor(where, evicted_at)
        if evicted_at.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{where} has dtype {evicted_at.dtype}, expected torch.int32 or torch.int64")
        if not 1 <= evicted_at.dim() <= 3:
            raise ValueError(f"{where} has shape {tuple(evicted_at.shape)}, expected (S), (H, S) or (B, H, S)")
        seqlen = evicted_at.shape[-1]
        return cls._seen(seqlen, arange(seqlen, evicted_at.device), evicted_at)

    @classmethod
    def qk_sparse(cls, seqlen: int, spans: Spans, *, device: Device = None) -> Self:
        """Causal, but tokens within one of the `spans` [begin, end) see none of their own span, not even themselves;
        later tokens see it. A span that begins at 0 has rows that see nothing. Spans ascend and do not overlap.

        >>> print(ColumnMask.qk_sparse(6, [(2, 4)]).picture())
        #.....
        ##....
        ##....
        ##....
        #####.
        ######
        """
        lengths, owners = spans_and_gaps("ColumnMask.qk_sparse", spans, seqlen)
        ends = [0 if owner is None else owner[1] for owner in owners]
        return cls._seen(seqlen, arange(seqlen, device).maximum(spread(ends, lengths, device)), seqlen)

    @classmethod
    def chunked(cls, seqlen: int, chunk: int, *, device: Device = None) -> Self:
        """Causal within chunks of `chunk` tokens, of which the last may be shorter. As in Llama 4.

        >>> print(ColumnMask.chunked(5, chunk=2).picture())
        #....
        ##...
        ..#..
        ..##.
        ....#
        """
        column = arange(checked_size("ColumnMask.chunked: seqlen", seqlen), device)
        chunk = checked_size("ColumnMask.chunked: chunk", chunk, least=1)
        return cls._seen(seqlen, column, column - column % chunk + chunk)

    @classmethod
    def image_blocks(cls, spans: Spans, seqlen: int, *, window: int | None = None, device: Device = None) -> Self:
        """Causal, but tokens within one of the `spans` [begin, end) see all of their own span. As in Gemma 3, whose
        local layers see the last `window` tokens, as in :meth:`sliding_window`, and still all of their own span. Spans
        ascend and do not overlap.

        >>> print(ColumnMask.image_blocks([(1, 4)], 6).picture())
        #.....
        ####..
        ####..
        ####..
        #####.
        ######
        """
        lengths, owners = spans_and_gaps("ColumnMask.image_blocks", spans, seqlen)
        begin = spread([seqlen if owner is None else owner[0] for owner in owners], lengths, device)
        column = arange(seqlen, device)
        if window is None:
            return cls._seen(seqlen, column.minimum(begin), seqlen)
        end = spread([0 if owner is None else owner[1] for owner in owners], lengths, device)
        reach = column + checked_size("ColumnMask.image_blocks: window", window, least=1)
        return cls._seen(seqlen, column.minimum(begin), reach.maximum(end))

    @classmethod
    def tree(cls, parents: Lengths, *, context: int = 0, device: Device = None) -> Self:
        """Drafted tokens of speculative decoding: each sees itself, its ancestors, and `context` keys before the tree.

        Tokens stand in depth-first order, so that the descendants of a token follow it without a gap. parents[i] is the
        place of token i's parent, or -1 of a token that has none but the context. S_q is len(parents), S_k is
        context + S_q.

        >>> print(ColumnMask.tree([-1, 0, 1, 0, -1], context=2).picture())
        ###....
        ####...
        #####..
        ###..#.
        ##....#

        Raises:
            ValueError: tokens are not in depth-first order; the first that breaks it is named.
        """
        where = "ColumnMask.tree"
        context = checked_size(f"{where}: context", context)
        parents = parents.tolist() if isinstance(parents, Tensor) else list(parents)
        count = len(parents)
        ends = [count] * count  # of each token's descendants
        path: list[int] = []  # from a root to the token before
        for i, parent in enumerate(parents):
            while path and path[-1] != parent:
                ends[path.pop()] = i
            if not path and parent != -1:
                expected = f"-1, {i - 1} or an ancestor of {i - 1} (depth-first order)" if i else "-1"
                raise ValueError(f"{where}: parents[{i}] is {parent!r}, expected {expected}")
            path.append(i)
        lengths = [context] + [1] * count
        return cls._seen(count, spread([0, *range(count)], lengths, device), spread([count, *ends], lengths, device))
