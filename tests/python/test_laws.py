"""What must hold whatever the numbers are; mostly to the bit."""

import math

import pytest
import reference
import torch
from cases import BF16, DEVICE_PARAMS, F16, F32, SEED, Case, on_devices
from compare import assert_accurate, assert_bitwise

import flashtile

LAW_CASES = [
    Case("full", dtype=F32, heads_q=4, heads_k=2, seqlen_q=70, seqlen_k=150),
    Case("causal", dtype=BF16, heads_q=4, heads_k=2, causal=True, seqlen_q=150, seqlen_k=150, head_dim=128),
    Case("window", dtype=F16, heads_q=4, heads_k=1, window=(20, 9), seqlen_q=150, seqlen_k=200, head_dim=72),
    Case("everything", dtype=BF16, heads_q=6, heads_k=2, window=(90, 30), softcap=8.0, alibi="per head", scale=0.2),
    Case("sinks", dtype=F16, heads_q=6, heads_k=2, causal=True, seqlen_q=150, seqlen_k=200, sinks=0.0),
]
each_case = pytest.mark.parametrize("case, device", on_devices(LAW_CASES))


def run(attention, case, q, k, v, **changes):
    return attention(q, k, v, return_lse=True, **(case.options(q.device) | changes))


def assert_same(found, expected):
    assert_bitwise(found[0], expected[0], "out")
    assert_bitwise(found[1], expected[1], "lse")


@each_case
def test_runs_agree_bitwise(case, device, attention):
    inputs = case.tensors(device)
    first = run(attention, case, *inputs)
    for _ in range(20):
        assert_same(run(attention, case, *inputs), first)


@each_case
def test_gqa_is_repeated_kv(case, device, attention):
    q, k, v = case.tensors(device)
    group = case.heads_q // case.heads_k
    k_repeated, v_repeated = (x.repeat_interleave(group, dim=2) for x in (k, v))
    repeated, grouped = run(attention, case, q, k_repeated, v_repeated), run(attention, case, q, k, v)
    if "heads of a query" in flashtile.explain(q, k, v, **case.options(device)):
        # Heads packed into the rows of other tiles round otherwise, by no more than the formula itself errs.
        rough_out, _ = reference.attention(q, k, v, dtype=case.dtype, **case.options(device))
        _, rough_lse = reference.attention(q, k, v, dtype=F32, **case.options(device))
        assert_accurate(grouped[0], repeated[0], rough_out, "out")
        assert_accurate(grouped[1], repeated[1], rough_lse, "lse")
    else:
        assert_same(repeated, grouped)


@each_case
def test_a_window_wide_enough_is_none(case, device, attention):
    inputs = case.tensors(device)
    none = run(attention, case, *inputs, window=None)
    total = case.seqlen_q + case.seqlen_k
    for wide in ((total, total), (2**31 - 1, None), (2**40, 10**30), (None, None)):
        assert_same(run(attention, case, *inputs, window=wide), none)


@each_case
def test_causal_is_a_window(case, device, attention):
    inputs = case.tensors(device)
    causal = run(attention, case, *inputs, window=None, causal=True)
    assert_same(run(attention, case, *inputs, window=(None, 0), causal=False), causal)


@each_case
def test_strictly_causal_is_causal_over_all_keys_but_the_last(case, device, attention):
    if case.alibi:
        pytest.skip("slopes go by the distance from the diagonal")
    q, k, v = case.tensors(device)
    strict = run(attention, case, q, k, v, window=(None, -1), causal=False)
    causal = run(attention, case, q, k[:, :-1], v[:, :-1], window=None, causal=True)
    for found, expected in zip(strict, causal, strict=True):  # keys may be divided in another way
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@each_case
def test_masks_intersect(case, device, attention):
    inputs = case.tensors(device)
    both = run(attention, case, *inputs, window=(12, 30), causal=True)
    assert_same(run(attention, case, *inputs, window=(12, 0), causal=False), both)


