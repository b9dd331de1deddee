"""Attention over keys in two halves, merged by their log-sum-exps, equals attention over all of them."""

import torch

import flashtile

q = torch.randn(1, 64, 4, 64)
k, v = torch.randn(2, 1, 1000, 4, 64)


def merge(out_a, lse_a, out_b, lse_b):
    """Two partial results of the same rows, each normalised by its own keys, as one."""
    lse = torch.logaddexp(lse_a, lse_b)
    share_a, share_b = ((part - lse).exp().transpose(1, 2)[..., None] for part in (lse_a, lse_b))  # (B, S_q, H_q, 1)
    return share_a * out_a + share_b * out_b, lse


halves = [flashtile.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 400), slice(400, None))]
out, lse = merge(*halves[0], *halves[1])
whole, whole_lse = flashtile.attention(q, k, v, return_lse=True)

print(f"largest difference: out {(out - whole).abs().max():.1e}, lse {(lse - whole_lse).abs().max():.1e}")
torch.testing.assert_close(out, whole)
torch.testing.assert_close(lse, whole_lse)
