"""Draws the two loss curves and their difference, in colours that colour-blind readers tell apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

INK, OURS_COLOUR, THEIRS_COLOUR, LIMIT_COLOUR = "#2b2d42", "#d55e00", "#0072b2", "#5f5f5f"
FLOOR = 1e-7  # zero has no place on a logarithmic axis; losses of this size are 2e-7 apart in float32
SMOOTHING = 0.9  # weight of the past in the moving average that is drawn over the raw losses


def draw(path: Path, ours: Sequence[float], theirs: Sequence[float], tolerances: Sequence[float], title: str) -> None:
    """Writes a picture, of the format that its name ends in: the losses above, how far they are apart below, and how
    far they may be."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    gaps = [max(abs(a - b), FLOOR) for a, b in zip(ours, theirs, strict=True)]
    agree = all(gap <= max(limit, FLOOR) for gap, limit in zip(gaps, tolerances, strict=True))
    settings: Any = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 10, "axes.grid": True}
    settings |= {"grid.alpha": 0.25, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK}
    with rc_context(settings):
        figure = Figure(figsize=(9, 7), layout="constrained")
        FigureCanvasAgg(figure)
        losses, difference = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1.1))
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        steps = range(1, len(ours) + 1)

        losses.set_title(
            "The same model, data and seed, trained twice: where attention agrees, one curve hides the other",
            loc="left",
            fontsize=10,
        )
        losses.plot(steps, theirs, color=THEIRS_COLOUR, alpha=0.25, linewidth=0.8, label="each step's loss, with SDPA")
        losses.plot(
            steps, _smooth(theirs), color=THEIRS_COLOUR, linewidth=5, alpha=0.5, label="moving mean, with PyTorch SDPA"
        )
        losses.plot(steps, _smooth(ours), color=OURS_COLOUR, linewidth=1.4, label="moving mean, with flashtile")
        losses.set_ylabel("training loss (nats per byte)")
        losses.legend(frameon=False, title="lower is better")

        verdict = "agree: their losses stay closer than" if agree else "DISAGREE: their losses are further apart than"
        difference.set_title(f"The two runs {verdict} the dashed line allows", loc="left", fontsize=10)
        difference.semilogy(
            steps, gaps, color=OURS_COLOUR, linewidth=1.0, label="|loss with flashtile − loss with SDPA|"
        )
        difference.step(
            steps,
            tolerances,
            color=LIMIT_COLOUR,
            linestyle="--",
            linewidth=1.4,
            where="post",
            label="most that is allowed",
        )
        difference.set_ylim(FLOOR / 2, 20 * max(*gaps, *tolerances))  # with room for the legend
        difference.legend(frameon=False, loc="upper left", ncols=2)
        difference.set_ylabel("difference (nats per byte)")
        difference.set_xlabel("training step")
        figure.savefig(path, dpi=150)


def _smooth(values: Sequence[float]) -> list[float]:
    """Exponential moving average, corrected for its start."""
    smoothed, average = [], 0.0
    for count, value in enumerate(values, start=1):
        average = SMOOTHING * average + (1 - SMOOTHING) * value
        smoothed.append(average / (1 - SMOOTHING**count))
    return smoothed
