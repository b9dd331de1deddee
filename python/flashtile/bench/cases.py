"""One attention problem as a printable value, and random inputs for it."""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from flashtile.bench.columns import count_shown, shown

SHORT_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


class Work(enum.Enum):
    """Which part of attention one call does."""

    FORWARD = "forward"
    FORWARD_WITH_GRAD = "forward with grad"  # the same, recorded by autograd
    COMPILED = "compiled forward"  # under torch.compile
    COMPILED_WITH_GRAD = "compiled forward with grad"
    BACKWARD = "backward"
    DECODE = "decode"  # a forward of one new token, whose keys and values are in a cache
    PREFILL = "prefill"  # the same of many new tokens
    TREE = "tree"  # the same of drafted tokens, which form a tree
    CASCADE = "cascade"  # a decode behind a prefix that all sequences share
    MIXED = "mixed"  # a ragged prefill: chunks of prompts, and single tokens
    FP8 = "fp8"  # a forward of inputs that were rounded to e4m3 beforehand


TRAINING = (Work.FORWARD, Work.BACKWARD)


@dataclasses.dataclass(frozen=True)
class Case:
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    dtype: str = "bfloat16"
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    work: Work = Work.FORWARD
    lengths: tuple[int, ...] | None = None  # of a ragged batch's sequences; its seqlens are their sum
    softcap: float = 0.0
    alibi: bool = False  # slopes and sinks follow from the heads, see options.py
    sinks: bool = False
    dropout_p: float = 0.0
    page_size: int = 0  # of a cache; 0: it is contiguous
    prefix: int = 0  # keys with which all sequences begin alike
    held: tuple[int, ...] | None = None  # keys of a ragged batch's sequences over a cache; None: as `lengths`
    # A kind of column mask, see columns.py, of the last S_q keys; it is the whole mask: causal and window hide no more.
    columns: str = ""

    @classmethod
    def square(cls, batch: int, seqlen: int, heads: int, head_dim: int, **options) -> Case:
        """Self-attention: one sequence length, as many KV heads as query heads, D_v = D."""
        return cls(batch, seqlen, seqlen, heads, heads, head_dim, head_dim, **options)

    @classmethod
    def ragged(cls, lengths: Sequence[int], heads_q: int, heads_k: int, head_dim: int, **options) -> Case:
        """Self-attention within sequences that lie one behind the other: tensors are (T, H, D)."""
        sizes = len(lengths), sum(lengths), sum(lengths), heads_q, heads_k, head_dim, head_dim
        return cls(*sizes, lengths=tuple(lengths), **options)

    @classmethod
    def decode(cls, batch: int, seqlen: int, heads_q: int, heads_k: int, head_dim: int, **options) -> Case:
        """The newest token of each sequence, over a cache of `seqlen` rows; it sees them all, causal or not."""
        sizes = batch, 1, seqlen, heads_q, heads_k, head_dim, head_dim
        return cls(*sizes, causal=True, work=Work.DECODE, **options)

    @classmethod
    def prefill(cls, batch: int, chunk: int, seqlen: int, heads_q: int, heads_k: int, head_dim: int, **options) -> Case:
        """The newest `chunk` tokens of each sequence, over a cache of `seqlen` rows, theirs among them."""
        sizes = batch, chunk, seqlen, heads_q, heads_k, head_dim, head_dim
        return cls(*sizes, causal=True, work=Work.PREFILL, **options)

    @classmethod
    def tree(
        cls, kind: str, batch: int, drafts: int, seqlen: int, heads_q: int, heads_k: int, head_dim: int, **options
    ) -> Case:
        """A prefill of drafted tokens, which form trees: `kind` is one of columns.TREES."""
        case = cls.prefill(batch, drafts, seqlen, heads_q, heads_k, head_dim, columns=kind, **options)
        return dataclasses.replace(case, work=Work.TREE)

    @classmethod
    def cascade(cls, batch: int, prefix: int, own: int, heads_q: int, heads_k: int, head_dim: int, **options) -> Case:
        """A decode of sequences that share their first `prefix` keys."""
        case = cls.decode(batch, prefix + own, heads_q, heads_k, head_dim, **options)
        return dataclasses.replace(case, prefix=prefix, work=Work.CASCADE)

    @classmethod
    def mixed(
        cls, lengths: Sequence[int], held: Sequence[int], heads_q: int, heads_k: int, head_dim: int, **options
    ) -> Case:
        """The newest tokens of each sequence, so many, over a cache of so many rows; q is (T, H, D), and so are k and
        v."""
        sizes = len(lengths), sum(lengths), sum(held), heads_q, heads_k, head_dim, head_dim
        return cls(*sizes, causal=True, work=Work.MIXED, lengths=tuple(lengths), held=tuple(held), **options)

    def plain(self) -> Case:
        """The same shape and mask without what else changes scores and weights."""
        return dataclasses.replace(self, softcap=0.0, alibi=False, sinks=False, dropout_p=0.0)

    def sequences(self) -> list[tuple[Case, slice, slice]]:
        """A ragged batch's sequences, each as a problem of its own with the rows that its queries and keys lie in."""
        lengths = self.lengths or ()
        held = lengths if self.held is None else self.held
        return [
            (
                dataclasses.replace(self, batch=1, seqlen_q=length, seqlen_k=keys, lengths=None, held=None),
                slice(end - length, end),
                slice(end_of_keys - keys, end_of_keys),
            )
            for length, keys, end, end_of_keys in zip(
                lengths, held, itertools.accumulate(lengths), itertools.accumulate(held), strict=True
            )
        ]

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def mask_name(self) -> str:
        names = [self.columns] if self.columns else []
        if self.causal:
            names.append("causal")
        if self.window is not None:
            names.append("window " + ",".join("∞" if side is None else str(side) for side in self.window))
        options = {
            f"softcap {self.softcap:g}": self.softcap,
            "ALiBi": self.alibi,
            "sinks": self.sinks,
            f"dropout {self.dropout_p:g}": self.dropout_p,
        }
        return " + ".join([*(names or ["full"]), *(name for name, given in options.items() if given)])

    @property
    def shape_name(self) -> str:
        heads = pair(self.heads_q, self.heads_k)
        pages = f" page {self.page_size}" if self.page_size else ""
        rest = f"H{heads} D{pair(self.head_dim, self.head_dim_v)}{pages}"
        if self.lengths is not None:
            over = "" if self.held is None else f" over {_lengths_name(self.held)}"
            return f"{_lengths_name(self.lengths)}{over} {rest}"
        if self.prefix:
            rest = f"prefix {self.prefix} {rest}"
        return f"B{self.batch} S{pair(self.seqlen_q, self.seqlen_k)} {rest}"

    def __str__(self) -> str:
        return f"{self.shape_name} {self.mask_name} {SHORT_DTYPES[self.dtype]} {self.work.value}"

    @property
    def flops(self) -> float:
        """FLOPs of the matmuls by the usual convention: causal counts half, backward 2.5 times the forward.

        In a ragged batch, of a chunk, within a window and of a column mask the pairs that see each other are counted.
        """
        if self.lengths is not None:
            pairs: float = sum(count_visible(sequence) for sequence, _, _ in self.sequences())
        elif self.columns:
            pairs = count_shown(self)
        elif self.is_square_band:
            pairs = self.batch * self.seqlen_q * self.seqlen_k / (1 if self.is_full else 2)
        else:
            pairs = self.batch * count_visible(self)
        forward = 2 * self.heads_q * pairs * (self.head_dim + self.head_dim_v)
        return forward * (2.5 if self.work is Work.BACKWARD else 1)

    @property
    def bytes(self) -> int:
        """Of q, k, v and the output, each once."""
        rows = self.seqlen_q * self.heads_q + self.seqlen_k * self.heads_k
        return self.batch * rows * (self.head_dim + self.head_dim_v) * self.torch_dtype.itemsize

    @property
    def over_a_cache(self) -> bool:
        return self.work in (Work.DECODE, Work.PREFILL, Work.TREE, Work.CASCADE)

    @property
    def is_full(self) -> bool:
        """Whether every row sees every key; so does a causal case's only one."""
        return self.window is None and not self.columns and (not self.causal or self.seqlen_q == 1)

    @property
    def is_square_band(self) -> bool:
        """Whether SDPA can express the mask itself; its is_causal is aligned to the top left."""
        return self.is_full or (self.window is None and not self.columns and self.seqlen_q == self.seqlen_k)


