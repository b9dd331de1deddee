"""flashtile.scaled_dot_product_attention: PyTorch's results and gradients, what is served, what is left to PyTorch."""

import functools
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from cases import BF16, DEVICE_PARAMS, DTYPES, F16, F32
from compare import assert_accurate, assert_bitwise, difference_rounding
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils._python_dispatch import TorchDispatchMode

import flashtile
from flashtile.sdpa import FallbackWarning

ROUNDING = torch.finfo(F32).eps  # of float32 sums of dozens of products, where the formula may be right by luck
on_each_device = pytest.mark.parametrize("device", DEVICE_PARAMS)
sdpa = flashtile.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch):
    monkeypatch.setattr(flashtile.sdpa, "_said", set())


def served(*args, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        return sdpa(*args, **options)


def tensors(q=(2, 4, 5, 16), k=(2, 4, 7, 16), head_dim_v=None, dtype=F32, device="cpu", seed=3):
    """query, key, value of these shapes; laid out as (..., S, H, D), as a projection leaves it."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (q, k, (*k[:-1], k[-1] if head_dim_v is None else head_dim_v))
    values = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    return [x.transpose(-2, -3).contiguous().transpose(-2, -3) if x.dim() > 2 else x for x in values]


def bools(*shape, device="cpu", seed=4):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).gt(0.4).to(device)


def written_out(query, key, value, seen, scale=None):
    """The formula in the inputs' precision; `seen` broadcasts to the scores. Rows that see nothing are 0."""
    if query.dim() > 2:
        key, value = (x.repeat_interleave(query.shape[-3] // max(x.shape[-3], 1), dim=-3) for x in (key, value))
    scores = query * (query.shape[-1] ** -0.5 if scale is None else scale) @ key.transpose(-1, -2)
    blind = ~seen.any(dim=-1, keepdim=True)
    weights = scores.masked_fill(~(seen | blind), -math.inf).softmax(dim=-1)
    return weights.masked_fill(blind, 0) @ value


def incoming(out):
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(6)).to(out.device, BF16).to(out.dtype)


def differentiated(function, inputs, dtype):
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, incoming(out))]


def check(inputs, attn_mask=None, seen=None, function=served, **options):
    """Served, and accurate next to PyTorch's float64, blind rows being 0; `seen` if attn_mask is no tensor of it."""
    dtype = inputs[0].dtype
    if seen is None:
        seen = torch.ones(inputs[0].shape[-2], inputs[1].shape[-2], dtype=torch.bool, device=inputs[0].device)
        seen = seen.tril() if options.get("is_causal") else seen if attn_mask is None else attn_mask
    found = differentiated(lambda *x: function(*x, attn_mask, **options), inputs, dtype)
    rough = differentiated(lambda *x: written_out(*x, seen, options.get("scale")), inputs, dtype)
    exact = differentiated(lambda *x: F.scaled_dot_product_attention(*x, attn_mask, **options), inputs, torch.float64)
    size = max([1.0, *(x.abs().max().item() for x in (*inputs, *exact) if x.numel() > 0)])
    rows = [x.transpose(-2, -3) if x.dim() > 2 else x[:, None] for x in (*inputs, incoming(found[0]), found[0])]
    of_dq, of_dk = difference_rounding(*rows[:4], options.get("scale"), out=rows[4])
    for what, mine, best, worse in zip(("out", "dq", "dk", "dv"), found, exact, rough, strict=True):
        assert mine.dtype is dtype
        slack = 32 * ROUNDING * size + {"dq": of_dq, "dk": of_dk}.get(what, 0.0)
        assert_accurate(mine, best.nan_to_num(), worse, what, slack=slack)


