"""return_max_logits: the largest score is found wherever it stands, and what is no score is none."""

import math
import re

import pytest
import reference
import torch
from cases import BF16, DEVICE_PARAMS, F16, F32
from compare import assert_bitwise
from test_column_mask import random_mask
from test_return_max_logits import integers

import flashtile
from flashtile import _capability
from flashtile.bench import serving


@pytest.mark.parametrize("row, key", [(5, 7), (290, 299)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_a_score_beyond_float32(device, head_dim, row, key):
    """It is found wherever it stands, and that of the other head is what it is without it."""
    generator = torch.Generator().manual_seed(0)
    q, k = (integers(generator, -2, 2, 1, 300, 2, head_dim).to(device, BF16) for _ in range(2))
    q[0, row, 0], k[0, key, 0] = 1e30, 1e30
    _, found = flashtile.attention(q, k, k, scale=0.5, return_max_logits=True)
    assert found[0, 0] >= 0.5 * torch.finfo(F32).max
    exact = reference.max_logits(q[:, :, 1:], k[:, :, 1:], scale=0.5).float()
    assert_bitwise(found[:, 1:], exact, "max_logits")


@pytest.mark.parametrize("group", [3, 5, 6, 7, 11])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_rows_without_a_query(device, head_dim, group):
    """Where the heads of a group are packed, 16 rows hold as many whole queries as fit, and the rest of them whatever
    another call left in shared memory: here numbers whose scores would be the largest by far."""
    generator = torch.Generator().manual_seed(group)
    before = torch.full((8, 128, 40, head_dim), -100.0, dtype=F16, device=device)
    heads = []  # of the packs
    for rows in (2, 45):  # with so many entries that packs make fewer waves of thread blocks
        q = integers(generator, 1, 3, 60, rows, group, head_dim).to(device, F16)
        k = integers(generator, -3, -1, 60, 200, 1, head_dim).to(device, F16)
        shapes = q.to("meta"), k.to("meta"), k.to("meta")
        plan = flashtile.explain(*shapes, device="H200", return_max_logits=True)
        heads.append(int(re.search(r"a row is one of (\d+) heads of a query", plan)[1]))
        flashtile.attention(before, before, before)
        _, found = flashtile.attention(q, k, k, scale=0.5, return_max_logits=True)
        assert_bitwise(found, reference.max_logits(q, k, scale=0.5).float(), "max_logits")
    assert any(16 % n != 0 for n in heads), heads  # or no row is left over, and nothing is tested


@pytest.mark.parametrize("capability", [1000, 80])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [1, 3, 4])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_nan_is_no_score(device, head_dim, heads, causal, capability):
    """Neither that of a query with a NaN nor that of a key, wherever it stands."""
    generator = torch.Generator().manual_seed(heads)
    rows = torch.arange(300)
    for nan_rows, nan_keys in ((rows[5:6], rows[:0]), (rows[:0], rows[290:291]), (rows[100:280], rows[:200])):
        q = integers(generator, -3, 3, 1, 300, heads, head_dim).to(device, F16)
        k = integers(generator, -3, 3, 1, 300, 1, head_dim).to(device, F16)
        row, key = nan_rows.to(device), nan_keys.to(device)
        seen = torch.ones(300, 300, dtype=torch.bool, device=device)
        seen[row], seen[:, key] = False, False
        exact = reference.max_logits(q, k, causal=causal, scale=0.5, mask=seen[None, None]).float()
        q[:, row, :, 3], k[:, key, :, 5] = math.nan, math.nan
        with _capability.limited(capability):
            _, found = flashtile.attention(q, k, k, causal=causal, scale=0.5, return_max_logits=True)
        assert_bitwise(found, exact, "max_logits")


# Where the largest score of a head stands: kernels look for one in few of the blocks of keys that they take.
PLACES = {"rising": lambda n: range(n), "falling": lambda n: range(n, 0, -1), "level": lambda n: [5] * n}


def in_rows(q, k, v, **options):
    return flashtile.attention(q, k, v, **options, return_max_logits=True)[-1]


def in_pages(q, k, v, **options):
    """The same, of pages that lie in another order."""
    batch, seqlen = k.shape[:2]
    k_pages, v_pages, table = serving.in_pages(k.flatten(0, 1), v.flatten(0, 1), (seqlen,) * batch, page_size=16)
    held = torch.full((batch,), seqlen, dtype=torch.int32, device=k.device)
    given = {"cache_seqlens": held, "block_table": table, "return_max_logits": True}
    return flashtile.attention_kvcache(q, k_pages, v_pages, **given, **options)[-1]


WAYS = {"in rows": in_rows, "in pages": in_pages, "masked": in_rows}


@pytest.mark.parametrize("capability", [1000, 80])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_many_tiles(device, head_dim, causal, way, capability):
    """Thread blocks raise what others have raised. Of one head; of packed ones; of few queries over many keys."""
    long = 4096 if device == "cuda" else 700
    generator = torch.Generator().manual_seed(head_dim)
    for rows, heads_q, heads_k in ((long, 2, 2), (long, 4, 4), (long // 4, 8, 1), (3, 8, 2), (40, 14, 2)):
        q = integers(generator, -2, 2, 2, rows, heads_q, head_dim).to(device, F16)
        k = integers(generator, -2, 2, 2, long, heads_k, head_dim).to(device, F16)
        v = torch.randn(2, long, heads_k, head_dim, generator=generator).to(device, F16)
        mask = random_mask(rows, long, run=50).to(device) if way == "masked" else None
        for name, factors in PLACES.items():
            steps = torch.tensor([*factors(8)], device=device, dtype=F16).repeat_interleave(-(-long // 8))[:long]
            keys = k * steps[:, None, None]
            if name == "level":  # but for one key
                spike = int(torch.randint(long, (), generator=generator))
                keys[:, spike] = 12 * q[:, rows // 2, :: heads_q // heads_k].sign()
            with _capability.limited(capability):
                found = WAYS[way](q, keys, v, causal=causal, mask=mask)
            # Sums of integers are exact, and one multiplication with the scale is rounded.
            exact = reference.max_logits(q, keys, causal=causal, mask=None if mask is None else mask.to_dense())
            torch.testing.assert_close(found, exact.float(), rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [40, 1100])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_what_is_no_number(device, head_dim, rows, way):
    """NaN is no score, and one beyond float32 is found, also where keys are split, as those of 40 rows are."""
    generator = torch.Generator().manual_seed(head_dim + rows)
    keys = 2500
    mask = random_mask(rows, keys, run=50) if way == "masked" else None
    visible = torch.ones(1, 1, rows, keys, dtype=torch.bool) if mask is None else mask.to_dense()
    q = integers(generator, -2, 2, 1, rows, 3, head_dim).float()
    k = integers(generator, -2, 2, 1, keys, 3, head_dim).float()
    seen = visible.expand(1, 3, rows, keys).clone()
    seen[:, 0, 5], seen[:, 0, :, 1700:1900] = False, False  # of head 0, one query and many keys are NaN
    exact = reference.max_logits(q, k, scale=0.5, mask=seen).float()
    q[:, 5, 0, 3], k[:, 1700:1900, 0, 5] = math.nan, math.nan
    row, key = visible[0, 0, 7:].nonzero()[int(torch.randint(rows, (), generator=generator))].tolist()
    q[0, 7 + row, 1], k[0, key, 1] = 1e30, 1e30  # of head 1, one score is +inf
    q, k = q.to(device, BF16), k.to(device, BF16)
    found = WAYS[way](q, k, k, causal=False, scale=0.5, mask=None if mask is None else mask.to(device)).cpu()
    assert found[0, 1] >= 0.5 * torch.finfo(F32).max
    assert_bitwise(found[:, ::2], exact[:, ::2], "max_logits")
