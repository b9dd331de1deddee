"""fp8.quantize of ragged batches: a scale for each sequence and head, as attention_varlen takes them."""

import itertools
import math

import pytest
import torch
from cases import BF16, DEVICE_PARAMS, F16, F32, HEAD_DIMS
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fp8 import all_numbers, assert_same_bits, bits, rotation

import flashtile
from flashtile import fp8

GPU = pytest.mark.gpu
LENGTHS_Q = [100, 0, 1, 128, 0, 37]
LENGTHS_K = [5, 64, 0, 128, 0, 99]


def begins(lengths, device="cpu"):
    return torch.tensor([0, *lengths]).cumsum(0).int().to(device)


def operands(lengths_q, lengths_k, head_dim, heads=4, heads_k=2, dtype=F32, device="cpu", seed=0, behind=3):
    """q, k, v and the two tables; `behind` rows follow the last sequence."""
    generator = torch.Generator().manual_seed(seed)
    rows_q, rows_k = sum(lengths_q) + behind, sum(lengths_k) + behind
    shapes = (rows_q, heads, head_dim), (rows_k, heads_k, head_dim), (rows_k, heads_k, head_dim)
    q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return q, k, v, begins(lengths_q, device), begins(lengths_k, device)


def quantize(q, k, v, begins_q, begins_k, **options):
    return fp8.quantize(q, k, v, cu_seqlens_q=begins_q, cu_seqlens_k=begins_k, **options)


def sequences(begins_, *tensors):
    """For each sequence its rows of each tensor, and its number."""
    for i, (first, end) in enumerate(itertools.pairwise(begins_.tolist())):
        yield i, *(x[first:end] for x in tensors)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("rotate", [False, True])
def test_a_sequence_is_a_dense_batch_of_one_block(device, rotate):
    """As all of these are at most 128 rows long."""
    q, k, v, begins_q, begins_k = operands(LENGTHS_Q, LENGTHS_K, 96, dtype=F16, device=device)
    found = quantize(q, k, v, begins_q, begins_k, rotate=rotate, seed=5)
    for i, rows, numbers in sequences(begins_q, q, found.q):
        dense = fp8.quantize(*[rows[None]] * 3, rotate=rotate, seed=5)
        assert torch.equal(*bits([numbers, dense.q]))
        expected = dense.q_descale[0, :, 0] if len(rows) else torch.zeros(4, device=device)
        assert torch.equal(found.q_descale[i], expected)
    for i, keys, values, numbers_k, numbers_v in sequences(begins_k, k, v, found.k, found.v):
        dense = fp8.quantize(keys[None], keys[None], values[None], rotate=rotate, seed=5)
        assert torch.equal(*bits([numbers_k, dense.k])) and torch.equal(*bits([numbers_v, dense.v]))
        if len(keys):
            assert torch.equal(found.k_descale[i], dense.k_descale[0, :, 0])
            assert torch.equal(found.v_descale[i], dense.v_descale[0, :, 0])


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("rotate", [False, True])
def test_descales_of_equal_lengths_are_the_largest_of_the_dense_blocks(device, rotate):
    q, k, v, begins_q, begins_k = operands([300] * 3, [200] * 3, 64, dtype=BF16, device=device, behind=0)
    found = quantize(q, k, v, begins_q, begins_k, rotate=rotate)
    dense = fp8.quantize(*(x.unflatten(0, (3, -1)) for x in (q, k, v)), rotate=rotate, block=64)
    for of_sequences, of_blocks in zip(found[3:], dense[3:], strict=True):
        assert torch.equal(of_sequences, of_blocks.amax(-1))


