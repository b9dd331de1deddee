"""flashtile.distributed: rows of a sequence on several ranks have the results of the whole sequence."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashtile
from flashtile import _C, distributed

HERE = Path(__file__).parent


def ranks(size, device, backend, wanted=""):
    """Runs the program distributed_ranks.py, and returns what it said."""
    command = [sys.executable, str(HERE / "distributed_ranks.py"), str(size), device, backend, wanted]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=HERE)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-8000:]
    return ended.stdout


@pytest.mark.parametrize("size, wanted", [(2, ""), (3, ""), (4, ""), (8, "ragged")])
def test_results(size, wanted):
    assert re.search(r"^[1-9]\d* calls$", ranks(size, "cpu", "gloo", wanted), re.MULTILINE)


@pytest.mark.gpu
@pytest.mark.parametrize("size, wanted", [(2, ""), (3, "ragged"), (4, "causal")])
def test_results_of_ranks_that_share_a_gpu(size, wanted, much_memory):
    ranks(size, "cuda", "gloo", wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("carrier, wanted", [("copy engines", ""), ("NCCL", "causal")])
def test_results_of_a_gpu_for_each_rank(carrier, wanted, monkeypatch, much_memory):
    count = min(torch.cuda.device_count(), 4)
    if count < 2:
        pytest.skip("needs two GPUs")
    monkeypatch.setenv("FLASHTILE_COPY_ENGINES", "1" if carrier == "copy engines" else "0")
    ranks(count, "cuda", "nccl", wanted)


def test_counters_are_of_gpus():
    """Which a build without CUDA says; with it, none is a call without an effect."""
    if flashtile.info()["built_with_cuda"]:
        _C.write_counters([], 1, 0, 0)
        return
    for function in (_C.write_counters, _C.wait_for_counters):
        with pytest.raises(NotImplementedError, match="built without CUDA"):
            function([1 << 20], 1, 0, 0)


@pytest.mark.parametrize("program, ranks", [("faults", 3), ("groups", 2), ("hosts", 4)])
def test_programs(program, ranks, free_port):
    """distributed_*.py, which say what they are; not all need a port."""
    command = [sys.executable, str(HERE / f"distributed_{program}.py"), str(ranks), str(free_port)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=HERE)
    assert ended.returncode == 0, ended.stderr[-4000:]


def test_one_rank_is_the_local_call():
    q, k, v = torch.randn(3, 2, 40, 4, 16)
    options = dict(causal=True, dropout_p=0.2, seed=4, window=(9, None))
    found = distributed.attention(q, k, v, return_lse=True, **options)
    for x, expected in zip(found, flashtile.attention(q, k, v, return_lse=True, **options), strict=True):
        assert torch.equal(x, expected)
    begins = torch.tensor([0, 11, 40], dtype=torch.int32)
    tables = dict(cu_seqlens_q=begins, cu_seqlens_k=begins)
    flat = [x[0] for x in (q, k, v)]
    assert torch.equal(
        distributed.attention_varlen(*flat, **tables, causal=True),
        flashtile.attention_varlen(*flat, **tables, causal=True),
    )
    assert distributed.shard(q, 1) is q and distributed.unshard(q, 1) is q
    assert distributed.positions(3).tolist() == [0, 1, 2]
    assert "one rank" in distributed.explain(q, k, v)
    assert not torch.distributed.is_initialized() and "RANK" not in os.environ
