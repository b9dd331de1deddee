"""combine: partial results over keys that are disjoint become those over all of them."""

import itertools
import math

import pytest
import torch
from cases import BF16, DEVICE_PARAMS, F16, F32, Case, on_devices
from compare import assert_accurate, assert_bitwise, assert_same_kind
from test_varlen_errors import ones
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import flashtile


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_numbers_known_beforehand(device):
    """Weights 1 : 3 of one row, a part that saw nothing, whatever its out holds, and logarithms of any size."""
    for shift in (0.0, 1e4, -1e4):
        outs = torch.tensor([4.0, 8.0, math.nan], device=device).reshape(3, 1, 1, 1, 1)
        lses = torch.tensor([0.0, math.log(3), -math.inf], device=device).reshape(3, 1, 1, 1) + shift
        out, lse = flashtile.combine(outs, lses)
        atol = 1e-3 if shift else 1e-6  # of float32 numbers near 1e4
        torch.testing.assert_close(out, torch.full_like(out, 7.0), rtol=0, atol=4 * atol)
        torch.testing.assert_close(lse, torch.full_like(lse, math.log(4) + shift), rtol=0, atol=atol)
    out, lse = flashtile.combine(outs[:1], lses[:1])
    assert_bitwise(out, outs[0])
    assert_bitwise(lse, lses[0], "lse")


CASES = [
    Case("full", dtype=F32, heads_q=4, heads_k=2, seqlen_k=300),
    Case("softcap", dtype=F16, heads_q=4, heads_k=2, seqlen_k=300, head_dim_v=40, softcap=9.0),
    Case("wide", dtype=BF16, seqlen_k=300, head_dim=256, head_dim_v=128),
]


@pytest.mark.parametrize("cuts", [(0, 300), (0, 100, 300), (0, 1, 1, 64, 130, 300)], ids=str)
@pytest.mark.parametrize("case, device", on_devices(CASES))
def test_parts_are_the_union(case, device, cuts):
    (q, k, v), options = case.tensors(device), case.options(device)
    ends = list(itertools.pairwise(cuts))
    parts = [flashtile.attention(q, k[:, a:b], v[:, a:b], return_lse=True, **options) for a, b in ends]
    expected = flashtile.attention(q, k, v, return_lse=True, **options)
    stacked = [torch.stack(x) for x in zip(*parts, strict=True)]
    for found in (flashtile.combine(*zip(*parts, strict=True)), flashtile.combine(*stacked)):
        assert found[0].dtype is case.dtype and found[1].dtype is F32
        eps = torch.finfo(case.dtype).eps
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=2 * eps * expected[0].abs().max().item() + 1e-6)
        torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-5)
    ragged = flashtile.combine(*(x[:, 0] for x in stacked))
    for whole, one in zip(found, ragged, strict=True):
        torch.testing.assert_close(one, whole[0])


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_gradients_are_those_of_the_union(device):
    dtype = F32 if device == "cpu" else BF16
    case = Case("gradients", dtype=dtype, seqlen_q=40, seqlen_k=120, heads_q=4, heads_k=2)
    q, k, v = case.tensors(device, requires_grad=True)
    halves = [flashtile.attention(q, k[:, cut], v[:, cut], return_lse=True) for cut in (slice(50), slice(50, None))]
    found = flashtile.combine(*zip(*halves, strict=True))
    expected = flashtile.attention(q, k, v, return_lse=True)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    incoming = case.incoming(*expected)
    mine, theirs = (torch.autograd.grad(x, (q, k, v), incoming) for x in (found, expected))
    scores = torch.einsum("bihgd,bjhd->bhgij", exact[0].unflatten(2, (2, 2)), exact[1]) * case.head_dim**-0.5
    out = torch.einsum("bhgij,bjhd->bihgd", scores.softmax(-1), exact[2]).flatten(2, 3)
    results = (out, scores.logsumexp(-1).flatten(1, 2))
    best = torch.autograd.grad(results, exact, [x.double() for x in incoming])
    for what, *values in zip("qkv", mine, best, theirs, strict=True):
        assert_accurate(*values, f"d{what}")


@pytest.mark.parametrize("shape", [(3, 2, 4, 5, 6), (2, 7, 3, 2)], ids=str)
def test_gradients_by_differences(shape):
    generator = torch.Generator().manual_seed(1)
    outs = torch.randn(shape, generator=generator, dtype=torch.float64)
    lses = torch.randn(*shape[:-3], shape[-2], shape[-3], generator=generator, dtype=torch.float64)
    torch.autograd.gradcheck(flashtile.combine, (outs.requires_grad_(), lses.requires_grad_()))
    torch.autograd.gradgradcheck(flashtile.combine, (outs, lses))


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_rows_that_saw_nothing(device):
    """In one part, in all, and with NaN where nothing was seen."""
    outs, lses = torch.randn(3, 2, 5, 4, 8, device=device), torch.randn(3, 2, 4, 5, device=device)
    lses[0, 0], lses[:, 1, 2], lses[1:, :, :, 3] = -math.inf, -math.inf, -math.inf
    outs = outs.masked_fill((lses == -math.inf).transpose(2, 3)[..., None], math.nan)
    outs.requires_grad_(), lses.requires_grad_()
    out, lse = flashtile.combine(outs, lses)
    blind = (lses == -math.inf).all(dim=0)
    assert torch.equal(lse == -math.inf, blind)
    assert (out.transpose(1, 2)[blind] == 0).all() and out.isfinite().all()
    douts, dlses = torch.autograd.grad([out, lse], [outs, lses], [torch.ones_like(out), torch.ones_like(lse)])
    unseen = lses == -math.inf
    for gradient in (douts.transpose(2, 3), dlses):
        assert gradient.isfinite().all() and (gradient[unseen] == 0).all()


