"""The biases of ``xformers.ops.fmha.attn_bias``, under its names: masks of one sequence, or of several that stand one
behind the other.

Causal masks are aligned at the top left, the first query with the first key, unless their name says FromBottomRight or
WithOffset: then the last query meets the last key. Tables are on `device`, by default on the GPU, if there is one.

>>> import torch
>>> from flashtile.compat.xformers.fmha.attn_bias import BlockDiagonalMask
>>> mask, x = BlockDiagonalMask.from_tensor_list([torch.randn(1, 3, 8), torch.randn(1, 5, 8)])
>>> x.shape, [part.shape[1] for part in mask.make_causal().split(x)]
(torch.Size([1, 8, 8]), [3, 5])
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._bands import band_of

Device = torch.device | str | None


def _moved(x, device):
    """A dataclass with all that it holds on a device."""
    parts = {name: part.to(device) for name, part in vars(x).items() if hasattr(part, "to")}
    return dataclasses.replace(x, **parts) if parts else x


def _table(numbers: Sequence[int], device: Device) -> Tensor:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.tensor(numbers, dtype=torch.int32).to(device, non_blocking=True)


@dataclass
class _SeqLenInfo:
    """Sequences one behind the other: where each begins and the last one ends, on the device and on the host."""

    seqstart: Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]

    to = _moved

    def intervals(self) -> Iterator[tuple[int, int]]:
        return itertools.pairwise(self.seqstart_py)

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int], *, device: Device = None) -> "_SeqLenInfo":
        seqlens = [int(n) for n in seqlens]
        starts = [0, *itertools.accumulate(seqlens)]
        return cls(_table(starts, device), max(seqlens, default=-1), min(seqlens, default=-1), starts)

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        """`x` (1, sum of lengths, ...) in parts (batch size, length, ...); each batch has sequences of one length."""
        if x.shape[:2] != (1, self.seqstart_py[-1]):
            raise ValueError(f"split: x has shape {tuple(x.shape)}, expected (1, {self.seqstart_py[-1]}, ...)")
        sizes = [1] * (len(self.seqstart_py) - 1) if batch_sizes is None else list(batch_sizes)
        ends = [self.seqstart_py[n] for n in (0, *itertools.accumulate(sizes))]
        parts = x.split([end - begin for begin, end in itertools.pairwise(ends)], dim=1)
        return [
            part.reshape(size, part.shape[1] // size, *x.shape[2:]) for size, part in zip(sizes, parts, strict=True)
        ]


@dataclass
class _PaddedSeqLenInfo(_SeqLenInfo):
    """Sequences with room for `padding` rows each, of which the first ones count."""

    seqlen: Tensor
    seqlen_py: list[int]
    padding: int

    def intervals(self) -> Iterator[tuple[int, int]]:
        return ((start, start + n) for start, n in zip(self.seqstart_py, self.seqlen_py, strict=False))

    @classmethod
    def from_seqlens_padded(cls, seqlens: Sequence[int], padding: int, *, device: Device = None) -> "_PaddedSeqLenInfo":
        lengths = [int(n) for n in seqlens]
        if any(n > padding for n in lengths):
            raise ValueError(f"from_seqlens_padded: seqlens are {lengths}, expected at most padding = {padding}")
        starts = [i * padding for i in range(len(lengths) + 1)]
        info = _table(starts, device), max(lengths, default=-1), min(lengths, default=-1), starts
        return cls(*info, _table(lengths, device), lengths, padding)


@dataclass
class _GappySeqInfo(_SeqLenInfo):
    """Sequences with room anywhere between them: where each begins, how long it is, and where the last one's room
    ends."""

    seqlen: Tensor
    seqlen_py: Sequence[int]

    intervals = _PaddedSeqLenInfo.intervals

    @classmethod
    def from_seqlens_gappy(
        cls, seqstarts: Sequence[int], seqlens: Sequence[int], *, device: Device = None
    ) -> "_GappySeqInfo":
        starts, lengths = ([int(n) for n in numbers] for numbers in (seqstarts, seqlens))
        if not lengths or len(starts) != len(lengths) + 1:
            found = f"{len(starts)} seqstarts and {len(lengths)} seqlens"
            raise ValueError(f"from_seqlens_gappy: there are {found}, expected one more of seqstarts, and some")
        return cls(_table(starts, device), max(lengths), min(lengths), starts, _table(lengths, device), lengths)


class AttentionBias:
    """What ``attn_bias`` may be beside a tensor."""

    to = _moved

    def materialize(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Device = "cpu") -> Tensor:
        """The bias written out, of a shape (..., M, M_kv): 0 where a row sees a column, elsewhere -inf."""
        band, (rows, columns) = band_of(self), tuple(shape)[-2:]
        if band is None:
            raise NotImplementedError(f"materialize: the bias is a {type(self).__name__}, expected one that is a mask")
        seen = torch.zeros(rows, columns, dtype=torch.bool)
        for (row, row_end), (column, column_end) in self._blocks(rows, columns):
            seen[row:row_end, column:column_end] = band.visible(row_end - row, column_end - column)
        return torch.zeros(rows, columns, dtype=dtype).masked_fill(~seen, -math.inf).to(device).expand(*shape)

    def _blocks(self, rows, columns):
        return [((0, rows), (0, columns))]


class LowerTriangularMask(AttentionBias):
    """Causal: row i sees the columns up to i, both counted from the first."""

    def __init__(self, device: Device = None) -> None:
        """`device` has no effect."""

    def add_bias(self, bias: Tensor) -> "LowerTriangularMaskWithTensorBias":
        return LowerTriangularMaskWithTensorBias(bias)


@dataclass
class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """With a tensor that is added to the scores, which flashtile does not serve."""

    _bias: Tensor


class LowerTriangularFromBottomRightMask(AttentionBias):
    """Causal, the last row sees all columns."""

    def make_local_attention(self, window_size: int) -> "LowerTriangularFromBottomRightLocalAttentionMask":
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


class _Window:
    """Of classes with a `_window_size`: how many columns a row sees, its own and those before it."""

    def __post_init__(self) -> None:
        if self._window_size <= 0:
            raise ValueError(f"{type(self).__name__}: window_size is {self._window_size}, expected at least 1")


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(_Window, LowerTriangularFromBottomRightMask):
    """Causal, the last row sees the last `_window_size` columns."""

    _window_size: int


@dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    """The last row sees its own column, which is the last one, and `window_left` before it; others also as many as
    `window_right` behind theirs."""

    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        for name in ("window_left", "window_right"):
            if getattr(self, name) < 0:
                raise ValueError(f"{type(self).__name__}: {name} is {getattr(self, name)}, expected at least 0")


@dataclass
class _Blocks(AttentionBias):
    """Of several sequences: those that queries belong to, and for each the keys that they see some of."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo

    def _blocks(self, rows, columns):
        ends = self.q_seqinfo.seqstart_py[-1], self.k_seqinfo.seqstart_py[-1]
        if (rows, columns) != ends:
            raise ValueError(f"materialize: shape ends in {(rows, columns)}, expected {ends}")
        return zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=True)


