"""Scores of any size that float32 can say: weights are those of exact scores, forward and backward, whatever offset the
scores have, and nothing ends in an infinity or a NaN."""

import dataclasses
import math

import pytest
import torch
from cases import BF16, DEVICE_PARAMS, F16, F32
from compare import assert_accurate, difference_rounding, largest, row_rounding
from reference import attention as reference

import flashtile

DTYPES = (F32, F16, BF16)


def served(device, dtype):
    return device == "cpu" or dtype != F32


DEVICE_DTYPES = [
    pytest.param(device.values[0] if hasattr(device, "values") else device, dtype, marks=getattr(device, "marks", ()))
    for device in DEVICE_PARAMS
    for dtype in DTYPES
    if served("cuda" if hasattr(device, "values") else device, dtype)
]
on_every_device = pytest.mark.parametrize("device, dtype", DEVICE_DTYPES)


@dataclasses.dataclass
class Call:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: dict

    def inputs(self):
        return self.q, self.k, self.v

    def leaves(self):
        return [x.detach().clone().requires_grad_() for x in self.inputs()]

    def exact(self, dtype=torch.float64):
        """((out, lse), [dq, dk, dv]) of the formula, for gradients of 1, 2, 1, 2, ... of out."""
        leaves = [x.detach().to(dtype).requires_grad_() for x in self.inputs()]
        out, lse = reference(*leaves, dtype=dtype, **self.options)
        return (out, lse), torch.autograd.grad(out, leaves, incoming(out))


def incoming(out):
    """Numbers that every dtype holds, in every step the same, so that dV of a key is the sum of its weights."""
    return (1 + torch.arange(out.shape[-1], device=out.device) % 2).to(out.dtype).expand(out.shape)


def offset_scores(device, dtype, base, *, head_dim=64, seqlen_q=70, seqlen_k=150, step=8, heads=(4, 2), **options):
    """A call whose raw scores are sign · base² + step · j, j from −8 to 8 by the key: all dtypes hold the factors, and
    float32 the sums. Weights are those of the small parts alone."""
    generator = torch.Generator().manual_seed(3)
    sign = -1 if base < 0 else 1
    q = torch.zeros(2, seqlen_q, heads[0], head_dim)
    k = torch.zeros(2, seqlen_k, heads[1], head_dim)
    q[..., 0], q[..., 1] = base, step
    k[..., 0] = sign * abs(base) * math.copysign(1, base)
    k[..., 1] = torch.randint(-8, 9, k.shape[:-1], generator=generator)
    v = torch.randint(-4, 5, (2, seqlen_k, heads[1], head_dim), generator=generator)
    return Call(*(x.to(dtype).to(device) for x in (q, k, v)), options)


def random_scores(device, dtype, magnitude, *, head_dim=64, seqlen_q=130, seqlen_k=200, **options):
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(2, seqlen_q, 4, head_dim, generator=generator) * magnitude
    k = torch.randn(2, seqlen_k, 2, head_dim, generator=generator) * magnitude
    v = torch.randn(2, seqlen_k, 2, head_dim, generator=generator)
    return Call(*(x.to(dtype).to(device) for x in (q, k, v)), options)


def run(call, function=None):
    leaves = call.leaves()
    out, lse = (function or flashtile.attention)(*leaves, return_lse=True, **call.options)
    return (out, lse), torch.autograd.grad(out, leaves, incoming(out))


def check(call, function=None):
    """Finite, and as accurate as the formula in float32, whose results are rounded to the dtype."""
    (out, lse), gradients = run(call, function)
    (exact_out, exact_lse), exact = call.exact()
    (rough_out, rough_lse), rough = call.exact(torch.float32)
    eps = torch.finfo(call.q.dtype).eps

    def slack_of(x):
        return 2 * eps * torch.where(x.isfinite(), x, 0).abs().max().item()

    assert_accurate(out, exact_out, rough_out, slack=slack_of(call.v))
    assert_accurate(lse, exact_lse, rough_lse, "lse", slack=torch.finfo(torch.float32).eps * largest(exact_lse))
    # P and dS are rounded to the dtype, each on its own: as difference_rounding has it, of that rounding.
    differences = difference_rounding(*call.inputs(), incoming(out), scale=call.options.get("scale"))
    larger = eps / torch.finfo(torch.float32).eps
    rows = call.q.shape[1] * call.q.shape[2] / call.k.shape[2]
    sums = sum_rounding(call, exact_out)
    slacks = [larger * x + y for x, y in zip(differences, sums, strict=True)] + [2 * eps * math.sqrt(rows)]
    for name, x, y, z, slack in zip(("dq", "dk", "dv"), gradients, exact, rough, slacks, strict=True):
        z = torch.where(z.isfinite(), z, y.to(z.dtype))  # where the plain formula fails in float32
        beyond = y.abs() - torch.finfo(x.dtype).max
        y = torch.where(beyond > 0, y * math.inf, y)
        y = torch.where(beyond.abs() <= slack, x.double(), y)  # which may be on either side
        assert_accurate(x, y, z, name, slack=slack)


