"""Messages between the GPUs of one host that their copy engines carry, into memory that each has mapped of all others:
PyTorch's symmetric memory. NCCL's kernels want multiprocessors, of which attention's kernels leave none for as long as
they run, so that either waits for the other; a copy engine works beside both.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _C
from ._route import ALIGNMENT, Delivery, Route, Spec, Tensors, aligned_bytes

if TYPE_CHECKING:
    from ._exchange import Group

_GRANULE = 1 << 21  # bytes that a window grows by, at least


def window_of(group: Group, route: Route, device: torch.device) -> Window | None:
    """The window by which a group's messages go along a route, where there may be one; all ranks find the same. The
    first call for a group, and for a channel the first that needs more memory, wait for all ranks."""
    if device.type != "cuda" or len(route.tensors) < group.size or torch.cuda.is_current_stream_capturing():
        return None
    known = group.known
    if known.are_neighbours is None:
        known.are_neighbours = _are_neighbours(group, device)
    if not known.are_neighbours:
        return None
    window = known.windows.get(route.channel)
    if window is None or window.size < route.size:
        window = _opened(group, route.size, 1 + route.ahead, device)
        if window is None:
            known.are_neighbours = False
            return None
        known.windows[route.channel] = window
    return window


class _Way(NamedTuple):
    """From this rank to another."""

    rank: int
    places: Sequence[Tensor]  # for its messages, in the other's memory
    may_write: list[int]  # the counter to wait for
    are_there: list[int]  # the counter to write


class _Plan(NamedTuple):
    """How deliveries along a route go."""

    tensors: list[Tensor]  # that messages come to
    own: Sequence[Tensor]  # the parts of them that this rank's own messages are for
    may_write: list[int]  # the counters by which to tell those who send
    ways: list[_Way]
    are_there: list[int]  # the counters of those who send


class Window:
    """Memory on every rank of a group that all of them can write to: of each as many bytes, `size`, for each of
    `buffers` deliveries. Before it are two counters for each rank: up to which delivery this rank's memory may be
    written to, and up to which its messages are there."""

    def __init__(self, group: Group, size: int, buffers: int, device: torch.device):
        import torch.distributed._symmetric_memory as symmetric_memory

        self.group, self.size, self.buffers, self.device = group, size, buffers, device
        self.begin = -(-2 * 4 * group.size // ALIGNMENT) * ALIGNMENT
        self.memory = symmetric_memory.empty(self.begin + buffers * size, dtype=torch.uint8, device=device)
        self.handle: Any = symmetric_memory.rendezvous(self.memory, group.process_group)
        self.addresses: list[int] = list(self.handle.buffer_ptrs)
        self.memory[: self.begin].zero_()
        self.stream = torch.cuda.Stream(device)
        self.count = 0  # of deliveries
        self.readers: set[torch.cuda.Stream] = set()  # streams that have read what came
        self.plans: WeakKeyDictionary[Route, dict[int, _Plan]] = WeakKeyDictionary()  # for each buffer

    def deliver(self, route: Route, sends: Tensors) -> Delivery:
        """As Group.deliver."""
        self.count += 1
        count, buffer, plans = self.count, self.count % self.buffers, self.plans.setdefault(route, {})
        if buffer not in plans:
            plans[buffer] = self._planned(route, buffer)
        plan = plans[buffer]
        for place, x in zip(plan.own, sends.get(self.group.rank, ()), strict=True):
            place.copy_(x)
        # What this rank's buffer held before has been read when this stream gets here.
        for stream in self.readers | {torch.cuda.current_stream(self.device)}:
            self.stream.wait_stream(stream)
        self.readers.clear()
        self._write(plan.may_write, count)
        with torch.cuda.stream(self.stream):
            for way in plan.ways:
                self._wait(self.stream, way.may_write, count)
                for place, x in zip(way.places, sends[way.rank], strict=True):
                    _copy(place, x)
                self._write(way.are_there, count)
            gone = self.stream.record_event()

        def until_all_came(sends: Any = sends) -> None:  # which has to outlive the sending
            current = torch.cuda.current_stream(self.device)
            self.readers.add(current)
            current.wait_event(gone)
            self._wait(current, plan.are_there, count)

        return Delivery(plan.tensors, until_all_came, lasts=False)

    def _planned(self, route: Route, buffer: int) -> _Plan:
        me, size = self.group.rank, self.group.size
        tensors = {rank: self._tensors(rank, specs, buffer) for rank, specs in route.tensors.items()}
        others = [(me + i) % size for i in range(1, size)]
        senders = [rank for rank in others if any(x.numel() for x in route.places(me, rank, tensors[me]))]
        ways = []
        for rank in others:
            places = route.places(rank, me, tensors[rank])
            if any(x.numel() for x in places):
                counters = self._may_write(at=me, whose=rank), self._are_there(at=rank, whose=me)
                ways.append(_Way(rank, places, *([x] for x in counters)))
        return _Plan(
            tensors[me],
            route.places(me, me, tensors[me]),
            [self._may_write(at=rank, whose=me) for rank in senders],
            ways,
            [self._are_there(at=me, whose=rank) for rank in senders],
        )

    def _tensors(self, rank: int, specs: Sequence[Spec], buffer: int) -> list[Tensor]:
        """The tensors of a rank in a buffer of its memory."""
        found, begin = [], self.begin + buffer * self.size
        for shape, dtype in specs:
            found.append(self.handle.get_buffer(rank, shape, dtype, begin // dtype.itemsize))
            begin += aligned_bytes((shape, dtype))
        return found

    def _may_write(self, at: int, whose: int) -> int:
        """The address of the counter of rank `at` which says that the memory of rank `whose` may be written to."""
        return self.addresses[at] + 4 * whose

    def _are_there(self, at: int, whose: int) -> int:
        """Of that which says that the messages of rank `whose` are there."""
        return self.addresses[at] + 4 * (self.group.size + whose)

    def _write(self, counters: list[int], count: int) -> None:
        _C.write_counters(counters, count & 0xFFFFFFFF, self.device.index, self.stream.cuda_stream)

    def _wait(self, stream: torch.cuda.Stream, counters: list[int], count: int) -> None:
        _C.wait_for_counters(counters, count & 0xFFFFFFFF, self.device.index, stream.cuda_stream)


def _opened(group: Group, size: int, buffers: int, device: torch.device) -> Window | None:
    """A new window, or None where one rank at least can have none."""
    torch.cuda.synchronize(device)  # nobody reads or writes a window that this one takes the place of
    dist.barrier(group.process_group)
    window, failure = None, False
    try:
        window = Window(group, -(-size // _GRANULE) * _GRANULE, buffers, device)
        torch.cuda.synchronize(device)
    except RuntimeError:  # the driver, or the container, does not let processes map each other's memory
        failure = True
    failures: list[Any] = [None] * group.size
    dist.all_gather_object(failures, failure, group=group.group)
    return None if any(failures) else window


def _are_neighbours(group: Group, device: torch.device) -> bool:
    """Whether all ranks of a group are on one host, with a GPU each, and let their copy engines carry messages."""
    mine = (_host(), str(torch.cuda.get_device_properties(device).uuid), _is_served())
    all_of_them: list[Any] = [None] * group.size
    dist.all_gather_object(all_of_them, mine, group=group.group)
    hosts, gpus, served = zip(*all_of_them, strict=True)
    return len(set(hosts)) == 1 and len(set(gpus)) == group.size and all(served)


def _is_served() -> bool:
    version = tuple(int(x) for x in torch.__version__.split(".")[:2])
    return version >= (2, 9) and os.environ.get("FLASHTILE_COPY_ENGINES", "1") != "0"


def _host() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return boot.read()
    except OSError:
        return socket.gethostname()


def _copy(place: Tensor, x: Tensor) -> None:
    """Copy engines copy what is contiguous, as the rows of one entry of a batch are."""
    if place.is_contiguous() and x.is_contiguous():
        place.copy_(x)
    else:
        for place_of_entry, of_entry in zip(place, x, strict=True):
            place_of_entry.copy_(of_entry)
