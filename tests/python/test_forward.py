"""Accuracy of the forward pass over the matrix of cases, on every device."""

import pytest
import reference
import torch
from cases import CASES, F32, on_devices
from compare import assert_accurate


@pytest.mark.parametrize("case, device", on_devices(CASES))
def test_forward(case, device, attention):
    q, k, v = case.tensors(device)
    options = case.options(device)
    out, lse = attention(q, k, v, return_lse=True, **options)
    exact_out, exact_lse = reference.attention(q, k, v, **options)
    rough_out, _ = reference.attention(q, k, v, dtype=case.dtype, **options)
    _, rough_lse = reference.attention(q, k, v, dtype=F32, **options)  # statistics are float32 for every dtype

    assert out.dtype is case.dtype and lse.dtype is F32
    assert out.is_contiguous() and lse.is_contiguous()
    assert_accurate(out, exact_out, rough_out, "out")
    assert_accurate(lse, exact_lse, rough_lse, "lse")
    assert torch.equal(out, attention(q, k, v, **options)), "return_lse changes out"
