"""The ladder's rungs on a GPU: every one is attention there, by the kernels that its name says."""

import itertools
import shutil

import pytest
import torch
from cases import BF16, F16, F32
from test_ladder import IN_PYTORCH, assert_gradients_are_right, assert_is_attention, tensors
from test_ladder_fp8 import assert_is_attention_of_numbers

import flashtile
from flashtile import _capability
from flashtile.bench.cases import Case
from flashtile.reference import RUNGS, command, cuda_minimal, rung

SIZES = [
    (1, 1, 1, 1), (1, 1000, 8, 2), (3, 500, 4, 4), (64, 64, 2, 1), (127, 257, 4, 2), (300, 300, 3, 3), (300, 40, 2, 1),
]  # fmt: skip
OPTIONS = [{"causal": False}, {"causal": True}, {"causal": True, "scale": 0.02}]
GPU = torch.device("cuda")

pytestmark = pytest.mark.gpu


def needs(key):
    """Skips where the rung does not run, with its reason; the rung otherwise."""
    found = rung(key)
    if reason := found.available(GPU):
        pytest.skip(f"{key} {reason}")
    return found


def on_gpu(*sizes, **options):
    return [x.cuda() for x in tensors(*sizes, **options)]


@pytest.mark.parametrize("key", IN_PYTORCH)
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("sizes, options", list(itertools.product(SIZES, OPTIONS)), ids=str)
def test_in_pytorch(key, dtype, sizes, options):
    assert_is_attention(rung(key).attention, *on_gpu(*sizes, 64, dtype=dtype), **options)


@pytest.mark.parametrize("dtype, head_dim", [(F32, 16), (F32, 40), (F32, 64), (F32, 128), (F16, 64), (BF16, 128)])
@pytest.mark.parametrize("sizes, options", list(itertools.product(SIZES, OPTIONS)), ids=str)
def test_minimal_cuda(dtype, head_dim, sizes, options):
    assert_is_attention(needs("cuda-minimal").attention, *on_gpu(*sizes, head_dim, dtype=dtype), **options)


def test_minimal_cuda_is_there():
    """It needs nothing but what PyTorch for CUDA brings."""
    assert cuda_minimal.available(GPU) is None


def test_minimal_cuda_on_another_stream():
    attention = needs("cuda-minimal").attention
    q, k, v = on_gpu(300, 300, 2, 1, 64)
    expected = attention(q, k, v)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = attention(q, k, v)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(out, expected)


def test_minimal_cuda_refuses_wide_heads():
    with pytest.raises(NotImplementedError, match=r"^cuda_minimal: has D = 136 and D_v = 136, expected .* at most 128"):
        needs("cuda-minimal").attention(*on_gpu(3, 3, 1, 1, 136))


@pytest.mark.parametrize(
    "dtype, head_dim", [*itertools.product([F16, BF16], [16, 32, 64, 128, 256]), (F32, 32), (F32, 256)]
)
@pytest.mark.parametrize("sizes, options", list(itertools.product(SIZES, OPTIONS)), ids=str)
def test_triton(dtype, head_dim, sizes, options):
    attention = needs("triton").attention
    q, k, v = on_gpu(*sizes, head_dim, dtype=dtype)
    assert_is_attention(attention, q, k, v, **options)
    assert_gradients_are_right(attention, q, k, v, **options)


@pytest.mark.parametrize("key", ["sm80", "sm90"])
@pytest.mark.parametrize("dtype, head_dim", [(F16, 64), (BF16, 128), (BF16, 256)])
@pytest.mark.parametrize("sizes, options", list(itertools.product(SIZES, OPTIONS)), ids=str)
def test_flashtile(key, dtype, head_dim, sizes, options):
    assert_is_attention(needs(key).attention, *on_gpu(*sizes, head_dim, dtype=dtype), **options)


@pytest.mark.parametrize("dtype, head_dim", [(F16, 64), (BF16, 128), (BF16, 256)])
@pytest.mark.parametrize("sizes, options", list(itertools.product(SIZES, OPTIONS)), ids=str)
def test_fp8(dtype, head_dim, sizes, options):
    needs("fp8")
    assert_is_attention_of_numbers(*on_gpu(*sizes, head_dim, dtype=dtype), **options)


def test_fp8_takes_no_float32():
    case = Case(1, 64, 64, 1, 1, 64, 64, dtype="float32")
    needs("fp8")
    assert rung("fp8").refusal(case, GPU).startswith("q has dtype torch.float32 on cuda, expected")
    with pytest.raises(NotImplementedError, match=r"^fp8: q has dtype torch.float32 on cuda"):
        rung("fp8").attention(*on_gpu(64, 64, 1, 1, 64))
    assert command.show(case, GPU, quick=True, rungs=[rung("fp8")]) == 0


def test_the_limit_chooses_the_kernels():
    needs("sm90")
    q, k, v = on_gpu(64, 64, 1, 1, 64, dtype=BF16)
    before = flashtile.explain(q, k, v)
    with _capability.limited(80):
        assert "sm80_bf16" in flashtile.explain(q, k, v)
    assert flashtile.explain(q, k, v) == before


@pytest.mark.parametrize("causal", [False, True])
def test_the_table(causal, capsys):
    case = Case(1, 200, 300, 4, 2, 64, 64, causal=causal)
    assert command.show(case, GPU, quick=True) == 0
    lines = capsys.readouterr().out.splitlines()
    for each in RUNGS:
        (line,) = [line for line in lines if line.split()[:1] == [str(each.number)]]
        assert ("×" in line) == (each.available(GPU) is None), line  # its bytes, in those of the formula


@pytest.mark.parametrize("key", [each.key for each in RUNGS if each.key != "cpu"])
def test_once(key, capsys):
    needs(key)
    assert command.once([key], Case(1, 200, 300, 4, 2, 64, 64), GPU) == 0
    assert capsys.readouterr().out.startswith(f"{key} ran once: ")


def test_ncu_counts_every_rung(capsys):
    """The caches are empty when a rung begins, so that most of Q, K and V comes from HBM, and through L2: three
    quarters of all, of e4m3 numbers three eighths."""
    if shutil.which("ncu") is None:
        pytest.skip("needs ncu (Nsight Compute)")
    case = Case.square(2, 2048, 8, 64)
    rungs = [each for each in RUNGS if each.available(GPU) is None]
    counts = command.count(rungs, case)
    said = capsys.readouterr().err
    if "ERR_NVGPUCTRPERM" in said or "Failed to initialize the profiler" in said:
        pytest.skip("needs counters that ncu can read")
    assert list(counts) == [each.key for each in rungs], said
    for key, found in counts.items():
        for metric in command.METRICS:
            assert found[metric] > case.bytes / (3 if key == "fp8" else 2), (key, metric)
