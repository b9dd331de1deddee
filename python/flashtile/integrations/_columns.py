"""A rule of transformers from the point of view of each key: which queries see it, as a ColumnMask says it.

Under every rule known here the queries that see a key stand together, and the key's own place is among them, or there
are none. So this also holds where such rules intersect, and where they unite: their intervals overlap.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import masking_utils
from transformers.utils.import_utils import is_tracing

from .._mask_intervals import ranges_hiding
from ._masks import ALL_OF, BOTH, LEFT, PACKED, RENUMBERED, closure

_FAR = 2**40  # beyond any place, on either side


class _Call(NamedTuple):
    """What a mask is made for."""

    batch: int
    begin: int  # the place of the first key
    end: int
    counts: Tensor | None  # (B, at least end), False where a place is padding

    def of_keys(self, x):
        """The columns of `x`, (B, places), that are keys'; None if it has others than transformers reads."""
        fits = x.dim() == 2 and x.shape[0] == self.batch and x.shape[1] >= self.end
        return x[:, self.begin : self.end] if fits else None


def is_known(function) -> bool:
    """Whether the rule is made of those that are known here."""
    code = getattr(function, "__code__", None)  # callables of another kind have none
    if code in (ALL_OF, _ANY_OF):
        return all(map(is_known, closure(function)["mask_functions"]))
    if code is not None and code is RENUMBERED:
        return is_known(closure(function)["mask_function"])
    return code is not None and code in (*_INTERVALS, PACKED, _BLOCKS)


def ranges_of(
    function, batch_size: int, q_length: int, kv_length: int, q_offset, kv_offset: int, attention_mask, device
) -> Tensor | None:
    """Ranges of a ColumnMask, (B or 1, 1, S_k, 4) int32; None if the rule is not known, or a block of it is in parts.

    What a query sees that is padding need not be what transformers' rule says. The host reads whether blocks are in
    parts, and nothing else. Where it cannot (a compiler, a captured graph), no rule with blocks is known.
    """
    counts = attention_mask
    if counts is not None:
        counts = masking_utils.prepare_padding_mask(counts.bool(), kv_length, kv_offset)
    call = _Call(batch_size, kv_offset, kv_offset + kv_length, counts)
    seen = _seen(function, call, torch.arange(kv_length, device=device)[None] + kv_offset, (_BLOCKS,))
    if seen is None:
        return None
    begin, end = (bound - q_offset for bound in seen)
    if counts is not None:
        begin = begin.where(call.of_keys(counts), q_length)
    return ranges_hiding(q_length, 0, begin[:, None], end[:, None], q_length)


def _seen(function, call, key, others):
    """The places [begin, end) of queries that see each `key`, (1 or B, S_k), in a pair of such tensors, or None. Of the
    rules that go by places of a sequence, or not by places, those are known whose code is one of `others`."""
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    if code in (ALL_OF, _ANY_OF):
        return _seen_by_several(function, call, key, others)
    if code in _INTERVALS:
        return _INTERVALS[code](closure(function), call, key)
    if code not in others:
        return None
    if code is _BLOCKS:
        return _seen_in_block(closure(function)["block_sequence_ids"], call, key)
    if code is PACKED:
        numbers = closure(function)["packed_sequence_mask"]
        return None if call.of_keys(numbers) is None else tuple(map(call.of_keys, _runs(numbers)))
    own = call.of_keys(closure(function)["position_ids"])
    seen = None if own is None else _seen(closure(function)["mask_function"], call, own, ())
    return seen and tuple(bound + (key - own) for bound in seen)


def _seen_by_several(function, call, key, others):
    """Of an intersection or a union. Numbers of sequences stand together, and places of a sequence mean something, only
    where transformers has made both of the same positions; numbers of a model's own need not stand together."""
    functions, every = closure(function)["mask_functions"], function.__code__ is ALL_OF
    codes = [getattr(part, "__code__", None) for part in functions]
    others = tuple(code for code in others if code is _BLOCKS)
    if every and PACKED in codes and (RENUMBERED is None or RENUMBERED in codes):
        others += (PACKED, RENUMBERED)
    seen = [_seen(part, call, key, others) for part in functions]
    if not seen or None in seen:
        return None
    begins, ends = zip(*seen, strict=True)
    if every:
        return functools.reduce(torch.maximum, begins), functools.reduce(torch.minimum, ends)
    return functools.reduce(torch.minimum, begins), functools.reduce(torch.maximum, ends)


def _causal(_, call, key):
    return key, torch.full_like(key, _FAR)


def _bidirectional(_, call, key):
    return torch.full_like(key, -_FAR), torch.full_like(key, _FAR)


def _window_to_the_left(made_of, call, key):
    window = made_of["sliding_window"]
    return (torch.full_like(key, -_FAR), key + window) if window >= 1 else None


def _window(made_of, call, key):
    distance = made_of["sliding_window"]
    return (key - distance, key + distance + 1) if distance >= 0 else None


def _chunk(made_of, call, key):
    size, padding = made_of["chunk_size"], made_of["left_padding"]
    if size < 1 or padding.shape != (call.batch,):
        return None
    first = padding[:, None]
    begin = (key - first) // size * size + first
    return begin, begin + size


def _seen_in_block(numbers, call, key):
    """Of blocks of equal numbers, of which those below 0 are none."""
    own = call.of_keys(numbers)
    if own is None or is_tracing(numbers):
        return None
    if call.counts is not None:  # padding within a block does not part it
        counts = pad(call.counts, (0, numbers.shape[1] - call.counts.shape[1]), value=True)
        place = torch.arange(numbers.shape[1], device=numbers.device)
        last = place.where(counts, -1).cummax(dim=-1).values  # the last that counts, so far
        numbers = numbers.gather(-1, last.clamp(min=0)).where(last >= 0, -1)
    begins, ends = _runs(numbers)
    firsts = numbers.where(begins == torch.arange(numbers.shape[1], device=numbers.device), -1).sort(dim=-1).values
    if ((firsts.diff(dim=-1) == 0) & (firsts[:, 1:] >= 0)).any():
        return None
    within = call.of_keys(numbers) >= 0
    return tuple(call.of_keys(bound).where(within, key) for bound in (begins, ends))


def _runs(numbers):
    """Where the run of equal numbers begins and ends that each place of (B, places) is in."""
    count = numbers.shape[1]
    place = torch.arange(count, device=numbers.device)
    differs = numbers[:, 1:] != numbers[:, :-1]
    begins = place.where(pad(differs, (1, 0), value=True), 0).cummax(dim=-1).values
    ends = (place + 1).where(pad(differs, (0, 1), value=True), count)
    return begins, ends.flip(-1).cummin(dim=-1).values.flip(-1)


_ANY_OF = masking_utils.or_masks().__code__
_blockwise = getattr(masking_utils, "blockwise_overlay", None)  # later than transformers 5.4
_BLOCKS = _blockwise and _blockwise(None).__code__
_INTERVALS = {
    masking_utils.causal_mask_function.__code__: _causal,
    masking_utils.bidirectional_mask_function.__code__: _bidirectional,
    LEFT: _window_to_the_left,
    BOTH: _window,
    masking_utils.chunked_overlay(1, None).__code__: _chunk,
}
