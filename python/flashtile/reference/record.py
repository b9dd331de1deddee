"""A run of the ladder as a record like the benchmark's, stored as JSON; the tables are drawn from the record."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from flashtile.bench import report
from flashtile.bench.cases import Case
from flashtile.bench.report import Record
from flashtile.bench.run import Cell, Entry
from flashtile.reference import Rung

SUITE = "ladder"
LEGEND = (
    "MB: bytes between HBM and the multiprocessors, if no cache helped; the least is Q, K, V and O once.",
    "error: the largest against float64, over one KV head; allowed: what the accuracy bar allows.",
    "fp8: Q, K and V are rounded beforehand, which is not timed; its error is against those not rounded.",
    "docs/ladder.md explains them.",
)
METRICS = {"dram__bytes.sum": "HBM carried", "lts__t_bytes.sum": "L2 was asked for"}  # ncu's name: what it means


def to_record(machine: dict[str, object], case: Case, entries: dict[str, Entry], rungs: Sequence[Rung]) -> Record:
    """With one cell, which has `bytes`, the least there is to move, and for each rung its number and title, and its
    `formula_bytes` where it ran."""
    record = report.to_record(SUITE, machine, [Cell(case, [entries[each.key] for each in rungs])])
    (cell,) = record["cells"]
    cell["bytes"] = case.bytes
    for each in rungs:
        result = cell["results"][each.key]
        result |= {"number": each.number, "title": each.title}
        if "refusal" not in result:
            result["formula_bytes"] = each.bytes_moved(case)
    return record


def add_counts(record: Record, counts: dict[str, dict[str, float]]) -> None:
    """`counted_bytes` of each rung in `counts`, by ncu's metric."""
    (cell,) = record["cells"]
    for key, counted in counts.items():
        cell["results"][key]["counted_bytes"] = counted


def table(record: Record) -> Table:
    """For the terminal, of which it takes 100 columns."""
    (cell,) = record["cells"]
    columns = ("time", "TFLOP/s", "MB", "of least", "error", "allowed")
    result = _table(f"the ladder, {cell['name']}", *columns)
    for of in cell["results"].values():
        moved = ["—", "—"]
        if _ran(of):
            moved = [f"{of['formula_bytes'] / 1e6:,.1f}", _times(of["formula_bytes"] / cell["bytes"])]
        result.add_row(str(of["number"]), of["title"], *_time_cells(of), *moved, *_error_cells(of))
    return result


def counts_table(record: Record) -> Table:
    """For the terminal: what ncu counted."""
    (cell,) = record["cells"]
    result = _table("counted by ncu", "bytes by formula", *METRICS)
    for of in cell["results"].values():
        if _ran(of):
            result.add_row(str(of["number"]), of["title"], _formula_cell(of), *_count_cells(of))
    return result


def markdown(record: Record) -> str:
    """For a page: where the numbers come from, the rungs that ran, what was refused or wrong."""
    (cell,) = record["cells"]
    ran = [of for of in cell["results"].values() if _ran(of)]
    counted = any("counted_bytes" in of for of in ran)
    header = ["", "rung", "time", "TFLOP/s", "error", "bytes by formula", *(METRICS.values() if counted else ())]
    rows = [
        [str(of["number"]), of["title"], *_time_cells(of), _error_cells(of)[0], _formula_cell(of)]
        + (_count_cells(of) if counted else [])
        for of in ran
    ]
    said = f"{cell['name']}; the least is {_megabytes(cell['bytes'])}. {report.source(record)}."
    remarks = "\n".join(f"- {line}" for line in report.remarks(record))
    return "\n\n".join([said, report.markdown_table(header, rows, words=2), *([remarks] if remarks else [])])


def _table(title: str, *headings: str) -> Table:
    """Of a row for each rung, which begins with its number and title."""
    result = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
    result.show_edge, result.pad_edge, result.padding = False, False, (0, 1, 0, 0)
    result.add_column("", justify="right")
    result.add_column("rung", no_wrap=True)
    for heading in headings:
        result.add_column(heading, justify="right", no_wrap=True)
    return result


def _ran(result: Record) -> bool:
    return "refusal" not in result


def _megabytes(number: float) -> str:
    return f"{number / 1e6:,.1f} MB"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}×" if ratio < 100 else f"{ratio:.0f}×"


def _time_cells(result: Record) -> list[str]:
    if "median_us" not in result:
        return ["—", "—"]
    microseconds = result["median_us"]
    time = f"{microseconds / 1e3:,.2f} ms" if microseconds >= 1e3 else f"{microseconds:.1f} µs"
    return [f"{time} {report.spread(result)}", f"{result['tflops']:.3g}"]


def _formula_cell(result: Record) -> str:
    return _megabytes(result["formula_bytes"]) if _ran(result) else "—"


def _count_cells(result: Record) -> list[str]:
    counted = result.get("counted_bytes", {})
    return [_megabytes(counted[metric]) if metric in counted else "—" for metric in METRICS]


def _error_cells(result: Record) -> list[str]:
    if not _ran(result):
        return ["—", "—"]
    error, ok = result["errors"]["out"], all(of["ok"] for of in result["errors"].values())
    return [f"{error['found']:.1e}" if ok else "WRONG", f"{error['allowed']:.1e}"]
