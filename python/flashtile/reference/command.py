"""`flashtile ladder`: every rung that runs on this device, checked against float64, then timed, in one table."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from collections.abc import Sequence

import torch
from rich import box
from rich.table import Table

from flashtile.bench import machine, timing
from flashtile.bench.cases import Case, make_inputs
from flashtile.bench.command import wide_console
from flashtile.bench.peers import Peer
from flashtile.bench.run import Entry, by_time, run_cell
from flashtile.reference import RUNGS, Rung, rung

METRIC = "dram__bytes.sum"
# A rung is one call between the profiler's start and stop. Caches are left alone, so that a kernel finds in L2 what the
# one before it has left there; `once` clears them before the call.
NCU = ("ncu", "--profile-from-start", "off", "--cache-control", "none")
NCU += ("--metrics", METRIC, "--print-units", "base", "--csv")


def show(
    case: Case, device: torch.device, *, quick: bool = False, measure: bool = False, rungs: Sequence[Rung] = RUNGS
) -> int:
    """Prints the table; returns the exit status, 1 where a rung was wrong. `measure` adds the bytes that ncu counts."""
    console = wide_console()
    if measure and (device.type != "cuda" or shutil.which(NCU[0]) is None):
        console.print("ladder: --measure needs an NVIDIA GPU, and ncu (Nsight Compute) on PATH")
        return 2
    entries = _entries(case, device, quick, rungs)
    facts = machine.describe(device)
    console.print(f"{facts['device']}, torch {facts['torch']}, flashtile {facts['flashtile']} {facts['commit']}")
    table = Table(title=f"the ladder, {case}", title_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("", justify="right")
    table.add_column("rung")
    table.add_column("key")
    for heading in ("time", "TFLOP/s", "bytes by formula", "of the least"):
        table.add_column(heading, justify="right", no_wrap=True)
    if measure:
        table.add_column(f"{METRIC} by ncu", justify="right")
    for heading in ("error", "allowed"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for each in rungs:
        cells = [str(each.number), each.title, each.key]
        entry = entries[each.key]
        cells += _time_cells(entry, case) + _bytes_cells(each, entry, case)
        if measure:
            cells.append("—" if entry.refusal else _measured(each, case))
        table.add_row(*cells, *_error_cells(entry))
    console.print(table)
    console.print(
        "error: the largest against float64, over one KV head. bytes: between HBM and the multiprocessors, if no cache "
        "helped; the least is Q, K, V and O once. docs/ladder.md explains both."
    )
    return 1 if any(entry.wrong for entry in entries.values()) else 0


def once(key: str, case: Case, device: torch.device) -> int:
    """Runs one rung a single time between the start and the stop of CUDA's profiler; nothing else is between them."""
    chosen = rung(key)
    if reason := chosen.available(device):
        raise ValueError(f"ladder: --once is {key!r}, which {reason}")
    q, k, v, _ = make_inputs(case, device)
    chosen.attention(q, k, v, causal=case.causal)  # what compiles does so here
    if device.type == "cuda":
        # Reading this leaves none of the inputs in the L2 cache, nor anything that has yet to be written back.
        torch.zeros(2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.int8, device=device).sum()
        torch.cuda.synchronize(device)
        torch.cuda.profiler.start()
    chosen.attention(q, k, v, causal=case.causal)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.profiler.stop()
    # A comma-separated table by ncu may surround this line.
    print(f"{chosen.title} on {case}: {chosen.bytes_moved(case)} bytes by formula")
    return 0


def ncu_command(key: str, case: Case) -> list[str]:
    """The command that has ncu count the DRAM bytes of one rung; docs/ladder.md shows it."""
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
    return [*NCU, *ours, "--once", key, "--device", "cuda", *options, *(["--causal"] if case.causal else [])]


def ncu_bytes(output: str) -> float:
    """The metric's sum over all kernels in what `ncu --csv` printed; a ValueError where there is none."""
    lines = output.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = [row for row in csv.DictReader(lines[begin:]) if row.get("Metric Name") == METRIC]
    if not rows:
        errors = [line for line in lines if line.startswith("==ERROR==")]
        raise ValueError(errors[0] if errors else "ncu counted nothing")
    return sum(float(row["Metric Value"].replace(",", "")) for row in rows)


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
    return [f"{moved / 1e6:,.1f} MB", f"{moved / case.bytes:.2f}×"]


def _measured(each: Rung, case: Case) -> str:
    done = subprocess.run(ncu_command(each.key, case), capture_output=True, text=True, check=False)
    try:
        return f"{ncu_bytes(done.stdout + done.stderr) / 1e6:,.1f} MB"
    except ValueError as error:
        return str(error)


def _error_cells(entry: Entry) -> list[str]:
    if entry.refusal:
        return ["—", "—", entry.refusal]
    (verdict,) = entry.verdicts
    return [f"{verdict.error:.2e}", f"{verdict.allowed:.2e}", "" if verdict.ok else "WRONG"]
