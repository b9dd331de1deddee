"""One set of bits from training to decoding: how its sequence comes does not matter to a token. On the CPU it never
does, on a GPU with batch_invariant."""

import itertools
import random

import pytest
import ragged
import test_backward
import test_forward
import torch
from cases import BF16, CASES, DEVICE_PARAMS, F16, F32, Case, on_devices
from compare import assert_bitwise
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flashtile
from flashtile._invariance import with_whole_sequences
from flashtile._options import ALIBI_SLOPES, SEQUENCES, attention_options
from flashtile.integrations import pytorch

each_device = pytest.mark.parametrize("device", DEVICE_PARAMS)
LAW = settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


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


@each_device
@LAW
@given(batches())
def test_from_training_to_decoding(device, batch):
    lengths, heads_q, heads_k, head_dim, head_dim_v, dtype, options, source = batch
    if device == "cuda":
        dtype = BF16 if dtype is F32 else dtype
    if device == "cuda" or source.random() < 0.5:
        options["batch_invariant"] = True  # changes nothing on the CPU
    generator = torch.Generator().manual_seed(len(lengths))
    begins = [0, *itertools.accumulate(lengths)]

    def rows(heads, width):
        return torch.randn(begins[-1], heads, width, generator=generator).to(device, dtype)

    q, k, v, dout = (
        rows(*size) for size in ((heads_q, head_dim), (heads_k, head_dim), (heads_k, head_dim_v), (heads_q, head_dim_v))
    )
    dlse = torch.randn(heads_q, begins[-1], generator=generator).to(device)
    if "sinks" in options:
        options["sinks"] = options["sinks"].expand(heads_q).to(device)
    spans = [slice(*span) for span in itertools.pairwise(begins)]
    alone = [
        both_passes(flashtile.attention, *(x[None, at] for x in (q, k, v, dout)), dlse[None, :, at], **options)
        for at in spans
    ]

    table = torch.tensor(begins, dtype=torch.int32, device=device)
    tables = dict(cu_seqlens_q=table, cu_seqlens_k=table)
    together = both_passes(flashtile.attention_varlen, q, k, v, dout, dlse, **tables, **options)
    for at, expected in zip(spans, alone, strict=True):
        found = [x[None, :, at] if i == 1 else x[None, at] for i, x in enumerate(together)]
        assert_same_bits(found, expected, "in a ragged batch")

    for at, expected in zip(spans, alone, strict=True):
        # A batch of entries that differ, of which the last is this sequence.
        others = source.choice([1, 1, 2, 40])
        given = [torch.cat([torch.randn_like(x[None, at]).expand(others, -1, -1, -1), x[None, at]]) for x in (q, k, v)]
        given += [torch.cat([x.new_ones(others, *x.shape[1:]), x]) for x in (dout[None, at], dlse[None, :, at])]
        found = both_passes(flashtile.attention, *given, **options)
        assert_same_bits([x[others:] for x in found], expected, "beside others")

    check_caches(q, k, v, spans, alone, options, source)


