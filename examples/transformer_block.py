"""A transformer's attention layer with grouped KV heads and a sliding window, trained for one step."""

import torch
from torch import nn

import flashtile


class Attention(nn.Module):
    def __init__(self, width=256, heads=8, kv_heads=2, window=128):
        super().__init__()
        self.head_dim = width // heads
        self.window = window
        self.to_q = nn.Linear(width, width)
        self.to_kv = nn.Linear(width, 2 * kv_heads * self.head_dim)
        self.from_heads = nn.Linear(width, width)

    def forward(self, x):  # (B, S, width)
        q = self.to_q(x).unflatten(-1, (-1, self.head_dim))  # (B, S, H_q, D)
        k, v = self.to_kv(x).unflatten(-1, (2, -1, self.head_dim)).unbind(2)  # (B, S, H_k, D) each
        # Each row sees itself and the 128 rows before it.
        return self.from_heads(flashtile.attention(q, k, v, window=(self.window, 0)).flatten(2))


layer = Attention()
x = torch.randn(2, 500, 256)
loss = (layer(x) - x).square().mean()
loss.backward()
print(f"loss {loss.item():.3f}, gradient of to_q {layer.to_q.weight.grad.norm():.4f}")
