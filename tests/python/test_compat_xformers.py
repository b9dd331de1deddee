"""flashtile.compat.xformers: masks against their definitions written out, forward and backward, and what is refused."""

import doctest
import importlib
import inspect
import math

import pytest
import reference
import torch
from cases import BF16, F32
from compare import assert_accurate, assert_bitwise
from hypothesis import given, settings
from hypothesis import strategies as st
from theirs import assert_refuses

import flashtile
import flashtile.compat.xformers as xops
from flashtile.compat.xformers import fmha
from flashtile.compat.xformers.fmha import attn_bias as biases

F64 = torch.float64
LEFT, RIGHT, WINDOW = 3, 2, 4

# Which columns j of n a row i of m sees, by the words of xformers' documentation. A distance from the end is
# (m - i) or (n - j).
FIRST = {"": lambda i, j, m, n: j <= i, "Local": lambda i, j, m, n: (j <= i) & (j > i - WINDOW)}
LAST = {
    "": lambda i, j, m, n: n - j >= m - i,
    "Local": lambda i, j, m, n: (n - j >= m - i) & (n - j < m - i + WINDOW),
    "both": lambda i, j, m, n: (n - j <= m - i + LEFT) & (n - j >= m - i - RIGHT),
}


def all_of_them(i, j, m, n):
    return (i >= 0) & (j >= 0)


DENSE = {
    "LowerTriangularMask": ((), FIRST[""]),
    "LowerTriangularFromBottomRightMask": ((), LAST[""]),
    "LowerTriangularFromBottomRightLocalAttentionMask": ((WINDOW,), LAST["Local"]),
    "LocalAttentionFromBottomRightMask": ((LEFT, RIGHT), LAST["both"]),
}
BLOCKS = {  # how they are made of a BlockDiagonalMask
    "BlockDiagonalMask": (lambda mask: mask, all_of_them),
    "BlockDiagonalCausalMask": (lambda mask: mask.make_causal(), FIRST[""]),
    "BlockDiagonalCausalFromBottomRightMask": (lambda mask: mask.make_causal_from_bottomright(), LAST[""]),
    "BlockDiagonalCausalLocalAttentionMask": (lambda mask: mask.make_local_attention(WINDOW), FIRST["Local"]),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (
        lambda mask: mask.make_local_attention_from_bottomright(WINDOW),
        LAST["Local"],
    ),
}
PADDED = {  # their function and what it wants beside the lengths
    "BlockDiagonalPaddedKeysMask": ("from_seqlens", (), all_of_them),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": ("from_seqlens", (), LAST[""]),
    "BlockDiagonalLocalAttentionPaddedKeysMask": ("from_seqlens_local", (LEFT, RIGHT), LAST["both"]),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": ("from_seqlens_local", (WINDOW,), LAST["Local"]),
}
GAPPY = {"BlockDiagonalGappyKeysMask": all_of_them, "BlockDiagonalCausalWithOffsetGappyKeysMask": LAST[""]}
PAGED = ["PagedBlockDiagonalPaddedKeysMask", "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask"]
QUERIES = [5, 1, 9, 3]


def seen_in(rule, rows, columns):
    return rule(torch.arange(rows)[:, None], torch.arange(columns), rows, columns)


def seen_in_blocks(rule, queries, starts, lengths, columns):
    """(sum of queries, columns) bool, of keys that begin at `starts`."""
    seen, row = torch.zeros(sum(queries), columns, dtype=torch.bool), 0
    for rows, start, length in zip(queries, starts, lengths, strict=True):
        seen[row : row + rows, start : start + length] = seen_in(rule, rows, length)
        row += rows
    return seen


def begins(lengths):
    return [sum(lengths[:n]) for n in range(len(lengths))]


