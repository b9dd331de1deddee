"""How much device memory a call takes beyond its inputs: by PyTorch's allocator, and by the contract's formula."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch

from flashtile import _capability
from flashtile.bench.cases import Case, Work
from flashtile.bench.peers import Contestant

FORMULA = "formula"  # its column


def peaks(contestants: Sequence[Contestant], device: torch.device) -> list[int]:
    return [peak_bytes(contestant, device) for contestant in contestants]


def peak_bytes(contestant: Contestant, device: torch.device) -> int:
    """The most that was allocated at once during a call, beyond what was before it; its results count.

    What a package allocates past PyTorch's allocator is not seen, nor what it has kept since an earlier call.
    """
    with contestant.setting():
        contestant.call()  # what a first call loads or keeps is not a later one's
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = contestant.call()
        torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del result
    return peak


def formula_bytes(case: Case) -> int:
    """What docs/contract.md says of flashtile on a GPU, without the rounding of rows to tiles: the results; with
    autograd 8 bytes for each row's softmax; and in backward 4·(D + 4) for each row's sums, on Hopper 16 where dq is
    formed in a pass of its own."""
    rows = case.batch * case.heads_q * case.seqlen_q
    element = case.torch_dtype.itemsize
    if case.work is not Work.BACKWARD:
        return rows * (case.head_dim_v * element + (8 if case.work is Work.FORWARD_WITH_GRAD else 0))
    keys = case.batch * case.heads_k * case.seqlen_k
    gradients = (rows * case.head_dim + keys * (case.head_dim + case.head_dim_v)) * element
    two_passes = _capability.of_device() == 90 and max(case.head_dim, case.head_dim_v) > 128
    return gradients + rows * (16 if two_passes else 4 * (case.head_dim + 4))
