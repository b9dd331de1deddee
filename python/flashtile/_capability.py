"""Which kernels a GPU gets: those of its own compute capability, unless a test or the ladder asks for older ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from . import _C

_limit = 1000  # none


def limit(capability: int) -> None:
    """From now on GPUs get no kernels above this compute capability, such as 80."""
    global _limit
    _limit = capability
    _C._limit_compute_capability(capability)


def of_device(device: torch.device | str | int | None = None) -> int:
    """That of a GPU, by default the current one, or the limit; 0 where there is none."""
    if not torch.cuda.is_available():
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return min(10 * major + minor, _limit)


@contextlib.contextmanager
def limited(capability: int) -> Iterator[None]:
    """The same for a while. The limit is the process's, so no other thread should call flashtile meanwhile."""
    before = _limit
    limit(min(before, capability))
    try:
        yield
    finally:
        limit(before)
