"""Tensors whose memory holds the negatives of their numbers, which PyTorch keeps as a bit: torch._neg_view(x), and
z.conj().imag. What is read is resolved; a cache, which is written where it lies, is refused."""

import pytest
import torch
from cached import CASES as CACHED_CASES
from cached import Cached, results
from cases import BF16, DEVICE_PARAMS, F32, Case, on_devices
from compare import assert_bitwise, assert_same
from ragged import Ragged
from test_backward import differentiable
from traced import assert_all_bitwise, attend, compiled, quiet

import flashtile
from flashtile import _C
from flashtile.compat import flash_attn

pytestmark = quiet

options = dict(heads_q=4, heads_k=2, causal=True, alibi="per batch and head", sinks=0.0)
CASES = [
    Case("dense", dtype=F32, **options),
    Case("dense", dtype=BF16, **options),
    Ragged("ragged", dtype=F32, **options),
]


def negated(x):
    found = torch._neg_view(-x)
    assert found.is_neg()
    return found


@pytest.fixture(params=["exchange", "attributes"])
def way(request):
    """By which tensors come over: see test_tensors.py."""
    _C._enable_exchange(request.param == "exchange")
    yield request.param
    _C._enable_exchange(True)


def tensors_of(case, device):
    """(function, every tensor of a call by name, the other options)."""
    given = dict(zip("qkv", case.tensors(device), strict=True)) | case.options(device)
    function = flashtile.attention
    if isinstance(case, Ragged):
        given |= case.tables(device)
        function = flashtile.attention_varlen
    tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    return function, tensors, {name: x for name, x in given.items() if name not in tensors}


@pytest.mark.parametrize("case, device", on_devices(CASES))
def test_each_operand(case, device, way):
    function, tensors, others = tensors_of(case, device)
    expected = function(**tensors, **others, return_lse=True)
    shown = flashtile.explain(**tensors, **others)
    assert {"q", "k", "v", "alibi_slopes", "sinks"} <= tensors.keys()
    for name, x in tensors.items():
        given = {**tensors, name: negated(x)}
        assert_all_bitwise(function(**given, **others, return_lse=True), expected)
        assert flashtile.explain(**given, **others) == shown
    everything = {name: negated(x) for name, x in tensors.items()}
    assert_all_bitwise(function(**everything, **others, return_lse=True), expected)


@pytest.mark.parametrize("case, device", on_devices(CASES))
def test_gradients(case, device, way):
    """Of operands that are negated, and where those of the results come in so."""
    inputs, options = differentiable(case, device)
    out, lse = attend(case, inputs, options, return_lse=True, deterministic=True)
    incoming = case.incoming(out, lse)
    expected = torch.autograd.grad([out, lse], inputs, incoming, retain_graph=True)
    found = torch.autograd.grad([out, lse], inputs, [negated(x) for x in incoming])
    assert_all_bitwise(found, expected)

    results = attend(case, [negated(x) for x in inputs], options, return_lse=True, deterministic=True)
    assert_all_bitwise(torch.autograd.grad(results, inputs, incoming), expected)
    out = attend(case, [negated(x) for x in inputs], options, deterministic=True)
    alone = torch.autograd.grad(attend(case, inputs, options, deterministic=True), inputs, incoming[0])
    assert_all_bitwise(torch.autograd.grad(out, inputs, negated(incoming[0])), alone)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_imaginary_parts_of_conjugates(dtype):
    """Rows of one number, whose stride means nothing, are not refused for their strides."""
    z = torch.randn(1, 1, 1, 1, dtype=torch.complex64)
    part = z.conj().imag
    assert part.is_neg()
    q, k, v = (torch.randn(1, 1, 1, 16, dtype=dtype) for _ in range(3))
    given, plain = part[0, 0, 0], -z.imag[0, 0, 0].clone()
    for name in ("alibi_slopes", "sinks"):
        found = flashtile.attention(q, k, v, **{name: given}, return_lse=True)
        assert_all_bitwise(found, flashtile.attention(q, k, v, **{name: plain}, return_lse=True))
    q.requires_grad_()
    _, lse = flashtile.attention(q, k, v, return_lse=True)
    expected = torch.autograd.grad(lse, q, plain[None, None], retain_graph=True)
    assert_all_bitwise(torch.autograd.grad(lse, q, part[0]), expected)


