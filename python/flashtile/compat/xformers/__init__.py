"""``xformers.ops``: its attention, with its parameters and biases, computed by flashtile.

>>> import torch
>>> import flashtile.compat.xformers as xops
>>> q = torch.randn(1, 100, 4, 64)  # (batch, sequence, heads, head dimension)
>>> xops.memory_efficient_attention(q, q, q, attn_bias=xops.LowerTriangularMask()).shape
torch.Size([1, 100, 4, 64])
>>> mask = xops.fmha.BlockDiagonalMask.from_seqlens([30, 70], device="cpu")  # two sequences, one behind the other
>>> xops.memory_efficient_attention(q, q, q, attn_bias=mask).shape
torch.Size([1, 100, 4, 64])
"""

import torch
from torch import Tensor

from . import fmha
from .fmha import (
    AttentionBias,
    LowerTriangularMask,
    memory_efficient_attention,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
)

__all__ = [
    "AttentionBias",
    "AttentionMask",
    "LowerTriangularMask",
    "fmha",
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "unbind",
]

AttentionMask = AttentionBias


def unbind(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    """``torch.unbind``, which packed projections of q, k and v are taken apart with."""
    return torch.unbind(x, dim)
