"""Runs a suite: checks every contestant, then times those that are right."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from flashtile.bench.cases import Case, Inputs, Work, make_inputs
from flashtile.bench.decode import OURS_ALL, cache_peers_of
from flashtile.bench.oracle import GRADIENTS, Oracle, Verdict, results
from flashtile.bench.peers import OURS, Contestant, Peer, contestant, host_contestants, peers_of
from flashtile.bench.ragged import ragged_peers_of
from flashtile.bench.timing import Effort, Timing, time_device, time_host


@dataclasses.dataclass(frozen=True)
class Entry:
    """What one contestant did in one cell: its time, or why there is none."""

    name: str
    timing: Timing | None = None
    verdicts: Sequence[Verdict] = ()
    refusal: str = ""

    @property
    def wrong(self) -> bool:
        return not all(verdict.ok for verdict in self.verdicts)


@dataclasses.dataclass(frozen=True)
class Cell:
    case: Case
    entries: Sequence[Entry]

    def ratios(self) -> dict[str, float]:
        """Each peer's time over flashtile's: above 1, flashtile is faster."""
        times = {entry.name: entry.timing.median for entry in self.entries if entry.timing}
        ours = times.pop(OURS, None)
        return {} if ours is None else {name: theirs / ours for name, theirs in times.items()}


def run_cases(
    cases: Sequence[Case],
    device: torch.device,
    effort: Effort,
    attention: Callable[..., torch.Tensor],
    further: Sequence[Peer] = (),
) -> Iterator[Cell]:
    """Yields one cell per case, as it is done; `further` peers run beside the usual ones. Of ragged cases `attention`
    is attention_varlen, of those over a cache attention_kvcache."""
    for case in cases:
        inputs = make_inputs(case, device)
        if case.over_a_cache:
            usual = cache_peers_of(device.type, attention, case)
        elif case.lengths is None:
            usual = peers_of(device.type, attention)
        else:
            usual = ragged_peers_of(device.type, attention, case)
        yield Cell(case, run_cell([*usual, *further], inputs, case, effort))


def run_host_cases(
    cases: Sequence[Case], device: torch.device, effort: Effort, attention: Callable[..., torch.Tensor]
) -> Iterator[Cell]:
    for case in cases:
        contestants = host_contestants(attention, make_inputs(case, device), case)
        timings = time_host(contestants, device, effort)
        entries = [Entry(who.name, timing) for who, timing in zip(contestants, timings, strict=True)]
        yield Cell(case, entries)


def summary(cells: Sequence[Cell]) -> dict[str, dict[str, float]]:
    """Geometric mean and minimum of the ratio to each peer, over the cells that have one."""
    columns: dict[str, list[float]] = {}
    for cell in cells:
        for name, ratio in cell.ratios().items():
            columns.setdefault(name, []).append(ratio)
    return {name: totals(column) for name, column in columns.items()}


def against_the_best(cells: Sequence[Cell], besides: Collection[str] = ()) -> dict[str, float] | None:
    """The same numbers against each cell's fastest peer, but not `besides`; None where no cell has two that were
    timed."""
    ratios = [[ratio for name, ratio in cell.ratios().items() if name not in besides] for cell in cells]
    if max(map(len, ratios), default=0) < 2:
        return None
    return totals([min(row) for row in ratios if row])


def totals(ratios: Sequence[float]) -> dict[str, float]:
    return {"geomean": math.exp(sum(map(math.log, ratios)) / len(ratios)), "min": min(ratios), "cells": len(ratios)}


def run_cell(peers: Sequence[Peer], inputs: Inputs, case: Case, effort: Effort) -> list[Entry]:
    """Checks `peers`, then times those that are right; one entry each, in their order."""
    judge = _Judge(inputs, case)
    entries: dict[str, Entry] = {}
    ready: list[Contestant] = []
    for peer in peers:
        try:
            with peer.setting():
                found = results(peer.attention, inputs, case, gradients=case.work is Work.BACKWARD)
        except RuntimeError as refusal:
            # What a kernel does not serve it refuses with a RuntimeError, flashtile with the subclass below.
            if peer.name in OURS_ALL and not isinstance(refusal, NotImplementedError):
                raise
            reason = str(refusal).strip() or type(refusal).__name__
            entries[peer.name] = Entry(peer.name, refusal=reason.splitlines()[0])
            continue
        entry = Entry(peer.name, verdicts=judge(found))
        entries[peer.name] = entry
        if not entry.wrong:
            ready.append(contestant(peer, inputs, case))
    if ready:
        for who, timing in zip(ready, time_device(ready, inputs.q.device, effort), strict=True):
            entries[who.name] = dataclasses.replace(entries[who.name], timing=timing)
    return list(entries.values())


class _Judge:
    """Knows float64's results of one KV head: of a batch's last entry, or of every sequence of a ragged batch. These
    are judged one by one, for a short one's errors would hide a long one's, and need memory for the longest alone."""

    def __init__(self, inputs: Inputs, case: Case) -> None:
        self._group = case.heads_q // case.heads_k
        problems = [(case, None)] if case.lengths is None else case.sequences()
        self._oracles = [
            (
                rows,
                Oracle(
                    Inputs(*(_rows_of(tensor, rows) for tensor in inputs)).one_kv_head(),
                    dataclasses.replace(problem, batch=1, heads_q=self._group, heads_k=1),
                    gradients=case.work is Work.BACKWARD,
                ),
            )
            for problem, rows in problems
        ]

    def __call__(self, found: dict[str, torch.Tensor]) -> list[Verdict]:
        """One verdict for each tensor in `found`: the worst."""
        verdicts = [
            oracle.judge(_one_kv_head({name: _rows_of(tensor, rows) for name, tensor in found.items()}, self._group))
            for rows, oracle in self._oracles
        ]
        return [max(of_tensor, key=_badness) for of_tensor in zip(*verdicts, strict=True)]


def _badness(verdict: Verdict) -> tuple[bool, float]:
    return not verdict.ok, verdict.error / verdict.allowed if verdict.allowed else 0.0


def _rows_of(tensor: torch.Tensor, rows: slice | None) -> torch.Tensor:
    """A sequence's part of a ragged tensor, as a dense batch of one."""
    return tensor if rows is None else tensor[rows].unsqueeze(0)


def _one_kv_head(found: dict[str, torch.Tensor], group: int) -> dict[str, torch.Tensor]:
    """The part of each result that belongs to the problem of Inputs.one_kv_head."""
    heads = {name: 1 if name in GRADIENTS[1:] else group for name in found}
    return {name: tensor[-1:, :, -heads[name] :] for name, tensor in found.items()}
