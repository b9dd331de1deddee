"""Gradients: against float64 autograd over the matrix of cases, against finite differences, through autograd."""

import functools

import pytest
import reference
import torch
from cases import BF16, CASES, DEVICE_PARAMS, F16, F32, Case, on_devices
from compare import assert_accurate, assert_bitwise, difference_rounding, score_rounding, sink_rounding

import flashtile

WHAT = ("dq", "dk", "dv")


def differentiable(case, device="cpu", dtype=None):
    """(inputs, options) of a case: inputs are q, k, v and the sinks, if there are any, with gradients."""
    inputs, options = case.tensors(device), case.options(device)
    if "sinks" in options:
        inputs.append(options["sinks"])
    inputs = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
    return inputs, options | ({"sinks": inputs[3]} if "sinks" in options else {})


def gradient_names(case):
    return WHAT if case.sinks is None else (*WHAT, "dsinks")


def reference_gradients(case, dtype, dout, dlse, formula=reference.attention):
    """Gradients of the formula computed in `dtype`, with autograd."""
    inputs, options = differentiable(case, dout.device, dtype)
    out, lse = formula(*inputs[:3], dtype=dtype, **options)
    return torch.autograd.grad([out, lse], inputs, [dout.to(dtype), dlse.to(dtype)])


@pytest.mark.parametrize("case, device", on_devices(CASES))
def test_backward(case, device, attention, gradients):
    check(case, device, attention, gradients, deterministic=False)  # None would mean True in `gradients`


DETERMINISTIC = [
    Case(f"{mask}_D{head_dim}_S{seqlen_q}x{seqlen_k}_H{heads_q}", dtype=dtype, head_dim=head_dim, **sizes, **options)
    for mask, options in {
        "full": {},
        "causal": {"causal": True},
        "window": {"window": (101, 13)},
        "left": {"window": (37, 0)},
        "right": {"window": (None, 70), "softcap": 5.0},
        "sinks_dropout": {"causal": True, "sinks": 0.0, "dropout_p": 0.2},
        "alibi": {"alibi": "per head", "causal": True},
    }.items()
    for head_dim in (64, 96, 128, 192, 256)
    for seqlen_q, seqlen_k in ((401, 401), (160, 500), (500, 160), (65, 30))
    for dtype in (F16, BF16)
    for heads_q, heads_k in ((4, 2), (12, 1))  # the more heads of a group, the more thread blocks share a block of keys
    for sizes in [dict(seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=heads_q, heads_k=heads_k)]
]


@pytest.mark.parametrize("case, device", on_devices(DETERMINISTIC, ["cuda"]))
def test_backward_deterministic(case, device, attention, gradients):
    check(case, device, attention, gradients, deterministic=True)


# The contract's edges, and operands that are not contiguous.
EDGES = [
    c
    for c in CASES
    if c.name.startswith(("no_", "sinks_dropout_everything", "mostly_blind", "gaps", "group", "few_", "S1"))
]


@pytest.mark.parametrize("case, device", on_devices(EDGES))
def test_backward_deterministic_at_the_edges(case, device, attention, gradients):
    check(case, device, attention, gradients, deterministic=True)


def check(case, device, attention, gradients, deterministic, formula=reference.attention):
    inputs, options = differentiable(case, device)
    out, lse = attention(*inputs[:3], return_lse=True, deterministic=deterministic, **options)
    dout, dlse = case.incoming(out, lse)
    found = gradients([out, lse], inputs, [dout, dlse])
    exact = reference_gradients(case, torch.float64, dout, dlse, formula)
    rough = reference_gradients(case, case.dtype, dout, dlse, formula)
    for what, x, *values in zip(gradient_names(case), inputs, found, exact, rough, strict=True):
        assert values[0].dtype is x.dtype
        slack = score_rounding(lse, values[1])
        if what == "dsinks" and case.heads_q > 0:
            slack += sink_rounding(out, lse, dout, x, keys=inputs[1].shape[-3])
        elif what in ("dq", "dk") and case.dropout_p > 0:  # a causal row may have one key, and others few that stay
            q, k, v = (x.detach() for x in inputs[:3])
            of_dq, of_dk = difference_rounding(q, k, v, dout, case.scale, case.dropout_p)
            slack += of_dq if what == "dq" else of_dk
        assert_accurate(*values, what, slack=slack)


