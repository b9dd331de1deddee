"""A run as a plain record, stored as JSON; the tables for people and for the README are drawn from the record."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from flashtile._refusal import Refusal
from flashtile.bench import cliffs, fp8
from flashtile.bench.cases import Case, Work
from flashtile.bench.decode import CACHE_FORMS, GRAPH, OURS_ALL, SUITES
from flashtile.bench.machine import MATMUL_SIZE
from flashtile.bench.masked import BAND, VARLEN
from flashtile.bench.memory import FORMULA
from flashtile.bench.peers import OURS
from flashtile.bench.ragged import DENSE
from flashtile.bench.run import Cell, Entry, against_the_best, summary, totals
from flashtile.bench.serving import CAUSAL
from flashtile.bench.suites import OF_OPTIONS
from flashtile.bench.timing import Timing

Record = dict[str, Any]
Measure = Callable[[Record], float | None]

# What the summary holds beside the peers.
BEST_PEER, BEST_VARLEN, OF_MATMUL, OF_READ, FORMS = "best peer", "best varlen", "of matmul", "of read", "forms"
LARGE = 2**29  # bytes from which on a decode should be as fast as memory
FORMAT = 1  # of the record; raise it when a field changes its meaning
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def to_record(suite: str, machine: dict[str, object], cells: Sequence[Cell]) -> Record:
    return {
        "format": FORMAT,
        "suite": suite,
        "machine": machine,
        "summary": _summary(suite, machine, cells),
        "cells": [_cell_record(cell) for cell in cells],
    }


def write(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def read(path: Path) -> Record:
    try:
        record = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise Refusal(f"{path} is no JSON, expected a stored run ({error})") from None
    found = record.get("format") if isinstance(record, dict) else None
    if found != FORMAT:
        raise Refusal(f"{path} has format {found}, expected {FORMAT}")
    return record


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Around whatever reads a record's fields: if one is missing, or of another type, `path` is no stored run."""
    try:
        yield
    except Refusal:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        found = f"it has no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        raise Refusal(f"{path} is no stored run: {found}") from error


def table(record: Record) -> Group:
    """For the terminal."""
    grid = Grid(record)
    result = Table(header_style="bold", box=box.SIMPLE_HEAD)
    for index, heading in enumerate(grid.header):
        is_sentence = heading == cliffs.WHY  # the rest is easier to read in one line
        result.add_column(heading, justify="left" if index < grid.words else "right", no_wrap=not is_sentence)
    for row in grid.rows:
        result.add_row(*row)
    return Group(Text(grid.title, style="bold"), result)


def markdown(record: Record, picture: str | None = None) -> str:
    """For a page: a heading, a sentence on where the numbers come from, the picture, the table, the summary, notes."""
    grid = Grid(record)
    table = markdown_table(grid.header, grid.rows, words=grid.words)
    below = "\n".join(f"- {line}" for line in summary_lines(record) + remarks(record))
    drawn = [f"![{grid.title}]({picture})"] if picture else []
    cost = "bytes" if record["suite"] == "memory" else "time"
    said = f"{grid.title}. {source(record)}; `/ peer` is the peer's {cost} over flashtile's."
    return "\n\n".join([f"## Suite {record['suite']}", said, *drawn, table, below])


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, words: int) -> str:
    """The first `words` columns are not numbers, and stand to the left."""
    ruler = "|" + "---|" * words + "---:|" * (len(header) - words)
    first, *others = (f"| {' | '.join(row)} |" for row in (header, *rows))
    return "\n".join([first, ruler, *others])


def brief(rows: Sequence[str]) -> str:
    """For the README: a table of what `brief_row` says of each run."""
    header = "| suite | device | peers | to the fastest: geometric mean | minimum | cells |"
    return "\n".join([header, "|---|---|---|---:|---:|---:|", *filter(None, rows)])


def brief_row(record: Record) -> str:
    """How a run came out against the fastest of its peers, cell by cell; empty where none was timed."""
    names = peer_names(record)
    fastest = [min(of.values()) for cell in record["cells"] if (of := _ratios_to(cell, names))]
    if not fastest:
        return ""
    of = totals(fastest)
    numbers = f"{of['geomean']:.2f}× | {of['min']:.2f}× | {of['cells']}"
    return f"| {record['suite']} | {record['machine']['device']} | {', '.join(names)} | {numbers} |"


