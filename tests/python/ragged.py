"""Ragged batches: cases in which sequences stand one behind the other, and the formula for them."""

import dataclasses
import math

import reference
import torch
from cases import BF16, DTYPES, F16, F32, HEAD_DIMS, Case


@dataclasses.dataclass(frozen=True)
class Ragged(Case):
    """Rows that do not count, and those behind the last sequence, hold NaN."""

    batch: int = dataclasses.field(default=1, init=False)  # of the rows of all sequences together
    seqlen_q: int = dataclasses.field(default=0, init=False)
    seqlen_k: int = dataclasses.field(default=0, init=False)
    lengths_q: tuple = (65, 1, 0, 130, 17)
    lengths_k: tuple = (97, 40, 33, 130, 0)
    used_q: tuple | None = None
    used_k: tuple | None = None
    tail: int = 0  # rows behind the last sequence, of queries and of keys

    def __post_init__(self):
        for name in ("q", "k"):
            object.__setattr__(self, f"seqlen_{name}", sum(getattr(self, f"lengths_{name}")) + self.tail)

    @property
    def entries(self):
        return len(self.lengths_q)

    def tables(self, device="cpu"):
        tables = {}
        for name in ("q", "k"):
            lengths, used = getattr(self, f"lengths_{name}"), getattr(self, f"used_{name}")
            begins = torch.tensor([0, *lengths]).cumsum(0)
            tables[f"cu_seqlens_{name}"] = begins.to(device, torch.int32)
            if used is not None:
                tables[f"seqused_{name}"] = torch.tensor(used, dtype=torch.int32, device=device)
        return tables

    def spans(self):
        """[(rows of q, rows of k)] that count, for each sequence."""
        return list(zip(*used_rows(**self.tables()), strict=True))

    def unused(self, side, device="cpu"):
        """(T) bool: which rows do not count."""
        rows = torch.ones(self.seqlen_k if side else self.seqlen_q, dtype=torch.bool, device=device)
        for span in self.spans():
            rows[span[side]] = False
        return rows

    def options(self, device="cpu"):
        """The keyword arguments of flashtile.attention_varlen and of the formula."""
        return super().options(device) | self.tables(device)

    def tensors(self, device="cpu", requires_grad=False):
        rows = [x[0] for x in super().tensors(device)]
        for side, x in zip((0, 1, 1), rows, strict=True):
            x[self.unused(side, device)] = math.nan
        return [x.requires_grad_() for x in rows] if requires_grad else rows

    def incoming(self, out, lse):
        dout, dlse = super().incoming(out, lse)
        unused = self.unused(0, out.device)
        dout[unused], dlse[:, unused] = math.nan, math.nan
        return dout, dlse


def used_rows(cu_seqlens_q, cu_seqlens_k, seqused_q=None, seqused_k=None):
    """Two lists of slices: the rows of q and of k that count, for each sequence."""
    spans = []
    for begins, used in ((cu_seqlens_q.tolist(), seqused_q), (cu_seqlens_k.tolist(), seqused_k)):
        ends = begins[1:] if used is None else [b + n for b, n in zip(begins[:-1], used.tolist(), strict=True)]
        spans.append([slice(*rows) for rows in zip(begins[:-1], ends, strict=True)])
    return spans


TABLES = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")


def attention(q, k, v, *, alibi_slopes=None, sinks=None, dtype=torch.float64, **options):
    """(out, lse) of flashtile.attention_varlen, sequence by sequence."""
    tables = {name: options.pop(name) for name in TABLES if name in options}
    # Of no rows at all: every input has a gradient, even if there is no sequence.
    nothing = sum(x[:0].sum() for x in (q, k, v, sinks) if x is not None).to(dtype)
    out = nothing + torch.zeros(*q.shape[:2], v.shape[2], dtype=dtype, device=q.device)
    lse = nothing + torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=dtype, device=q.device)
    for b, (rows, keys) in enumerate(zip(*used_rows(**tables), strict=True)):
        slopes = alibi_slopes[b : b + 1] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        of_sequence = dict(options, alibi_slopes=slopes, sinks=sinks, dtype=dtype, entry=b)
        part, part_lse = reference.attention(q[None, rows], k[None, keys], v[None, keys], **of_sequence)
        out[rows], lse[:, rows] = part[0], part_lse[0]
    return out, lse