def test_long_sums_round_little(attention, gradients):
    """dK and dV of a key add over every query: one chain of 2,048 additions would err by five times the bar."""
    case = Case("long", dtype=F32, seqlen_q=2048, seqlen_k=2048, head_dim=64, causal=True)
    inputs = case.tensors(requires_grad=True)
    out, lse = attention(*inputs, return_lse=True, causal=True)
    dout, dlse = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)), torch.zeros_like(lse)
    found = gradients([out, lse], inputs, [dout, dlse])
    exact = reference_gradients(case, torch.float64, dout, dlse)
    rough = reference_gradients(case, F32, dout, dlse)
    for what, *values in zip(WHAT, found, exact, rough, strict=True):
        assert_accurate(*values, what)


SMALL = Case("small", dtype=F32, batch=1, seqlen_q=5, seqlen_k=7, heads_q=2, heads_k=1, head_dim=8)
GRADCHECK_OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25])},
    "everything": {"softcap": 2.0, "window": (3, 1), "scale": -0.7, "alibi_slopes": torch.tensor([[0.5, 0.25]])},
    "sinks": {"sinks": torch.tensor([1.0, -0.5])},
    "sinks and a window": {"sinks": torch.tensor([1.0, -0.5]), "window": (1, 0)},
    "dropout": {"dropout_p": 0.4, "seed": 11},
    "sinks, dropout and more": {
        "sinks": torch.tensor([1.0, -0.5]),
        "dropout_p": 0.4,
        "seed": 12,
        "softcap": 2.0,
        "window": (3, 1),
        "alibi_slopes": torch.tensor([[0.5, 0.25]]),
    },
}


def gradcheck_of(function, name, dtype):
    """The function of the inputs that get gradients, and these: q, k, v and the sinks, if there are any."""
    options = GRADCHECK_OPTIONS[name]
    inputs = [*SMALL.tensors(), *([options["sinks"]] if "sinks" in options else [])]

    def of_inputs(q, k, v, *sinks):
        return function(q, k, v, **options | ({"sinks": sinks[0]} if sinks else {}))

    return of_inputs, [x.detach().to(dtype).requires_grad_() for x in inputs]


@pytest.mark.parametrize("name", GRADCHECK_OPTIONS)
@pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double precision")
def test_gradcheck(name, attention):
    # Central differences of float32 values: truncation grows with eps², rounding with 1e-7/eps.
    function, inputs = gradcheck_of(functools.partial(attention, return_lse=True), name, F32)
    assert torch.autograd.gradcheck(function, inputs, eps=1e-2, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("name", GRADCHECK_OPTIONS)
def test_gradcheck_of_the_reference(name):
    assert torch.autograd.gradcheck(*gradcheck_of(reference.attention, name, torch.float64))


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (3,), (0, 3), (1, 3), (2, 3)])
@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_only_needed_gradients(needed, device, attention):
    # A single block of keys: nothing adds up in dq, so that it repeats on CUDA too.
    case = Case("partial", dtype=F16, heads_q=4, heads_k=2, causal=True, seqlen_k=30)
    with_sinks = 3 in needed

    def run(*needed):
        inputs = case.tensors(device)
        options = {"causal": True}
        if with_sinks:
            inputs.append(torch.linspace(-1, 2, 4, device=device))
            options["sinks"] = inputs[3]
        for i in needed:
            inputs[i].requires_grad_()
        attention(*inputs[:3], **options).square().sum().backward()
        return inputs

    everything, some = run(*range(3 + with_sinks)), run(*needed)
    for i, what in enumerate((*WHAT, "dsinks")[: 3 + with_sinks]):
        if i in needed:
            assert_bitwise(some[i].grad, everything[i].grad, what)
        else:
            assert some[i].grad is None, f"{what} was computed though not asked for"


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_one_output_differentiated_at_a_time(dtype, attention, gradients):
    """dout alone plus dlse alone is dout and dlse together, and a loss without lse never sees it."""
    case = Case("split", dtype=dtype, window=(9, 3))
    inputs = case.tensors(requires_grad=True)
    out, lse = attention(*inputs, window=(9, 3), return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    both = gradients([out, lse], inputs, [dout, dlse])
    out, lse = attention(*inputs, window=(9, 3), return_lse=True)
    (only_out,) = [torch.autograd.grad(out, inputs, dout, retain_graph=True)]
    only_lse = torch.autograd.grad(lse, inputs, dlse, allow_unused=True)
    plain = gradients(attention(*inputs, window=(9, 3)), inputs, dout)
    for what, x, a, b, c in zip(WHAT, both, only_out, only_lse, plain, strict=True):
        torch.testing.assert_close(a + b, x, rtol=0, atol=8 * torch.finfo(dtype).eps * x.abs().max().item())
        assert_bitwise(a, c, what)


def test_gradient_of_a_sum_has_stride_zero(attention):
    case = Case("sum", dtype=F32)
    x, y = case.tensors(requires_grad=True), case.tensors(requires_grad=True)
    out, lse = attention(*x, return_lse=True)
    (out.sum() + lse.sum()).backward()
    out, lse = attention(*y, return_lse=True)
    torch.autograd.backward([out, lse], [torch.ones_like(out), torch.ones_like(lse)])
    for what, a, b in zip(WHAT, x, y, strict=True):
        assert_bitwise(a.grad, b.grad, what)


def test_gradient_in_another_layout(attention, gradients):
    """dout may come with any strides: heads first, as after a transpose."""
    inputs = Case("strides", dtype=F32, heads_q=4, heads_k=2).tensors(requires_grad=True)
    out = attention(*inputs)
    dout = torch.randn_like(out)
    expected = gradients(out, inputs, dout)
    strided = dout.transpose(1, 2).contiguous().transpose(1, 2)
    found = gradients(attention(*inputs), inputs, strided)
    for what, a, b in zip(WHAT, found, expected, strict=True):
        assert_bitwise(a, b, what)


def test_same_tensor_as_q_k_and_v(attention):
    x = Case("self", dtype=F32, seqlen_q=33, heads_q=2).tensors()[0].requires_grad_()
    attention(x, x, x, causal=True).square().sum().backward()
    y = x.detach().double().requires_grad_()
    reference.attention(y, y, y, causal=True)[0].square().sum().backward()
    torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-4, atol=1e-4)