def peer_names(record: Record) -> list[str]:
    """Who was timed beside flashtile in its several forms."""
    names = dict.fromkeys(name for cell in record["cells"] for name in cell["ratios"])
    return [name for name in names if name not in (*OURS_ALL, DENSE, BAND, VARLEN, CAUSAL, fp8.IN_16_BITS, FORMULA)]


def _ratios_to(cell: Record, names: Sequence[str]) -> dict[str, float]:
    return {name: cell["ratios"][name] for name in names if name in cell["ratios"]}


def summary_lines(record: Record) -> list[str]:
    if record["suite"] == "random":
        return cliffs.summary_lines(record)
    peers = dict(record["summary"])
    of_matmul, forms, of_read = peers.pop(OF_MATMUL, {}), peers.pop(FORMS, {}), peers.pop(OF_READ, None)
    lines = [
        f"against {'the best of all peers' if name == BEST_PEER else name}: {_totals_text(of)}"
        for name, of in peers.items()
    ]
    lines += [
        f"rate of {name} over that of {'eager calls' if name == GRAPH else 'a contiguous cache'}: {_totals_text(of)}"
        for name, of in forms.items()
    ]
    if of_read:
        least = f"at least {LARGE // 2**20} MiB"
        lines.append(f"of the {record['machine']['read_gb_s']} GB/s of reading alone, {least}: {_totals_text(of_read)}")
    for length, fractions in of_matmul.items():
        values = ", ".join(f"{head_dim} {fraction:.2f}" for head_dim, fraction in fractions.items())
        lines.append(f"of an {MATMUL_SIZE}³ matmul at {length} full: {values}")
    return lines


def _totals_text(of: Record) -> str:
    return f"geometric mean {of['geomean']:.2f}×, minimum {of['min']:.2f}×, {of['cells']} cells"


def remarks(record: Record) -> list[str]:
    """What was refused, with the cells of one reason together, and what was found wrong."""
    refused: dict[tuple[str, str], list[str]] = {}
    wrong = []
    for cell in record["cells"]:
        for name, result in cell["results"].items():
            if "refusal" in result:
                refused.setdefault((name, result["refusal"]), []).append(cell["name"])
            wrong += [
                f"{name} is WRONG on {cell['name']}: {tensor} is off by {error['found']:.2e}, "
                f"expected at most {error['allowed']:.2e}"
                for tensor, error in result["errors"].items()
                if not error["ok"]
            ]
    lines = []
    for (name, reason), (first, *others) in refused.items():
        more = f" and {len(others)} more" if others else ""
        lines.append(f"{name} did not run {first}{more}: {reason}")
    return lines + wrong


def publish(text: str, page: Path | None) -> None:
    """Prints `text`, or puts it between the result marks of a page."""
    if page is None:
        print(text)
        return
    before, after = around_results(page)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def around_results(page: Path) -> tuple[str, str]:
    """What stands before and behind the result marks of a page."""
    try:
        before, begin, rest = page.read_text().partition(BEGIN)
    except UnicodeDecodeError:
        raise Refusal(f"{page} is no text, expected a page with {BEGIN} … {END}") from None
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise Refusal(f"{page} has no {BEGIN} … {END}")
    return before, after


class Grid:
    """A record as a title, a header and rows of text; the first `words` columns are not numbers. Of suite random, whose
    cells are too many to be read, the worst."""

    def __init__(self, record: Record) -> None:
        if record["suite"] == "random":
            self.title, self.words, self.header = cliffs.title(record), cliffs.WORDS, list(cliffs.HEADER)
            self.rows = cliffs.rows(record)
            return
        cells = record["cells"]
        names = list(dict.fromkeys(name for cell in cells for name in cell["results"]))
        peers = [name for name in names if name not in OURS_ALL]
        # What all cells share is said once, in the title.
        columns = [key for key in ("dtype", "work") if len({cell["case"][key] for cell in cells}) > 1]
        shared = [cells[0]["case"][key] for key in ("dtype", "work") if key not in columns] if cells else []
        measure, unit = measure_of(record)
        # Beside its own dense attention, what a ragged cell is measured by is the fastest of the others.
        name_of_best = ({"varlen": BEST_VARLEN} | dict.fromkeys(SUITES, BEST_PEER)).get(record["suite"])
        others = [name for name in peers if name != DENSE] if name_of_best else []
        best = [name_of_best] if len(others) > 1 else []
        read = record["machine"].get("read_gb_s")
        of_read = [OF_READ] if read else []

        statistic = [] if record["suite"] == "memory" else ["median ± spread"]
        self.title = ", ".join([f"suite {record['suite']}", *shared, unit, *statistic])
        self.words = 2 + len(columns)
        self.header = ["shape", "mask", *columns, *names, *(f"/ {name}" for name in peers + best), *of_read]
        self.rows = [
            [cell["shape"], cell["mask"]]
            + [cell["case"][key] for key in columns]
            + [_value(cell["results"].get(name), measure) for name in names]
            + [_ratio(cell["ratios"], [name]) for name in peers]
            + [_ratio(cell["ratios"], others) for _ in best]
            + [_part(cell["results"].get(OURS), read) for _ in of_read]
            for cell in cells
        ]


