"""Draws the two loss curves and their difference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

INK, OURS_COLOUR, THEIRS_COLOUR, LIMIT_COLOUR = "#2b2d42", "#e76f51", "#264653", "#9a8c98"
FLOOR = 1e-7  # zero has no place on a logarithmic axis; losses of this size are 2e-7 apart in float32
SMOOTHING = 0.9  # weight of the past in the moving average that is drawn over the raw losses


def draw(path: Path, ours: Sequence[float], theirs: Sequence[float], tolerances: Sequence[float], title: str) -> None:
    """Writes a PNG: the losses above, how far they are apart below, and how far they may be."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: Any = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 10, "axes.grid": True}
    colours = {"grid.alpha": 0.25, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK}
    with plt.rc_context(style | colours):
        figure, (losses, difference) = plt.subplots(
            2, 1, sharex=True, figsize=(9, 6.5), height_ratios=(2.2, 1), layout="constrained"
        )
        steps = range(1, len(ours) + 1)
        losses.plot(steps, theirs, color=THEIRS_COLOUR, alpha=0.2, linewidth=0.8)
        losses.plot(steps, _smooth(theirs), color=THEIRS_COLOUR, linewidth=4.0, alpha=0.55, label="PyTorch SDPA")
        losses.plot(steps, _smooth(ours), color=OURS_COLOUR, linewidth=1.4, label="flashtile")
        losses.set_ylabel("loss (nats per byte)")
        losses.legend(frameon=False)
        losses.set_title(title, loc="left", fontsize=12, fontweight="bold")

        gaps = [max(abs(a - b), FLOOR) for a, b in zip(ours, theirs, strict=True)]
        difference.semilogy(steps, gaps, color=OURS_COLOUR, linewidth=1.0)
        difference.step(steps, tolerances, color=LIMIT_COLOUR, linestyle="--", linewidth=1.2, label="tolerance")
        difference.set_ylim(FLOOR / 2, 5 * max(*gaps, *tolerances))
        difference.legend(frameon=False, loc="lower right")
        difference.set_ylabel("|difference|")
        difference.set_xlabel("step")
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _smooth(values: Sequence[float]) -> list[float]:
    """Exponential moving average, corrected for its start."""
    smoothed, average = [], 0.0
    for count, value in enumerate(values, start=1):
        average = SMOOTHING * average + (1 - SMOOTHING) * value
        smoothed.append(average / (1 - SMOOTHING**count))
    return smoothed
