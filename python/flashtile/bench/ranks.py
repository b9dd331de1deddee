"""Suite distributed: attention over a sequence that lies on several ranks, beside one device with all of it.

    torchrun --nproc-per-node 4 --no-python flashtile bench --suite distributed

By itself, without torchrun, it times what one rank of four computes, with messages that arrive at once: what its
kernels, and what sums up their results, lose by being called for parts of the sequence.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

import flashtile
from flashtile import distributed
from flashtile.bench import machine, report
from flashtile.bench.rank_peers import RankPeer, rank_peers
from flashtile.bench.timing import orders
from flashtile.distributed._exchange import Group
from flashtile.distributed._pairs import Band, calls_of, visible
from flashtile.distributed._prepare import share_of
from flashtile.distributed._route import Delivery, Route
from flashtile.distributed._share import Attend
from flashtile.distributed.layout import Layout

ROUNDS, FEWEST_ROUNDS, ENOUGH = 25, 5, 0.5  # as many as fit into so many seconds, within these bounds
ROUND, MOST_CALLS = 0.02, 20  # a round is of calls one behind the other, as layers are, for so many seconds
HEAD_START = 4_000_000  # cycles for which a GPU waits before each round
LONG = 1.0  # seconds of a call that is timed once
LONGEST_WITH_PEERS = 1 << 17  # rows of all ranks
MOST_ROWS_ALONE = 1 << 14  # of a rank
SHARERS = 4  # ranks, where there is one process
METHODS = ("ring", "all_gather", "ulysses", "ulysses_ring")
WORKS = ("forward", "forward and backward")

Run = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Case:
    rows: int  # of each rank, or with `is_whole` of all ranks together
    heads_q: int
    heads_k: int
    head_dim: int
    options: tuple[tuple[str, Any], ...] = (("causal", True),)
    documents: int = 1  # so many, of lengths that differ
    is_whole: bool = False
    layout: str = "zigzag"

    def name(self, ranks: int) -> str:
        what = " ".join(name if value is True else f"{name} {value}" for name, value in self.options) or "full"
        documents = f" {self.documents} documents" if self.documents > 1 else ""
        layout = "" if self.layout == "zigzag" else f" {self.layout}"
        rows = ranks * self.rows_of_rank(ranks)
        return f"S{rows} H{self.heads_q}/{self.heads_k} D{self.head_dim} {what}{documents}{layout}"

    def rows_of_rank(self, ranks: int) -> int:
        return self.rows // ranks if self.is_whole else self.rows

    def begins(self, ranks: int) -> tuple[int, ...]:
        """Where documents begin: their lengths are as 1, 2, 3, …"""
        total = ranks * self.rows_of_rank(ranks)
        weights = range(1, self.documents + 1)
        return tuple(total * sum(weights[:n]) // sum(weights) for n in range(self.documents + 1))


WINDOWED = (("causal", True), ("window", (4096, None)))
CASES = (
    Case(16384, 32, 8, 128),
    Case(16384, 32, 32, 64),
    Case(16384, 16, 16, 128),
    Case(16384, 8, 8, 256),
    Case(16384, 32, 8, 128, ()),
    Case(16384, 32, 8, 128, WINDOWED),
    Case(16384, 32, 8, 128, WINDOWED, layout="contiguous"),
    Case(16384, 32, 8, 128, documents=12),
    *(Case(rows << 10, 32, 8, 128, documents=n, is_whole=True) for n in (12, 1) for rows in (64, 128, 256, 512)),
)
QUICK = (
    Case(64, 4, 2, 64),
    Case(64, 4, 2, 64, documents=3),
    Case(64, 4, 2, 64, (("causal", True), ("window", (16, None))), layout="contiguous"),
)


def measure(*, quick: bool = False, json_path: Path | None = None) -> int:
    """Runs the suite on the ranks that torchrun has started, or by itself, and returns the exit status."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else None
    if device is not None:
        torch.cuda.set_device(device)
    if size > 1:
        dist.init_process_group("nccl" if device is not None else "gloo")
    try:
        return _measure(QUICK if quick else CASES, size, device or torch.device("cpu"), json_path)
    finally:
        if size > 1:
            dist.destroy_process_group()


