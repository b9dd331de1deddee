"""Attention under a ColumnMask, against the formula with the mask written out."""

import itertools

import pytest
import reference
import torch
from cases import BF16, DEVICE_PARAMS, F32, SEED
from compare import assert_accurate, assert_bitwise, difference_rounding, score_rounding, sink_rounding
from hypothesis import given, settings
from hypothesis import strategies as st

import flashtile
from flashtile.masks import ColumnMask

DEVICE_AND_DTYPE = [
    pytest.param(*device.values, BF16, marks=device.marks) if hasattr(device, "values") else pytest.param(device, dtype)
    for device in DEVICE_PARAMS
    for dtype in (F32, BF16)
]


def randn(device, dtype, *shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def random_mask(seqlen_q, seqlen_k, batch=1, heads=1, run=1, seed=0):
    """Intervals alike for `run` neighbouring columns; some columns have one, some two, and one is hidden altogether."""
    generator = torch.Generator().manual_seed(seed)
    columns = -(-seqlen_k // run)
    bounds = torch.randint(0, seqlen_q + 1, (batch, heads, columns, 4), generator=generator).sort(-1).values
    bounds[..., :2] *= torch.rand(batch, heads, columns, 1, generator=generator) < 0.5
    ranges = bounds.int().repeat_interleave(run, dim=2)[:, :, :seqlen_k].contiguous()
    ranges[:, :, seqlen_k // 2] = torch.tensor([0, seqlen_q, 0, 0])
    return ColumnMask(ranges, seqlen_q)


def check(mask, q, k, v, *, gradients=True, **options):
    """out, lse and, with `gradients`, dq, dk and dv of a loss of both."""
    mask = mask.to(q.device)
    sinks = options.get("sinks")
    inputs = [x for x in (q, k, v, sinks) if x is not None]
    names = ["dq", "dk", "dv", "dsinks"][: len(inputs)]

    def results(attend, dtype):
        x = [y.detach().to(dtype if y is not sinks or dtype != BF16 else F32).requires_grad_() for y in inputs]
        kept = {**options, "sinks": x[3]} if sinks is not None else options
        out, lse = attend(*x[:3], **kept)
        found = {"out": out.detach(), "lse": lse.detach()}
        if gradients:
            dout = randn(q.device, q.dtype, *out.shape, seed=1).to(out.dtype)
            dlse = randn(q.device, F32, *lse.shape, seed=2).to(lse.dtype)
            loss = (out * dout).sum() + torch.where(lse.isfinite(), lse * dlse, 0).sum()
            found.update(zip(names, torch.autograd.grad(loss, x), strict=True))
        return found

    found = results(lambda *x, **o: flashtile.attention(*x, mask=mask, return_lse=True, **o), q.dtype)
    dense = mask.to_dense()

    def formula(dtype):
        def attend(*x, deterministic=None, **options):
            return reference.attention(*x, mask=dense, dtype=dtype, **options)

        return results(attend, dtype)

    exact, rough = formula(torch.float64), formula(q.dtype)
    dout = randn(q.device, q.dtype, *found["out"].shape, seed=1)
    rounding = difference_rounding(q, k, v, dout, out=found["out"])
    slack = {"lse": score_rounding(exact["lse"]), "dq": rounding[0], "dk": rounding[1]}
    if sinks is not None:
        slack["dsinks"] = sink_rounding(found["out"], found["lse"], dout, sinks, keys=k.shape[1])
    for what, x in found.items():
        assert_accurate(x, exact[what], rough[what], what, slack=slack.get(what, 0.0))


SHAPES = [  # B, S_q, S_k, H_q, H_k, D, masks of an entry, entries of the mask, columns alike
    (2, 100, 130, 4, 2, 64, 1, 2, 1),
    (2, 300, 300, 4, 2, 40, 2, 1, 7),
    (1, 257, 511, 4, 1, 128, 4, 1, 1),
    (2, 33, 500, 4, 4, 96, 1, 1, 60),
    (1, 700, 650, 2, 1, 72, 2, 1, 150),
    (1, 1, 200, 4, 2, 128, 2, 1, 1),
]


@pytest.mark.parametrize("device, dtype", DEVICE_AND_DTYPE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("band", [{}, {"causal": True}, {"window": (40, 25)}], ids=["", "causal", "window"])
def test_random_intervals(device, dtype, shape, band):
    batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim, masks, entries, run = shape
    mask = random_mask(seqlen_q, seqlen_k, entries, masks, run)
    q = randn(device, dtype, batch, seqlen_q, heads_q, head_dim)
    k, v = (randn(device, dtype, batch, seqlen_k, heads_k, head_dim, seed=seed) for seed in (3, 4))
    check(mask, q, k, v, **band)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("head_dim, head_dim_v", [(8, 8), (64, 128), (128, 64), (160, 160), (192, 128), (256, 256)])
def test_every_head_dimension(device, head_dim, head_dim_v):
    q, k = (randn(device, BF16, 1, 200, heads, head_dim, seed=seed) for seed, heads in ((0, 4), (1, 2)))
    v = randn(device, BF16, 1, 200, 2, head_dim_v, seed=2)
    check(random_mask(200, 200, run=3), q, k, v)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 15.0},
        {"softcap": 1000.0},
        {"softcap": 1000.0, "window": (90, None), "dropout_p": 0.2, "seed": SEED},
        {"alibi_slopes": [0.1, 0.02]},
        {"sinks": [0.5, -1.0]},
        {"dropout_p": 0.2, "seed": SEED},
        {"softcap": 15.0, "dropout_p": 0.2, "seed": SEED, "causal": True},
        {"scale": 0.3, "sinks": [0.0, 3.0]},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_other_options(device, options, head_dim):
    """With so large a softcap Hopper leaves the call to Ampere's kernels."""
    options = {name: torch.tensor(x, device=device) if isinstance(x, list) else x for name, x in options.items()}
    q, k, v = (randn(device, BF16, 2, 300, heads, head_dim, seed=heads) for heads in (2, 1, 1))
    check(random_mask(300, 300, heads=2, run=20), q, k, v, **options)


KINDS = {
    "causal_document": ColumnMask.causal_document([100, 1, 50, 149]),
    "document": ColumnMask.document([100, 1, 50, 149]),
    "share_question": ColumnMask.share_question([(60, [40, 80]), (20, [50, 50])]),
    "global_sliding_window": ColumnMask.global_sliding_window(300, 20, (30, 30)),
    "prefix_document": ColumnMask.prefix_document([(30, 100), (0, 50), (150, 150)]),
    "causal_blockwise": ColumnMask.causal_blockwise([100, 60, 140]),
    "qk_sparse": ColumnMask.qk_sparse(300, [(10, 50), (200, 260)]),
    "image_blocks": ColumnMask.image_blocks([(5, 60), (200, 210)], 300),
    "chunked": ColumnMask.chunked(300, 64),
    "tree": ColumnMask.tree([-1, 0, 1, 1, 0, 4], context=294),
}


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(device, kind):
    mask = KINDS[kind]
    k, v = (randn(device, BF16, 1, 300, 1, 64, seed=seed) for seed in (1, 2))
    check(mask, randn(device, BF16, 1, mask.seqlen_q, 2, 64), k, v)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_mask_that_says_what_an_option_says(device, head_dim):
    q, k, v = (randn(device, BF16, 1, 500, heads, head_dim, seed=heads) for heads in (4, 2, 2))
    for mask, options in (
        (ColumnMask.full(500, 500), {}),
        (ColumnMask.causal(500, 500), {"causal": True}),
        (ColumnMask.sliding_window(500, 100), {"window": (99, 0)}),
    ):
        found, lse = flashtile.attention(q, k, v, mask=mask.to(device), return_lse=True)
        expected, lse_of_it = flashtile.attention(q, k, v, return_lse=True, **options)
        torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=0.02)
        torch.testing.assert_close(lse, lse_of_it, rtol=0, atol=1e-4)
        again = flashtile.attention(q, k, v, mask=mask.to(device), **options)
        torch.testing.assert_close(again.float(), expected.float(), rtol=0, atol=0.02)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_hidden_rows_heads_and_masks(device):
    """A row that sees nothing has out = 0, lse = -inf and no gradient, whole heads too."""
    q, k, v = (randn(device, BF16, 1, 400, 2, 64, seed=seed).requires_grad_() for seed in range(3))
    ranges = torch.zeros(1, 2, 400, 4, dtype=torch.int32)
    ranges[:, 0, :, :2] = torch.tensor([130, 290])
    ranges[:, 1, :, 1] = 400
    out, lse = flashtile.attention(q, k, v, mask=ColumnMask(ranges.to(device), 400), return_lse=True)
    gradients = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    for x in (out, gradients[0]):
        assert x[0, 130:290, 0].eq(0).all() and x[0, :, 1].eq(0).all() and x[0, :130, 0].ne(0).any()
    assert lse[0, 0, 130:290].isneginf().all() and lse[0, 1].isneginf().all() and lse[0, 0, 290:].isfinite().all()
    assert all(x[0, :, 1].eq(0).all() for x in gradients[1:])


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_values_that_no_mask_should_have(device):
    """Kernels take them literally, and stay in bounds."""
    least, most = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
    odd = torch.tensor([[least, 50, 60, most], [most, least, 200, 100], [-5, -2, 99, 98], [least, most, most, least]])
    ranges = odd.int().repeat(75, 1)[None, None]
    q, k, v = (randn(device, BF16, 1, 300, 1, 64, seed=seed) for seed in range(3))
    check(ColumnMask(ranges, 300), q, k, v)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("softcap, deterministic", [(0.0, False), (0.0, True), (1000.0, True)])
def test_ragged(device, head_dim, softcap, deterministic):
    """Each sequence has what it has alone."""
    options = {"softcap": softcap, "deterministic": deterministic}
    masks = [
        ColumnMask.causal_document([3, 40]),
        ColumnMask.full(0, 5),
        ColumnMask.sliding_window(300, 90),
        ColumnMask.causal(30, 50),
        random_mask(257, 129, run=5),
    ]
    mask = ColumnMask.concatenate(masks).to(device)
    cu_seqlens_q, cu_seqlens_k = mask.cu_seqlens
    rows, columns = (x.tolist() for x in mask.cu_seqlens)
    q = randn(device, BF16, rows[-1], 4, head_dim).requires_grad_()
    k, v = (randn(device, BF16, columns[-1], 2, head_dim, seed=seed).requires_grad_() for seed in (1, 2))
    dout = randn(device, BF16, rows[-1], 4, head_dim, seed=3)
    out = flashtile.attention_varlen(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, mask=mask, **options
    )
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    pairs = zip(masks, itertools.pairwise(rows), itertools.pairwise(columns), strict=True)
    for alone, (begin, end), (first, last) in pairs:
        if begin == end:
            continue
        own = [q[begin:end], k[first:last], v[first:last]]
        own = [x.detach()[None].requires_grad_() for x in own]
        expected = flashtile.attention(*own, mask=alone.to(device), **options)
        torch.testing.assert_close(out[begin:end].float(), expected[0].float(), rtol=0, atol=0.02)
        parts = gradients[0][begin:end], gradients[1][first:last], gradients[2][first:last]
        for x, y in zip(parts, torch.autograd.grad(expected, own, dout[None, begin:end]), strict=True):
            torch.testing.assert_close(x.float(), y[0].float(), rtol=0, atol=0.02 * y.abs().max().item() + 1e-3)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_intervals(data):
    """On the CPU, of any shape."""
    seqlen_q, seqlen_k = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 70))
    group, heads_k = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    masks = data.draw(st.sampled_from([1, heads_k, heads_k * group]))
    mask = random_mask(seqlen_q, seqlen_k, 1, masks, data.draw(st.integers(1, 20)), data.draw(st.integers(0, 99)))
    q = randn("cpu", F32, 1, seqlen_q, heads_k * group, 16)
    k, v = (randn("cpu", F32, 1, seqlen_k, heads_k, 16, seed=seed) for seed in (1, 2))
    check(mask, q, k, v, causal=data.draw(st.booleans()))


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_compiled_and_under_vmap(device):
    q, k, v = (randn(device, BF16, 2, 200, 2, 64, seed=seed) for seed in range(3))
    mask = random_mask(200, 200, 2, run=9).to(device)
    expected = flashtile.attention(q, k, v, mask=mask)
    compiled = torch.compile(lambda q, k, v: flashtile.attention(q, k, v, mask=mask), fullgraph=True, backend="eager")
    assert_bitwise(compiled(q, k, v), expected)

    def made(q, k, v, ranges):
        return flashtile.attention(q, k, v, mask=ColumnMask(ranges, q.shape[1]))

    for ranges in (mask.ranges, mask.ranges.transpose(2, 3).contiguous().transpose(2, 3)):
        assert_bitwise(torch.compile(made, fullgraph=True, backend="aot_eager")(q, k, v, ranges), expected)
    one = [x[:, None] for x in (q, k, v)]
    each = [ColumnMask(ranges[None], 200) for ranges in mask.ranges]
    mapped = torch.func.vmap(lambda q, k, v: flashtile.attention(q, k, v, mask=each[0]))(*one)
    assert_bitwise(mapped[0, 0], flashtile.attention(*(x[0] for x in one), mask=each[0])[0])


