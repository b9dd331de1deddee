"""How time is taken: every contestant runs once in every round, so a clock that drifts drifts for all of them."""

from __future__ import annotations

import dataclasses
import functools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from flashtile.bench.peers import Contestant

WARM_UP_CALLS = 3
HOST_BATCH = 50  # calls between two synchronisations; the CUDA launch queue holds about a thousand


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long one cell may take, and how many rounds it takes at least and at most."""

    seconds: float
    min_rounds: int
    max_rounds: int
    head_start: int = 0  # cycles for which a GPU waits before each round

    def rounds(self, seconds_per_round: float) -> int:
        wanted = int(self.seconds / max(seconds_per_round, 1e-9))
        return max(self.min_rounds, min(wanted, self.max_rounds))


CUDA_EFFORT = Effort(seconds=1.5, min_rounds=10, max_rounds=100)
# A small decode takes less time than its launch. A millisecond ahead, the host stays ahead of all contestants.
DECODE_EFFORT = Effort(seconds=1.0, min_rounds=10, max_rounds=100, head_start=2_500_000)
# Of suite random, whose cells are many. As graphs the host is to stay ahead too.
DRAWN_EFFORT = Effort(seconds=0.3, min_rounds=7, max_rounds=40)
GRAPH_EFFORT = Effort(seconds=0.1, min_rounds=10, max_rounds=40, head_start=1_000_000)
CPU_EFFORT = Effort(seconds=4.0, min_rounds=7, max_rounds=50)
HOST_EFFORT = Effort(seconds=2.0, min_rounds=20, max_rounds=100)
DEMO_CPU_EFFORT = Effort(seconds=1.5, min_rounds=5, max_rounds=30)
QUICK_EFFORT = Effort(seconds=0.2, min_rounds=3, max_rounds=5)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of all rounds, and the 20th and 80th percentiles as its spread."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        fifths = statistics.quantiles(seconds, n=5, method="inclusive")
        return cls(statistics.median(seconds), fifths[0], fifths[-1], len(seconds))


def time_device(contestants: Sequence[Contestant], device: torch.device, effort: Effort) -> list[Timing]:
    """Time of one call on its device, in the order of `contestants`."""
    timer = functools.partial(_time_cuda, head_start=effort.head_start) if device.type == "cuda" else _time_cpu
    seconds_per_round = timer(contestants, WARM_UP_CALLS, device)[-1]
    samples = timer(contestants, effort.rounds(sum(seconds_per_round)), device)
    return [Timing.of(column) for column in zip(*samples, strict=True)]


def time_host(contestants: Sequence[Contestant], device: torch.device, effort: Effort) -> list[Timing]:
    """Time until a call returns, the device still at work: the mean of a batch is one sample."""
    synchronize = _synchronizer(device)

    def one_round() -> list[float]:
        row = []
        for contestant in contestants:
            with contestant.setting():
                synchronize()
                start = time.perf_counter()
                for _ in range(HOST_BATCH):
                    contestant.call()
                row.append((time.perf_counter() - start) / HOST_BATCH)
        synchronize()
        return row

    warm_up = [one_round() for _ in range(WARM_UP_CALLS)]
    samples = [one_round() for _ in range(effort.rounds(sum(warm_up[-1]) * HOST_BATCH))]
    return [Timing.of(column) for column in zip(*samples, strict=True)]


def _time_cuda(
    contestants: Sequence[Contestant], rounds: int, device: torch.device, head_start: int
) -> list[list[float]]:
    """Rounds × contestants in seconds. Work is queued without waiting, so that the host is always ahead."""
    # Writing twice the L2 cache leaves none of the inputs in it.
    eviction = torch.empty(2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.int8, device=device)
    events = [[_Events() for _ in contestants] for _ in range(rounds)]
    for row, order in zip(events, orders(len(contestants)), strict=False):
        if head_start:
            torch.cuda._sleep(head_start)
        for position in order:
            with contestants[position].setting():
                eviction.zero_()
                row[position].start.record()
                contestants[position].call()
                row[position].end.record()
    torch.cuda.synchronize(device)
    return [[pair.seconds() for pair in row] for row in events]


def _time_cpu(contestants: Sequence[Contestant], rounds: int, device: torch.device) -> list[list[float]]:
    samples = [[0.0] * len(contestants) for _ in range(rounds)]
    for row, order in zip(samples, orders(len(contestants)), strict=False):
        for position in order:
            with contestants[position].setting():
                start = time.perf_counter()
                contestants[position].call()
                row[position] = time.perf_counter() - start
    return samples


class _Events:
    def __init__(self) -> None:
        self.start = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)

    def seconds(self) -> float:
        return self.start.elapsed_time(self.end) / 1e3


def orders(count: int) -> Iterator[list[int]]:
    """Who goes in which order, round by round: mixed, so that nobody always follows the same neighbour, whose heat and
    whose code in the caches it would find; and never itself."""
    generator = random.Random(0)
    last = None
    while True:
        order = generator.sample(range(count), count)
        if count > 1 and order[0] == last:
            order.reverse()
        last = order[-1]
        yield order


def _synchronizer(device: torch.device) -> Callable[[], None]:
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None
