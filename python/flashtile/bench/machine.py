"""Where and with what a result was measured."""

from __future__ import annotations

import datetime
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

GPU_READINGS = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "temperature.gpu", "power.draw")
MATMUL_SIZE = 8192


def describe(device: torch.device) -> dict[str, object]:
    """Device, versions, commit and date, as stored beside every result."""
    facts: dict[str, object] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "flashtile": _flashtile_version(),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        facts |= {
            "device": torch.cuda.get_device_name(device),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "readings_before": gpu_readings(device),
            "matmul_tflops": matmul_tflops(device),
        }
    else:
        facts["device"] = f"{facts['cpu']}, {facts['threads']} threads"
    return facts


def gpu_readings(device: torch.device) -> dict[str, str]:
    """Driver, clocks, temperature and power as nvidia-smi reads them; empty where it does not answer."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    which = ["-i", f"GPU-{uuid}"] if uuid else []
    text = _output(["nvidia-smi", *which, f"--query-gpu={','.join(GPU_READINGS)}", "--format=csv,noheader"])
    return dict(zip(GPU_READINGS, (field.strip() for field in text.split(",")), strict=False)) if text else {}


def matmul_tflops(device: torch.device, size: int = MATMUL_SIZE, rounds: int = 10) -> float:
    """What this GPU's tensor cores gave a large bf16 product just now: the scale for every other number of the run."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return round(2 * size**3 / _median_ms(lambda: a @ b, rounds) / 1e9, 1)


def read_gb_s(device: torch.device, size: int = 2**32, rounds: int = 10) -> float:
    """What this GPU's memory gave just now to whoever only reads: the fastest of a few of PyTorch's reductions."""
    words = torch.ones(size // 4, device=device)
    rows, column = words.view(torch.bfloat16).view(-1, 2**14), torch.ones(2**14, device=device, dtype=torch.bfloat16)
    reductions = (
        words.sum,
        words.view(torch.int32).amax,
        lambda: words.view(-1, 2**14).sum(dim=1),
        lambda: words.view(-1, 2**14).amax(dim=1),
        lambda: rows @ column,
    )
    return round(max(size / _median_ms(reduction, rounds) / 1e6 for reduction in reductions), 1)


def free_memory(device: torch.device) -> float:
    """Bytes of the device's memory that a program may still take; infinity where nobody says."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    kib = (int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return next(kib, math.inf) * 1024


def commit() -> str:
    """FLASHTILE_COMMIT, else the commit of the checkout that this runs in, marked where files differ from it."""
    if named := os.environ.get("FLASHTILE_COMMIT"):
        return named
    if not Path("python/flashtile").is_dir():
        return ""
    revision = _output(["git", "rev-parse", "HEAD"])
    changed = _output(["git", "status", "--porcelain", "--untracked-files=no"])
    return revision + ("-dirty" if revision and changed else "")


def _median_ms(work: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[rounds // 2]


def _flashtile_version() -> str:
    import flashtile

    return getattr(flashtile, "__version__", "")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _output(command: list[str]) -> str:
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.strip() if done.returncode == 0 else ""
