"""How flashtile would compute a problem, without computing it."""

import torch

import flashtile

q = torch.empty(1, 8192, 32, 128, dtype=torch.bfloat16)
k = v = torch.empty(1, 8192, 8, 128, dtype=torch.bfloat16)
print(flashtile.explain(q, k, v, causal=True))
