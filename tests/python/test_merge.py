"""_C.merge: results over disjoint keys become those over all keys, or are summed."""

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
# (of the parts, of the result)
DTYPE_PAIRS = [*((dtype, dtype) for dtype in DTYPES), (F16, F32), (BF16, F32), (F32, F16), (F32, BF16)]
on_dtype_pairs = pytest.mark.parametrize("dtype, out_dtype", DTYPE_PAIRS, ids=str)


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


def blank(shape, dtype=F32, device="cpu"):
    """(out, state) in memory that holds NaN."""
    batch, rows, heads, _ = shape
    nan = {"fill_value": math.nan, "device": device}
    return torch.full(shape, dtype=dtype, **nan), torch.full((2, batch, heads, rows), dtype=F32, **nan)


def merged(parts, shape, unit, dtype=F32):
    """(out, state) of parts, in groups if there are more than 8."""
    result = blank(shape, dtype, parts[0][2].device)
    for first in range(0, len(parts), 8):
        _C.merge(*result, tuple(parts[first : first + 8]), unit, first > 0)
    return result


def summed(parts, shape, dtype=F32):
    out = torch.full(shape, math.nan, dtype=dtype, device=parts[0][2].device)
    for first in range(0, len(parts), 8):
        _C.merge(out, None, tuple((*part, None) for part in parts[first : first + 8]), math.nan, first > 0)
    return out


def weights_of(scores, state, unit):
    """Those that a backward takes, (B, H, S, keys)."""
    reference, log2_sum = state.double()[..., None]
    return ((scores - reference) * log2_unit(unit) - log2_sum).exp2()


def random_range(rows, generator):
    begin, end = sorted(torch.randint(0, rows + 1, (2,), generator=generator).tolist())
    return begin, end


class Parts:
    """Parts over random scores and values, each over keys of its own, of a random range of rows; some scores of its
    rows are hidden. Rows that saw nothing hold NaN."""

    def __init__(self, count, shape, dtype, unit, middle, generator, device, ranges=None):
        batch, rows, heads, head_dim_v = shape
        cuts = [0, *torch.randint(1, 20, (count,), generator=generator).cumsum(0).tolist()]
        keys = cuts[-1]
        spread = max(3 / unit, abs(middle) * 2.0**-22)
        scores = (torch.randn(batch, heads, rows, keys, generator=generator) * spread + middle).double()
        hidden = torch.rand(scores.shape, generator=generator) < 0.3
        values = torch.randn(batch, heads, keys, head_dim_v, generator=generator, dtype=torch.float64).to(device)
        self.ranges = ranges or [random_range(rows, generator) for _ in range(count)]
        self.parts, self.largest = [], 0.0
        for (begin, end), (a, b) in zip(self.ranges, itertools.pairwise(cuts), strict=True):
            hidden[:, :, :begin, a:b] = hidden[:, :, end:, a:b] = True
            of_part = scores[:, :, begin:end, a:b].masked_fill(hidden[:, :, begin:end, a:b], -math.inf).to(device)
            out, *state = exact_result(of_part, values[:, :, a:b], unit)
            if out.numel():
                self.largest = max(self.largest, out.abs().max().item())
            blind = state[1] == -math.inf
            state[0][blind] = math.nan
            out.transpose(1, 2)[blind] = math.nan
            self.parts.append((begin, end, out.to(dtype), torch.stack(state).float()))
        self.scores, self.unit = scores.masked_fill(hidden, -math.inf).to(device), unit
        self.exact, _, _ = exact_result(self.scores, values, unit)

    def check(self, out, state, eps):
        torch.testing.assert_close(out.double(), self.exact, rtol=0, atol=4e-6 + eps * self.largest)
        seen = self.scores.amax(-1) > -math.inf
        sums = weights_of(self.scores, state, self.unit).sum(-1)[seen]
        torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=6e-6)
        assert (out.transpose(1, 2)[~seen] == 0).all()
        assert (state[0][~seen] == 0).all() and (state[1][~seen] == -math.inf).all()


