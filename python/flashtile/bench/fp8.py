"""Attention of e4m3 numbers: how its inputs are rounded beforehand, and who is timed on them, or in 16 bits beside.

Everyone gets the descales that they can take, and so numbers of their own: what is judged is attention of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from flashtile._fp8 import E4M3, dequantized
from flashtile.bench import options
from flashtile.bench.cases import Case, Inputs, Work
from flashtile.bench.oracle import attention_sdpa
from flashtile.bench.peers import OURS, Peer, Rounding, cuda_settings, dense
from flashtile.fp8 import Quantized, quantize

SUITE = Work.FP8.value
IN_16_BITS = "flashtile 16-bit"  # flashtile's column of the inputs as they are
BLOCK = 128  # rows
LARGEST = torch.finfo(E4M3).max
# Of weights, which are at most 1: the largest power of two within e4m3, as cuDNN's documentation suggests.
WEIGHT_SCALE = 256.0


def fp8_peers_of(device_type: str, attention: Callable[..., torch.Tensor], case: Case) -> list[Peer]:
    """`attention`, which has flashtile's signature, on numbers rounded in blocks and on the inputs as they are; and
    PyTorch's own of these, on a GPU its fastest."""

    def ours(x: Quantized, case: Case) -> torch.Tensor:
        given = options.arguments(case, x.q.device) | descales_of(x)
        return attention(x.q, x.k, x.v, causal=case.causal, out_dtype=case.torch_dtype, **given)

    if device_type == "cuda":
        theirs = Peer("SDPA cuDNN", attention_sdpa, cuda_settings()["SDPA cuDNN"])
    else:
        theirs = Peer("SDPA", attention_sdpa)
    rounded = Peer(OURS, Rounded(in_blocks, ours), rounding=in_blocks)
    return [rounded, Peer(IN_16_BITS, dense(attention)), theirs]


def in_blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Quantized:
    """flashtile's own: a descale for each block of rows, q and k rotated."""
    return quantize(q, k, v, block=BLOCK, rotate=True)


def by_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Quantized:
    """What FlashAttention-3 takes: a descale for each KV head, (B, H_k), of q for the query heads that read it."""
    groups = [x.abs().unflatten(2, (k.shape[2], -1)).amax((1, 3, 4)).float() for x in (q, k, v)]
    return _rounded((q, k, v), [largest / LARGEST for largest in groups])


def by_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Quantized:
    """What cuDNN takes: one descale for a tensor. That of v is left at 1, so that out, which cuDNN writes in e4m3, is
    of a size that e4m3 holds well; whoever reads it multiplies."""
    of_q, of_k, of_v = (x.abs().amax().float().view(1, 1) / LARGEST for x in (q, k, v))
    return _rounded((q, k, v), [of_q, of_k, of_v])._replace(v_descale=torch.ones_like(of_v))


def _rounded(inputs: tuple[torch.Tensor, ...], descales: list[torch.Tensor]) -> Quantized:
    """By descales (B or 1, H, H_k or 1)."""
    of_heads = (of.repeat_interleave(x.shape[2] // of.shape[1], 1) for x, of in zip(inputs, descales, strict=True))
    numbers = [(x.float() / of[:, None, :, None]).to(E4M3) for x, of in zip(inputs, of_heads, strict=True)]
    return Quantized(*numbers, *descales)


def numbers_of(x: Quantized, dout: torch.Tensor) -> Inputs:
    """The numbers times their descales, float32: what attention of them is judged by."""
    pairs = (x.q, x.q_descale), (x.k, x.k_descale), (x.v, x.v_descale)
    q, k, v = (dequantized(*pair) for pair in pairs)
    return Inputs(q, k, v, dout)


def descales_of(x: Quantized) -> dict[str, torch.Tensor]:
    return {"q_descale": x.q_descale, "k_descale": x.k_descale, "v_descale": x.v_descale}


class Rounded:
    """An attention of numbers, to which a case's first call, its check, rounds the inputs; the timed calls find them.
    `attention` is called with them and the case."""

    def __init__(self, rounding: Rounding, attention: Callable[..., Any]) -> None:
        self._rounding = rounding
        self._attention = attention
        self._case: Case | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> Any:
        if case is not self._case:  # to compare their values would take a microsecond of each timed call
            self._numbers = self._rounding(q, k, v)
            self._case = case
        return self._attention(self._numbers, case)


class FlashAttention3:
    """FlashAttention-3; a build without fp8 says so as it is called."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __call__(self, x: Quantized, case: Case) -> Any:
        return self._module.flash_attn_func(x.q, x.k, x.v, causal=case.causal, **descales_of(x))


class Cudnn:
    """cuDNN's sdpa_fp8 by its frontend. Its plan is made by a case's first call, its check. On Hopper it writes out in
    e4m3 alone."""

    def __init__(self, module: ModuleType) -> None:
        self._cudnn: Any = module
        self._case: Case | None = None
        self._handle: Any = None

    def __call__(self, x: Quantized, case: Case) -> torch.Tensor:
        if case is not self._case:
            self._case = None  # where planning fails, nothing is planned
            self._plan(x, case)
            self._case = case
        self._graph.execute(self._buffers, self._workspace, handle=self._handle)
        return self._out

    def _plan(self, x: Quantized, case: Case) -> None:
        cudnn, types, device = self._cudnn, self._cudnn.data_type, x.q.device
        if self._handle is None:
            self._handle = cudnn.create_handle()
        cudnn.set_stream(handle=self._handle, stream=torch.cuda.current_stream(device).cuda_stream)
        graph = cudnn.pygraph(
            io_data_type=types.FP8_E4M3,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=self._handle,
        )
        scalars = {
            "descale_q": x.q_descale,
            "descale_k": x.k_descale,
            "descale_v": x.v_descale,
            "descale_s": torch.full((1, 1), 1 / WEIGHT_SCALE, device=device),
            "scale_s": torch.full((1, 1), WEIGHT_SCALE, device=device),
            "scale_o": torch.ones(1, 1, device=device),
        }
        given = {"q": x.q, "k": x.k, "v": x.v} | {name: scalar.view(1, 1, 1, 1) for name, scalar in scalars.items()}
        # It has heads before rows, whatever their order in memory.
        views = {name: tensor.transpose(1, 2) for name, tensor in given.items()}
        tensors = {
            name: graph.tensor(
                name=name,
                dim=list(view.shape),
                stride=list(view.stride()),
                data_type=types.FP8_E4M3 if name in ("q", "k", "v") else types.FLOAT,
            )
            for name, view in views.items()
        }
        out, _, *largest = graph.sdpa_fp8(
            **tensors, attn_scale=1 / math.sqrt(case.head_dim), use_causal_mask=case.causal, generate_stats=False
        )
        self._out = torch.empty(*x.q.shape[:-1], x.v.shape[-1], dtype=E4M3, device=device)
        written = [(out, self._out.transpose(1, 2), types.FP8_E4M3)]
        written += [(of, torch.zeros(1, 1, 1, 1, device=device), types.FLOAT) for of in largest]
        for tensor, view, dtype in written:
            tensor.set_output(True).set_dim(list(view.shape)).set_stride(list(view.stride())).set_data_type(dtype)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        self._workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=device)
        self._buffers = {tensors[name]: view for name, view in views.items()}
        self._buffers |= {tensor: view for tensor, view, _ in written}
        self._graph = graph