def _cases():
    """Pairwise, as in cases.py: each axis is walked while the others take turns."""
    cases = []

    def add(name, **fields):
        fields.setdefault("dtype", DTYPES[len(cases) % 3])
        cases.append(Ragged(name, **fields))

    uneven = dict(lengths_q=(130, 0, 77, 1, 200), lengths_k=(150, 20, 77, 90, 129))
    unused = dict(lengths_q=(90, 0, 70, 64), lengths_k=(120, 30, 65, 64), used_q=(70, 0, 0, 64), used_k=(97, 13, 65, 0))
    several = dict(lengths_q=(128, 1, 64, 65), lengths_k=(128, 129, 33, 80))
    for i, dim in enumerate(HEAD_DIMS):
        add(f"D{dim}", head_dim=dim, dtype=(F16, BF16)[i % 2], causal=i % 3 > 0, **(unused if i % 4 == 0 else uneven))
    for dim in (40, 64, 128, 256):
        add(f"D{dim}", head_dim=dim, dtype=F32, causal=dim == 64, **uneven)
    for i, (dim, dim_v) in enumerate(((192, 128), (64, 128), (8, 256), (136, 72), (256, 8), (96, 40))):
        add(f"D{dim}_Dv{dim_v}", head_dim=dim, head_dim_v=dim_v, dtype=(F16, BF16)[i % 2], causal=i % 2 == 0, **unused)

    for i, (name, lengths) in enumerate(
        {
            "one": dict(lengths_q=(150,), lengths_k=(190,)),
            "short": dict(lengths_q=tuple(range(1, 33)), lengths_k=tuple(range(32, 0, -1))),
            "single_rows": dict(lengths_q=(1,) * 40, lengths_k=tuple(range(40))),
            "whole_tiles": dict(lengths_q=(128, 256, 64), lengths_k=(128, 256, 64)),
            "no_sequences": dict(lengths_q=(), lengths_k=()),
            "no_sequences_tail": dict(lengths_q=(), lengths_k=(), tail=70),
            "no_tokens": dict(lengths_q=(0, 0, 0), lengths_k=(0, 0, 0)),
            "no_queries": dict(lengths_q=(0, 0), lengths_k=(5, 90)),
            "no_keys": dict(lengths_q=(5, 90), lengths_k=(0, 0)),
            "tail": dict(tail=200),
            "unused": dict(tail=5, **unused),
            "unused_keys": dict(lengths_q=(80, 9), lengths_k=(200, 300), used_k=(40, 299)),
            "nothing_used": dict(lengths_q=(80, 9), lengths_k=(200, 30), used_q=(0, 0), used_k=(0, 0)),
        }.items()
    ):
        add(name, dtype=(F16, BF16)[i % 2], causal=i % 3 == 0, sinks=0.0 if i % 4 > 1 else None, **lengths)
        if i % 2 == 1:
            add(f"{name}_options", window=(40, 9), dropout_p=0.2, alibi="per batch and head", **lengths)
    add("skewed", dtype=BF16, heads_q=1, causal=True, lengths_q=(20,) * 30 + (3000,), lengths_k=(20,) * 30 + (3000,))
    add("skewed_first", dtype=F16, heads_q=1, lengths_q=(1500, *(20,) * 30), lengths_k=(1500, *(9,) * 30))

    for i, (heads_q, heads_k) in enumerate(((4, 4), (8, 2), (6, 1), (16, 1), (32, 2), (0, 1), (14, 2), (15, 1))):
        heads = dict(heads_q=heads_q, heads_k=heads_k, dtype=(F16, BF16)[i % 2])
        add(f"H{heads_q}over{heads_k}", causal=True, **heads, **(several if i % 2 else unused))
    for i, dim in enumerate((64, 96, 128, 192, 256)):  # on a GPU, several thread blocks share a block of keys
        few = dict(head_dim=dim, heads_q=16, heads_k=1, dtype=(F16, BF16)[i % 2])
        add(f"few_blocks_D{dim}", lengths_q=(300, 0, 150), lengths_k=(13, 70, 160), tail=9 * (i % 2), **few)
        add(f"few_blocks_causal_D{dim}", causal=True, sinks=0.0, **few, **unused)
    for i, window in enumerate([(0, 0), (16, 3), (None, 5), (100, None), (3, 40)]):
        add(f"window{window[0]}_{window[1]}", window=window, causal=i == 3, **(unused if i % 2 else uneven))

    heads = dict(heads_q=4, heads_k=2)
    everything = dict(window=(50, 7), softcap=10.0, scale=0.3, head_dim=72, head_dim_v=40, layout="gaps", **heads)
    for dtype in (F32, F16, BF16):
        lengths = (unused, uneven, several)[len(cases) % 3]
        add("softcap", softcap=5.0, magnitude=4.0, causal=dtype is F16, dtype=dtype, **lengths)
        add("alibi", alibi="per head", causal=dtype is BF16, dtype=dtype, **heads, **lengths)
        add("alibi_of_sequences", alibi="per batch and head", dtype=dtype, **heads, **lengths)
        add("sinks", sinks=0.0, causal=dtype is F32, dtype=dtype, **heads, **lengths)
        add("dropout", dropout_p=0.3, causal=dtype is F16, dtype=dtype, **heads, **lengths)
        add("everything", alibi="per head", sinks=0.0, dropout_p=0.2, dtype=dtype, **everything, **lengths)
    for layout in ("heads first", "gaps", "misaligned", "packed"):
        add(layout.replace(" ", "_"), layout=layout, causal=True, head_dim=72, **heads, **unused)
    return cases


CASES = _cases()