def tensors(rows, columns, batch=1, heads=(2,), heads_k=None, dtype=F32, width=16, width_v=24):
    generator = torch.Generator().manual_seed(rows + 31 * columns)
    heads_k = heads if heads_k is None else heads_k
    shapes = ((batch, rows, *heads, width), (batch, columns, *heads_k, width), (batch, columns, *heads_k, width_v))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def differentiated(function, inputs):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def check(bias, seen, inputs, **options):
    """Results and gradients of (B, M, H, K), and the bias written out."""
    mask = seen.expand(len(inputs[0]), 1, *seen.shape[-2:])
    found = differentiated(lambda *x: xops.memory_efficient_attention(*x, attn_bias=bias, **options), inputs)
    exact, rough = (
        differentiated(lambda *x: reference.attention(*x, mask=mask, dtype=x[0].dtype, **options)[0], given)
        for given in ([x.double() for x in inputs], inputs)
    )
    for what, *results in zip(("out", "dq", "dk", "dv"), found, exact, rough, strict=True):
        assert_accurate(*results, what, slack=1e-6 if inputs[0].dtype is F32 else 1e-3)
    if isinstance(bias, biases.AttentionBias):
        written = bias.materialize((3, 1, *seen.shape[-2:]), dtype=F64)
        assert torch.equal(
            written, torch.zeros(seen.shape, dtype=F64).masked_fill(~seen, -math.inf).expand(3, 1, -1, -1)
        )


@pytest.mark.parametrize("sizes", [(9, 9), (6, 11), (11, 6)])
@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_masks_of_one_sequence(name, sizes, dtype):
    arguments, rule = DENSE[name]
    inputs = tensors(*sizes, batch=2, dtype=dtype)
    check(getattr(biases, name)(*arguments), seen_in(rule, *sizes), inputs, scale=0.3)


