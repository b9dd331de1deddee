"""max_logits: the largest score of each head, exactly, whatever hides scores and however large they are."""

import math

import pytest
import ragged
import reference
import torch
from cases import BF16, CASES, DEVICE_PARAMS, F16, F32, Case, on_devices
from compare import assert_accurate, assert_bitwise, score_rounding
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import Ragged
from test_column_mask import random_mask
from torch._subclasses.fake_tensor import FakeTensorMode

import flashtile
from flashtile.masks import ColumnMask


def without_others(cases):
    """No sink is a score, and dropout changes none."""
    return [case for case in cases if case.sinks is None and case.dropout_p == 0]


def check(found, q, k, **options):
    """In one entry, or all of a batch. A score is rounded once for 16 of its products at the most: the formula may be
    right by luck where few scores are the largest of a head."""
    exact, rough = (reference.max_logits(q, k, dtype=dtype, **options) for dtype in (torch.float64, F32))
    assert found.dtype is F32 and not found.requires_grad
    assert_accurate(found, exact, rough, "max_logits", q.shape[-1] / 16 * score_rounding(exact))


@pytest.mark.parametrize("case, device", on_devices(without_others(CASES)))
def test_dense(case, device):
    q, k, _ = case.tensors(device)
    check(flashtile.max_logits(q, k, **case.options(device)), q, k, **case.options(device))


@pytest.mark.parametrize("case, device", on_devices(without_others(ragged.CASES)))
def test_ragged(case, device):
    """Each sequence has its own, of the rows that count alone."""
    q, k, _ = case.tensors(device)
    found = flashtile.max_logits(q, k, **case.options(device))
    assert found.shape == (case.entries, case.heads_q)
    options = Case.options(case, device)
    slopes = options.pop("alibi_slopes", None)
    for b, (rows, keys) in enumerate(case.spans()):
        own = slopes[b : b + 1] if slopes is not None and slopes.dim() == 2 else slopes
        check(found[b : b + 1], q[None, rows], k[None, keys], alibi_slopes=own, **options)


