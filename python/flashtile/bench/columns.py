"""The column masks of suite masks: FlashMask's twelve kinds (arXiv:2410.01359), of the sizes of its benchmark; and
those of suite serving, trees of drafts. What is drawn is the same in every run, and on every device."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from flashtile.masks import ColumnMask

if TYPE_CHECKING:
    from flashtile.bench.cases import Case

SEED = 0
LONG = 32768  # from which on a sequence has the greater number of documents
DOCUMENTS, DOCUMENTS_OF_LONG = (3, 7), (10, 14)
ANSWERS = (2, 6)
GLOBAL_TOKENS = 16
FAN_OUTS = (1, 4, 2, 2)  # first drafts, those that follow each of them, and so on; then 1

Documents = list[int]  # lengths
Path = tuple[int, ...]  # from a first draft to one, as the numbers that tell siblings apart


def window_of(seqlen: int) -> int:
    return seqlen // 16


def documents(seqlen: int, source: random.Random) -> Documents:
    return _parts(seqlen, source.randint(*(DOCUMENTS_OF_LONG if seqlen >= LONG else DOCUMENTS)), source)


def _parts(whole: int, count: int, source: random.Random) -> list[int]:
    """Lengths of `count` parts, none of which is much shorter than the others. They are no multiples of a tile."""
    least = whole // (4 * count)
    cuts = sorted(source.randint(0, whole - least * count) for _ in range(count - 1))
    return [least + end - begin for begin, end in itertools.pairwise([0, *cuts, whole - least * count])]


def _question(length: int, source: random.Random) -> tuple[int, list[int]]:
    question, *answers = _parts(length, 1 + source.randint(*ANSWERS), source)
    return question, answers


def _evicted(seqlen: int, source: random.Random) -> ColumnMask:
    """The cache is full with half of the tokens: each row of the other half evicts a key, which no other row does."""
    keys = source.sample(range(seqlen), seqlen - seqlen // 2)
    evicted_at = torch.full((seqlen,), seqlen)
    evicted_at[keys] = torch.arange(seqlen // 2, seqlen)
    return ColumnMask.random_eviction(evicted_at.maximum(torch.arange(1, seqlen + 1)))  # no row evicts a later key


def _spans(seqlen: int) -> list[tuple[int, int]]:
    """Of a sequence of 8192 tokens [1024, 1562) and [2358, 4058)."""
    return [(seqlen * begin // 8192, seqlen * end // 8192) for begin, end in ((1024, 1562), (2358, 4058))]


def fan_out_tree(count: int) -> list[int]:
    """The parents of drafts of which as many follow each as FAN_OUTS says, up to `count`, level by level."""
    fan_outs = itertools.chain(FAN_OUTS, itertools.repeat(1))
    level: list[Path] = [()]
    paths: list[Path] = []
    while len(paths) < count:
        fan_out = next(fan_outs)
        level = [(*path, i) for path in level for i in range(fan_out)]
        paths += level
    return _depth_first(paths[:count])


def random_tree(count: int, source: random.Random) -> list[int]:
    """The parents of drafts each of which follows any of those before."""
    paths: list[Path] = [(0,)]
    while len(paths) < count:
        paths.append((*source.choice(paths), len(paths)))
    return _depth_first(paths)


def _depth_first(paths: Sequence[Path]) -> list[int]:
    """The parents of the drafts that these paths lead to, as `ColumnMask.tree` wants them."""
    place = {path: i for i, path in enumerate(sorted(paths))}
    return [place.get(path[:-1], -1) for path in place]


# No kind has a row that sees nothing, on which the kernels of PyTorch disagree.
ALIKE: dict[str, Callable[[int], ColumnMask]] = {  # for all entries of a batch
    "full": lambda s: ColumnMask.full(s, s),
    "causal": lambda s: ColumnMask.causal(s, s),
    "sliding_window": lambda s: ColumnMask.sliding_window(s, window_of(s)),
    "global_sliding_window": lambda s: ColumnMask.global_sliding_window(s, GLOBAL_TOKENS, (window_of(s), window_of(s))),
    "prefix_lm": lambda s: ColumnMask.prefix_lm(s, s // 2),
    "qk_sparse": lambda s: ColumnMask.qk_sparse(s, _spans(s)),
    "fan_out_tree": lambda s: ColumnMask.tree(fan_out_tree(s)),
}
DRAWN: dict[str, Callable[[int, random.Random], ColumnMask]] = {  # for each entry by itself
    "causal_document": lambda s, source: ColumnMask.causal_document(documents(s, source)),
    "document": lambda s, source: ColumnMask.document(documents(s, source)),
    "share_question": lambda s, source: ColumnMask.share_question(
        [_question(length, source) for length in documents(s, source)]
    ),
    "causal_blockwise": lambda s, source: ColumnMask.causal_blockwise(documents(s, source)),
    "prefix_document": lambda s, source: ColumnMask.prefix_document(
        [(source.randint(1, length), length) for length in documents(s, source)]
    ),
    "random_eviction": _evicted,
    "random_tree": lambda s, source: ColumnMask.tree(random_tree(s, source)),
}
# In the order of FlashMask's tables.
KINDS = (
    "full",
    "causal",
    "sliding_window",
    "causal_document",
    "document",
    "share_question",
    "global_sliding_window",
    "causal_blockwise",
    "prefix_lm",
    "prefix_document",
    "qk_sparse",
    "random_eviction",
)
TREES = ("fan_out_tree", "random_tree")


def mask_of(case: Case, device: torch.device) -> ColumnMask:
    """The mask of a case's kind; where all entries of the batch are alike, of B = 1."""
    return _mask(case.columns, case.batch, case.seqlen_q, device)


