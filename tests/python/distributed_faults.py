"""The program that test_distributed.py runs on three ranks: what is refused, on all ranks, and leaves nothing behind.

python distributed_faults.py 3 PORT
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import flashtile
from flashtile import distributed
from flashtile.compat import ring_flash_attn as ring
from flashtile.masks import ColumnMask


def refused(rank, function, message, *given, **options):
    try:
        function(*given, **options)
    except (IndexError, NotImplementedError, TypeError, ValueError) as refusal:
        assert message in str(refusal), f"rank {rank}: {refusal}"
    else:
        raise AssertionError(f"rank {rank}: nothing was refused, expected {message!r}")


def check_dtensors(whole):
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


def check_slopes_of_each_sequence():
    flat, slopes = (
        torch.randn(24, 2, 16, generator=torch.Generator().manual_seed(1)),
        torch.tensor([[0.1, 0.9], [2, 0]]),
    )
    begins = torch.tensor([0, 10, 24], dtype=torch.int32)
    tables = dict(cu_seqlens_q=begins, cu_seqlens_k=begins, alibi_slopes=slopes, causal=True)
    rows = distributed.shard(flat, 0)
    expected = flashtile.attention_varlen(flat, flat, flat, **tables)
    for method in ("ring", "all_gather"):
        out = distributed.attention_varlen(rows, rows, rows, method=method, **tables)
        torch.testing.assert_close(distributed.unshard(out, 0), expected)


def check_drop_ins(rank):
    """What a rank alone refuses before it gets to distributed.attention, also where a call like the others' went well,
    and where ranks share a seed."""
    odd, q, begins = rank == 1, torch.randn(1, 32, 2, 16), torch.tensor([0, 32], dtype=torch.int32)
    kv, flat = torch.stack((q, q), 2), q[0]

    def check(function, message, *given, wrong=None, dropout_p=0.0, **options):
        function(*given, dropout_p=dropout_p)
        given, options = wrong if odd and wrong else given, options if odd else {}
        own = "" if odd else "rank 1 refuses its arguments: "
        refused(rank, function, own, *given, dropout_p=dropout_p, **options)
        refused(rank, function, message, *given, dropout_p=dropout_p, **options)

    zigzag = ring.zigzag_ring_flash_attn_func
    for p in (0.0, 0.5):
        check(zigzag, "window_size is 3, expected two integers", q, q, q, window_size=3, dropout_p=p)
        check(zigzag, "q has 31 rows, expected an even number", q, q, q, wrong=[q[:, :31]] * 3, dropout_p=p)
        check(zigzag, "q has shape (32, 2, 16), expected (B, S_local, H, D)", q, q, q, wrong=[flat] * 3, dropout_p=p)
    packed = ring.ring_flash_attn_kvpacked_func
    check(packed, "ring_flash_attn_kvpacked_func: kv has shape (1, 32, 2, 16)", q, kv, wrong=(q, q))
    varlen = ring.ring_flash_attn_varlen_func
    wrong = (flat, flat, flat, begins.long(), 32)
    check(varlen, "cu_seqlens has dtype torch.int64", flat, flat, flat, begins, 32, wrong=wrong)
    wrong = (flat, flat, flat, begins[1:], 32)
    check(varlen, "cu_seqlens is (32,), expected 0 and numbers", flat, flat, flat, begins, 32, wrong=wrong)
    check_llama3(rank, check, flat, begins)


def check_llama3(rank, check, flat, begins):
    """Functions whose ranks have sequences of their own, and agree in the rest."""
    odd, llama3 = rank == 1, ring.llama3_flash_attn_varlen_func
    for lengths in ([96], [40, 56], [1] * 96):
        offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        *tables, keys = ring.llama3_flash_attn_prepare_cu_seqlens(offsets, True, rank, 3)
        llama3(flat, flat, flat, *tables, 1, keys, causal=True)
    tables = (begins, begins, 32, 32, 1, slice(0, 32))
    for p in (0.0, 0.5):
        check(llama3, "window_size is 3, expected two integers", *[flat] * 3, *tables, window_size=3, dropout_p=p)
        wrong = (*[flat[None]] * 3, *tables)
        check(llama3, "q has shape (1, 32, 2, 16), expected (T_local, H, D)", *[flat] * 3, *tables, wrong=wrong)
        wrong = (*[flat] * 3, begins, *tables[1:5], 3)
        check(llama3, "local_k_slice is 3, expected slice(begin, end)", *[flat] * 3, *tables, wrong=wrong, dropout_p=p)
        wrong = (*[flat] * 3, begins[:1], *tables[1:])
        check(llama3, "cu_seqlens_k has shape (2,), expected (1,)", *[flat] * 3, *tables, wrong=wrong, dropout_p=p)
    wrong = (flat, flat, flat.double(), *tables)
    check(llama3, "v has dtype torch.float64", *[flat] * 3, *tables, wrong=wrong)
    check(
        llama3, "window_size is (1, 1), expected none where causal is False", *[flat] * 3, *tables, window_size=(1, 1)
    )
    wrong = (flat, torch.stack([flat] * 2), *tables)
    packed = ring.llama3_flash_attn_varlen_kvpacked_func
    check(
        packed, "llama3_flash_attn_varlen_kvpacked_func: kv has", flat, torch.stack([flat] * 2, 1), *tables, wrong=wrong
    )
    rows, learns = flat[: 31 if odd else 32], flat.clone().requires_grad_(odd)
    refused(rank, llama3, "the number of k's rows is 31 on rank 1, expected 32", flat, rows, rows, *tables)
    refused(rank, llama3, "causal is True on rank 1, expected False", *[flat] * 3, *tables, causal=odd)
    refused(rank, llama3, "q's dtype is torch.float16 on rank 1", *[flat.half() if odd else flat] * 3, *tables)
    refused(rank, llama3, "the gradients wanted of q, k, v, sinks is [False, True", flat, learns, flat, *tables)


def check_sharding(rank, whole):
    shard, unshard, positions = distributed.shard, distributed.unshard, distributed.positions
    layout, rows = distributed.Layout.zigzag(24, 3), shard(whole, 1)
    message = "layout is of 24 rows on 3 ranks, expected 12 rows on 3 ranks"
    refused(rank, shard, "shard: " + message, whole[:, :12], 1, layout=layout)
    refused(rank, positions, "positions: " + message, 12, layout=layout)
    refused(rank, unshard, "unshard: " + message, rows[:, :4], 1, layout=layout)
    wrong = distributed.Layout.zigzag(24, 4)
    refused(rank, shard, "shard: layout is of 24 rows on 4 ranks, expected 24 rows on 3 ranks", whole, 1, layout=wrong)
    refused(rank, shard, "shard: layout is None, expected a str or a Layout", whole, 1, layout=None)
    refused(rank, shard, "dim is 4, expected a dimension of x, which has 4", whole, 4)
    refused(rank, unshard, "dim is 0, expected a dimension of x, which has 0", torch.tensor(1.0), 0)
    odd = rank == 1
    refused(rank, unshard, "x has 8 rows on rank 0, expected 7, as the layout", rows[:, : 8 - odd], 1)
    refused(
        rank, unshard, "dtype is torch.float64 on rank 1, expected torch.float32", rows.double() if odd else rows, 1
    )
    own = "dim is 7, expected" if odd else "rank 1 refuses its arguments: unshard: dim is 7"
    refused(rank, unshard, own, rows, 7 if odd else 1)
    for name in ("zigzag", "contiguous"):
        rows = shard(whole, -3, layout=name).requires_grad_()
        gathered = unshard(rows, -3, layout=name)
        assert torch.equal(gathered, whole)
        (gathered * whole).sum().backward()
        assert torch.equal(rows.grad, rows)
    few = shard(whole[:, :2], 1).requires_grad_()  # which the last rank has none of
    unshard(few, 1).sum().backward()
    assert few.grad.shape == few.shape and bool((few.grad == 1).all())


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
    for name, wrong in (("layout", ["zigzag"]), ("ulysses_degree", [1]), ("ulysses_degree", True), ("method", None)):
        own = (
            f"{name} is {wrong!r}, expected" if odd else f"rank 1 refuses its arguments: distributed.attention: {name}"
        )
        refused(rank, attention, own, q, q, q, **({name: wrong} if odd else {}))
    ranges = ColumnMask.document([12, 12]).ranges
    wide, three = torch.randn(1, 8, 4, 16), ColumnMask(ranges.expand(1, 3, -1, -1).contiguous(), 24)
    refused(rank, attention, "expected 1, H_k = 2 or H_q = 4 heads in (1 or B", wide, q, q, mask=three)
    two = ColumnMask(ranges.expand(2, 1, -1, -1).contiguous(), 24)
    refused(rank, attention, "expected 1 or B = 1 entries in (1 or B", q, q, q, mask=two)
    with flashtile.batch_invariant_mode(True if odd else None):
        own = "batch_invariant_mode is on, expected results of one call"
        refused(rank, attention, own, q, q, q)
    flat, begins = q[0], (0, 10, 24)
    tables = dict(cu_seqlens_q=begins, cu_seqlens_k=(0, 11, 24) if odd else begins)
    own = "nearest supported: sequences with as many keys as queries"
    refused(rank, varlen, own, flat, flat, flat, **tables)
    tables = dict(cu_seqlens_q=(0, 25), cu_seqlens_k=(0, 25))
    refused(rank, varlen, "cu_seqlens ends at 25, with 24 query rows", flat, flat, flat, **tables)
    tables = dict(cu_seqlens_q=5 if odd else begins, cu_seqlens_k=begins)
    own = "cu_seqlens_q is 5, expected integers" if odd else "rank 1 refuses its arguments"
    refused(rank, varlen, own, flat, flat, flat, **tables)
    tables = dict(cu_seqlens_q=begins, cu_seqlens_k=begins, alibi_slopes=torch.ones(1, 2))
    refused(rank, varlen, "alibi_slopes has shape (1, 2), expected (2, 2) = (B, H_q)", flat, flat, flat, **tables)
    check_slopes_of_each_sequence()
    refused(rank, attention, "seed is None, expected an int", q, q, q, dropout_p=0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(q.bfloat16(), q, q).dtype is torch.bfloat16
    multiple = "chunks that begin at multiples of 16"
    refused(rank, attention, multiple, q, q, q, dropout_p=0.5, seed=1, method="ring", layout="contiguous")
    # A call like one before skips what was checked then, and nothing else.
    attention(q, q, q)
    attention(q, q, q, causal=True)
    refused(
        rank,
        attention,
        "causal is 1, expected True or False" if odd else "rank 1 refuses",
        q,
        q,
        q,
        causal=1 if odd else True,
    )
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        refused(rank, attention, "q carries a forward-mode tangent", dual, q, q)
    refused(rank, attention, "q is of type int, expected a torch.Tensor", 3, q, q)
    # What was refused leaves nothing behind.
    whole = torch.randn(1, 24, 2, 16, generator=torch.Generator().manual_seed(0))
    mine = distributed.shard(whole, 1)
    out = distributed.unshard(attention(mine, mine, mine, causal=True), 1)
    torch.testing.assert_close(out, flashtile.attention(whole, whole, whole, causal=True))
    assert torch.equal(whole[0, distributed.positions(24)], mine[0])
    check_dtensors(whole)
    check_sharding(rank, whole)
    check_drop_ins(rank)
    text = distributed.explain(mine, mine, mine, causal=True)
    assert text.startswith("flashtile.distributed plan: ") and "3 ranks, forward\n" in text, text
    dist.destroy_process_group()


if __name__ == "__main__":
    size, port = map(int, sys.argv[1:])
    torch.multiprocessing.start_processes(check, (port,), nprocs=size, start_method="fork")
