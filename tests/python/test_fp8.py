"""fp8.quantize: blocks of rows as e4m3 numbers with a scale of their own, after a rotation that keeps products."""

import math

import pytest
import torch
from cases import BF16, DEVICE_PARAMS, F16, F32, HEAD_DIMS
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtile import fp8

GPU = pytest.mark.gpu


def all_numbers():
    """The finite numbers of e4m3 by the format's definition, ascending: sign, 4 bits of exponent, 3 of mantissa."""
    values = {0.0}
    for exponent in range(16):
        for mantissa in range(8):
            if (exponent, mantissa) != (15, 7):
                scale = 2.0 ** (max(exponent, 1) - 7)
                values.add(scale * ((exponent > 0) + mantissa / 8))
    return torch.tensor(sorted({-x for x in values} | values), dtype=torch.float64)


def hadamard(side):
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < side:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(side)


def rotation(head_dim, seed=0):
    """The matrix that rows are multiplied with: what becomes of the rows of the identity, each of which is a block of
    its own here. Its elements are all of one size, so that e4m3 holds them as they are."""
    identity = torch.eye(head_dim).reshape(head_dim, 1, 1, head_dim)
    x = fp8.quantize(identity, identity, identity, seed=seed)
    return fp8.dequantize(x.q, x.q_descale).reshape(head_dim, head_dim).double()


def operands(*shape_of_q, heads_k=None, dtype=F32, device="cpu", seed=0):
    batch, rows, heads, head_dim = shape_of_q
    generator = torch.Generator().manual_seed(seed)
    shapes = shape_of_q, (batch, rows + 5, heads_k or heads, head_dim), (batch, rows + 5, heads_k or heads, head_dim)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def bits(x):
    return [t.cpu().contiguous().flatten().view(torch.uint8) for t in x]


def assert_same_bits(found, expected):
    for name, a, b in zip(fp8.Quantized._fields, bits(found), bits(expected), strict=True):
        if not name.endswith("descale"):  # NaN may have either sign, but on a CPU it has none
            a = torch.where((a & 0x7F) == 0x7F, 0x7F, a)
        assert torch.equal(a, b), name


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_rotation_is_signs_and_a_hadamard_matrix(head_dim):
    found, side = rotation(head_dim), head_dim & -head_dim
    torch.testing.assert_close(found @ found.T, torch.eye(head_dim, dtype=torch.float64), rtol=0, atol=1e-6)
    for first in range(0, head_dim, side):
        part = found[first : first + side, first : first + side]
        signs = part[:, :1].sign()  # the first column of a Hadamard matrix is 1 throughout
        torch.testing.assert_close(part * signs, hadamard(side), rtol=0, atol=1e-6)
    assert torch.equal(found, rotation(head_dim))
    if head_dim > 8:
        assert not torch.equal(found, rotation(head_dim, seed=1))
        assert 0.2 < (found[:, ::side].sum(1) < 0).double().mean() < 0.8


@pytest.mark.parametrize("block", fp8.BLOCKS)
@pytest.mark.parametrize("rotate", [False, True])
def test_numbers_are_the_nearest_of_each_block(block, rotate):
    q, k, v = operands(2, 300, 4, 72, heads_k=2)
    x = fp8.quantize(q, k, v, block=block, rotate=rotate)
    table = all_numbers()
    for given_, numbers, descale in zip((q, k, v), x[:3], x[3:], strict=True):
        exact = given_.double() @ rotation(72) if rotate and given_ is not v else given_.double()
        for first in range(0, exact.shape[1], block):
            rows = exact[:, first : first + block]
            scale = descale[..., first // block].double()
            torch.testing.assert_close(scale, rows.abs().amax((1, 3)) / 448, rtol=1e-6, atol=0)
            wanted = rows / scale[:, None, :, None]
            found = numbers[:, first : first + block].double()
            nearest = (wanted[..., None] - table).abs().amin(-1)
            # A float32 rounding of the quotient may decide between two that are as near.
            assert ((found - wanted).abs() <= nearest + 1e-5 * wanted.abs() + 1e-7).all()


def test_a_rotation_spreads_outliers():
    """On FlashAttention-3's distribution: N(0, 1), and of one in a thousand elements N(0, 100) more."""
    generator = torch.Generator().manual_seed(0)

    def drawn():
        x = torch.randn(1, 1024, 4, 128, generator=generator)
        return x + 10 * torch.randn(x.shape, generator=generator) * (torch.rand(x.shape, generator=generator) < 1e-3)

    def attention(q, k, v):
        scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / math.sqrt(128)
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double())

    q, k, v = drawn(), drawn(), drawn()
    exact = attention(q, k, v)

    def error(rotate):
        x = fp8.quantize(q, k, v, rotate=rotate)
        rounded = [fp8.dequantize(numbers, descale) for numbers, descale in zip(x[:3], x[3:], strict=True)]
        return (attention(*rounded) - exact).square().mean().sqrt().item()

    assert error(rotate=True) < 9.1e-3  # FlashAttention-3's table has this
    assert error(rotate=True) < 0.75 * error(rotate=False)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("rotate", [False, True])