SHAPES = {
    "plain": ((2, 4, 33, 64), (2, 4, 33, 64), None),
    "longer keys": ((2, 4, 5, 16), (2, 4, 70, 16), None),
    "longer queries": ((2, 4, 70, 16), (2, 4, 5, 16), None),
    "other values": ((1, 2, 20, 32), (1, 2, 30, 32), 72),
    "odd": ((2, 3, 17, 20), (2, 3, 19, 20), 13),
    "wide": ((1, 2, 9, 256), (1, 2, 11, 256), None),
    "grouped": ((2, 6, 20, 16), (2, 2, 30, 16), None),
    "multi-query": ((2, 6, 20, 16), (2, 1, 20, 16), None),
    "five": ((2, 3, 4, 20, 16), (2, 3, 4, 25, 16), None),
    "six, grouped": ((2, 1, 3, 4, 20, 16), (2, 1, 3, 2, 10, 16), None),
    "three": ((6, 20, 16), (6, 25, 16), None),
    "three, grouped": ((6, 20, 16), (3, 25, 16), None),
    "two": ((20, 16), (25, 16), None),
    "no queries": ((2, 4, 0, 16), (2, 4, 7, 16), None),
    "no keys": ((2, 4, 5, 16), (2, 4, 0, 16), None),
    "no batch": ((0, 4, 5, 16), (0, 4, 7, 16), None),
}


@on_each_device
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("q, k, head_dim_v", SHAPES.values(), ids=SHAPES)
def test_shapes(q, k, head_dim_v, is_causal, device):
    inputs = tensors(q, k, head_dim_v, F32 if device == "cpu" else F16, device)
    check(inputs, is_causal=is_causal, enable_gqa=len(q) > 2 and q[-3] != k[-3])


@on_each_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"scale": -0.2}], ids=str)
def test_dtypes_and_scales(dtype, options, device):
    if device == "cuda" and dtype is F32:
        pytest.skip("no kernel")
    check(tensors((2, 4, 50, 40), (2, 4, 60, 40), dtype=dtype, device=device), **options)


@on_each_device
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(20, 20), (20, 33), (33, 20)])
@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
def test_causal_biases(bias, seqlen_q, seqlen_k, device):
    diagonal = seqlen_k - seqlen_q if bias is causal_lower_right else 0
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device).tril(diagonal)
    inputs = tensors((2, 4, seqlen_q, 16), (2, 4, seqlen_k, 16), dtype=F16, device=device)
    check(inputs, bias(seqlen_q, seqlen_k), seen=seen)


# Alike for all heads and queries, of query (2, 4, 5, 16) and key (2, 4, 7, 16).
ALIKE = {
    "padding": lambda make: make(2, 1, 1, 7),
    "all entries": lambda make: make(1, 1, 1, 7),
    "three dimensions": lambda make: make(1, 1, 7),
    "two dimensions": lambda make: make(1, 7),
    "whole entries": lambda make: make(2, 1, 1, 1),
    "one value": lambda make: make(1, 1),
    "expanded": lambda make: make(2, 1, 1, 7).expand(2, 4, 5, 7),
    "expanded queries": lambda make: make(2, 1, 1, 7).expand(2, 1, 5, 7),
    "strided": lambda make: make(2, 1, 1, 14)[..., ::2],
}
DIFFERENT = {
    "queries": lambda make: make(2, 1, 5, 7),
    "heads": lambda make: make(2, 4, 1, 7),
    "everything": lambda make: make(2, 4, 5, 7),
    "rows": lambda make: make(5, 7),
    "expanded keys": lambda make: make(2, 1, 5, 1).expand(2, 4, 5, 7),
    "alike, but full": lambda make: make(2, 1, 1, 7).expand(2, 4, 5, 7).contiguous(),
}


@on_each_device
@pytest.mark.parametrize("mask", ALIKE.values(), ids=ALIKE)
def test_masks_of_keys(mask, device):
    for seed in (4, 5):
        check(tensors(dtype=F16, device=device), mask(functools.partial(bools, device=device, seed=seed)))


@on_each_device
@pytest.mark.parametrize("mask", DIFFERENT.values(), ids=DIFFERENT)
def test_other_masks_fall_back(mask, device):
    attn_mask = mask(functools.partial(bools, device=device))
    inputs = tensors(dtype=F16, device=device)
    with pytest.warns(FallbackWarning, match="attn_mask has shape"):
        out = sdpa(*inputs, attn_mask)
    assert_bitwise(out, F.scaled_dot_product_attention(*inputs, attn_mask))


