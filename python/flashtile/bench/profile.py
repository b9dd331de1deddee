"""What a call consists of, by PyTorch's profiler; NVTX ranges name the calls for profilers from outside."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile, record_function

from flashtile.bench.cases import Case
from flashtile.bench.peers import Contestant

CALLS = 5
ROWS = 20
# Set in a process that Nsight or its like looks into: the interface to the GPU serves one profiler at a time.
OUTSIDE = ("NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH")
HINT = """\
The same calls in Nsight, each in an NVTX range "CONTESTANT: CASE" (PyTorch's profiler then stands aside):
  nsys profile --trace=cuda,nvtx flashtile bench --suite {suite} --profile
  ncu --nvtx --set full --export profile flashtile bench --suite {suite} --profile --quick"""


class Profiler:
    """Runs contestants in place of timing them, and prints a table for each case."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __call__(self, contestants: Sequence[Contestant], case: Case, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        if any(name in os.environ for name in OUTSIDE):
            self._run(contestants, case, device)
            return
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
        with profile(activities=activities) as found:
            self._run(contestants, case, device)
        self._console.rule(str(case))
        order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        table = found.key_averages().table(sort_by=order, row_limit=ROWS, max_name_column_width=70)
        self._console.print(table, markup=False, highlight=False, soft_wrap=True)

    def _run(self, contestants: Sequence[Contestant], case: Case, device: torch.device) -> None:
        for contestant in contestants:
            with contestant.setting(), _range(f"{contestant.name}: {case}", device):
                for _ in range(CALLS):
                    contestant.call()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)


@contextlib.contextmanager
def _range(name: str, device: torch.device) -> Iterator[None]:
    nvtx = torch.cuda.nvtx.range(name) if device.type == "cuda" else contextlib.nullcontext()
    with nvtx, record_function(name):
        yield