def test_zeros_nan_and_infinity(device, rotate):
    x = torch.zeros(1, 200, 1, 64, dtype=F16, device=device)
    x[0, 130:], x[0, 131, 0, 3], x[0, 140, 0, 5] = 2, math.inf, math.nan
    found = fp8.quantize(x, x, x, rotate=rotate)
    for numbers, descale, rotated in ((found.q, found.q_descale, rotate), (found.v, found.v_descale, False)):
        assert descale[0, 0, 0] == 0 and math.isfinite(descale[0, 0, 1])
        values = fp8.dequantize(numbers, descale)[0, :, 0]
        assert not values[:130].any()
        undefined = torch.zeros_like(values, dtype=torch.bool)
        for row, column in ((131, 3), (140, 5)):
            undefined[row, slice(None) if rotated else column] = True
        assert torch.equal(values.isnan(), undefined)
        if not rotated:
            assert (values[130:][~undefined[130:]] == 2).all()


def test_nan_of_a_cpu_has_no_sign():
    """Of whatever sign it comes, or is made by a rotation, as infinity less infinity."""
    x = torch.ones(1, 3, 1, 64)
    x[0, 0, 0, :2], x[0, 1, 0, 5] = math.inf, torch.tensor(math.nan).neg()
    found = fp8.quantize(x, x, x)
    for numbers in found[:3]:
        patterns = numbers.view(torch.uint8)
        assert not (patterns == 0xFF).any() and (patterns[0, :2] == 0x7F).any()


@pytest.mark.parametrize("tiny", [1e-30, 1e-38, 1e-42])
def test_tiny_elements_keep_a_finite_scale(tiny):
    x = torch.full((1, 3, 1, 8), tiny)
    x[0, 1] = 0
    found = fp8.quantize(x, x, x, rotate=False)
    values = fp8.dequantize(found.q, found.q_descale)
    torch.testing.assert_close(values, x, rtol=1 / 16, atol=2.0**-126 / 512)


def test_gradients_and_empty_tensors():
    q, k, v = operands(1, 3, 1, 8)
    assert not any(t.requires_grad for t in fp8.quantize(q.requires_grad_(), k, v))
    for shape in ((1, 0, 2, 64), (0, 3, 2, 64), (2, 3, 0, 64)):
        x = fp8.quantize(*[torch.zeros(shape)] * 3)
        assert x.q.shape == shape and x.q_descale.shape == (shape[0], shape[2], min(shape[1], 1))


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_compiled_is_eager(device):
    q, k, v = operands(2, 100, 4, 64, dtype=BF16, device=device)
    for seed in (3, 2**63, 2**64 - 1, -(2**63)):
        torch.compiler.reset()
        options = dict(block=64, seed=seed)
        compiled = torch.compile(
            lambda *x, options=options: fp8.quantize(*x, **options), fullgraph=True, backend="eager"
        )
        assert_same_bits(compiled(q, k, v), fp8.quantize(q, k, v, **options))


@GPU
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 160, 224])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_the_gpu_finds_the_bits_of_the_cpu(head_dim, dtype):
    for block in fp8.BLOCKS:
        q, k, v = operands(2, 197, 4, head_dim, heads_k=2, dtype=dtype)
        q *= torch.logspace(-30, 30, 197, base=2).to(dtype)[:, None, None] if dtype is BF16 else 1
        found = fp8.quantize(q.cuda(), k.cuda(), v.cuda(), block=block, seed=7)
        assert_same_bits(found, fp8.quantize(q, k, v, block=block, seed=7))