@dataclass
class BlockDiagonalMask(_Blocks):
    """Queries of sequence b see its keys, all of them."""

    _batch_sizes: Sequence[int] | None = None

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, *, device: Device = None):
        """`kv_seqlen` is by default the same."""
        q_seqinfo = _SeqLenInfo.from_seqlens(q_seqlen, device=device)
        if kv_seqlen is None or list(kv_seqlen) == list(q_seqlen):
            return cls(q_seqinfo, q_seqinfo)
        _require_as_many("from_seqlens", q_seqlen, kv_seqlen)
        return cls(q_seqinfo, _SeqLenInfo.from_seqlens(kv_seqlen, device=device))

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple["BlockDiagonalMask", Tensor]:
        """The mask of tensors (B_i, M_i, ...), and all of them as one (1, sum of B_i · M_i, ...)."""
        mask, x, *_ = cls.from_tensor_lists_qkv(tensors, tensors)
        return mask, x

    @classmethod
    def from_tensor_lists_qkv(
        cls, tensors_q: Sequence[Tensor], tensors_k: Sequence[Tensor], tensors_v: Sequence[Tensor] | None = None
    ) -> tuple["BlockDiagonalMask", Tensor, Tensor, Tensor | None]:
        """The same of queries, keys and values."""
        sizes = [[x.shape[:2] for x in tensors] for tensors in (tensors_q, tensors_k, tensors_v or tensors_k)]
        if [b for b, _ in sizes[0]] != [b for b, _ in sizes[1]] or sizes[1] != sizes[2]:
            raise ValueError("from_tensor_lists_qkv: tensors differ in (B_i, M_i), expected keys and values alike")
        seqlens = [[length for batch, length in each for _ in range(batch)] for each in sizes[:2]]
        mask = cls.from_seqlens(*seqlens, device=tensors_q[0].device)
        mask._batch_sizes = [batch for batch, _ in sizes[0]]
        q, k, v = (_joined(tensors) for tensors in (tensors_q, tensors_k, tensors_v))
        return mask, q, k, v

    def split_queries(self, tensor: Tensor) -> list[Tensor]:
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: Tensor) -> list[Tensor]:
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """What `from_tensor_list` joined. Where queries and keys differ in length, see `split_queries`, `split_kv`."""
        if self.q_seqinfo.seqstart_py != self.k_seqinfo.seqstart_py:
            raise ValueError("split: queries and keys have other lengths, expected split_queries or split_kv")
        return self.split_queries(tensor)

    def _as(self, kind, **options):
        return kind(self.q_seqinfo, self.k_seqinfo, _batch_sizes=self._batch_sizes, **options)

    def make_causal(self) -> "BlockDiagonalCausalMask":
        return self._as(BlockDiagonalCausalMask)

    def make_causal_from_bottomright(self) -> "BlockDiagonalCausalFromBottomRightMask":
        return self._as(BlockDiagonalCausalFromBottomRightMask)

    def make_local_attention(self, window_size: int) -> "BlockDiagonalCausalLocalAttentionMask":
        return self._as(BlockDiagonalCausalLocalAttentionMask, _window_size=window_size)

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> "BlockDiagonalCausalLocalAttentionFromBottomRightMask":
        return self._as(BlockDiagonalCausalLocalAttentionFromBottomRightMask, _window_size=window_size)


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Each block is causal, from its first row and column."""


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Each block is causal, its last row sees all columns."""


