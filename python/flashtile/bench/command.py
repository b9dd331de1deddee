"""`flashtile bench`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from flashtile._refusal import Refusal
from flashtile.bench import machine, plots, report, suites, timing
from flashtile.bench.cases import Case
from flashtile.bench.decode import OURS_ALL, SUITES
from flashtile.bench.found import found_peers
from flashtile.bench.further import further_peers
from flashtile.bench.profile import HINT, Profiler
from flashtile.bench.rivals import attention_of_any, rivals_of
from flashtile.bench.run import (
    Cell,
    run_cases,
    run_drawn_cases,
    run_host_cases,
    run_memory_cases,
    run_profiled_cases,
    usual_peers,
)
from flashtile.bench.serving import SUITE, attention_of_serving


def measure(
    suite: str | None,
    *,
    dtype: str = "bfloat16",
    full: bool = False,
    quick: bool = False,
    json_path: Path | None = None,
    plots_folder: Path | None = None,
    attention: Callable[..., torch.Tensor] | None = None,
    cases: Sequence[Case] | None = None,
    peers: Sequence[str] = (),
    flex: bool = False,
    profile: bool = False,
    seed: int | None = None,
) -> int:
    """Runs a suite and returns the exit status: 0 where flashtile was right everywhere. With `profile` calls are not
    timed but looked into.

    `attention` stands in for flashtile's, in suite varlen for its attention_varlen, in suites decode and prefill for
    its attention_kvcache, in suites random, invariant and max-logits for `rivals.attention_of_any`, in suite serving
    for `attention_of_serving`; `cases` for the suite's. `peers` (NAME=MODULE:FUNCTION) run beside the usual peers of
    all suites but serving, host, cpu, invariant and max-logits, and so does by `flex` FlexAttention in forward,
    backward, masks, decode and random. `seed` is that of suite random, by default 0.
    """
    has_cuda = torch.cuda.is_available()
    suite = suite or ("forward" if has_cuda else "cpu")
    attention = attention or _attention_of(suite)
    if seed is not None and suite != "random":
        raise Refusal(f"bench: --seed is given with suite {suite!r}, expected suite 'random'")
    if plots_folder:
        plots.check(suite)
    further = further_peers(suite, peers, flex=flex)
    if suite in ("forward", "backward", "memory") and not has_cuda:
        raise Refusal(f"bench: suite {suite} needs a CUDA device, and torch sees none; try --suite cpu")
    if suite in ("fp8", "random") and cases is None and not (has_cuda or quick):
        raise Refusal(f"bench: suite {suite} needs a CUDA device, and torch sees none; try --quick")
    console = wide_console()
    device = torch.device("cuda" if has_cuda and suite != "cpu" else "cpu")
    if cases is None:
        choose = suites.quick if quick else suites.cases
        options = {} if quick else {"full": full, "seed": seed or 0}
        cases = choose(suite, dtype=dtype, device_type=device.type, **options)

    there, versions = found_peers(suite, device.type)
    asked = {peer.name for peer in further}
    further = [*(peer for peer in there if peer.name not in asked), *further]

    facts = machine.describe(device) | ({"peers": versions} if versions else {})
    if suite == "decode" and device.type == "cuda":
        facts["read_gb_s"] = machine.read_gb_s(device)
    console.print(f"{facts['device']}, torch {facts['torch']}, flashtile {facts['flashtile']} {facts['commit']}")
    for name, version in versions.items():
        console.print(f"{name} {version}", markup=False, soft_wrap=True)
    effort = _effort(suite, device, quick)
    of_options = {name: module.peers_of for name, module in suites.OF_OPTIONS.items()}
    usual = ({"random": rivals_of} | of_options).get(suite, usual_peers)
    if profile:
        running = run_profiled_cases(cases, device, Profiler(console), attention, further, usual)
    elif suite == "memory":
        running = run_memory_cases(cases, device, attention, further)
    elif suite == "host":
        running = run_host_cases(cases, device, effort, attention)
    elif suite == "random":
        running = run_drawn_cases(cases, device, effort, attention, further)
    else:
        running = run_cases(cases, device, effort, attention, further, usual)
    cells: list[Cell] = []
    with Progress(console=console) as progress:
        cells += progress.track(running, len(cases), description=suite)
    if device.type == "cuda":
        facts["readings_after"] = machine.gpu_readings(device)

    record = report.to_record(suite, facts, cells)
    if suite == "random":
        record["seed"] = seed or 0
    if profile:
        _print_lines(console, report.remarks(record))
        console.print(HINT.format(suite=suite), markup=False, soft_wrap=True)
        return _exit_status(cells)
    show(console, record)
    if json_path:
        report.write(json_path, record)
        console.print(f"stored in {json_path}")
    if plots_folder:
        picture = plots_folder / f"{suite}.svg"
        plots.draw(record, picture)
        console.print(f"drawn in {picture}")
    return _exit_status(cells)


def _attention_of(suite: str) -> Callable[..., torch.Tensor]:
    import flashtile

    if suite in ("random", *suites.OF_OPTIONS):
        return attention_of_any
    if suite == SUITE:
        return attention_of_serving
    names = {"varlen": "attention_varlen"} | dict.fromkeys(SUITES, "attention_kvcache")
    return getattr(flashtile, names.get(suite, "attention"))


def _exit_status(cells: Sequence[Cell]) -> int:
    return 1 if any(entry.wrong for cell in cells for entry in cell.entries if entry.name in OURS_ALL) else 0


def show(console: Console, record: report.Record) -> None:
    console.print(report.table(record))
    _print_lines(console, report.summary_lines(record) + report.remarks(record))


def _print_lines(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(line, markup=False)  # the words of a refusal are somebody else's, brackets and all


def show_stored(
    paths: Sequence[Path], page: Path | None, *, plots_folder: Path | None = None, brief: bool = False
) -> int:
    """Prints stored runs as Markdown, or puts them between the result marks of `page`; draws them if told where."""
    if page:
        report.around_results(page)  # nothing is drawn for a page that has no place for it
    from flashtile.bench import ranks

    records = [report.read(path) for path in paths]
    served = suites.NAMES if brief else (*suites.NAMES, "distributed")
    for path, record in zip(paths, records, strict=True):
        with report.reading(path):
            if record["suite"] not in served:
                expected = f"expected one of {', '.join(served)}"
                raise Refusal(f"bench: {path} has suite {record['suite']!r}, {expected}")
    names = [record["suite"] for record in records]
    if plots_folder and len(set(names)) < len(names):
        raise Refusal(f"bench: --plots draws suites {', '.join(names)}, expected one run of each")
    if plots_folder:
        for name in names:
            plots.check(name)
    pictures = [plots_folder and plots_folder / f"{name}.svg" for name in names]
    links = [_link(picture, page) for picture in pictures]
    texts = []
    for path, record, link in zip(paths, records, links, strict=True):
        with report.reading(path):
            of_page = ranks.markdown if record["suite"] == "distributed" else report.markdown
            texts.append(report.brief_row(record) if brief else of_page(record, link))
    for path, record, picture in zip(paths, records, pictures, strict=True):
        if picture:
            with report.reading(path):
                plots.draw(record, picture)
    report.publish(report.brief(texts) if brief else "\n\n".join(texts), page)
    return 0


def _link(picture: Path | None, page: Path | None) -> str | None:
    if picture is None:
        return None
    return Path(os.path.relpath(picture, page.parent if page else Path())).as_posix()


def wide_console() -> Console:
    """A console that leaves tables whole where its output is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=180)


def _effort(suite: str, device: torch.device, quick: bool) -> timing.Effort:
    if quick:
        return timing.QUICK_EFFORT
    if suite == "host":
        return timing.HOST_EFFORT
    if suite in ("decode", SUITE) and device.type == "cuda":
        return timing.DECODE_EFFORT
    if suite == "random" and device.type == "cuda":
        return timing.DRAWN_EFFORT
    return timing.CUDA_EFFORT if device.type == "cuda" else timing.CPU_EFFORT
