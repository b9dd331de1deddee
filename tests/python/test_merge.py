"""_C.merge: a result over further keys joins what is known of rows so far."""

import itertools
import math

import pytest
import torch
from cases import BF16, DEVICE_PARAMS, DTYPES, F16, F32, Case, lay_out, on_devices
from compare import assert_bitwise, assert_same_kind
from reference import attention as reference
from test_extreme import offset_scores, on_every_device

import flashtile
from flashtile import _C
from flashtile._options import attention_options

LN2 = math.log(2)


def log2_unit(unit):
    """As float32 has it, in which scores became weights."""
    return (torch.tensor(unit) * torch.tensor(math.log2(math.e))).double().item()


def exact_result(scores, values, unit):
    """(out, reference, log2_sum) in float64 over all keys, which are last of `scores` (B, H, S, keys); `values` are
    (B, H, keys, D_v). Scores of -inf are hidden."""
    reference = scores.amax(-1)
    reference = reference.masked_fill(reference == -math.inf, 0)
    weights = ((scores - reference[..., None]) * log2_unit(unit)).exp2()
    sums = weights.sum(-1)
    out = (weights / sums[..., None]).masked_fill((sums == 0)[..., None], 0) @ values
    return out.transpose(1, 2), reference, sums.log2()


def empty_totals(batch, rows, heads, head_dim_v, device="cpu"):
    """Totals that hold nothing yet, and NaN in their memory."""
    nan = {"fill_value": math.nan, "dtype": F32, "device": device}
    return torch.full((batch, rows, heads, head_dim_v), **nan), torch.full((2, batch, heads, rows), **nan)


def weights_of(scores, state, unit):
    """Those that a backward takes, (B, H, S, keys)."""
    reference, log2_sum = state.double()[..., None]
    return ((scores - reference) * log2_unit(unit) - log2_sum).exp2()


