"""Under torch.compile the calls do what eager ones do, to the bit, in one graph."""

import warnings

import pytest
import torch
from cached import Cached, ints, results
from cases import BF16, DEVICE_PARAMS, F16, F32, SEED, Case, on_devices
from compare import assert_bitwise, assert_same
from ragged import Ragged
from test_backward import differentiable
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from traced import (
    CACHES,
    CASES,
    Recorded,
    assert_all_bitwise,
    attend,
    compiled,
    dropout,
    gradients_of,
    grouped,
    quiet,
    seeded_gradients,
)

import flashtile
from flashtile import _C
from flashtile._options import DETERMINISTIC
from flashtile.compat import flash_attn, flash_attn_interface
from flashtile.compat.layers import rotary

pytestmark = quiet


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch.compiler.reset()


# ---- attention, dense and ragged


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case, device", on_devices(CASES))
def test_compiled_calls_are_eager_ones(case, device, dynamic):
    inputs, options = differentiable(case, device)

    def function(*inputs):
        return attend(case, inputs, options, return_lse=True, deterministic=True)

    call = compiled(function, dynamic=dynamic)
    found, expected = call(*inputs), function(*inputs)
    assert_all_bitwise(found, expected)
    assert [x.stride() for x in found] == [x.stride() for x in expected]
    assert_all_bitwise(gradients_of(call, inputs), gradients_of(function, inputs))
    assert_bitwise(compiled(lambda *x: function(*x)[0])(*inputs), expected[0])


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_inductor(device):
    """Between operations that it fuses, whose layouts it chooses."""
    case = Case("inductor", dtype=BF16, causal=True, sinks=0.0, head_dim_v=128, **grouped)
    inputs, options = differentiable(case, device)

    def function(q, k, v, sinks):
        q, k, v = ((x.transpose(1, 2) * 2).transpose(1, 2) for x in (q, k, v))
        out, lse = flashtile.attention(q, k, v, **{**options, "sinks": sinks}, return_lse=True, deterministic=True)
        return out.transpose(1, 2) + 1, lse

    call = compiled(function, "inductor")
    assert_all_bitwise(call(*inputs), function(*inputs))
    assert_all_bitwise(gradients_of(call, inputs), gradients_of(function, inputs))


def test_other_sizes_need_no_other_graph():
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(flashtile.attention, backend=counter, fullgraph=True, dynamic=True)
    for batch, seqlen_q, seqlen_k in ((4, 65, 97), (3, 33, 50), (5, 1100, 40)):
        sizes = dict(batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **grouped)
        inputs = Case("sizes", dtype=F32, **sizes).tensors()
        assert_bitwise(call(*inputs, causal=True), flashtile.attention(*inputs, causal=True))
        if batch == 4:
            first = counter.frame_count
    assert counter.frame_count == first


@pytest.mark.parametrize("name", ["window", "seed", "max_seqlen"])
def test_other_integers_need_no_other_graph(name):
    """But one for the first, which PyTorch takes for a constant."""
    case = Ragged("integers", dtype=F32)
    inputs, tables = case.tensors(), case.tables()

    def function(n):
        option = {
            "window": dict(window=(n, None)),
            "seed": dict(seed=n, dropout_p=0.3),
            "max_seqlen": dict(max_seqlen_q=n, max_seqlen_k=n),
        }[name]
        return flashtile.attention_varlen(*inputs, **tables, **option)

    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(function, backend=counter, fullgraph=True)
    for n in (130, 131, 150, 1000):
        assert_bitwise(call(n), function(n))
    assert counter.frame_count <= 2


def test_max_seqlen_may_be_a_tensor_or_known_at_run_time_alone():
    case = Ragged("lengths", dtype=F32)
    inputs, tables = case.tensors(), case.tables()
    expected = flashtile.attention_varlen(*inputs, **tables)

    def function(longest):
        return flashtile.attention_varlen(*inputs, max_seqlen_q=longest, max_seqlen_k=longest, **tables)

    assert_bitwise(compiled(function)(torch.tensor(130)), expected)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert_bitwise(compiled(lambda longest: function(longest.item()))(torch.tensor(130)), expected)


def _want_numbers_of_tensors():
    pytest.importorskip("torch", minversion="2.7", reason="TorchDynamo of PyTorch 2.6 has no numbers of tensors")


