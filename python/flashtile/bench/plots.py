"""A stored run as a picture: small multiples of the rates, with what the machine gives at most drawn in.

Files are text (SVG) that repeats to the byte with one version of matplotlib, so that a picture can stand beside the run
that it was drawn from. Colours are told apart by colour-blind readers, on white as on black: of all that are neither
too light nor too dark, these are as far from each other as eight can be. Each contestant has a marker too.
"""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashtile._refusal import Refusal
from flashtile.bench.cases import Work, pair
from flashtile.bench.decode import FP8, GRAPH, HEADS_FIRST, PAGE_SIZES, ROWS, SUITES
from flashtile.bench.fp8 import IN_16_BITS, SUITE
from flashtile.bench.machine import MATMUL_SIZE
from flashtile.bench.masked import BAND, VARLEN
from flashtile.bench.memory import FORMULA
from flashtile.bench.peers import OURS
from flashtile.bench.ragged import DENSE, TORCH_VARLEN
from flashtile.bench.report import Record, measure_of
from flashtile.bench.suites import OF_OPTIONS

INK = "#7d7d7d"  # of text and axes: as far from white as from a dark page
VERMILION, BLUE, GREEN, PINK = "#d55e00", "#2255dd", "#669966", "#cc77bb"
SKY, PURPLE, RED = "#0099ee", "#bb11aa", "#cc0033"
COLOURS = (BLUE, GREEN, PINK, SKY, PURPLE, RED, INK)  # of the peers
MARKERS = "sDv^P*X<>hp"


@dataclasses.dataclass(frozen=True)
class Style:
    colour: str
    marker: str
    line: Any = "-"


# flashtile has a colour of its own, whatever form it is timed in, and a peer the same look on every picture.
STYLES = {
    OURS: Style(VERMILION, "o"),
    DENSE: Style(VERMILION, "s", "--"),
    GRAPH: Style(VERMILION, "D", "--"),
    BAND: Style(VERMILION, "D", "--"),
    VARLEN: Style(VERMILION, "s", "--"),
    FP8: Style(VERMILION, "P"),
    IN_16_BITS: Style(VERMILION, "s", "--"),
    **{
        f"{prefix}page {size}": Style(VERMILION, marker, ":")
        for prefix, markers in (("", "v^"), (f"{FP8} ", "<>"))
        for size, marker in zip(PAGE_SIZES, markers, strict=True)
    },
    ROWS: Style(VERMILION, ">", "-."),
    HEADS_FIRST: Style(VERMILION, "<", "-."),
    "SDPA": Style(INK, "X"),
    "SDPA FA2": Style(BLUE, "s"),
    TORCH_VARLEN: Style(BLUE, "s"),
    "SDPA cuDNN": Style(GREEN, "D"),
    "SDPA efficient": Style(PINK, "v"),
    "SDPA math": Style(INK, "h", "-."),
    "FA3": Style(SKY, "P"),
    "FA3 fp8": Style(SKY, "X"),
    "cuDNN fp8": Style(BLUE, "v"),
    "Triton": Style(PURPLE, "p"),
    "Flex": Style(RED, "^"),
    "ring": Style(VERMILION, "o"),
    "all_gather": Style(VERMILION, "s", "--"),
    "ulysses": Style(VERMILION, "D", ":"),
    "ulysses_ring": Style(VERMILION, "v", ":"),
    "auto": Style(VERMILION, "P", "-."),
    FORMULA: Style(INK, "", "--"),
}


LENGTH = "sequence length (tokens)"
AXES = dict.fromkeys(("forward", "backward", "fp8", "memory"), LENGTH) | {
    "varlen": "length of the sequences (tokens)",
    "masks": "kind of mask",
    "decode": "batch, tokens in the cache",
    "prefill": "batch, new / all tokens",
    "host": "what is called",
    "cpu": "head dimension, mask",
}


@dataclasses.dataclass
class Panel:
    """Places on the axis, in order, and for each contestant its number at some of them; a place in `curve` is joined
    to the one before."""

    places: list[str] = dataclasses.field(default_factory=list)
    curve: set[str] = dataclasses.field(default_factory=set)
    lines: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Figure:
    """What is drawn: panels by row and column, the unit of their numbers, what their places are, and the most that the
    machine gives."""

    title: str
    unit: str
    axis: str
    rows: Sequence[str]
    columns: Sequence[str]
    panels: dict[tuple[str, str], Panel]
    names: Sequence[str]
    roof: tuple[str, float] | None
    logarithmic: bool

    @property
    def most(self) -> float:
        numbers = [
            number for panel in self.panels.values() for line in panel.lines.values() for number in line.values()
        ]
        return max([*numbers, *([self.roof[1]] if self.roof else [])], default=1.0)


UNDRAWN = ("random", "serving", *OF_OPTIONS)