@pytest.mark.parametrize("rotate", [False, True])
def test_numbers_are_the_nearest_of_each_sequence(rotate):
    q, k, v, begins_q, begins_k = operands([300, 0, 5], [7, 250, 40], 72)
    x = quantize(q, k, v, begins_q, begins_k, rotate=rotate)
    table = all_numbers()
    for given_, numbers, descale, table_of in zip((q, k, v), x[:3], x[3:], (begins_q, begins_k, begins_k), strict=True):
        exact = given_.double() @ rotation(72) if rotate and given_ is not v else given_.double()
        for i, rows, of_rows in sequences(table_of, exact, numbers):
            if not len(rows):
                continue
            scale = descale[i].double()
            torch.testing.assert_close(scale, rows.abs().amax((0, 2)) / 448, rtol=1e-6, atol=0)
            wanted, found = rows / scale[:, None], of_rows.double()
            nearest = (wanted[..., None] - table).abs().amin(-1)
            assert ((found - wanted).abs() <= nearest + 1e-5 * wanted.abs() + 1e-7).all()


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("rotate", [False, True])
def test_zeros_nan_infinity_and_rows_behind(device, rotate):
    x = torch.zeros(12, 2, 64, dtype=F16, device=device)
    x[3:], x[4, 0, 3], x[5, 0, 5] = 2, math.inf, math.nan
    x[10:] = math.nan  # behind the last sequence
    table = begins([3, 0, 7], device)
    found = quantize(x, x, x, table, table, rotate=rotate)
    for numbers, descale, rotated in ((found.q, found.q_descale, rotate), (found.v, found.v_descale, False)):
        assert not descale[:2].any() and descale[2].isfinite().all() and (descale[2] > 0).all()
        assert not numbers.view(torch.uint8)[10:].any()
        values = fp8.dequantize(numbers, descale, cu_seqlens=table)
        assert not values[:3].any() and not values[10:].any()
        undefined = torch.zeros_like(values, dtype=torch.bool)
        for row, column in ((4, 3), (5, 5)):
            undefined[row, 0, slice(None) if rotated else column] = True
        assert torch.equal(values.isnan(), undefined)
        if not rotated:
            assert (values[3:10][~undefined[3:10]] == 2).all()


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_no_sequences_and_no_rows(device):
    for lengths, behind in ([], 3), ([], 0), ([0, 0], 0), ([0, 0], 2):
        q, k, v, begins_q, begins_k = operands(lengths, lengths, 64, dtype=F16, device=device, behind=behind)
        x = quantize(q, k, v, begins_q, begins_k)
        assert (x.q.shape, x.k.shape, x.v.shape) == (q.shape, k.shape, v.shape)
        assert (x.q_descale.shape, x.v_descale.shape) == ((len(lengths), 4), (len(lengths), 2))
        assert not any(part.view(torch.uint8).any() for part in x)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_attention_takes_them(device):
    q, k, v, begins_q, begins_k = operands([150, 0, 33], [200, 10, 33], 128, dtype=F16, device=device, behind=0)
    tables = dict(cu_seqlens_q=begins_q, cu_seqlens_k=begins_k)
    x = fp8.quantize(q, k, v, **tables)
    descales = dict(q_descale=x.q_descale, k_descale=x.k_descale, v_descale=x.v_descale)
    out = flashtile.attention_varlen(x.q, x.k, x.v, **tables, **descales, out_dtype=F16)
    exact = flashtile.attention_varlen(q, k, v, **tables)
    error = (out.double() - exact.double()).square().mean().sqrt() / exact.double().square().mean().sqrt()
    assert error < 0.06  # e4m3 rounds to 2 to 3 % each of q, k, v and the weights


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_compiled_is_eager(device):
    given_ = operands(LENGTHS_Q, LENGTHS_K, 64, dtype=BF16, device=device)
    compiled = torch.compile(lambda *x: quantize(*x, seed=3), fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(*given_), quantize(*given_, seed=3))


@GPU
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 160, 224])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_the_gpu_finds_the_bits_of_the_cpu(head_dim, dtype):
    given_ = operands([300, 0, 1, 64, 63, 517], [1, 90, 0, 700, 64, 3], head_dim, dtype=dtype)
    found = quantize(*(x.cuda() for x in given_), seed=7)
    assert_same_bits(found, quantize(*given_, seed=7))


@GPU
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 200), min_size=0, max_size=12),
    st.integers(1, 5),
    st.integers(1, 32),
    st.integers(0, 100),
    st.booleans(),
    st.sampled_from(["contiguous", "heads first", "gaps", "odd"]),
)
def test_any_lengths_and_layout_on_the_gpu(lengths, heads, eights, behind, rotate, layout):
    given_ = operands(lengths, lengths[::-1], 8 * eights, heads, heads, BF16, "cuda", seed=behind, behind=behind)

    def laid_out(x):
        if layout == "heads first":
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        if layout == "gaps":
            return torch.cat([x, x], -1)[..., : x.shape[-1]]
        return torch.cat([x, x], -1)[..., ::2] if layout == "odd" else x

    q, k, v, *tables = given_
    tensors = [*(laid_out(x) for x in (q, k, v)), *tables]
    found = quantize(*tensors, rotate=rotate)
    assert_same_bits(found, quantize(*(x.cpu() for x in tensors), rotate=rotate))


@GPU
def test_in_a_cuda_graph():
    """Which shows that the host does not read the tables; they may change ahead of a replay."""
    q, k, v, begins_q, begins_k = operands([100, 50], [70, 30], 128, dtype=BF16, device="cuda")
    quantize(q, k, v, begins_q, begins_k)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = quantize(q, k, v, begins_q, begins_k)
    q.mul_(-3)
    begins_q.copy_(begins([20, 130]))
    graph.replay()
    assert_same_bits(found, quantize(q, k, v, begins_q, begins_k))


