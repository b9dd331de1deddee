"""Who else attends to a sequence that lies on several ranks, in zigzag order: ring-flash-attn, on flashtile's kernels
and on PyTorch's flash attention, and PyTorch's own context_parallel, likewise."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor

from flashtile.bench.peers import Setting


@dataclasses.dataclass(frozen=True)
class RankPeer:
    """A causal attention of the caller's rows (B, S_local, H, D), and the setting in which it runs, backward too."""

    name: str
    call: Callable[[list[Tensor]], Tensor]
    setting: Setting


def rank_peers(device: torch.device) -> list[RankPeer]:
    """Those that are installed. PyTorch's are for GPUs alone."""
    found = []
    zigzag = _zigzag()
    if zigzag is not None:

        def ring_flash_attn(leaves: list[Tensor]) -> Tensor:
            out: Tensor = zigzag.zigzag_ring_flash_attn_func(*leaves, causal=True)
            return out

        found.append(RankPeer("ring-flash-attn, flashtile", ring_flash_attn, contextlib.nullcontext))
        if device.type == "cuda":
            found.append(RankPeer("ring-flash-attn, FA2", ring_flash_attn, functools.partial(_pytorchs_passes, zigzag)))
    if device.type == "cuda":
        for rotation in ("allgather", "alltoall"):
            setting = functools.partial(_context_parallel, device, rotation, None)
            found.append(RankPeer(f"context_parallel, {rotation}", _sdpa, setting))
        setting = functools.partial(_context_parallel, device, "allgather", "flashtile")
        found.append(RankPeer("context_parallel, flashtile", _sdpa, setting))
    return found


def _zigzag() -> types.ModuleType | None:
    """The module of ring-flash-attn with that order, whose kernels are those that `flash_attn` names."""
    if importlib.util.find_spec("ring_flash_attn") is None:
        return None
    import flashtile.compat

    flashtile.compat.install()
    # Its adapters, which nothing here needs, ask transformers for what transformers 5 has no more.
    adapters: Any = types.ModuleType("ring_flash_attn.adapters")
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
    sys.modules.setdefault("ring_flash_attn.adapters", adapters)
    return importlib.import_module("ring_flash_attn.zigzag_ring_flash_attn")


@contextlib.contextmanager
def _pytorchs_passes(zigzag: Any) -> Iterator[None]:
    """Within, ring-flash-attn calls PyTorch's build of FlashAttention-2."""
    before = zigzag._flash_attn_forward, zigzag._flash_attn_backward
    zigzag._flash_attn_forward, zigzag._flash_attn_backward = _forward, _backward
    try:
        yield
    finally:
        zigzag._flash_attn_forward, zigzag._flash_attn_backward = before


def _forward(
    q,
    k,
    v,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    return_softmax,
):
    """flash_attn's pass, without the options that no case has."""
    sizes = q.shape[1], k.shape[1]
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, *sizes, dropout_p, causal, False, scale=softmax_scale
    )
    return out, lse, None, None


def _backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
    softcap, alibi_slopes, deterministic,
):  # fmt: skip
    """The same, whose results are copied to where they are wanted: the operator has no place for them."""
    state = torch.empty(2, dtype=torch.uint64, device=q.device)
    found = torch.ops.aten._flash_attention_backward(
        *(dout, q, k, v, out, softmax_lse, None, None, q.shape[1], k.shape[1], dropout_p, causal, state, state[0]),
        scale=softmax_scale,
    )
    for place, x in zip((dq, dk, dv), found, strict=True):
        place.copy_(x)


def _sdpa(leaves: list[Tensor]) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in leaves)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


@contextlib.contextmanager
def _context_parallel(device: torch.device, rotation: str, implementation: str | None) -> Iterator[None]:
    """Within, PyTorch's attention is that of all ranks: keys and values are gathered, or pass round a ring."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    import flashtile.integrations.pytorch

    ranks = dist.get_world_size()
    buffer = torch.zeros(2 * ranks, device=device)  # it wants one, which nothing reads
    set_rotate_method(rotation)
    if implementation is not None:
        flashtile.integrations.pytorch.register()
        torch.nn.attention.activate_flash_attention_impl(implementation)
    try:
        flash = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION)
        mesh = init_device_mesh(device.type, (ranks,))
        with flash, context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0]):
            yield
    finally:
        if implementation is not None:
            torch.nn.attention.restore_flash_attention_impl()