def _measure(cases: Sequence[Case], size: int, device: torch.device, json_path: Path | None) -> int:
    cells: list[dict[str, Any]] = []
    record = {
        "format": report.FORMAT, "suite": "distributed", "ranks": size, "machine": machine.describe(device),
        "cells": cells,
    }  # fmt: skip
    if size == 1:
        cases = [case for case in cases if case.rows_of_rank(SHARERS) <= MOST_ROWS_ALONE]
    speaks = size == 1 or dist.get_rank() == 0
    for case in cases:
        run = _Together(case, size, device) if size > 1 else _Alone(case, device)
        cells.append({"name": case.name(size if size > 1 else SHARERS), "seconds": run.seconds()})
        del run
        if json_path and speaks:  # after each case, so that a run that is cut short leaves what it has
            report.write(json_path, record)
    if speaks:
        Console(width=240).print(_table(record))
    return 0


def markdown(record: dict[str, Any], picture: str | None = None) -> str:
    """For a page, as report.markdown."""
    grid = _Grid(record)
    drawn = [f"![{grid.title}]({picture})"] if picture else []
    said = f"{grid.title}: ms of a call, and in brackets how much of the ideal that is. {report.source(record)}; calls "
    said += "that follow each other, as layers do."
    return "\n\n".join(["## Suite distributed", said, *drawn, report.markdown_table(grid.header, grid.rows, words=2)])


def _table(record: Mapping[str, Any]) -> Table:
    """For the terminal."""
    grid = _Grid(record)
    table = Table(title=grid.title)
    for i, column in enumerate(grid.header):
        table.add_column(column, justify="left" if i < 2 else "right")
    for row in grid.rows:
        table.add_row(*row)
    return table


class _Grid:
    """Milliseconds, and how much of the ideal that is: what one device takes for all of it, divided by the ranks."""

    def __init__(self, record: Mapping[str, Any]):
        ranks = record["ranks"]
        what = f"{ranks} ranks" if ranks > 1 else f"one rank of {SHARERS}, without messages"
        self.title = f"suite distributed, {what}, {record['machine']['device']}"
        names = list(dict.fromkeys(name for cell in record["cells"] for name in cell["seconds"]))
        self.header = ["case", "work", *names]
        self.rows = [
            [cell["name"], work, *(self._text(cell["seconds"], name, work) for name in names)]
            for cell in record["cells"]
            for work in WORKS
        ]

    @staticmethod
    def _text(seconds: Mapping[str, Mapping[str, float]], name: str, work: str) -> str:
        found = seconds.get(name, {}).get(work)
        if found is None:
            return "—"
        return f"{1e3 * found:.3g}" + (f" ({seconds['ideal'][work] / found:.2f})" if name != "ideal" else "")


@dataclasses.dataclass
class _Rounds:
    """Those of one work of a call: the seconds of a call in each so far, and how many of how many calls are left."""

    run: Run
    seconds: list[float]
    calls: int = 1
    left: int = 0


