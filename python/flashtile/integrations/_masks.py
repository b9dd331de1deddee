"""What a mask of transformers says, in a small tensor that the models hand on from the mask's maker to the layers."""

import weakref
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import masking_utils
from transformers.utils.import_utils import is_tracing

from .._core import is_compiling
from .._padding import visible_first
from ..masks import ColumnMask


class Rule(NamedTuple):
    """Which keys a row sees, whoever pads. A layer need not know: some say they are causal, or have a window, or not,
    and mean another thing, since transformers' own eager attention goes by the mask alone."""

    causal: bool
    distance: int | None  # how far a row sees: to the left, and to the right unless causal; None: any distance


class Told(NamedTuple):
    """What :func:`read` finds in a mask. At most one of `keys`, `offsets` and `columns` is given."""

    rule: Rule
    keys: tuple[Tensor, Tensor] | None = None  # those that count, as visible_first says it
    queries: tuple[Tensor, Tensor] | None = None  # the same of queries, where their places matter
    offsets: tuple[Tensor, Tensor] | None = None  # of packed sequences, (sequences + 1) int32, in queries and in keys
    columns: Tensor | None = None  # ranges of a ColumnMask, which says all


# A mask has four dimensions, because transformers hands on as it is what has so many. Rows of int64 hold, for keys and
# then for queries, how many count and the order of visible_first; int32 holds offsets. Sizes tell the rule, so that the
# host need not read a tensor: (B, 1 + causal + 2 if there is a distance, 1 + parts, entries + distance + 1). Ranges of
# a ColumnMask have a size that none of these has, and behind them a column of zeros for each query: (B, 5, S_k + S_q,
# 4), int32.
_COLUMNS = 5


def write(rule: Rule, *parts: Tensor, offsets: Tensor | None = None, device=None) -> Tensor:
    """A mask. `parts`: keys (B, S_k), and perhaps queries (B, S_q), True where they count."""
    table = torch.empty(1, 0, dtype=torch.int64, device=device) if offsets is None else offsets[None]
    if parts:
        counted = [visible_first(visible) for visible in parts]
        table = torch.cat([x for order, count in counted for x in (count[:, None], order)], dim=-1)
    windowed = rule.distance is not None
    table = pad(table, (0, rule.distance + 1 if windowed else 0))
    return table[:, None, None].expand(-1, 1 + rule.causal + 2 * windowed, 1 + len(parts), -1)


def write_columns(ranges: Tensor, seqlen_q: int) -> Tensor:
    """A mask of `ranges` (B or 1, 1, S_k, 4), those of a ColumnMask of `seqlen_q` rows."""
    return pad(ranges, (0, 0, 0, seqlen_q)).expand(-1, _COLUMNS, -1, -1)


def read(mask: Tensor, batch: int, seqlen_q: int, seqlen_k: int) -> Told | None:
    """What :func:`write` or :func:`write_columns` wrote for so many rows; None if they did not. A mask of other rows
    may look like one with a distance, so whoever asks should know of that."""
    if mask.shape[1] == _COLUMNS:
        fits = mask.shape[0] in (1, batch) and mask.shape[2:] == (seqlen_k + seqlen_q, 4) and mask.dtype is torch.int32
        return Told(Rule(False, None), columns=mask[:, :1, :seqlen_k]) if fits else None
    _, kind, parts, entries = mask.shape
    kind, parts, packed = kind - 1, parts - 1, mask.dtype is torch.int32
    sizes = [batch * seqlen_q + 1] if packed else [1, seqlen_k, 1, seqlen_q][: 2 * parts]
    distance = entries - sum(sizes) - 1
    windowed = kind >= 2
    if kind > 3 or parts > 2 or not (distance >= 0 if windowed else distance == -1):
        return None
    rule = Rule(kind % 2 == 1, int(distance) if windowed else None)
    if not sizes:
        return Told(rule)
    entries = mask[:, 0, 0].split([*sizes, distance + 1], dim=-1)[:-1]
    if packed:
        return Told(rule, offsets=(entries[0][0],) * 2)
    pairs = [(order, count[:, 0].int()) for count, order in zip(entries[::2], entries[1::2], strict=True)]
    return Told(rule, *pairs)


def offsets_of(begins: Tensor) -> Tensor:
    """(B·S + 1) int32, where each sequence begins, of `begins` (B, S), True at first rows. The host need not know how
    many there are: those that no row belongs to are empty."""
    number = begins.flatten().cumsum(0) - 1
    lengths = torch.zeros_like(number).scatter_add_(0, number, torch.ones_like(number))
    return pad(lengths.cumsum(0), (1, 0)).int()