CUTS = ((0, 90), (0, 30, 90), (0, 1, 1, 2, 50, 90))


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim_v", [8, 24, 64, 128, 256])
def test_parts_are_the_union(head_dim_v, dtype, device):
    """Of any number of rows and heads, with hidden keys, in units of a scale and of a softcap, of scores so large that
    a float32 lse would be off by units."""
    generator = torch.Generator().manual_seed(head_dim_v)
    for cuts, (batch, rows, heads), (unit, middle) in zip(
        (*CUTS, *CUTS),
        ((1, 1, 1), (2, 37, 3), (3, 5, 2), (1, 300, 1), (2, 17, 5), (1, 33, 4)),
        ((0.125, 0.0), (0.3, 1e4), (30.0, 0.0), (1e4, -30.0), (2.0**-30, 2.0**57), (1.0, 3e8)),
        strict=True,
    ):
        spread = max(3 / unit, abs(middle) * 2.0**-22)
        scores = (torch.randn(batch, heads, rows, 90, generator=generator) * spread + middle).double()
        scores = scores.masked_fill(torch.rand(scores.shape, generator=generator) < 0.3, -math.inf)
        values = torch.randn(batch, heads, 90, head_dim_v, generator=generator, dtype=torch.float64)
        scores, values = scores.to(device), values.to(device)
        total, known = empty_totals(batch, rows, heads, head_dim_v, device)
        first = True
        for a, b in itertools.pairwise(cuts):
            if a == b:
                part = torch.full((batch, rows, heads, head_dim_v), math.nan, dtype=dtype, device=device)
                state = torch.tensor([math.nan, -math.inf], device=device).view(2, 1, 1, 1).expand_as(known)
            else:
                part, *state = exact_result(scores[..., a:b], values[..., a:b, :], unit)
                part, state = part.to(dtype), torch.stack(state).float()
            _C.merge(total, known, part, state, unit, first)
            first = False
        exact, _, _ = exact_result(scores, values, unit)
        atol = 2e-6 + torch.finfo(dtype).eps * exact.abs().max().item()
        torch.testing.assert_close(total.double(), exact, rtol=0, atol=atol)
        seen = scores.amax(-1) > -math.inf
        sums = weights_of(scores, known, unit).sum(-1)
        torch.testing.assert_close(sums[seen], torch.ones_like(sums[seen]), rtol=0, atol=4e-6)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_first_copies(dtype, device):
    """What the totals held does not count, and a row that saw nothing becomes 0."""
    out, state = torch.randn(2, 19, 3, 40, device=device).to(dtype), torch.randn(2, 2, 3, 19, device=device)
    blind = torch.rand(2, 3, 19, device=device) < 0.3
    state[1, blind] = -math.inf
    out.transpose(1, 2)[blind] = math.nan
    total, known = empty_totals(2, 19, 3, 40, device)
    _C.merge(total, known, out, state, 0.1, True)
    assert_bitwise(total, out.float().masked_fill(blind.transpose(1, 2)[..., None], 0))
    assert_bitwise(known[:, ~blind], state[:, ~blind], "state")
    assert (known[1, blind] == -math.inf).all() and known[0].isfinite().all()


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_saw_nothing_and_rows_with_nan(dtype, device):
    """A blind row's out does not count; NaN of a row that saw something does, in that row alone."""
    results = []
    for kind in itertools.product(("seen", "blind", "NaN", "value NaN"), repeat=2):
        pair = []
        for number, what in enumerate(kind, 1):
            out = math.nan if what != "seen" else float(number)
            pair.append((out, 2.0 * number, {"blind": -math.inf, "NaN": math.nan}.get(what, 1.0)))
        results.append((kind, pair))
    rows, unit = len(results), 0.5 * LN2  # so that b's weight is twice a's
    parts = []
    for number in range(2):
        numbers = torch.tensor([pair[number] for _, pair in results], device=device)
        out = numbers[:, 0].view(1, rows, 1, 1).repeat(1, 1, 1, 16).to(dtype)
        parts.append((out, numbers[:, 1:].T.reshape(2, 1, 1, rows)))
    total, known = empty_totals(1, rows, 1, 16, device)
    for first, part in zip((True, False), parts, strict=True):
        _C.merge(total, known, *part, unit, first)
    for row, (kind, _) in enumerate(results):
        out, log2_sum = total[0, row, 0], known[1, 0, 0, row].item()
        assert out.isnan().any() == ("NaN" in kind or "value NaN" in kind), kind
        assert math.isnan(log2_sum) == ("NaN" in kind), kind
        if kind == ("blind", "blind"):
            assert (out == 0).all() and log2_sum == -math.inf
        elif set(kind) == {"seen", "blind"}:
            number = 1 + kind.index("seen")
            assert (out == number).all() and (known[:, 0, 0, row].tolist() == [2 * number, 1])
        elif kind == ("seen", "seen"):
            torch.testing.assert_close(out, torch.full_like(out, 5 / 3), rtol=0, atol=1e-6)
            assert known[0, 0, 0, row] == 4 and log2_sum == pytest.approx(1 + math.log2(1.5), abs=1e-6)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["heads first", "sequence first", "gaps", "packed", "reversed batch"])
