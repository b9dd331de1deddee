"""The program that test_distributed.py runs: ranks of a process group, each of which compares its rows of a sequence
with the oracle's, for all cases. It prints what is wrong, and ends with 1 if anything is.

    python distributed_ranks.py SIZE DEVICE BACKEND [what the name of a case must contain]
"""

import dataclasses
import datetime
import os
import socket
import sys
import traceback

import reference
import torch
import torch.distributed as dist
import torch.multiprocessing
from compare import assert_accurate, difference_rounding, score_rounding, sink_rounding

from flashtile import distributed
from flashtile.distributed import Layout
from flashtile.masks import ColumnMask

METHODS = ("ring", "all_gather", "ulysses", "ulysses_ring")
LENGTHS = (3, 0, 27, 11, 9)  # of documents; three rows of 53 belong to none


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    options: dict = dataclasses.field(default_factory=dict)
    ragged: bool = False
    mask: str = ""
    sinks: bool = False
    alibi: bool = False
    lse: bool = True  # whether it is asked for
    dtype: torch.dtype = torch.float32
    heads_q: int = 4
    heads_k: int = 2
    head_dim: int = 16
    head_dim_v: int = 16
    batch: int = 2
    rows: int = 53
    keys: int = 0  # 0: as many as rows
    layouts: tuple = ("zigzag", "contiguous", "balanced")
    methods: tuple = METHODS


CAUSAL = dict(causal=True)
DROPPED = dict(dropout_p=0.3, seed=3)
CHUNKS = ("zigzag", "contiguous")  # of rows that are a multiple of 16, where there are 64 for each rank
CASES = [
    Case("causal", CAUSAL, head_dim_v=24),
    Case("causal without lse", CAUSAL, lse=False),
    Case("full"),
    Case("window", dict(causal=True, window=(9, None))),
    Case("both sides", dict(window=(5, 3))),
    Case("window of one entry", dict(causal=True, window=(9, None)), batch=1),
    Case("both sides of one entry", dict(window=(5, 3)), batch=1, heads_q=6, dtype=torch.bfloat16),
    Case("alibi and window of one entry", dict(window=(9, 4)), batch=1, alibi=True),
    Case("mask and window of one entry", dict(causal=True, window=(15, None)), batch=1, mask="heads"),
    Case("softcap", dict(causal=True, softcap=3.0, scale=0.5)),
    Case("huge scores", dict(causal=True, scale=300.0)),
    Case("sinks", CAUSAL, sinks=True),
    Case("alibi", CAUSAL, alibi=True),
    Case("alibi full", alibi=True),
    Case("bfloat16", CAUSAL, dtype=torch.bfloat16, heads_k=4),
    Case("deterministic", dict(causal=True, deterministic=True), dtype=torch.float16),
    Case("cross", dict(causal=True), rows=53, keys=77, layouts=CHUNKS),
    Case("few rows", CAUSAL, rows=5),
    Case("one KV head", CAUSAL, heads_q=4, heads_k=1),
    Case("heads that ranks cannot divide", CAUSAL, heads_q=9, heads_k=3, layouts=("zigzag",)),
    Case("mask", mask="causal"),
    Case("mask and band", CAUSAL, mask="full", heads_k=1),
    Case("mask of each head", mask="heads"),
    Case("ragged", CAUSAL, ragged=True, heads_q=6),
    Case("ragged full", ragged=True),
    Case("ragged window", dict(causal=True, window=(9, None)), ragged=True),
    Case("ragged alibi", CAUSAL, ragged=True, alibi=True),
    Case("ragged mask", CAUSAL, ragged=True, mask="ragged"),
    Case("ragged sinks", CAUSAL, ragged=True, sinks=True, dtype=torch.bfloat16),
    Case("ragged sinks without lse", CAUSAL, ragged=True, sinks=True, lse=False),
    Case("ragged dropout", dict(causal=True, **DROPPED), ragged=True, methods=("ulysses",)),
    Case("dropout", dict(causal=True, **DROPPED), rows=-64, layouts=CHUNKS),
    Case("dropout full", DROPPED, rows=-64, layouts=CHUNKS),
    Case("dropout window", dict(causal=True, window=(70, None), **DROPPED), rows=-64, layouts=CHUNKS),
]


