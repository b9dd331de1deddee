"""S_dmask of flashtile.compat.flash_attn: the weights, and which of them are dropped."""

import math

import pytest
import reference
import torch
from cases import BF16, F16, F32, Case, on_devices
from compare import assert_bitwise
from ragged import Ragged, used_rows
from theirs import SMALL, fa2, in_their_terms, packed

from flashtile.compat import _dmask

GROUPS = dict(seqlen_q=40, seqlen_k=270, heads_q=4, heads_k=2)
RAGGED = dict(heads_q=4, heads_k=2, lengths_q=(40, 0, 133, 1), lengths_k=(50, 7, 20, 300))
CASES = [
    Case("dense", dtype=F32, dropout_p=0.3, **GROUPS),
    Case("dense_banded", dtype=BF16, dropout_p=0.3, window=(20, 9), alibi="per batch and head", **GROUPS),
    Case("dense_causal", dtype=F16, dropout_p=0.5, causal=True, softcap=5.0, scale=0.3, head_dim=20, **GROUPS),
    Ragged("ragged", dtype=F32, dropout_p=0.3, causal=True, alibi="per batch and head", tail=5, **RAGGED),
    Ragged("no_sequence", dtype=F32, dropout_p=0.3, tail=5, lengths_q=(), lengths_k=()),
]


def exact_weights(q, k, v, dropout_p, seed, entry=0, **options):
    """((B, H, S_q, S_k) weights before dropout, whether each is kept), from attention over the rows of an identity."""
    eye = torch.eye(k.shape[1], dtype=torch.float64, device=k.device)[None, :, None].expand(len(k), -1, k.shape[2], -1)
    out, _ = reference.attention(q, k, eye, **options)
    row, column = (torch.arange(x.shape[1], device=x.device) for x in (q, k))
    kept = reference.dropout_factors(len(q), q.shape[2], row, column, dropout_p, seed, entry) > 0
    return out.transpose(1, 2), kept


@pytest.mark.parametrize("case, device", on_devices(CASES))
def test_weights_and_signs(case, device):
    inputs, options = case.tensors(device), case.options(device)
    torch.manual_seed(4)
    options["seed"] = int(torch.randint(2**63 - 1, ()))
    torch.manual_seed(4)
    theirs = in_their_terms(options)
    if isinstance(case, Ragged):
        tables = [theirs.pop(f"cu_seqlens_{side}") for side in "qk"]
        longest = [max((0, *lengths)) for lengths in (case.lengths_q, case.lengths_k)]
        call = fa2.flash_attn_varlen_func
        *_, found = call(*inputs, *tables, *longest, return_attn_probs=True, **theirs)
        spans = list(zip(*used_rows(options.pop("cu_seqlens_q"), options.pop("cu_seqlens_k")), strict=True))
    else:
        longest = (case.seqlen_q, case.seqlen_k)
        *_, found = fa2.flash_attn_func(*inputs, return_attn_probs=True, **theirs)
        spans = [(slice(None), slice(None))] * case.batch
    assert found.shape == (len(spans), case.heads_q, *(math.ceil(n / 128) * 128 for n in longest))
    assert found.dtype is case.dtype and not found.requires_grad
    slopes = options.pop("alibi_slopes", None)
    for b, (rows, keys) in enumerate(spans):
        q, k, v = inputs if isinstance(case, Ragged) else (x[b] for x in inputs)
        own = None if slopes is None else slopes[b : b + 1]
        exact, kept = exact_weights(q[None, rows], k[None, keys], v[None, keys], alibi_slopes=own, entry=b, **options)
        mine = found[b, :, : exact.shape[2], : exact.shape[3]]
        tolerance = dict(rtol=4 * torch.finfo(case.dtype).eps, atol=1e-6)
        torch.testing.assert_close(mine.abs().double(), exact[0], **tolerance)
        nonzero = mine != 0  # the sign of 0 says nothing
        assert torch.equal((mine > 0)[nonzero], kept[0][nonzero])
        assert not found[b, :, exact.shape[2] :].any() and not found[b, :, :, exact.shape[3] :].any()


def test_outputs_are_those_of_the_weights():
    """Out is that of the weights which are kept, and who does not ask for S_dmask gets the same gradients."""
    leaves = SMALL.tensors(requires_grad=True)
    torch.manual_seed(1)
    out, _, s_dmask = fa2.flash_attn_func(*leaves, 0.25, return_attn_probs=True)
    weights = s_dmask.clamp(min=0)[:, :, :20, :20] / 0.75
    torch.testing.assert_close((weights @ leaves[2].transpose(1, 2)).transpose(1, 2), out, rtol=0, atol=1e-6)
    torch.manual_seed(1)
    expected = fa2.flash_attn_func(*leaves, 0.25)
    grads = [torch.autograd.grad(x.square().sum(), leaves) for x in (out, expected)]
    for found, exact in zip(*grads, strict=True):
        assert torch.equal(found, exact)


def test_there_is_none_without_dropout_or_where_it_is_large(monkeypatch):
    q, k, v = SMALL.tensors()
    begins = torch.tensor([0, 20], dtype=torch.int32)
    calls = (
        lambda p: fa2.flash_attn_func(q, k, v, p, return_attn_probs=True),
        lambda p: fa2.flash_attn_kvpacked_func(q, packed(k, v), p, return_attn_probs=True),
        lambda p: fa2.flash_attn_varlen_func(q[0], k[0], v[0], begins, begins, 20, 20, p, return_attn_probs=True),
        lambda p: fa2._flash_attn_forward(q, k, v, p, None, False, -1, -1, 0.0, None, True)[:3],
    )
    for call in calls:
        assert call(0.0)[2].shape == (0,) and call(0.5)[2].shape[2:] == (128, 128)
    monkeypatch.setattr(_dmask, "_MOST", 2 * 128 * 128)
    for n, call in enumerate(calls):
        *_, s_dmask = call(0.5)
        assert (s_dmask.numel() == 0) == (n != 2)  # two batches of two heads, but for the ragged one


def test_autocast():
    """q, k and v are cast, and so is what S_dmask is computed of."""
    q, k, v = SMALL.tensors()
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        out, _, s_dmask = fa2.flash_attn_func(q, k, v.bfloat16(), 0.5, return_attn_probs=True)
    torch.manual_seed(1)
    expected = fa2.flash_attn_func(q.bfloat16(), k.bfloat16(), v.bfloat16(), 0.5, return_attn_probs=True)
    assert_bitwise(out, expected[0])
    assert s_dmask.shape == expected[2].shape and torch.equal(s_dmask < 0, expected[2] < 0)