def written_out(told: Told, seqlen_q: int, seqlen_k: int, device) -> Tensor:
    """(B or 1, 1, S_q, S_k) bool, what `told` lets see; with offsets, of the rows of all entries."""
    if told.columns is not None:
        return ColumnMask(told.columns, seqlen_q).to_dense()
    places, sides = [], []  # how far from the end of its sequence a row is, and which sequence, below 0 if none
    for n, (seqlen, pair) in enumerate(((seqlen_q, told.queries), (seqlen_k, told.keys))):
        row = torch.arange(seqlen, device=device)[None]
        if told.offsets is not None:
            ends = told.offsets[n][1:]
            side = torch.searchsorted(ends, row, right=True)
            place = row - pad(ends, (0, 1))[side]
            counts = side < len(ends)
        elif pair is not None:
            rank, count = pair[0].argsort(dim=-1), pair[1][:, None]
            side, place, counts = torch.zeros_like(rank), rank - count, rank < count
        else:
            side, place, counts = torch.zeros_like(row), row - seqlen, torch.ones_like(row).bool()
        places.append(place)
        sides.append(side.where(counts, -1 - n))
    gap = places[1][:, None, :] - places[0][:, :, None]
    seen = sides[1][:, None, :] == sides[0][:, :, None]
    if told.rule.causal:
        seen = seen & (gap <= 0)
    if told.rule.distance is not None:
        seen = seen & (gap.abs() <= told.rule.distance)
    return seen[:, None]


_recent = (lambda: None, 0, None)  # the last position_ids looked at, weakly, its version, and what was found


def offsets_of_restarts(position_ids, batch: int, seqlen: int) -> Tensor | None:
    """Offsets of the sequences that are packed into rows whose positions start again, None if none do.

    The rule is that of transformers' flash attention, which looks at batches of one: a sequence begins where its first
    position comes again, and also where a position is less than the one before. The host reads the tensor once, not
    once a layer. Where it cannot (a compiler, a captured graph), offsets tell of as many sequences as there are rows.
    """
    global _recent
    if not isinstance(position_ids, Tensor) or position_ids.shape != (batch, seqlen) or seqlen == 1:
        return None
    if not is_compiling():
        known, version, offsets = _recent
        if known() is position_ids and version == position_ids._version:
            if not (position_ids.is_cuda and torch.cuda.is_current_stream_capturing()):
                return offsets
    before, after = position_ids[:, :-1], position_ids[:, 1:]
    again = (after < before) | (after == position_ids.amin(dim=-1, keepdim=True))
    begins = pad(again, (1, 0), value=True)
    if is_tracing(position_ids):
        return offsets_of(begins)
    first = begins.flatten().nonzero().flatten()
    offsets = pad(first, (0, 1), value=batch * seqlen).int() if len(first) > batch else None
    if not position_ids.is_inference():  # such tensors have no version
        _recent = weakref.ref(position_ids), position_ids._version, offsets
    return offsets


# transformers hands over a rule as a function of indices, made of others. Functions that one `def` has made share their
# code, and what they were made of stands in their closures.


def rule_of(function) -> tuple[Rule, Tensor | None] | None:
    """The rule that a function of transformers stands for, and which of the packed sequences each row is in, (B, S), if
    any; None if it is another rule than causality, windows and packed sequences."""
    if function is masking_utils.causal_mask_function or function is masking_utils.bidirectional_mask_function:
        return Rule(function is masking_utils.causal_mask_function, None), None
    if getattr(function, "__code__", None) not in (ALL_OF, *_KNOWN):  # callables of another kind have none
        return None
    return _rule_of_several(function)


@torch.compiler.disable  # compilers do not let closures be looked into
def _rule_of_several(function):
    parts = list(_parts(function))
    codes = [getattr(part, "__code__", None) for part in parts]
    if not all(code in _KNOWN for code in codes) or codes.count(PACKED) > 1:
        return None
    if RENUMBERED is not None and (PACKED in codes) != (RENUMBERED in codes):
        return None  # numbers of the model's own, which need not stand together
    causal = masking_utils.causal_mask_function in parts
    pairs = zip(codes, parts, strict=True)
    windows = [(code, closure(part)["sliding_window"]) for code, part in pairs if code in _WINDOWS]
    distances = [window - 1 if code is LEFT else window for code, window in windows]
    if len(distances) > 1 or any(distance < 0 for distance in distances) or (LEFT in codes and not causal):
        return None
    packed = closure(parts[codes.index(PACKED)])["packed_sequence_mask"] if PACKED in codes else None
    return Rule(causal, *distances or (None,)), packed


def _parts(function):
    """The functions of which `function` is the intersection; the renumbering of packed sequences and what it renumbers
    count as two."""
    code = getattr(function, "__code__", None)  # callables of another kind have none
    if code is ALL_OF:
        for part in closure(function)["mask_functions"]:
            yield from _parts(part)
        return
    yield function
    if code is not None and code is RENUMBERED:
        yield from _parts(closure(function)["mask_function"])


def closure(function):
    """What a function was made of, by name."""
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    return dict(zip(function.__code__.co_freevars, cells, strict=True))


ALL_OF = masking_utils.and_masks().__code__
PACKED = masking_utils.packed_sequence_mask_function(None).__code__
_renumber = getattr(masking_utils, "remap_positions_for_packed_sequence", None)  # later than transformers 5.4
RENUMBERED = _renumber and _renumber(None, None).__code__
LEFT = masking_utils.sliding_window_overlay(0).__code__
BOTH = masking_utils.sliding_window_bidirectional_overlay(0).__code__
_WINDOWS = (LEFT, BOTH)
_KNOWN = (
    masking_utils.causal_mask_function.__code__,
    masking_utils.bidirectional_mask_function.__code__,
    *_WINDOWS,
    PACKED,
    *(() if RENUMBERED is None else (RENUMBERED,)),
)
