"""What serves a call, and why."""

import re
from collections.abc import Callable
from typing import Any

import torch

from . import _C
from ._mask_intervals import kinds_of_blocks
from .attention import Window, attention
from .kvcache import attention_kvcache
from .masks import ColumnMask
from .varlen import attention_varlen


def explain(*arguments: Any, device: str | torch.device | None = None, **options: Any) -> str:
    """Says how a call would be computed: kernel, tile, grid, splits, memory, FLOPs, bytes, and why.

    Takes the arguments of :func:`attention`, of :func:`attention_varlen` (known by ``cu_seqlens_k``) or of
    :func:`attention_kvcache` (known by ``cache_seqlens``), and raises what they raise. Computes and writes nothing.

    Args:
        arguments: those of the function, and ``options`` those that it takes by name.
        device: plan for this one instead of that of the tensors, as if they lay there. "cpu", "cuda", "cuda:1", or a
            GPU that need not be in this machine: its name, such as "A100", "H100", "H200", "L40S", "RTX 4090", or the
            compute capability, such as "9.0". Then tensors may be on the device "meta", where they take no memory;
            for the CPU not those of int32, which a call reads.

    Returns:
        A line for each choice, and under a ColumnMask, which it reads unless it is of a cache, how many blocks of keys
        the tiles of the forward skip, test, or take as they are: of attention the plan of the forward, then that of the
        backward, which is the same whether or not an input requires a gradient; of a cache one plan. FLOPs and bytes
        are those of sequences that fill a cache, or are equally long in a ragged batch, since the host does not look at
        their lengths. A kernel that this build does not hold is planned nevertheless, and marked.

    Raises:
        TypeError, ValueError, NotImplementedError: as the function whose arguments these are.
        ValueError: there is no such device.
        NotImplementedError: a tensor holds no data (fake tensors), or a compiler traces the call.

    Example:
        >>> import torch, flashtile
        >>> q = torch.randn(1, 1024, 8, 64)
        >>> print(flashtile.explain(q, q, q, causal=True))  # doctest: +ELLIPSIS
        flashtile forward plan
          problem   B=1 S_q=1024 S_k=1024 H_q=8 H_k=8 D=64 D_v=64 float32 on cpu, causal, scale 0.125
          kernel    cpu_f32_...
        >>> q = torch.empty(8, 32768, 16, 128, dtype=torch.bfloat16, device="meta")
        >>> print(flashtile.explain(q, q, q, device="H100"))  # doctest: +ELLIPSIS
        on the GPU H100: compute capability 9.0, 132 multiprocessors
        flashtile forward plan
        ...
          kernel    sm90_bf16_...
        >>> cache = torch.randn(1, 4096, 2, 64)
        >>> print(flashtile.explain(cache[:, :1], cache, cache, cache_seqlens=1000))  # doctest: +ELLIPSIS
        flashtile kvcache plan
        ...
          cache     contiguous, 4096 rows for each sequence
        ...
    """
    function: Callable[..., object]
    if "cache_seqlens" in options:
        function = attention_kvcache
    else:
        function = attention_varlen if "cu_seqlens_k" in options or "cu_seqlens_q" in options else attention
        if options.get("deterministic") is None:
            options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    text = _C.explain(function, None if device is None else str(device), *arguments, **options)
    if text is None:
        raise NotImplementedError("explain: the call reached no kernel, expected tensors that hold data")
    mask = options.get("mask")
    if mask is not None and function is not attention_kvcache and mask.ranges.device.type != "meta":
        text = _with_blocks(text, mask, options.get("causal", False), options.get("window"))
    return text


def _with_blocks(text: str, mask: ColumnMask, causal: bool, window: Window) -> str:
    """The plan with a line about the blocks of the forward's tiles behind that about the tiles, or, of a ragged batch,
    as it is."""
    tile = re.search(r"  tile +(\d+) rows × (\d+) keys.*\n", text)
    if tile is None or mask.seqlen_q is None:
        return text
    interior, edge, skipped = kinds_of_blocks(mask.ranges, mask.seqlen_q, int(tile[1]), int(tile[2]), causal, window)
    batch, heads = mask.ranges.shape[:2]
    line = f"  blocks    {interior} interior, {edge} at an edge, {skipped} skipped, of {batch * heads} masks\n"
    return text[: tile.end()] + line + text[tile.end() :]
