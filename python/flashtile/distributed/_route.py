"""What ranks of a group send each other at once, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

Tensors = Mapping[int, Sequence[Tensor]]  # for each rank some
T = TypeVar("T")
Spec = tuple[torch.Size, torch.dtype]  # of a tensor
ALIGNMENT = 256  # bytes


@dataclass(frozen=True, eq=False)
class Route:
    """Which ranks of a group send each other what at once, as each of them knows it of all of them.

    Deliveries of one `channel` follow each other. What one has brought may be read until the next but `ahead` begins.
    """

    channel: str
    tensors: Mapping[int, Sequence[Spec]]  # of each rank, those that it gets its messages in
    # The parts of a receiver's tensors that belong to a sender's messages, one to each: of (receiver, sender, tensors).
    places: Callable[[int, int, Sequence[Tensor]], Sequence[Tensor]]
    ahead: int = 0
    room: int = 0  # bytes that a later delivery needs which sends on what this one brings

    @cached_property
    def size(self) -> int:
        """The bytes of the tensors of the rank that has most, each of which begins at a multiple of ALIGNMENT, or the
        room that is asked for."""
        return max(self.room, *(sum(map(aligned_bytes, specs)) for specs in self.tensors.values()))


class Routes:
    """Routes that were taken before, by what they depend on: to make some takes longer than to take them."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def get(self, key: Any, make: Callable[[], T]) -> T:
        if key not in self._known:
            self._known[key] = make()
        found: T = self._known[key]
        return found


def spec_of(x: Tensor) -> Spec:
    return x.shape, x.dtype


def aligned_bytes(spec: Spec) -> int:
    shape, dtype = spec
    return -(-shape.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT


@dataclass
class Delivery:
    """Messages under way along a route, and the tensors that they come to."""

    tensors: list[Tensor]
    until_all_came: Callable[[], None]
    lasts: bool = True  # whether no other delivery will write to the tensors

    def wait(self) -> list[Tensor]:
        """The tensors, once all messages have come and gone. On a GPU the current stream waits, and not the host."""
        self.until_all_came()
        return self.tensors

    def lasting(self, x: Tensor) -> Tensor:
        """A tensor that no delivery will write to: a copy if `x` is one of these tensors and they do not last."""
        return x.clone() if not self.lasts and any(x is y for y in self.tensors) else x