@GPU
@pytest.mark.parametrize("table", [[3, 2, 1], [-5, 10**9, 7], [2**31 - 1] * 3, [0, 9, 4]])
def test_no_table_makes_a_gpu_leave_the_tensors(table):
    q, k, v, *_ = operands([5], [5], 64, dtype=F16, device="cuda", behind=0)
    tables = [torch.tensor(table, dtype=torch.int32, device="cuda")] * 2
    quantize(q, k, v, *tables)
    torch.cuda.synchronize()


def test_gradients():
    q, k, v, *tables = operands([3], [3], 8)
    assert not any(t.requires_grad for t in quantize(q.requires_grad_(), k, v, *tables))


def test_a_seed_of_queries_is_that_of_keys():
    x, table = torch.randn(9, 2, 64), begins([4, 5])
    found = fp8.quantize(x, x, x, cu_seqlens_q=table, cu_seqlens_k=table, seed=-1)
    assert torch.equal(*bits([found.q, found.k]))


GOOD, TABLE = torch.zeros(4, 2, 64), begins([1, 3])


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(q=GOOD[None]), ValueError, r"quantize: q has shape \(1, 4, 2, 64\), expected \(T, H, D\)"),
        (dict(k=GOOD[..., :32]), ValueError, r"quantize: k has shape \(4, 2, 32\), expected D of q, \(4, 2, 64\)"),
        (dict(v=GOOD[:3]), ValueError, r"quantize: v has shape \(3, 2, 64\), expected \(T_k, H_k\) of k, \(4, 2, 64\)"),
        (dict(cu_seqlens_k=None), TypeError, "quantize: cu_seqlens_k is of type NoneType, expected a torch.Tensor"),
        (dict(cu_seqlens_q=None), TypeError, "quantize: cu_seqlens_q is of type NoneType, expected a torch.Tensor"),
        (dict(cu_seqlens_q=[0, 4]), TypeError, "quantize: cu_seqlens_q is of type list, expected a torch.Tensor"),
        (
            dict(cu_seqlens_q=TABLE.long()),
            TypeError,
            "quantize: cu_seqlens_q has dtype torch.int64, expected torch.int32",
        ),
        (dict(cu_seqlens_q=TABLE[None]), ValueError, r"quantize: cu_seqlens_q has shape \(1, 3\), expected \(B \+ 1\)"),
        (dict(cu_seqlens_k=TABLE[:0]), ValueError, r"quantize: cu_seqlens_k has shape \(0,\), expected \(B \+ 1\)"),
        (
            dict(cu_seqlens_k=begins([4])),
            ValueError,
            r"quantize: cu_seqlens_k has shape \(2,\), expected \(3,\) = \(B \+ 1\)",
        ),
        (
            dict(cu_seqlens_k=TABLE.repeat_interleave(2)[::2]),
            ValueError,
            r"quantize: cu_seqlens_k has strides \(2,\), expected a contiguous tensor",
        ),
        (dict(cu_seqlens_q=TABLE + 1), ValueError, "quantize: cu_seqlens_q has 1 at index 0, expected 0"),
        (
            dict(cu_seqlens_k=TABLE.flip(0) - 4),
            ValueError,
            "quantize: cu_seqlens_k has -3 at index 1, expected at least 0",
        ),
        (
            dict(cu_seqlens_k=2 * TABLE),
            ValueError,
            "quantize: cu_seqlens_k has 8 at index 2, expected at most 4 = T_k",
        ),
        (dict(block=96), ValueError, "quantize: block is 96, expected 64 or 128"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        fp8.quantize(**(dict(q=GOOD, k=GOOD, v=GOOD, cu_seqlens_q=TABLE, cu_seqlens_k=TABLE) | change))


def test_dequantize_asks_for_a_descale_of_its_sequences():
    x = fp8.quantize(GOOD, GOOD, GOOD, cu_seqlens_q=TABLE, cu_seqlens_k=TABLE)
    assert torch.equal(fp8.dequantize(x.v, x.v_descale, cu_seqlens=TABLE), GOOD)
    with pytest.raises(ValueError, match=r"dequantize: descale has shape \(1, 2\), expected \(2, 2\) = \(B, H\)"):
        fp8.dequantize(x.q, x.q_descale[:1], cu_seqlens=TABLE)
    with pytest.raises(ValueError, match=r"dequantize: x has shape \(1, 4, 2, 64\), expected \(T, H, D\)"):
        fp8.dequantize(x.q[None], x.q_descale, cu_seqlens=TABLE)
