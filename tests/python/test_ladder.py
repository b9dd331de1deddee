"""The ladder: every rung is attention and moves the bytes that its formula says; its page is true."""

import ctypes
import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import reference
import torch
from cases import BF16, F16, F32
from compare import assert_accurate, score_rounding
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flashtile
import flashtile.reference
from flashtile import _capability
from flashtile.bench import peers
from flashtile.bench.cases import Case
from flashtile.reference import (
    RUNGS,
    _tiles,
    cuda_minimal,
    flash2,
    flash_decoding,
    flash_decoding_pp,
    flashtile_rungs,
    rung,
    triton_flash2,
)

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
IN_PYTORCH = ("standard", "flash1", "flash2", "flash-decoding", "flash-decoding++")
RUNG_MODULES = ("standard", "flash1", "flash2", "flash_decoding", "flash_decoding_pp", "cuda_minimal", "triton_flash2")
RUNG_MODULES += ("flashtile_rungs", "fp8")
LENGTHS = (1, 3, 31, 32, 33, 127, 128, 129, 200, 257)  # around the edges of tiles, and more than one of them


def tensors(seqlen_q, seqlen_k, heads_q, heads_k, head_dim, head_dim_v=None, dtype=F32, batch=2):
    generator = torch.Generator().manual_seed(5)
    shapes = (seqlen_q, heads_q, head_dim), (seqlen_k, heads_k, head_dim), (seqlen_k, heads_k, head_dim_v or head_dim)
    return [torch.randn(batch, *shape, generator=generator).to(dtype) for shape in shapes]


def assert_is_attention(attention, q, k, v, **options):
    exact, lse = reference.attention(q, k, v, **options)
    rough, _ = reference.attention(q, k, v, dtype=q.dtype, **options)
    out = attention(q, k, v, **options)
    assert out.dtype == q.dtype
    assert_accurate(out, exact, rough, slack=score_rounding(lse))
    return out


def assert_gradients_are_right(attention, q, k, v, **options):
    dout = torch.randn(*q.shape[:3], v.shape[3], generator=torch.Generator().manual_seed(6)).to(q)

    def gradients(function, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(function(*leaves), leaves, dout.to(dtype))

    _, lse = reference.attention(q, k, v, **options)
    exact, rough = (
        gradients(lambda *x, dtype=dtype: reference.attention(*x, dtype=dtype, **options)[0], dtype)
        for dtype in (torch.float64, q.dtype)
    )
    found = gradients(lambda *x: attention(*x, **options), q.dtype)

    def largest(x):
        return x.abs().max().item() if x.numel() else 0.0

    # dP and delta are float32 sums, each rounded in its own way; where a row has one key, nothing else is left of dS.
    products = torch.finfo(F32).eps * largest(dout.abs().sum(dim=-1)) * largest(v)
    scale = abs(options.get("scale", q.shape[-1] ** -0.5))
    slacks = (scale * products * largest(k), scale * products * largest(q), score_rounding(lse, dout))
    for name, *three, slack in zip(("dq", "dk", "dv"), found, exact, rough, slacks, strict=True):
        assert_accurate(*three, what=name, slack=slack)


# Every rung is attention.


def test_the_rungs_are_numbered_and_share_one_signature():
    assert [each.number for each in RUNGS] == list(range(1, 12))
    assert len({each.key for each in RUNGS}) == len(RUNGS)
    for each in RUNGS:
        parameters = inspect.signature(each.attention).parameters
        assert list(parameters) == ["q", "k", "v", "causal", "scale"], each.key
        assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in ("causal", "scale"))
        assert parameters["causal"].default is False and parameters["scale"].default is None


def test_a_rung_that_is_not_there():
    with pytest.raises(ValueError, match=r"^ladder: rung is 'flash3', expected one of standard, flash1, "):
        rung("flash3")


