"""Gradients of sequences so long that more blocks of keys see a query than a GPU has multiprocessors: the tiles of dQ
of these queries are cleared, where the first block of keys stores those of others."""

import pytest
import torch

import flashtile
from flashtile.masks import ColumnMask

HEAD_DIM, KEYS_OF_BLOCK = 64, 128


def causal(q, k, v):
    return flashtile.attention(q, k, v, causal=True)


def as_columns(q, k, v):
    return flashtile.attention(q, k, v, mask=ColumnMask.causal(q.shape[1], q.shape[1]).to(q.device))


def as_documents(q, k, v):
    """One document, and one of a single query, which no other sees."""
    return flashtile.attention(q, k, v, mask=ColumnMask.causal_document([q.shape[1] - 1, 1]).to(q.device))


def ragged(q, k, v):
    begins = torch.tensor([0, q.shape[1]], dtype=torch.int32, device=q.device)
    rows = (x.squeeze(0) for x in (q, k, v))
    return flashtile.attention_varlen(*rows, cu_seqlens_q=begins, cu_seqlens_k=begins, causal=True).unsqueeze(0)


def formula(q, k, v, dout, documents):
    """The gradients in float64, a few queries at a time."""
    q, k, v, dout = (x.squeeze(0).squeeze(1).double() for x in (q, k, v, dout))
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    seqlen = len(q)
    columns = torch.arange(seqlen, device=q.device)
    scale = HEAD_DIM**-0.5
    for rows in columns.split(1024):
        hidden = columns > rows[:, None]
        if documents:
            hidden |= (rows[:, None] == seqlen - 1) & (columns < seqlen - 1)
        weights = (q[rows] @ k.T * scale).masked_fill(hidden, -torch.inf).softmax(-1)
        dweights = dout[rows] @ v.T
        dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True)) * scale
        dq[rows] = dscores @ k
        dk += dscores.T @ q[rows]
        dv += weights.T @ dout[rows]
    return dq, dk, dv


@pytest.mark.gpu
@pytest.mark.parametrize("attend", [causal, as_columns, as_documents, ragged])
def test_each_block_of_keys_adds_once_to_each_tile(attend):
    seqlen = KEYS_OF_BLOCK * (torch.cuda.get_device_properties("cuda").multi_processor_count + 8) + 80
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, seqlen, 1, HEAD_DIM, generator=generator, device="cuda").bfloat16() for _ in range(4)
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    found = torch.autograd.grad(attend(*inputs), inputs, dout)
    wanted = formula(*(x.detach() for x in inputs), dout, attend is as_documents)
    for name, gradient, exact in zip(("dq", "dk", "dv"), found, wanted, strict=True):
        # One block of keys more or less is a tenth of a row that sees all. The first rows see few keys: what rounding
        # makes of their gradients is large beside those of others.
        error, norm = ((x[256:]).norm(dim=-1) for x in (gradient.double().view_as(exact) - exact, exact))
        assert (error <= 0.05 * norm + 0.01 * norm.mean()).all(), name
