"""Is a result right? Its error against float64 may be at most twice that of PyTorch's own attention.

Both errors are maxima of absolute differences. The criterion is FlashAttention's; float64 attention is written out here
so that nothing under test takes part in it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from flashtile.bench.cases import Case, Inputs, visible

GRADIENTS = ("dq", "dk", "dv")
# Rows are independent, so the float64 scores exist for this many at a time.
ROWS_AT_A_TIME = 2048

# Attention over (B, S, H, D) tensors, masked as the case says.
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Case], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One tensor's largest error against float64, and what it was allowed to be."""

    name: str
    error: float
    torch_error: float
    slack: float

    @property
    def allowed(self) -> float:
        return 2 * self.torch_error + self.slack

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed  # a NaN is never ok


def attention_float64(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> torch.Tensor:
    """softmax(QKᵀ/√D + mask)·V in float64; a row that sees nothing gives 0."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    blocks = []
    for begin in range(0, case.seqlen_q, ROWS_AT_A_TIME):
        end = min(begin + ROWS_AT_A_TIME, case.seqlen_q)
        keep = visible(case, q.device, begin, end)
        scores = (q[:, :, begin:end] @ k.mT / math.sqrt(case.head_dim)).masked_fill(~keep, -math.inf)
        dead = ~keep.any(dim=-1, keepdim=True)
        # softmax of a row of −inf is NaN, and so would its gradient be.
        blocks.append(scores.masked_fill(dead, 0).softmax(dim=-1).masked_fill(dead, 0) @ v)
    return torch.cat(blocks, dim=2).transpose(1, 2)


def attention_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> torch.Tensor:
    """PyTorch's scaled_dot_product_attention, with an explicit mask where it has no name for ours."""
    keep = None if case.is_square_band else visible(case, q.device)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=keep,
        is_causal=keep is None and not case.is_full,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def results(attention: Attention, inputs: Inputs, case: Case, *, gradients: bool) -> dict[str, torch.Tensor]:
    """The output and, where asked, dq, dk and dv."""
    if not gradients:
        with torch.no_grad():
            return {"out": attention(*inputs[:3], case)}
    q, k, v = leaves = [t.detach().clone().requires_grad_() for t in inputs[:3]]
    out = attention(q, k, v, case)
    # The graph is kept as in the timed calls: what torch.compile makes for one that is not would refuse them.
    grads = torch.autograd.grad(out, leaves, inputs.dout.to(out.dtype), retain_graph=True)
    return {"out": out.detach(), **dict(zip(GRADIENTS, grads, strict=True))}


class Oracle:
    """Knows the float64 results of one problem and PyTorch's own error on it."""

    def __init__(self, inputs: Inputs, case: Case, *, gradients: bool) -> None:
        self.exact = results(attention_float64, inputs, case, gradients=gradients)
        found = results(attention_sdpa, inputs, case, gradients=gradients)
        self.torch_errors = {name: _max_error(found[name], self.exact[name]) for name in found}
        # PyTorch may be exact by luck, or sum in a kinder order: one rounding of the result's type is allowed, and
        # four of the float32 that it is summed in.
        self.eps = torch.finfo(case.torch_dtype).eps + 4 * torch.finfo(torch.float32).eps

    def judge(self, found: dict[str, torch.Tensor]) -> list[Verdict]:
        """One verdict for each tensor in `found`."""
        return [
            Verdict(
                name,
                error=_max_error(found[name], self.exact[name]),
                torch_error=self.torch_errors[name],
                slack=self.eps * _largest(self.exact[name]),
            )
            for name in found
        ]


def _max_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return _largest(found.double() - exact)


def _largest(values: torch.Tensor) -> float:
    return values.abs().max().item() if values.numel() else 0.0