everything = [case for case in CACHED_CASES if case.name.startswith("everything") and case.dtype is F32]
CACHES = [*everything, Cached("indexed", dtype=F32, seqlen_q=3, new=2, indexed=True, rotary=32, sinks=0.0)]


@pytest.mark.parametrize("case, device", on_devices([*CACHES, Cached("append", dtype=BF16, new=1)]))
def test_each_operand_of_a_call_over_a_cache(case, device, way):
    given = case.arguments(device)
    expected = results(given)
    for name, x in given.items():
        if isinstance(x, torch.Tensor) and not name.endswith("_cache"):
            assert_same(results({**given, name: negated(x)}), expected)


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@pytest.mark.parametrize("new", [None, 1])
@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_caches_are_refused(name, new, device, way):
    given = Cached("refused", dtype=BF16, new=new).arguments(device)
    given[name] = negated(given[name])
    before = {cache: given[cache].clone() for cache in ("k_cache", "v_cache")}
    with pytest.raises(
        NotImplementedError, match=rf"^attention_kvcache: {name} is negated lazily.*resolve_neg"
    ) as raised:
        flashtile.attention_kvcache(**given)
    assert raised.type is NotImplementedError
    for cache, x in before.items():
        assert_bitwise(given[cache], x, cache)


def test_other_interfaces():
    q, k, v = torch.randn(3, 2, 40, 4, 64).unbind()
    negatives = [negated(x) for x in (q, k, v)]
    assert_bitwise(flash_attn.flash_attn_func(*negatives), flash_attn.flash_attn_func(q, k, v))
    given = [x.transpose(1, 2) for x in (q, k, v)]
    expected = flashtile.scaled_dot_product_attention(*given)
    assert_bitwise(flashtile.scaled_dot_product_attention(*map(negated, given)), expected)
    outs, lses = torch.randn(3, 2, 40, 4, 64), torch.randn(3, 2, 4, 40)
    assert_all_bitwise(flashtile.combine(negated(outs), negated(lses)), flashtile.combine(outs, lses))
    assert_all_bitwise(flashtile.combine([*map(negated, outs)], [*map(negated, lses)]), flashtile.combine(outs, lses))


def test_where_pytorch_traces():
    inputs = Case("traced", dtype=F32).tensors()
    expected = flashtile.attention(*inputs)
    negatives = [negated(x) for x in inputs]
    assert_bitwise(compiled(flashtile.attention)(*negatives), expected)
    assert_bitwise(torch.vmap(flashtile.attention)(*(x[None] for x in negatives))[0], expected)
    given = Cached("traced", dtype=F32, new=1).arguments()
    assert_same(
        results({**given, "k_new": negated(given["k_new"])}, compiled(flashtile.attention_kvcache)), results(given)
    )


def test_subclasses():
    class Marked(torch.Tensor):
        pass

    q, k, v = Case("types", dtype=F32).tensors()
    expected = flashtile.attention(q, k, v)
    found = flashtile.attention(negated(q).as_subclass(Marked), k, v)
    assert_bitwise(found.as_subclass(torch.Tensor), expected)
    assert_bitwise(flashtile.attention(q, torch.nn.Parameter(negated(k)), v).detach(), expected)


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="this PyTorch has no table of functions for exchanging tensors, expected 2.10 or newer",
)
def test_plain_tensors_are_not_asked(monkeypatch):
    """It would take 0.1 µs each: the module knows where PyTorch keeps the bit."""
    asked = []
    monkeypatch.setattr(torch.Tensor, "is_neg", lambda x: asked.append(x) or False, raising=False)
    q, k, v = Case("plain", dtype=F32).tensors()
    flashtile.attention(q, k, torch.nn.Parameter(v), sinks=torch.nn.Parameter(torch.zeros(2)))
    assert not asked
    flashtile.attention(q, torch._neg_view(k), v)
    assert asked