def sum_rounding(call, exact_out):
    """The errors that dq and dk may have because the weights of a row, taken again from its scores, add up to 1 but for
    the rounding of exponents, which are up to log2(S_k) in size: Σ dS, which is 0, is off by that much of delta. The
    formula divides by a sum, and so is right here to a rounding of 1."""
    q, k, _ = call.inputs()
    exponents = torch.finfo(torch.float32).eps / 2 * max(1.0, math.log2(k.shape[1]))
    delta = (incoming(exact_out) * exact_out).sum(dim=-1)
    return row_rounding(q, k, exponents * largest(delta), call.options.get("scale"))


@on_every_device
@pytest.mark.parametrize("magnitude", [300, 3e4, 1e9, 1e15, 1e18])
@pytest.mark.parametrize("return_lse", [False, True])
def test_rows_of_one_key_have_its_value(device, dtype, magnitude, return_lse):
    if magnitude > torch.finfo(dtype).max:
        pytest.skip("beyond the dtype")
    q, k = ((torch.eye(16) * magnitude)[None, :, None].to(device, dtype).requires_grad_() for _ in range(2))
    v = torch.ones(1, 16, 1, 16, device=device, dtype=dtype, requires_grad=True)
    results = flashtile.attention(q, k, v, return_lse=return_lse)
    out = results[0] if return_lse else results
    out.sum().backward()
    assert torch.equal(out, v)
    assert torch.equal(v.grad, v)
    # Σ dout · out and dout · v are the same sum in another order: what is left of dS is a rounding of float32.
    assert max(q.grad.abs().max().item(), k.grad.abs().max().item()) <= 1e-6 * magnitude


BASES = [8, 64, -64, 1024, 2**12, -(2**12), 2**15, -(2**15), 2**20, 2**40, -(2**60)]


@on_every_device
@pytest.mark.parametrize("base", BASES)
def test_an_offset_of_all_scores_changes_nothing(device, dtype, base):
    if abs(base) > torch.finfo(dtype).max:
        pytest.skip("beyond the dtype")
    # 24 bits hold base² and step · j.
    check(offset_scores(device, dtype, base, step=max(2.0 ** (2 * math.log2(abs(base)) - 20), 1.0)))


SHAPES = {
    "D128": dict(head_dim=128),
    "D256": dict(head_dim=256),
    "D192": dict(head_dim=192),
    "D40": dict(head_dim=40),
    "causal": dict(causal=True, seqlen_q=150),
    "causal, few keys": dict(causal=True, seqlen_q=190),
    "window": dict(window=(20, 5), seqlen_q=150),
    "one query": dict(seqlen_q=1, seqlen_k=700),
    "long": dict(seqlen_q=300, seqlen_k=900),
    "D128 long causal": dict(head_dim=128, causal=True, seqlen_q=600, seqlen_k=600),
    "D256 long causal": dict(head_dim=256, causal=True, seqlen_q=600, seqlen_k=600),
    "one head": dict(heads=(1, 1)),
    "group": dict(heads=(16, 1)),
    "sinks": dict(sinks=True),
    "D128 sinks": dict(sinks=True, head_dim=128),
    "alibi": dict(alibi=True),
    "negative scale": dict(scale=-0.25),
    "deterministic": dict(deterministic=True, seqlen_q=300),
}


@on_every_device
@pytest.mark.parametrize("base", [2**7, 2**12, -(2**12)])
@pytest.mark.parametrize("name", SHAPES)
def test_an_offset_in_every_kind_of_call(device, dtype, base, name):
    shape = dict(SHAPES[name])
    sinks, alibi, deterministic = (shape.pop(x, False) for x in ("sinks", "alibi", "deterministic"))
    call = offset_scores(device, dtype, base, step=16, **shape)
    heads, sign = call.q.shape[2], math.copysign(1, base)
    if sinks:  # near the other scores, and far above and below them
        at = sign * base**2 / 8 if call.q.shape[3] == 64 else sign * base**2 / math.sqrt(call.q.shape[3])
        call.options["sinks"] = (at + torch.linspace(-3, 3, heads)).to(device)
        call.options["sinks"][0] = -1e30
    if alibi:
        call.options["alibi_slopes"] = torch.linspace(0.01, 0.5, heads).to(device)
    if deterministic:
        check(call, lambda *inputs, **options: flashtile.attention(*inputs, deterministic=True, **options))
    else:
        check(call)