SCALES = {
    "of sizes": lambda q, x: 1 / q.shape[1],
    "tensor": lambda q, x: x,
    "read from a tensor": lambda q, x: x.item(),
}


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_other_scales_need_no_other_graph(scale):
    """But one for the first size. A Python float is a constant to PyTorch."""
    if scale is SCALES["tensor"]:
        _want_numbers_of_tensors()

    def function(q, x):
        return flashtile.attention(q, q, q, scale=scale(q, x), softcap=scale(q, x) * 50)

    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(function, backend=counter, fullgraph=True)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for n in (5, 6, 7):
            q, x = torch.randn(2, n, 3, 16, requires_grad=True), torch.tensor(0.1 * n)
            found, expected = call(q, x), function(q, x)
            assert_bitwise(found, expected)
            assert_all_bitwise(*(torch.autograd.grad(out.sum(), q) for out in (found, expected)))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("function", ["attention", "attention_kvcache", "scaled_dot_product_attention"])
def test_numbers_of_numpy(function):
    """As 1 / numpy.sqrt(D) is one, kept in a module."""
    np = pytest.importorskip("numpy")
    _want_numbers_of_tensors()
    if function == "scaled_dot_product_attention":
        options = dict(scale=np.float64(0.3))
    else:
        options = dict(scale=np.float64(0.3), softcap=np.float32(5), window=(np.int64(20), None))
    if function == "attention_kvcache":
        options |= dict(cache_seqlens=40, num_splits=np.int64(0))
    q = torch.randn(2, 40, 40, 16)

    def call(q):
        return getattr(flashtile, function)(q, q, q, **options)

    expected = call(q)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert_bitwise(compiled(call)(q), expected)
    with Recorded() as recorded:
        assert_bitwise(call(q), expected)
    assert len(recorded.calls) == 1


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float64])
def test_autocast(dtype, device):
    q, k, v = (x.to(dtype) for x in Case("autocast", dtype=F32).tensors(device))
    for inputs in ((q, k, v), (q, k.to(F16), v)):
        with torch.autocast(device, dtype=BF16):
            expected = flashtile.attention(*inputs)
            found = compiled(flashtile.attention)(*inputs)
        assert found.dtype == expected.dtype
        assert_bitwise(found, expected)


def test_deterministic_is_asked_when_backward_runs(monkeypatch):
    asked = []

    def backward(*arguments):
        asked.append(arguments[-1][DETERMINISTIC])
        return kernel(*arguments)

    kernel = _C.backward
    monkeypatch.setattr(_C, "backward", backward)
    inputs = Case("deterministic", dtype=F32).tensors(requires_grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        out = compiled(flashtile.attention)(*inputs)
        torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.autograd.grad(out.sum(), inputs)
    assert asked == [True, False]


def test_vmap_within_a_compiled_function():
    inputs = Case("vmap", dtype=F32, batch=3).tensors()
    function = torch.vmap(lambda *x: flashtile.attention(*(each[None] for each in x)), randomness="error")
    assert_bitwise(compiled(function)(*inputs), function(*inputs))


@pytest.mark.parametrize("window", [(2**70, 3), (5, -(2**70)), (2**64, None)], ids=str)
def test_windows_beyond_64_bits(window):
    torch.compiler.reset()
    q, k, v = Case("windows", dtype=F32).tensors()
    found = compiled(lambda q: flashtile.attention(q, k, v, window=window))(q)
    assert_bitwise(found, flashtile.attention(q, k, v, window=window))


def test_errors_are_those_of_eager_calls():
    q, k, v = Case("errors", dtype=F32).tensors()
    with pytest.raises(ValueError, match=r"^attention: k has shape \(2, 97, 1, 32\), expected \(2, 97, 1, 64\)"):
        compiled(flashtile.attention)(q, k[..., :32], v)
    for x, shape in ((q[0, 0], r"\(2, 64\)"), (q[0, 0, 0, 0], r"\(\)")):
        with pytest.raises(ValueError, match=rf"^attention: q has shape {shape}, expected 4 dimensions"):
            compiled(flashtile.attention)(x, x, x)
    with pytest.raises(ValueError, match=r"^attention: dropout_p is 1.5, expected"):
        compiled(flashtile.attention)(q, k, v, dropout_p=1.5)
    # These show while the call is traced, where PyTorch leaves the graph to let them happen.
    call = torch.compile(lambda **x: flashtile.attention(q, k, v, **x), backend="aot_eager")
    with pytest.raises(TypeError, match=r"^attention: seed is -1, expected an int from 0 to 2\^64 - 1"):
        call(dropout_p=0.1, seed=-1)
    with pytest.raises(NotImplementedError, match=r"^attention: alibi_slopes requires grad"):
        call(alibi_slopes=torch.ones(2, requires_grad=True))


# ---- dropout


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_each_run_draws_another_seed_that_manual_seed_repeats(backend, device):
    inputs = Case("dropout", dtype=BF16).tensors(device, requires_grad=True)
    call = compiled(dropout, backend)
    first = seeded_gradients(call, inputs)
    assert not torch.equal(call(*inputs), call(*inputs))
    assert_all_bitwise(seeded_gradients(call, inputs), first)
    if backend != "inductor":  # which has random numbers of its own
        assert_all_bitwise(first, seeded_gradients(dropout, inputs))
    for reentrant in (True, False):
        # Under torch.compile either kind recomputes in its own way; outside, the reentrant one needs .backward().
        inside = compiled(lambda *x, reentrant=reentrant: checkpoint(dropout, *x, use_reentrant=reentrant), backend)
        assert_all_bitwise(seeded_gradients(inside, inputs), first)
    outside = seeded_gradients(lambda *x: checkpoint(call, *x, use_reentrant=False), inputs)
    assert_all_bitwise(outside, first)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_eager_checkpoints_of_either_kind(device):
    inputs = Case("dropout", dtype=BF16).tensors(device, requires_grad=True)
    _, *expected = seeded_gradients(dropout, inputs)
    for reentrant in (True, False):
        torch.manual_seed(1)
        for x in inputs:
            x.grad = None
        checkpoint(dropout, *inputs, use_reentrant=reentrant).square().sum().backward()
        assert_all_bitwise([x.grad for x in inputs], expected)


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1, 2**63, SEED, 2**64 - 1, torch.tensor(7)], ids=str)
def test_seeds(seed):
    inputs = Case("seeds", dtype=F32).tensors()
    call = compiled(lambda *x: flashtile.attention(*x, dropout_p=0.5, seed=seed))
    assert_bitwise(call(*inputs), flashtile.attention(*inputs, dropout_p=0.5, seed=seed))