@each_case
def test_permuting_the_batch_permutes_the_output(case, device, attention):
    q, k, v = (torch.cat([x, x.flip(0) + 1, x * 2]) for x in case.tensors(device))
    order = torch.tensor([3, 0, 5, 1, 4, 2], device=device)
    out, lse = run(attention, case, q, k, v)
    assert_same(run(attention, case, q[order], k[order], v[order]), (out[order], lse[order]))


@each_case
def test_a_sequence_does_not_see_its_neighbours(case, device, attention):
    q, k, v = case.tensors(device)
    out, lse = run(attention, case, q, k, v)
    assert_same(run(attention, case, q[:1], k[:1], v[:1]), (out[:1], lse[:1]))


@each_case
def test_heads_are_independent(case, device, attention):
    q, k, v = case.tensors(device)
    if case.alibi or case.sinks is not None:
        pytest.skip("slopes and sinks belong to heads")
    group = case.heads_q // case.heads_k
    out, lse = run(attention, case, q, k, v)
    assert_same(run(attention, case, q[:, :, :group], k[:, :, :1], v[:, :, :1]), (out[:, :, :group], lse[:, :group]))


@each_case
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_values_behind_the_mask_change_nothing(case, device, junk, attention):
    """Keys that no row sees may hold anything."""
    q, k, v = case.tensors(device)
    q = q[:, :60]
    clean = run(attention, case, q, k, v, window=(10, 0))
    first_seen = case.seqlen_k - 60 - 10
    k[:, :first_seen], v[:, :first_seen] = junk, junk
    assert_same(run(attention, case, q, k, v, window=(10, 0)), clean)


@each_case
@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_junk_reaches_only_the_rows_that_see_it(case, device, junk, attention):
    """Inside a partly masked tile too: a row's result does not depend on columns hidden from it.

    Except that tensor cores multiply hidden values by a weight of 0, and 0 · NaN is NaN: on CUDA, junk in v may reach
    other rows of its tile, as it reaches every row in PyTorch's formula.
    """
    q, k, v = case.tensors(device)
    clean_out, clean_lse = run(attention, case, q, k, v, causal=True)
    column = case.seqlen_k - 10  # seen by the last ten rows alone
    k[:, column] = junk
    if device == "cpu":
        v[:, column] = junk
    out, lse = run(attention, case, q, k, v, causal=True)
    assert_same((out[:, :-10], lse[:, :, :-10]), (clean_out[:, :-10], clean_lse[:, :, :-10]))
    assert out[:, -10:].isnan().all()


