"""Runs a suite: checks every contestant, then measures those that are right."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from flashtile.bench import memory
from flashtile.bench.cases import Case, Inputs, Work, make_inputs
from flashtile.bench.decode import OURS_ALL, cache_peers_of
from flashtile.bench.fp8 import fp8_peers_of, numbers_of
from flashtile.bench.graphs import OwnStream, captured
from flashtile.bench.masked import masked_peers_of
from flashtile.bench.oracle import GRADIENTS, Oracle, RoundedInputsOracle, RoundedOracle, Verdict, results
from flashtile.bench.peers import OURS, Contestant, Peer, Rounding, contestant, host_contestants, peers_of
from flashtile.bench.profile import Profiler
from flashtile.bench.ragged import ragged_peers_of
from flashtile.bench.rivals import explained, rivals_of
from flashtile.bench.serving import serving_peers_of
from flashtile.bench.timing import GRAPH_EFFORT, Effort, Timing, time_device, time_host

Result = dict[str, Any]  # fields of an Entry
Measure = Callable[[Sequence[Contestant], Case], list[Result]]
Usual = Callable[[str, Callable[..., torch.Tensor], Case], list[Peer]]  # peers by device, attention and case
GRAPH_BELOW = 1e-3  # seconds of flashtile's call, up to which it is timed as a graph too


@dataclasses.dataclass(frozen=True)
class Entry:
    """What one contestant did in one cell: its time or its bytes, or why there are none."""

    name: str
    timing: Timing | None = None
    peak_bytes: int | None = None
    verdicts: Sequence[Verdict] = ()
    refusal: str = ""
    graph: Timing | None = None  # of the same call as a CUDA graph
    graph_refusal: str = ""

    @property
    def wrong(self) -> bool:
        return not all(verdict.ok for verdict in self.verdicts)

    @property
    def cost(self) -> float | None:
        """The seconds of a call, or its bytes; None where neither was measured."""
        return self.timing.median if self.timing else self.peak_bytes


@dataclasses.dataclass(frozen=True)
class Cell:
    case: Case
    entries: Sequence[Entry]
    plan: str = ""  # what flashtile.explain says of it

    def ratios(self) -> dict[str, float]:
        """Each peer's time or bytes over flashtile's: above 1, flashtile takes less."""
        return _over_ours({entry.name: entry.cost for entry in self.entries})

    def graph_ratios(self) -> dict[str, float]:
        """The same of times as graphs."""
        return _over_ours({entry.name: entry.graph.median if entry.graph else None for entry in self.entries})


def _over_ours(costs: dict[str, float | None]) -> dict[str, float]:
    ours = costs.pop(OURS, None)
    return {} if ours is None else {name: theirs / ours for name, theirs in costs.items() if theirs is not None}


def usual_peers(device_type: str, attention: Callable[..., torch.Tensor], case: Case) -> list[Peer]:
    """Those of all suites but random."""
    if case.work in (Work.TREE, Work.CASCADE, Work.MIXED):
        return serving_peers_of(device_type, attention, case)
    if case.over_a_cache:
        return cache_peers_of(device_type, attention, case)
    if case.work is Work.FP8:
        return fp8_peers_of(device_type, attention, case)
    if case.columns:
        return masked_peers_of(attention, case)
    if case.lengths is None:
        return peers_of(device_type, attention)
    return ragged_peers_of(device_type, attention, case)


def run_cases(
    cases: Sequence[Case],
    device: torch.device,
    effort: Effort,
    attention: Callable[..., torch.Tensor],
    further: Sequence[Peer] = (),
    usual: Usual = usual_peers,
) -> Iterator[Cell]:
    """Yields one cell per case, as it is done; `further` peers run beside the usual ones. Of ragged cases `attention`
    is attention_varlen, of those over a cache attention_kvcache, unless `usual` says otherwise."""
    return _run(cases, device, attention, further, by_time(device, effort), usual)


def by_time(device: torch.device, effort: Effort) -> Measure:
    def measure(contestants: Sequence[Contestant], case: Case) -> list[Result]:
        return [{"timing": timing} for timing in time_device(contestants, device, effort)]

    return measure


def run_drawn_cases(
    cases: Sequence[Case],
    device: torch.device,
    effort: Effort,
    attention: Callable[..., torch.Tensor],
    further: Sequence[Peer] = (),
) -> Iterator[Cell]:
    """The same of cases of any kind, of which `attention` is `attention_of_any`, with flashtile's plan; small ones are
    timed as CUDA graphs too."""
    own_stream = OwnStream(device)
    for case in cases:
        with own_stream():
            inputs = make_inputs(case, device)
            peers = [*rivals_of(device.type, attention, case), *further]
            entries = run_cell(peers, inputs, case, by_time_and_graph(device, effort))
            plan = explained(case, *inputs[:3])
        yield Cell(case, entries, plan)


def by_time_and_graph(device: torch.device, effort: Effort) -> Measure:
    by_call = by_time(device, effort)

    def measure(contestants: Sequence[Contestant], case: Case) -> list[Result]:
        measured = by_call(contestants, case)
        found = {who.name: result for who, result in zip(contestants, measured, strict=True)}
        if device.type == "cuda" and OURS in found and found[OURS]["timing"].median < GRAPH_BELOW:
            replays, refusals = captured(contestants, case)
            for who, timing in zip(replays, time_device(replays, device, GRAPH_EFFORT), strict=True):
                found[who.name]["graph"] = timing
            for name, reason in refusals.items():
                found[name]["graph_refusal"] = reason
        return measured

    return measure


def run_memory_cases(
    cases: Sequence[Case],
    device: torch.device,
    attention: Callable[..., torch.Tensor],
    further: Sequence[Peer] = (),
) -> Iterator[Cell]:
    """The same, with bytes in place of times, and beside the contestants what the contract's formula says."""

    def measure(contestants: Sequence[Contestant], case: Case) -> list[Result]:
        return [{"peak_bytes": peak} for peak in memory.peaks(contestants, device)]

    for cell in _run(cases, device, attention, further, measure):
        formula = Entry(memory.FORMULA, peak_bytes=memory.formula_bytes(cell.case))
        yield Cell(cell.case, [*cell.entries, formula])