# ---- caches


@pytest.mark.parametrize("case, device", on_devices(CACHES))
def test_compiled_calls_over_a_cache_are_eager_ones(case, device):
    given = case.arguments(device)
    assert_same(results(given, compiled(flashtile.attention_kvcache)), results(given))


def test_a_compiled_step_of_decoding_writes_into_the_caller_s_memory():
    """Two layers, whose caches are parts of one tensor; inductor need not copy it."""
    caches = torch.randn(2, 2, 3, 40, 2, 64)
    expected, x = caches.clone(), torch.randn(3, 1, 4, 64)
    address = caches.data_ptr()

    def step(x, caches, held):
        for k_cache, v_cache in caches:
            new = dict(k_new=x[:, :, :2], v_new=x[:, :, 2:])
            x = x + flashtile.attention_kvcache(x, k_cache, v_cache, cache_seqlens=held, **new)
        return x

    call = compiled(step, "inductor")
    for held in (ints([5, 0, 39]), ints([6, 1, 0])):
        assert_bitwise(call(x, caches, held), step(x, expected, held))
        assert_bitwise(caches, expected)
    assert caches.data_ptr() == address


def test_other_lengths_need_no_other_graph():
    given = Cached("lengths", dtype=F32).arguments()
    counter = CompileCounterWithBackend("aot_eager")

    def function(length):
        return flashtile.attention_kvcache(**{**given, "cache_seqlens": length})

    call = torch.compile(function, backend=counter, fullgraph=True)
    for length in (3, 4, 5, 9):
        assert_same(dict(out=call(length)), dict(out=function(length)))
    assert counter.frame_count <= 2


# ---- other interfaces


def test_combine():
    outs, lses = torch.randn(3, 2, 50, 4, 64), torch.randn(3, 2, 4, 50)
    lses[1, 0] = -torch.inf
    for given in ((outs, lses), (list(outs), list(lses))):
        assert_all_bitwise(compiled(flashtile.combine)(*given), flashtile.combine(*given))


heads_first = torch.randn(3, 2, 4, 70, 64, generator=torch.Generator().manual_seed(1))


SDPA_CALLS = {
    "plain": {},
    "causal": dict(is_causal=True),
    "scale": dict(scale=0.3),
    "padding": dict(attn_mask=torch.arange(70) < torch.tensor([70, 31])[:, None, None, None]),
    "bias": dict(attn_mask=torch.zeros(70, 70).bernoulli_(generator=torch.Generator().manual_seed(1))),
}


