"""Documents of different lengths packed into one row of tokens: no padding, and none of them sees another."""

import torch

import flashtile

lengths = torch.tensor([300, 7, 1, 120])
begins = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()  # [0, 300, 307, 308, 428]
q = torch.randn(428, 8, 64, requires_grad=True)
k, v = torch.randn(2, 428, 2, 64)
packed = flashtile.attention_varlen(q, k, v, cu_seqlens_q=begins, cu_seqlens_k=begins, causal=True)

for first, end in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True):
    alone = flashtile.attention(q[None, first:end], k[None, first:end], v[None, first:end], causal=True)
    assert torch.equal(packed[first:end], alone[0])  # to the bit on the CPU

packed.square().mean().backward()
padded = len(lengths) * int(lengths.max()) ** 2
print(f"{int(lengths.square().sum())} scores instead of the {padded} of a padded batch; dq of norm {q.grad.norm():.3f}")
