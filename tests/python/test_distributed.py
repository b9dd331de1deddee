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


FAULTS = """
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing
from flashtile import distributed

def refused(rank, function, message, *given, **options):
    try:
        function(*given, **options)
    except (TypeError, ValueError, NotImplementedError) as refusal:
        assert message in str(refusal), f"rank {rank}: {refusal}"
    else:
        raise AssertionError(f"rank {rank}: nothing was refused, expected {message!r}")

def check_dtensors(whole, distributed):
    import flashtile
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    mesh = init_device_mesh("cpu", (3,))
    rows = whole[:, :23]  # 8, 8 and 7 of them
    sharded = distribute_tensor(rows, mesh, [Shard(1)]).requires_grad_()
    out, lse = distributed.attention(sharded, sharded, sharded, causal=True, return_lse=True)
    expected = flashtile.attention(rows, rows, rows, causal=True, return_lse=True)
    torch.testing.assert_close((out.full_tensor(), lse.full_tensor()), expected)
    out.sum().backward()
    leaf = rows.clone().requires_grad_()
    flashtile.attention(leaf, leaf, leaf, causal=True).sum().backward()
    torch.testing.assert_close(sharded.grad.full_tensor(), leaf.grad)
    flat = distribute_tensor(rows[0], mesh, [Shard(0)])
    tables = dict(cu_seqlens_q=(0, 9, 23), cu_seqlens_k=(0, 9, 23))
    begins = torch.tensor([0, 9, 23], dtype=torch.int32)
    expected = flashtile.attention_varlen(*[rows[0]] * 3, cu_seqlens_q=begins, cu_seqlens_k=begins)
    torch.testing.assert_close(distributed.attention_varlen(flat, flat, flat, **tables).full_tensor(), expected)
    whole_on_all = distribute_tensor(rows, mesh, [Replicate()])
    refused(0, distributed.attention, "expected one Shard(1), the sequence", *[whole_on_all] * 3)
    refused(0, distributed.attention, "k is of type Tensor, expected a DTensor", sharded, rows, rows)

def check(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=3)
    q = torch.randn(1, 8, 2, 16)
    odd = rank == 1
    attention, varlen = distributed.attention, distributed.attention_varlen
    refused(rank, attention, "q's dtype is torch.float16 on rank 1", *[q.half() if odd else q] * 3)
    refused(rank, attention, "causal is True on rank 1, expected False, as on rank 0", q, q, q, causal=odd)
    refused(rank, attention, "head dimension is (1, 2, 24) on rank 1", q, q, torch.randn(1, 8, 2, 24 if odd else 16))
    refused(rank, attention, "softcap is 2.0 on rank 1", q, q, q, softcap=2.0 if odd else 0.0)
    refused(rank, attention, "return_lse is True on rank 1", q, q, q, return_lse=odd)
    wanted = "the gradients wanted of q, k, v, sinks is [True, False, False, False] on rank 1"
    refused(rank, attention, wanted, q.clone().requires_grad_(odd), q, q)
    rows = q[:, : 5 if odd else 8]
    refused(rank, attention, "q has 8 rows on rank 0, expected 7, as the layout", rows, rows, rows, layout="contiguous")
    own = "softcap is -1" if odd else "rank 1 refuses its arguments: attention: softcap is -1"
    refused(rank, attention, own, q, q, q, softcap=-1.0 if odd else 0.0)
    refused(rank, attention, "method is 'star', expected one of", q, q, q, method="star")
    refused(rank, attention, "ulysses_degree is 2, expected a divisor of 3", q, q, q, ulysses_degree=2)
    refused(rank, attention, "3 ranks share 2 query heads", q, q, q, method="ulysses")
    refused(rank, attention, "layout is 'star'", q, q, q, layout="star")
    flat, begins = q[0], (0, 10, 24)
    tables = dict(cu_seqlens_q=begins, cu_seqlens_k=(0, 11, 24) if odd else begins)
    own = "nearest supported: sequences with as many keys as queries"
    refused(rank, varlen, own, flat, flat, flat, **tables)
    tables = dict(cu_seqlens_q=(0, 25), cu_seqlens_k=(0, 25))
    refused(rank, varlen, "cu_seqlens ends at 25, with 24 query rows", flat, flat, flat, **tables)
    refused(rank, attention, "seed is None, expected an int", q, q, q, dropout_p=0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(q.bfloat16(), q, q).dtype is torch.bfloat16
    multiple = "chunks that begin at multiples of 16"
    refused(rank, attention, multiple, q, q, q, dropout_p=0.5, seed=1, method="ring", layout="contiguous")
    # A call like one before skips what was checked then, and nothing else.
    attention(q, q, q)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        refused(rank, attention, "q carries a forward-mode tangent", dual, q, q)
    refused(rank, attention, "q is of type int, expected a torch.Tensor", 3, q, q)
    # What was refused leaves nothing behind.
    whole = torch.randn(1, 24, 2, 16, generator=torch.Generator().manual_seed(0))
    mine = distributed.shard(whole, 1)
    out = distributed.unshard(attention(mine, mine, mine, causal=True), 1)
    import flashtile
    torch.testing.assert_close(out, flashtile.attention(whole, whole, whole, causal=True))
    assert torch.equal(whole[0, distributed.positions(24)], mine[0])
    check_dtensors(whole, distributed)
    text = distributed.explain(mine, mine, mine, causal=True)
    assert text.startswith("flashtile.distributed plan: ") and "3 ranks, forward\\n" in text, text
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.start_processes(check, (int(sys.argv[1]),), nprocs=3, start_method="fork")
"""


GROUPS = """
import os, sys
import weakref
import pytest
import torch
import torch.distributed as dist
from flashtile import distributed

def results(x, group):
    out = distributed.attention(x, x, x, causal=True, group=group)
    begins = (0, 5, 2 * x.shape[1])
    flat = distributed.attention_varlen(*[x[0]] * 3, cu_seqlens_q=begins, cu_seqlens_k=begins, group=group)
    return torch.cat([out[0], flat])

def check(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    x = torch.randn(1, 8, 2, 16, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    found = []
    for _ in range(2):  # the second time as if there had been no first
        dist.init_process_group("gloo", rank=rank, world_size=2)
        group = dist.new_group([1, 0])  # whose first rank is the default group's second
        groups = [weakref.ref(group), weakref.ref(dist.group.WORLD)]
        for of in (None, group):
            out = results(x, of)
            out.sum().backward(retain_graph=True)
            found += [out, x.grad]
            x.grad = None
        dist.destroy_process_group(group)
        del group, of
        assert groups[0]() is None and groups[1]() is not None
        with pytest.raises(RuntimeError, match="flashtile.distributed: the process group .* has been destroyed"):
            out.sum().backward()
        dist.destroy_process_group()
        assert groups[1]() is None
    for a, b in zip(found[:4], found[4:], strict=True):
        assert torch.equal(a, b)

if __name__ == "__main__":
    torch.multiprocessing.start_processes(check, (int(sys.argv[1]),), nprocs=2, start_method="fork")
"""


PROGRAMS = {"faults are named on all ranks": FAULTS, "groups end when they are destroyed": GROUPS}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_on_ranks(program, tmp_path, free_port):
    path = tmp_path / "program.py"
    path.write_text(program)
    ended = subprocess.run([sys.executable, str(path), str(free_port)], capture_output=True, text=True, timeout=300)
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