def check_caches(q, k, v, spans, alone, options, source):
    """All sequences in pages of any size and order, each in chunks of its own, the last of one token."""
    page_size = source.choice([1, 3, 4, 8, 16, 64])
    lengths = [at.stop - at.start for at in spans]
    pages_of = [-(-length // page_size) for length in lengths]
    numbers = source.sample(range(sum(pages_of)), sum(pages_of))
    block_table = torch.zeros(len(spans), max(pages_of), dtype=torch.int32)
    caches = [x.new_full((sum(pages_of), page_size, *x.shape[1:]), torch.nan) for x in (k, v)]
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
        offsets = [0, *itertools.accumulate(counts)]
        out, lse = flashtile.attention_kvcache(
            queries,
            *caches,
            cache_seqlens=torch.tensor(held, dtype=torch.int32, device=q.device),
            k_new=keys,
            v_new=values,
            cu_seqlens_q=torch.tensor(offsets, dtype=torch.int32, device=q.device),
            block_table=block_table.to(q.device),
            return_lse=True,
            **options | dict(batch_invariant=True),
        )
        for entry, (begin, end) in enumerate(itertools.pairwise(offsets)):
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


# Keys of several splits, windows that are longer than one, and heads of every width of kernels.
LONG = {
    "D64": dict(head_dim=64, heads=(8, 2)),
    "D128": dict(head_dim=128, heads=(4, 1)),
    "D192": dict(head_dim=192, heads=(2, 1), window=(1100, 0)),
    "D256": dict(head_dim=256, heads=(2, 1)),
    "softcap": dict(head_dim=72, heads=(6, 2), softcap=0.8),
    "window of a few": dict(head_dim=64, heads=(4, 4), window=(70, 0)),
    "window of a split": dict(head_dim=128, heads=(2, 2), window=(1008, 0)),
    "window of a split and more": dict(head_dim=64, heads=(2, 1), window=(1009, None)),
    "window of two splits": dict(head_dim=64, heads=(2, 2), window=(1500, 0)),
    "window of all": dict(head_dim=128, heads=(3, 1), window=(2300, 0)),
    "everything": dict(head_dim=96, heads=(4, 2), window=(1200, 5), softcap=9.0, alibi=True, sinks=True, scale=0.2),
}


@each_device
@pytest.mark.parametrize("name", LONG)
def test_long_keys(name, device):
    """The last rows of a prefill in any chunks, up to one token, are those of training; also where the rows that see
    the beginning of a split share a tile with some that do not; and in pages, alone and in a batch, in which other
    thread blocks take the splits."""
    options = dict(causal=True, window=None, batch_invariant=True) | LONG[name]
    head_dim, (heads_q, heads_k), length = options.pop("head_dim"), options.pop("heads"), 2600
    if options.pop("alibi", False):
        options["alibi_slopes"] = torch.linspace(0.001, 0.1, heads_q, device=device)
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-2, 2, heads_q, device=device)
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(1, length, heads, head_dim, generator=generator).to(device, (BF16, F16)[len(name) % 2])
        for heads in (heads_q, heads_k, heads_k)
    )
    out, lse = flashtile.attention(q, k, v, return_lse=True, **options)
    both = [torch.cat([x.flip(1), x]) for x in (q, k, v)]
    assert_same_bits([x[1:] for x in flashtile.attention(*both, return_lse=True, **options)], (out, lse), "in a batch")
    left = options["window"] and options["window"][0]
    edges = [1024, 2048, *(edge + left for edge in (1024, 2048) if left and edge + left < length)]
    chunks = [(length - 300, length), (0, 50), *((edge - 20, edge + 25) for edge in edges)]
    chunks += [(token, token + 1) for edge in edges for token in range(edge - 1, edge + 18, 3)]
    chunks += [(edge - 7 - size, edge + size) for edge in edges for size in (1, 6, 11)]
    for begin, end in chunks:
        end = min(end, length)
        found = flashtile.attention_kvcache(q[:, begin:end], k, v, cache_seqlens=end, return_lse=True, **options)
        assert_same_bits(found, (out[:, begin:end], lse[:, :, begin:end]), f"of rows {begin} to {end}")
    for page_size, batch in ((16, 1), (16, 50), (112, 2), (5, 3), (12, 2)):
        for begin, end in chunks[::3]:
            end = min(end, length)
            given, tables = in_pages(q[:, begin:end], k[:, :end], v[:, :end], page_size, batch)
            found = flashtile.attention_kvcache(*given, return_lse=True, **tables, **options)
            way = f"of rows {begin} to {end}, in pages of {page_size}, of {batch}"
            assert_same_bits([x[-1:] for x in found], (out[:, begin:end], lse[:, :, begin:end]), way)


