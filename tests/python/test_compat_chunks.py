"""FlashAttention-3's attention_chunk, and its ragged batches that are dense on a side: results and gradients against
float64, and the parts that chunks are made of."""

import dataclasses
import functools

import pytest
import torch
from cases import BF16, F16, F32, on_devices
from compare import assert_accurate, assert_bitwise, difference_rounding, score_rounding
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import Ragged, used_rows
from theirs import SMALL, assert_refuses, attend_seen, fa3, in_their_terms, packed, seen_in_chunks

import flashtile
from flashtile.compat._chunks import parts_of


@dataclasses.dataclass(frozen=True)
class Chunked(Ragged):
    chunk: int = 0
    dense_q: bool = False  # all lengths are the same then
    dense_k: bool = False

    def call(self, q, k, v, tables, **options):
        """(out, lse), both ragged."""
        lengths = [(len(x), max(x, default=0)) for x in (self.lengths_q, self.lengths_k)]
        if self.dense_q:
            q, tables["cu_seqlens_q"] = q.unflatten(0, lengths[0]), None
        if self.dense_k:
            k, v, tables["cu_seqlens_k"] = k.unflatten(0, lengths[1]), v.unflatten(0, lengths[1]), None
        chunk = dict(attention_chunk=self.chunk, return_attn_probs=True)
        if self.dense_q and self.dense_k and not self.used_q and not self.used_k:
            out, lse = fa3.flash_attn_func(q, k, v, **chunk, **options)
        else:
            out, lse = fa3.flash_attn_varlen_func(q, k, v, **tables, max_seqlen_q=9, max_seqlen_k=9, **chunk, **options)
        if not self.dense_q:
            return out, lse
        assert out.shape[:2] == lengths[0] and lse.shape == (lengths[0][0], q.shape[2], lengths[0][1])
        assert lse.is_contiguous()
        return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


def formula(case, q, k, v, dtype, scale=None, softcap=0.0, causal=False, window=None):
    """(out, lse), sequence by sequence."""
    nothing = sum(x[:0].sum() for x in (q, k, v)).to(dtype)
    out = nothing + torch.zeros(*q.shape[:2], v.shape[2], dtype=dtype, device=q.device)
    lse = nothing + torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=dtype, device=q.device)
    for rows, keys in zip(*used_rows(**case.tables()), strict=True):
        lengths = rows.stop - rows.start, keys.stop - keys.start
        seen = seen_in_chunks(*lengths, case.chunk, causal, window, q.device)
        out[rows], lse[:, rows] = attend_seen(q[rows], k[keys], v[keys], seen, scale, softcap, dtype)
    return out, lse


UNEVEN = dict(lengths_q=(40, 0, 33, 1, 50), lengths_k=(50, 7, 20, 30, 64), heads_q=4, heads_k=2)
EVEN = dict(lengths_q=(40, 40), lengths_k=(70, 70), heads_q=4, heads_k=2)
LONG = dict(lengths_q=(70, 70), lengths_k=(40, 40), heads_q=2, heads_k=1)  # some queries come before the first key
USED = dict(used_q=(40, 0, 20, 1, 0), used_k=(30, 7, 20, 0, 64))
DENSE = dict(dense_q=True, dense_k=True)
CASES = [
    Chunked("ragged", dtype=F32, chunk=16, causal=True, **UNEVEN),
    Chunked("full", dtype=F16, chunk=9, **UNEVEN),
    Chunked("window", dtype=F32, chunk=24, window=(10, 5), scale=0.2, softcap=7.0, **UNEVEN),
    Chunked("used", dtype=BF16, chunk=11, tail=6, causal=True, **USED, **UNEVEN),
    Chunked("of_one", dtype=F32, chunk=1, **UNEVEN),
    Chunked("of_all", dtype=F32, chunk=1000, **UNEVEN),
    Chunked("odd", dtype=F32, chunk=16, head_dim=20, head_dim_v=13, **UNEVEN),
    Chunked("no_sequence", dtype=F32, chunk=3, tail=4, lengths_q=(), lengths_k=()),
    Chunked("dense", dtype=F32, chunk=32, causal=True, **DENSE, **EVEN),
    Chunked("dense_full", dtype=BF16, chunk=32, **DENSE, **LONG),
    Chunked("dense_causal", dtype=F32, chunk=7, causal=True, **DENSE, **LONG),
]
ONE_SIDE = [
    Chunked("queries", dtype=F32, dense_q=True, causal=True, **EVEN),
    Chunked("keys", dtype=F16, dense_k=True, window=(20, 3), **EVEN),
    Chunked("both", dtype=BF16, **DENSE, **EVEN, used_q=(40, 3), used_k=(0, 66)),
    Chunked("queries_in_chunks", dtype=F32, dense_q=True, chunk=10, **LONG),
    Chunked("keys_in_chunks", dtype=F32, dense_k=True, chunk=10, used_k=(33, 40), **LONG),
]