@pytest.mark.parametrize("keys", [QUERIES, [n + 2 for n in QUERIES], [7, 4, 5, 0], [6, 12, 9, 8]], ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_masks_of_sequences(name, keys):
    """Whose lengths agree, differ by as much, or differ."""
    make, rule = BLOCKS[name]
    bias = make(biases.BlockDiagonalMask.from_seqlens(QUERIES, keys, device="cpu"))
    assert type(bias).__name__ == name
    seen = seen_in_blocks(rule, QUERIES, begins(keys), keys, sum(keys))
    check(bias, seen, tensors(sum(QUERIES), sum(keys)))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", PADDED)
def test_padded_keys(name, dtype):
    function, arguments, rule = PADDED[name]
    keys = [7, 2, 9, 0]
    bias = getattr(getattr(biases, name), function)(QUERIES, 10, keys, *arguments, device="cpu")
    seen = seen_in_blocks(rule, QUERIES, [0, 10, 20, 30], keys, 40)
    inputs = tensors(sum(QUERIES), 40, dtype=dtype)
    inputs[1][0, 7:10] = inputs[2][0, 7:10] = 0
    check(bias, seen, inputs)
    inputs[1][0, 7:10] = inputs[2][0, 7:10] = math.nan  # rows that do not count are not looked at
    assert xops.memory_efficient_attention(*inputs, attn_bias=bias).isfinite().all()


def test_windows_of_padded_keys():
    mask = biases.BlockDiagonalPaddedKeysMask.from_seqlens(QUERIES, 10, [7, 2, 9, 0], device="cpu")
    seen = seen_in_blocks(LAST["both"], QUERIES, [0, 10, 20, 30], [7, 2, 9, 0], 40)
    check(mask.make_local_attention(LEFT, RIGHT), seen, tensors(sum(QUERIES), 40))


@pytest.mark.parametrize("starts", [[0, 8, 10, 21, 24], [3, 8, 10, 21, 24]], ids=["from 0", "from 3"])
@pytest.mark.parametrize("name", GAPPY)
def test_keys_with_gaps(name, starts):
    keys = [5, 2, 9, 3]
    bias = getattr(biases, name).from_seqlens(QUERIES, starts, keys, device="cpu")
    seen = seen_in_blocks(GAPPY[name], QUERIES, starts[:-1], keys, 24)
    check(bias, seen, tensors(sum(QUERIES), 24))


@pytest.mark.parametrize("heads, width", [((2,), 16), ((2, 3), 16), ((2,), 12)], ids=["heads", "groups", "odd width"])
@pytest.mark.parametrize("name", PAGED)
def test_pages(name, heads, width):
    """Are rows that stand together, in another order."""
    keys, size = [7, 2, 9, 0], 4
    tables = torch.randperm(12, generator=torch.Generator().manual_seed(1), dtype=torch.int32).view(4, 3)
    bias = getattr(biases, name).from_seqlens(QUERIES, keys, tables, size)
    q, k, v = tensors(sum(QUERIES), 48, heads=heads, heads_k=(*heads[:-1], 1), width=width)
    k, v = (x.expand(*x.shape[:-2], heads[-1], -1) for x in (k, v))
    found = xops.memory_efficient_attention(q, k, v, attn_bias=bias)
    rows = (tables.long()[:, :, None] * size + torch.arange(size)).flatten()
    together = biases.BlockDiagonalPaddedKeysMask.from_seqlens(QUERIES, 12, keys, device="cpu")
    together = getattr(biases, name.removeprefix("Paged"))(together.q_seqinfo, together.k_seqinfo)
    expected = xops.memory_efficient_attention(q, k[:, rows], v[:, rows], attn_bias=together)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert type(together.make_paged(tables, size, type(bias))) is type(bias)
    lse = xops.memory_efficient_attention_forward_requires_grad(q, k, v, attn_bias=bias)[1]
    assert lse.shape == (1, *heads, sum(QUERIES))
    message = f"p is 0.5, expected 0 with a {name}"
    assert_refuses(xops.memory_efficient_attention, NotImplementedError, message, q, k, v, bias, 0.5)
    with pytest.raises(NotImplementedError, match=r"^attention_kvcache: q requires grad, expected inputs"):
        xops.memory_efficient_attention(q.requires_grad_(), k, v, attn_bias=bias)


lengths = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(lengths, st.sampled_from(sorted(BLOCKS)))
def test_sequences_alone(sizes, name):
    """Each gets what it gets without the others."""
    queries, keys = zip(*sizes, strict=True)
    make, _ = BLOCKS[name]

    def masked(queries, keys):
        return make(biases.BlockDiagonalMask.from_seqlens(queries, keys, device="cpu"))

    inputs = tensors(sum(queries), sum(keys))
    found = xops.memory_efficient_attention(*inputs, attn_bias=masked(queries, keys))
    parts = zip(*(x.split(lengths, 1) for x, lengths in zip(inputs, (queries, keys, keys), strict=True)), strict=True)
    pairs = zip(parts, sizes, strict=True)
    alone = [xops.memory_efficient_attention(*part, attn_bias=masked([m], [n])) for part, (m, n) in pairs]
    torch.testing.assert_close(found, torch.cat(alone, dim=1), rtol=0, atol=1e-5)


def test_biases_of_other_modules_are_known_by_their_names():
    """xformers' own have the same attributes."""
    masks = [biases.LowerTriangularMask(), biases.LocalAttentionFromBottomRightMask(LEFT, RIGHT)]
    blocks = biases.BlockDiagonalMask.from_seqlens(QUERIES, device="cpu")
    masks += [make(blocks) for make, _ in BLOCKS.values()]
    inputs = tensors(sum(QUERIES), sum(QUERIES))
    for mask in masks:
        other = type(type(mask).__name__, (), {})()
        vars(other).update(vars(mask))
        found, expected = (xops.memory_efficient_attention(*inputs, attn_bias=bias) for bias in (other, mask))
        assert_bitwise(found, expected, type(mask).__name__)


def test_three_dimensions_are_one_head():
    q, k, v = tensors(7, 9, batch=2, heads=())
    found = differentiated(lambda *x: xops.memory_efficient_attention(*x, xops.LowerTriangularMask()), (q, k, v))
    with_heads = [x[:, :, None] for x in (q, k, v)]
    expected = differentiated(
        lambda *x: xops.memory_efficient_attention(*x, xops.LowerTriangularMask()).squeeze(2), with_heads
    )
    for x, y in zip(found, expected, strict=True):
        assert_bitwise(x, y.reshape(x.shape))


@pytest.mark.parametrize("shared", ["expanded", "one", "none"])
def test_groups(shared):
    """(B, M, G, H, K): heads of a group may have the same keys, which get the gradients of all."""
    q, k, v = tensors(7, 9, batch=2, heads=(3, 4), heads_k=(3, 4 if shared == "none" else 1))
    bias, seen = biases.LowerTriangularFromBottomRightMask(), seen_in(LAST[""], 7, 9)[None, None]

    def grouped(q, k, v):
        k, v = (x.expand(-1, -1, -1, 4, -1) if shared == "expanded" else x for x in (k, v))
        out, lse = xops.memory_efficient_attention_forward_requires_grad(q, k, v, bias)
        assert lse.shape == (2, 3, 4, 7)
        assert torch.equal(out, xops.memory_efficient_attention(q, k, v, bias))
        return out

    def oracle(dtype):
        def attend(q, k, v):
            q, k, v = (x.to(dtype).flatten(2, 3) for x in (q, k, v))
            return reference.attention(q, k, v, mask=seen, dtype=dtype)[0].unflatten(2, (3, 4))

        return differentiated(attend, [x.to(dtype) for x in (q, k, v)])

    for what, *results in zip(
        ("out", "dq", "dk", "dv"), differentiated(grouped, (q, k, v)), oracle(F64), oracle(F32), strict=True
    ):
        assert_accurate(*results, what, slack=1e-6)


def test_expanded_heads_are_one():
    q, k, v = tensors(7, 9, heads=(4,), heads_k=(1,))
    found, expected = (
        differentiated(
            lambda q, k, v, n=n: xops.memory_efficient_attention(q, *(x.expand(-1, -1, n, -1) for x in (k, v))),
            (q, k, v),
        )
        for n in (4, 1)
    )
    for x, y in zip(found, expected, strict=True):
        assert_bitwise(x, y)


VISIBLE = torch.arange(9) < torch.tensor([[9], [4]])
PADDING = torch.zeros(2, 9).masked_fill(~VISIBLE, -math.inf)


@pytest.mark.parametrize("heads", [(), (3,), (2, 3)], ids=["one", "heads", "groups"])
def test_a_tensor_that_is_padding(heads):
    q, k, v = tensors(7, 9, batch=2, heads=heads)
    bias = PADDING[:, None, None] if len(heads) == 1 else PADDING[:, None, None, None] if heads else PADDING[:, None]
    bias = bias.expand(2, *heads, 7, 9)
    found = differentiated(lambda *x: xops.memory_efficient_attention(*x, attn_bias=bias), (q, k, v))

    def oracle(dtype):
        def attend(q, k, v):
            shape = q.shape[:-1]
            q, k, v = (x.to(dtype).reshape(*x.shape[:2], -1, x.shape[-1]) for x in (q, k, v))
            out = reference.attention(q, k, v, mask=VISIBLE[:, None, None].expand(2, 1, 7, 9), dtype=dtype)[0]
            return out.reshape(*shape, -1)

        return differentiated(attend, [x.to(dtype) for x in (q, k, v)])

    for what, *results in zip(("out", "dq", "dk", "dv"), found, oracle(F64), oracle(F32), strict=True):
        assert_accurate(*results, what, slack=1e-6)
    lse = xops.memory_efficient_attention_forward_requires_grad(q, k, v, attn_bias=bias)[1]
    assert lse.shape == (2, *(heads or (1,)), 7)


EVERYWHERE = torch.zeros(2, 3, 7, 9)
REFUSED = {
    "a number": EVERYWHERE[:, :1, :1].expand(2, 3, 7, 9) - 1,
    "rows": EVERYWHERE.clone(),
    "a mask": torch.ones(2, 1, 1, 9, dtype=torch.bool).expand(2, 3, 7, 9),
    "a parameter": PADDING.clone().requires_grad_()[:, None, None].expand(2, 3, 7, 9),
    "NaN": (PADDING * 0)[:, None, None].expand(2, 3, 7, 9),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_tensors_are_refused(case):
    message = (
        r"attn_bias is a tensor of shape \(2, 3, 7, 9\), torch.\w+, expected a mask of fmha.attn_bias, or one of 0"
    )
    message += ".*; nearest supported: flashtile.scaled_dot_product_attention"
    inputs = tensors(7, 9, batch=2, heads=(3,))
    assert_refuses(xops.memory_efficient_attention, NotImplementedError, message, *inputs, attn_bias=REFUSED[case])


def test_a_padding_wants_a_value_and_a_batch_for_each_key():
    q, k, v = tensors(7, 9, batch=2, heads=(3,))
    bias = PADDING[:, None, None].expand(2, 3, 7, 9)
    message = r"{} has shape \(., \d+, 3, \d+\), expected \(2, 9, 3, \d+\) = \(B, S_k, H_k, D"
    function = xops.memory_efficient_attention
    for attn_bias in (bias, None):
        for value in (v[:, :8], torch.cat((v, v), 1), v[:1], v[[0, 1, 0]]):
            assert_refuses(function, ValueError, message.format("v"), q, k, value, attn_bias, name="attention")
        for key in (k[:1], k[[0, 1, 0]]):
            assert_refuses(function, ValueError, message.format("k"), q, key, v, attn_bias, name="attention")


@pytest.mark.parametrize("p, error", [(math.nan, ValueError), ("x", TypeError)])
def test_what_is_no_probability_is_refused(p, error):
    for function in (xops.memory_efficient_attention, fmha.memory_efficient_attention_forward_requires_grad):
        assert_refuses(function, error, "dropout_p is ", *tensors(7, 9), p=p, name="attention")


def test_other_biases_are_refused():
    inputs = tensors(7, 7)
    for bias in (xops.LowerTriangularMask().add_bias(torch.zeros(7, 7)), object(), biases.AttentionBias()):
        message = f"attn_bias is of type {type(bias).__name__}, expected a mask of fmha.attn_bias; nearest supported: "
        assert_refuses(xops.memory_efficient_attention, NotImplementedError, message, *inputs, attn_bias=bias)
    with pytest.raises(NotImplementedError, match=r"^materialize: the bias is a \w+WithTensorBias"):
        xops.LowerTriangularMask().add_bias(torch.zeros(7, 7)).materialize((7, 7))


def test_what_does_not_fit():
    function, (q, k, v) = xops.memory_efficient_attention, tensors(18, 18, batch=2)
    mask = biases.BlockDiagonalMask.from_seqlens(QUERIES, device="cpu")
    assert_refuses(function, ValueError, "query has a batch of 2, expected 1, as attn_bias has seq", q, k, v, mask)
    q, k, v = (x[:1] for x in (q, k, v))
    assert_refuses(function, ValueError, "query has 17 rows, expected 18, as attn_bias has", q[:, :17], k, v, mask)
    assert_refuses(function, ValueError, "key has 17 rows, expected 18, as attn_bias has", q, k[:, 1:], v[:, 1:], mask)
    message = r"query, key and value have shapes \(1, 18, 2, 16\), \(18, 2, 16\), .* expected all of \(B, M, K\), "
    assert_refuses(function, ValueError, message, q, k[0], v[0])
    message = r"attn_bias has shape \(18, 18\), expected \(1, 2, 18, 18\)"
    assert_refuses(function, ValueError, message, q, k, v, torch.zeros(18, 18))
    assert_refuses(function, TypeError, "key is of type list, expected a torch.Tensor", q, [k], v)
    gaps = biases.BlockDiagonalGappyKeysMask.from_seqlens([18], [0, 9], [10], device="cpu")
    message = r"attn_bias is of keys \[\(0, 10\)\], expected those of each sequence behind those of the one before"
    assert_refuses(function, NotImplementedError, message, q, k[:, :9], v[:, :9], gaps)


def test_constructors_refuse_what_they_cannot_be():
    mask = biases.BlockDiagonalMask.from_seqlens([3, 4], device="cpu")
    padded = biases.BlockDiagonalPaddedKeysMask
    for make in (
        lambda: mask.make_local_attention(0),
        lambda: mask.make_local_attention_from_bottomright(-1),
        lambda: biases.LowerTriangularFromBottomRightMask().make_local_attention(0),
        lambda: biases.LocalAttentionFromBottomRightMask(-1, 0),
        lambda: padded.from_seqlens([1], 3, [2], device="cpu").make_local_attention(0, -1),
        lambda: padded.from_seqlens([1], 3, [4], device="cpu"),
        lambda: padded.from_seqlens([1, 2], 3, [3], device="cpu"),
        lambda: biases.BlockDiagonalMask.from_seqlens([1, 2], [3], device="cpu"),
        lambda: biases.BlockDiagonalGappyKeysMask.from_seqlens([1], [0], [1], device="cpu"),
        lambda: mask.split(torch.zeros(1, 8)),
        lambda: mask.materialize((7, 8)),
        lambda: biases.BlockDiagonalMask.from_seqlens([3], [4], device="cpu").split(torch.zeros(1, 3)),
        lambda: biases.BlockDiagonalMask.from_tensor_lists_qkv([torch.zeros(1, 2)], [torch.zeros(2, 2)]),
    ):
        with pytest.raises(ValueError, match=r"^\w+: .*expected"):
            make()


shapes = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(shapes)
def test_splitting_undoes_joining(sizes):
    queries = [torch.randn(batch, m, 2, 3) for batch, m, _ in sizes]
    keys = [torch.randn(batch, n, 2, 3) for batch, _, n in sizes]
    mask, x = biases.BlockDiagonalMask.from_tensor_list(queries)
    assert x.shape[:2] == (1, sum(batch * m for batch, m, _ in sizes))
    same, q, k, v = biases.BlockDiagonalMask.from_tensor_lists_qkv(queries, keys, keys)
    assert biases.BlockDiagonalMask.from_tensor_lists_qkv(queries, keys)[3] is None
    causal = mask.make_causal().to("cpu")
    for parts, given_ in ((causal.split(x), queries), (same.split_queries(q), queries), (same.split_kv(v), keys)):
        assert len(parts) == len(given_) and all(map(torch.equal, parts, given_))
    assert torch.equal(k, v)


def test_dropout():
    q, k, v = tensors(18, 18)
    mask = biases.BlockDiagonalCausalMask.from_seqlens(QUERIES, device="cpu")
    starts, options = mask.q_seqinfo.seqstart, dict(dropout_p=0.5, causal=True)
    torch.manual_seed(3)
    found = [xops.memory_efficient_attention(q, k, v, bias, 0.5) for bias in (xops.LowerTriangularMask(), mask)]
    torch.manual_seed(3)
    expected = flashtile.attention(q, k, v, **options)
    assert_bitwise(found[0], expected)
    expected = flashtile.attention_varlen(q[0], k[0], v[0], cu_seqlens_q=starts, cu_seqlens_k=starts, **options)
    assert_bitwise(found[1][0], expected)


def test_the_forward_alone():
    inputs = [x.requires_grad_() for x in tensors(7, 9, batch=2)]
    bias = xops.LowerTriangularMask()
    out = xops.memory_efficient_attention_forward(*inputs, bias)
    assert not out.requires_grad
    again, lse = xops.memory_efficient_attention_forward_requires_grad(*inputs, bias)
    assert_bitwise(out, again)
    seen = seen_in(FIRST[""], 7, 9)[None, None]
    exact, rough = (reference.attention(*inputs, mask=seen, dtype=dtype)[1] for dtype in (F64, F32))
    assert_accurate(lse, exact, rough, "lse", slack=1e-6)
    (found,) = torch.autograd.grad(lse.sum(), inputs[0])
    (exact,), (rough,) = (torch.autograd.grad(x.sum(), inputs[0]) for x in (exact, rough))
    assert_accurate(found, exact, rough, "dq", slack=1e-6)
    function = xops.memory_efficient_attention_forward_requires_grad
    assert_refuses(function, NotImplementedError, "p is 0.1, expected 0", *inputs, p=0.1)


def test_lse_of_sequences():
    q, k, v = tensors(18, 18)
    mask = biases.BlockDiagonalMask.from_seqlens(QUERIES, device="cpu")
    seen = seen_in_blocks(all_of_them, QUERIES, begins(QUERIES), QUERIES, 18)[None, None]
    lse = xops.memory_efficient_attention_forward_requires_grad(q, k, v, mask)[1]
    exact, rough = (reference.attention(q, k, v, mask=seen, dtype=dtype)[1] for dtype in (F64, F32))
    assert_accurate(lse, exact, rough, "lse", slack=1e-6)


def test_options_that_say_how():
    inputs = tensors(7, 7)
    expected = xops.memory_efficient_attention(*inputs)
    assert_bitwise(xops.memory_efficient_attention(*inputs, op=("forward", "backward"), output_dtype=F32), expected)
    message = r"output_dtype is torch.float64, expected None or torch.float32, as query; nearest supported: out.to\("
    assert_refuses(xops.memory_efficient_attention, NotImplementedError, message, *inputs, output_dtype=F64)


@pytest.mark.parametrize("keys", [QUERIES, [7, 4, 5, 0]], ids=["lengths agree", "lengths differ"])
def test_torch_compile(keys):
    inputs = tensors(18, sum(keys))
    sequences = biases.BlockDiagonalMask.from_seqlens(QUERIES, keys, device="cpu")
    for bias in (xops.LowerTriangularMask(), sequences, sequences.make_causal()):
        function = torch.compile(xops.memory_efficient_attention, fullgraph=True, backend="aot_eager")
        found, expected = (
            differentiated(lambda *x, f=f, bias=bias: f(*x, attn_bias=bias), inputs)
            for f in (function, xops.memory_efficient_attention)
        )
        for x, y in zip(found, expected, strict=True):
            assert_bitwise(x, y, type(bias).__name__)


def test_names():
    expected = ["query", "key", "value", "attn_bias", "p", "scale", "op", "output_dtype"]
    defaults = {"attn_bias": None, "p": 0.0, "scale": None, "op": None, "output_dtype": None}
    for name in ("", "_forward", "_forward_requires_grad"):
        function = getattr(xops, "memory_efficient_attention" + name)
        assert function is getattr(fmha, function.__name__)
        parameters = inspect.signature(function).parameters
        assert list(parameters) == expected
        assert {n: x.default for n, x in parameters.items() if x.default is not x.empty} == defaults
        assert [n for n, x in parameters.items() if x.kind is x.KEYWORD_ONLY] == ["op", "output_dtype"]
    assert xops.AttentionMask is xops.AttentionBias is fmha.AttentionBias is biases.AttentionBias
    assert all(map(torch.equal, xops.unbind(torch.arange(6).view(2, 3), 1), torch.arange(6).view(2, 3).unbind(1)))


@pytest.mark.parametrize("module", ["", ".fmha", ".fmha.attn_bias"])
def test_docstrings(module):
    results = doctest.testmod(importlib.import_module("flashtile.compat.xformers" + module))
    assert results.attempted > 0 and results.failed == 0
