"""The program that test_compat_ring.py runs: ranks of a process group, each of which compares what the functions of
flashtile.compat.ring_flash_attn say of its rows with the oracle's. It prints what is wrong, and ends with 1 if anything
is.

    python ring_flash_attn_ranks.py SIZE DEVICE BACKEND
"""

import dataclasses
import datetime
import itertools
import os
import socket
import sys
import traceback

import ragged
import reference
import torch
import torch.distributed as dist
import torch.multiprocessing
from cases import BF16, F16, F32
from compare import assert_accurate, assert_bitwise, difference_rounding, score_rounding
from theirs import in_their_terms, packed
from torch.utils.checkpoint import checkpoint

from flashtile.compat import ring_flash_attn as ring

RING, ZIGZAG, LLAMA3 = "ring_flash_attn", "zigzag_ring_flash_attn", "llama3_flash_attn"
PACKS = {
    "_func": lambda q, k, v: (q, k, v),
    "_kvpacked_func": lambda q, k, v: (q, packed(k, v)),
    "_qkvpacked_func": lambda q, k, v: (packed(q, k, v),),
}


@dataclasses.dataclass(frozen=True)
class Case:
    function: str
    options: dict = dataclasses.field(default_factory=dict)
    pack: str = "_func"
    alibi: bool = False
    dtype: torch.dtype = F32
    heads_q: int = 4
    heads_k: int = 2
    head_dim: int = 16
    head_dim_v: int = 16
    rows: int = 14  # of a rank
    lengths: tuple = ()  # a rank's of each sequence; of llama3 those of all ranks, in parts of 1/60 of all rows
    tail: int = 0  # rows of a rank behind the last sequence

    def __str__(self):
        return f"{self.function}{self.pack}, {self.options or ('alibi' if self.alibi else 'full')}"


CAUSAL, WINDOW = dict(causal=True), dict(causal=True, window=(9, None))
DROPPED = dict(causal=True, dropout_p=0.3)
MHA = dict(heads_q=3, heads_k=3)
LENGTHS = dict(lengths=(6, 0, 2, 10, 4), rows=25, tail=3)
PARTS = dict(lengths=(7, 0, 33, 1, 19), rows=30)
CASES = [
    case
    for function, sizes, aligned in (
        (RING, {}, dict(rows=32)),
        (ZIGZAG, {}, dict(rows=32)),
        (f"{RING}_varlen", LENGTHS, dict(lengths=(16, 0, 48), rows=64)),
        (f"{ZIGZAG}_varlen", LENGTHS, dict(lengths=(32, 0, 64), rows=96)),
        (f"{LLAMA3}_varlen", PARTS, PARTS),
    )
    for case in (
        Case(function, CAUSAL, **sizes, head_dim=20, head_dim_v=13),
        Case(function, **sizes),
        Case(function, WINDOW | dict(scale=0.4), **sizes, dtype=BF16),
        Case(function, CAUSAL, **sizes, alibi=True),
        Case(function, dict(causal=True, deterministic=True), "_kvpacked_func", **sizes, dtype=F16),
        Case(function, CAUSAL, "_qkvpacked_func", **sizes, **MHA),
        Case(function, DROPPED, **aligned),
        Case(function, DROPPED, "_qkvpacked_func", **sizes, **MHA),
    )
] + [
    Case(RING, dict(window=(5, 3)), alibi=True),
    Case(ZIGZAG, dict(window=(5, 3))),
    Case(f"{ZIGZAG}_varlen", dict(window=(5, 3)), **LENGTHS),
    Case(f"{LLAMA3}_varlen", CAUSAL, lengths=(60,), rows=8),
    Case(f"{LLAMA3}_varlen", CAUSAL, lengths=(1,) * 60, rows=60),
    Case(f"{LLAMA3}_varlen", CAUSAL, lengths=(0, 20, 0, 10, 30, 0), rows=30),
]


