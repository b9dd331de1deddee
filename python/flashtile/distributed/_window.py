"""Messages between the GPUs of one host that their copy engines carry, into memory that each has mapped of all others:
PyTorch's symmetric memory. NCCL's kernels want multiprocessors, of which attention's kernels leave none for as long as
they run, so that either waits for the other; a copy engine works beside both.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _C
from ._route import Delivery, Route, Spec, Tensors

if TYPE_CHECKING:
    from ._exchange import Group

_ALIGNMENT = 256  # bytes
_GRANULE = 1 << 21  # bytes that a window grows by, at least

_windows: dict[tuple[Any, str], Window] = {}
_one_host: dict[Any, bool] = {}


def window_of(group: Group, route: Route, device: torch.device) -> Window | None:
    """The window by which a group's messages go along a route, where there may be one; all ranks find the same. The
    first call for a group, and for a channel the first that needs more memory, wait for all ranks."""
    if device.type != "cuda" or len(route.ranks) < group.size or torch.cuda.is_current_stream_capturing():
        return None
    key = group.process_group
    if key not in _one_host:
        _one_host[key] = _are_neighbours(group, device)
    if not _one_host[key]:
        return None
    size = max(_bytes_of(route.tensors(rank)) for rank in route.ranks)
    window = _windows.get((key, route.channel))
    if window is None or window.size < size:
        window = _opened(group, size, 1 + route.ahead, device)
        if window is None:
            _one_host[key] = False
            return None
        _windows[key, route.channel] = window
    return window


class Window:
    """Memory on every rank of a group that all of them can write to: of each as many bytes, `size`, for each of
    `buffers` deliveries. Before it are two counters for each rank: up to which delivery this rank's memory may be
    written to, and up to which its messages are there."""

    def __init__(self, group: Group, size: int, buffers: int, device: torch.device):
        import torch.distributed._symmetric_memory as symmetric_memory

        self.group, self.size, self.buffers, self.device = group, size, buffers, device
        self.begin = _aligned(2 * 4 * group.size)
        self.memory = symmetric_memory.empty(self.begin + buffers * size, dtype=torch.uint8, device=device)
        self.handle: Any = symmetric_memory.rendezvous(self.memory, group.process_group)
        self.addresses: list[int] = list(self.handle.buffer_ptrs)
        self.memory[: self.begin].zero_()
        self.stream = torch.cuda.Stream(device)
        self.count = 0  # of deliveries

    def deliver(self, route: Route, sends: Tensors) -> Delivery:
        """As Group.deliver."""
        me, size = self.group.rank, self.group.size
        self.count += 1
        here = self._tensors(me, route.tensors(me))
        others = [(me + i) % size for i in range(1, size)]
        senders = [rank for rank in others if any(x.numel() for x in route.places(me, rank, here))]
        for place, x in zip(route.places(me, me, here), sends.get(me, ()), strict=True):
            place.copy_(x)
        # What this rank's buffer held before has been read when this stream gets here.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        self._write([self._may_write(at=rank, whose=me) for rank in senders])
        with torch.cuda.stream(self.stream):
            for rank in others:
                messages = [x for x in sends.get(rank, ()) if x.numel()]
                if not messages:
                    continue
                there = route.places(rank, me, self._tensors(rank, route.tensors(rank)))
                self._wait(self.stream, [self._may_write(at=me, whose=rank)])
                for place, x in zip((x for x in there if x.numel()), messages, strict=True):
                    _copy(place, x)
                self._write([self._is_there(at=rank, whose=me)])
            gone = self.stream.record_event()
        awaited = [self._is_there(at=me, whose=rank) for rank in senders]

        def until_all_came(sends: Any = sends) -> None:  # which has to outlive the sending
            current = torch.cuda.current_stream(self.device)
            current.wait_event(gone)
            self._wait(current, awaited)

        return Delivery(here, until_all_came, lasts=False)

    def _tensors(self, rank: int, specs: Sequence[Spec]) -> list[Tensor]:
        """The tensors of a rank in its memory for this delivery."""
        found, begin = [], self.begin + self.count % self.buffers * self.size
        for shape, dtype in specs:
            found.append(self.handle.get_buffer(rank, shape, dtype, begin // dtype.itemsize))
            begin += _aligned(shape.numel() * dtype.itemsize)
        return found

    def _may_write(self, at: int, whose: int) -> int:
        """The address of the counter of rank `at` which says that the memory of rank `whose` may be written to."""
        return self.addresses[at] + 4 * whose

    def _is_there(self, at: int, whose: int) -> int:
        """Of that which says that the messages of rank `whose` are there."""
        return self.addresses[at] + 4 * (self.group.size + whose)

    def _write(self, counters: list[int]) -> None:
        _C.write_counters(counters, self.count & 0xFFFFFFFF, self.device.index, self.stream.cuda_stream)

    def _wait(self, stream: torch.cuda.Stream, counters: list[int]) -> None:
        _C.wait_for_counters(counters, self.count & 0xFFFFFFFF, self.device.index, stream.cuda_stream)


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


def _bytes_of(specs: Sequence[Spec]) -> int:
    return sum(_aligned(shape.numel() * dtype.itemsize) for shape, dtype in specs)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