@st.composite
def problems(draw):
    heads_k = draw(st.integers(1, 2))
    lengths = st.integers(0, 40) | st.sampled_from(LENGTHS)
    sizes = dict(
        seqlen_q=draw(lengths),
        seqlen_k=draw(lengths),
        heads_q=heads_k * draw(st.integers(1, 3)),
        heads_k=heads_k,
        head_dim=8 * draw(st.integers(1, 5)),
        head_dim_v=8 * draw(st.integers(1, 5)),
        dtype=draw(st.sampled_from([F32, F16, BF16])),
        batch=draw(st.integers(1, 2)),
    )
    return sizes, dict(causal=draw(st.booleans()), scale=draw(st.none() | st.floats(-1, 1, width=32)))


@pytest.mark.parametrize("key", [*IN_PYTORCH, "cpu"])
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(problem=problems())
def test_a_rung_is_attention(key, problem):
    sizes, options = problem
    assert_is_attention(rung(key).attention, *tensors(**sizes), **options)


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1, 500), (3, 500), (200, 200), (300, 40)])
@pytest.mark.parametrize("causal", [False, True])
def test_rungs_agree_with_each_other(seqlen_q, seqlen_k, causal):
    q, k, v = tensors(seqlen_q, seqlen_k, 4, 2, 16)
    first, *others = [rung(key).attention(q, k, v, causal=causal) for key in (*IN_PYTORCH, "cpu")]
    for other in others:
        torch.testing.assert_close(other, first, atol=2e-6, rtol=0)


@pytest.mark.parametrize("key", [*IN_PYTORCH, "cpu"])
def test_rows_that_see_nothing_are_zero(key):
    q, k, v = tensors(150, 10, 2, 1, 16)
    out = rung(key).attention(q, k, v, causal=True)
    assert torch.all(out[:, :140] == 0) and torch.all(out[:, 140:] != 0)
    assert torch.all(rung(key).attention(q, k[:, :0], v[:, :0]) == 0)


@pytest.mark.parametrize("key", [*IN_PYTORCH, "cpu"])
def test_large_scores_overflow_in_no_rung(key):
    q, k, v = tensors(40, 300, 2, 1, 16)
    out = assert_is_attention(rung(key).attention, q * 300, k, v)
    assert out.isfinite().all()


@pytest.mark.parametrize("seqlen_q, seqlen_k, causal", [(20, 20, True), (9, 33, False), (33, 9, True)])
def test_gradients_of_the_textbook(seqlen_q, seqlen_k, causal):
    assert_gradients_are_right(
        rung("standard").attention, *tensors(seqlen_q, seqlen_k, 4, 2, 16, 8), causal=causal, scale=0.3
    )


@pytest.mark.parametrize("key", IN_PYTORCH)
def test_what_is_not_float64_is_computed_in_float32(key):
    """Scores of a half precision would be off by more than this."""
    q, k, v = (x.double() for x in tensors(40, 300, 2, 1, 16, dtype=F16))
    exact = rung(key).attention(q, k, v)
    assert (exact - reference.attention(q, k, v)[0]).abs().max() < 1e-13
    found = rung(key).attention(q.half(), k.half(), v.half())
    assert (found - exact).abs().max() <= torch.finfo(F16).eps / 2 * exact.abs().max() + 1e-6


# FlashDecoding++'s fallback.


@pytest.fixture
def fallbacks(monkeypatch):
    """The shapes of q for which rung 5 fell back to rung 3."""
    seen, online = [], flash2.attention
    monkeypatch.setattr(
        flash2, "attention", lambda q, *rest, **options: seen.append(q.shape) or online(q, *rest, **options)
    )
    return seen


@pytest.mark.parametrize("causal", [False, True])
def test_ordinary_scores_need_no_fallback(fallbacks, causal):
    assert_is_attention(flash_decoding_pp.attention, *tensors(3, 1000, 4, 2, 64), causal=causal)
    assert not fallbacks


