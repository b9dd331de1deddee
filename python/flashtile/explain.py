"""What serves a call, and why."""

import torch

from . import _C
from .attention import attention
from .kvcache import attention_kvcache
from .varlen import attention_varlen


def explain(*arguments, **options) -> str:
    """Says how a call would be computed: kernel, tile, grid, splits, memory, FLOPs, bytes, and why.

    Takes the arguments of :func:`attention`, of :func:`attention_varlen` (known by ``cu_seqlens_k``) or of
    :func:`attention_kvcache` (known by ``cache_seqlens``), and raises what they raise. Computes and writes nothing.

    Returns:
        A line for each choice: of attention the plan of the forward, then that of the backward, which is the same
        whether or not an input requires a gradient; of a cache one plan. FLOPs and bytes are those of sequences that
        fill a cache, or are equally long in a ragged batch, since the host does not look at their lengths.

    Raises:
        TypeError, ValueError, NotImplementedError: as the function whose arguments these are.
        NotImplementedError: a tensor holds no data (fake tensors), or a compiler traces the call.

    Example:
        >>> import torch, flashtile
        >>> q = torch.randn(1, 1024, 8, 64)
        >>> print(flashtile.explain(q, q, q, causal=True))  # doctest: +ELLIPSIS
        flashtile forward plan
          problem   B=1 S_q=1024 S_k=1024 H_q=8 H_k=8 D=64 D_v=64 float32 on cpu, causal, scale 0.125
          kernel    cpu_f32_...
        >>> cache = torch.randn(1, 4096, 2, 64)
        >>> print(flashtile.explain(q[:, :1], cache, cache, cache_seqlens=1000))  # doctest: +ELLIPSIS
        flashtile kvcache plan
        ...
          cache     contiguous, 4096 rows for each sequence
        ...
    """
    if "cache_seqlens" in options:
        function = attention_kvcache
    else:
        function = attention_varlen if "cu_seqlens_k" in options or "cu_seqlens_q" in options else attention
        if options.get("deterministic") is None:
            options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    text = _C.explain(function, *arguments, **options)
    if text is None:
        raise NotImplementedError("explain: the call reached no kernel, expected tensors that hold data")
    return text
