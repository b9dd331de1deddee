"""Tensors that ranks of a group send each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from ._route import Delivery, Route, Tensors
from ._window import window_of

if TYPE_CHECKING:
    from ._agree import Agreement
    from ._window import Window


@dataclass
class Known:
    """What earlier calls found out about a process group."""

    agreements: int = 0  # how many there have been
    agreed: dict[Any, Agreement] = field(default_factory=dict)  # by what the caller gave
    prepared: dict[Any, Any] = field(default_factory=dict)  # shares, by what tells calls apart
    are_neighbours: bool | None = None  # whether ranks may have windows to each other; None where nobody has asked
    windows: dict[str, Window] = field(default_factory=dict)  # of each channel


_known: WeakKeyDictionary[Any, Known] = WeakKeyDictionary()


class Group:
    """A process group as messages need it. `group` None is the default group.

    Nothing here keeps the group alive, since all that calls remember holds objects of this class: the threads and the
    connections of a group that the program destroys end then, and not while the interpreter goes down.
    """

    def __init__(self, group: Any = None):
        self._group = None if group is None else ref(group)

    @property
    def group(self) -> Any:
        group = None if self._group is None else self._group()
        if group is None and self._group is not None:
            raise RuntimeError("flashtile.distributed: the process group of this call has been destroyed")
        return group

    @property
    def process_group(self) -> Any:
        return dist.group.WORLD if self._group is None else self.group

    @property
    def known(self) -> Known:
        return _known.setdefault(self.process_group, Known())

    @cached_property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @cached_property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @cached_property
    def is_on_host(self) -> bool:
        """Whether messages are sent from a CPU's memory."""
        return bool(dist.get_backend(self.group) == "gloo")

    @cached_property
    def reaches_hosts(self) -> bool:
        """Whether tensors of a CPU can be sent, as by gloo beside NCCL."""
        try:
            self.process_group._get_backend(torch.device("cpu"))
        except RuntimeError:
            return False
        return True

    def all_say(self, number: int, on_cpu: bool) -> bool:
        """Whether all ranks know what the caller knows by this number, and nothing is unknown, -1, to any. A message
        tells where ranks wait for messages anyway: over gloo, and where tensors are `on_cpu`. On GPUs it would hold up
        all that has been launched; there what one rank knows all are taken to know."""
        if not (self.is_on_host or (on_cpu and self.reaches_hosts)):
            return number >= 0
        said = torch.tensor([number, -number])
        dist.all_reduce(said, dist.ReduceOp.MIN, group=self.group)
        return number >= 0 and said.tolist() == [number, -number]

    def deliver(self, route: Route, sends: Tensors, device: torch.device) -> Delivery:
        """Begins to send tensors along a route, and to receive what comes along it. All ranks of the route call it."""
        window = window_of(self, route, device)
        if window is not None:
            return window.deliver(route, sends)
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in route.tensors[self.rank]]
        receives = {rank: route.places(self.rank, rank, tensors) for rank in route.tensors}
        return Delivery(tensors, self.exchange(sends, receives).wait)

    def exchange(self, sends: Tensors, receives: Tensors) -> Pending:
        """Begins to send tensors to ranks, and to receive from ranks what they send into `receives`, of the same shapes
        and dtypes in the same order. What is for the caller itself is copied. Memory that is contiguous goes as it is.
        """
        me, peers = self.rank, [] if self.group is None else dist.get_process_group_ranks(self.group)
        on_host = self.is_on_host
        pending, operations = Pending(), []

        def begin(way: Any, rank: int, message: Tensor) -> None:
            peer = peers[rank] if peers else rank
            operations.append(dist.P2POp(way, message.view(-1).view(torch.uint8), peer, self.group))

        for rank, tensors in sends.items():
            for x in tensors if rank != me else ():
                if x.numel():
                    message = (x.cpu() if on_host else x).resolve_conj().resolve_neg().contiguous()
                    pending.sent.append(message)
                    begin(dist.isend, rank, message)
        for rank, places in receives.items():
            for i, place in enumerate(places):
                if rank == me:
                    place.copy_(sends[me][i])
                elif place.numel():
                    message = place
                    if not place.is_contiguous() or (on_host and place.is_cuda):
                        device = "cpu" if on_host else place.device
                        message = torch.empty(place.shape, dtype=place.dtype, device=device)
                        pending.copies.append((place, message))
                    begin(dist.irecv, rank, message)
        if operations:
            pending.works = dist.batch_isend_irecv(operations)
        return pending


@dataclass
class Pending:
    """An exchange under way."""

    works: list[Any] = field(default_factory=list)
    sent: list[Tensor] = field(default_factory=list)  # which must outlive the sending
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (where it belongs, where it comes to)

    def wait(self) -> None:
        """Until all has come. On a GPU the current stream waits, and not the host."""
        for work in self.works:
            work.wait()
        for place, message in self.copies:
            place.copy_(message)