UNITS = ((0.125, 0.0), (0.3, 1e4), (30.0, 0.0), (1e4, -30.0), (2.0**-30, 2.0**57), (1.0, 3e8))
SIZES = ((1, 1, 1), (2, 37, 3), (3, 5, 2), (1, 300, 1), (2, 17, 5), (1, 33, 4))


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@on_dtype_pairs
@pytest.mark.parametrize("head_dim_v", [8, 24, 64, 128, 256])
def test_parts_are_the_union(head_dim_v, dtype, out_dtype, device):
    """Of any number of rows and heads, with hidden keys, in units of a scale and of a softcap, of scores so large that
    a float32 lse would be off by units."""
    generator = torch.Generator().manual_seed(head_dim_v)
    eps = max(torch.finfo(dtype).eps, torch.finfo(out_dtype).eps)
    for count in range(1, 9):
        shape = (*SIZES[count % len(SIZES)], head_dim_v)
        for unit, middle in (UNITS[count % len(UNITS)], UNITS[(count + 3) % len(UNITS)]):
            parts = Parts(count, shape, dtype, unit, middle, generator, device)
            parts.check(*merged(parts.parts, shape, unit, out_dtype), eps)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_parts_in_groups(dtype, device):
    generator = torch.Generator().manual_seed(20)
    for count, (unit, middle) in itertools.product((9, 20), UNITS):
        parts = Parts(count, (2, 37, 3, 40), dtype, unit, middle, generator, device)
        parts.check(*merged(parts.parts, (2, 37, 3, 40), unit), torch.finfo(dtype).eps)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@on_dtype_pairs