def measure_of(record: Record) -> tuple[Measure, str]:
    """How a result becomes a number, None where it has none, and the unit: of time, else a rate of a readable size."""
    if record["suite"] == "host":
        return lambda result: result.get("median_us"), "µs of host time a call"
    if record["suite"] == "decode":
        return lambda result: result.get("gb_s"), "GB/s of K, V, Q and O"
    if record["suite"] == "memory":
        return lambda result: result["peak_bytes"] / 2**20 if "peak_bytes" in result else None, "MiB beyond the inputs"
    rates = [result["tflops"] for cell in record["cells"] for result in cell["results"].values() if "tflops" in result]
    factor, unit = (1, "TFLOP/s") if max(rates, default=0) >= 5 else (1e3, "GFLOP/s")
    return lambda result: result["tflops"] * factor if "tflops" in result else None, unit


def _ratio(ratios: dict[str, float], names: Sequence[str]) -> str:
    """The ratio to the fastest of these peers."""
    found = [ratios[name] for name in names if name in ratios]
    return f"{min(found):.2f}×" if found else "—"


def _part(result: Record | None, whole: float) -> str:
    return f"{result['gb_s'] / whole:.2f}" if result and "gb_s" in result else "—"


def _value(result: Record | None, measure: Measure) -> str:
    if result is None or "refusal" in result:
        return "—"
    if (number := measure(result)) is None:
        return "wrong"
    text = f"{number:.0f}" if number >= 100 else f"{number:.1f}"
    return f"{text} {spread(result)}" if "median_us" in result else text


def spread(result: Record) -> str:
    """Of the rounds of a contestant that was timed: half the distance from the 20th to the 80th percentile."""
    return f"±{(result['high_us'] - result['low_us']) / 2 / result['median_us']:.0%}"


def _summary(suite: str, machine: dict[str, Any], cells: Sequence[Cell]) -> Record:
    if suite in ("varlen", "masks"):
        return _training_summary(cells)
    if suite == "random":
        return cliffs.summary(cells)
    if suite in SUITES:
        return _decode_summary(machine, cells)
    if suite in OF_OPTIONS:
        return _summary_by_work(cells)
    if suite == fp8.SUITE:
        best = against_the_best(cells, besides=(fp8.IN_16_BITS,))
        return summary(cells) | ({BEST_PEER: best} if best else {})
    return summary(cells) | (_forward_summary(machine, cells) if suite == "forward" else {})


def _summary_by_work(cells: Sequence[Cell]) -> Record:
    works = dict.fromkeys(cell.case.work for cell in cells)
    parts = {work: summary([cell for cell in cells if cell.case.work is work]) for work in works}
    return {f"{name}, {work.value}": of for work, part in parts.items() for name, of in part.items()}


def _training_summary(cells: Sequence[Cell]) -> Record:
    """Forward and backward by themselves, and of ragged batches the ratio to the best of the others that take them."""
    found: Record = {}
    for work in dict.fromkeys(cell.case.work for cell in cells):
        of_work = [cell for cell in cells if cell.case.work is work]
        columns: Record = summary(of_work)
        ragged = [cell for cell in of_work if cell.case.lengths is not None]
        if best := against_the_best(ragged, besides=(DENSE,)):
            columns[BEST_VARLEN] = best
        found |= {f"{name}, {work.value}": of for name, of in columns.items()}
    return found


