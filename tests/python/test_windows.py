"""Windows of negative distances: a band on one side of the diagonal, of which some rows, or all, see nothing."""

import dataclasses
import math

import cached
import pytest
import ragged
import reference
import test_backward
import test_column_mask
import test_forward
import test_kvcache
import torch
from cached import Cached
from cases import BF16, DEVICE_PARAMS, F16, F32, SEED, Case, on_devices
from compare import assert_accurate, assert_bitwise
from ragged import Ragged

import flashtile

WINDOWS = (
    (None, -1),
    (100, -50),
    (-50, 100),
    (-200, None),
    (-30, 60),
    (None, -10000),  # nothing, as the next
    (-10000, None),
    (-3, 2),  # nothing, though both ends lie within
)
OPTIONS = (
    {},
    {"softcap": 5.0, "magnitude": 4.0},
    {"alibi": "per head"},
    {"sinks": 0.0},
    {"dropout_p": 0.2},
    {"sinks": 0.0, "dropout_p": 0.2, "alibi": "per batch and head", "softcap": 10.0},
    {"scale": -0.2, "alibi": "per head"},
)
WIDTHS = ((64, 64), (96, 72), (128, 128), (192, 128), (256, 256))


def _dtype_and_widths(i):
    """Of rows of few keys, float32 has no room for the rounding of long sums."""
    dtype = (F16, BF16, F32, BF16)[i % 4]
    dim, dim_v = WIDTHS[i % (2 if dtype is F32 else 5)]
    return dict(dtype=dtype, head_dim=dim, head_dim_v=dim_v)


def _dense():
    """Each axis is walked while the others take turns; their lengths have no factor in common."""
    cases = []

    def add(name, **fields):
        i = len(cases)
        cases.append(Case(name, causal=i % 3 == 0, **_dtype_and_widths(i), **OPTIONS[i % 7], **fields))

    for window in WINDOWS:
        name = f"window{window[0]}_{window[1]}"
        for seqlen_q, seqlen_k in ((300, 300), (150, 500), (500, 150), (65, 30)):
            for heads_q, heads_k in ((4, 2), (3, 3), (12, 1)):
                sizes = dict(seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=heads_q, heads_k=heads_k)
                add(f"{name}_S{seqlen_q}x{seqlen_k}_H{heads_q}", window=window, **sizes)
    far = dict(batch=1, heads_q=2, heads_k=1)
    for window in ((None, -700), (-700, None), (900, -400), (-400, 900), (1000, -900)):
        name = f"far{window[0]}_{window[1]}"
        for seqlen_q, seqlen_k in ((1100, 1100), (40, 3001), (3001, 40)):  # of the second, thread blocks share the keys
            add(f"{name}_S{seqlen_q}x{seqlen_k}", window=window, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **far)
    return cases


def _ragged():
    uneven = dict(lengths_q=(130, 0, 77, 1, 200), lengths_k=(150, 20, 77, 90, 129))
    unused = dict(lengths_q=(90, 0, 70, 64), lengths_k=(120, 30, 65, 64), used_q=(70, 0, 0, 64), used_k=(97, 13, 65, 0))
    many = dict(lengths_q=(20,) * 35 + (300,), lengths_k=(30,) * 35 + (450,))  # more than find their order alone
    cases = []
    for window in WINDOWS:
        for lengths in (uneven, unused, many):
            i = len(cases)
            fields = dict(causal=i % 5 == 0, heads_q=(4, 2, 8)[i % 3], heads_k=2, **_dtype_and_widths(i))
            name = f"window{window[0]}_{window[1]}_{i % 3}"
            cases.append(Ragged(name, window=window, **fields, **lengths, **OPTIONS[i % 7]))
    return cases


