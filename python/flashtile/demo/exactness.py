"""The exactness table: a dozen shapes against float64, by the oracle of the benchmarks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from rich import box
from rich.table import Table

from flashtile.bench.cases import Case, make_inputs
from flashtile.bench.oracle import Oracle, Verdict, results
from flashtile.bench.peers import Peer, peers_of


@dataclasses.dataclass(frozen=True)
class Row:
    case: Case
    verdicts: Sequence[Verdict]

    @property
    def ok(self) -> bool:
        return all(verdict.ok for verdict in self.verdicts)


def cases(device_type: str) -> list[Case]:
    # The CUDA kernels serve the 16-bit types.
    wide = "float32" if device_type == "cpu" else "float16"
    return [
        Case.square(2, 128, 4, 64, dtype=wide),
        Case.square(1, 333, 3, 128, dtype=wide, causal=True),
        Case.square(2, 257, 2, 40, dtype=wide),
        Case.square(1, 512, 2, 256, dtype=wide, causal=True),
        Case(2, 100, 300, 8, 2, 64, 64, dtype=wide, causal=True),
        Case(1, 384, 384, 4, 4, 96, 96, dtype=wide, window=(64, 64)),
        Case(1, 500, 500, 4, 1, 128, 128, dtype="bfloat16", causal=True),
        Case(1, 777, 777, 4, 4, 64, 64, dtype="bfloat16", causal=True, window=(100, None)),
        Case(2, 1, 1000, 8, 2, 128, 128, dtype="bfloat16"),
        Case(1, 256, 256, 4, 2, 192, 128, dtype="bfloat16", causal=True),
        Case.square(1, 1024, 4, 128, dtype="bfloat16"),
        Case.square(2, 300, 4, 80, dtype="float16", causal=True),
        Case(1, 200, 456, 6, 3, 104, 72, dtype="float16", window=(None, 50)),
    ]


def check(case: Case, device: torch.device, attention: Callable[..., torch.Tensor]) -> Row:
    ours: Peer = peers_of(device.type, attention)[0]
    inputs = make_inputs(case, device)
    found = results(ours.attention, inputs, case, gradients=True)
    return Row(case, Oracle(inputs, case, gradients=True).judge(found))


def check_all(device: torch.device, attention: Callable[..., torch.Tensor]) -> Iterator[Row]:
    for case in cases(device.type):
        yield check(case, device, attention)


def table(rows: Sequence[Row]) -> Table:
    """Errors of flashtile and of SDPA: of the output, and the largest among the three gradients."""
    result = Table(header_style="bold", box=box.SIMPLE_HEAD)
    for heading in ("shape", "mask", "dtype"):
        result.add_column(heading)
    for heading in ("out\nflashtile", "out\nSDPA", "gradients\nflashtile", "gradients\nSDPA", "verdict"):
        result.add_column(heading, justify="right")
    for row in rows:
        out, *gradients = row.verdicts
        worst = max(gradients, key=lambda verdict: verdict.error)
        result.add_row(
            *(row.case.shape_name, row.case.mask_name, row.case.dtype),
            *(f"{out.error:.1e}", f"{out.torch_error:.1e}"),
            *(f"{worst.error:.1e}", f"{worst.torch_error:.1e}"),
            "[green]pass[/green]" if row.ok else "[bold red]FAIL[/bold red]",
        )
    return result