def test_sizes_of_nothing():
    for shape in ((2, 0, 3, 4, 8), (2, 3, 0, 4, 8), (2, 0, 4, 8)):
        outs, lses = torch.zeros(shape), torch.zeros(*shape[:-3], shape[-2], shape[-3])
        out, lse = flashtile.combine(outs, lses)
        assert_same_kind(out, outs[0])
        assert_same_kind(lse, lses[0], "lse")


# name: (outs, lses as functions of good ones, exception, what the message holds)
BAD = {
    "no parts": (
        lambda x: x[:0],
        lambda x: x[:0],
        ValueError,
        r"outs has shape \(0, 2, 5, 4, 8\), expected \(N, B, S_q",
    ),
    "an empty list": (lambda x: [], None, TypeError, "outs is an empty sequence, expected at least one tensor"),
    "a list of numbers": (None, lambda x: [1.0], TypeError, r"lses\[0\] is of type float, expected a torch.Tensor"),
    "lists": (lambda x: [list(y) for y in x], None, TypeError, r"outs\[0\] is of type list, expected a torch.Tensor"),
    "numbers in a list": (torch.Tensor.tolist, None, TypeError, r"outs\[0\] is of type list, expected a torch.Tensor"),
    "an array": (torch.Tensor.numpy, None, TypeError, r"outs\[0\] is of type ndarray, expected a torch.Tensor"),
    "an array among tensors": (
        None,
        lambda x: [x[0], x[1].numpy(), x[2]],
        TypeError,
        r"lses\[1\] is of type ndarray, expected a torch.Tensor",
    ),
    "8 bits": (None, lambda x: x.to(torch.float8_e4m3fn), TypeError, "lses has dtype torch.float8_e4m3fn, expected"),
    "sparse": (None, torch.Tensor.to_sparse, TypeError, "lses is not a dense strided tensor"),
    "a sparse part": (lambda x: [x[0], x[1].to_sparse()], None, TypeError, r"outs\[1\] is not a dense strided tensor"),
    "nested": (
        lambda x: torch.nested.nested_tensor(list(x[:, 0]), layout=torch.jagged),
        None,
        NotImplementedError,
        "outs is a nested tensor, expected a dense one",
    ),
    "mixed devices": (None, lambda x: x.to("meta"), ValueError, "lses is on meta, expected cpu, as outs"),
    "parts on mixed devices": (
        lambda x: [x[0], x[1].to("meta")],
        None,
        ValueError,
        r"outs\[1\] is on meta, expected cpu, as outs\[0\]",
    ),
    "a part of integers": (lambda x: [x[0], x[1].int()], None, TypeError, r"outs\[1\] has dtype torch.int32, expected"),
    "rank 3": (lambda x: x[0, 0], None, ValueError, r"outs has shape \(5, 4, 8\), expected \(N, B, S_q"),
    "other rows": (
        None,
        lambda x: x[..., :4],
        ValueError,
        r"lses has shape \(3, 2, 4, 4\), expected \(3, 2, 4, 5\) = \(N, B, H_q, S_q\)",
    ),
    "rows first": (None, lambda x: x.transpose(2, 3), ValueError, r"lses has shape .*, expected \(3, 2, 4, 5\)"),
    "ragged": (
        lambda x: x[:, 0],
        None,
        ValueError,
        r"lses has shape \(3, 2, 4, 5\), expected \(3, 4, 5\) = \(N, H_q, T_q\)",
    ),
    "integers": (lambda x: x.int(), None, TypeError, "outs has dtype torch.int32, expected a floating dtype"),
    "nothing": (lambda x: None, None, TypeError, "outs is of type NoneType, expected a torch.Tensor"),
    "unlike parts": (
        lambda x: [x[0], x[1, :1]],
        None,
        ValueError,
        r"outs\[1\] has shape \(1, 5, 4, 8\), expected \(2, 5, 4, 8\), as outs\[0\]",
    ),
}


def compiled(*given):
    torch.compiler.reset()
    return torch.compile(flashtile.combine, backend="eager")(*given)


def fake(*given):
    return flashtile.combine(*tree_map_only(torch.Tensor, FakeTensorMode().from_tensor, given))


@pytest.mark.parametrize("function", [flashtile.combine, compiled, fake])
@pytest.mark.parametrize("name", BAD)
def test_bad_input(name, function):
    of_outs, of_lses, exception, message = BAD[name]
    outs, lses = ones(3, 2, 5, 4, 8)(torch.zeros(1)), ones(3, 2, 4, 5)(torch.zeros(1))
    given = of_outs(outs) if of_outs else outs, of_lses(lses) if of_lses else lses
    if function is fake and name == "nested":
        pytest.skip("PyTorch fakes nested tensors only where it traces")
    with pytest.raises(exception, match=f"^combine: {message}") as raised:
        function(*given)
    assert raised.type is exception
    assert len(str(raised.value)) < 200 and "\n" not in str(raised.value)