@on_each_device
@pytest.mark.parametrize("shape", [(5, 1), (1, 5, 1), (2, 4, 5, 1)])
def test_masks_of_whole_rows_fall_back(shape, device):
    """Given the first of these on a GPU, PyTorch 2.11 ends in a misaligned address, which takes the process along."""
    attn_mask, inputs = bools(*shape, device=device), tensors(dtype=F16, device=device)
    with pytest.warns(FallbackWarning, match="attn_mask has shape"):
        out = sdpa(*inputs, attn_mask)
    expected = F.scaled_dot_product_attention(*inputs, attn_mask.expand(*shape[:-1], 7).contiguous())
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize(
    "q, k, shape",
    [
        ((6, 5, 16), (6, 7, 16), (6, 1, 7)),
        ((6, 5, 16), (2, 7, 16), (1, 1, 7)),
        ((5, 16), (7, 16), (1, 7)),
        ((2, 3, 4, 5, 16), (2, 3, 4, 7, 16), (2, 3, 1, 1, 7)),
        ((2, 3, 4, 5, 16), (2, 3, 4, 7, 16), (3, 1, 1, 7)),
        ((2, 3, 4, 5, 20), (2, 3, 2, 7, 20), (2, 1, 1, 1, 7)),
        ((2, 4, 0, 16), (2, 4, 7, 16), (2, 1, 1, 7)),
        ((2, 4, 5, 16), (2, 4, 0, 16), (2, 1, 1, 0)),
        ((0, 4, 5, 16), (0, 4, 7, 16), (0, 1, 1, 7)),
    ],
    ids=str,
)
def test_masks_of_other_ranks(q, k, shape):
    check(tensors(q, k), bools(*shape), enable_gqa=len(q) > 2 and q[-3] != k[-3])


def test_hidden_keys_do_not_matter():
    query, key, value = tensors()
    mask = torch.tensor([[1, 0, 1, 1, 0, 1, 0], [0] * 7]).bool()[:, None, None]
    out = served(query, key, value, mask)
    hidden = ~mask.transpose(-1, -2)
    assert_bitwise(served(query, key.masked_fill(hidden, math.nan), value.masked_fill(hidden, math.inf), mask), out)
    assert (out[1] == 0).all() and (out[0] != 0).all()


class _Operations(TorchDispatchMode):
    names = frozenset()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names |= {function.overloadpacket.__name__}
        return function(*args, **(kwargs or {}))


