"""One set of bits from training to decoding, on the CPU: how its sequence comes does not matter to a token."""

import itertools
import random

import torch
from cases import BF16, F16, F32
from compare import assert_bitwise
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flashtile


@st.composite
def batches(draw):
    """(lengths, heads_q, heads_k, head_dim, head_dim_v, dtype, options, source of further choices)."""
    heads_k = draw(st.integers(1, 2))
    options = {
        "causal": True,
        "window": draw(st.none() | st.tuples(st.integers(0, 90), st.none())),
        "softcap": draw(st.sampled_from([0.0, 9.0])),
        "scale": draw(st.none() | st.floats(-1, 1, width=32)),
    }
    return (
        draw(st.lists(st.integers(1, 300), min_size=1, max_size=3)),
        heads_k * draw(st.integers(1, 4)),
        heads_k,
        8 * draw(st.integers(1, 24)),
        8 * draw(st.integers(1, 24)),
        draw(st.sampled_from([F32, F16, BF16])),
        options | ({"sinks": torch.tensor(draw(st.floats(-3, 3, width=16)))} if draw(st.booleans()) else {}),
        draw(st.randoms(use_true_random=False)),
    )


def both_passes(function, q, k, v, dout, dlse, **options):
    """[out, lse, dq, dk, dv]"""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = function(*leaves, return_lse=True, **options)
    return [out, lse, *torch.autograd.grad((out, lse), leaves, (dout, dlse))]


def assert_same_bits(found, expected, way):
    for what, x, y in zip(("out", "lse", "dq", "dk", "dv"), found, expected, strict=False):
        assert_bitwise(x, y, f"{what} {way}")


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(batches())
def test_from_training_to_decoding(batch):
    lengths, heads_q, heads_k, head_dim, head_dim_v, dtype, options, source = batch
    generator = torch.Generator().manual_seed(len(lengths))
    begins = [0, *itertools.accumulate(lengths)]

    def rows(heads, width):
        return torch.randn(begins[-1], heads, width, generator=generator).to(dtype)

    q, k, v, dout = (
        rows(*size) for size in ((heads_q, head_dim), (heads_k, head_dim), (heads_k, head_dim_v), (heads_q, head_dim_v))
    )
    dlse = torch.randn(heads_q, begins[-1], generator=generator)
    if "sinks" in options:
        options["sinks"] = options["sinks"].expand(heads_q)
    spans = [slice(*span) for span in itertools.pairwise(begins)]
    alone = [
        both_passes(flashtile.attention, *(x[None, at] for x in (q, k, v, dout)), dlse[None, :, at], **options)
        for at in spans
    ]

    table = torch.tensor(begins, dtype=torch.int32)
    tables = dict(cu_seqlens_q=table, cu_seqlens_k=table)
    ragged = both_passes(flashtile.attention_varlen, q, k, v, dout, dlse, **tables, **options)
    for at, expected in zip(spans, alone, strict=True):
        found = [x[None, :, at] if i == 1 else x[None, at] for i, x in enumerate(ragged)]
        assert_same_bits(found, expected, "in a ragged batch")

    for at, expected in zip(spans, alone, strict=True):
        # A batch of entries that differ, of which the second is this sequence.
        given = [torch.stack([torch.randn_like(x[at]), x[at]]) for x in (q, k, v, dout)]
        given.append(torch.stack([torch.zeros_like(dlse[:, at]), dlse[:, at]]))
        found = both_passes(flashtile.attention, *given, **options)
        assert_same_bits([x[1:] for x in found], expected, "beside another")

    check_caches(q, k, v, spans, alone, options, source)


def check_caches(q, k, v, spans, alone, options, source):
    """All sequences in pages of any size and order, each in chunks of its own, the last of one token."""
    page_size = source.choice([1, 3, 16, 64])
    lengths = [at.stop - at.start for at in spans]
    pages_of = [-(-length // page_size) for length in lengths]
    numbers = source.sample(range(sum(pages_of)), sum(pages_of))
    block_table = torch.zeros(len(spans), max(pages_of), dtype=torch.int32)
    caches = [torch.full((sum(pages_of), page_size, *x.shape[1:]), torch.nan, dtype=x.dtype) for x in (k, v)]
    for entry, count in enumerate(pages_of):
        block_table[entry, :count] = torch.tensor(numbers[:count])
        numbers = numbers[count:]
    held, results = [0] * len(spans), [[] for _ in spans]
    while any(done < length for done, length in zip(held, lengths, strict=True)):
        counts = [
            min(source.randint(1, 200), max(length - done - 1, 1), length - done)
            for done, length in zip(held, lengths, strict=True)
        ]
        new = [slice(at.start + done, at.start + done + n) for at, done, n in zip(spans, held, counts, strict=True)]
        queries, keys, values = (torch.cat([x[rows] for rows in new]) for x in (q, k, v))
        offsets = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        out, lse = flashtile.attention_kvcache(
            queries,
            *caches,
            cache_seqlens=torch.tensor(held, dtype=torch.int32),
            k_new=keys,
            v_new=values,
            cu_seqlens_q=offsets,
            block_table=block_table,
            batch_invariant=True,
            return_lse=True,
            **options,
        )
        for entry, (begin, end) in enumerate(itertools.pairwise(offsets.tolist())):
            results[entry].append((out[begin:end], lse[:, begin:end]))
            held[entry] += end - begin
    for parts, expected in zip(results, alone, strict=True):
        out, lse = torch.cat([x for x, _ in parts])[None], torch.cat([x for _, x in parts], 1)[None]
        assert_same_bits((out, lse), expected, "of chunks over pages")


def test_caches_get_sequences_in_several_chunks(monkeypatch):
    """Of one chunk the law would say little."""
    calls = []
    original = flashtile.attention_kvcache
    monkeypatch.setattr(flashtile, "attention_kvcache", lambda *x, **y: calls.append(x) or original(*x, **y))
    q, k, v = torch.randn(50, 2, 16), torch.randn(50, 1, 16), torch.randn(50, 1, 16)
    expected = flashtile.attention(q[None], k[None], v[None], causal=True, return_lse=True)
    check_caches(q, k, v, [slice(0, 50)], [expected], {"causal": True}, random.Random(1))
    assert len(calls) > 1
