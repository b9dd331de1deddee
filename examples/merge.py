"""Attention over keys in two halves, merged by their log-sum-exps, equals attention over all of them."""

import torch

import flashtile

q = torch.randn(1, 64, 4, 64)
k, v = torch.randn(2, 1, 1000, 4, 64)

halves = [flashtile.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 400), slice(400, None))]
out, lse = flashtile.combine(*zip(*halves, strict=True))
whole, whole_lse = flashtile.attention(q, k, v, return_lse=True)

print(f"largest difference: out {(out - whole).abs().max():.1e}, lse {(lse - whole_lse).abs().max():.1e}")
torch.testing.assert_close(out, whole)
torch.testing.assert_close(lse, whole_lse)
