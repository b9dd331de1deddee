"""The program that test_diffusers.py runs: ranks of a process group, on which diffusers' context parallelism shards a
sequence, with flashtile as the attention backend. Each compares all rows with the oracle's.

    python diffusers_ranks.py SIZE
"""

import datetime
import os
import socket
import sys
import warnings

import diffusers
import reference
import torch
import torch.distributed as dist
import torch.multiprocessing
from compare import assert_accurate, score_rounding
from diffusers import ContextParallelConfig, ParallelConfig
from diffusers.models import attention_dispatch as dispatch
from torch.distributed.device_mesh import init_device_mesh

import flashtile.integrations.diffusers as integration

BATCH, HEADS, ROWS = 2, 12, 12  # ROWS of a rank
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
LENGTHS = torch.tensor([[1.0], [0.4]])  # of keys, in parts of all
FLUX = dict(in_channels=4, num_layers=1, num_single_layers=1, joint_attention_dim=32, pooled_projection_dim=32)
FLUX |= dict(num_attention_heads=HEADS, attention_head_dim=16, axes_dims_rope=(4, 4, 8))


def degrees(size):
    """The ways to use so many ranks."""
    found = [dict(ring_degree=size), dict(ulysses_degree=size)]
    return [*found, dict(ring_degree=2, ulysses_degree=size // 2)] if size == 4 else found


def configured(mesh_type="cpu", **degree):
    config = ParallelConfig(context_parallel_config=ContextParallelConfig(**degree))
    parts = config.context_parallel_config
    mesh = init_device_mesh(mesh_type, parts.mesh_shape, mesh_dim_names=parts.mesh_dim_names)
    config.setup(dist.get_rank(), dist.get_world_size(), torch.device(mesh_type), mesh=mesh)
    return config


def gathered(x):
    """All rows of `x` (B, rows of this rank, ...), which ranks may have different numbers of."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, x.contiguous())
    return torch.cat(parts, dim=1)


def call(config, q, k, v, **options):
    return dispatch.dispatch_attention_fn(
        q, k, v, **options, backend=dispatch.AttentionBackendName("flashtile"), parallel_config=config
    )


def check_call(degree, rows, head_dim=16, dtype=F32, padded=False, backward=True, **options):
    """`rows` of each rank."""
    config, rank = configured(**degree), dist.get_rank()
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(BATCH, sum(rows), HEADS, head_dim, generator=generator).to(dtype) for _ in range(4)]
    q, k, v, dout = [x.split(rows, dim=1)[rank] for x in whole]
    keys = torch.arange(sum(rows)) < LENGTHS * sum(rows) if padded else None
    mask = None if keys is None else keys.split(rows, dim=1)[rank][:, None, None]
    leaves = [x.detach().requires_grad_(backward) for x in (q, k, v)]
    out, lse = call(config, *leaves, attn_mask=mask, attention_kwargs={"return_lse": True}, **options)
    found = [gathered(out.detach()), gathered(lse.detach()).transpose(1, 2)]
    if backward:
        found += [gathered(x) for x in torch.autograd.grad(out, leaves, dout)]
    seen = None if keys is None else keys[:, None, None].expand(-1, 1, sum(rows), -1)

    def oracle(dtype):
        *leaves, dout = (x.to(dtype).requires_grad_() for x in whole)
        out, lse = reference.attention(*leaves, mask=seen, dtype=dtype, **options)
        return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]

    exact, rough = oracle(F64), oracle(dtype)
    for what, x, best, worse in zip(("out", "lse", "dq", "dk", "dv"), found, exact, rough, strict=backward):
        assert_accurate(x, best, worse, f"{what} of {degree}, {options}", slack=score_rounding(exact[1]))


def check_dropout(size):
    """out is linear in v, so <dv, v> = <dout, out> where a backward drops what its forward did."""
    q, k, v, dout = torch.randn(4, BATCH, ROWS, HEADS, 16)
    v.requires_grad_()
    out = call(configured(ulysses_degree=size), q, k, v, dropout_p=0.5)
    (dv,) = torch.autograd.grad(out, v, dout)
    sides = torch.stack([(dv * v.detach()).sum(), (dout * out.detach()).sum()])
    dist.all_reduce(sides)
    torch.testing.assert_close(sides[0], sides[1], rtol=1e-4, atol=1e-3)
    assert not torch.allclose(out, call(configured(ulysses_degree=size), q, k, v))


def check_model(degree):
    """A whole model, which diffusers' hooks shard and put together."""
    size = dist.get_world_size()
    torch.manual_seed(5)
    model = diffusers.FluxTransformer2DModel(**FLUX)
    shapes = dict(hidden_states=(2, 6 * size, 4), encoder_hidden_states=(2, 3 * size, 32), timestep=(2,))
    shapes |= dict(pooled_projections=(2, 32), img_ids=(6 * size, 3), txt_ids=(3 * size, 3))
    inputs = {name: torch.rand(shape) for name, shape in shapes.items()}
    expected = model(**inputs, return_dict=False)[0]
    model.set_attention_backend("flashtile")
    model.enable_parallelism(config=ContextParallelConfig(**degree))
    found = model(**inputs, return_dict=False)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    if degree.get("ring_degree", 1) <= 2:
        found.sum().backward()
    dispatch._AttentionBackendRegistry.set_active_backend(dispatch.AttentionBackendName.NATIVE)


def check_refusals(size):
    """In a ring diffusers has the mask of one rank's keys, no seeds of parts, and adds up dK and dV of two ranks."""
    config = configured(ring_degree=size)
    q, mask = torch.randn(BATCH, ROWS, HEADS, 16), torch.ones(BATCH, 1, 1, ROWS, dtype=torch.bool)
    calls = {
        "attn_mask is given": lambda: call(config, q, q, q, attn_mask=mask),
        "dropout_p is given": lambda: call(config, q, q, q, dropout_p=0.5),
    }
    if size > 2:
        calls["gradients are asked for"] = call(config, q.requires_grad_(), q, q).sum().backward
    for found, function in calls.items():
        try:
            function()
        except NotImplementedError as refusal:
            assert str(refusal).startswith(f'attention backend "flashtile": {found} with ring'), refusal
            assert str(refusal).endswith("; nearest supported: ulysses_degree"), refusal
        else:
            raise AssertionError(f"{found}, and taken")


def check(rank, size, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    torch.accelerator.device_count = lambda: 1  # there is none, and diffusers counts in them
    warnings.simplefilter("ignore", FutureWarning)  # diffusers' own
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=120))
    integration.register()
    even, uneven = [ROWS] * size, [ROWS + 5 - 3 * i for i in range(size)]
    cases = []
    for degree in degrees(size):
        backward = degree.get("ring_degree", 1) <= 2
        for options in ({}, dict(scale=0.4, head_dim=20), dict(dtype=BF16)):
            cases.append((degree, even, options | dict(backward=backward)))
    heads, ring = dict(ulysses_degree=size), dict(ring_degree=size)
    cases += [(heads, even, dict(padded=True)), (heads, even, dict(padded=True, dtype=BF16))]
    cases += [(heads | dict(ulysses_anything=True), uneven, dict(backward=False))]
    cases += [(ring | dict(ring_anything=True), uneven, dict(backward=False))]
    for degree, rows, options in cases:
        check_call(degree, rows, **options)
    for degree in degrees(size):
        check_model(degree)
    check_dropout(size)
    check_refusals(size)
    dist.destroy_process_group()
    if rank == 0:
        print(f"{len(cases)} calls", flush=True)


def main():
    size = int(sys.argv[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # A forked process has what this one imported.
    torch.multiprocessing.start_processes(check, (size, port), nprocs=size, start_method="fork")


if __name__ == "__main__":
    main()