@on_every_device
@pytest.mark.parametrize("magnitude", [30, 300, 1e4, 1e9, 1e17])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_weights_of_a_backward_add_up_to_one(device, dtype, magnitude, head_dim, causal):
    """However often the same products are summed: dV adds up to what came in, in every dimension."""
    if 5 * magnitude > torch.finfo(dtype).max:
        pytest.skip("beyond the dtype")
    call = random_scores(device, dtype, magnitude, head_dim=head_dim, causal=causal)
    (out, lse), (dq, dk, dv) = run(call)
    assert all(x.isfinite().all() for x in (out, lse, dq, dk, dv))
    came_in = incoming(out).double().sum(dim=1).unflatten(1, (2, -1)).sum(dim=2)  # of each KV head
    assert_accurate(dv.double().sum(dim=1), came_in, came_in, slack=2e-3 * came_in.abs().max().item())
    exact, _ = reference(*call.inputs(), causal=causal)
    if magnitude > 1000:  # almost every row has one key
        wrong = (out.double() - exact).abs().amax(dim=-1) > 4 * torch.finfo(dtype).eps * call.v.abs().max()
        assert wrong.double().mean() < 0.02  # rows whose two best keys float32 sums cannot tell apart


SOFTCAPS = [1e-45, 1e-40, 1e-3, 1.0, 700.0, 1e5, 1e12, 1e30, 3.4e38]


@on_every_device
@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("magnitude", [1, 30, 1e4])
def test_softcaps_of_any_size(device, dtype, softcap, magnitude):
    call = random_scores(device, dtype, magnitude, softcap=softcap)
    if magnitude == 1:
        check(call)
    else:
        results, gradients = run(call)
        assert all(x.isfinite().all() for x in (*results, *gradients))
        (exact_out, exact_lse), _ = call.exact()
        assert (results[1].double() - exact_lse).abs().max() <= 4e-6 * max(1, exact_lse.abs().max().item())
        wrong = (results[0].double() - exact_out).abs().amax(dim=-1) > 0.02 * call.v.abs().max()
        assert wrong.double().mean() < 0.02


@on_every_device
@pytest.mark.parametrize("scale", [1e-45, 1e-30, 1e5, 3e38, -3e38])
def test_scales_of_any_size(device, dtype, scale):
    """q and k are such that scores are about 1; where float16 ends, smaller ones."""
    size = math.sqrt(min(1 / abs(scale), 1e30))
    limit = torch.finfo(dtype)
    size = min(max(size, limit.smallest_normal * 64), limit.max / 64)
    call = random_scores(device, dtype, size / 3, scale=torch.tensor(scale).item())  # as float32 has it
    (out, lse), gradients = run(call)
    (exact_out, exact_lse), exact = call.exact()
    assert all(x.isfinite().all() for x in (out, lse))
    size_of_lse = max(1, exact_lse.abs().max().item())
    if size_of_lse < 1e3:
        check_loosely(out, exact_out)
        for x, y in zip(gradients, exact, strict=True):
            check_loosely(x, y)
    assert (lse.double() - exact_lse).abs().max() <= 2e-6 * size_of_lse


def check_loosely(x, exact):
    limit = torch.finfo(x.dtype)
    finite = exact.abs() < limit.max
    error = (torch.where(finite, x.double() - exact, 0)).abs().max().item()
    size = torch.where(finite, exact, 0).abs().max().item()
    assert error <= 16 * limit.eps * size + limit.smallest_normal


@on_every_device
@pytest.mark.parametrize("slope", [1e3, 1e9, 1e30, 3e38])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_slopes_of_any_size(device, dtype, slope, softcap):
    """The nearest key alone counts."""
    slopes = torch.full((4,), slope, device=device)
    check(random_scores(device, dtype, 1, alibi_slopes=slopes, softcap=softcap, seqlen_q=200))


