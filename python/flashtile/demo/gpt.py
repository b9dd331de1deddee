"""A small byte-level GPT, in one page. The attention is given to it, so that two of them can be compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

# causal attention over (B, S, H, D)
CausalAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Rotation = Callable[[torch.Tensor], torch.Tensor]  # of (B, S, H, D)


@dataclasses.dataclass(frozen=True)
class Config:
    vocabulary: int = 256  # one token per byte
    context: int = 256
    layers: int = 2
    heads: int = 4
    head_dim: int = 32

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


def rotate(x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
    """Rotary position embedding of (B, S, H, D): pairs of features turn by an angle that grows with the position.
    `positions`, (S), are by default 0, 1, 2 and so on."""
    seqlen, head_dim = x.shape[1], x.shape[-1]
    speeds = 10000.0 ** -(torch.arange(0, head_dim, 2, device=x.device) / head_dim)
    positions = torch.arange(seqlen, device=x.device) if positions is None else positions
    angles = positions[:, None, None] * speeds  # (S, 1, D / 2)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Config, attention: CausalAttention, rotate: Rotation) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention = attention
        self.rotate = rotate
        self.attention_norm = nn.LayerNorm(config.width)
        self.to_qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.from_heads = nn.Linear(config.width, config.width, bias=False)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width, bias=False),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.to_qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.from_heads(self.attention(self.rotate(q), self.rotate(k), v).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    def __init__(self, config: Config, attention: CausalAttention, rotate: Rotation = rotate) -> None:
        super().__init__()
        self.config = config
        self.bytes = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.Sequential(*(Block(config, attention, rotate) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        self.to_logits = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, S) bytes → (B, S, vocabulary) logits of the byte that follows each."""
        return self.to_logits(self.norm(self.blocks(self.bytes(tokens))))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats of predicting tokens[:, 1:] from what stands before them."""
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    @torch.no_grad()
    def generate(self, prompt: bytes, count: int, temperature: float = 0.7, seed: int = 0) -> bytes:
        device = self.to_logits.weight.device
        generator = torch.Generator(device).manual_seed(seed)
        tokens = torch.tensor([list(prompt)], device=device)
        for _ in range(count):
            logits = self(tokens[:, -self.config.context :])[:, -1]
            chances = (logits / temperature).softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], dim=1)
        return bytes(tokens[0].tolist())