@functools.lru_cache(maxsize=8)  # made by a case's check, so that the timed calls launch nothing for it
def _mask(kind: str, batch: int, seqlen: int, device: torch.device) -> ColumnMask:
    if kind in ALIKE:
        return ALIKE[kind](seqlen).to(device)
    return ColumnMask.stack([DRAWN[kind](seqlen, source) for source in _sources(batch, seqlen)]).to(device)


def documents_of(case: Case) -> tuple[int, ...]:
    """The lengths of the documents of all entries, in their order."""
    return tuple(itertools.chain(*(documents(case.seqlen_q, source) for source in _sources(case.batch, case.seqlen_q))))


def _sources(batch: int, seqlen: int) -> list[random.Random]:
    """One for each entry, by its place from the end: the last entry is judged, as a case of its own."""
    return [random.Random(f"{SEED} {seqlen} {place}") for place in reversed(range(batch))]


def count_shown(case: Case) -> int:
    """Pairs of a query and a key that see each other, in all entries of the batch."""
    sparsity = mask_of(case, torch.device("cpu")).sparsity()
    return round(case.batch * case.seqlen_q * (case.seqlen_k - case.seqlen_q * sparsity))


def shown(case: Case, device: torch.device, begin: int, end: int) -> torch.Tensor:
    """True where query rows [begin, end) of the last entry see a key; they see all that come before the mask's."""
    rows = torch.arange(begin, end, device=device)[:, None]
    of_mask = ~is_hidden(rows, mask_of(case, device).ranges[-1, 0].unbind(-1))
    return F.pad(of_mask, (case.seqlen_k - case.seqlen_q, 0), value=True)


def is_hidden(row: torch.Tensor, bounds: Sequence[torch.Tensor]) -> torch.Tensor:
    """Whether a row is within one of a column's two intervals, begin_0, end_0, begin_1, end_1."""
    begin_0, end_0, begin_1, end_1 = bounds
    return ((begin_0 <= row) & (row < end_0)) | ((begin_1 <= row) & (row < end_1))