def check(suite: str) -> None:
    """Refuses a suite whose cells are on no curve."""
    if suite in UNDRAWN:
        raise Refusal(f"bench: --plots is given with suite {suite!r}, expected another: its cells are on no curve")


def figure_of(record: Record) -> Figure:
    suite = record["suite"]
    check(suite)
    if suite == "distributed":
        return _figure_of_ranks(record)
    measure, unit = measure_of(record)
    panels: dict[tuple[str, str], Panel] = {}
    names: dict[str, None] = {}
    cells = record["cells"]
    if suite == "decode":
        cells = sorted(cells, key=lambda cell: cell["bytes"])
    for cell in cells:
        row, column, place, joined = _place(suite, cell)
        panel = panels.setdefault((row, column), Panel())
        panel.places.append(place)
        if joined:
            panel.curve.add(place)
        for name, result in cell["results"].items():
            if (number := measure(result)) is not None:
                names[name] = None
                panel.lines.setdefault(name, {})[place] = number
    machine = record["machine"]
    better = "lower" if suite in ("host", "memory") else "higher"
    return Figure(
        title=f"Suite {suite}: {unit} ({better} is better) on {machine['device']}, {machine['date'][:10]}",
        unit=unit,
        axis=AXES.get(suite, "case"),
        rows=list(dict.fromkeys(row for row, _ in panels)),
        columns=list(dict.fromkeys(_place(suite, cell)[1] for cell in record["cells"])),
        panels=panels,
        names=list(names),
        roof=_roof(record, unit),
        logarithmic=suite == "memory",
    )


def _figure_of_ranks(record: Record) -> Figure:
    """The heads and masks that there are of several lengths: how much of the ideal each method has."""
    panels: dict[tuple[str, str], Panel] = {}
    names: dict[str, None] = {}
    for cell in sorted(record["cells"], key=lambda cell: int(cell["name"].split()[0][1:])):
        place, column = cell["name"].split(" ", 1)
        for name, times in cell["seconds"].items():
            for work, seconds in times.items() if name != "ideal" else ():
                row = work.replace("forward and backward", "both passes")
                panel = panels.setdefault((row, column), Panel())
                if place not in panel.places:
                    panel.places.append(place)
                panel.curve.add(place)
                panel.lines.setdefault(name, {})[place] = cell["seconds"]["ideal"][work] / seconds
                names[name] = None
    panels = {key: panel for key, panel in panels.items() if len(panel.places) > 1}
    machine, ranks = record["machine"], record["ranks"]
    return Figure(
        title=f"Suite distributed: {ranks} ranks, {machine['device']}, {machine['date'][:10]} (higher is better)",
        unit="of the ideal",
        axis="rows of all ranks",
        rows=list(dict.fromkeys(row for row, _ in panels)),
        columns=list(dict.fromkeys(column for _, column in panels)),
        panels=panels,
        names=list(names),
        roof=("one device / ranks", 1.0),
        logarithmic=False,
    )