@GPU
@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 400),
    st.integers(1, 5),
    st.integers(1, 32),
    st.sampled_from(fp8.BLOCKS),
    st.booleans(),
    st.sampled_from(["contiguous", "heads first", "gaps", "odd"]),
    st.integers(-(2**63), 2**63 - 1),
)
def test_any_shape_and_layout_on_the_gpu(batch, rows, heads, eights, block, rotate, layout, seed):
    q, k, v = operands(batch, rows, heads, 8 * eights, dtype=BF16, device="cuda", seed=rows)
    q[0, rows // 2, 0, 3] = math.inf

    def laid_out(x):
        if layout == "heads first":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "gaps":
            return torch.cat([x, x], -1)[..., : x.shape[-1]]
        return torch.cat([x, x], -1)[..., ::2] if layout == "odd" else x

    given_ = [laid_out(x) for x in (q, k, v)]
    found = fp8.quantize(*given_, block=block, rotate=rotate, seed=seed)
    assert_same_bits(found, fp8.quantize(*(x.cpu() for x in given_), block=block, rotate=rotate, seed=seed))


@GPU
def test_in_a_cuda_graph():
    q, k, v = operands(2, 300, 4, 128, dtype=BF16, device="cuda")
    fp8.quantize(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fp8.quantize(q, k, v)
    q.mul_(-3)
    graph.replay()
    assert_same_bits(found, fp8.quantize(q, k, v))


GOOD = torch.zeros(1, 4, 2, 64)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(q=None), TypeError, "quantize: q is of type NoneType, expected a torch.Tensor"),
        (
            dict(q=torch.nested.nested_tensor([GOOD[0]], layout=torch.jagged)),
            NotImplementedError,
            r"quantize: q is a nested tensor, expected a dense one; nearest supported: values\(\), with offsets",
        ),
        (dict(k=GOOD[0]), ValueError, r"quantize: k has shape \(4, 2, 64\), expected \(B, S, H, D\)"),
        (dict(v=GOOD.double()), TypeError, "quantize: v has dtype torch.float64 on cpu, expected torch.float32 or"),
        (dict(v=GOOD.half()), ValueError, "quantize: v is torch.float16 on cpu, expected torch.float32 on cpu, as q"),
        (dict(q=GOOD[..., :12]), NotImplementedError, "quantize: q has head dimension 12, expected a multiple of 8"),
        (dict(k=GOOD[..., :32]), ValueError, r"quantize: k has shape \(1, 4, 2, 32\), expected B and D of q"),
        (dict(v=GOOD[:, :3]), ValueError, r"quantize: v has shape \(1, 3, 2, 64\), expected \(B, S_k, H_k\) of k"),
        (dict(block=96), ValueError, "quantize: block is 96, expected 64 or 128"),
        (dict(block=64.0), TypeError, "quantize: block is 64.0, expected 64 or 128"),
        (dict(block=torch.tensor([64, 128])), TypeError, "quantize: block is a tensor of shape .*, expected 64 or 128"),
        (
            dict(rotate=torch.tensor(True)),
            TypeError,
            "quantize: rotate is a tensor of shape .*, expected True or False",
        ),
        (dict(seed=1.5), TypeError, "quantize: seed is 1.5, expected an int"),
        (dict(seed="a"), TypeError, "quantize: seed is 'a', expected an int"),
        (dict(seed=2**64), ValueError, r"quantize: seed is 18446744073709551616, expected an int from -2\^63 to"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        fp8.quantize(**(dict(q=GOOD, k=GOOD, v=GOOD) | change))


def test_dequantize_asks_for_tensors():
    x = fp8.quantize(GOOD, GOOD, GOOD)
    with pytest.raises(TypeError, match=r"^dequantize: x is of type NoneType, expected a torch.Tensor"):
        fp8.dequantize(None, x.q_descale)
    with pytest.raises(TypeError, match=r"^dequantize: descale is of type float, expected a torch.Tensor"):
        fp8.dequantize(x.q, 1.0)
    with pytest.raises(TypeError, match=r"^dequantize: cu_seqlens is of type list, expected a torch.Tensor"):
        fp8.dequantize(x.q[0], x.q_descale[:, :, 0], cu_seqlens=[0, 4])


def test_dequantize_asks_for_a_descale_of_its_blocks():
    x = fp8.quantize(GOOD, GOOD, GOOD)
    with pytest.raises(ValueError, match=r"dequantize: descale has shape \(1, 2, 2\), expected \(1, 2, 1\) or"):
        fp8.dequantize(x.q, torch.zeros(1, 2, 2))
    with pytest.raises(ValueError, match=r"dequantize: x has shape \(4, 2, 64\), expected \(B, S, H, D\)"):
        fp8.dequantize(x.q[0], x.q_descale)
