"""`flashtile ladder`: every rung that runs on this device, checked against float64, then timed, in one table."""

from __future__ import annotations

import contextlib
import csv
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence

import torch
from rich import box
from rich.markup import escape
from rich.table import Table

from flashtile.bench import machine, timing
from flashtile.bench.cases import Case, make_inputs
from flashtile.bench.command import wide_console
from flashtile.bench.peers import Peer
from flashtile.bench.run import Entry, by_time, run_cell
from flashtile.reference import RUNGS, Rung, rung

METRICS = ("dram__bytes.sum", "lts__t_bytes.sum")  # what HBM carried, and what L2 was asked for
# A rung is a range: all that is between a start and a stop of the profiler, counted as one, kernels and caches being as
# they are without ncu. `once` clears the caches before each. With ranges ncu refuses --profile-from-start: nothing else
# is counted anyway. Should it need several passes, it runs the program several times.
NCU = ("ncu", "--replay-mode", "app-range", "--cache-control", "none", "--clock-control", "none")
NCU += ("--metrics", ",".join(METRICS), "--print-units", "base", "--csv")
NCU_SECONDS = 600  # then it is stopped
NCU_LINES = 40  # of the end of what it printed, where that was not what we expected


def show(
    case: Case, device: torch.device, *, quick: bool = False, measure: bool = False, rungs: Sequence[Rung] = RUNGS
) -> int:
    """Prints the table; returns the exit status, 1 where a rung was wrong. With `measure` a second table follows, of
    the bytes that ncu counts; the status is 1 as well where one is missing."""
    console = wide_console()
    if measure and (device.type != "cuda" or shutil.which(NCU[0]) is None):
        console.print("ladder: --measure needs an NVIDIA GPU, and ncu (Nsight Compute) on PATH")
        return 2
    entries = _entries(case, device, quick, rungs)
    facts = machine.describe(device)
    console.print(f"{facts['device']}, torch {facts['torch']}, flashtile {facts['flashtile']} {facts['commit']}")
    table = _table(f"the ladder, {case}", "time", "TFLOP/s", "bytes by formula", "of the least", "error", "allowed")
    table.add_column("")
    for each in rungs:
        entry = entries[each.key]
        table.add_row(
            *_name_cells(each), *_time_cells(entry, case), *_bytes_cells(each, entry, case), *_error_cells(entry)
        )
    console.print(table)
    console.print(
        "error: the largest against float64, over one KV head. bytes: between HBM and the multiprocessors, if no cache "
        "helped; the least is Q, K, V and O once. docs/ladder.md explains both."
    )
    failed = any(entry.wrong for entry in entries.values())
    if measure:
        ran = [each for each in rungs if not entries[each.key].refusal]
        console.print(f"Now ncu counts the bytes of {len(ran)} rungs, which may take some minutes.")
        torch.cuda.empty_cache()  # they run again in another process
        counts = count(ran, case)
        if counts:
            console.print(_counts_table(ran, counts, case))
        failed = failed or not _complete(counts, ran)
    return 1 if failed else 0


def once(keys: Sequence[str], case: Case, device: torch.device) -> int:
    """Runs these rungs a single time each, between a start and a stop of CUDA's profiler of its own, with nothing else
    in between. A rung that fails is left out; the exit status is 2 where none is left."""
    q, k, v, _ = make_inputs(case, device)
    ready = []
    for chosen in [rung(key) for key in keys]:
        try:
            chosen.attention(q, k, v, causal=case.causal)  # what compiles does so here
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as refusal:  # a rung may fail in any way, and the others run nevertheless
            print(f"flashtile: ladder: --once leaves out {chosen.key!r}: {refusal}", file=sys.stderr, flush=True)
        else:
            ready.append(chosen)
    for chosen in ready:
        if device.type == "cuda":
            # Reading this leaves none of the inputs in the L2 cache, nor anything that has yet to be written back.
            l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
            torch.zeros(2 * l2_bytes, dtype=torch.int8, device=device).sum()
            torch.cuda.synchronize(device)
            torch.cuda.profiler.start()
        chosen.attention(q, k, v, causal=case.causal)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.profiler.stop()
        print(_report(chosen), chosen.bytes_moved(case), "bytes by formula", flush=True)  # amid what ncu prints
    return 0 if ready else 2


def ncu_command(keys: Sequence[str], case: Case) -> list[str]:
    """The command that has ncu count the bytes of these rungs, a range each; docs/ladder.md shows it."""
    sizes = {
        "batch": case.batch,
        "seqlen-q": case.seqlen_q,
        "seqlen": case.seqlen_k,
        "heads": case.heads_q,
        "kv-heads": case.heads_k,
        "head-dim": case.head_dim,
        "dtype": case.dtype,
    }
    ours = [sys.executable, "-c", "import sys; from flashtile.cli import main; sys.exit(main())", "ladder"]
    options = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    return [*NCU, *ours, "--once", *keys, "--device", "cuda", *options, *(["--causal"] if case.causal else [])]