def draw(record: Record, path: Path) -> None:
    """Writes an SVG. Raises ImportError where there is no matplotlib."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Canvas

    figure = figure_of(record)
    settings: Any = {
        "svg.hashsalt": "flashtile",
        "svg.fonttype": "none",  # letters, not outlines: a tenth of the size, and they can be searched
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],  # of which the widths are; a viewer that lacks it takes its own
        "font.size": 9,
        **{f"{part}.color": INK for part in ("text", "xtick", "ytick")},
        **{f"axes.{part}": INK for part in ("labelcolor", "edgecolor", "titlecolor")},
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with rc_context(settings):
        size = max(3.3 * len(figure.columns), 6.6), 1.1 + 2.2 * len(figure.rows)
        canvas = Canvas(figsize=size, layout="constrained")
        FigureCanvasSVG(canvas)
        widths = [
            2 + max(len(of.places) for (_, other), of in figure.panels.items() if other == column)
            for column in figure.columns
        ]
        axes = canvas.subplots(len(figure.rows), len(figure.columns), squeeze=False, sharey=True, width_ratios=widths)
        seen: dict[str, Any] = {}
        for (i, row), (j, column) in _grid(figure):
            panel, ax = figure.panels.get((row, column)), axes[i][j]
            if panel is None:
                ax.set_axis_off()
                continue
            seen |= _draw_panel(ax, panel, figure)
            ax.set_title(", ".join(word for word in (column, row) if word), fontsize=9, loc="left")
            if j == 0:
                ax.set_ylabel(figure.unit)
            if i == len(figure.rows) - 1:
                ax.set_xlabel(figure.axis)
        handles = [seen[name] for name in (*figure.names, "roof") if name in seen]
        canvas.suptitle(figure.title, fontsize=10, fontweight="bold", color=INK)
        columns = min(len(handles), 6 if max(map(len, figure.names)) < 20 else 3)
        canvas.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
        written = io.StringIO()
        canvas.savefig(written, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator")))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(f"{line.lstrip()}\n" for line in written.getvalue().splitlines())
    )  # a fifth of it is indents


def _grid(figure: Figure) -> list[tuple[tuple[int, str], tuple[int, str]]]:
    return [(row, column) for row in enumerate(figure.rows) for column in enumerate(figure.columns)]


def _draw_panel(ax: Any, panel: Panel, figure: Figure) -> dict[str, Any]:
    """Draws the contestants, flashtile last and so on top; returns what the legend is made of."""
    from matplotlib.lines import Line2D

    handles: dict[str, Any] = {}
    for name in sorted(panel.lines, key=lambda name: name == OURS):
        numbers, style = panel.lines[name], style_of(name, figure.names)
        look: dict[str, Any] = {"color": style.colour, "marker": style.marker, "markersize": 5 if name == OURS else 4}
        thickness = 2.2 if name == OURS else 1.1
        order = 3 if name == OURS else 2
        points = [(x, place) for x, place in enumerate(panel.places) if place in numbers]
        for of_curve, line in ((True, style.line), (False, "none")):
            where = [(x, numbers[place]) for x, place in points if (place in panel.curve) is of_curve]
            if where:
                ax.plot(*zip(*where, strict=True), **look, linewidth=thickness, linestyle=line, zorder=order)
        handles[name] = Line2D([], [], **look, linewidth=thickness, linestyle=style.line, label=name)
    if figure.roof:
        label, roof = figure.roof
        handles["roof"] = ax.axhline(roof, color=INK, linewidth=1, linestyle=(0, (5, 3)), label=label, zorder=1)
    ax.set_xticks(range(len(panel.places)), panel.places)
    if figure.axis == AXES["masks"]:
        ax.tick_params(axis="x", labelrotation=90)  # names are many, and long
    ax.margins(x=0.12)
    ax.grid(axis="y", color=INK, alpha=0.25, linewidth=0.6)
    ax.tick_params(labelsize=8 if len(panel.places) < 5 else 6.5)
    if figure.logarithmic:
        ax.set_yscale("log", base=2)
        ax.yaxis.set_major_formatter("{x:,.0f}")
    else:
        ax.set_ylim(0, 1.05 * figure.most)
    return handles


def style_of(name: str, names: Sequence[str]) -> Style:
    """That of STYLES; a peer that has none there gets one by its place among `names`, in a colour that no other of them
    has, as far as there are."""
    if name in STYLES:
        return STYLES[name]
    place = [other for other in names if other not in STYLES].index(name)
    taken = {STYLES[other].colour for other in names if other in STYLES}
    colours = sorted(COLOURS, key=lambda colour: colour in taken)
    return Style(colours[place % len(colours)], MARKERS[-1 - place % len(MARKERS)], "-.")


def _place(suite: str, cell: Record) -> tuple[str, str, str, bool]:
    """A cell's row and column, its place on the panel's axis, and whether it belongs to the panel's curve."""
    case, mask = cell["case"], cell["mask"]
    head_dim, heads = f"D {pair(case['head_dim'], case['head_dim_v'])}", f"H {pair(case['heads_q'], case['heads_k'])}"
    grouped = case["heads_q"] != case["heads_k"]
    if suite in SUITES:
        length = (
            str(case["seqlen_k"]) if case["work"] == Work.DECODE.value else f"{case['seqlen_q']}/{case['seqlen_k']}"
        )
        return "", f"{heads}, {head_dim}", f"B{case['batch']}\n{length}", True
    if suite in ("forward", "backward", "fp8"):
        return mask, head_dim, f"{case['seqlen_q']}" + (f"\n{heads}" if grouped else ""), not grouped
    if suite == "memory":
        return f"{case['work']}, {mask}", head_dim, str(case["seqlen_q"]), True
    if suite == "varlen":
        equal = len(set(case["lengths"])) == 1
        name = str(case["lengths"][0]) if equal else re.sub(r"\+|×(?=\()", r"\g<0>\n", cell["shape"].split(" ")[0])
        return f"{case['work']}, {mask}", head_dim, name + (f"\n{heads}" if grouped else ""), equal and not grouped
    if suite == "masks":
        return case["work"], f"{heads}, {head_dim}\nS {case['seqlen_q']}", mask, False
    if suite == "cpu":
        return case["work"], case["dtype"], f"{head_dim}\n{mask}", False
    return "", f"{cell['shape']}, {mask}", case["work"].replace(" with", "\nwith"), False


def _roof(record: Record, unit: str) -> tuple[str, float] | None:
    machine = record["machine"]
    if unit.startswith("TFLOP/s") and (rate := machine.get("matmul_tflops")):
        of = "bf16 matmul" if record["suite"] == SUITE else "matmul"
        return f"an {MATMUL_SIZE}³ {of} in this run: {rate:.0f}", rate
    if unit.startswith("GB/s") and (rate := machine.get("read_gb_s")):
        return f"reading alone in this run: {rate:.0f}", rate
    return None