class _Run:
    """One case: calls by name, forward and with gradients."""

    def __init__(self, case: Case, ranks: int, device: torch.device):
        self.case, self.ranks, self.device = case, ranks, device
        self.rows = case.rows_of_rank(ranks)

    def tensors(self, rows: int) -> tuple[list[Tensor], Tensor]:
        case = self.case
        q, k, v = (
            torch.randn(1, rows, heads, case.head_dim, device=self.device, dtype=torch.bfloat16, requires_grad=True)
            for heads in (case.heads_q, case.heads_k, case.heads_k)
        )
        return [q, k, v], torch.randn_like(q)

    def whole(self, leaves: list[Tensor]) -> Tensor:
        """Of all rows, on one device."""
        options = dict(self.case.options)
        if self.case.documents == 1:
            return flashtile.attention(*leaves, **options)
        begins = torch.tensor(self.case.begins(self.ranks), dtype=torch.int32, device=self.device)
        flat = [x.squeeze(0) for x in leaves]
        return flashtile.attention_varlen(*flat, cu_seqlens_q=begins, cu_seqlens_k=begins, **options)[None]

    def works(self, call: Callable[[list[Tensor]], Tensor], leaves: list[Tensor], dout: Tensor) -> dict[str, Run]:
        def forward() -> None:
            with torch.no_grad():
                call(leaves)

        def both() -> None:
            torch.autograd.grad(call(leaves), leaves, dout)

        return dict(zip(WORKS, (forward, both), strict=True))

    def timed(self, calls: Mapping[str, Mapping[str, Run]]) -> dict[str, dict[str, float]]:
        """Seconds of each work of each call: the median of a few rounds, of each the time of the rank that takes
        longest. Calls take turns, round by round: a GPU slows down within some tens of milliseconds of full work, and
        what runs first would look quicker than what it is compared with."""
        found = {name: {work: self._rounds(run) for work, run in works.items()} for name, works in calls.items()}
        of_works = [x for works in found.values() for x in works.values()]
        order = orders(len(of_works))  # the same on all ranks
        while any(x.left for x in of_works):
            for x in (of_works[position] for position in next(order)):
                if x.left:
                    x.seconds.append(self._round(x.run, x.calls))
                    x.left -= 1
        return {
            name: {work: statistics.median(x.seconds) for work, x in works.items()} for name, works in found.items()
        }

    def _rounds(self, run: Run) -> _Rounds:
        run()
        one = self._round(run, 1)  # the same on all ranks, as what follows from it
        if one > LONG:
            return _Rounds(run, [one])
        calls = min(max(round(ROUND / one), 1), MOST_CALLS)
        return _Rounds(run, [], calls, min(max(round(ENOUGH / (calls * one)), FEWEST_ROUNDS), ROUNDS))

    def _round(self, run: Run, calls: int) -> float:
        is_cuda = self.device.type == "cuda"
        if is_cuda:
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()
        if is_cuda:
            torch.cuda._sleep(HEAD_START)  # so that the host is ahead, as it is in the middle of a model
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        if is_cuda:
            end.record()
            end.synchronize()
            took = begin.elapsed_time(end) / 1e3
        else:
            took = time.perf_counter() - start
        seconds = torch.tensor(took / calls, dtype=torch.float64, device=self.device)
        if dist.is_initialized():
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()


class _Together(_Run):
    """On the ranks of torchrun."""

    def seconds(self) -> dict[str, dict[str, float]]:
        works = {"ideal": self.works(self.whole, *self.tensors(self.ranks * self.rows))}
        leaves, dout = self.tensors(self.rows)
        for method in (*METHODS, "auto"):
            if method == "ulysses_ring" and (self.ranks % 2 or self.ranks == 2):
                continue
            degree = 2 if method == "ulysses_ring" else None
            call = functools.partial(self._call, method=method, degree=degree)
            works[method] = self.works(call, leaves, dout)
        found = self.timed(works)
        found["ideal"] = {work: x / self.ranks for work, x in found["ideal"].items()}
        is_causal = self.case.documents == 1 and self.case.options == (("causal", True),)
        if is_causal and self.ranks * self.rows <= LONGEST_WITH_PEERS:
            for peer in rank_peers(self.device):
                with peer.setting():
                    self._require_same(peer, leaves, dout)
                    found |= self.timed({peer.name: self.works(peer.call, leaves, dout)})
        return found

    def _require_same(self, peer: RankPeer, leaves: list[Tensor], dout: Tensor) -> None:
        """A peer that computes something else is not timed."""
        ours, theirs = (
            (out, *torch.autograd.grad(out, leaves, dout))
            for out in (self._call(leaves, "ring", None), peer.call(leaves))
        )
        for what, x, y in zip(("out", "dq", "dk", "dv"), ours, theirs, strict=True):
            difference = ((x - y).float().norm() / x.float().norm()).item()
            if not difference < 0.02:
                raise AssertionError(f"{what} of {peer.name} is another than flashtile's by {difference:.2g}")

    def _call(self, leaves: list[Tensor], method: str, degree: int | None) -> Tensor:
        case = self.case
        options: dict[str, Any] = dict(case.options, layout=case.layout, method=method, ulysses_degree=degree)
        if self.case.documents == 1:
            out: Any = distributed.attention(*leaves, **options)
            return out
        begins, flat = self.case.begins(self.ranks), [x.squeeze(0) for x in leaves]
        of_rows: Any = distributed.attention_varlen(*flat, cu_seqlens_q=begins, cu_seqlens_k=begins, **options)
        return of_rows[None]


