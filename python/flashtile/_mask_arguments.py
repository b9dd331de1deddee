"""What constructors of a ColumnMask take: sizes, lengths and spans of tokens, read on the host and checked.

`where` is how a message begins: the function and the argument.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Lengths = Sequence[int] | Tensor
Spans = Iterable[Sequence[int]] | Tensor  # each [begin, end)


def spans_and_gaps(where: str, spans: Spans, seqlen: int) -> tuple[list[int], list[tuple[int, int] | None]]:
    """Lengths of the spans and of what is between them, and for each the span, or None."""
    seqlen = checked_size(f"{where}: seqlen", seqlen)
    lengths: list[int] = []
    owners: list[tuple[int, int] | None] = []
    last = 0
    for i, (begin, end) in enumerate(checked_spans(f"{where}: spans", spans, seqlen)):
        if begin < last:
            raise ValueError(f"{where}: spans[{i}] is ({begin}, {end}), expected it to begin at {last} or later")
        lengths += begin - last, end - begin
        owners += None, (begin, end)
        last = end
    return [*lengths, seqlen - last], [*owners, None]


def checked_spans(where: str, spans: Spans, most: int) -> list[tuple[int, int]]:
    checked = []
    for i, span in enumerate(spans.tolist() if isinstance(spans, Tensor) else spans):
        begin, end = checked_sizes(f"{where}[{i}]", span, count=2)
        if not begin <= end <= most:
            raise ValueError(f"{where}[{i}] is ({begin}, {end}), expected 0 ≤ begin ≤ end ≤ {most}")
        checked.append((begin, end))
    return checked


def checked_sizes(where: str, values: Any, *, most: int = 2**30 - 1, count: int | None = None) -> list[int]:
    values = values.tolist() if isinstance(values, Tensor) else values
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{where} is {values!r}, expected {'ints' if count is None else f'{count} ints'}")
    values = list(values)
    if count not in (None, len(values)):
        raise ValueError(f"{where} is {tuple(values)!r}, expected {count} ints")
    return [checked_size(f"{where}[{i}]", value, most=most) for i, value in enumerate(values)]


def checked_size(where: str, value: Any, *, least: int = 0, most: int = 2**30 - 1) -> int:
    """A size of a mask; by default of any that attention takes."""
    expected = f"an int from {least} to {'2^30 - 1' if most == 2**30 - 1 else most}"
    if not isinstance(value, int):
        try:
            value = operator.index(value)
        except TypeError:
            raise TypeError(f"{where} is {value!r}, expected {expected}") from None
    if not least <= value <= most:
        raise ValueError(f"{where} is {value}, expected {expected}")
    return value


def require_tensor(where: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{where} is of type {type(x).__name__}, expected a torch.Tensor")


def require_int32(where: str, x: Any) -> None:
    require_tensor(where, x)
    if x.dtype != torch.int32:
        raise TypeError(f"{where} has dtype {x.dtype}, expected torch.int32")