class Checked:
    """One case on all of its layouts and methods, on one rank."""

    def __init__(self, case, size, device):
        self.case, self.size, self.device = case, size, device
        self.rows = case.rows if case.rows > 0 else -case.rows * size
        self.keys = case.keys or self.rows
        generator = torch.Generator().manual_seed(7)

        def normal(*shape):
            return torch.randn(*shape, generator=generator).to(case.dtype).to(device)

        batch = 1 if case.ragged else case.batch
        self.q = normal(batch, self.rows, case.heads_q, case.head_dim)
        self.k = normal(batch, self.keys, case.heads_k, case.head_dim)
        self.v = normal(batch, self.keys, case.heads_k, case.head_dim_v)
        self.dout = normal(batch, self.rows, case.heads_q, case.head_dim_v)
        self.dlse = normal(batch, case.heads_q, self.rows).float() * case.lse
        self.options = dict(case.options)
        if case.alibi:
            shape = (batch, case.heads_q) if batch == 1 and not case.ragged else (case.heads_q,)
            self.options["alibi_slopes"] = torch.rand(shape, generator=generator).to(device)
        self.sinks = torch.randn(case.heads_q, generator=generator).to(device) if case.sinks else None
        self.begins = torch.tensor([0, *LENGTHS]).cumsum(0).int().to(device)
        self.mask = self._mask()
        self.exact = self._formula(torch.float64)
        self.rough = self._formula(case.dtype)

    def _mask(self):
        if not self.case.mask:
            return None
        if self.case.mask == "ragged":
            kinds = [ColumnMask.causal_document([n // 2, n - n // 2]) for n in LENGTHS]
            mask = ColumnMask.concatenate(kinds)
            ranges = torch.nn.functional.pad(mask.ranges, (0, 0, 0, self.keys - sum(LENGTHS)))
            return ColumnMask(ranges, None, mask.cu_seqlens).to(self.device)
        if self.case.mask == "heads":
            kinds = [ColumnMask.causal_document([n, self.rows - n]) for n in (5, 20, 31, 53)]
            return ColumnMask(torch.cat([x.ranges for x in kinds], 1), self.rows).to(self.device)
        make = ColumnMask.causal_document if self.case.mask == "causal" else ColumnMask.document
        return make([20, 13, 20]).to(self.device)

    def _formula(self, dtype):
        """[out, lse, dq, dk, dv, dsinks] of the whole."""
        leaves = [x.to(dtype).requires_grad_() for x in (self.q, self.k, self.v)]
        options = {name: x for name, x in self.options.items() if name != "deterministic"}
        if self.sinks is not None:
            leaves.append(self.sinks.to(dtype).requires_grad_())
            options["sinks"] = leaves[3]
        if not self.case.ragged:
            mask = None if self.mask is None else self.mask.to_dense(self.case.batch)
            out, lse = reference.attention(*leaves[:3], mask=mask, dtype=dtype, **options)
        else:
            parts, ends = [], [0]
            for entry, (begin, end) in enumerate(zip(self.begins[:-1].tolist(), self.begins[1:].tolist(), strict=True)):
                rows = [x[:, begin:end] for x in leaves[:3]]
                mask = None if self.mask is None else self.mask.split()[entry].to_dense(1)
                parts.append(reference.attention(*rows, mask=mask, dtype=dtype, entry=entry, **options))
                ends.append(end)
            out = torch.cat([x for x, _ in parts], 1)
            lse = torch.cat([x for _, x in parts], 2)
            tail = self.rows - ends[-1]
            out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, tail))
            lse = torch.nn.functional.pad(lse, (0, tail), value=-torch.inf)
        return [out.detach(), lse.detach(), *self._gradients(out, lse, leaves)]

    def _gradients(self, out, lse, leaves):
        """Of a loss of both, leaving out rows that saw nothing. `out` and `lse` are of the rows of self.dout."""
        seen = lse > -torch.inf
        loss = (out * self.dout[:, : out.shape[1]].to(out.dtype)).sum()
        loss = loss + (torch.where(seen, lse, 0) * self.dlse.to(lse.dtype)).sum()
        return torch.autograd.grad(loss, leaves)

    def run(self, layout, method):
        """What is wrong with the caller's rows."""
        layout = self._balanced() if layout == "balanced" else layout
        leaves = [
            distributed.shard(x, 1, layout=layout).contiguous().requires_grad_() for x in (self.q, self.k, self.v)
        ]
        options = dict(self.options, layout=layout, method=method, mask=self.mask, return_lse=self.case.lse)
        if method == "ulysses_ring":
            options["ulysses_degree"] = 2
        if self.sinks is not None:
            leaves.append(self.sinks.clone().requires_grad_())
            options["sinks"] = leaves[3]
        tensors, attention = leaves[:3], distributed.attention
        if self.case.ragged:
            tensors, attention = [x[0] for x in tensors], distributed.attention_varlen
            options |= dict(cu_seqlens_q=self.begins, cu_seqlens_k=self.begins)
        found = attention(*tensors, **options)
        found = [x[None] if self.case.ragged else x for x in (found if self.case.lse else [found])]
        if not self.case.lse:  # then it is right, and adds nothing to the loss
            found.append(distributed.shard(self.exact[1], 2, layout=layout))
        out, lse = found
        seen = lse > -torch.inf
        dout, dlse = distributed.shard(self.dout, 1, layout=layout), distributed.shard(self.dlse, 2, layout=layout)
        loss = (out.float() * dout.float()).sum() + (torch.where(seen, lse, 0) * dlse).sum()
        found = [out, lse, *torch.autograd.grad(loss, leaves)]
        if self.sinks is not None:
            dist.all_reduce(found[5])  # a parameter that ranks share
        self._compare(found, layout)

    def _compare(self, found, layout):
        scale, p = self.options.get("scale"), self.options.get("dropout_p", 0.0)
        lse = self.exact[1]
        of_difference = difference_rounding(self.q, self.k, self.v, self.dout, scale, p, self.exact[0].to(self.q.dtype))
        slack = {
            "out": score_rounding(lse, self.v),
            "lse": score_rounding(lse),
            "dq": of_difference[0] + score_rounding(lse, self.exact[2]),
            "dk": of_difference[1] + score_rounding(lse, self.exact[3]),
            "dv": score_rounding(lse, self.exact[4]),
        }
        if self.sinks is not None:
            out, dout = self.exact[0].to(self.q.dtype), self.dout
            slack["dsinks"] = sink_rounding(out, lse.float(), dout, self.sinks, self.keys)
        for i, (what, x) in enumerate(zip(slack, found, strict=False)):
            exact, rough = (
                of[i] if what == "dsinks" else distributed.shard(of[i], 2 if what == "lse" else 1, layout=layout)
                for of in (self.exact, self.rough)
            )
            assert_accurate(x.detach(), exact, rough, what, slack[what])

    def _balanced(self):
        return Layout.balanced([i % 11 + 1 for i in range(self.rows)], self.size)


def check(rank, size, device, backend, port, wanted):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=120))
    wrong = count = 0
    for case in CASES:
        if wanted not in case.name or (device == "cuda" and case.dtype is torch.float32 and not _narrow(case)):
            continue
        if device == "cuda":
            case = _narrow(case)
        checked = Checked(case, size, device)
        for layout in case.layouts:
            for method in case.methods:
                if (method == "ulysses_ring" and size % 2) or ("ulysses" in method and case.heads_q < size):
                    continue
                count += 1
                try:
                    checked.run(layout, method)
                except AssertionError as failure:
                    wrong += 1
                    print(f"rank {rank} of {size}, {case.name}, {layout}, {method}: {failure}", flush=True)
    if device == "cuda" and not on_two_streams(size):
        wrong += 1
        print(f"rank {rank} of {size}: results of one stream were not those of two", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print(f"{count} calls", flush=True)
    if wrong or not count:
        sys.exit(1)


def on_two_streams(size):
    """Whether calls on two streams in turn, whose messages share memory, have the results of calls one by one."""
    tensors = [torch.randn(3, 1, 2048 // size * size, 8, 64, device="cuda", dtype=torch.float16) for _ in range(8)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for method in ("ring", "all_gather"):
        expected = [distributed.attention(*x, method=method) for x in tensors]
        torch.cuda.synchronize()
        found = []
        for i, x in enumerate(tensors):
            with torch.cuda.stream(streams[i % 2]):
                found.append(distributed.attention(*x, method=method))
        torch.cuda.synchronize()
        if not all(map(torch.equal, found, expected)):
            return False
    return True


def _narrow(case):
    """The case for a GPU, which has no kernels for float32."""
    return dataclasses.replace(case, dtype=torch.float16) if case.dtype is torch.float32 else case


def main():
    size, device, backend, *rest = sys.argv[1:]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = int(size), device, backend, port, rest[0] if rest else ""
    # A forked process has what this one imported; CUDA wants a fresh one.
    method = "fork" if device == "cpu" else "spawn"
    try:
        torch.multiprocessing.start_processes(check, given, nprocs=int(size), start_method=method)
    except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException):
        traceback.print_exc()
        sys.exit(1)


if __name__ == "__main__":
    main()
