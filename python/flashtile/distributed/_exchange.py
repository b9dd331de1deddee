"""Tensors that ranks of a group send each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Group:
    """A process group as messages need it. `group` None is the default group."""

    group: Any = None

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def exchange(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[torch.Size]], like: Tensor
    ) -> Pending:
        """Begins to send tensors to ranks and to receive from ranks as many of these shapes, of the dtype and on the
        device of `like`. All that are for one rank go as one message. What is for the caller itself is handed over."""
        me, peers = self.rank, [] if self.group is None else dist.get_process_group_ranks(self.group)
        staged = like.is_cuda and dist.get_backend(self.group) == "gloo"  # which sends what a CPU's memory holds
        device = torch.device("cpu") if staged else like.device
        pending = Pending(receives, {}, like, {me: sends[me]} if me in sends else {})
        operations = []
        for rank, tensors in sends.items():
            if rank != me and any(x.numel() for x in tensors):
                message = packed(tensors).to(device)
                pending.sent.append(message)
                operations.append((dist.isend, message, rank))
        for rank, shapes in receives.items():
            numel = sum(shape.numel() for shape in shapes)
            if rank != me:
                pending.messages[rank] = torch.empty(numel, dtype=like.dtype, device=device)
                if numel:
                    operations.append((dist.irecv, pending.messages[rank], rank))
        if operations:
            pending.works = dist.batch_isend_irecv(
                [
                    dist.P2POp(way, message.view(torch.uint8), peers[rank] if peers else rank, self.group)
                    for way, message, rank in operations
                ]
            )
        return pending


@dataclass
class Pending:
    """An exchange under way."""

    receives: Mapping[int, Sequence[torch.Size]]
    messages: dict[int, Tensor]
    like: Tensor
    own: Mapping[int, Sequence[Tensor]]
    works: list[Any] = field(default_factory=list)
    sent: list[Tensor] = field(default_factory=list)  # which must outlive the sending

    def wait(self) -> dict[int, list[Tensor]]:
        """What came, by rank. On a GPU the current stream waits, and not the host."""
        for work in self.works:
            work.wait()
        found = {rank: list(tensors) for rank, tensors in self.own.items()}
        for rank, message in self.messages.items():
            found[rank] = unpacked(message.to(self.like.device), self.receives[rank])
        return found


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of tensors of one dtype, one behind the other: of a single one that is contiguous, no copy."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0].view(-1)
    message = tensors[0].new_empty(sum(x.numel() for x in tensors))
    for place, x in zip(unpacked(message, [x.shape for x in tensors]), tensors, strict=True):
        place.copy_(x)
    return message


def unpacked(message: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """What :func:`packed` had, as views."""
    parts = message.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
