"""The program that test_distributed.py runs on four ranks: as if three were on one host and the last on another; and on
a mesh of two by two, where tensors are sharded along entries or heads, too.

    python distributed_hosts.py 4 PORT
"""

import os
import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import flashtile
from flashtile import distributed


def check_that_ranks_choose_the_same(rank):
    """Though they know of other bandwidths: on these the quickest method depends."""
    whole = torch.randn(1, 4096, 8, 16, generator=torch.Generator().manual_seed(0))
    rows = distributed.shard(whole, 1)
    plans = []
    for processes in ("4" if rank < 3 else "1", "4", "1"):
        os.environ["LOCAL_WORLD_SIZE"] = processes
        plan = distributed.explain(rows, rows, rows, causal=True, scale=1.0 + len(plans))
        plans.append(plan)
        told = [None] * 4
        dist.all_gather_object(told, plan)
        assert len(set(told)) == 1, told
    assert plans[0].splitlines()[1:] == plans[2].splitlines()[1:]
    out = distributed.attention(rows, rows, rows, causal=True)
    torch.testing.assert_close(distributed.unshard(out, 1), flashtile.attention(whole, whole, whole, causal=True))


def check_meshes():
    whole = torch.randn(4, 16, 4, 16, generator=torch.Generator().manual_seed(0))
    mesh = init_device_mesh("cpu", (2, 2))
    for placements in ([Shard(0), Shard(1)], [Shard(2), Shard(1)], [Replicate(), Shard(1)]):
        x = distribute_tensor(whole, mesh, placements)
        found = distributed.attention(x, x, x, causal=True).full_tensor()
        torch.testing.assert_close(found, flashtile.attention(whole, whole, whole, causal=True))
        assert "2 ranks" in distributed.explain(x, x, x, causal=True)
        dropped = dict(dropout_p=0.5, seed=3, method="ulysses")
        if Replicate() in placements:
            expected = flashtile.attention(whole, whole, whole, dropout_p=0.5, seed=3)
            torch.testing.assert_close(distributed.attention(x, x, x, **dropped).full_tensor(), expected)
            continue
        with pytest.raises(
            NotImplementedError, match=r"dropout_p is 0\.5 and q has placements .*, expected no dropout"
        ):
            distributed.attention(x, x, x, **dropped)


def check(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=4)
    check_that_ranks_choose_the_same(rank)
    check_meshes()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    size, port = map(int, sys.argv[1:])
    torch.multiprocessing.start_processes(check, (port,), nprocs=size, start_method="fork")