@each_device
@pytest.mark.parametrize("options", [{}, dict(window=(1500, 0), sinks=0.5)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 72, 128, 192, 256])
def test_many_rows_of_few_sequences(head_dim, options, device):
    """So few tiles of many rows that thread blocks share the keys of each, beside so many that they do not; also as
    ragged queries, and with few rows."""
    length, chunk, few, heads_q, heads_k = 3100, 256, 7, 16, 2
    given = dict(causal=True, batch_invariant=True, return_lse=True) | options
    if "sinks" in options:
        given["sinks"] = torch.linspace(-2, 2, heads_q, device=device)
    generator = torch.Generator().manual_seed(head_dim)
    q, k, v = (
        torch.randn(1, length, heads, head_dim, generator=generator).to(device, (BF16, F16)[head_dim % 3 % 2])
        for heads in (heads_q, heads_k, heads_k)
    )
    batch = 10 if device == "cuda" else 1
    out, lse = flashtile.attention(*(x.expand(batch, -1, -1, -1) for x in (q[:, -2 * chunk :], k, v)), **given)
    expected = out[:1, chunk:], lse[:1, :, chunk:]
    q = q[:, -chunk:]
    assert_same_bits(flashtile.attention(q, k, v, **given), expected, "alone")
    of_q, of_k = (torch.tensor([0, rows], dtype=torch.int32, device=device) for rows in (chunk, length))
    found = flashtile.attention_varlen(q[0], k[0], v[0], cu_seqlens_q=of_q, cu_seqlens_k=of_k, **given)
    assert_same_bits([x[None] for x in found], expected, "as a ragged sequence")
    of_few = expected[0][:, -few:], expected[1][:, :, -few:]
    assert_same_bits(flashtile.attention(q[:, -few:], k, v, **given), of_few, "of few rows")
    assert_same_bits(flashtile.attention_kvcache(q, k, v, cache_seqlens=length, **given), expected, "over a cache")
    paged, tables = in_pages(q, k, v, 16, 1)
    assert_same_bits(flashtile.attention_kvcache(*paged, **tables, **given), expected, "over pages")
    found, found_lse = flashtile.attention_kvcache(paged[0][0], *paged[1:], cu_seqlens_q=of_q, **tables, **given)
    assert_same_bits((found[None], found_lse[None]), expected, "of ragged queries")


@each_device
@pytest.mark.parametrize("keys", [4100, 9300, 20000])
def test_one_token_of_many_parts(keys, device):
    """Thread blocks share the parts of its keys, or do not. Three heads to a group leave one row of a warp idle. Up to
    eight rows are weighed by other code: two tokens have six, three have nine. Some scores outgrow those before."""
    generator = torch.Generator().manual_seed(keys)
    q, k, v = (
        torch.randn(1, length, heads, 64, generator=generator).to(device, BF16)
        for length, heads in ((200, 6), (keys, 2), (keys, 2))
    )
    k[:, 400::531] *= 20
    given = dict(causal=True, batch_invariant=True, return_lse=True)
    out, lse = flashtile.attention(q, k, v, **given)
    for queries, batch in ((1, 1), (1, 40), (2, 1), (2, 40), (3, 2), (17, 1)):
        paged, tables = in_pages(q[:, -queries:], k, v, 16, batch)
        found = flashtile.attention_kvcache(*paged, **tables, **given)
        way = f"of {queries} tokens, of {batch}"
        assert_same_bits([x[-1:] for x in found], (out[:, -queries:], lse[:, :, -queries:]), way)