@on_every_device
@pytest.mark.parametrize("sink", [-3e38, -1e9, 1e4, 1e9, 3e38])
def test_sinks_of_any_size(device, dtype, sink):
    call = random_scores(device, dtype, 1)
    sinks = torch.full((4,), sink, device=device, requires_grad=True)
    leaves = call.leaves()
    out, lse = flashtile.attention(*leaves, sinks=sinks, return_lse=True)
    found = torch.autograd.grad((out.float().sum(), lse.sum()), (*leaves, sinks), (torch.tensor(1.0).to(device),) * 2)
    assert all(x.isfinite().all() for x in (out, lse, *found))
    if sink > 0:  # takes all the weight
        assert not out.any()
        if sink < 1e30:
            assert torch.equal(lse, torch.full_like(lse, sink))
        assert torch.equal(found[3], torch.full_like(sinks, lse[0, 0].numel() * 2))
    else:
        nothing = flashtile.attention(*call.inputs(), sinks=torch.full_like(sinks, -torch.inf))
        assert torch.equal(out, nothing)
        # Without sinks there may be tiles of another size, whose weights, each rounded by up to half an eps of it, are
        # relative to another reference.
        alone = flashtile.attention(*call.inputs())
        slack = 0 if device == "cpu" else torch.finfo(dtype).eps / 2
        torch.testing.assert_close(out, alone, rtol=4 * slack, atol=slack)
        assert not found[3].any()


@on_every_device
@pytest.mark.parametrize("base", [2**12, -(2**12)])
def test_ragged_and_cached_rows(device, dtype, base):
    """Of sequences side by side one has large scores: the others keep their bits, and it is right."""
    steep = offset_scores(device, dtype, base, step=16, causal=True)
    plain = random_scores(device, dtype, 1, causal=True, seqlen_q=70, seqlen_k=150)
    q, k, v = (torch.cat((x[:1], y[:1])) for x, y in zip(plain.inputs(), steep.inputs(), strict=True))
    both = Call(q, k, v, dict(causal=True))
    offsets = [torch.arange(3, dtype=torch.int32, device=device) * x.shape[1] for x in (q, k)]

    def ragged(*inputs, **options):
        rows = (x.flatten(0, 1) for x in inputs)
        out, lse = flashtile.attention_varlen(*rows, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], **options)
        return out.unflatten(0, (2, -1)), lse.unflatten(1, (2, -1)).transpose(0, 1)

    check(both, ragged)
    (out, lse), gradients = run(both, ragged)
    (alone, _), gradients_alone = run(Call(*(x[:1] for x in both.inputs()), both.options), flashtile.attention)
    assert (out[:1].float() - alone.float()).abs().max() <= 4 * torch.finfo(dtype).eps * v[0].abs().max()
    for x, y in zip(gradients, gradients_alone, strict=True):
        assert (x[:1].float() - y.float()).abs().max() <= 16 * torch.finfo(dtype).eps * y.float().abs().max()

    (exact_out, exact_lse), _ = both.exact()
    for splits in (0, 1, 3):
        out, lse = flashtile.attention_kvcache(q, k, v, cache_seqlens=k.shape[1], num_splits=splits, return_lse=True)
        assert_accurate(out, exact_out, exact_out.to(dtype), slack=4 * torch.finfo(dtype).eps * v.abs().max().item())
        assert_accurate(lse, exact_lse, exact_lse.float(), "lse", slack=1e-6 * largest(exact_lse))
    few = flashtile.attention_kvcache(q[:, -3:], k, v, cache_seqlens=k.shape[1], batch_invariant=True)
    one = flashtile.attention_kvcache(q[:, -1:], k, v, cache_seqlens=k.shape[1], batch_invariant=True)
    assert torch.equal(few[:, -1:], one)
    assert_accurate(few, exact_out[:, -3:], exact_out[:, -3:].to(dtype), slack=4 * torch.finfo(dtype).eps * 4)


@on_every_device
def test_the_operators_of_compiled_calls_keep_what_a_backward_wants(device, dtype):
    call = offset_scores(device, dtype, 2**12, step=16)
    compiled = torch.compile(flashtile.attention, fullgraph=True, backend="aot_eager")
    check(call, compiled)


@on_every_device
def test_an_lse_alone_keeps_weights_below_one(device, dtype):
    """Who hands a backward an lse, not what the forward kept, gets what one float32 can say; nothing above 1."""
    from flashtile import _C
    from flashtile._options import attention_options

    call = random_scores(device, dtype, 300)
    options = attention_options(deterministic=False)
    out, lse = _C.forward_with_lse(*call.inputs(), options)
    dq, dk, dv = (torch.empty_like(x) for x in call.inputs())
    _C.backward(incoming(out).contiguous(), None, *call.inputs(), out, lse, dq, dk, dv, None, options)
    assert all(x.isfinite().all() for x in (dq, dk, dv))
    came_in = incoming(out).double().sum(dim=1).unflatten(1, (2, -1)).sum(dim=2)
    assert (dv.double().sum(dim=1) <= 1.002 * came_in).all()
