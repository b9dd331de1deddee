"""flashtile.scaled_dot_product_attention with a ColumnMask as attn_mask, against PyTorch's with it written out."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from cases import BF16, F32
from compare import assert_accurate, assert_bitwise, difference_rounding
from hypothesis import given, settings
from hypothesis import strategies as st
from test_column_mask import random_mask
from test_sdpa import ROUNDING, _nothing_said, differentiated, incoming, sdpa, served, tensors, written_out  # noqa: F401

import flashtile
from flashtile.masks import ColumnMask
from flashtile.sdpa import FallbackWarning

F64 = torch.float64


def seen_of(mask, query, is_causal=False):
    """(..., H or H_q, S_q, S_k), by the formula of the contract alone."""
    row = torch.arange(query.shape[-2])[:, None]
    r = mask.ranges.unsqueeze(-3)  # (B, H, 1, S_k, 4)
    seen = ~(((r[..., 0] <= row) & (row < r[..., 1])) | ((r[..., 2] <= row) & (row < r[..., 3])))
    if is_causal:
        seen = seen & torch.ones(seen.shape[-2:], dtype=torch.bool).tril()
    if query.dim() > 2 and seen.shape[1] not in (1, query.shape[-3]):
        seen = seen.repeat_interleave(query.shape[-3] // seen.shape[1], dim=1)
    if len(seen) > 1:
        return seen.reshape(*query.shape[:-3], *seen.shape[1:])
    return seen[(0,) * (4 - query.dim())]


def check(inputs, mask, is_causal=False, function=served, **options):
    seen, dtype = seen_of(mask, inputs[0], is_causal), inputs[0].dtype
    found = differentiated(lambda *x: function(*x, mask, is_causal=is_causal, **options), inputs, dtype)
    rough = differentiated(lambda *x: written_out(*x, seen), inputs, dtype)
    exact = differentiated(lambda *x: F.scaled_dot_product_attention(*x, seen, **options), inputs, F64)
    size = max([1.0, *(x.abs().max().item() for x in (*inputs, *exact) if x.numel() > 0)])
    rows = [x.transpose(-2, -3) if x.dim() > 2 else x[:, None] for x in (*inputs, incoming(found[0]), found[0])]
    of_dq, of_dk = difference_rounding(*rows[:4], None, out=rows[4])
    for what, mine, best, worse in zip(("out", "dq", "dk", "dv"), found, exact, rough, strict=True):
        slack = 32 * ROUNDING * size + {"dq": of_dq, "dk": of_dk}.get(what, 0.0)
        assert mine.dtype is dtype
        assert_accurate(mine, best.nan_to_num(), worse, what, slack=slack)


SHAPES = {  # query, key, entries of the mask, its heads
    "plain": ((2, 4, 33, 16), (2, 4, 33, 16), 1, 1),
    "a mask for each entry": ((2, 4, 33, 16), (2, 4, 40, 16), 2, 1),
    "a mask for each head": ((2, 4, 40, 16), (2, 4, 33, 16), 1, 4),
    "a mask for each": ((3, 2, 20, 24), (3, 2, 30, 24), 3, 2),
    "grouped, of keys": ((2, 6, 20, 16), (2, 2, 30, 16), 2, 2),
    "grouped, of queries": ((2, 6, 20, 16), (2, 2, 30, 16), 1, 6),
    "odd": ((2, 3, 17, 20), (2, 3, 19, 20), 2, 1),
    "five": ((2, 3, 4, 20, 16), (2, 3, 4, 25, 16), 6, 4),
    "five, one mask": ((2, 3, 4, 20, 16), (2, 3, 2, 25, 16), 1, 2),
    "three": ((6, 20, 16), (6, 25, 16), 1, 6),
    "three, grouped": ((6, 20, 16), (3, 25, 16), 1, 3),
    "two": ((20, 16), (25, 16), 1, 1),
    "no queries": ((2, 4, 0, 16), (2, 4, 7, 16), 2, 1),
    "no keys": ((2, 4, 5, 16), (2, 4, 0, 16), 1, 4),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("q, k, batch, heads", SHAPES.values(), ids=SHAPES)
def test_shapes(q, k, batch, heads, is_causal):
    mask = random_mask(q[-2], k[-2], batch, heads) if k[-2] else ColumnMask(torch.zeros(1, heads, 0, 4).int(), q[-2])
    check(tensors(q, k), mask, is_causal, enable_gqa=len(q) > 2 and q[-3] != k[-3])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_any_mask(data):
    size = st.integers(1, 30)
    seqlen_q, seqlen_k = data.draw(size, "S_q"), data.draw(size, "S_k")
    heads_k, group = data.draw(st.integers(1, 2), "H_k"), data.draw(st.integers(1, 3), "group")
    leading = data.draw(st.lists(st.integers(1, 2), max_size=2), "leading")
    heads = data.draw(st.sampled_from([1, heads_k, heads_k * group]), "heads of the mask")
    entries = data.draw(st.sampled_from([1, torch.Size(leading).numel()]), "entries of the mask")
    mask = random_mask(seqlen_q, seqlen_k, entries, heads, data.draw(st.integers(1, 5)), data.draw(st.integers(0, 99)))
    inputs = tensors((*leading, heads_k * group, seqlen_q, 16), (*leading, heads_k, seqlen_k, 16), dtype=F32)
    check(inputs, mask, data.draw(st.booleans(), "is_causal"), enable_gqa=group > 1)


FALLBACKS = {  # query, key, dtype, entries of the mask, its heads, is_causal
    "dtype": ((2, 4, 9, 16), (2, 4, 11, 16), F64, 2, 1, False),
    "dtype, causal": ((2, 4, 9, 16), (2, 4, 11, 16), F64, 2, 4, True),
    "wide": ((2, 4, 9, 264), (2, 4, 11, 264), F32, 1, 4, False),
    "wide, causal": ((2, 4, 11, 264), (2, 4, 9, 264), F32, 2, 1, True),
    "grouped": ((2, 6, 9, 16), (2, 2, 11, 16), F64, 2, 2, False),
    "five": ((2, 3, 6, 9, 16), (2, 3, 2, 11, 16), F64, 6, 2, True),
    "five, one mask": ((2, 3, 2, 9, 16), (2, 3, 2, 11, 16), F64, 1, 1, False),
    "three": ((6, 9, 16), (6, 11, 16), F64, 1, 6, True),
    "two": ((9, 16), (11, 16), F64, 1, 1, True),
    "broadcast keys": ((2, 4, 9, 16), (1, 1, 11, 16), F32, 2, 4, False),
    "broadcast queries": ((1, 1, 9, 16), (2, 4, 11, 16), F32, 2, 4, False),
}


@pytest.mark.parametrize("q, k, dtype, batch, heads, is_causal", FALLBACKS.values(), ids=FALLBACKS)
def test_pytorch_gets_the_mask_written_out(q, k, dtype, batch, heads, is_causal):
    inputs, mask = tensors(q, k, dtype=dtype), random_mask(q[-2], k[-2], batch, heads)
    options = {"enable_gqa": len(q) > 2 and q[-3] % k[-3] == 0 and q[-3] != k[-3] != 1}
    with pytest.warns(FallbackWarning) as warned:
        results = [sdpa(*inputs, mask, is_causal=is_causal, **options) for _ in range(2)]
    assert len(warned) == 1 and warned[0].filename == __file__
    larger = inputs[0] if inputs[0].numel() > inputs[1].numel() else inputs[1].new_empty(*k[:-2], q[-2], k[-1])
    seen = seen_of(mask, larger, is_causal)
    for out in results:
        expected = F.scaled_dot_product_attention(*inputs, seen, **options)
        torch.testing.assert_close(out, expected, equal_nan=True)


def test_dropout_is_that_of_attention():
    query, key, value = tensors((2, 4, 40, 16), (2, 4, 50, 16))
    mask = random_mask(40, 50, 2)
    torch.manual_seed(1)
    found = served(query, key, value, mask, 0.25)
    torch.manual_seed(1)
    expected = flashtile.attention(*(x.transpose(1, 2) for x in (query, key, value)), mask=mask, dropout_p=0.25)
    assert_bitwise(found, expected.transpose(1, 2))


def test_autocast():
    inputs, mask = tensors((2, 4, 40, 16), (2, 4, 50, 16)), random_mask(40, 50, 2)
    with torch.autocast("cpu", BF16):
        found = served(*inputs, mask)
    assert_bitwise(found, served(*(x.to(BF16) for x in inputs), mask))


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.filterwarnings("ignore::flashtile.sdpa.FallbackWarning")
def test_on_a_gpu(is_causal):
    """By Hopper's kernels, and on other GPUs by PyTorch's."""
    inputs = tensors((2, 6, 100, 64), (2, 2, 150, 64), dtype=BF16)
    mask = random_mask(100, 150, 2, 2)
    found = sdpa(*(x.cuda() for x in inputs), mask.to("cuda"), is_causal=is_causal, enable_gqa=True)
    exact = written_out(*(x.double() for x in inputs), seen_of(mask, inputs[0], is_causal))
    assert_accurate(found.cpu(), exact, written_out(*inputs, seen_of(mask, inputs[0], is_causal)))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("seqlen_k", [30, 50])
def test_in_a_compiled_function(is_causal, dtype, seqlen_k):
    """The mask from outside, and one that is made inside; no graph breaks, and nothing is said."""
    inputs, mask = tensors((2, 4, 40, 16), (2, 4, seqlen_k, 16), dtype=dtype), random_mask(40, seqlen_k, 2)

    def made(query, key, value, ranges):
        return sdpa(query, key, value, ColumnMask(ranges, query.shape[-2]), is_causal=is_causal)

    def given_mask(query, key, value, mask):
        return sdpa(query, key, value, mask, is_causal=is_causal)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        expected = sdpa(*inputs, mask, is_causal=is_causal)
        warnings.simplefilter("error", FallbackWarning)
        for function, last in ((made, mask.ranges), (given_mask, mask)):
            found = torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs, last)
            torch.testing.assert_close(found, expected, equal_nan=True)


PLAIN = ((2, 4, 9, 16), (2, 4, 11, 16))
WRONG = {  # query, key, the mask, what is said of it
    "rows": (*PLAIN, random_mask(8, 11), ValueError, r"S_q=8, .*, expected S_q = 9 and S_k = 11"),
    "columns": (*PLAIN, random_mask(9, 10), ValueError, r"S_k=10, .*, expected S_q = 9 and S_k = 11"),
    "batch": (*PLAIN, random_mask(9, 11, 3), ValueError, "B=3, .*, expected B = 1 or 2, the leading dim"),
    "batch of five": ((2, 3, 1, 9, 8), (2, 3, 1, 11, 8), random_mask(9, 11, 3), ValueError, "expected B = 1 or 6, "),
    "batch of three": ((4, 9, 8), (4, 11, 8), random_mask(9, 11, 4), ValueError, "expected B = 1 or 1, "),
    "heads": (*PLAIN, random_mask(9, 11, 1, 2), ValueError, "H=2, .*, expected H = 1, H_k = 4 or H_q = 4"),
    "ragged": (*PLAIN, ColumnMask.concatenate([random_mask(9, 11)]), ValueError, "expected one of equally long seq"),
    "device": (*PLAIN, random_mask(9, 11).to("meta"), ValueError, "on meta, expected cpu, as query"),
}


@pytest.mark.parametrize("q, k, mask, error, message", WRONG.values(), ids=WRONG)
def test_misfits_are_named(q, k, mask, error, message):
    for dtype in (F32, F64):  # whoever would compute
        with pytest.raises(error, match=rf"^scaled_dot_product_attention: attn_mask is [^\n]*{message}"):
            sdpa(*tensors(q, k, dtype=dtype), mask)


def test_other_operands_are_named():
    inputs = tensors(*PLAIN)
    nested = torch.nested.nested_tensor([torch.zeros(9, 16)])
    for query in (None, nested, torch.zeros(16)):
        with pytest.raises(TypeError, match=r"^scaled_dot_product_attention: attn_mask is ColumnMask.* query is no "):
            sdpa(query, *inputs[1:], random_mask(9, 11))
    with pytest.raises(ValueError, match=r"^scaled_dot_product_attention: key has shape"):
        sdpa(inputs[0][..., :8], *inputs[1:], random_mask(9, 11))
