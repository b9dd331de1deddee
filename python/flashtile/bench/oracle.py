"""Is a result right? Its error against float64 may be at most twice that of PyTorch's own attention.

Both errors are maxima of absolute differences. The criterion is FlashAttention's; float64 attention is written out here
so that nothing under test takes part in it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from flashtile.bench import options
from flashtile.bench.cases import Case, Inputs, distances, visible

GRADIENTS = ("dq", "dk", "dv")
# Rows are independent, so the float64 scores exist for this many at a time: a backward forms them again.
ROWS_AT_A_TIME = 2048
MASK_LIMIT = 2**31  # bytes of a mask that SDPA is given
# What comes of weights of e4m3: each is off by up to 1/16, and many average.
WEIGHTS_ERROR, WEIGHT_ERROR = 0.04, 1 / 16
TILE = 128  # rows, whose error is looked at by itself

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
    return attention_written(q.double(), k.double(), v.double(), case)


def attention_written(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> torch.Tensor:
    """softmax(QKᵀ/√D + mask)·V as docs/contract.md has it with softcap, ALiBi and sinks, in the dtype of the tensors; a
    row that sees nothing gives 0. Tensors of fewer heads than the case has are those of its last ones."""
    heads = q.shape[2]
    group = heads // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    sinks = options.sinks(case.heads_q, q.device)[-heads:].to(q.dtype) if case.sinks else None

    def block(begin: int, end: int) -> torch.Tensor:
        keep = visible(case, q.device, begin, end)
        scores = q[:, :, begin:end] @ k.mT / math.sqrt(case.head_dim)
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        if case.alibi:
            scores = scores + _alibi_bias(case, q, begin, end)
        scores = scores.masked_fill(~keep, -math.inf)
        if sinks is not None:  # as a key that every row sees, whose value is 0
            scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], dim=-1)
        dead = ~keep.any(dim=-1, keepdim=True)
        # softmax of a row of −inf is NaN, and so would its gradient be.
        weights = scores.masked_fill(dead, 0).softmax(dim=-1).masked_fill(dead, 0)
        return weights[..., : case.seqlen_k] @ v

    return torch.cat(_blocks_of_rows(block, case), dim=2).transpose(1, 2)


def _blocks_of_rows(block: Callable[[int, int], torch.Tensor], case: Case) -> list[torch.Tensor]:
    """block(begin, end) of all query rows, of which a backward keeps the results alone."""
    ends = [*range(ROWS_AT_A_TIME, case.seqlen_q, ROWS_AT_A_TIME), case.seqlen_q]
    return [
        checkpoint(block, begin, end, use_reentrant=False, preserve_rng_state=False)
        for begin, end in itertools.pairwise([0, *ends])
    ]


def _alibi_bias(case: Case, q: torch.Tensor, begin: int = 0, end: int | None = None) -> torch.Tensor:
    """Of query rows [begin, end) of the case's last heads, as many as q (B, H, S, D) has; rounded to its dtype."""
    distance = distances(case, q.device, begin, end).abs().to(torch.promote_types(q.dtype, torch.float32))
    slopes = options.alibi_slopes(case.heads_q, q.device)[-q.shape[1] :]
    return (slopes[:, None, None] * -distance).to(q.dtype)


def attention_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> torch.Tensor:
    """PyTorch's scaled_dot_product_attention, with an explicit mask where it has no name for ours."""
    if not case.columns:
        return sdpa(q, k, v, case, sdpa_mask(case, q))

    def block(begin: int, end: int) -> torch.Tensor:
        return sdpa(q[:, begin:end], k, v, case, visible(case, q.device, begin, end))

    return torch.cat(_blocks_of_rows(block, case), dim=1)