def test_backward_repeats_bitwise(attention, gradients):
    inputs = Case("repeat", dtype=BF16, heads_q=4, heads_k=2, causal=True).tensors(requires_grad=True)
    out = attention(*inputs, causal=True)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    for _ in range(20):
        for what, a, b in zip(WHAT, torch.autograd.grad(out, inputs, dout, retain_graph=True), first, strict=True):
            assert_bitwise(a, b, what)


def ragged(q, k, v, **options):
    begins = torch.tensor([0, q.shape[1]], dtype=torch.int32)
    out = flashtile.attention_varlen(q[0], k[0], v[0], cu_seqlens_q=begins, cu_seqlens_k=begins, **options)
    return out[1][None] if isinstance(out, tuple) else out[None]


TWICE = {
    "out": lambda q, k, v: flashtile.attention(q, k, v),
    "lse": lambda q, k, v: flashtile.attention(q, k, v, return_lse=True)[1],
    "dropout": lambda q, k, v: flashtile.attention(q, k, v, dropout_p=0.5),
    "sinks": lambda q, k, v: flashtile.attention(q, k, v, sinks=torch.zeros(q.shape[2])),
    "max_logits": lambda q, k, v: flashtile.attention(q, k, v, return_max_logits=True)[0],
    "ragged": ragged,
    "ragged lse": lambda q, k, v: ragged(q, k, v, return_lse=True),
}


@pytest.mark.parametrize("what", TWICE)
def test_second_derivative_is_refused(what):
    """Also where the incoming gradient is a constant, as that of a sum."""
    q, k, v = torch.randn(3, 1, 5, 2, 8)
    q.requires_grad_()
    for loss in (lambda out: out.sum(), lambda out: out.square().sum()):
        out = loss(TWICE[what](q, k, v))
        (dq,) = torch.autograd.grad(out, q, create_graph=True)
        with pytest.raises(NotImplementedError, match=r"^attention: differentiated twice, expected once"):
            (out + dq.square().sum()).backward()


def test_first_derivatives_with_a_graph_are_those_without(attention):
    inputs = SMALL.tensors(requires_grad=True)
    out = attention(*inputs)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    found = torch.autograd.grad(out, inputs, dout, create_graph=True)
    for what, a, b in zip(WHAT, found, expected, strict=True):
        assert_bitwise(a, b, what)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("changed", ["q", "k", "v", "slopes", "sinks", "out"])
def test_changing_what_backward_needs_is_noticed(changed, return_lse, attention):
    q, k, v = SMALL.tensors(requires_grad=True)
    slopes, sinks = (torch.full((SMALL.heads_q,), 0.1) for _ in range(2))
    out = attention(q, k, v, alibi_slopes=slopes, sinks=sinks, return_lse=return_lse)
    out = out[0] if return_lse else out
    total = out.sum()
    with torch.no_grad():
        {"q": q, "k": k, "v": v, "slopes": slopes, "sinks": sinks, "out": out}[changed].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