def test_one_part_is_copied(dtype, out_dtype, device):
    """And a row that saw nothing, or that it does not have, becomes 0."""
    out, state = torch.randn(2, 19, 3, 40, device=device).to(dtype), torch.randn(2, 2, 3, 19, device=device)
    blind = torch.rand(2, 3, 19, device=device) < 0.3
    state[1, blind] = -math.inf
    out.transpose(1, 2)[blind] = math.nan
    found, known = merged([(0, 19, out, state)], out.shape, 0.1, out_dtype)
    expected = out.to(out_dtype).masked_fill(blind.transpose(1, 2)[..., None], 0)
    assert_bitwise(found, expected)
    assert_bitwise(known[:, ~blind], state[:, ~blind], "state")
    assert (known[1, blind] == -math.inf).all() and (known[0, blind] == 0).all()
    few, few_known = merged([(4, 15, out[:, 4:15], state[..., 4:15])], out.shape, 0.1, out_dtype)
    assert_bitwise(few[:, 4:15], expected[:, 4:15])
    assert_bitwise(few_known[..., 4:15], known[..., 4:15], "state")
    for rows in (slice(0, 4), slice(15, 19)):
        assert (few[:, rows] == 0).all() and (few_known[1, ..., rows] == -math.inf).all()


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@on_dtype_pairs
def test_what_is_there_counts_as_the_first_part(dtype, out_dtype, device):
    """In a total of 16 bits, too, which is rounded once for all parts."""
    generator = torch.Generator().manual_seed(5)
    shape, unit, ranges = (2, 77, 3, 40), 0.3, [(0, 77), (10, 60), (0, 33)]
    if out_dtype == dtype:
        parts = Parts(3, shape, dtype, unit, 1e4, generator, device, ranges).parts
        expected = merged(parts, shape, unit, dtype)
        (_, _, *total), *others = parts
        _C.merge(*total, others, unit, True)
        for x, y, what in zip(total, expected, ("out", "state"), strict=True):
            assert_bitwise(x, y, what)
    first, *others = (torch.randn(2, end - begin, 3, 40, generator=generator) for begin, end in ranges)
    total, others = first.to(out_dtype).to(device), [x.to(dtype).to(device) for x in others]
    expected = total.float()
    for x, (begin, end) in zip(others, ranges[1:], strict=True):
        expected[:, begin:end] += x
    _C.merge(total, None, [(*run, x, None) for run, x in zip(ranges[1:], others, strict=True)], math.nan, True)
    assert_bitwise(total, expected.to(out_dtype))


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@on_dtype_pairs
@pytest.mark.parametrize("head_dim", [8, 24, 64, 128, 256])
def test_sums(head_dim, dtype, out_dtype, device):
    """In float32, in the order given, rounded once."""
    generator = torch.Generator().manual_seed(head_dim)
    for count in (*range(1, 9), 20):
        if count > 8:
            out_dtype = F32
        shape = (*SIZES[count % len(SIZES)], head_dim)
        expected, parts = torch.zeros(shape), []
        for _ in range(count):
            begin, end = random_range(shape[1], generator)
            x = torch.randn(shape[0], end - begin, *shape[2:], generator=generator).to(dtype)
            expected[:, begin:end] += x
            parts.append((begin, end, x.to(device)))
        assert_bitwise(summed(parts, shape, out_dtype).cpu(), expected.to(out_dtype))


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_keep_what_is_not_finite(dtype, device):
    numbers = torch.tensor([math.nan, math.inf, -math.inf, 1.0], device=device)
    pairs = torch.cartesian_prod(numbers, numbers).to(dtype)
    a, b = (x.view(1, 16, 1, 1).expand(1, 16, 1, 8).contiguous() for x in pairs.T)
    assert_bitwise(summed([(0, 16, a), (0, 16, b)], a.shape), a.float() + b.float())


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("adds", [False, True])
def test_rows_that_saw_nothing_and_rows_with_nan(adds, dtype, device):
    """A blind row's out does not count; NaN of a row that saw something does, in that row alone."""
    kinds = list(itertools.product(("seen", "blind", "NaN", "value NaN"), repeat=2))
    rows, unit = len(kinds), 0.5 * LN2  # so that b's weight is twice a's
    parts = []
    for place in range(2):
        out = [float(place + 1) if kind[place] == "seen" else math.nan for kind in kinds]
        log2_sum = [{"blind": -math.inf, "NaN": math.nan}.get(kind[place], 1.0) for kind in kinds]
        state = torch.tensor([[2.0 * (place + 1)] * rows, log2_sum], device=device).view(2, 1, 1, rows)
        out = torch.tensor(out, device=device).view(1, rows, 1, 1).repeat(1, 1, 1, 16)
        parts.append((0, rows, out.to(dtype), state))
    if adds:
        out, known = parts[0][2].float(), parts[0][3].clone()
        _C.merge(out, known, parts[1:], unit, True)
    else:
        out, known = merged(parts, (1, rows, 1, 16), unit)
    for row, kind in enumerate(kinds):
        found, log2_sum = out[0, row, 0], known[1, 0, 0, row].item()
        assert found.isnan().any() == ("NaN" in kind or "value NaN" in kind), kind
        assert math.isnan(log2_sum) == ("NaN" in kind), kind
        if kind == ("blind", "blind"):
            assert (found == 0).all() and log2_sum == -math.inf
        elif set(kind) == {"seen", "blind"}:
            number = 1 + kind.index("seen")
            assert (found == number).all() and (known[:, 0, 0, row].tolist() == [2 * number, 1])
        elif kind == ("seen", "seen"):
            torch.testing.assert_close(found, torch.full_like(found, 5 / 3), rtol=0, atol=1e-6)
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
    outs, given = [randn(2, n, 3, 24).to(dtype) for n in (21, 9)], [randn(2, 2, 3, n) for n in (21, 9)]
    odd = [
        torch.empty(n, 2, 3, 2, device=device).permute(1, 3, 2, 0).copy_(x) for n, x in zip((21, 9), given, strict=True)
    ]
    parts = [(0, 21, outs[0], given[0]), (7, 16, outs[1], given[1])]
    strided_parts = [(0, 21, lay_out(outs[0], layout), odd[0]), (7, 16, lay_out(outs[1], layout), odd[1])]
    for adds, out_dtype in itertools.product((True, False), {F32, dtype}):
        expected, expected_state = whole.to(out_dtype, copy=True), states.clone()
        of_rows, of_states = expected[:, 7:28].contiguous(), expected_state[..., 7:28].contiguous()
        _C.merge(of_rows, of_states, parts, 0.3, adds)
        expected[:, 7:28], expected_state[..., 7:28] = of_rows, of_states

        strided = torch.empty(2, 3, 2, 50, 2, device=device).permute(2, 0, 1, 3, 4)[..., 0].copy_(states)
        laid_out = lay_out(whole.to(out_dtype), layout)
        _C.merge(laid_out[:, 7:28], strided[..., 7:28], strided_parts, 0.3, adds)
        assert_bitwise(laid_out, expected)
        assert_bitwise(strided, expected_state, "state")

        sum_, laid_out = whole.to(out_dtype, copy=True), lay_out(whole.to(out_dtype), layout)
        for total, of_total in ((sum_, parts), (laid_out, strided_parts)):
            _C.merge(total[:, 7:28], None, [(*part[:3], None) for part in of_total], 1.0, adds)
        assert_bitwise(laid_out, sum_)
    # One row for all, as sinks have: strides of 0.
    row, of_row = randn(24).to(dtype).expand(2, 50, 3, 24), randn(2, 1, 3, 1).expand(2, 2, 3, 50)
    one = merged([parts[0], (0, 50, row, of_row)], whole.shape, 0.3)
    other = merged([parts[0], (0, 50, row.contiguous(), of_row.contiguous())], whole.shape, 0.3)
    assert_bitwise(one[0], other[0])


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_long_rows_of_many_heads(device):
    """More rows than a thread block has in each dimension."""
    generator = torch.Generator().manual_seed(6)
    shape, unit = (3, 777, 9, 72), 0.3
    for ranges in ([(0, 777)] * 4, [(0, 777), (0, 389), (389, 777), (100, 101), (0, 0)]):
        parts = Parts(len(ranges), shape, BF16, unit, 1e4, generator, device, ranges)
        parts.check(*merged(parts.parts, shape, unit), torch.finfo(BF16).eps)
        parts.check(*merged(parts.parts, shape, unit, BF16), torch.finfo(BF16).eps)
        total = merged(parts.parts[:2], shape, unit)
        _C.merge(*total, parts.parts[2:], unit, True)
        parts.check(*total, torch.finfo(BF16).eps)