class Inputs(NamedTuple):
    """Tensors of a case, (B, S, H, D) or ragged (T, H, D); dout is the gradient that arrives at the output."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    def one_kv_head(self) -> Inputs:
        """The last KV head of the last batch entry with the query heads that read it: a problem of its own."""
        group = self.q.shape[2] // self.k.shape[2]
        return Inputs(self.q[-1:, :, -group:], self.k[-1:, :, -1:], self.v[-1:, :, -1:], self.dout[-1:, :, -group:])


def make_inputs(case: Case, device: torch.device, seed: int = 0) -> Inputs:
    """Normal numbers; those of a cache rounded to e4m3, so that one of 8 bits holds the same."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(seqlen: int, heads: int, head_dim: int) -> torch.Tensor:
        batch = () if case.lengths is not None else (case.batch,)
        shape = (*batch, seqlen, heads, head_dim)
        return torch.randn(shape, generator=generator, device=device).to(case.torch_dtype)

    def keys(head_dim: int) -> torch.Tensor:
        numbers = normal(case.seqlen_k, case.heads_k, head_dim)
        if case.prefix:
            numbers[:, : case.prefix] = numbers[:1, : case.prefix]
        return numbers.to(torch.float8_e4m3fn).to(numbers.dtype) if case.over_a_cache else numbers

    return Inputs(
        normal(case.seqlen_q, case.heads_q, case.head_dim),
        keys(case.head_dim),
        keys(case.head_dim_v),
        normal(case.seqlen_q, case.heads_q, case.head_dim_v),
    )