class Checked:
    """One case, on one of `size` ranks."""

    def __init__(self, case, rank, size, group, device):
        if device != "cpu" and case.dtype is F32:  # which is not served there
            case = dataclasses.replace(case, dtype=F16)
        self.case, self.rank, self.size, self.group, self.device = case, rank, size, group, device
        self.is_ragged, self.is_gathered = bool(case.lengths), case.function.startswith(LLAMA3)
        self.rows = case.rows * size
        generator = torch.Generator().manual_seed(7)

        def normal(*shape):
            return torch.randn(*shape, generator=generator).to(case.dtype)

        leading = (self.rows,) if self.is_ragged else (2, self.rows)
        self.tensors = [
            normal(*leading, *heads)
            for heads in (
                (case.heads_q, case.head_dim),
                (case.heads_k, case.head_dim),
                (case.heads_k, case.head_dim_v),
            )
        ]
        self.dout = normal(*leading, case.heads_q, case.head_dim_v)
        self.dlse = normal(*leading, case.heads_q).transpose(-1, -2).float()
        self.slopes = torch.rand(case.heads_q, generator=generator) if case.alibi else None
        if self.is_gathered:
            self.lengths = [n * self.rows // 60 for n in case.lengths]
            self.lengths[-1] += self.rows - sum(self.lengths)
        else:
            self.lengths = [n * size for n in case.lengths]
        self.begins = torch.tensor([0, *self.lengths]).cumsum(0).int()
        self.seeds = [_seed(5 + rank) for rank in range(size)]
        self.exact, self.rough = self._formula(torch.float64), self._formula(case.dtype)

    def places(self):
        """Where the caller's rows lie in the whole."""
        if not self.is_ragged:
            return self._of_sequence(0, self.rows)
        if self.is_gathered:
            return torch.arange(self.rows).chunk(self.size)[self.rank]
        ends = [*self.begins.tolist(), self.rows]
        parts = [self._of_sequence(begin, end) for begin, end in itertools.pairwise(ends[:-1])]
        tail = torch.arange(ends[-2], ends[-1])
        return torch.cat([*parts, tail[len(tail) // self.size * self.rank :][: self.case.tail]])

    def _of_sequence(self, begin, end):
        zigzag = self.case.function.startswith(ZIGZAG)
        chunks = torch.arange(begin, end).view(self.size * (2 if zigzag else 1), -1) if end > begin else None
        if chunks is None:
            return torch.arange(0)
        return torch.cat([chunks[self.rank], chunks[-1 - self.rank]]) if zigzag else chunks[self.rank]

    def _formula(self, dtype):
        """[out, lse, dq, dk, dv] of the whole."""
        leaves = [x.to(dtype).requires_grad_() for x in self.tensors]
        options = {name: x for name, x in self.case.options.items() if name != "deterministic"}
        options |= dict(dtype=dtype, alibi_slopes=self.slopes)
        dropped = "dropout_p" in options
        if dropped and self.is_gathered and self.size > 1:  # where each rank has its own seed
            out, lse = self._rank_by_rank(leaves, options)
        elif self.is_ragged:
            options |= dict(seed=self.seeds[0]) if dropped else {}
            out, lse = ragged.attention(*leaves, cu_seqlens_q=self.begins, cu_seqlens_k=self.begins, **options)
        else:
            options |= dict(seed=self.seeds[0]) if dropped else {}
            out, lse = reference.attention(*leaves, **options)
        seen = lse > -torch.inf
        loss = (out * self.dout.to(dtype)).sum() + (torch.where(seen, lse, 0) * self.dlse.to(dtype)).sum()
        return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]

    def _rank_by_rank(self, leaves, options):
        q, k, v = leaves
        outs, lses = [], []
        for rank, rows in enumerate(q.chunk(self.size)):
            tables = ring.llama3_flash_attn_prepare_cu_seqlens(self.begins, options["causal"], rank, self.size)
            cu_seqlens = dict(cu_seqlens_q=tables[0], cu_seqlens_k=tables[1])
            seed = self.seeds[rank] + rank
            out, lse = ragged.attention(rows, k[tables[4]], v[tables[4]], **cu_seqlens, seed=seed, **options)
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses, 1)

    def call(self, leaves, **more):
        """What the function returns for the caller's rows of the whole."""
        case, tables = self.case, ()
        function = getattr(ring, case.function + case.pack)
        if self.is_gathered:
            causal = case.options.get("causal", False)
            begins = self.begins.to(self.device)
            *tables, rows = ring.llama3_flash_attn_prepare_cu_seqlens(begins, causal, self.rank, self.size)
            tables = (*tables, 1, rows)
        elif self.is_ragged:
            tables = (self.begins.to(self.device) // self.size, 10)
        slopes = None if self.slopes is None else self.slopes.to(self.device)
        options = in_their_terms(case.options) | dict(alibi_slopes=slopes, group=self.group) | more
        torch.manual_seed(5 + self.rank)
        return function(*PACKS[case.pack](*leaves), *tables, **options)

    def run(self):
        """What is wrong with the caller's rows. Ranks that find something must not keep the others waiting, so all
        calls come first."""
        case, mine = self.case, self.places()
        leaves = [x.index_select(-3, mine).to(self.device).requires_grad_() for x in self.tensors]
        dout, dlse = self.dout.index_select(-3, mine).to(self.device), self.dlse.index_select(-1, mine).to(self.device)
        out, lse, nothing = self.call(leaves, return_attn_probs=True)
        seen = lse > -torch.inf
        loss = (out.float() * dout.float()).sum() + (torch.where(seen, lse, 0) * dlse).sum()
        found = [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]
        with torch.no_grad():
            alone = self.call(leaves)
        once = torch.autograd.grad(self.call(leaves), leaves, dout)
        again = torch.autograd.grad(checkpoint(self.call, leaves, use_reentrant=False), leaves, dout)
        assert nothing is None and lse.dtype is F32 and out.dtype is case.dtype
        q, k, v = self.tensors
        scale, p = case.options.get("scale"), case.options.get("dropout_p", 0.0)
        of_difference = difference_rounding(q, k, v, self.dout, scale, p, self.exact[0].to(case.dtype))
        more = dict(dq=of_difference[0], dk=of_difference[1])
        for i, what in enumerate(("out", "lse", "dq", "dk", "dv")):
            exact, rough = (x[i].index_select(-1 if what == "lse" else -3, mine) for x in (self.exact, self.rough))
            slack = score_rounding(self.exact[1], None if what == "lse" else self.exact[i]) + more.get(what, 0)
            assert_accurate(found[i].cpu(), exact, rough, what, slack)
            if what == "out":  # which may go another way where there is no backward
                assert_accurate(alone.cpu(), exact, rough, "out alone", slack)
        for what, x, expected in zip(("dq", "dk", "dv"), again, once, strict=True):
            assert_bitwise(x, expected, f"{what} of a checkpoint")


def _seed(state):
    torch.manual_seed(state)
    return int(torch.randint(2**63 - 1, ()))


def check_refusals(rank, size, device):
    """Each is made on all ranks, and leaves nothing behind."""
    dtype = F32 if device == "cpu" else F16
    x, odd = (torch.randn(1, rows, 1, 16, device=device, dtype=dtype) for rows in (8, 7))
    begins = torch.tensor([0, 2, 7], dtype=torch.int32, device=device)
    rows = [x[0]] * 3
    own = (begins[:2], begins[:2], 2, 2, 1)
    for error, message, function, *given, options in (
        (ValueError, "q has 7 rows, expected an even number", f"{ZIGZAG}_func", odd, odd, odd, {}),
        (ValueError, r"cu_seqlens is (0, 2, 7), expected even", f"{ZIGZAG}_varlen_func", *rows, begins, 5, {}),
        (ValueError, "cu_seqlens is (2, 7), expected 0 and", f"{RING}_varlen_func", *rows, begins[1:], 5, {}),
        (ValueError, "up to the 4 rows of q", f"{RING}_varlen_func", *[x[0, :4]] * 3, begins, 5, {}),
        (TypeError, "local_k_slice is 3, expected slice", f"{LLAMA3}_varlen_func", *rows, *own, 3, {}),
        (
            NotImplementedError,
            "window_size is (4, 4), expected none where causal is False; nearest supported: causal=True",
            *(f"{LLAMA3}_varlen_func", *rows, *own, slice(0, 8), dict(window_size=(4, 4))),
        ),
        (NotImplementedError, "chunks that begin at", f"{RING}_func", x, x, x, dict(dropout_p=0.5)),
        (
            TypeError,
            "v has dtype bfloat16, expected float",
            *(f"{LLAMA3}_varlen_func", *rows[:2], rows[2].bfloat16(), *own, slice(0, 8), {}),
        ),
        (
            NotImplementedError,
            "alibi_slopes requires grad",
            *(f"{LLAMA3}_varlen_func", *rows, *own, slice(0, 8)),
            dict(causal=True, alibi_slopes=torch.ones(1, device=device, requires_grad=True)),
        ),
    ):
        try:
            getattr(ring, function)(*given, **options)
        except error as refusal:
            assert message in str(refusal), f"rank {rank}: {refusal}"
        else:
            raise AssertionError(f"rank {rank}: nothing was refused, expected {message!r}")


def check(rank, size, port, device, backend):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=120))
    parts = [(None, range(size))]
    if size == 3:  # another group, whose ranks have other numbers among all
        parts.append((dist.new_group([1, 2]), (1, 2)))
    wrong = count = 0
    for group, ranks in parts:
        if rank not in ranks:
            continue
        for case in CASES if group is None else CASES[::5]:
            count += 1
            try:
                Checked(case, ranks.index(rank), len(ranks), group, device).run()
            except AssertionError as failure:
                wrong += 1
                print(f"rank {rank} of {size}, {case}: {failure}", flush=True)
    dist.barrier()
    if size > 1:
        check_refusals(rank, size, device)
    dist.destroy_process_group()
    if rank == size - 1:
        print(f"{count} calls", flush=True)
    if wrong or not count:
        sys.exit(1)


def main():
    size, device, backend = int(sys.argv[1]), *sys.argv[2:]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        # A forked process has what this one imported.
        torch.multiprocessing.start_processes(check, (size, port, device, backend), nprocs=size, start_method="fork")
    except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException):
        traceback.print_exc()
        sys.exit(1)


if __name__ == "__main__":
    main()