def run_profiled_cases(
    cases: Sequence[Case],
    device: torch.device,
    profiler: Profiler,
    attention: Callable[..., torch.Tensor],
    further: Sequence[Peer] = (),
    usual: Usual = usual_peers,
) -> Iterator[Cell]:
    """The same, with tables of what calls consist of, printed as they are done, in place of times. `usual` says who
    runs beside the further ones."""

    def measure(contestants: Sequence[Contestant], case: Case) -> list[Result]:
        profiler(contestants, case, device)
        return [{} for _ in contestants]

    return _run(cases, device, attention, further, measure, usual)


def _run(
    cases: Sequence[Case],
    device: torch.device,
    attention: Callable[..., torch.Tensor],
    further: Sequence[Peer],
    measure: Measure,
    usual: Usual = usual_peers,
) -> Iterator[Cell]:
    for case in cases:
        inputs = make_inputs(case, device)
        peers = [*usual(device.type, attention, case), *further]
        yield Cell(case, run_cell(peers, inputs, case, measure))


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


def run_cell(peers: Sequence[Peer], inputs: Inputs, case: Case, measure: Measure) -> list[Entry]:
    """Checks `peers`, then measures those that are right; one entry each, in their order."""
    judges: dict[tuple[Case, Rounding | None, bool], _Judge] = {}
    entries: dict[str, Entry] = {}
    ready: list[Contestant] = []
    for peer in peers:
        asked = peer.asked(case) if peer.asked else case
        # With dropout everyone drops weights of their own: what is judged is the case without, so that all agree.
        judged = dataclasses.replace(asked, dropout_p=0.0) if asked.dropout_p else asked
        by = judged, peer.rounding, peer.by_inputs
        if by not in judges:
            judges[by] = _Judge(inputs, *by)
        try:
            with peer.setting():
                found = results(peer.attention, peer.laid_out(inputs), judged, gradients=case.work is Work.BACKWARD)
                if asked is not judged:  # whether it is served at all
                    results(peer.attention, peer.laid_out(inputs), asked, gradients=case.work is Work.BACKWARD)
            entry = Entry(peer.name, verdicts=judges[by](found))
            if not entry.wrong:
                ready.append(contestant(peer, inputs, asked))
        except Exception as refusal:
            # A peer may refuse, or fail, in any way; what flashtile does not serve it refuses with the first of these,
            # and for its further forms, which have caches of their own, a GPU may be too small.
            may = (NotImplementedError,) if peer.name == OURS else (NotImplementedError, torch.OutOfMemoryError)
            if peer.name in OURS_ALL and not isinstance(refusal, may):
                raise
            entry = Entry(peer.name, refusal=_reason(refusal))
        entries[peer.name] = entry
    if ready:
        for who, result in zip(ready, measure(ready, case), strict=True):
            entries[who.name] = dataclasses.replace(entries[who.name], **result)
    return list(entries.values())


def _reason(refusal: Exception) -> str:
    name, text = type(refusal).__name__, str(refusal).strip()
    if not text:
        return name
    return text.splitlines()[0] if isinstance(refusal, RuntimeError) else f"{name}: {text.splitlines()[0]}"


class _Judge:
    """Knows float64's results of one KV head: of a batch's last entry, or of every sequence of a ragged batch. These
    are judged one by one, for a short one's errors would hide a long one's, and need memory for the longest alone.
    With a `rounding` they are those of the numbers that it makes of the inputs; `by_inputs` those of the inputs too."""

    def __init__(self, inputs: Inputs, case: Case, rounding: Rounding | None = None, by_inputs: bool = False) -> None:
        self._group = case.heads_q // case.heads_k
        given, oracle = inputs, Oracle if rounding is None else RoundedInputsOracle if by_inputs else RoundedOracle
        if rounding is not None:
            inputs = numbers_of(rounding(*inputs[:3]), inputs.dout)
        problems = [(case, None, None)] if case.lengths is None else case.sequences()
        self._oracles = [
            (
                rows,
                oracle(
                    _problem_of(inputs, rows, keys),
                    dataclasses.replace(problem, batch=1),
                    gradients=case.work is Work.BACKWARD,
                    **({"given": _problem_of(given, rows, keys)} if by_inputs else {}),
                ),
            )
            for problem, rows, keys in problems
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


def _problem_of(inputs: Inputs, rows: slice | None, keys: slice | None) -> Inputs:
    sides = zip(inputs, (rows, keys, keys, rows), strict=True)
    return Inputs(*(_rows_of(tensor, side) for tensor, side in sides)).one_kv_head()


def _rows_of(tensor: torch.Tensor, rows: slice | None) -> torch.Tensor:
    """A sequence's part of a ragged tensor, as a dense batch of one."""
    return tensor if rows is None else tensor[rows].unsqueeze(0)


def _one_kv_head(found: dict[str, torch.Tensor], group: int) -> dict[str, torch.Tensor]:
    """The part of each result that belongs to the problem of Inputs.one_kv_head."""
    heads = {name: 1 if name in GRADIENTS[1:] else group for name in found}
    return {name: tensor[-1:, :, -heads[name] :] for name, tensor in found.items()}