def sdpa_mask(case: Case, q: torch.Tensor) -> torch.Tensor | None:
    """The mask that SDPA is given for these (B, S, H, D) queries, or None where it has a name for it: what is visible,
    with ALiBi what is added to the scores. Refused are masks too large to be stored, and what no mask can say."""
    for name in ("softcap", "sinks"):
        if getattr(case, name):
            raise NotImplementedError(f"SDPA has no argument for {name}")
    if case.is_square_band and not case.alibi:
        return None
    needed = case.seqlen_q * case.seqlen_k * (q.shape[2] * q.dtype.itemsize if case.alibi else 1)
    if needed > MASK_LIMIT:
        raise NotImplementedError(f"its mask would take more than {MASK_LIMIT / 2**30:g} GiB")
    keep = visible(case, q.device)
    if not case.alibi:
        return keep
    return _alibi_bias(case, q.transpose(1, 2)).masked_fill(~keep, -math.inf).unsqueeze(0)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case, mask: torch.Tensor | None) -> torch.Tensor:
    """The call alone, with the mask that `sdpa_mask` has made."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        dropout_p=case.dropout_p,
        is_causal=mask is None and not case.is_full,
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
        # SDPA is the yardstick of what it serves; elsewhere it is the formula, in the case's own dtype.
        yardstick = attention_written if case.softcap or case.sinks else attention_sdpa
        found = results(yardstick, inputs, case, gradients=gradients)
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


class RoundedOracle:
    """The same of e4m3 numbers. PyTorch has no attention of them for a yardstick: what is allowed is what comes of
    rounding the weights too, and as much again of rounding out. Errors are relative to what is exact, by 2-norms, of
    the whole and of the worst tile, which the whole would hide."""

    def __init__(self, inputs: Inputs, case: Case, *, gradients: bool) -> None:
        if gradients:
            raise NotImplementedError("there are no gradients of e4m3 numbers")
        self.exact = results(attention_float64, inputs, case, gradients=False)["out"]

    def judge(self, found: dict[str, torch.Tensor]) -> list[Verdict]:
        """One verdict for the output, and one for its worst tile."""
        out = found["out"]
        error, exact = _norms_of_tiles(out.double() - self.exact), _norms_of_tiles(self.exact)
        errors = {
            "out": (_ratio(error.norm(), exact.norm()).item(), WEIGHTS_ERROR),
            f"a tile of {TILE} rows of out": (_ratio(error, exact).max().item(), WEIGHT_ERROR),
        }
        roundings = math.sqrt(2 if out.dtype.itemsize == 1 else 1)
        return [
            Verdict(name, error=of, torch_error=0.0, slack=allowed * roundings)
            for name, (of, allowed) in errors.items()
        ]


class RoundedInputsOracle(RoundedOracle):
    """The largest error against attention of the `given` inputs, before they were rounded: at most twice what comes of
    rounding them alone, and what comes of the weights. And the worst tile's as above: the whole may be a single row,
    too few weights to average."""

    def __init__(self, inputs: Inputs, case: Case, *, gradients: bool, given: Inputs) -> None:
        super().__init__(inputs, case, gradients=gradients)
        self._of_given = results(attention_float64, given, case, gradients=False)["out"]

    def judge(self, found: dict[str, torch.Tensor]) -> list[Verdict]:
        """One verdict for the output, one for its worst tile."""
        error = _max_error(found["out"], self._of_given)
        slack = (WEIGHT_ERROR + torch.finfo(found["out"].dtype).eps) * _largest(self._of_given)
        of_inputs = Verdict("out", error, torch_error=_max_error(self.exact, self._of_given), slack=slack)
        _, of_tile = super().judge(found)
        return [of_inputs, of_tile]


def _norms_of_tiles(x: torch.Tensor) -> torch.Tensor:
    """The 2-norm of each TILE rows of (B, S, H, D), those of all heads together."""
    return torch.stack([tile.norm() for tile in x.split(TILE, dim=1)])


def _ratio(error: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """error / exact, and 0 where there is no error, as in rows that see nothing."""
    return torch.where(error == 0, 0.0, error / exact)


def _max_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return _largest(found.double() - exact)


def _largest(values: torch.Tensor) -> float:
    return values.abs().max().item() if values.numel() else 0.0
