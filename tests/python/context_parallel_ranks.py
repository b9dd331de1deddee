"""The program that test_pytorch.py runs: ranks of a process group, on which PyTorch's context_parallel shards a
sequence and passes keys on, with flashtile as its flash attention. Each compares all rows with the oracle's.

    python context_parallel_ranks.py SIZE cpu|cuda
"""

import datetime
import os
import socket
import sys

import reference
import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.attention
import torch.nn.functional as F
from compare import assert_accurate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import (
    _cp_options,
    context_parallel_unshard,
    set_rotate_method,
)

import flashtile.integrations.pytorch as integration

CASES = [  # (how keys travel, KV heads, is_causal)
    ("allgather", 4, True),
    ("alltoall", 4, True),
    ("alltoall", 2, True),
    ("allgather", 2, False),
]
BATCH, HEADS, ROWS, HEAD_DIM = 2, 4, 16, 64  # ROWS of half a rank


def scaled_dot_product_attention(query, key, value, is_causal=False, enable_gqa=False):
    """Stands for PyTorch's, which takes another operator on a CPU, one that context_parallel does not know."""
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)[0]


def differentiated(function, q, k, v, dout):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]


def check_case(mesh, rotation, heads_k, is_causal):
    generator, dtype = torch.Generator().manual_seed(1), torch.bfloat16
    shapes = [(BATCH, heads, 2 * ROWS * mesh.size(), HEAD_DIM) for heads in (HEADS, heads_k, heads_k, HEADS)]
    whole = [torch.randn(shape, generator=generator).to(mesh.device_type, dtype) for shape in shapes]

    def oracle(q, k, v):
        rows_first = (x.transpose(1, 2) for x in (q, k, v))
        return reference.attention(*rows_first, causal=is_causal)[0].transpose(1, 2)

    def flash(q, k, v):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)

    set_rotate_method(rotation)
    _cp_options.enable_load_balance = is_causal  # which PyTorch refuses without a causal mask
    mine = [x.clone() for x in whole]
    with context_parallel(mesh, buffers=mine, buffer_seq_dims=[2] * 4):
        assert mine[0].shape[2] == 2 * ROWS
        found = context_parallel_unshard(mesh, differentiated(flash, *mine), [2] * 4)
    exact, rough = (differentiated(oracle, *(x.to(t) for x in whole)) for t in (torch.float64, dtype))
    for what, x, best, worse in zip(("out", "dq", "dk", "dv"), found, exact, rough, strict=True):
        assert_accurate(x, best, worse, f"{what} of {rotation}, {heads_k} KV heads", slack=1e-3)


def check(rank, size, port, device):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
        integration.register()
        torch.nn.attention.activate_flash_attention_impl("flashtile")
    else:
        activation = integration._activate("CPU")
        F.scaled_dot_product_attention = scaled_dot_product_attention
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=120))
    mesh = init_device_mesh(device, (size,))
    for case in CASES:
        check_case(mesh, *case)
    dist.destroy_process_group()
    if device == "cpu":
        activation.remove()
    if rank == 0:
        print(f"{len(CASES)} calls", flush=True)


def main():
    size, device = int(sys.argv[1]), sys.argv[2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start_method = "fork" if device == "cpu" else "spawn"  # a forked process has what this one imported
    torch.multiprocessing.start_processes(check, (size, port, device), nprocs=size, start_method=start_method)


if __name__ == "__main__":
    main()
