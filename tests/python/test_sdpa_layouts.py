"""scaled_dot_product_attention where PyTorch computes: operands and masks that lie in memory as its CUDA kernels do not
expect it. Given to PyTorch 2.11 as they are, operands and biases of such layouts have wrong numbers in some calls, or
end the process, on an H200."""

import math
import warnings

import pytest
import torch
from cases import BF16, DEVICE_PARAMS, F16, F32

import flashtile

on_each_device = pytest.mark.parametrize("device", DEVICE_PARAMS)
SIZES = [(65, 128, 128, 128), (33, 130, 64, 64), (130, 65, 72, 64), (17, 70, 33, 8)]  # S_q, S_k, D, D_v


def _in_larger_rows(x):
    rows = x.new_full((*x.shape[:-1], x.shape[-1] + 3), _unlike(x))
    rows[..., : x.shape[-1]] = x
    return rows[..., : x.shape[-1]]


def _in_every_other_place(x):
    places = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), _unlike(x))
    places[..., ::2] = x
    return places[..., ::2]


def _behind_an_element(x):
    line = x.new_full((x.numel() + 1,), _unlike(x))
    line[1:] = x.flatten()
    return line[1:].view(x.shape)


def _unlike(x):
    return math.nan if x.is_floating_point() else False


LAYOUTS = {
    "rows of other lengths": _in_larger_rows,
    "every other place": _in_every_other_place,
    "an odd address": _behind_an_element,
    "columns first": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "negated": lambda x: torch._neg_view(-x) if x.is_floating_point() else x,
    "one row": lambda x: x[..., :1, :].expand(x.shape),
    "one head": lambda x: x[..., :1, :, :].expand(x.shape),
    "one batch": lambda x: x[:1].expand(x.shape),
}


def _left_to_pytorch(query, key, value, attn_mask, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", flashtile.sdpa.FallbackWarning)
        return flashtile.scaled_dot_product_attention(query, key, value, attn_mask, **options)


def _check(operands, attn_mask, **options):
    """Compares output and gradients with the formula in float64."""
    leaves = [x.detach().requires_grad_() for x in operands]
    out = _left_to_pytorch(*leaves, attn_mask, **options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64).to(out)
    found = [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    query, key, value = exact = [x.detach().double().requires_grad_() for x in operands]
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).transpose(-1, -2) * query.shape[-1] ** -0.5
    if attn_mask.dtype is torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    else:
        scores = scores + attn_mask.double()
    expected = scores.softmax(-1) @ value.repeat_interleave(groups, 1)
    gradients = torch.autograd.grad(expected, exact, dout.double())
    for x, y in zip(found, (expected.detach(), *gradients), strict=True):
        assert x.shape == y.shape and x.dtype == operands[0].dtype
        most = max(1.0, y.abs().max().item()) if y.numel() else 1.0
        torch.testing.assert_close(x.double(), y, rtol=0, atol=max(16 * torch.finfo(x.dtype).eps, 1e-4) * most)


def _tensors(size, dtype, device, batch=2, heads_q=4, heads_k=2):
    seqlen_q, seqlen_k, head_dim, head_dim_v = size
    generator = torch.Generator().manual_seed(5)
    shapes = (heads_q, seqlen_q, head_dim), (heads_k, seqlen_k, head_dim), (heads_k, seqlen_k, head_dim_v)
    return [torch.randn(batch, *shape, generator=generator).to(device, dtype) for shape in shapes]


def _masks(size, dtype, device, batch=2, heads_q=4):
    shape, generator = (batch, heads_q, *size[:2]), torch.Generator().manual_seed(6)
    hidden = torch.rand(shape, generator=generator) < 0.4
    hidden[..., 0] = False
    return {
        "bool": ~hidden.to(device),
        "bias": torch.randn(shape, generator=generator).masked_fill(hidden, -math.inf).to(device, dtype),
    }


@on_each_device
@pytest.mark.parametrize("mask", ["bool", "bias"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("which", ["query", "key", "value", "all"])
def test_operands(which, layout, mask, device):
    for size in SIZES:
        for dtype in (BF16, F16, F32):
            operands = [
                layout(x) if which in (name, "all") else x
                for name, x in zip(("query", "key", "value"), _tensors(size, dtype, device), strict=True)
            ]
            _check(operands, _masks(size, dtype, device)[mask], enable_gqa=True)


@on_each_device
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("mask", ["bool", "bias"])
def test_masks(mask, layout, device):
    for size in SIZES:
        for dtype in (BF16, F16):
            attn_mask = layout(_masks(size, dtype, device)[mask])
            _check(_tensors(size, dtype, device), attn_mask, enable_gqa=True)


@on_each_device
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_float32_biases(dtype, groups, device):
    """cuDNN takes such a bias for one of the query's dtype."""
    for size in SIZES:
        bias = torch.randn(size[:2], generator=torch.Generator().manual_seed(7)).to(dtype).to(device, F32)
        bias[:, 1] = -math.inf
        bias[:, 2::7] = torch.finfo(F32).min
        _check(_tensors(size, dtype, device, heads_q=2 * groups), bias, enable_gqa=groups > 1)


@on_each_device
@pytest.mark.parametrize("mask", ["bool", "bias"])
@pytest.mark.parametrize("head_dim", [8, 64, 264])
def test_an_empty_batch(head_dim, mask, device):
    """PyTorch has None for some of these."""
    size = (5, 7, head_dim, head_dim)
    _check(_tensors(size, BF16, device, batch=0), _masks(size, BF16, device, batch=0)[mask], enable_gqa=True)


@on_each_device
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "an odd address"])
def test_in_a_compiled_function(layout, device):
    """The graph does not break where operands are copied."""
    torch.compiler.reset()
    compiled = torch.compile(flashtile.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    size = SIZES[2]
    operands = [LAYOUTS[layout](x) for x in _tensors(size, BF16, device)]
    for attn_mask in _masks(size, BF16, device).values():
        out = compiled(*operands, attn_mask, enable_gqa=True)
        expected = _left_to_pytorch(*operands, attn_mask, enable_gqa=True)
        torch.testing.assert_close(out, expected, rtol=0, atol=2e-2)