def in_pages(q, k, v, page_size, batch):
    """(q, caches) and the tables of a batch whose last sequence is the given one, and whose others are its beginnings:
    all of them in pages in reverse order, behind which there is room, and NaN."""
    length, count = k.shape[1], -(-k.shape[1] // page_size) + 3
    caches = [x.new_full((count, page_size, *x.shape[2:]), torch.nan) for x in (k, v)]
    for cache, x in zip(caches, (k, v), strict=True):
        cache.flatten(0, 1)[:length] = x[0]
    held = torch.arange(batch) * (length - q.shape[1]) // max(batch - 1, 1) + q.shape[1]
    held[-1] = length
    table = torch.arange(count - 1, -1, -1, dtype=torch.int32).expand(batch, -1).contiguous()
    tables = dict(cache_seqlens=held.int().to(k.device), block_table=table.to(k.device))
    return (q.expand(batch, -1, -1, -1), *(x.flip(0) for x in caches)), tables


# Shapes whose backward goes by the batch without batch_invariant: blocks of keys that thread blocks share, few queries
# of many keys, one block of keys that forms dq, persistent thread blocks. Large groups are shared with it, too.
GRADIENTS = [
    Case(f"{name}_D{head_dim}", dtype=(F16, BF16)[i % 2], batch=1, head_dim=head_dim, **fields)
    for name, fields in {
        "few_blocks": dict(seqlen_q=333, seqlen_k=200, heads_q=16, heads_k=1),
        "causal": dict(seqlen_q=450, seqlen_k=450, heads_q=4, heads_k=2, causal=True),
        "shared_heads": dict(seqlen_q=270, seqlen_k=300, heads_q=18, heads_k=2, causal=True),
        "window": dict(seqlen_q=300, seqlen_k=333, window=(70, 9), heads_q=6, heads_k=3),
        "few_queries": dict(seqlen_q=20, seqlen_k=2100, heads_q=8, heads_k=8, softcap=9.0),
        "one_block": dict(seqlen_q=170, seqlen_k=100, heads_q=2, heads_k=2, sinks=0.0),
        "short_blocks": dict(seqlen_q=43, seqlen_k=1500, heads_q=3, heads_k=3, causal=True),
    }.items()
    for i, head_dim in enumerate((64, 72, 96, 128, 192, 256))
]


@pytest.mark.parametrize("case, device", on_devices(GRADIENTS))
def test_gradients_do_not_depend_on_the_batch(case, device):
    inputs, options = case.tensors(device), case.options(device) | dict(batch_invariant=True)
    incoming = case.incoming(*flashtile.attention(*inputs, return_lse=True, **options))
    alone = both_passes(flashtile.attention, *inputs, *incoming, **options)
    for others in (1, 30):
        batch = [torch.cat([x, x.flip(1).expand(others, *x.shape[1:])]) for x in (*inputs, *incoming)]
        found = both_passes(flashtile.attention, *batch, **options)
        assert_same_bits([x[:1] for x in found], alone, f"beside {others}")
    lengths = [(case.seqlen_q, case.seqlen_k), (7, 300), (600, 0), (case.seqlen_q, case.seqlen_k), (130, 129)]
    tables = {
        f"cu_seqlens_{name}": torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device=device)
        for name, sizes in zip("qk", zip(*lengths, strict=True), strict=True)
    }
    rows, keys = (sum(sizes) for sizes in zip(*lengths, strict=True))

    def between(x, size):
        """`x`, (1, S, ...), as the first and the fourth sequence of rows of ones."""
        flat = x.new_ones(size, *x.shape[2:])
        first = sum(n[size == keys] for n in lengths[:3])
        for begin in (0, first):
            flat[begin : begin + x.shape[1]] = x[0]
        return flat

    q, k, v, dout = (between(x, size) for x, size in zip((*inputs, incoming[0]), (rows, keys, keys, rows), strict=True))
    dlse = between(incoming[1].transpose(1, 2), rows).T.contiguous()
    found = both_passes(flashtile.attention_varlen, q, k, v, dout, dlse, **tables, **options)
    for place in (0, 3):
        first_q, first_k = (sum(n[side] for n in lengths[:place]) for side in (0, 1))
        mine, of_keys = slice(first_q, first_q + case.seqlen_q), slice(first_k, first_k + case.seqlen_k)
        cuts = (mine, (slice(None), mine), mine, of_keys, of_keys)
        assert_same_bits([x[cut][None] for x, cut in zip(found, cuts, strict=True)], alone, f"as sequence {place}")