def test_slices_of_larger_tensors(layout, dtype, device):
    """The same numbers in any strides, and nothing is written elsewhere."""
    generator = torch.Generator().manual_seed(4)

    def randn(*shape):
        return torch.randn(shape, generator=generator).to(device)

    whole, states = randn(2, 50, 3, 24), randn(2, 2, 3, 50)
    part, state = randn(2, 21, 3, 24).to(dtype), randn(2, 2, 3, 21)
    expected, expected_state = whole.clone(), states.clone()
    of_rows, of_states = expected[:, 7:28].contiguous(), expected_state[..., 7:28].contiguous()
    _C.merge(of_rows, of_states, part, state, 0.3, False)
    expected[:, 7:28], expected_state[..., 7:28] = of_rows, of_states

    strided = torch.empty(2, 3, 2, 50, 2, device=device).permute(2, 0, 1, 3, 4)[..., 0].copy_(states)
    odd = torch.empty(21, 2, 3, 2, device=device).permute(1, 3, 2, 0).copy_(state)
    laid_out = lay_out(whole, layout)
    _C.merge(laid_out[:, 7:28], strided[..., 7:28], lay_out(part, layout), odd, 0.3, False)
    assert_bitwise(laid_out, expected)
    assert_bitwise(strided, expected_state, "state")
    # One row for all, as sinks have: strides of 0.
    one, other = whole.clone(), whole.clone()
    row, of_row = randn(24).to(dtype).expand(2, 50, 3, 24), randn(2, 1, 3, 1).expand(2, 2, 3, 50)
    for total, given in ((one, (row, of_row)), (other, (row.contiguous(), of_row.contiguous()))):
        _C.merge(total, states.clone(), *given, 0.3, False)
    assert_bitwise(one, other)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_long_rows_of_many_heads(device):
    """More rows than a thread block has in each dimension."""
    generator = torch.Generator().manual_seed(6)
    whole, states = torch.randn(3, 777, 9, 72, generator=generator), torch.randn(2, 3, 9, 777, generator=generator)
    part, state = torch.randn(whole.shape, generator=generator).to(BF16), torch.randn(states.shape, generator=generator)
    total, known = whole.to(device, copy=True), states.to(device, copy=True)
    _C.merge(total, known, part.to(device), state.to(device), 0.3, False)
    ahead = (state[0] - states[0]).double() * log2_unit(0.3) + state[1] - states[1]
    share = (1 / (1 + (-ahead).exp2())).transpose(1, 2)[..., None]
    exact = whole + share * (part.double() - whole)
    torch.testing.assert_close(total.double().cpu(), exact, rtol=0, atol=4e-6)
    lses = torch.stack([x[0].double() * log2_unit(0.3) + x[1] for x in (states, state)])
    lse = known[0].double().cpu() * log2_unit(0.3) + known[1].cpu()
    torch.testing.assert_close(lse, (lses * LN2).logsumexp(0) / LN2, rtol=0, atol=2e-6)


def merged(q, k, v, cuts, unit, **options):
    """(out, state) of attention over keys in parts."""
    total = empty_totals(*q.shape[:3], v.shape[-1], q.device)
    for a, b in itertools.pairwise(cuts):
        out, _, state = _C.forward_with_state(q, k[:, a:b], v[:, a:b], attention_options(**options))
        _C.merge(*total, out, state, unit, a == 0)
    return total


CASES = [
    Case(f"D{dim}_Dv{dim_v}", dtype=dtype, seqlen_k=300, heads_q=4, heads_k=2, head_dim=dim, head_dim_v=dim_v)
    for dim, dim_v in ((8, 8), (64, 24), (64, 64), (128, 128), (256, 256))
    for dtype in DTYPES
] + [Case("softcap", dtype=dtype, seqlen_k=300, heads_q=4, heads_k=2, softcap=9.0, magnitude=4.0) for dtype in DTYPES]


@pytest.mark.parametrize("case, device", on_devices(CASES))
def test_attention_in_parts(case, device):
    (q, k, v), options = case.tensors(device), {"softcap": case.softcap, "scale": case.head_dim**-0.5}
    unit = case.softcap or torch.tensor(options["scale"]).item()
    out, (reference, log2_sum) = merged(q, k, v, (0, 100, 101, 300), unit, **options)
    expected, lse = flashtile.attention(q, k, v, return_lse=True, softcap=case.softcap)
    eps = torch.finfo(case.dtype).eps
    atol = 2 * eps * expected.abs().max().item() + 2e-6
    torch.testing.assert_close(out, expected.float(), rtol=0, atol=atol)
    torch.testing.assert_close(reference * unit + log2_sum * LN2, lse, rtol=0, atol=2e-5)


