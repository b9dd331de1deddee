"""What ranks of a group send each other at once, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = Mapping[int, Sequence[Tensor]]  # for each rank some
Spec = tuple[torch.Size, torch.dtype]  # of a tensor


@dataclass(frozen=True)
class Route:
    """Which ranks of a group send each other what at once, as each of them knows it of all of them.

    Deliveries of one `channel` follow each other. What one has brought may be read until the next but `ahead` begins.
    """

    channel: str
    ranks: Sequence[int]
    tensors: Callable[[int], Sequence[Spec]]  # those that a rank gets its messages in
    # The parts of a receiver's tensors that belong to a sender's messages, one to each: of (receiver, sender, tensors).
    places: Callable[[int, int, Sequence[Tensor]], Sequence[Tensor]]
    ahead: int = 0


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