@each_device
def test_rows_that_do_not_count(device):
    """Keys behind those that count, and rows behind the last sequence, hold NaN."""
    case = ragged.Ragged(
        "used",
        dtype=F16,
        causal=True,
        tail=9,
        lengths_q=(70, 0, 33, 20),
        lengths_k=(120, 30, 40, 50),
        used_q=(60, 0, 33, 0),
        used_k=(97, 13, 40, 50),
    )
    q, k, v = case.tensors(device)
    options = case.options(device) | dict(batch_invariant=True)
    out, lse = flashtile.attention_varlen(q, k, v, return_lse=True, **options)
    options = {name: x for name, x in options.items() if name not in ragged.TABLES}
    for rows, keys in case.spans():
        expected = flashtile.attention(q[None, rows], k[None, keys], v[None, keys], return_lse=True, **options)
        assert_same_bits((out[None, rows], lse[None, :, rows]), expected, "of keys that count")
    unused = case.unused(0, device)
    assert (out[unused] == 0).all() and (lse[:, unused] == -torch.inf).all()


USED = dict(lengths_q=(70, 5, 33), lengths_k=(120, 30, 40), used_q=(60, 0, 33), tail=9, heads_q=4, heads_k=2)


def whole(options, return_lse):
    """The options by which a GPU computes rows that do not count."""
    tables = tuple(options.pop(name, None) for name in ragged.TABLES)
    slopes = options.pop("alibi_slopes", None)
    given = attention_options(sequences=tables, alibi_slopes=slopes, sinks=options.get("sinks"))
    changed = with_whole_sequences(given, return_lse)
    found = {name: x for name, x in zip(ragged.TABLES, changed[SEQUENCES], strict=True) if x is not None}
    assert "seqused_q" not in found
    return options | found | dict(alibi_slopes=changed[ALIBI_SLOPES])


@each_device
@pytest.mark.parametrize("used_k", [None, (97, 13, 40)])
def test_rows_that_do_not_count_are_sequences_without_keys(device, used_k):
    case = ragged.Ragged("used", dtype=BF16, causal=True, alibi="per batch and head", used_k=used_k, **USED)
    inputs, options = case.tensors(device), case.options(device) | dict(batch_invariant=True)
    incoming = case.incoming(*flashtile.attention_varlen(*inputs, return_lse=True, **options))
    expected = both_passes(flashtile.attention_varlen, *inputs, *incoming, **options)
    found = both_passes(flashtile.attention_varlen, *inputs, *incoming, **whole(options, True))
    assert_same_bits(found, expected, "as sequences")


@each_device
def test_sinks_of_rows_that_do_not_count(device):
    """They change nothing there, as long as nobody asks for lse."""
    case = ragged.Ragged("used", dtype=BF16, causal=True, sinks=0.0, **USED)
    inputs, options = test_backward.differentiable(case, device)
    options |= dict(sinks=inputs[3], batch_invariant=True)
    out = flashtile.attention_varlen(*inputs[:3], **options)
    dout, _ = case.incoming(out, out[..., 0].T.float())
    dout = dout.nan_to_num()
    expected = [out, *torch.autograd.grad(out, inputs, dout)]
    out = flashtile.attention_varlen(*inputs[:3], **whole(options, False))
    *found, dsinks = [out, *torch.autograd.grad(out, inputs, dout)]
    for x, y in zip(found, expected, strict=False):
        assert_bitwise(x, y)
    torch.testing.assert_close(dsinks, expected[-1])


@each_device
def test_a_ragged_batch_is_a_cache_of_one_entry(device):
    """What comes before a sequence's keys is its left padding: so a GPU computes it."""
    case = ragged.Ragged("cache", dtype=BF16, causal=True, heads_q=4, heads_k=2, tail=5, alibi="per batch and head")
    q, k, v = case.tensors(device)
    options = case.options(device) | dict(batch_invariant=True, return_lse=True)
    expected = flashtile.attention_varlen(q, k, v, **options)
    begins = options.pop("cu_seqlens_k")
    entries = torch.zeros_like(begins[1:])
    tables = dict(cache_seqlens=begins[1:].contiguous(), leftpad=begins[:-1].contiguous(), cache_batch_idx=entries)
    found = flashtile.attention_kvcache(q, k[None], v[None], **tables, **options)
    assert_same_bits(found, expected, "over a cache")


