"""flashtile.compat.ring_flash_attn: the functions of ring-flash-attn, on ranks of a process group and on one."""

import doctest
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compare import assert_bitwise
from theirs import assert_refuses, packed

import flashtile
from flashtile.compat import ring_flash_attn as ring

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "size, device, backend",
    [(n, "cpu", "gloo") for n in (1, 2, 3)]
    + [pytest.param(n, "cuda", x, marks=pytest.mark.gpu) for n, x in ((1, "nccl"), (3, "gloo"), (2, "nccl"))],
)
def test_results_and_gradients(size, device, backend):
    """By the program ring_flash_attn_ranks.py."""
    if backend == "nccl" and torch.cuda.device_count() < size:
        pytest.skip("needs a GPU for each rank")
    command = [sys.executable, str(HERE / "ring_flash_attn_ranks.py"), str(size), device, backend]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=HERE)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-8000:]
    assert re.search(r"^[1-9]\d* calls$", ended.stdout, re.MULTILINE)


SAME = """
import importlib, inspect, random, sys, types
import torch
import flashtile.compat
from flashtile.compat import ring_flash_attn as mine

flashtile.compat.install()  # from which it imports
# Its adapters ask transformers for what transformers 5 has no more.
adapters = sys.modules["ring_flash_attn.adapters"] = types.ModuleType("adapters")
adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
theirs = importlib.import_module("ring_flash_attn")

def parameters(module, name):
    return [(p.name, p.default, p.kind) for p in inspect.signature(getattr(module, name)).parameters.values()]

functions = [name for name in dir(theirs) if name.endswith("_func") or name.startswith("llama3_flash_attn_prepare")]
assert {name for name in functions if "stripe" not in name} == set(mine.__all__), functions
for name in mine.__all__:
    assert parameters(mine, name) == parameters(theirs, name), name

source = random.Random(0)
for case in range(300):
    ranks, rows = source.randint(1, 5), source.randint(1, 6)
    cuts = sorted(source.randint(0, ranks * rows) for _ in range(source.randint(0, 5)))
    cu_seqlens = torch.tensor([0, *cuts, ranks * rows], dtype=torch.int32)
    for rank in range(ranks):
        for causal in (True, False):
            given = cu_seqlens, causal, rank, ranks
            found, expected = (x.llama3_flash_attn_prepare_cu_seqlens(*given) for x in (mine, theirs))
            for x, y in zip(found, expected, strict=True):
                same = torch.equal(x, y) and x.dtype is y.dtype if isinstance(y, torch.Tensor) else x == y
                assert same and type(x) is type(y), (given, found, expected)
"""


def test_signatures_and_tables_are_those_of_the_package():
    if importlib.util.find_spec("ring_flash_attn") is None:
        pytest.skip("needs the package ring-flash-attn")
    ended = subprocess.run([sys.executable, "-c", SAME], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr


def test_one_rank_has_all_rows():
    q, k, v = torch.randn(3, 2, 24, 3, 16)
    begins = torch.tensor([0, 7, 24], dtype=torch.int32)
    expected = flashtile.attention(q, k, v, causal=True, window=(5, None), return_lse=True)
    options = dict(causal=True, window_size=(5, -1), return_attn_probs=True)
    for name in ("ring", "zigzag_ring"):
        for pack, given in (("", (q, k, v)), ("kvpacked_", (q, packed(k, v))), ("qkvpacked_", (packed(q, k, v),))):
            *found, nothing = getattr(ring, f"{name}_flash_attn_{pack}func")(*given, **options)
            assert nothing is None
            for x, y in zip(found, expected, strict=True):
                assert_bitwise(x, y)
    flat = [x[0] for x in (q, k, v)]
    expected = flashtile.attention_varlen(*flat, cu_seqlens_q=begins, cu_seqlens_k=begins, causal=True)
    assert_bitwise(ring.ring_flash_attn_varlen_func(*flat, begins, 17, causal=True), expected)
    assert_bitwise(ring.zigzag_ring_flash_attn_varlen_qkvpacked_func(packed(*flat), begins, 17, causal=True), expected)
    *tables, rows = ring.llama3_flash_attn_prepare_cu_seqlens(begins, True, 0, 1)
    assert_bitwise(ring.llama3_flash_attn_varlen_func(*flat, *tables, 1, rows, causal=True), expected)
    assert not torch.distributed.is_initialized()


def test_dropout_follows_the_generator():
    q, k, v = torch.randn(3, 1, 16, 2, 16)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(ring.ring_flash_attn_func(q, k, v, 0.5))
    assert_bitwise(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_bad_arguments_are_named():
    q, k, v = torch.randn(3, 2, 16, 2, 16)
    begins = torch.tensor([0, 16], dtype=torch.int32)
    for function, error, message, *args in (
        (
            ring.ring_flash_attn_func,
            ValueError,
            r"q has shape \(16, 2, 16\), expected \(B, S_local, H, D\)",
            q[0],
            k,
            v,
        ),
        (ring.ring_flash_attn_kvpacked_func, ValueError, r"kv has shape .* expected \(B, S_local, 2, H_k, D\)", q, k),
        (ring.zigzag_ring_flash_attn_qkvpacked_func, ValueError, "qkv has shape", q),
        (
            ring.ring_flash_attn_varlen_func,
            ValueError,
            r"q has shape .* expected \(T_local, H, D\)",
            q,
            k,
            v,
            begins,
            16,
        ),
        (ring.zigzag_ring_flash_attn_varlen_kvpacked_func, ValueError, "kv has shape", q[0], k[0], begins, 16),
        (
            ring.zigzag_ring_flash_attn_varlen_func,
            *(TypeError, "cu_seqlens has dtype torch.int64, expected torch.int32", q[0], k[0], v[0], begins.long(), 16),
        ),
        (
            ring.llama3_flash_attn_varlen_func,
            *(TypeError, r"local_k_slice is slice\(0, 16, 2\), expected slice\(begin, end\)", q[0], k[0], v[0]),
            *(begins, begins, 16, 16, 1, slice(0, 16, 2)),
        ),
        (
            ring.llama3_flash_attn_prepare_cu_seqlens,
            *(ValueError, "cu_seqlens ends at 16, expected a multiple of world_size = 3", begins, True, 0, 3),
        ),
        (
            ring.llama3_flash_attn_prepare_cu_seqlens,
            *(ValueError, "rank is 2, expected one below world_size = 2", begins, True, 2, 2),
        ),
    ):
        assert_refuses(function, error, message, *args)
    assert_refuses(ring.ring_flash_attn_func, TypeError, "window_size is 3, expected two", q, k, v, window_size=3)


def test_docstrings():
    assert doctest.testmod(ring).failed == 0