@each_case
def test_large_scores_of_one_row_leave_the_others_alone(case, device, attention):
    """Rows of a tile share its work, but the one whose later keys raise its reference makes no other round anew."""
    q, k, v = case.tensors(device)
    out, lse = run(attention, case, q, k, v)
    row, column = case.seqlen_q - 5, case.seqlen_k - 8
    q[:, row] = 40 * k[:, column].repeat_interleave(case.heads_q // case.heads_k, dim=1)
    large_out, large_lse = run(attention, case, q, k, v)
    others = torch.arange(case.seqlen_q, device=device) != row
    assert_same((large_out[:, others], large_lse[:, :, others]), (out[:, others], lse[:, :, others]))


@each_case
def test_splitting_keys_and_merging_is_not_splitting(case, device, attention):
    """(out, lse) of two halves of the keys merge into that of the whole; only the full mask splits without offsets."""
    q, k, v = case.tensors(device)
    options = dict(window=None, causal=False, alibi_slopes=None, sinks=None)
    out, lse = run(attention, case, q, k, v, **options)
    for cut in (0, 1, 64, case.seqlen_k - 1):
        parts = [run(attention, case, q, k[:, s], v[:, s], **options) for s in (slice(cut), slice(cut, None))]
        merged_lse = torch.logaddexp(parts[0][1], parts[1][1])
        weights = [(part[1] - merged_lse).exp().transpose(1, 2)[..., None] for part in parts]
        merged = sum(w * part[0].float() for w, part in zip(weights, parts, strict=True))
        torch.testing.assert_close(merged_lse, lse, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(merged, out.float(), rtol=0, atol=2 * torch.finfo(out.dtype).eps * 4)


@each_case
def test_scale_may_move_into_q(case, device, attention):
    """A power of two changes no digit."""
    q, k, v = case.tensors(device)
    scale = 0.25 if case.scale is None else case.scale
    assert_same(
        run(attention, case, q * 4, k, v, scale=scale / 4),
        run(attention, case, q, k, v, scale=scale),
    )


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_equal_values_come_out_unchanged(device, dtype, attention):
    """A mean of equal vectors is that vector, whatever the weights."""
    q, k, v = Case("equal", dtype=dtype, seqlen_q=200, seqlen_k=333, magnitude=3.0).tensors(device)
    v = v[:, :1].expand_as(v)
    out = attention(q, k, v).float()
    expected = v[:, :1].repeat_interleave(2, dim=2).float().expand_as(out)
    torch.testing.assert_close(out, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_one_visible_key_is_copied(device, attention):
    """softmax of one score is 1, so out is v to the bit and lse is the score."""
    q, k, v = Case("diagonal", dtype=F16, seqlen_q=97, seqlen_k=97, heads_q=1).tensors(device)
    out, lse = attention(q, k, v, window=(0, 0), return_lse=True)
    assert torch.equal(out, v)
    torch.testing.assert_close(lse[:, 0], (q.float() * k.float()).sum(-1)[:, :, 0] / 8, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_alibi_of_zero_slope_is_none(device, attention):
    q, k, v = Case("slopes", dtype=F16, heads_q=4, heads_k=2).tensors(device)
    out, lse = attention(q, k, v, return_lse=True)
    zero_out, zero_lse = attention(q, k, v, alibi_slopes=torch.zeros(4, device=device), return_lse=True)
    if device == "cpu":
        assert_same((zero_out, zero_lse), (out, lse))
    else:  # not to the bit: without slopes the kernel scales inside the exponent
        torch.testing.assert_close(zero_out, out, rtol=torch.finfo(F16).eps, atol=torch.finfo(F16).eps / 64)
        torch.testing.assert_close(zero_lse, lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_alibi_rows_of_the_batch(device, attention):
    """(B, H_q) slopes are (H_q) slopes of each batch entry; strides of the slopes are free."""
    q, k, v = Case("slopes", dtype=F16, heads_q=4, heads_k=2, batch=3).tensors(device)
    slopes = torch.rand(3, 4, device=device)
    together = attention(q, k, v, alibi_slopes=slopes, return_lse=True)
    for i in range(3):
        alone = attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], alibi_slopes=slopes[i], return_lse=True)
        assert_same(alone, tuple(x[i : i + 1] for x in together))
    padded = torch.full((3, 9), math.nan, device=device)
    padded[:, 2:6] = slopes
    assert_same(attention(q, k, v, alibi_slopes=padded[:, 2:6], return_lse=True), together)


def run_with_gradients(case, q, k, v, **options):
    """out, lse and the gradients of q, k and v."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = flashtile.attention(*inputs, return_lse=True, deterministic=True, **(case.options(q.device) | options))
    dout, dlse = (torch.randn(x.shape, generator=torch.Generator().manual_seed(8)).to(x) for x in (out, lse))
    dq, dk, dv = torch.autograd.grad([out, lse], inputs, [dout, dlse])
    return dict(out=out, lse=lse, dq=dq, dk=dk, dv=dv)


def assert_all_same(found, expected):
    for what, x in expected.items():
        assert_bitwise(found[what], x, what)


@each_case
def test_a_sink_of_minus_infinity_is_none(case, device):
    inputs = case.tensors(device)
    none = run_with_gradients(case, *inputs, sinks=None)
    sinks = torch.full((case.heads_q,), -math.inf, device=device, requires_grad=True)
    found = run_with_gradients(case, *inputs, sinks=sinks.detach())
    if device == "cpu":
        assert_all_same(found, none)
    else:  # a CUDA kernel that knows sinks may have other tiles
        for what, x in none.items():
            size = x.where(x.isfinite(), 0).abs().max().item()
            torch.testing.assert_close(found[what], x, rtol=0, atol=8 * torch.finfo(case.dtype).eps * size)
    out, lse = flashtile.attention(*inputs, return_lse=True, **(case.options(device) | {"sinks": sinks}))
    (out.sum() + lse.where(lse > -math.inf, 0).sum()).backward()
    assert (sinks.grad == 0).all()


@each_case
def test_a_sink_takes_weight_from_all_columns_alike(case, device, attention):
    inputs = case.tensors(device)
    out, lse = run(attention, case, *inputs, sinks=None)
    sinks = torch.linspace(-3, 7, case.heads_q, device=device)
    found_out, found_lse = run(attention, case, *inputs, sinks=sinks)
    expected_lse = torch.logaddexp(lse, sinks[:, None])
    torch.testing.assert_close(found_lse, expected_lse, rtol=1e-5, atol=1e-5)
    expected = out.float() * (lse - expected_lse).exp().transpose(1, 2)[..., None]
    torch.testing.assert_close(found_out.float(), expected, rtol=0, atol=8 * torch.finfo(out.dtype).eps)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_a_row_that_sees_nothing_gives_all_to_the_sink(device, attention):
    q, k, v = Case("blind", dtype=F16, seqlen_q=100, seqlen_k=30).tensors(device)
    sinks = torch.tensor([-300.0, 2.0], device=device)
    out, lse = attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    assert (out[:, :70] == 0).all()
    assert (lse[:, :, :70] - sinks[:, None]).abs().max() < 1e-4
    assert not (out[:, 70:, 1] == 0).all()


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("dtype", [F16, BF16, torch.float64])
def test_sinks_of_other_dtypes(device, dtype):
    inputs = Case("sinks", dtype=F16).tensors(device)
    sinks = torch.tensor([1.5, 4.0], device=device)
    found, expected = sinks.to(dtype).requires_grad_(), sinks.clone().requires_grad_()
    out, expected_out = (flashtile.attention(*inputs, sinks=x) for x in (found, expected))
    assert_bitwise(out, expected_out, "out")
    out.float().square().sum().backward()
    expected_out.float().square().sum().backward()
    assert found.grad.dtype is dtype
    assert_bitwise(found.grad, expected.grad.to(dtype), "dsinks")


@each_case
def test_no_dropout_whatever_the_seed(case, device):
    inputs = case.tensors(device)
    none = run_with_gradients(case, *inputs)
    for seed in (0, 1, 2**64 - 1):
        assert_all_same(run_with_gradients(case, *inputs, dropout_p=0.0, seed=seed), none)


@each_case
def test_dropout_follows_the_seed(case, device):
    inputs = case.tensors(device)
    first = run_with_gradients(case, *inputs, dropout_p=0.3, seed=SEED)
    assert_all_same(run_with_gradients(case, *inputs, dropout_p=0.3, seed=SEED), first)
    for other in (SEED ^ 1, SEED ^ 1 << 63, SEED ^ 1 << 32):
        found = run_with_gradients(case, *inputs, dropout_p=0.3, seed=other)
        for what in ("out", "dq", "dk", "dv"):
            assert not torch.equal(found[what], first[what]), f"{what} is that of another seed"


@each_case
def test_dropout_leaves_lse(case, device, attention):
    inputs = case.tensors(device)
    _, lse = run(attention, case, *inputs)
    _, found = run(attention, case, *inputs, dropout_p=0.5, seed=1)
    if device == "cpu":
        assert_bitwise(found, lse, "lse")
    else:  # other tiles may serve it
        torch.testing.assert_close(found, lse, rtol=1e-6, atol=1e-6)


@each_case
def test_dropout_does_not_see_neighbours_in_the_batch(case, device, attention):
    q, k, v = case.tensors(device)
    options = dict(dropout_p=0.3, seed=SEED)
    out, lse = run(attention, case, q, k, v, **options)
    assert_same(run(attention, case, q[:1], k[:1], v[:1], **options), (out[:1], lse[:1]))


def kept_in_forward(q, k, width, **options):
    """(B, H, S_q, S_k) bool: which weights reach out, from values of which each belongs to one column."""
    batch, seqlen_k, heads, _ = k.shape
    parts = []
    for begin in range(0, seqlen_k, width):
        v = torch.zeros(batch, seqlen_k, heads, width, dtype=k.dtype, device=k.device)
        count = min(width, seqlen_k - begin)
        v[:, begin : begin + count, :, :count] = torch.eye(count)[:, None].to(v)
        parts.append(flashtile.attention(q, k, v, **options)[..., :count] != 0)
    return torch.cat(parts, dim=3).transpose(1, 2)


def kept_in_backward(q, k, width, **options):
    """The same, of the weights that dv is made of."""
    seqlen_q = q.shape[1]
    v = torch.zeros(*k.shape[:3], width, dtype=k.dtype, device=k.device, requires_grad=True)
    out = flashtile.attention(q, k, v, **options)
    parts = []
    for begin in range(0, seqlen_q, width):
        dout = torch.zeros_like(out)
        count = min(width, seqlen_q - begin)
        dout[:, begin : begin + count, :, :count] = torch.eye(count)[:, None].to(dout)
        (dv,) = torch.autograd.grad(out, v, dout, retain_graph=True)
        parts.append(dv[..., :count] != 0)
    return torch.cat(parts, dim=3).permute(0, 2, 3, 1)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (101, 36)}], ids=str)
@pytest.mark.parametrize("head_dim, head_dim_v", [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)])
def test_the_same_weights_are_dropped_everywhere(device, mask, head_dim, head_dim_v):
    """On every device, in forward and backward, by every kernel: those that the recipe says, in the share asked for."""
    case = Case("kept", dtype=BF16, heads_q=2, heads_k=2, seqlen_q=333, seqlen_k=517, head_dim=head_dim)
    q, k, _ = case.tensors(device)
    rows, columns = (torch.arange(n, device=device) for n in (333, 517))
    kept = reference.dropout_factors(2, 2, rows, columns, 0.3, SEED) > 0
    p = 77 / 256  # the nearest multiple of 1/256
    assert (kept.double().mean(dim=(2, 3)) - (1 - p)).abs().max() < 5 * math.sqrt(p * (1 - p) / kept[0, 0].numel())
    assert len({tuple(x.flatten()[:64].tolist()) for x in kept.flatten(0, 1)}) == 4  # each head has its own
    expected = kept & reference.visible(333, 517, device=device, **mask)
    options = dict(dropout_p=0.3, seed=SEED, **mask)
    assert torch.equal(kept_in_forward(q, k, head_dim_v, **options), expected)
    assert torch.equal(kept_in_backward(q, k, head_dim_v, **options), expected)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_default_seeds_follow_the_generator_of_pytorch(device):
    inputs = Case("seeds", dtype=F16).tensors(device)
    torch.manual_seed(3)
    first, second = (flashtile.attention(*inputs, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert_bitwise(flashtile.attention(*inputs, dropout_p=0.5), first)
    state = torch.get_rng_state()
    flashtile.attention(*inputs)
    flashtile.attention(*inputs, dropout_p=0.5, seed=1)
    assert torch.equal(torch.get_rng_state(), state), "a seed was drawn that nobody needs"


@pytest.mark.parametrize("case, device", on_devices(LAW_CASES, ["cpu"]))
def test_the_cpu_is_always_deterministic(case, device):
    options = dict(dropout_p=0.3, seed=SEED, return_lse=True) | case.options(device)
    results = []
    for deterministic in (None, False, True):
        inputs = case.tensors(device, requires_grad=True)
        out, lse = flashtile.attention(*inputs, deterministic=deterministic, **options)
        results.append(torch.autograd.grad([out, lse], inputs, [torch.ones_like(out), torch.ones_like(lse)]))
    for what, *found in zip(("dq", "dk", "dv"), *results, strict=True):
        assert_bitwise(found[1], found[0], what)
        assert_bitwise(found[2], found[0], what)