def in_parts(q, k, v, cuts, unit, **options):
    """(out, state) of attention over keys in parts."""
    parts = []
    for a, b in itertools.pairwise(cuts):
        out, _, state = _C.forward_with_state(q, k[:, a:b], v[:, a:b], attention_options(**options))
        parts.append((0, q.shape[1], out, state))
    return merged(parts, (*q.shape[:3], v.shape[-1]), unit)


CASES = [
    Case(f"D{dim}_Dv{dim_v}", dtype=dtype, seqlen_k=300, heads_q=4, heads_k=2, head_dim=dim, head_dim_v=dim_v)
    for dim, dim_v in ((8, 8), (64, 24), (64, 64), (128, 128), (256, 256))
    for dtype in DTYPES
] + [Case("softcap", dtype=dtype, seqlen_k=300, heads_q=4, heads_k=2, softcap=9.0, magnitude=4.0) for dtype in DTYPES]


@pytest.mark.parametrize("case, device", on_devices(CASES))
def test_attention_in_parts(case, device):
    (q, k, v), options = case.tensors(device), {"softcap": case.softcap, "scale": case.head_dim**-0.5}
    unit = case.softcap or torch.tensor(options["scale"]).item()
    out, (reference, log2_sum) = in_parts(q, k, v, (0, 100, 101, 300), unit, **options)
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
    out, state = in_parts(q, k, v, (0, 40, 90, 150), unit, **call.options)
    exact, _ = reference(q, k, v, **call.options)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=2 * eps * exact.abs().max().item() + 1e-5)
    scores = torch.einsum("bihgd,bjhd->bhgij", q.double().unflatten(2, (k.shape[2], -1)), k.double()).flatten(1, 2)
    sums = weights_of(scores, state, unit).sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-5)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_sizes_of_nothing(device):
    for batch, rows, heads in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        total, known = blank((batch, rows, heads, 8), device=device)
        _C.merge(total, known, [(0, rows, total.clone(), known.clone())], 1.0, False)
        assert_same_kind(total, total.new_zeros(batch, rows, heads, 8))


def good(device="cpu"):
    """Arguments by name, those of the second of two parts among them."""
    zeros = {"device": device}
    return {
        "out": torch.zeros(2, 5, 3, 16, dtype=F16, **zeros),
        "state": torch.zeros(2, 2, 3, 5, **zeros),
        "begin": 1,
        "end": 4,
        "part": torch.zeros(2, 3, 3, 16, dtype=F16, **zeros),
        "of_part": torch.zeros(2, 2, 3, 3, **zeros),
        "adds": False,
    }


def call(out, state, begin, end, part, of_part, adds):
    first = torch.zeros(2, 5, 3, 16, dtype=F16, device=out.device), torch.zeros(2, 2, 3, 5, device=out.device)
    _C.merge(out, state, ((0, 5, *first), (begin, end, part, of_part)), 1.0, adds)


