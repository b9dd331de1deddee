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
from pathlib import Path

import torch

from flashtile._refusal import Refusal
from flashtile.bench import machine, report, timing
from flashtile.bench.cases import Case, make_inputs
from flashtile.bench.command import wide_console
from flashtile.bench.fp8 import Rounded
from flashtile.bench.peers import Peer
from flashtile.bench.run import Entry, by_time, run_cell
from flashtile.fp8 import Quantized
from flashtile.reference import RUNGS, RoundedRung, Rung, record, rung
from flashtile.reference.record import METRICS

# A rung is a range: all that is between a start and a stop of the profiler, counted as one, kernels and caches being as
# they are without ncu. `once` clears the caches before each. With ranges ncu refuses --profile-from-start: nothing else
# is counted anyway. Should it need several passes, it runs the program several times.
NCU: tuple[str, ...] = ("ncu", "--replay-mode", "app-range", "--cache-control", "none", "--clock-control", "none")
NCU += ("--metrics", ",".join(METRICS), "--print-units", "base", "--csv")
NCU_SECONDS = 600  # then it is stopped
NCU_LINES = 40  # of the end of what it printed, where that was not what we expected


def show(
    case: Case,
    device: torch.device,
    *,
    quick: bool = False,
    measure: bool = False,
    json_path: Path | None = None,
    rungs: Sequence[Rung] = RUNGS,
) -> int:
    """Prints the table; returns the exit status, 1 where a rung was wrong. With `measure` a second table follows, of
    the bytes that ncu counts; the status is 1 as well where one is missing. With `json_path` all of it is stored."""
    if measure and (device.type != "cuda" or shutil.which(NCU[0]) is None):
        raise Refusal("ladder: --measure needs an NVIDIA GPU, and ncu (Nsight Compute) on PATH")
    _check_memory(case, device)
    console = wide_console()
    facts = machine.describe(device)
    console.print(f"{facts['device']}, torch {facts['torch']}, flashtile {facts['flashtile']} {facts['commit']}")
    entries = _entries(case, device, quick, rungs)
    if device.type == "cuda":
        facts["readings_after"] = machine.gpu_readings(device)
    run = record.to_record(facts, case, entries, rungs)
    console.print(record.table(run))
    for line in [*report.remarks(run), *record.LEGEND]:
        console.print(line, markup=False)
    failed = any(entry.wrong for entry in entries.values())
    if measure:
        ran = [each for each in rungs if not entries[each.key].refusal]
        console.print(f"Now ncu counts the bytes of {len(ran)} rungs, which may take some minutes.")
        torch.cuda.empty_cache()  # they run again in another process
        counts = count(ran, case)
        record.add_counts(run, counts)
        if counts:
            console.print(record.counts_table(run))
        failed = failed or not _complete(counts, ran)
    if json_path:
        report.write(json_path, run)
        console.print(f"stored in {json_path}")
    return 1 if failed else 0


def show_stored(path: Path, page: Path | None) -> int:
    """Prints a stored run as Markdown, or puts it between the result marks of `page`."""
    run = report.read(path)
    with report.reading(path):
        if run["suite"] != record.SUITE:
            raise Refusal(f"ladder: {path} has suite {run['suite']!r}, expected {record.SUITE!r}")
        text = record.markdown(run)
    report.publish(text, page)
    return 0


def once(keys: Sequence[str], case: Case, device: torch.device) -> int:
    """Runs these rungs a single time each, between a start and a stop of CUDA's profiler of its own, with nothing else
    in between. A rung that fails is left out; the exit status is 2 where none is left."""
    chosen_rungs = [rung(key) for key in keys]
    _check_memory(case, device)
    q, k, v, _ = make_inputs(case, device)
    ready = []
    for chosen in chosen_rungs:
        try:
            attention = chosen.bound(q, k, v)
            attention(causal=case.causal)  # what compiles does so here
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as refusal:  # a rung may fail in any way, and the others run nevertheless
            print(f"flashtile: ladder: --once leaves out {chosen.key!r}: {refusal}", file=sys.stderr, flush=True)
        else:
            ready.append((chosen, attention))
    for chosen, attention in ready:
        if device.type == "cuda":
            # Reading this leaves none of the inputs in the L2 cache, nor anything that has yet to be written back.
            l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
            torch.zeros(2 * l2_bytes, dtype=torch.int8, device=device).sum()
            torch.cuda.synchronize(device)
            torch.cuda.profiler.start()
        attention(causal=case.causal)
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
    reasons = {each.key: each.refusal(case, device) for each in rungs}
    peers = [_peer(each) for each in rungs if reasons[each.key] is None]
    effort = timing.CUDA_EFFORT if device.type == "cuda" else timing.CPU_EFFORT
    measure = by_time(device, timing.QUICK_EFFORT if quick else effort)
    ran = run_cell(peers, make_inputs(case, device), case, measure)
    found = {key: Entry(key, refusal=reason) for key, reason in reasons.items() if reason}
    return found | {entry.name: entry for entry in ran}


def _check_memory(case: Case, device: torch.device) -> None:
    """Refuses what is sure to be too large: inputs, a gradient, and a result of the rung and one to compare it with."""
    free = machine.free_memory(device)
    if 2 * case.bytes > free:
        least, most = (f"{number / 2**30:,.1f} GiB" for number in (2 * case.bytes, free))
        raise Refusal(f"ladder: {case} takes at least {least}, expected at most the {most} that are free")


def _peer(each: Rung) -> Peer:
    if isinstance(each, RoundedRung):

        def of_numbers(x: Quantized, case: Case) -> torch.Tensor:
            return each.of_numbers(x, causal=case.causal, out_dtype=case.torch_dtype)

        return Peer(each.key, Rounded(each.rounding, of_numbers), rounding=each.rounding, by_inputs=True)
    return Peer(each.key, lambda q, k, v, case: each.attention(q, k, v, causal=case.causal))


def _complete(counts: dict[str, dict[str, float]], rungs: Sequence[Rung]) -> bool:
    return all(len(counts.get(each.key, {})) == len(METRICS) for each in rungs)
