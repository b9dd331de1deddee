"""The program that test_distributed.py runs on two ranks: what calls remember of a group ends with it, has a bound, and
is not relied on where lengths change.

    python distributed_groups.py 2
"""

import sys
import tempfile
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

import flashtile
from flashtile import distributed
from flashtile.distributed import _agree
from flashtile.distributed._exchange import Group


def results(x, group):
    out = distributed.attention(x, x, x, causal=True, group=group)
    begins = (0, 5, 2 * x.shape[1])
    flat = distributed.attention_varlen(*[x[0]] * 3, cu_seqlens_q=begins, cu_seqlens_k=begins, group=group)
    return torch.cat([out[0], flat])


def check_lengths_that_change():
    """To and from those that ranks cannot divide, where some ranks have as many rows as before."""
    for layout in ("zigzag", "contiguous"):
        for length in (12, 10, 12, 11, 9, 10, 1, 0, 12, 13):
            whole = torch.randn(1, length, 2, 16, generator=torch.Generator().manual_seed(length))
            rows = distributed.shard(whole, 1, layout=layout)
            out = distributed.attention(rows, rows, rows, causal=True, layout=layout)
            expected = flashtile.attention(whole, whole, whole, causal=True)
            torch.testing.assert_close(distributed.unshard(out, 1, layout=layout), expected)
            tables = dict(cu_seqlens_q=(0, length // 2), cu_seqlens_k=(0, length // 2))
            out = distributed.attention_varlen(*[rows[0]] * 3, layout=layout, **tables)
            expected = flashtile.attention(*[whole[:, : length // 2]] * 3)[0]
            torch.testing.assert_close(distributed.unshard(out, 0, layout=layout)[: length // 2], expected)


def check_that_second_derivatives_are_refused():
    """Also where the incoming gradient is a constant."""
    x = torch.randn(1, 8, 2, 16)
    for method in ("ring", "all_gather", "ulysses"):
        q = x.clone().requires_grad_()
        (expected,) = torch.autograd.grad(distributed.attention(q, x, x, method=method).sum(), q)
        out = distributed.attention(q, x, x, method=method)
        (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        assert torch.equal(gradient, expected)
        with pytest.raises(NotImplementedError, match="second derivatives"):
            torch.autograd.grad(out.sum() + gradient.square().sum(), q)
    rows = torch.full((2,), 3.0, requires_grad=True)
    whole = distributed.unshard(rows, 0)
    (gradient,) = torch.autograd.grad((whole**3).sum(), rows, create_graph=True)
    assert gradient.tolist() == [27.0, 27.0]
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(gradient.sum() + rows.sum(), rows)
    whole.add_(1)  # which is nobody's view


def check_groups_of_two_backends(folder, rank):
    """As init_process_group() makes where no backend is named: gloo carries what is on CPUs."""
    dist.init_process_group(store=dist.FileStore(f"{folder}/unnamed", 2), rank=rank, world_size=2)
    check_lengths_that_change()
    dist.destroy_process_group()


def check_bounds():
    _agree._MOST, known = 8, Group().known
    x = torch.randn(1, 4, 1, 8)
    for i in range(40):
        distributed.attention(x, x, x, scale=1.0 + i)
        assert len(known.agreed) <= 8 or i < 8


def check_tensors_that_are_negated_lazily():
    x = torch.randn(1, 8, 2, 16)
    lazily = torch._neg_view(-x)
    for method in ("ring", "all_gather", "ulysses"):
        found = distributed.attention(lazily, lazily, lazily, method=method)
        assert torch.equal(found, distributed.attention(x, x, x, method=method))


def check_groups_of_others(rank):
    group = dist.new_group([0])
    x = torch.randn(1, 8, 2, 16)
    if rank == 0:
        assert torch.equal(distributed.attention(x, x, x, group=group), flashtile.attention(x, x, x))
        return
    for function, given in ((distributed.attention, (x, x, x)), (distributed.shard, (x, 1))):
        with pytest.raises(TypeError, match="group is 'x', expected a process group or None"):
            function(*given, group="x")
        with pytest.raises(ValueError, match="group is one without the caller"):
            function(*given, group=group)


def check(rank, folder):
    torch.set_num_threads(1)
    x = torch.randn(1, 8, 2, 16, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    found = []
    for turn in ("first", "second"):  # as if there had been no first
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/{turn}", 2), rank=rank, world_size=2)
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
        with pytest.raises(RuntimeError, match=r"flashtile\.distributed: the process group .* has been destroyed"):
            out.sum().backward()
        check_lengths_that_change()
        check_tensors_that_are_negated_lazily()
        check_groups_of_others(rank)
        check_that_second_derivatives_are_refused()
        check_bounds()
        dist.destroy_process_group()
        assert groups[1]() is None
    check_groups_of_two_backends(folder, rank)
    for a, b in zip(found[:4], found[4:], strict=True):
        assert torch.equal(a, b)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(check, (folder,), nprocs=int(sys.argv[1]), start_method="fork")