class _Alone(_Run):
    """Each of a few ranks in turn, with a group whose messages arrive at once and hold anything. The seconds of a rank
    are those that it would take for the mean of all ranks' work: a window leaves less to the first rows than to others.
    """

    def __init__(self, case: Case, device: torch.device):
        super().__init__(case, SHARERS, device)

    def seconds(self) -> dict[str, dict[str, float]]:
        works = {"ideal": self.works(self.whole, *self.tensors(self.ranks * self.rows))}
        (leaves, dout), methods = self.tensors(self.rows), ("ring", "all_gather")
        for method in methods:
            for rank, call in enumerate(self._calls(method, leaves)):
                works[f"{method} {rank}"] = self.works(call, leaves, dout)
        timed, parts = self.timed(works), self._parts()
        found = {"ideal": {work: x / self.ranks for work, x in timed["ideal"].items()}}
        for method in methods:
            found[method] = {
                work: max(timed[f"{method} {rank}"][work] / part for rank, part in enumerate(parts)) for work in WORKS
            }
        return found

    def _parts(self) -> list[float]:
        """How many pairs of a query and a key that it sees each rank has, as multiples of their mean."""
        length, options = self.ranks * self.rows, dict(self.case.options)
        documents = None if self.case.documents == 1 else self.case.begins(self.ranks)
        band = Band.of(options.get("causal", False), options.get("window"))
        pairs = [
            sum(map(visible, calls_of(rows, ((0, length),), band, documents)))
            for rows in Layout.of(self.case.layout, length, self.ranks).runs
        ]
        return [x * self.ranks / sum(pairs) for x in pairs]

    def _calls(self, method: str, leaves: list[Tensor]) -> Iterator[Callable[[list[Tensor]], Tensor]]:
        documents = None if self.case.documents == 1 else self.case.begins(self.ranks)
        for rank in range(self.ranks):
            share = share_of(
                _Nobody(rank, self.ranks), leaves, self.case.layout, method, documents, dict(self.case.options)
            )
            yield lambda x, share=share: Attend.apply(*x, None, share)[0]  # type: ignore[misc]


class _Nobody(Group):
    """A group of which the caller is a rank, and the others are not there: what comes from them is random."""

    def __init__(self, place: int, count: int):
        super().__init__()
        self.rank, self.size = place, count

    def deliver(self, route: Route, sends: Any, device: torch.device) -> Delivery:
        # Whoever gets gradients may write to them, so keys are others, however many: sums of sums would become them.
        tensors = [
            _numbers(route.channel, device, dtype, shape.numel()).view(shape)
            for shape, dtype in route.tensors[self.rank]
        ]
        for place, x in zip(route.places(self.rank, self.rank, tensors), sends.get(self.rank, ()), strict=True):
            place.copy_(x)
        return Delivery(tensors, lambda: None)


@functools.cache
def _numbers(channel: str, device: torch.device, dtype: torch.dtype, count: int) -> Tensor:
    return torch.randn(count, device=device, dtype=dtype)