def distances(case: Case, device: torch.device, begin: int = 0, end: int | None = None) -> torch.Tensor:
    """How far each key lies behind the one that a query row of [begin, end) meets on the diagonal."""
    rows = torch.arange(begin, case.seqlen_q if end is None else end, device=device)[:, None]
    columns = torch.arange(case.seqlen_k, device=device)[None, :]
    return columns - (rows + case.seqlen_k - case.seqlen_q)


def visible(case: Case, device: torch.device, begin: int = 0, end: int | None = None) -> torch.Tensor:
    """True where query rows [begin, end) see a key: the contract's mask, written out; a column mask's of the last entry
    of the batch."""
    distance = distances(case, device, begin, end)
    keep = torch.ones_like(distance, dtype=torch.bool)
    if case.columns:
        keep &= shown(case, device, begin, begin + len(keep))
    if case.causal:
        keep &= distance <= 0
    left, right = case.window or (None, None)
    if left is not None:
        keep &= distance >= -left
    if right is not None:
        keep &= distance <= right
    return keep


def count_visible(case: Case) -> int:
    """Pairs of a query and a key of one sequence that see each other: the sum of `visible`, row by row."""
    diagonal = torch.arange(case.seqlen_q) + case.seqlen_k - case.seqlen_q
    left, right = case.window or (None, None)
    if case.causal:
        right = 0 if right is None else min(right, 0)
    first = torch.zeros_like(diagonal) if left is None else (diagonal - left).clamp(min=0)
    last = torch.full_like(diagonal, case.seqlen_k - 1) if right is None else diagonal + right
    return int((last.clamp(max=case.seqlen_k - 1) - first + 1).clamp(min=0).sum())


def _lengths_name(lengths: Sequence[int]) -> str:
    """Such as 32×512, 1×16384+64×100 or, where they are many, 32×(9…2041)."""
    counts = collections.Counter(lengths)
    if len(counts) > 2:
        return f"{len(lengths)}×({min(lengths)}…{max(lengths)})"
    return "+".join(f"{counts[length]}×{length}" for length in sorted(counts, reverse=True))


def pair(first: int, second: int) -> str:
    return str(first) if first == second else f"{first}/{second}"