WAITS = {"_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "_to_copy"}
COPIES = {"clone", "copy_", "_to_copy", "contiguous", "index", "constant_pad_nd"}


@on_each_device
def test_nothing_is_copied_without_a_mask_nor_read_with_one(device):
    mask, inputs = bools(2, 1, 1, 7, device=device), tensors(dtype=F16, device=device)
    heads_first, bias = [x.contiguous() for x in inputs], causal_lower_right(5, 7)
    with _Operations() as direct:
        served(*heads_first)
        served(*inputs, is_causal=True)
        served(*inputs, bias)
    assert "transpose" in direct.names and not direct.names & COPIES
    with _Operations() as masked:
        served(*inputs, mask)
    assert "index" in masked.names and not masked.names & WAITS


F64 = torch.float64
THREE = tensors((6, 5, 16), (2, 7, 16))
WIDE = tensors((1, 1, 2, 264), (1, 1, 2, 264))
# What is found, the inputs, the other arguments.
FALLBACKS = {
    "bias": ("attn_mask is a Tensor, torch.float32", tensors(), dict(attn_mask=torch.randn(5, 7))),
    "mask": ("attn_mask has shape", tensors(), dict(attn_mask=bools(5, 7))),
    "mask of grouped heads": ("attn_mask has", THREE, dict(attn_mask=bools(6, 1, 7), enable_gqa=True)),
    "mask subclass": ("attn_mask is a Parameter", tensors(), dict(attn_mask=torch.nn.Parameter(torch.randn(5, 7)))),
    "mask and causal": ("attn_mask is given with is_causal", tensors(), dict(attn_mask=bools(1, 7), is_causal=True)),
    "bias of other size": ("attn_mask has size", tensors(), dict(attn_mask=causal_upper_left(3, 3))),
    "dtype": ("query has dtype torch.float64", tensors(dtype=F64), {}),
    "head dimension": ("query has head dimension 264", WIDE, {}),
    "values": ("value has head dimension 300", tensors(head_dim_v=300), {}),
    "no head dimension": ("query has head dimension 0", tensors((2, 4, 5, 0), (2, 4, 7, 0), 8), {}),
    "broadcast batch": ("shapes", tensors(k=(1, 4, 7, 16)), {}),
    "broadcast heads": ("shapes", tensors(k=(2, 1, 7, 16)), {}),
    "all dropped": ("dropout_p is 1", tensors(), dict(dropout_p=1.0)),
    "subclass": ("of type Mine", [tensors()[0].as_subclass(type("Mine", (torch.Tensor,), {})), *tensors()[1:]], {}),
}


@pytest.mark.parametrize("found, inputs, options", FALLBACKS.values(), ids=FALLBACKS)
def test_fallbacks_say_so_once(found, inputs, options):
    with pytest.warns(FallbackWarning) as warned:
        results = [sdpa(*inputs, **options) for _ in range(2)]
    message = str(warned[0].message)
    assert len(warned) == 1 and found in message and ", expected " in message and warned[0].filename == __file__
    for out in results:
        assert_bitwise(out, F.scaled_dot_product_attention(*inputs, **options))
    flashtile.sdpa._said.clear()
    for _ in range(2):  # as an error it comes each time
        with pytest.raises(FallbackWarning):
            served(*inputs, **options)


def test_a_reason_is_the_same_for_other_sizes():
    with pytest.warns(FallbackWarning) as warned:
        for head_dim in (264, 272, 512):
            sdpa(*tensors((1, 1, 2, head_dim), (1, 1, 2, head_dim)))
        for seqlen_q in (5, 3):
            sdpa(*tensors((2, 4, seqlen_q, 16)), bools(seqlen_q, 7))
    assert ["head dimension 264" in str(w.message) for w in warned] == [True, False]


def test_transforms_and_tangents_fall_back():
    query, key, value = tensors()
    with pytest.warns(FallbackWarning, match=r"torch\.func"):
        out = torch.vmap(lambda q, k, v: sdpa(q, k, v))(query, key, value)
    assert_accurate(out, F.scaled_dot_product_attention(query.double(), key.double(), value.double()), out)
    with torch.autograd.forward_ad.dual_level(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        dual = torch.autograd.forward_ad.make_dual(query, torch.ones_like(query))
        with pytest.warns(FallbackWarning, match="tangent"):
            tangent = torch.autograd.forward_ad.unpack_dual(sdpa(dual, key, value)).tangent
        assert tangent is not None


@pytest.mark.parametrize("mask", [None, torch.ones(2, 1, 1, 64, dtype=torch.bool)], ids=["none", "padding"])
def test_dropout(mask):
    """Of scores that are alike and values that tell keys apart, out holds the weights."""
    query, key, value = torch.zeros(2, 4, 128, 64), torch.zeros(2, 4, 64, 64), torch.eye(64).expand(2, 4, 64, 64)
    torch.manual_seed(1)
    first, second = (served(query, key, value, mask, 0.25) for _ in range(2))
    torch.manual_seed(1)
    assert_bitwise(served(query, key, value, mask, 0.25), first)
    assert not torch.equal(first, second)
    dropped = first == 0
    torch.testing.assert_close(first[~dropped] * 64, torch.full_like(first[~dropped], 4 / 3))
    assert abs(dropped.double().mean().item() - 0.25) < 5 * math.sqrt(0.25 * 0.75 / first.numel())


@pytest.mark.parametrize("dtype", [F32, F16])
def test_autocast_is_that_of_pytorch(dtype):
    query, key, value = tensors((2, 4, 5, 64), (2, 4, 7, 64), dtype=dtype)
    with torch.autocast("cpu", BF16):
        theirs, ours = F.scaled_dot_product_attention(query, key, value), served(query, key, value)
        mixed = served(query.bfloat16(), key, value)
    assert ours.dtype is theirs.dtype is mixed.dtype is BF16
    exact = F.scaled_dot_product_attention(*(x.bfloat16().double() for x in (query, key, value)))
    assert_accurate(ours, exact, theirs)
    assert_bitwise(mixed, ours)


LAYOUTS = {
    "heads first": lambda x: x.contiguous(),
    "sequence first": lambda x: x,
    "strided": lambda x: torch.stack([x, x], dim=-1)[..., 0],
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "slice": lambda x: F.pad(x, (3, 2))[..., 3:-2],
    "expanded": lambda x: x[:1].expand_as(x),
}


@st.composite
def problems(draw):
    size, some = st.integers(1, 20), st.booleans()
    heads_k, group, rank = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(0, 2))
    leading = tuple(draw(st.integers(1, 3)) for _ in range(rank))
    head_dim, head_dim_v = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    q, k = (*leading, heads_k * group, draw(size), head_dim), (*leading, heads_k, draw(size), head_dim)
    mask, scale = draw(st.sampled_from(["none", "causal", "keys", "any"])), draw(st.sampled_from([None, 0.5, -0.1]))
    options = dict(enable_gqa=group > 1 or draw(some), scale=scale, is_causal=mask == "causal")
    whole = (*q[:-1], k[-2])
    shape = tuple(n if draw(some) else 1 for n in whole)[draw(st.integers(0, rank + 1)) :]
    shape = {"keys": (*(n if draw(some) else 1 for n in leading), 1, 1, k[-2]), "any": shape}.get(mask)
    expanded = whole if shape is not None and draw(some) else shape
    layouts = [draw(st.sampled_from(list(LAYOUTS))) for _ in range(3)]
    return dict(q=q, k=k, head_dim_v=head_dim_v, dtype=draw(st.sampled_from(DTYPES))), layouts, shape, expanded, options


TWO_KEYS = dict(q=(9, 2, 20), k=(3, 20, 20), head_dim_v=25, dtype=BF16)  # dk of their rows is little but roundings


@settings(max_examples=200, deadline=None, derandomize=True)
@given(problems(), st.integers(0, 99))
@example((TWO_KEYS, ["expanded", "heads first", "heads first"], None, None, dict(is_causal=True, enable_gqa=True)), 25)
@pytest.mark.filterwarnings("ignore::flashtile.sdpa.FallbackWarning")
def test_any_problem(problem, seed):
    shapes, layouts, mask, expanded, options = problem
    inputs = [LAYOUTS[layout](x) for layout, x in zip(layouts, tensors(**shapes, seed=seed), strict=True)]
    check(inputs, None if mask is None else bools(*mask, seed=seed).expand(expanded), function=sdpa, **options)


@pytest.mark.parametrize("mask", [None, bools(2, 1, 1, 7)], ids=["none", "padding"])
def test_gradients_of_some_alone(mask):
    leaves = [x.requires_grad_() for x in tensors()]
    dout = torch.randn(2, 4, 5, 16)
    whole = torch.autograd.grad(served(*leaves, mask), leaves, dout)
    for wanted in range(1, 7):
        chosen = [n for n in range(3) if wanted >> n & 1]
        inputs = [x if n in chosen else x.detach() for n, x in enumerate(leaves)]
        out = served(*inputs, mask)
        for n, found in zip(chosen, torch.autograd.grad(out, [leaves[n] for n in chosen], dout), strict=True):
            assert_bitwise(found, whole[n])