@pytest.mark.gpu
def test_in_a_cuda_graph():
    """The mask is data of the device: a replay reads what its memory holds then."""
    q, k, v = (randn("cuda", BF16, 1, 500, 2, 128, seed=seed) for seed in range(3))
    mask = random_mask(500, 500, run=30).to("cuda")
    flashtile.attention(q, k, v, mask=mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashtile.attention(q, k, v, mask=mask)
    for seed in (1, 2):
        mask.ranges.copy_(random_mask(500, 500, run=40, seed=seed).ranges)
        graph.replay()
        assert_bitwise(out, flashtile.attention(q, k, v, mask=mask))


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [0.0, 1000.0], ids=["", "ampere"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_gradients_repeat_to_the_bit(head_dim, softcap):
    q, k, v = (randn("cuda", BF16, 2, 900, heads, head_dim, seed=heads).requires_grad_() for heads in (4, 2, 2))
    dout, mask = randn("cuda", BF16, 2, 900, 4, head_dim, seed=9), random_mask(900, 900, heads=4, run=50).to("cuda")

    def gradients():
        out = flashtile.attention(q, k, v, mask=mask, softcap=softcap, deterministic=True)
        return torch.autograd.grad(out, (q, k, v), dout)

    first, differences = gradients(), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        for x, y in zip(gradients(), first, strict=True):
            differences += (x != y).sum()
    assert differences == 0
    check(mask.to("cpu"), *(x.detach() for x in (q, k, v)), softcap=softcap, deterministic=True)


def test_a_backward_notices_that_its_mask_has_changed():
    q, k, v = (randn("cpu", F32, 1, 20, 1, 16, seed=seed).requires_grad_() for seed in range(3))
    mask = random_mask(20, 20)
    out = flashtile.attention(q, k, v, mask=mask)
    mask.ranges.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_wrong_masks():
    q, k, v = torch.randn(3, 2, 20, 4, 16)
    cu_seqlens = torch.tensor([0, 20], dtype=torch.int32)
    ragged = ColumnMask.concatenate([ColumnMask.causal(20, 20)])
    for wrong, error, message in (
        (
            torch.ones(20, 20),
            TypeError,
            "attention: mask is a tensor of shape (20, 20), expected a flashtile.masks.ColumnMask or None",
        ),
        (ColumnMask.causal(21, 20), ValueError, "attention: mask has S_q = 21, expected 20, as q"),
        (
            ColumnMask.causal(20, 21),
            ValueError,
            "attention: mask has shape (1, 1, 21, 4), expected (..., 20, 4) = (1 or B, 1 or H_k or H_q, S_k, 4)",
        ),
        (ragged, ValueError, f"attention: mask is {ragged}, expected one of equally long sequences"),
    ):
        with pytest.raises(error) as raised:
            flashtile.attention(q, k, v, mask=wrong)
        assert str(raised.value) == message
    with pytest.raises(ValueError, match="expected one of a ragged batch, which concatenate"):
        flashtile.attention_varlen(
            q[0], k[0], v[0], cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, mask=ColumnMask.causal(20, 20)
        )