# name: (which argument, what becomes of it, exception, what the message holds)
BAD = {
    "a result of three dimensions": (
        *("out", lambda x: x[0], ValueError),
        r"out has shape \(5, 3, 16\), expected 4 dimensions = \(B, S, H, D_v\)",
    ),
    "an odd D_v": ("out", lambda x: x[..., :12], ValueError, r"out has shape \(2, 5, 3, 12\), expected D_v to be a"),
    "gaps in the result": (
        *("out", lambda x: x.repeat(1, 1, 1, 2)[..., ::2], ValueError),
        "out has stride 2 in its last dimension, expected 1",
    ),
    "another dtype": (
        "out",
        torch.Tensor.bfloat16,
        TypeError,
        r"out has dtype bfloat16, expected float16, as parts\[0",
    ),
    "a result of integers": ("out", torch.Tensor.int, TypeError, "out has dtype int32, expected float32, float16 or b"),
    "rows before heads": (
        *("state", lambda x: x.transpose(2, 3), ValueError),
        r"state has shape \(2, 2, 5, 3\), expected \(2, 2, 3, 5\) = \(2, B, H, S\)",
    ),
    "a sum with states": ("state", lambda _: None, TypeError, r"parts\[0\].state is a tensor, expected None, as state"),
    "rows before the first": (
        "begin",
        lambda _: -1,
        ValueError,
        r"parts\[1\] has rows \[-1, 4\), expected rows of S = 5",
    ),
    "rows behind the last": ("end", lambda _: 6, ValueError, r"parts\[1\] has rows \[1, 6\), expected rows of S = 5"),
    "rows that end early": ("end", lambda _: 0, ValueError, r"parts\[1\] has rows \[1, 0\), expected rows of S = 5"),
    "other rows": (
        *("part", lambda x: x[:, 1:], ValueError),
        r"parts\[1\].out has shape \(2, 2, 3, 16\), expected \(2, 3, 3, 16\) = \(B, end - begin, H, D_v\)",
    ),
    "gaps": (
        *("part", lambda x: x.repeat(1, 1, 1, 2)[..., ::2], NotImplementedError),
        r"parts\[1\].out has stride 2 in its last",
    ),
    "integers": (
        "part",
        torch.Tensor.int,
        TypeError,
        r"parts\[1\].out has dtype int32, expected float32, float16 or bf",
    ),
    "float64": ("part", torch.Tensor.double, TypeError, r"parts\[1\].out has dtype torch.float64, expected float32, f"),
    "parts of two dtypes": (
        *("part", torch.Tensor.float, TypeError),
        r"parts\[1\].out has dtype float32, expected float16, as parts\[0\].out",
    ),
    "an lse": (
        *("of_part", lambda x: x[0], ValueError),
        r"parts\[1\].state has shape \(2, 3, 3\), expected 4 dimensions = \(2, B, H, end - begin\)",
    ),
    "a state of 16 bits": (
        "of_part",
        torch.Tensor.half,
        TypeError,
        r"parts\[1\].state has dtype float16, expected float32",
    ),
    "no state": (
        "of_part",
        lambda _: None,
        TypeError,
        r"parts\[1\].state is missing, expected a tensor \(2, B, H, end",
    ),
    "no tensor": (
        "of_part",
        torch.Tensor.tolist,
        TypeError,
        r"parts\[1\].state is of type list, expected a torch.Tensor",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_refusals(name):
    argument, change, exception, message = BAD[name]
    arguments = good()
    call(**arguments)
    arguments[argument] = change(arguments[argument])
    with pytest.raises(exception, match=f"^merge: {message}"):
        call(**arguments)


@pytest.mark.parametrize("count", [0, 9])
def test_numbers_of_parts(count):
    out, state = blank((1, 4, 1, 8))
    with pytest.raises(ValueError, match=f"^merge: parts has {count}, expected 1 to 8"):
        _C.merge(out, state, ((0, 4, out.clone(), state.clone()),) * count, 1.0, False)


@pytest.mark.gpu
def test_refusals_on_a_gpu():
    arguments = good("cuda")
    call(**arguments)
    with pytest.raises(ValueError, match=r"^merge: parts\[1\].state is on cpu, expected cuda:0, as out"):
        call(**{**arguments, "of_part": arguments["of_part"].cpu()})
    for name, argument in (("part", r"parts\[1\].out"), ("out", "out")):
        with pytest.raises(
            _C.Unreadable, match=f"^merge: {argument} is at an address that is not a multiple of 16 bytes"
        ):
            call(**{**arguments, name: lay_out(arguments[name], "misaligned")})
