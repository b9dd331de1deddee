"""The ladder's rung of e4m3 numbers."""

import dataclasses
import re

import pytest
import torch
from cases import BF16, F16, F32
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_attention_fp8 import exact
from test_ladder import CPU, problems, tensors

import flashtile
from flashtile.bench.cases import Case
from flashtile.reference import _tiles, fp8, rung

WEIGHT_ERROR = 1 / 16  # that of one weight, relative; many average


def assert_is_attention_of_numbers(q, k, v, **options):
    """By 2-norms, of the numbers that the inputs are rounded to."""
    x = fp8.rounded(q, k, v)
    out = fp8.attention(q, k, v, **options)
    assert out.dtype == q.dtype and torch.equal(out, fp8.of_numbers(x, out_dtype=q.dtype, **options))
    expected, _ = exact(x, **options)
    assert (out.double() - expected).norm() <= WEIGHT_ERROR * expected.norm()
    return out


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(problem=problems(), head_dim=st.sampled_from([16, 48, 64]), head_dim_v=st.sampled_from([16, 32, 80]))
def test_fp8_is_attention_of_rounded_numbers(problem, head_dim, head_dim_v):
    sizes, options = problem
    assert_is_attention_of_numbers(*tensors(**sizes | dict(head_dim=head_dim, head_dim_v=head_dim_v)), **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_fp8_is_near_attention_of_the_inputs(dtype, causal):
    q, k, v = tensors(300, 300, 4, 2, 64, dtype=dtype)
    expected = rung("standard").attention(q, k, v, causal=causal).double()
    error = (assert_is_attention_of_numbers(q, k, v, causal=causal).double() - expected).norm() / expected.norm()
    assert 0.01 < error < 0.1


def test_fp8_is_zero_where_a_row_sees_nothing():
    q, k, v = tensors(150, 10, 2, 1, 16)
    out = assert_is_attention_of_numbers(q, k, v, causal=True)
    assert torch.all(out[:, :140] == 0) and torch.all(out[:, 140:].norm(dim=-1) != 0)
    assert torch.all(fp8.attention(q, k[:, :0], v[:, :0]) == 0)


def test_fp8_rounds_no_more_than_once_when_it_is_bound(monkeypatch):
    each, rounded = rung("fp8"), []
    each = dataclasses.replace(each, rounding=lambda *inputs: rounded.append(inputs) or fp8.rounded(*inputs))
    inputs = tensors(40, 60, 2, 1, 16)
    attention = each.bound(*inputs)
    outs = [attention(causal=True) for _ in range(3)]
    assert len(rounded) == 1 and all(torch.equal(out, fp8.attention(*inputs, causal=True)) for out in outs)


@pytest.mark.parametrize("tile", [(192, 64), (128, 64), (192, 128)])
def test_fp8_moves_a_byte_for_a_number_and_descales(tile, monkeypatch):
    monkeypatch.setattr(fp8, "_tile", lambda case: tile)
    full = Case(2, 1000, 700, 4, 2, 64, 32)
    heads, tiles = 2 * 4, -(-1000 // tile[0])
    descales = 16 + tiles * 2 * 11
    expected = heads * (1000 * 64 + tiles * 700 * (64 + 32) + 4 * descales + 1000 * 32 * 2)
    assert fp8.bytes_moved(full) == expected
    assert fp8.bytes_moved(dataclasses.replace(full, dtype="float32")) == expected + heads * 1000 * 32 * 2
    square = Case.square(1, 4096, 2, 128)
    assert 0.5 < fp8.bytes_moved(dataclasses.replace(square, causal=True)) / fp8.bytes_moved(square) < 0.6
    # In 16 bits, and without descales, Q, K and V would take twice as much.
    out, row_bytes = 4096 * 2 * 128 * 2, 2 * (128 + 128)
    swept = _tiles.key_rows_swept(square, *tile)
    assert 0.5 < (fp8.bytes_moved(square) - out) / (out + 2 * swept * row_bytes) < 0.52


def test_fp8_has_the_tile_that_hopper_has():
    case = Case(2, 1000, 700, 4, 2, 128, 128)
    numbers = [torch.empty(2, s, h, 128, dtype=fp8.E4M3, device="meta") for s, h in ((1000, 4), (700, 2), (700, 2))]
    rows, keys = fp8._tile(case)
    assert f"tile      {rows} rows × {keys} keys" in flashtile.explain(*numbers, device="H100")


def test_fp8_refuses_what_its_kernels_do_not_serve():
    for sizes, options, found in (
        ((3, 3, 1, 1, 40), {}, r"has D = 40 and D_v = 40, expected multiples of 16 up to 256"),
        ((3, 3, 1, 1, 32, 24), {}, r"has D = 32 and D_v = 24, expected"),
        ((3, 3, 1, 1, 272), {}, r"has D = 272 and D_v = 272, expected"),
        (
            (3, 3, 1, 1, 32),
            {"dtype": torch.float64},
            r"q has dtype torch.float64 on cpu, expected one of torch.float16,",
        ),
    ):
        with pytest.raises(NotImplementedError, match=f"^fp8: {found}"):
            fp8.attention(*tensors(*sizes, **options))
        case = Case(1, 3, 3, 1, 1, sizes[4], sizes[-1], dtype=str(options.get("dtype", F32)).removeprefix("torch."))
        assert re.match(found, rung("fp8").refusal(case, CPU))
    assert rung("fp8").refusal(Case.square(1, 3, 1, 32, dtype="float32"), CPU) is None


@pytest.mark.parametrize("kernels, capability, reason", [
    (["sm90_bf16_d64"], (9, 0), "this build of flashtile holds no sm90_e4m3 kernels"),
    (["sm90_e4m3_d64"], (8, 0), "needs compute capability 9.0, and this GPU has 8.0: flashtile attends in 16 bits"),
    (["sm90_e4m3_d64"], (10, 0), "needs compute capability 9.0, and this GPU has 10.0: "),
    (["sm90_e4m3_d64"], (9, 0), None),
])  # fmt: skip
def test_fp8_runs_on_hopper_by_kernels_alone(kernels, capability, reason, monkeypatch):
    monkeypatch.setattr(flashtile, "info", lambda: {"forward_kernels": kernels})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = fp8.available.__wrapped__(torch.device("cuda", 99))
    assert found == reason or found.startswith(reason)
    assert fp8.available(CPU) is None and fp8.available(torch.device("mps")) == "needs an NVIDIA GPU or a CPU"


def test_fp8_takes_16_bits_on_a_gpu(monkeypatch):
    monkeypatch.setattr(fp8, "available", lambda device: None)
    gpu, case = torch.device("cuda", 99), Case.square(1, 3, 1, 32, dtype="float32")
    expected = "q has dtype torch.float32 on cuda, expected one of torch.float16, torch.bfloat16"
    assert rung("fp8").refusal(case, gpu) == expected
    assert rung("fp8").refusal(dataclasses.replace(case, dtype="bfloat16"), gpu) is None