@on_every_device
@pytest.mark.parametrize("scale", [None, 1e4])
@pytest.mark.parametrize("base", [100.0, -2000.0])
def test_scores_of_any_size(base, scale, device, dtype):
    """Weights of the union are exact where an lse of one float32 says nothing of them."""
    options = {} if scale is None else {"scale": scale}
    call = offset_scores(device, dtype, base, **options)
    q, k, v = call.inputs()
    unit = torch.tensor(call.options.get("scale") or q.shape[-1] ** -0.5).item()
    out, state = merged(q, k, v, (0, 40, 90, 150), unit, **call.options)
    exact, _ = reference(q, k, v, **call.options)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=2 * eps * exact.abs().max().item() + 1e-5)
    scores = torch.einsum("bihgd,bjhd->bhgij", q.double().unflatten(2, (k.shape[2], -1)), k.double()).flatten(1, 2)
    sums = weights_of(scores, state, unit).sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-5)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_sizes_of_nothing(device):
    for batch, rows, heads in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        total, known = empty_totals(batch, rows, heads, 8, device)
        _C.merge(total, known, total.clone(), known.clone(), 1.0, False)
        assert_same_kind(total, total.new_zeros(batch, rows, heads, 8))


GOOD = (torch.zeros(2, 5, 3, 16), torch.zeros(2, 2, 3, 5), torch.zeros(2, 5, 3, 16, dtype=F16), torch.zeros(2, 2, 3, 5))
# name: (which argument, what becomes of it, exception, what the message holds)
BAD = {
    "a total of 16 bits": (0, torch.Tensor.half, TypeError, "total_out has dtype float16, expected float32"),
    "a total of three dimensions": (
        0,
        lambda x: x[0],
        ValueError,
        r"total_out has shape \(5, 3, 16\), expected 4 dimensions = \(B, S, H, D_v\)",
    ),
    "an odd D_v": (0, lambda x: x[..., :12], ValueError, r"total_out has shape \(2, 5, 3, 12\), expected D_v to be a"),
    "gaps in the total": (
        0,
        lambda x: x.repeat(1, 1, 1, 2)[..., ::2],
        ValueError,
        "total_out has stride 2 in its last dimension, expected 1",
    ),
    "other rows": (2, lambda x: x[:, 1:], ValueError, r"out has shape \(2, 4, 3, 16\), expected \(2, 5, 3, 16\) = \("),
    "gaps": (2, lambda x: x.repeat(1, 1, 1, 2)[..., ::2], NotImplementedError, "out has stride 2 in its last"),
    "integers": (2, torch.Tensor.int, TypeError, "out has dtype int32, expected float32, float16 or bfloat16"),
    "float64": (2, torch.Tensor.double, TypeError, "out has dtype torch.float64, expected float32, float16 or bf"),
    "an lse": (3, lambda x: x[0], ValueError, r"state has shape \(2, 3, 5\), expected 4 dimensions = \(2, B, H, S\)"),
    "rows before heads": (
        1,
        lambda x: x.transpose(2, 3),
        ValueError,
        r"total_state has shape \(2, 2, 5, 3\), expected \(2, 2, 3, 5\) = \(2, B, H, S\)",
    ),
    "a state of 16 bits": (3, torch.Tensor.half, TypeError, "state has dtype float16, expected float32"),
    "no tensor": (3, torch.Tensor.tolist, TypeError, "state is of type list, expected a torch.Tensor"),
}


@pytest.mark.parametrize("name", BAD)
def test_refusals(name):
    place, change, exception, message = BAD[name]
    arguments = list(GOOD)
    arguments[place] = change(arguments[place])
    with pytest.raises(exception, match=f"^merge: {message}"):
        _C.merge(*arguments, 1.0, False)


@pytest.mark.gpu
def test_refusals_on_a_gpu():
    total, known, out, state = (x.cuda() for x in GOOD)
    with pytest.raises(ValueError, match=r"^merge: state is on cpu, expected cuda:0, as total_out"):
        _C.merge(total, known, out, state.cpu(), 1.0, False)
    with pytest.raises(_C.Unreadable, match=r"^merge: out is at an address that is not a multiple of 16 bytes"):
        _C.merge(total, known, lay_out(out, "misaligned"), state, 1.0, False)
    with pytest.raises(_C.Unreadable, match=r"^merge: total_out is at an address that is not a multiple of 16 bytes"):
        _C.merge(lay_out(total, "misaligned"), known, out, state, 1.0, False)