@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_column_masks(device, head_dim, softcap):
    case = Case("masked", dtype=BF16, seqlen_q=300, seqlen_k=333, heads_q=4, heads_k=2, head_dim=head_dim)
    q, k, _ = case.tensors(device)
    mask = random_mask(300, 333, batch=2, heads=2, run=7).to(device)
    found = flashtile.max_logits(q, k, mask=mask, window=(90, 40), softcap=softcap)
    check(found, q, k, mask=mask.to_dense(), window=(90, 40), softcap=softcap)

    masks = [random_mask(257, 129, run=5, seed=1), ColumnMask.causal_document([3, 40]), ColumnMask.full(0, 5)]
    together = ColumnMask.concatenate(masks).to(device)
    cu_seqlens_q, cu_seqlens_k = together.cu_seqlens
    q, k = q.flatten(0, 1)[:300], k.flatten(0, 1)[:177]
    options = dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, softcap=softcap)
    found = flashtile.max_logits(q, k, mask=together, **options)
    rows, keys = ragged.used_rows(cu_seqlens_q, cu_seqlens_k)
    for b, mask in enumerate(masks):
        dense = mask.to(device).to_dense()
        check(found[b : b + 1], q[None, rows[b]], k[None, keys[b]], mask=dense, softcap=softcap)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_scores_that_are_exact(device, data):
    """Of integers so small that float32 holds all sums: the very largest one, on every device, however steep a row."""
    seqlen_q, seqlen_k = (data.draw(st.integers(1, 400)) for _ in range(2))
    causal, largest = data.draw(st.booleans()), data.draw(st.sampled_from([0, 1, 3, 200]))
    scale = data.draw(st.sampled_from([2.0**-30, 0.125, 1.0, 2.0**20]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    q, k = (
        torch.randint(-largest, largest + 1, (2, n, heads, 64), generator=generator).to(device, F16)
        for n, heads in ((seqlen_q, 4), (seqlen_k, 2))
    )
    found = flashtile.max_logits(q, k, causal=causal, scale=scale)
    exact = reference.max_logits(q, k, causal=causal, scale=scale).float()
    close = torch.where(exact == 0, found, 0)  # a logarithm of how many there are is left of scores that are all 0
    assert (close.abs() < 1e-15).all()
    assert_bitwise(torch.where(exact == 0, 0, found), exact, "max_logits")


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_lse_bounds_it(device):
    case = Case("bounds", dtype=BF16, seqlen_q=200, seqlen_k=500, heads_q=4, heads_k=2, causal=True, magnitude=3.0)
    q, k, v = case.tensors(device)
    largest = flashtile.max_logits(q, k, causal=True)
    _, lse = flashtile.attention(q, k, v, causal=True, return_lse=True)
    assert (largest <= lse.amax(dim=-1) + 1e-4).all()
    assert (largest >= lse.amax(dim=-1) - math.log(500) - 1e-4).all()


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_traced(device):
    """The same bits from a compiled call, shapes alone from fake tensors."""
    dense = Case("dense", heads_q=4, heads_k=2, causal=True)
    sequences = Ragged("ragged", heads_q=4, heads_k=2, lengths_q=(70, 0, 9), lengths_k=(99, 4, 9), tail=3)
    for case in (dense, sequences):
        (q, k, _), options = case.tensors(device), case.options(device)
        expected = flashtile.max_logits(q, k, **options)
        torch.compiler.reset()
        compiled = torch.compile(flashtile.max_logits, backend="aot_eager", fullgraph=True)
        assert_bitwise(compiled(q, k, **options), expected, "max_logits")
        with FakeTensorMode() as mode:
            fakes = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
            found = flashtile.max_logits(mode.from_tensor(q), mode.from_tensor(k), **fakes)
        assert found.shape == expected.shape and found.dtype is F32


def test_it_has_no_gradient():
    q, k, _ = Case("gradients", dtype=F32).tensors(requires_grad=True)
    assert not flashtile.max_logits(q, k, alibi_slopes=torch.ones(2, requires_grad=True)).requires_grad


@pytest.mark.parametrize("softcap", [2.0**57, 2.0**40])
def test_large_softcaps_bound_it(softcap):
    q = torch.full((1, 1, 1, 8), 1e9)
    found = flashtile.max_logits(q, q, scale=100.0, softcap=softcap)
    assert found.item() == pytest.approx(softcap * math.tanh(8e20 / softcap))


OFFSETS = torch.tensor([0, 5], dtype=torch.int32)
BAD = {
    "no tensor": (dict(q=None), TypeError, "max_logits: q is of type NoneType, expected a torch.Tensor"),
    "a window": (dict(window=3), TypeError, "max_logits: window is 3, expected"),
    "a scale": (dict(scale="x"), TypeError, "max_logits: scale is 'x', expected a number"),
    "a softcap": (dict(softcap=None), TypeError, "max_logits: softcap is None, expected"),
    "a negative softcap": (dict(softcap=-1.0), ValueError, r"max_logits: softcap is -1\.0, expected a number of at le"),
    "a softcap that would be none": (
        dict(softcap=3e17),
        ValueError,
        r"max_logits: softcap is 3e\+17, expected .* 2\^58",
    ),
    "a softcap that is none": (dict(softcap=math.nan), ValueError, "max_logits: softcap is nan, expected"),
    "a large scale": (dict(scale=-1e20), ValueError, r"max_logits: scale is -1e\+20, expected .* below 2\^60"),
    "slopes of int64": (
        dict(alibi_slopes=torch.ones(2).long()),
        TypeError,
        "attention: alibi_slopes has dtype torch.int64",
    ),
    "slopes of bool": (
        dict(alibi_slopes=torch.ones(2).bool()),
        TypeError,
        "attention: alibi_slopes has dtype torch.bool",
    ),
    "slopes of a list": (
        dict(alibi_slopes=[1.0]),
        TypeError,
        "attention: alibi_slopes is of type list, expected a torch",
    ),
    "a mask": (dict(mask=torch.ones(5, 5)), TypeError, "max_logits: mask is .*, expected a flashtile.masks.ColumnMask"),
    "no element": (dict(q=torch.ones(1, 5, 2, 0), k=torch.ones(1, 5, 2, 0)), ValueError, "attention: q has shape"),
    "a number for keys": (dict(k=torch.tensor(1.0)), ValueError, r"attention: k has shape \(\), expected 4 dimensions"),
    "a number for queries": (dict(q=torch.tensor(1.0)), ValueError, r"attention: q has shape \(\), expected 4 dim"),
    "other keys": (dict(k=torch.ones(1, 5, 2, 16)), ValueError, "attention: k has shape"),
    "rows of no sequence": (dict(seqused_k=OFFSETS), TypeError, "max_logits: cu_seqlens_q is of type NoneType"),
    "queries alone": (
        dict(q=torch.ones(5, 2, 8), k=torch.ones(5, 2, 8), cu_seqlens_q=OFFSETS),
        TypeError,
        "max_logits: cu_seqlens_k is of type NoneType",
    ),
    "keys alone": (
        dict(q=torch.ones(5, 2, 8), k=torch.ones(5, 2, 8), cu_seqlens_k=OFFSETS),
        TypeError,
        "max_logits: cu_seqlens_q is of type NoneType",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    wrong, exception, message = BAD[name]
    given = dict(q=torch.ones(1, 5, 2, 8), k=torch.ones(1, 5, 2, 8)) | wrong
    with pytest.raises(exception, match=f"^{message}"):
        flashtile.max_logits(given.pop("q"), given.pop("k"), **given)