def _cached():
    layouts = ({}, {"page_size": 16}, {"page_size": 64, "shared": True}, {"indexed": True}, {"num_splits": 3})
    queries = (
        {"seqlen_q": 1},
        {"seqlen_q": 5, "new": 5},
        {"seqlen_q": 150, "held": (300, 40, 700, 130)},  # Hopper's forward kernel goes over these
        {"lengths_q": (1, 0, 70, 17), "held": (90, 40, 0, 130), "new": 0},
    )
    cases = []
    for window in WINDOWS:
        for sizes in queries:
            i = len(cases)
            options = {name: x for name, x in OPTIONS[i % 7].items() if name != "dropout_p"}
            name = f"window{window[0]}_{window[1]}_{i % 4}"
            chosen = dict(causal=i % 3 == 0, **_dtype_and_widths(i // 2))
            cases.append(Cached(name, window=window, **chosen, **sizes, **layouts[i % 5], **options))
    return cases


DENSE, RAGGED, CACHED = _dense(), _ragged(), _cached()


@pytest.mark.parametrize("case, device", on_devices(DENSE))
def test_forward_of_each_case(case, device, attention):
    test_forward.check(attention, case, *case.tensors(device), **case.options(device))


@pytest.mark.parametrize("case, device", on_devices(DENSE))
def test_backward_of_each_case(case, device, attention, gradients):
    test_backward.check(case, device, attention, gradients, False)


@pytest.mark.parametrize("case, device", on_devices(DENSE, ["cuda"]))
def test_deterministic_backward(case, device, attention, gradients):
    """Tiles of queries wait for the blocks of keys that they see, and for no others."""
    test_backward.check(case, device, attention, gradients, True)


@pytest.mark.parametrize("case, device", on_devices(RAGGED))
def test_forward_of_each_ragged_case(case, device, attention_varlen):
    options = case.options(device)
    test_forward.check(attention_varlen, case, *case.tensors(device), formula=ragged.attention, **options)


@pytest.mark.parametrize("case, device", on_devices(RAGGED))
def test_backward_of_each_ragged_case(case, device, attention_varlen, gradients):
    test_backward.check(case, device, attention_varlen, gradients, False, ragged.attention)


@pytest.mark.parametrize("case, device", on_devices(RAGGED, ["cuda"]))
def test_deterministic_backward_of_each_ragged_case(case, device, attention_varlen, gradients):
    test_backward.check(case, device, attention_varlen, gradients, True, ragged.attention)


@pytest.mark.parametrize("case, device", on_devices(CACHED))
def test_each_cached_case(case, device, attention_kvcache):
    test_kvcache.check(case, device, attention_kvcache)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_under_a_column_mask(device, window, head_dim):
    """Whose blocks are found for tiles of queries, and for tiles of keys."""
    mask = test_column_mask.random_mask(300, 400, heads=2, run=40)
    q, k, v = (
        test_column_mask.randn(device, BF16, 2, rows, heads, head_dim, seed=seed)
        for seed, (rows, heads) in enumerate(((300, 4), (400, 2), (400, 2)))
    )
    for options in ({}, {"causal": True}, {"deterministic": True}):
        test_column_mask.check(mask, q, k, v, window=window, **options)


NOTHING = ((None, -10000), (-10000, None), (-3, 2), (10**30, -(10**30)), (-(2**63), 2**63), (None, -(2**31)))


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("window", NOTHING, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(300, 200), (20, 3000), (1, 1)])
def test_rows_that_see_nothing(device, window, head_dim, seqlen_q, seqlen_k, attention, gradients):
    """Not a key or value is read, so these may be anything."""
    q = torch.randn(2, seqlen_q, 4, head_dim).to(device, BF16).requires_grad_()
    k, v = (torch.full((2, seqlen_k, 2, head_dim), math.nan, dtype=BF16, device=device) for _ in "kv")
    k.requires_grad_(), v.requires_grad_()
    for causal in (False, True):
        for deterministic in (False, True):
            options = dict(window=window, causal=causal, deterministic=deterministic)
            out, lse = attention(q, k, v, return_lse=True, **options)
            assert not out.any() and (lse == -math.inf).all()
            for what, x in zip(("dq", "dk", "dv"), gradients(out.sum(), (q, k, v)), strict=True):
                assert not x.any(), what
    sinks = torch.tensor([1.0, -2.0, 0.0, 5.0], device=device)
    out, lse = attention(q, k, v, return_lse=True, window=window, sinks=sinks)
    assert not out.any() and torch.allclose(lse, sinks[:, None].expand_as(lse))


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_distance(device, side, head_dim, attention):
    """A window of one column that goes through all tiles, and beyond them on both sides."""
    q, k, v = (torch.randn(1, rows, 1, head_dim).to(device, F16) for rows in (260, 330, 330))
    for distance in (*range(0, 270, 7), 63, 64, 65, 127, 128, 129, 191, 192, 193, 329, 330, 331, 400):
        to = side * distance
        out, lse = attention(q, k, v, window=(-to, to), return_lse=True)
        column = torch.arange(260, device=device) + 70 + to
        sees = (column >= 0) & (column < 330)
        expected = torch.zeros_like(out)
        expected[:, sees] = v[:, column[sees]]
        assert_bitwise(out, expected)
        assert torch.equal(lse[0, 0] > -math.inf, sees)


def chunks(length, count):
    return [slice(i * length // count, (i + 1) * length // count) for i in range(count)]


@pytest.mark.parametrize("device, dtype", test_column_mask.DEVICE_AND_DTYPE)
@pytest.mark.parametrize("window", [(None, 0), (100, 0), (60, 30), (None, None), (-20, 90)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(420, 420), (200, 500)])
def test_chunks_of_queries_and_keys_make_the_whole(device, dtype, window, head_dim, seqlen_q, seqlen_k, attention):
    """As where several devices have a part of a sequence each: the window moves with the chunks."""
    case = Case("chunks", dtype=dtype, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=4, heads_k=2, head_dim=head_dim)
    q, k, v = inputs = case.tensors(device, requires_grad=True)
    rows = []
    for queries in chunks(seqlen_q, 3):
        parts = []
        for keys in chunks(seqlen_k, 4):
            moved = (keys.stop - seqlen_k) - (queries.stop - seqlen_q)
            left, right = window
            sides = (None if left is None else left + moved, None if right is None else right - moved)
            parts.append(attention(q[:, queries], k[:, keys], v[:, keys], window=sides, return_lse=True))
        outs, lses = zip(*parts, strict=True)
        rows.append(flashtile.combine([x.float() for x in outs], list(lses)))
    out, lse = torch.cat([x for x, _ in rows], 1), torch.cat([x for _, x in rows], 2)
    assert out.dtype is F32
    dout, dlse = case.incoming(out, lse)
    dlse = dlse.where(lse > -math.inf, 0)
    found = torch.autograd.grad([out, lse.clamp(min=-1e30)], inputs, [dout, dlse])

    def of_whole(dtype):
        x = [y.detach().to(dtype).requires_grad_() for y in inputs]
        out, lse = reference.attention(*x, window=window, dtype=dtype)
        grads = torch.autograd.grad([out, lse.clamp(min=-1e30)], x, [dout.to(dtype), dlse.to(dtype)])
        return out.detach(), lse.detach(), *grads

    exact, rough = of_whole(torch.float64), of_whole(dtype)
    slack = 4 * torch.finfo(dtype).eps + 32 * torch.finfo(F32).eps  # of parts, each of which is rounded
    for what, x, a, b in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *found), exact, rough, strict=True):
        size = a[a.isfinite()].abs().max().item()
        assert_accurate(x.detach(), a, b, what, slack=slack * size)


@pytest.mark.gpu
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("head_dim, head_dim_v", [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("batch, heads_k", [(6, 4), (2, 1)])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1100, 1100), (300, 1500), (1500, 300)])
def test_many_tiles_in_order(window, head_dim, head_dim_v, batch, heads_k, seqlen_q, seqlen_k):
    """Many more blocks of keys than multiprocessors, or few, which several thread blocks share. A block waits for those
    before it that the same queries see: where it waited for another one, this would not end."""
    shapes = ((seqlen_q, 8, head_dim), (seqlen_k, heads_k, head_dim), (seqlen_k, heads_k, head_dim_v))
    q, k, v = (torch.randn(batch, *shape, dtype=BF16, device="cuda", requires_grad=True) for shape in shapes)
    dout = torch.randn(batch, seqlen_q, 8, head_dim_v, dtype=BF16, device="cuda")

    def gradients(deterministic):
        out = flashtile.attention(q, k, v, window=window, deterministic=deterministic, dropout_p=0.1, seed=SEED)
        return torch.autograd.grad(out, (q, k, v), dout)

    first = gradients(True)
    for _ in range(5):
        for what, a, b in zip(("dq", "dk", "dv"), gradients(True), first, strict=True):
            assert_bitwise(a, b, what)
    for a, b in zip(first, gradients(False), strict=True):
        atol = 8 * torch.finfo(BF16).eps * b.abs().max().item()
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=atol)


def test_a_window_that_causal_leaves_nothing_of(attention):
    case = Case("none", dtype=F32, window=(-5, 20), causal=True)
    out, lse = attention(*case.tensors(), return_lse=True, **case.options())
    assert not out.any() and (lse == -math.inf).all()
    seen = dataclasses.replace(case, causal=False)
    assert attention(*seen.tensors(), **seen.options()).any()


def test_cases_see_nothing_some_and_all():
    """Those of caches, too, have rows that see a key."""
    shares = [reference.visible(x.seqlen_q, x.seqlen_k, x.causal, x.window).float().mean() for x in DENSE]
    assert min(shares) == 0 and sum(0 < share < 0.5 for share in shares) > len(shares) / 3
    blind = [cached.attention(x.arguments())[1].isneginf().float().mean().item() for x in CACHED if x.sinks is None]
    assert min(blind) < 0.2 and max(blind) == 1