def _decode_summary(machine: dict[str, Any], cells: Sequence[Cell]) -> Record:
    """The peers; flashtile's rate in its other forms over that of `flashtile`; and its part of what reading gives."""
    found: Record = {name: of for name, of in summary(cells).items() if name not in OURS_ALL}
    if best := against_the_best(cells, besides=OURS_ALL):
        found[BEST_PEER] = best
    inverses = {form: [1 / of[form] for cell in cells if form in (of := cell.ratios())] for form in CACHE_FORMS[1:]}
    if forms := {form: totals(ratios) for form, ratios in inverses.items() if ratios}:
        found[FORMS] = forms
    rates = [
        cell.case.bytes / entry.timing.median / 1e9
        for cell in cells
        for entry in cell.entries
        if entry.name == OURS and entry.timing and cell.case.bytes >= LARGE
    ]
    if (read := machine.get("read_gb_s")) and rates:
        found[OF_READ] = totals([rate / read for rate in rates])
    return found


def _forward_summary(machine: dict[str, Any], cells: Sequence[Cell]) -> Record:
    """What only the forward suite sums up: the ratio to the best peer, and the part of a matmul's rate."""
    found: Record = {}
    if best := against_the_best(cells):
        found[BEST_PEER] = best
    if (rate := machine.get("matmul_tflops")) and (of_matmul := _of_matmul(rate, cells)):
        found[OF_MATMUL] = of_matmul
    return found


def _of_matmul(rate: float, cells: Sequence[Cell]) -> dict[str, dict[str, float]]:
    """flashtile's TFLOP/s over `rate` on each head dimension's longest sequence without a mask, by that length."""
    longest: dict[int, tuple[int, float]] = {}
    for cell in cells:
        case = cell.case
        timing = next((entry.timing for entry in cell.entries if entry.name == OURS), None)
        if timing and case.mask_name == "full" and case.seqlen_q > longest.get(case.head_dim, (0, 0.0))[0]:
            longest[case.head_dim] = case.seqlen_q, case.flops / timing.median / 1e12 / rate
    found: dict[str, dict[str, float]] = {}
    for head_dim, (seqlen, fraction) in sorted(longest.items()):
        found.setdefault(f"S{seqlen}", {})[f"D{head_dim}"] = fraction
    return found


def _cell_record(cell: Cell) -> Record:
    return {
        "name": str(cell.case),
        "shape": cell.case.shape_name,
        "mask": cell.case.mask_name,
        "case": dataclasses.asdict(cell.case) | {"work": cell.case.work.value},
        "flops": cell.case.flops,
        **({"bytes": cell.case.bytes} if cell.case.work is Work.DECODE else {}),
        "results": {entry.name: _entry_record(entry, cell.case) for entry in cell.entries},
        "ratios": cell.ratios(),
        **(
            {"graph_ratios": cell.graph_ratios(), "plan": cliffs.chosen(cell.plan, cell.case.work)} if cell.plan else {}
        ),
    }


def _entry_record(entry: Entry, case: Case) -> Record:
    errors = {
        verdict.name: {"found": verdict.error, "allowed": verdict.allowed, "ok": verdict.ok}
        for verdict in entry.verdicts
    }
    result: Record = {"errors": errors}
    if entry.refusal:
        result["refusal"] = entry.refusal
    if timing := entry.timing:
        result |= _timing_record(timing) | {"tflops": case.flops / timing.median / 1e12}
        if case.work is Work.DECODE:
            result["gb_s"] = case.bytes / timing.median / 1e9
    if entry.graph:
        result["graph"] = _timing_record(entry.graph)
    if entry.graph_refusal:
        result["graph_refusal"] = entry.graph_refusal
    if entry.peak_bytes is not None:
        result["peak_bytes"] = entry.peak_bytes
    return result


def _timing_record(timing: Timing) -> Record:
    return {
        "median_us": timing.median * 1e6,
        "low_us": timing.low * 1e6,
        "high_us": timing.high * 1e6,
        "rounds": timing.rounds,
    }


def source(record: Record) -> str:
    """Where, when and with what a run was measured: a sentence without its full stop."""
    machine = record["machine"]
    revision, *dirty = machine["commit"].split("-", 1)
    versions = f"torch {machine['torch']}" + (f", cuDNN {machine['cudnn']}" if machine.get("cudnn") else "")
    for peer, version in machine.get("peers", {}).items():
        versions += f", {peer} {version}"
    commit = "-".join([revision[:12], *dirty]) or "an unknown commit"
    rounds = "" if record["suite"] in ("memory", "distributed") else " in interleaved rounds"
    return (
        f"Measured on {machine['device']} on {machine['date'][:10]}{rounds}, flashtile "
        f"{machine['flashtile']} at {commit}, {versions}"
    )
