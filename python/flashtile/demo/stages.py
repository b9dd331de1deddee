"""The demo's three parts in order, and its exit status."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from flashtile.bench import command, report, suites, timing
from flashtile.bench.cases import Case
from flashtile.bench.run import Cell, run_cases
from flashtile.demo import exactness, picture, training
from flashtile.demo.gpt import CausalAttention, Config

Attention = Callable[..., torch.Tensor]

SAMPLE_BYTES = 240


def run(
    seconds: float,
    output: Path,
    *,
    attention: Attention | None = None,
    speed_cases: Sequence[Case] | None = None,
    config: Config | None = None,
) -> int:
    """Runs the demo and returns the exit status: 0 where everything agrees.

    `attention` stands in for flashtile's, the other options for the usual shapes.
    """
    if attention is None:
        import flashtile

        attention = flashtile.attention
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console = command.wide_console()
    console.print(f"flashtile on {_device_name(device)}\n")
    agreements = [
        show_exactness(console, device, attention),
        show_speed(console, device, attention, suites.demo(device.type) if speed_cases is None else speed_cases),
        show_training(console, device, attention, seconds, output, config or Config()),
    ]
    if all(agreements):
        console.print("\n[bold green]Everything agrees.[/bold green]")
        return 0
    console.print("\n[bold red]Something disagrees; see above.[/bold red]")
    return 1


def show_exactness(console: Console, device: torch.device, attention: Attention) -> bool:
    with _progress(console) as progress:
        rows = list(
            progress.track(
                exactness.check_all(device, attention), len(exactness.cases(device.type)), description="exactness"
            )
        )
    console.print("largest error against float64", style="bold")
    console.print(exactness.table(rows))
    console.print("pass: every error is at most twice SDPA's, plus a rounding of the largest value (docs/contract.md)")
    console.print()
    return all(row.ok for row in rows)


def show_speed(console: Console, device: torch.device, attention: Attention, cases: Sequence[Case]) -> bool:
    effort = timing.CUDA_EFFORT if device.type == "cuda" else timing.DEMO_CPU_EFFORT
    cells: list[Cell] = []
    with _progress(console) as progress:
        cells += progress.track(run_cases(cases, device, effort, attention), len(cases), description="speed")
    command.show(console, report.to_record("demo", {}, cells))
    console.print()
    return not any(entry.wrong for cell in cells for entry in cell.entries)


def show_training(
    console: Console, device: torch.device, attention: Attention, seconds: float, output: Path, config: Config
) -> bool:
    contenders: dict[str, CausalAttention] = {
        "flashtile": lambda q, k, v: attention(q, k, v, causal=True),
        "PyTorch SDPA": _sdpa,
    }
    if device.type == "cuda":  # whose kernels take no float32
        contenders = {name: _in_bfloat16(contender) for name, contender in contenders.items()}
    corpus = training.standard_library_bytes()
    with console.status("timing a training step"):
        steps = training.steps_for(seconds, list(contenders.values()), corpus, device, config)
    runs = {}
    with _progress(console, TextColumn("loss {task.fields[loss]:.3f}")) as progress:
        for name, contender in contenders.items():
            task = progress.add_task(f"training with {name}", total=steps, loss=float("nan"))
            on_step = functools.partial(_advance, progress, task)
            runs[name] = training.train(contender, corpus, steps, device, config, on_step)
    return _compare(console, runs["flashtile"], runs["PyTorch SDPA"], training.TOLERANCES[device.type], output)


def _compare(
    console: Console, ours: training.Run, theirs: training.Run, tolerance: training.Tolerance, output: Path
) -> bool:
    steps = len(ours.losses)
    gaps = [abs(a - b) for a, b in zip(ours.losses, theirs.losses, strict=True)]
    allowed = tolerance.limits(steps)
    agree = all(gap <= limit for gap, limit in zip(gaps, allowed, strict=True))
    title = f"A byte-level GPT, {steps} steps on Python's standard library, two attentions"
    picture.draw(output, ours.losses, theirs.losses, allowed, title)
    console.print(f"Training: {steps} steps, {ours.seconds:.1f} s with flashtile, {theirs.seconds:.1f} s with SDPA")
    console.print(
        f"loss {ours.losses[0]:.4f} → {ours.losses[-1]:.4f} with flashtile, {theirs.losses[0]:.4f} → "
        f"{theirs.losses[-1]:.4f} with SDPA: " + ("[green]agree[/green]" if agree else "[bold red]DISAGREE[/bold red]")
    )
    early, late = gaps[: tolerance.early_steps], gaps[tolerance.early_steps :]
    console.print(
        f"largest difference {max(early):.1e} in the first {len(early)} steps, tolerance {tolerance.early:g}"
        + (f"; {max(late):.1e} after them, tolerance {tolerance.late:g}" if late else "")
    )
    console.print(f"drawn in {output}")
    sample = ours.model.generate(b"def ", SAMPLE_BYTES).decode(errors="replace")
    console.print("\nWhat the model writes after so short a training:", style="dim")
    console.print(sample, markup=False, highlight=False, style="dim")
    return agree


def _advance(progress: Progress, task: TaskID, loss: float) -> None:
    progress.update(task, advance=1, loss=loss)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _in_bfloat16(attention: CausalAttention) -> CausalAttention:
    return lambda q, k, v: attention(*(x.bfloat16() for x in (q, k, v))).to(q.dtype)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"the CPU, {torch.get_num_threads()} threads"


def _progress(console: Console, *columns: TextColumn) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        *columns,
        console=console,
    )
