"""The accuracy bar: at most twice the error that PyTorch makes with the same formula in the same precision."""

import math

import torch


def _where_different(actual, expected):
    index = tuple((actual != expected).nonzero()[0].tolist())
    return f"first at {index}, {int((actual != expected).sum())} of {actual.numel()} elements"


def assert_same_kind(actual, exact, what="out"):
    """Shapes agree, and NaN, inf and -inf stand in the same places. Values say nothing before this holds."""
    assert actual.shape == exact.shape, f"{what} has shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        found, expected = kind(actual), kind(exact)
        assert torch.equal(found, expected), f"{what}: {kind.__name__} differs, {_where_different(found, expected)}"


def assert_accurate(actual, exact, rough, what="out", slack=0.0):
    """max|actual - exact| <= 2 max|rough - exact| + a rounding of the largest value + slack.

    `exact` is the float64 result and `rough` the same formula computed in the inputs' precision.
    """
    assert_same_kind(actual, exact, what)
    finite = torch.isfinite(exact)
    if not finite.any():
        return
    exact = torch.where(finite, exact, 0).double()
    error = (torch.where(finite, actual, 0).double() - exact).abs()
    rough_error = (torch.where(finite, rough, 0).double() - exact).abs().max().item()
    bar = 2 * rough_error + 2 * torch.finfo(actual.dtype).eps * exact.abs().max().item() + 1e-7 + slack
    worst = error.max().item()
    if worst <= bar:
        return
    index = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    raise AssertionError(
        f"{what}: error {worst:.3g} at {index} (found {actual[index].item():.6g}, exact {exact[index].item():.6g}) is "
        f"over the bar {bar:.3g}; the same formula in {actual.dtype} errs by {rough_error:.3g}"
    )


def score_rounding(lse, values=None):
    """What PyTorch's formula need not suffer: float32 scores in the log2 domain are rounded by eps times their size,
    where the formula may meet exact numbers; and a backward takes its weights again from exp(s - lse). The effect on
    the scores, or on results of the size of `values`."""

    def size(x):
        return 1.0 if x is None or x.numel() == 0 else max(1.0, torch.where(x.isfinite(), x, 0).abs().max().item())

    return torch.finfo(torch.float32).eps * size(lse) * size(values)


def largest(x):
    """Of what is finite: the rows of a ragged batch's tail are NaN, and an lse may be -inf."""
    return torch.where(x.isfinite(), x, 0).abs().max().item() if x.numel() else 0.0


def row_rounding(q, k, error, scale=None):
    """The errors that dq and dk have where each row's dS is off by P times up to `error`. Those of all rows of a key
    add up like a random walk."""
    scale = q.shape[-1] ** -0.5 if scale is None else abs(scale)
    rows = q.shape[-3] * q.shape[-2] // max(k.shape[-2], 1)
    return scale * error * largest(k), scale * error * largest(q) * math.sqrt(rows)


def difference_rounding(q, k, v, dout, scale=None, dropout_p=0.0, out=None):
    """The errors that dq and dk may have from dS = P (dP - delta). Both are float32 sums over D_v, each rounded in its
    own way, and where a row has one key, nothing else is left of dS; the formula subtracts a sum from itself. Errors of
    the products of a sum add up like a random walk. Where `out` is given, so do those of its rounding to the dtype, by
    up to eps/2: delta = Σ dout · out is taken from what the forward left."""
    error = torch.finfo(torch.float32).eps * largest(dout.float().norm(dim=-1)) * largest(v) / (1 - dropout_p)
    if out is not None:
        error += torch.finfo(out.dtype).eps / 2 * largest((dout.float() * out.float()).norm(dim=-1))
    return row_rounding(q, k, error, scale)


def sink_rounding(out, lse, dout, sinks, keys=0):
    """The error that dsinks may have from the rounding of `out`: where every head has one number, the formula may be
    right by luck. A backward takes delta = Σ dout · out, each product off by up to eps/2, and sums over rows; errors of
    either sign add up like a random walk. So do those of the float32 sum over `keys` that `out` was before."""
    lse = lse.double().transpose(-1, -2)  # (B, S_q, H_q), or (T_q, H_q)
    steps = (dout.double() * out.double()).square().sum(dim=-1) * (sinks.double() - lse).exp().square()
    steps = steps.where(lse > -math.inf, 0)  # of a ragged batch's rows that do not count
    eps = torch.finfo(out.dtype).eps + torch.finfo(torch.float32).eps / 2 * math.sqrt(keys)
    return eps * steps.flatten(0, -2).sum(dim=0).max().sqrt().item()


def assert_bitwise(actual, expected, what="out"):
    """The same bits, NaN payloads and signs of zero aside."""
    assert_same_kind(actual, expected, what)
    same = torch.equal(torch.nan_to_num(actual), torch.nan_to_num(expected))
    assert same, f"{what} differs in its bits, {_where_different(actual, expected)}"


def assert_same(found, expected):
    """Results by name, to the bit."""
    for what, x in expected.items():
        assert_bitwise(found[what], x, what)
