"""A rank's share of the work: calls of the local kernels, and what they are given of masks and documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._core import forward_with_state, gradients
from .._options import ALIBI_SLOPES, DROPOUT_P, MASK, SEQUENCES, WINDOW, replaced
from ._pairs import Band, Call, Places, calls_of
from ._rows import Rows, Sums, unit_of
from .layout import Runs

Block = tuple[Tensor, Tensor]  # keys and values
T = TypeVar("T")

_cached_calls = lru_cache(maxsize=4096)(calls_of)


@dataclass(frozen=True)
class Saved:
    """What a backward knows of a rank's rows."""

    needed: tuple[bool, bool, bool]  # whether gradients of q, k and v are wanted
    dout: Tensor
    dlse: Tensor | None
    out: Tensor
    state: Tensor

    def of_keys(self, pair: tuple[T, T]) -> list[T]:
        """What belongs to k and to v, if its gradient is wanted."""
        return [x for x, needed in zip(pair, self.needed[1:], strict=True) if needed]


@dataclass(frozen=True)
class Local:
    """What the calls of a rank have in common. Tensors are (B, S, H, D), of a ragged batch with B = 1; `options` are
    those of the local kernels but for masks and sequences, and `ranges` those of a column mask of the whole sequence,
    whose rows are counted within a document."""

    rows: Runs
    band: Band
    documents: tuple[int, ...] | None
    options: tuple[Any, ...]
    ranges: Tensor | None
    first_head: int = 0  # of the query heads, among all
    sharers: int = 1  # query heads that share a KV head
    entries: int = 1  # of the batch

    def places(self) -> Places:
        if self.options[DROPOUT_P]:
            return Places.ALL
        return Places.DISTANCES if self.options[ALIBI_SLOPES] is not None else Places.ANY

    def calls(self, rows: Runs, keys: Runs) -> list[Call]:
        """Those of any rank's rows over any keys."""
        return _cached_calls(rows, keys, self.band, self.documents, self.places(), self.entries)

    def begin(self, q: Tensor, head_dim_v: int) -> Rows:
        return Rows(q, head_dim_v, unit_of(self.options, q.shape[-1]))

    def add_block(self, total: Rows, q: Tensor, block: Block, keys: Runs) -> None:
        """Adds the results over a block of keys and values, which lie at `keys` in the whole sequence."""
        for call, given, options in self._calls(q, block, keys):
            out, _, state = forward_with_state(*given, options)
            if len(call.sequences) > 1:
                out, state = _together(out), _states_together(state, call)
            total.add(*call.rows, out, state)

    def add_gradients(self, found: tuple[Sums, Sums, Sums], saved: Saved, q: Tensor, block: Block, keys: Runs) -> None:
        """Adds to `found`, dq of the rank's rows, and dk and dv of a block of keys and values."""
        for call, given, options in self._calls(q, block, keys):
            rows = slice(*call.rows)
            dout, out, state = saved.dout[:, rows], saved.out[:, rows], saved.state[..., rows]
            dlse = None if saved.dlse is None else saved.dlse[..., rows]
            if len(call.sequences) > 1:
                dout, out, state = _apart(dout, call), _apart(out, call), _states_apart(state, call)
                dlse = None if dlse is None else _states_apart(dlse, call)
            results = gradients((*saved.needed, False), dout, dlse, *given, out, state.contiguous(), options)
            for total, result, at in zip(found, results, (call.rows, call.keys, call.keys), strict=False):
                if result is not None:
                    total.add(*at, _together(result) if len(call.sequences) > 1 else result)

    def _calls(
        self, q: Tensor, block: Block, keys: Runs
    ) -> Iterator[tuple[Call, tuple[Tensor, Tensor, Tensor], tuple[Any, ...]]]:
        """Each call with q, k, v and options as the kernels take them."""
        places = self.places()
        for call in self.calls(self.rows, keys):
            options = replaced(self.options, WINDOW, call.window)
            slopes, first = options[ALIBI_SLOPES], call.sequences[0]
            if slopes is not None and slopes.dim() > 1 and self.entries == 1:
                of_documents = [max(x.document, 0) for x in call.sequences]
                options = replaced(options, ALIBI_SLOPES, slopes[of_documents])
            if self.ranges is not None:
                ranges = self._ranges_of(call, keys)
                if len(call.sequences) > 1 and call.is_dense:
                    ranges = ranges.unflatten(2, (len(call.sequences), -1))[0].transpose(0, 1).contiguous()
                options = replaced(options, MASK, ranges)
            rows, columns = slice(*call.rows), slice(*call.keys)
            given = q[:, rows], block[0][:, columns], block[1][:, columns]
            if len(call.sequences) > 1:
                given = _apart(given[0], call), _apart(given[1], call), _apart(given[2], call)
                if not call.is_dense:
                    options = replaced(options, SEQUENCES, _tables(call, q.device))
            if places != Places.ANY:
                batch = 0 if self.documents is None else max(first.document, 0)
                options = (*options, (batch, self.first_head, *first.place, first.ahead))
            yield call, given, options

    def _ranges_of(self, call: Call, keys: Runs) -> Tensor:
        """The part of the column mask for a call, whose rows are counted from the first of each of its sequences."""
        assert self.ranges is not None
        columns = torch.cat([self.ranges[:, :, begin:end] for begin, end in keys], 2)[:, :, slice(*call.keys)]
        parts = columns.split([end - begin for begin, end in (x.keys for x in call.sequences)], 2)
        moved = []
        for part, sequence in zip(parts, call.sequences, strict=True):
            first = self.documents[sequence.document] if self.documents and sequence.runs else 0
            before = torch.zeros_like(part)  # how many rows of the call are before each bound
            for begin, end in sequence.runs:
                before += (part - (begin - first)).clamp(0, end - begin)
            moved.append(before)
        return torch.cat(moved, 2) if len(moved) > 1 else moved[0]


def _apart(x: Tensor, call: Call) -> Tensor:
    """The rows (1, T, H, D) of several sequences as kernels take them: (B, S, H, D), or ragged (T, H, D)."""
    return x[0].unflatten(0, (len(call.sequences), -1)) if call.is_dense else x[0]


def _together(x: Tensor) -> Tensor:
    """The same the other way."""
    return x.flatten(0, x.dim() - 3)[None]


def _states_apart(x: Tensor, call: Call) -> Tensor:
    """Numbers of rows, (…, 1, H, T), as kernels take them: (…, B, H, S), or (…, H, T)."""
    x = x.squeeze(-3)
    return x.unflatten(-1, (len(call.sequences), -1)).movedim(-2, -3).contiguous() if call.is_dense else x


def _states_together(x: Tensor, call: Call) -> Tensor:
    """The same the other way."""
    return (x.movedim(-3, -2).flatten(-2) if call.is_dense else x).unsqueeze(-3)


def _tables(call: Call, device: torch.device) -> tuple[Tensor, Tensor, None, None]:
    (first_row, _), (first_key, _) = call.rows, call.keys
    begins = [
        [0, *(x.rows[1] - first_row for x in call.sequences)],
        [0, *(x.keys[1] - first_key for x in call.sequences)],
    ]
    cu_seqlens_q, cu_seqlens_k = table_on(device, begins)
    return cu_seqlens_q, cu_seqlens_k, None, None


def table_on(device: torch.device, numbers: Sequence[Any]) -> Tensor:
    """An int32 tensor of numbers that the host knows, which does not wait for the device."""
    return torch.tensor(numbers, dtype=torch.int32, pin_memory=device.type == "cuda").to(device, non_blocking=True)
