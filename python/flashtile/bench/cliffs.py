"""What suite random looks for: how far flashtile is from the best peer, what its options cost, and its worst cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flashtile.bench import options
from flashtile.bench.cases import TRAINING, Work
from flashtile.bench.decode import OURS_ALL
from flashtile.bench.peers import OURS, PLAIN
from flashtile.bench.ragged import DENSE
from flashtile.bench.run import Cell, totals

Record = dict[str, Any]
BELOW = (1.0, 0.9)
WORST = 10
WHY = "why"
HEADER = ("cell", "best peer", "kernel", WHY, "µs", "/ best peer", "as graphs")
WORDS = HEADER.index("µs")  # of its columns
EAGER, GRAPH = "eager", "graph"
RATIOS: Mapping[str, Callable[[Cell], dict[str, float]]] = {EAGER: Cell.ratios, GRAPH: Cell.graph_ratios}


def best_of(ratios: Mapping[str, float]) -> tuple[str, float] | None:
    """The fastest peer's name and ratio, of a cell's ratios to all; None where none was timed."""
    peers = {name: ratio for name, ratio in ratios.items() if name not in (*OURS_ALL, DENSE)}
    return min(peers.items(), key=lambda item: item[1]) if peers else None


def summary(cells: Sequence[Cell]) -> Record:
    """Forward, over caches too, and backward by themselves; of each calls and graphs."""
    found: Record = {}
    for work in TRAINING:
        of_work = [cell for cell in cells if (cell.case.work is Work.BACKWARD) == (work is Work.BACKWARD)]
        for how, ratios_of in RATIOS.items():
            best = [ratio for cell in of_work if (of_best := best_of(ratios_of(cell))) for ratio in of_best[1:]]
            if best:
                shares = {f"below {bound:.1f}": sum(ratio < bound for ratio in best) / len(best) for bound in BELOW}
                plain = _plain_summary(of_work, ratios_of)
                found.setdefault(work.value, {})[how] = totals(best) | shares | {PLAIN: plain}
    return found


def _plain_summary(cells: Sequence[Cell], ratios_of: Callable[[Cell], dict[str, float]]) -> Record:
    """flashtile's time over that of its plain kernel, option by option."""
    costs: dict[str, list[float]] = {}
    for cell in cells:
        if ratio := ratios_of(cell).get(PLAIN):
            costs.setdefault(options.words(cell.case, served=["window"]), []).append(1 / ratio)
    return {
        option: {"geomean": totals(of)["geomean"], "max": max(of), "cells": len(of)} for option, of in costs.items()
    }


def chosen(plan: str, work: Work) -> dict[str, str]:
    """The kernel of this work and the reason for it, from what `explain` printed; of a refusal its words."""
    forward, found, backward = plan.partition("flashtile backward plan")
    lines = (backward if found and work is Work.BACKWARD else forward).splitlines()
    named = (line.split(maxsplit=1) for line in lines if line.startswith(("  kernel ", "  why ")))
    return dict(pair for pair in named if len(pair) == 2) or {WHY: plan.partition("\n")[0]}


def summary_lines(record: Record) -> list[str]:
    lines = []
    for work, by_how in record["summary"].items():
        for how, of in by_how.items():
            shares = ", ".join(
                f"{of[f'below {bound:.1f}']:.0%} of {of['cells']} cells below {bound}" for bound in BELOW
            )
            mean, least = f"geometric mean {of['geomean']:.2f}×", f"least {of['min']:.2f}×"
            lines.append(f"{work}, {how}: against the best peer {mean}, {shares}, {least}")
            lines += [
                f"{work}, {how}: with {option} {cost['geomean']:.2f}× the plain kernel's time (geometric mean), "
                f"{cost['max']:.2f}× at most, {cost['cells']} cells"
                for option, cost in of[PLAIN].items()
            ]
    missing: dict[tuple[str, str], int] = {}
    for cell in record["cells"]:
        for name, result in cell["results"].items():
            if reason := result.get("graph_refusal"):
                missing[name, reason] = missing.get((name, reason), 0) + 1
    return lines + [f"{name} could not be captured in {count} cells: {why}" for (name, why), count in missing.items()]


def title(record: Record) -> str:
    seed = f", seed {record['seed']}" if "seed" in record else ""
    return f"suite {record['suite']}{seed}, the worst {len(rows(record))} of {len(record['cells'])} cells"


def rows(record: Record) -> list[list[str]]:
    """The worst cells first, by the time of a call."""
    found = [(best, cell) for cell in record["cells"] if (best := best_of(cell["ratios"]))]
    return [_row(cell, *best) for best, cell in sorted(found, key=lambda each: each[0][1])[:WORST]]


def _row(cell: Record, peer: str, ratio: float) -> list[str]:
    plan, as_graph = cell["plan"], best_of(cell["graph_ratios"])
    microseconds = f"{cell['results'][OURS]['median_us']:.0f}"
    ratios = [f"{ratio:.2f}×", f"{as_graph[1]:.2f}×" if as_graph else "—"]
    return [cell["name"], peer, plan.get("kernel", "—"), plan[WHY], microseconds, *ratios]