@pytest.mark.parametrize("case, device", on_devices(CASES + ONE_SIDE))
def test_results_and_gradients(case, device):
    inputs, options = case.tensors(device), case.options(device)
    tables = {name: options.pop(name) for name in case.tables()}
    options = {name: options[name] for name in ("scale", "softcap", "causal", "window") if name in options}
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, lse = case.call(*leaves, tables, **in_their_terms(options))
    dout, dlse = case.incoming(out, lse)
    found = [out, lse, *torch.autograd.grad([out, lse], leaves, [dout, dlse])]

    def differentiated(dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        results = formula(case, *leaves, dtype, **options)
        return [*results, *torch.autograd.grad(results, leaves, [dout.to(dtype), dlse.to(dtype)])]

    exact, rough = differentiated(torch.float64), differentiated(case.dtype)
    rough[1] = formula(case, *inputs, F32, **options)[1]  # statistics are float32 for every dtype
    slacks = dict(zip(("dq", "dk"), difference_rounding(*inputs, dout), strict=True))
    for what, mine, best, worse in zip(("out", "lse", "dq", "dk", "dv"), found, exact, rough, strict=True):
        assert mine.dtype is (F32 if what == "lse" else case.dtype)
        slack = 4 * score_rounding(exact[1], None if what == "lse" else best) + slacks.get(what, 0.0)
        assert_accurate(mine.detach(), best.detach(), worse.detach(), what, slack=slack)


def test_packed_operands():
    q, k, v = SMALL.tensors()
    expected = fa3.flash_attn_func(q, k, v, attention_chunk=6, causal=True)
    assert_bitwise(fa3.flash_attn_qkvpacked_func(packed(q, k, v), attention_chunk=6, causal=True), expected)
    assert_bitwise(
        fa3.flash_attn_func(q, k, v, attention_chunk=0, causal=True), flashtile.attention(q, k, v, causal=True)
    )


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4), st.integers(1, 12))
def test_parts_cover_what_is_seen_once(lengths, chunk):
    """Every query is in one part, in order, and its keys there are those of its chunk; the last ones meet."""
    used_q, used_k = (torch.tensor(x, dtype=torch.int32) for x in zip(*lengths, strict=True))
    sequence, queries, keys = parts_of(chunk, int(used_q.sum()), used_q, used_k)
    parts = torch.stack([sequence, *queries, *keys], 1).tolist()
    for b, (count_q, count_k) in enumerate(lengths):
        mine = [part for part in parts if part[0] == b]
        assert [i for _, begin, end, *_ in mine for i in range(begin, end)] == list(range(count_q))
        seen = seen_in_chunks(count_q, count_k, chunk)
        for _, begin, end, first, last in mine:
            for i in range(begin, end):
                assert seen[i].nonzero().flatten().tolist() == list(range(first, last))
            if end > begin and last > first:
                assert end - 1 + count_k - count_q == last - 1


def test_bad_chunks():
    q, k, v = SMALL.tensors()
    begins = torch.tensor([0, 8, 20], dtype=torch.int32)
    ragged = (q[0], k[0], v[0], begins, begins, 12, 12)
    for function, args in (
        (fa3.flash_attn_func, (q, k, v)),
        (fa3.flash_attn_qkvpacked_func, (packed(q, k, v),)),
        (fa3.flash_attn_varlen_func, ragged),
        (fa3.flash_attn_with_kvcache, (q, k, v)),
    ):
        assert_refuses(
            function, ValueError, "attention_chunk is -2, expected an int of at least 0", *args, attention_chunk=-2
        )
        for chunk in (None, 1.5, "many", torch.ones(3)):
            assert_refuses(
                function,
                TypeError,
                "attention_chunk is .*, expected an int of at least 0",
                *args,
                attention_chunk=chunk,
            )
    wrong = functools.partial(assert_refuses, fa3.flash_attn_varlen_func, name="attention_varlen", attention_chunk=4)
    wrong(
        ValueError,
        "seqused_k has 13 at index 1",
        *ragged,
        seqused_k=begins[1:] - torch.tensor([0, 7], dtype=torch.int32),
    )