@pytest.mark.parametrize("score", [61.0, 95.0, -61.0, -120.0])
def test_scores_out_of_range_fall_back(fallbacks, score):
    """At 95 exp overflows, and at -120 it is 0 for every key: without the fallback these rows were inf / inf and 0."""
    q, k, v = tensors(3, 1000, 2, 1, 16)
    q[:, 1], k = torch.nn.functional.one_hot(torch.tensor(0), 16) * score, k.clone()
    k[..., 0] = 1 + k[..., 0] / 1000
    out = assert_is_attention(flash_decoding_pp.attention, q, k, v, scale=1.0)
    assert len(fallbacks) == 1 and out.isfinite().all()


def test_a_hidden_score_does_not_fall_back(fallbacks):
    q, k, v = tensors(2, 300, 1, 1, 16)
    k[:, -1] *= 1e4  # only the last row sees it
    q[:, 1] = 0
    assert_is_attention(flash_decoding_pp.attention, q, k, v, causal=True)
    assert not fallbacks
    assert_is_attention(flash_decoding_pp.attention, q, k, v, causal=False)
    assert len(fallbacks) == 1


# Bytes.


@pytest.mark.parametrize("key", IN_PYTORCH)
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(problem=problems().filter(lambda problem: min(problem[0]["seqlen_q"], problem[0]["seqlen_k"]) > 0))
def test_a_formula_counts_what_is_loaded_and_stored(key, problem):
    sizes, options = problem
    dtype = str(sizes.pop("dtype")).removeprefix("torch.")
    case = Case(**sizes, dtype=dtype, causal=options["causal"])
    q, k, v = tensors(**sizes, dtype=case.torch_dtype)
    with _tiles.counting() as traffic:
        rung(key).attention(q, k, v, **options)
    assert traffic.bytes == rung(key).bytes_moved(case)
    assert traffic.written >= q.shape[:3].numel() * v.shape[3] * case.torch_dtype.itemsize


def test_formulas_without_a_mask_are_those_of_the_page():
    """N rows and columns, tiles of 128, float32: in numbers of 4 bytes."""
    case, n, d = Case.square(1, 1024, 1, 64, dtype="float32"), 1024, 64
    numbers = {key: rung(key).bytes_moved(case) / 4 for key in (*IN_PYTORCH, "cuda-minimal", "triton")}
    assert numbers["standard"] == 4 * n * d + 4 * n * n
    assert numbers["flash1"] == 2 * n * d + n * (d + 2) + n / 128 * n * (3 * d + 4)
    assert numbers["flash2"] == 2 * n * d + n / 128 * 2 * n * d
    assert numbers["flash-decoding"] == n * d + n / 128 * 2 * n * d + 8 * (n * d + 2 * n * (d + 1))
    assert numbers["flash-decoding++"] == numbers["flash-decoding"]
    assert numbers["cuda-minimal"] == 2 * n * d + n * (d + 2) + n / 32 * n * (3 * d + 4)
    assert numbers["triton"] == numbers["flash2"] + n


def test_what_a_causal_mask_saves():
    full = Case.square(1, 4096, 1, 64, dtype="float32")
    causal = dataclasses.replace(full, causal=True)
    assert rung("standard").bytes_moved(causal) == rung("standard").bytes_moved(full)
    for key in ("flash1", "flash2", "cuda-minimal", "triton", "cpu"):
        assert 0.5 < rung(key).bytes_moved(causal) / rung(key).bytes_moved(full) < 0.6, key


def test_query_heads_read_kv_heads_of_their_own_in_kernels():
    """In PyTorch a tile of K serves all the query heads of its group; a kernel's thread blocks each have one head."""
    one, four = (Case(1, 256, 256, 4, heads_k, 64, 64, dtype="float32") for heads_k in (1, 4))
    for key in ("cuda-minimal", "triton", "cpu"):
        assert rung(key).bytes_moved(one) == rung(key).bytes_moved(four), key
    for key in IN_PYTORCH:
        assert rung(key).bytes_moved(one) < rung(key).bytes_moved(four), key


# The minimal kernel, compiled for this CPU.