def count(rungs: Sequence[Rung], case: Case) -> dict[str, dict[str, float]]:
    """Bytes by rung's key and metric, from one run of ncu; where some are missing, stderr has what ncu said."""
    output = _output_of(ncu_command([each.key for each in rungs], case))
    try:
        counts = counts_in(output, rungs)
    except ValueError as error:
        print(f"flashtile: ladder: --measure: {error}", file=sys.stderr)
        counts = {}
    if not _complete(counts, rungs):
        lines = [line for line in output.splitlines() if not line.startswith('"')]  # all but its table
        print("flashtile: ladder: ncu's last lines:", *lines[-NCU_LINES:], sep="\n", file=sys.stderr)
    return counts


def counts_in(output: str, rungs: Sequence[Rung]) -> dict[str, dict[str, float]]:
    """Bytes by rung's key and metric in what `ncu --csv` and `once` of `rungs` printed. A ValueError where there is not
    one range for each rung that ran, so that nobody could tell whose they are."""
    ran = [each.key for each in rungs if _report(each) in output]
    ranges: dict[int, dict[str, float]] = {}
    _, heading, rows = output.partition('"ID",')
    for row in csv.DictReader((heading + rows).splitlines()):
        if (metric := row.get("Metric Name")) in METRICS:
            counted = ranges.setdefault(int(row["ID"]), {})
            with contextlib.suppress(ValueError):  # n/a
                counted[metric] = float((row["Metric Value"] or "").replace(",", ""))
    if not ranges or len(ranges) != len(ran):
        errors = [line for line in output.splitlines() if line.startswith("==ERROR==")]
        raise ValueError(errors[0] if errors else f"{len(ran)} rungs ran, and ncu counted {len(ranges)} ranges")
    return dict(zip(ran, (ranges[number] for number in sorted(ranges)), strict=True))


def _report(each: Rung) -> str:
    """What `once` says of a rung that ran, before its bytes."""
    return f"{each.key} ran once:"


def _output_of(ncu: Sequence[str]) -> str:
    """What ncu and the program under it print, in order; after NCU_SECONDS both are stopped."""
    with subprocess.Popen(
        ncu,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        env=os.environ | {"LC_ALL": "C"},  # ncu groups digits as the locale does
        start_new_session=True,
    ) as process:
        try:
            return process.communicate(timeout=NCU_SECONDS)[0]
        except BaseException as stop:  # or Ctrl-C, which does not reach another session
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(stop, subprocess.TimeoutExpired):
                raise
        return f"{process.communicate()[0]}\n==ERROR== ncu was stopped after {NCU_SECONDS} seconds\n"


def _entries(case: Case, device: torch.device, quick: bool, rungs: Sequence[Rung]) -> dict[str, Entry]:
    """What became of every rung: a reason, or its error and, if that is small enough, its time."""
    reasons = {each.key: each.available(device) for each in rungs}
    peers = [_peer(each) for each in rungs if reasons[each.key] is None]
    effort = timing.CUDA_EFFORT if device.type == "cuda" else timing.CPU_EFFORT
    measure = by_time(device, timing.QUICK_EFFORT if quick else effort)
    ran = run_cell(peers, make_inputs(case, device), case, measure)
    found = {key: Entry(key, refusal=reason) for key, reason in reasons.items() if reason}
    return found | {entry.name: entry for entry in ran}


def _peer(each: Rung) -> Peer:
    return Peer(each.key, lambda q, k, v, case: each.attention(q, k, v, causal=case.causal))


def _table(title: str, *headings: str) -> Table:
    """Of a row for each rung, which begins with `_name_cells`."""
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("", justify="right")
    table.add_column("rung")
    table.add_column("key")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _counts_table(rungs: Sequence[Rung], counts: dict[str, dict[str, float]], case: Case) -> Table:
    table = _table("counted by ncu", "bytes by formula", *METRICS)
    for each in rungs:
        found = counts.get(each.key, {})
        cells = [_megabytes(found[metric]) if metric in found else "—" for metric in METRICS]
        table.add_row(*_name_cells(each), _megabytes(each.bytes_moved(case)), *cells)
    return table


def _complete(counts: dict[str, dict[str, float]], rungs: Sequence[Rung]) -> bool:
    return all(len(counts.get(each.key, {})) == len(METRICS) for each in rungs)


def _name_cells(each: Rung) -> list[str]:
    return [str(each.number), each.title, each.key]


def _megabytes(number: float) -> str:
    return f"{number / 1e6:,.1f} MB"


def _time_cells(entry: Entry, case: Case) -> list[str]:
    if entry.timing is None:
        return ["—", "—"]
    seconds = entry.timing.median
    time = f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"
    return [time, f"{case.flops / seconds / 1e12:.3g}"]


def _bytes_cells(each: Rung, entry: Entry, case: Case) -> list[str]:
    if entry.refusal:
        return ["—", "—"]
    moved = each.bytes_moved(case)
    return [_megabytes(moved), f"{moved / case.bytes:.2f}×"]


def _error_cells(entry: Entry) -> list[str]:
    if entry.refusal:
        return ["—", "—", escape(entry.refusal)]
    (verdict,) = entry.verdicts
    return [f"{verdict.error:.2e}", f"{verdict.allowed:.2e}", "" if verdict.ok else "WRONG"]
