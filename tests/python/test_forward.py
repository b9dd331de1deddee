"""Accuracy of the forward pass over the matrix of cases, on every device."""

import pytest
import reference
import torch
from cases import BF16, CASES, F16, F32, Case, on_devices
from compare import assert_accurate, score_rounding


@pytest.mark.parametrize("case, device", on_devices(CASES))
def test_forward(case, device, attention):
    check(attention, case, *case.tensors(device), **case.options(device))


OUTGROWING = [
    Case(f"{mask}{head_dim}", dtype=dtype, head_dim=head_dim, seqlen_q=200, seqlen_k=900, **options)
    for mask, options in {"full": {}, "causal": {"causal": True}, "window": {"window": (700, 50)}}.items()
    for head_dim in (64, 96, 128, 192, 256)
    for dtype in (F16, BF16)
]


@pytest.mark.parametrize("case, device", on_devices(OUTGROWING))
@pytest.mark.parametrize("first, last", [(0, 60), (60, 0), (-60, 0), (0, -60)])
def test_scores_far_from_those_before(case, device, first, last, attention):
    """Row maxima that move by hundreds from one block of keys to the next, up or down: whatever a kernel takes for its
    reference must follow, or weights overflow or vanish."""
    q, k, v = case.tensors(device)
    steps = torch.linspace(first, last, 9, device=device).repeat_interleave(100)[None, :, None, None]
    # All products of a score have one sign here, and tensor cores cut off what does not fit, once for 16 of them.
    roundings = case.head_dim / 16 if device == "cuda" else 0
    check(attention, case, q.abs(), (k.abs() * steps).to(k.dtype), v, roundings, **case.options(device))


def check(attention, case, q, k, v, roundings=0, formula=reference.attention, **options):
    """`roundings`: of the largest lse, allowed to lse beyond the usual bar."""
    out, lse = attention(q, k, v, return_lse=True, **options)
    exact_out, exact_lse = formula(q, k, v, **options)
    rough_out, _ = formula(q, k, v, dtype=case.dtype, **options)
    _, rough_lse = formula(q, k, v, dtype=F32, **options)  # statistics are float32 for every dtype

    assert out.dtype is case.dtype and lse.dtype is F32
    assert out.is_contiguous() and lse.is_contiguous()
    assert_accurate(out, exact_out, rough_out, "out")
    assert_accurate(lse, exact_lse, rough_lse, "lse", roundings * score_rounding(exact_lse))
    assert torch.equal(out, attention(q, k, v, **options)), "return_lse changes out"