@pytest.mark.parametrize("name", SDPA_CALLS)
@pytest.mark.parametrize("head_dim", [64, 50])
def test_scaled_dot_product_attention(name, head_dim):
    """Served or left to PyTorch: no graph breaks, and nothing is said."""
    inputs = [x[..., :head_dim] for x in heads_first]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", flashtile.sdpa.FallbackWarning)
        expected = flashtile.scaled_dot_product_attention(*inputs, **SDPA_CALLS[name])
        warnings.simplefilter("error", flashtile.sdpa.FallbackWarning)
        found = compiled(flashtile.scaled_dot_product_attention)(*inputs, **SDPA_CALLS[name])
    assert_bitwise(found, expected)


def _packed():
    x = torch.randn(60, 3, 4, 64)
    return x, ints([0, 20, 60]), 40


COMPAT_CALLS = {
    "flash_attn_func": lambda module, x, cu, n: module.flash_attn_func(*x[None].unbind(2), causal=True),
    "window": lambda module, x, cu, n: module.flash_attn_func(
        *x[None, ..., :50].unbind(2), window_size=(9, -1), return_attn_probs=True
    )[:2],
    "qkvpacked": lambda module, x, cu, n: module.flash_attn_qkvpacked_func(x[None], softcap=9.0),
    "varlen": lambda module, x, cu, n: module.flash_attn_varlen_func(*x.unbind(1), cu, cu, n, n, causal=True),
    "kvcache": lambda module, x, cu, n: module.flash_attn_with_kvcache(
        x[None, :1, 0], *x[None, :, 1:].clone().unbind(2), *x[None, 1:2, 1:].unbind(2), cache_seqlens=n, causal=True
    ),
}


def _cached_by_their_rules(x, cu, n):
    """Rotary embedding without a mask, new keys of other lengths than the queries, and chunks."""
    table = torch.arange(640).view(-1, 8) / 9
    cache = x[:, 1:].reshape(2, 30, 2, 4, 64).clone().unbind(2)
    given = dict(cache_seqlens=ints([20, 4]), rotary_cos=table.cos(), rotary_sin=table.sin(), attention_chunk=7)
    new = dict(cu_seqlens_q=ints([0, 2, 5]), cu_seqlens_k_new=ints([0, 3, 7]))
    return flash_attn_interface.flash_attn_with_kvcache(x[:5, 0], *cache, *x[:7, 1:].unbind(1), **given, **new)


def _backward(module, x, cu, n):
    q, k, v = x.unbind(1)
    rows = (q, k, v, cu, cu, n, n)
    if module is flash_attn:
        out, lse, *_ = module._flash_attn_varlen_forward(*rows, 0.0, 0.125, True)
        places = [torch.empty_like(y) for y in (q, k, v)]
        scores = (0.0, 0.125, True, -1, -1, 0.0, None, False)
        module._flash_attn_varlen_backward(q, q, k, v, out, lse, *places, cu, cu, n, n, *scores)
        return (*places, out)
    out, lse, *_ = module._flash_attn_forward(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
    places = {name: torch.empty_like(y) for name, y in (("dq", q), ("dk", k), ("dv", v))}
    module._flash_attn_backward(q, q, k, v, out, lse, cu, cu, is_causal=True, **places)
    return (*places.values(), out)


COMPAT_CALLS["passes"] = _backward
COMPAT_CALLS_3 = {
    "their_rules": _cached_by_their_rules,
    "chunks": lambda x, cu, n: flash_attn_interface.flash_attn_func(*x[None].unbind(2), attention_chunk=n // 3),
    "dense_keys": lambda x, cu, n: flash_attn_interface.flash_attn_varlen_func(
        x[:, 0], x[None, :, 1].expand(2, -1, -1, -1), x[None, :, 2].expand(2, -1, -1, -1), cu, None, n, n
    ),
    "rotary": lambda x, cu, n: rotary.apply_rotary_emb(
        x[:, 0].clone(), x[:, 1, 0, :16], x[:, 2, 0, :16], False, True, 0, cu
    ),
}


@pytest.mark.parametrize("name", COMPAT_CALLS_3)
def test_compat_of_3_alone(name):
    def function(*given):
        return (COMPAT_CALLS_3[name](*given),)

    given = _packed()
    assert_all_bitwise(compiled(function)(*given), function(*given))


@pytest.mark.parametrize("name", COMPAT_CALLS)
@pytest.mark.parametrize("module", [flash_attn, flash_attn_interface], ids=["FA2", "FA3"])
def test_compat(module, name):
    def function(x, cu, n):
        found = COMPAT_CALLS[name](module, x, cu, n)
        return found if isinstance(found, tuple) else (found,)

    given = _packed()
    assert_all_bitwise(compiled(function)(*given), function(*given))