@each_device
def test_a_column_mask_of_a_dense_batch(device):
    mask = flashtile.masks.ColumnMask.document([100, 30, 70], device=device)
    q, k, v = Case("mask", dtype=BF16, seqlen_q=200, seqlen_k=200, heads_q=4, heads_k=2).tensors(device)
    dout, dlse = Case("mask", dtype=BF16).incoming(q, q[..., 0].float().transpose(1, 2))
    whole = both_passes(flashtile.attention, q, k, v, dout, dlse, mask=mask, causal=True, batch_invariant=True)
    for b in range(2):
        alone = (x[b : b + 1] for x in (q, k, v, dout, dlse))
        found = both_passes(flashtile.attention, *alone, mask=mask, causal=True, batch_invariant=True)
        assert_same_bits(found, [x[b : b + 1] for x in whole], f"of entry {b}")


INVARIANT = [
    case
    for case in CASES
    if case.dropout_p == 0
    and case.name.startswith(
        (
            "D",
            "S1",
            "no_",
            "group",
            "gaps",
            "misaligned",
            "sinks",
            "softcap",
            "alibi",
            "window",
            "everything",
            "few_rows",
        )
    )
]


@pytest.mark.parametrize("case, device", on_devices(INVARIANT, ["cuda"]))
def test_accuracy(case, device, attention, gradients):
    """The CPU's kernels are those of every other test."""

    def invariant(*x, **options):
        return attention(*x, **options | dict(batch_invariant=True))

    test_forward.check(invariant, case, *case.tensors(device), **case.options(device))
    test_backward.check(case, device, invariant, gradients, None)


RAGGED = [case for case in ragged.CASES if case.dropout_p == 0 and (case.used_q is None or case.sinks is None)]


@pytest.mark.parametrize("case, device", on_devices(RAGGED, ["cuda"]))
def test_accuracy_of_ragged_batches(case, device, attention_varlen, gradients):
    def invariant(*x, **options):
        return attention_varlen(*x, **options | dict(batch_invariant=True))

    options = case.options(device)
    test_forward.check(invariant, case, *case.tensors(device), formula=ragged.attention, **options)
    test_backward.check(case, device, invariant, gradients, None, ragged.attention)


@each_device
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiled_calls_and_other_results(device):
    case = Case("compiled", dtype=BF16, causal=True, sinks=0.0, heads_q=4, heads_k=2)
    inputs, options = case.tensors(device), case.options(device)
    incoming = case.incoming(*flashtile.attention(*inputs, return_lse=True, **options))
    expected = both_passes(flashtile.attention, *inputs, *incoming, batch_invariant=True, **options)
    compiled = torch.compile(flashtile.attention, backend="aot_eager", fullgraph=True)
    compiled(*inputs, **options)  # the mode is to have a graph of its own
    with flashtile.batch_invariant_mode():
        assert_same_bits(both_passes(compiled, *inputs, *incoming, **options), expected, "compiled, in the mode")
        place = torch.empty_like(inputs[0])
        assert flashtile.attention(*inputs, out=place, **options) is place
        assert_same_bits((place,), expected, "in a tensor that is given")
    again = both_passes(compiled, *inputs, *incoming, batch_invariant=True, **options)
    assert_same_bits(again, expected, "compiled")


@pytest.mark.gpu
def test_pytorchs_flash_attention():
    """Once activated, forward tells backward of the mode, whichever thread that runs on."""
    case = Case("activated", dtype=BF16, seqlen_q=200, seqlen_k=200)
    q, k, v = case.tensors("cuda")
    dout, _ = case.incoming(q, q)
    how = (None, None, 200, 200, 0.0, True)
    forward, backward = (pytorch._FUNCTIONS[f"_flash_attention_{name}"] for name in ("forward", "backward"))
    with flashtile.batch_invariant_mode():
        out, lse, seed, unused, _ = forward(q, k, v, *how, False)
    found = (out, lse, *backward(dout, q, k, v, out, lse, *how, seed, unused))
    options = dict(causal=True, batch_invariant=True)
    expected = both_passes(flashtile.attention, q, k, v, dout, torch.zeros_like(lse), **options)
    assert_same_bits(found, expected, "of PyTorch's function")