@dataclass
class BlockDiagonalCausalLocalAttentionMask(_Window, BlockDiagonalCausalMask):
    """Each block is causal, from its first row and column, and a row sees `_window_size` columns."""

    _window_size: int = 0


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(_Window, BlockDiagonalCausalFromBottomRightMask):
    """Each block is causal, its last row sees the last `_window_size` columns."""

    _window_size: int = 0


@dataclass
class BlockDiagonalPaddedKeysMask(_Blocks):
    """Queries of sequence b see its keys, which have room for as many in each sequence, of which the first ones
    count."""

    k_seqinfo: _PaddedSeqLenInfo

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        causal_diagonal: Any = None,
        *,
        device: Device = None,
    ):
        """`causal_diagonal` has no effect."""
        return cls(*_padded("from_seqlens", q_seqlen, kv_padding, kv_seqlen, device))

    def make_local_attention(self, window_left: int, window_right: int) -> "BlockDiagonalLocalAttentionPaddedKeysMask":
        return BlockDiagonalLocalAttentionPaddedKeysMask(self.q_seqinfo, self.k_seqinfo, window_left, window_right)

    def make_paged(self, block_tables: Tensor, page_size: int, paged_type: type) -> "PagedBlockDiagonalPaddedKeysMask":
        """The same of keys in pages, as a `paged_type`."""
        return paged_type(self.q_seqinfo, self.k_seqinfo, block_tables, page_size)


@dataclass
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Each block is causal, its last row sees all keys that count."""

    causal_diagonal: Any = None


@dataclass
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Each block is as of `LocalAttentionFromBottomRightMask`, of the keys that count."""

    window_left: int
    window_right: int

    __post_init__ = LocalAttentionFromBottomRightMask.__post_init__

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        window_left: int,
        window_right: int,
        *,
        device: Device = None,
    ):
        return cls(*_padded("from_seqlens_local", q_seqlen, kv_padding, kv_seqlen, device), window_left, window_right)


@dataclass
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(_Window, BlockDiagonalPaddedKeysMask):
    """Each block is causal, its last row sees the last `_window_size` keys that count."""

    _window_size: int

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        window_size: int,
        *,
        device: Device = None,
    ):
        return cls(*_padded("from_seqlens_local", q_seqlen, kv_padding, kv_seqlen, device), window_size)


@dataclass
class BlockDiagonalGappyKeysMask(_Blocks):
    """Queries of sequence b see its keys, which may have others between them and the next ones."""

    k_seqinfo: _GappySeqInfo

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqstarts: Sequence[int], kv_seqlen: Sequence[int], *, device: Device = None
    ):
        """`kv_seqstarts` has one more: where the room for all keys ends."""
        _require_as_many("from_seqlens", q_seqlen, kv_seqlen)
        q_seqinfo = _SeqLenInfo.from_seqlens(q_seqlen, device=device)
        return cls(q_seqinfo, _GappySeqInfo.from_seqlens_gappy(kv_seqstarts, kv_seqlen, device=device))


class BlockDiagonalCausalWithOffsetGappyKeysMask(BlockDiagonalGappyKeysMask):
    """Each block is causal, its last row sees all of its keys."""


@dataclass
class PagedBlockDiagonalPaddedKeysMask(AttentionBias):
    """`BlockDiagonalPaddedKeysMask` of keys and values (1, pages · page_size, heads, K): row r of sequence b lies in
    page `block_tables[b, r // page_size]`, int32. Without gradients."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _PaddedSeqLenInfo
    block_tables: Tensor
    page_size: int

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int],
        block_tables: Tensor,
        page_size: int,
        *,
        device: Device = None,
    ):
        device, room = block_tables.device if device is None else device, block_tables.shape[1] * page_size
        return cls(*_padded("from_seqlens", q_seqlen, room, kv_seqlen, device), block_tables, page_size)

    def materialize(self, shape, dtype=torch.float32, device="cpu"):
        raise NotImplementedError("materialize: the bias is of pages, expected one of rows that stand together")


class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    """Each block is causal, its last row sees all keys that count."""


def _require_as_many(function, q_seqlen, kv_seqlen):
    if len(q_seqlen) != len(kv_seqlen):
        found = f"{len(q_seqlen)} q_seqlen and {len(kv_seqlen)} kv_seqlen"
        raise ValueError(f"{function}: there are {found}, expected as many")


def _padded(function, q_seqlen, padding, kv_seqlen, device):
    _require_as_many(function, q_seqlen, kv_seqlen)
    q_seqinfo = _SeqLenInfo.from_seqlens(q_seqlen, device=device)
    return q_seqinfo, _PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, padding, device=device)


def _joined(tensors):
    return None if tensors is None else torch.cat([x.reshape(1, -1, *x.shape[2:]) for x in tensors], dim=1)