@pytest.fixture(scope="module")
def minimal_on_cpu(tmp_path_factory):
    """(head_dim) -> attention by minimal.cu, a block's threads being threads of the CPU."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")

    def build(head_dim):
        library = tmp_path_factory.mktemp("minimal") / f"{head_dim}.so"
        flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", f"-DHEAD_DIM={head_dim}"]
        source = Path(__file__).with_name("minimal_on_cpu.cpp")
        subprocess.run(
            [compiler, *flags, f"-I{cuda_minimal.SOURCE.parent}", str(source), "-o", str(library)], check=True
        )
        return ctypes.CDLL(str(library)).launch_flash1

    launchers = {}

    def attention(q, k, v, *, causal=False, scale=None):
        if q.shape[3] not in launchers:
            launchers[q.shape[3]] = build(q.shape[3])
        out, sums = torch.zeros_like(q), torch.zeros(q.shape[0], q.shape[2], q.shape[1])
        tops = torch.full_like(sums, _tiles.LOWEST)
        arguments = cuda_minimal.kernel_arguments(q, k, v, out, sums, tops, _tiles.score_scale(q, scale), causal)
        addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        launchers[q.shape[3]](q.shape[0] * q.shape[2], addresses)
        return out

    return attention


@pytest.mark.parametrize("head_dim", [40, 64])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1, 1), (1, 70), (32, 64), (33, 31), (70, 97), (97, 40)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_minimal_kernel_is_attention(minimal_on_cpu, head_dim, seqlen_q, seqlen_k, causal):
    q, k, v = tensors(seqlen_q, seqlen_k, 2, 1, head_dim)
    out = assert_is_attention(minimal_on_cpu, q, k, v, causal=causal, scale=0.2)
    if causal and seqlen_q > seqlen_k:
        assert torch.all(out[:, : seqlen_q - seqlen_k] == 0)


def test_the_minimal_kernel_is_minimal():
    lines = cuda_minimal.SOURCE.read_text().splitlines()
    assert len(lines) < 100
    assert max(map(len, lines)) <= 120


def test_the_minimal_kernel_compiles_for_gpus(tmp_path):
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    options = ["-arch=sm_80", f"-DHEAD_DIM={cuda_minimal.MAX_HEAD_DIM}", "-cubin", "-Werror=all-warnings"]
    subprocess.run([nvcc, *options, "-o", str(tmp_path / "out"), str(cuda_minimal.SOURCE)], check=True)


def test_the_minimal_kernel_says_where_it_does_not_run():
    assert cuda_minimal.available(CPU) == "needs an NVIDIA GPU"
    with pytest.raises(NotImplementedError, match=r"^cuda_minimal: needs an NVIDIA GPU"):
        cuda_minimal.attention(*tensors(3, 3, 1, 1, 16))


# Triton's rung, by its interpreter.


@pytest.fixture
def triton():
    # The interpreter of 3.6 fails with NumPy 2.4.
    pytest.importorskip("triton", minversion="3.9", reason="needs triton 3.9: pip install 'flashtile[triton]'")
    if torch.cuda.is_available():
        pytest.skip("triton compiles on this machine: test_ladder_gpu.py covers it")
    return triton_flash2.attention


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q, seqlen_k, heads_q, heads_k, head_dim", [
    (1, 150, 2, 1, 32), (70, 70, 1, 1, 16), (33, 150, 4, 2, 64), (150, 40, 2, 2, 32), (20, 40, 1, 1, 256),
    (0, 9, 1, 1, 16), (9, 0, 1, 1, 16),
])  # fmt: skip
def test_triton_is_attention(triton, seqlen_q, seqlen_k, heads_q, heads_k, head_dim, dtype, causal):
    q, k, v = tensors(seqlen_q, seqlen_k, heads_q, heads_k, head_dim, dtype=dtype)
    out = assert_is_attention(triton, q, k, v, causal=causal, scale=0.1)
    if causal and seqlen_q > seqlen_k:
        assert torch.all(out[:, : seqlen_q - seqlen_k] == 0)
    assert_gradients_are_right(triton, q, k, v, causal=causal, scale=0.1)


def test_triton_refuses_what_it_does_not_serve(triton):
    for sizes, options, found in (
        ((3, 3, 1, 1, 40), {}, "has D = 40 and D_v = 40"),
        ((3, 3, 1, 1, 32, 16), {}, "has D = 32 and D_v = 16"),
        ((3, 3, 1, 1, 32), {"dtype": BF16}, "Triton's interpreter multiplies no bfloat16"),
        ((3, 3, 1, 1, 32), {"dtype": torch.float64}, "q has dtype torch.float64"),
    ):
        with pytest.raises(NotImplementedError, match=f"^triton_flash2: {found}"):
            triton(*tensors(*sizes, **options))


def test_triton_says_where_it_does_not_run(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert triton_flash2.available(CPU).startswith("needs ")
    with pytest.raises(NotImplementedError, match=r"^triton_flash2: needs "):
        triton_flash2.attention(*tensors(3, 3, 1, 1, 16))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert triton_flash2.available(torch.device("cuda")) == "needs triton: pip install 'flashtile[triton]'"


def test_bench_times_triton_where_it_is_installed(monkeypatch):
    for spec, listed in ((None, False), ("found", True)):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, spec=spec: spec)
        names = [peer.name for peer in peers.peers_of("cuda", flashtile.attention)]
        assert (peers.TRITON in names) == listed and names[0] == peers.OURS
    assert peers.TRITON not in [peer.name for peer in peers.peers_of("cpu", flashtile.attention)]


def test_importing_the_ladder_imports_no_triton():
    code = "import sys, flashtile.reference; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# flashtile's rungs.


def test_a_limit_of_compute_capability_ends_with_its_block(monkeypatch):
    seen = []
    monkeypatch.setattr(flashtile._C, "_limit_compute_capability", seen.append)
    before = _capability._limit
    with _capability.limited(80), _capability.limited(90):
        pass
    with pytest.raises(RuntimeError), _capability.limited(80):
        raise RuntimeError
    assert seen == [min(before, 80), min(before, 80), min(before, 80), before, min(before, 80), before]


def test_kernels_of_gpus_refuse_a_cpu():
    with pytest.raises(NotImplementedError, match=r"^sm80: needs an NVIDIA GPU"):
        rung("sm80").attention(*tensors(3, 3, 1, 1, 16))


def test_splits_are_few_and_cover_the_keys():
    for seqlen_k in (0, 1, 7, 8, 9, 1000):
        parts = flash_decoding.splits(seqlen_k)
        assert [j for part in parts for j in range(part.start, part.stop)] == list(range(seqlen_k))
        assert len(parts) <= flash_decoding.NUM_SPLITS


def test_what_the_build_holds_is_asked_once(monkeypatch):
    """It takes longer than a small attention."""
    asked = []
    monkeypatch.setattr(flashtile, "info", lambda: asked.append(1) or {"forward_kernels": []})
    for _ in range(2):
        reason = flashtile_rungs.Kernels("sm90").available(torch.device("cuda", 99))
        assert reason == "this build of flashtile holds no sm90 kernels"
    assert len(asked) == 1


# What is written.


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(flashtile.reference.__path__)])
def test_docstrings(name):
    if name == "_triton_kernels":
        pytest.importorskip("triton", reason="needs triton: pip install 'flashtile[triton]'")
    torch.manual_seed(0)
    module = importlib.import_module(f"flashtile.reference.{name}")
    assert doctest.testmod(module).failed == 0
    if name in RUNG_MODULES:
        assert re.search(r"^Rungs? \d", module.__doc__) and re.search(r"arXiv:|pytorch\.org/blog", module.__doc__)


def test_the_package_docstring():
    assert doctest.testmod(flashtile.reference).failed == 0


def test_the_page():  # whose blocks test_examples.py runs
    page = (ROOT / "docs/ladder.md").read_text()
    for each in RUNGS[:10]:
        assert re.search(rf"^## {each.number}\. ", page, re.MULTILINE), each
