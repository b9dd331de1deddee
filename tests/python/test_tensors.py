"""Tensors of every kind that PyTorch hands over, and modes of PyTorch that a call may meet."""

import inspect

import pytest
import torch
from cases import BF16, DEVICE_PARAMS, F16, F32, Case, on_devices
from compare import assert_bitwise

import flashtile
from flashtile import _C

CASES = [
    Case("gaps", dtype=dtype, layout="gaps", causal=True, alibi="per batch and head", sinks=0.0)
    for dtype in (F32, F16, BF16)
]


@pytest.fixture
def by_attributes():
    """Tensors come over by their Python attributes, as with a PyTorch older than 2.10."""
    _C._enable_exchange(False)
    yield
    _C._enable_exchange(True)


@pytest.mark.parametrize("case, device", on_devices(CASES))
def test_both_ways_into_the_module_agree(case, device, request):
    inputs = case.tensors(device)
    expected = flashtile.attention(*inputs, return_lse=True, **case.options(device))
    shown = flashtile.explain(*inputs, **case.options(device))
    request.getfixturevalue("by_attributes")
    found = flashtile.attention(*inputs, return_lse=True, **case.options(device))
    assert_bitwise(found[0], expected[0], "out")
    assert_bitwise(found[1], expected[1], "lse")
    assert flashtile.explain(*inputs, **case.options(device)) == shown


@pytest.mark.usefixtures("by_attributes")
@pytest.mark.parametrize(
    "change, exception, message",
    [
        (lambda x: x[0], ValueError, r"k has shape \(97, 1, 64\), expected 4 dimensions"),
        (lambda x: x[None, None], ValueError, r"k has shape \(1, 1, 2, 97, 1, 64\), expected at most 4 dimensions"),
        (torch.Tensor.double, TypeError, "k has dtype torch.float64, expected"),
        (torch.Tensor.tolist, TypeError, "k is of type list, expected a torch.Tensor"),
        (torch.Tensor.to_sparse, TypeError, "k is not a dense strided tensor"),
    ],
)
def test_bad_tensors_by_attributes(change, exception, message):
    q, k, v = Case("bad", dtype=F32).tensors()
    with pytest.raises(exception, match=f"^attention: {message}"):
        flashtile.attention(q, change(k), v)


@pytest.mark.skipif(
    "max_version" not in inspect.signature(torch.Tensor.__dlpack__).parameters,
    reason="this PyTorch makes no such capsules, expected 2.9 or newer",
)
@pytest.mark.parametrize("name", ["k", "v", "alibi_slopes", "sinks"])
def test_capsules_of_others_are_no_tensors(name):
    """Five dimensions are one more than the module has room for: what it does not know, it must not read."""
    inputs = dict(zip("qkv", Case("capsule", dtype=F32).tensors(), strict=True))
    inputs[name] = torch.zeros(1, 1, 1, 1, 8).__dlpack__(max_version=(1, 0))
    with pytest.raises(TypeError, match=f"^attention: {name} is of type PyCapsule, expected a torch.Tensor"):
        flashtile.attention(**inputs)


@pytest.mark.usefixtures("by_attributes")
def test_gradients_by_attributes():
    inputs = Case("grad", dtype=F32).tensors(requires_grad=True)
    out = flashtile.attention(*inputs)
    _C._enable_exchange(True)
    expected = torch.autograd.grad(flashtile.attention(*inputs).square().sum(), inputs)
    _C._enable_exchange(False)
    for a, b in zip(torch.autograd.grad(out.square().sum(), inputs), expected, strict=True):
        assert_bitwise(a, b)


def test_parameters_and_subclasses():
    class Marked(torch.Tensor):
        pass

    q, k, v = Case("types", dtype=F32).tensors()
    expected = flashtile.attention(q, k, v)
    assert_bitwise(flashtile.attention(torch.nn.Parameter(q), k, torch.nn.Parameter(v)).detach(), expected)
    for _ in range(10):  # more types than the module remembers
        kind = type("Kind", (torch.Tensor,), {})
        found = flashtile.attention(q.as_subclass(kind), k.as_subclass(Marked), v)
        assert_bitwise(found.as_subclass(torch.Tensor), expected)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad(mode, device):
    inputs = Case("modes", dtype=BF16).tensors(device, requires_grad=True)
    with mode():
        out, lse = flashtile.attention(*inputs, return_lse=True)
    assert not out.requires_grad and not lse.requires_grad
    assert_bitwise(out, flashtile.attention(*inputs).detach())


def test_outputs_require_grad_where_an_input_does():
    q, k, v = Case("flags", dtype=F32).tensors()
    assert not flashtile.attention(q, k, v).requires_grad
    for x in (q, k, v):
        x.requires_grad_()
        out, lse = flashtile.attention(q, k, v, return_lse=True)
        assert out.requires_grad and lse.requires_grad
        x.requires_grad_(False)
    assert flashtile.attention(q, k, v, sinks=torch.zeros(2, requires_grad=True)).requires_grad


def test_in_a_module_with_checkpointing():
    """Recomputation in backward gives the gradients of a plain call."""
    inputs = Case("checkpoint", dtype=F32).tensors(requires_grad=True)
    expected = torch.autograd.grad(flashtile.attention(*inputs).square().sum(), inputs)
    out = torch.utils.checkpoint.checkpoint(flashtile.attention, *inputs, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(out.square().sum(), inputs), expected, strict=True):
        assert_bitwise(a, b)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_checkpointing_drops_the_same_weights(device, use_reentrant):
    case = Case("checkpoint", dtype=BF16, heads_q=4, heads_k=2, causal=True)
    inputs = [*case.tensors(device, requires_grad=True), torch.ones(4, device=device, requires_grad=True)]

    def function(q, k, v, sinks):
        out = flashtile.attention(q, k, v, sinks=sinks, causal=True, dropout_p=0.5, deterministic=True)
        return flashtile.attention(out, k, v, sinks=sinks, causal=True, dropout_p=0.5, deterministic=True)

    torch.manual_seed(1)
    expected = function(*inputs)
    torch.manual_seed(1)
    found = torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=use_reentrant)
    torch.manual_seed(2)  # what comes between forward and backward
    assert_bitwise(found, expected)
    found.float().square().sum().backward()
    for x, b in zip(inputs, torch.autograd.grad(expected.float().square().sum(), inputs), strict=True):
        assert_bitwise(x.grad, b)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_autocast(device):
    """Tensors of several dtypes, as a rotary embedding in float32 leaves them, become those that autocast asks for."""
    inputs = Case("autocast", dtype=F32, seqlen_q=30, seqlen_k=30).tensors(device, requires_grad=True)
    q, k, v = inputs
    cast = [x.to(BF16) for x in inputs]
    expected = flashtile.attention(*cast, causal=True)
    with pytest.raises(TypeError, match=r"^attention: v has dtype bfloat16"):
        flashtile.attention(q, k, cast[2])
    with torch.autocast(device, dtype=BF16):
        found = flashtile.attention(q, k, cast[2], causal=True)
        with pytest.raises(TypeError, match=r"^attention: q is of type NoneType"):
            flashtile.attention(None, k, v)
        with pytest.raises(ValueError, match=r"^attention: softcap"):
            flashtile.attention(q, k, cast[2], softcap=-1.0)
    assert_bitwise(found, expected)
    gradients = (torch.autograd.grad(x.float().square().sum(), inputs) for x in (found, expected))
    for a, b in zip(*gradients, strict=True):
        assert a.dtype is F32
        assert_bitwise(a, b)


def test_autocast_keeps_the_options():
    case = Case("autocast", dtype=F32, heads_q=4, heads_k=2, window=(20, 3), scale=0.3, softcap=4.0, alibi="per head")
    inputs = case.tensors()
    options = case.options() | dict(sinks=torch.ones(4), dropout_p=0.3, return_lse=True)
    expected = flashtile.attention(*(x.to(BF16) for x in inputs), seed=5, **options)
    with torch.autocast("cpu", dtype=BF16):
        found = flashtile.attention(inputs[0], *(x.to(BF16) for x in inputs[1:]), seed=5, **options)
    for a, b in zip(found, expected, strict=True):
        assert_bitwise(a, b)


@pytest.mark.gpu
def test_autocast_serves_float32_on_a_gpu():
    inputs = Case("autocast", dtype=F32).tensors("cuda")
    with torch.autocast("cuda", dtype=F16):
        found = flashtile.attention(*inputs)
    assert_bitwise(found, flashtile.attention(*(x.to(F16) for x in inputs)))


def test_numbers_of_other_kinds_as_options():
    numpy = pytest.importorskip("numpy")
    q, k, v = Case("numbers", dtype=F32).tensors()
    expected = flashtile.attention(q, k, v, scale=0.5, window=(3, 2), softcap=2.0)
    found = flashtile.attention(
        q, k, v, scale=numpy.float64(0.5), window=(numpy.int32(3), torch.tensor(2)), softcap=numpy.float32(2)
    )
    assert_bitwise(found, expected)
    expected = flashtile.attention(q, k, v, dropout_p=0.5, seed=7)
    for seed in (numpy.int32(7), numpy.uint64(7), torch.tensor(7)):
        assert_bitwise(flashtile.attention(q, k, v, dropout_p=numpy.float32(0.5), seed=seed), expected)


def test_forward_mode_is_refused():
    q, k, v = Case("transforms", dtype=F32).tensors()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(k, k)
        with pytest.raises(NotImplementedError, match=r"^attention: k carries a forward-mode tangent"):
            flashtile.attention(q, dual, v)
        sinks = torch.autograd.forward_ad.make_dual(torch.zeros(2), torch.ones(2))
        with pytest.raises(NotImplementedError, match=r"^attention: sinks carries a forward-mode tangent"):
            flashtile.attention(q, k, v, sinks=sinks)
        slopes = torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2))
        with pytest.raises(NotImplementedError, match=r"^attention: alibi_slopes carries a forward-mode tangent"):
            flashtile.attention(q, k, v, alibi_slopes=slopes)
        number = torch.autograd.forward_ad.make_dual(torch.tensor(0.5), torch.tensor(1.0))
        for name in ("scale", "softcap", "dropout_p"):
            with pytest.raises(NotImplementedError, match=rf"^attention: {name} carries a forward-mode tangent"):
                flashtile.attention(q, k, v, **{name: number})
        flashtile.attention(q, k, v)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_slopes_and_sinks_may_have_gaps(device):
    """They are few numbers, of which a copy is taken; float32 or not, eager or compiled."""
    case = Case("gaps", dtype=BF16, heads_q=4, heads_k=2, alibi="per batch and head", sinks=0.0)
    inputs, options = case.tensors(device, requires_grad=True), case.options(device)
    spread = {name: options[name].repeat_interleave(3, dim=-1)[..., ::3] for name in ("alibi_slopes", "sinks")}
    assert not any(x.is_contiguous() for x in spread.values())

    def results(options, function=flashtile.attention):
        sinks = options["sinks"].requires_grad_()
        out, lse = function(*inputs, **{**options, "sinks": sinks}, return_lse=True, deterministic=True)
        return out, lse, *torch.autograd.grad([out, lse], [*inputs, sinks], case.incoming(out, lse))

    expected = results(options)
    for function in (flashtile.attention, torch.compile(flashtile.attention, backend="aot_eager")):
        for a, b in zip(results({**options, **spread}, function), expected, strict=True):
            assert_bitwise(a, b)
    halves = {**options, "sinks": options["sinks"].detach().to(BF16)}
    expected = flashtile.attention(*inputs, **halves)
    halves["sinks"] = spread["sinks"].detach().to(BF16).repeat_interleave(2)[::2]
    assert_bitwise(flashtile.attention(*inputs, **halves), expected)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.complex64])
def test_autocast_casts_floats_alone(name, dtype):
    """As in PyTorch's attention, which has the same error with autocast as without."""
    given = dict(zip("qkv", Case("autocast", dtype=F32).tensors(), strict=True))
    given[name] = given[name].to(dtype)
    message = rf"^attention: {name} has dtype (torch\.)?{str(dtype).removeprefix('torch.')}, expected"
    compiled = torch.compile(flashtile.attention, backend="aot_eager")
    for function in (flashtile.attention, flashtile.explain, compiled):
        with torch.autocast("cpu", dtype=BF16), pytest.raises(TypeError, match=message):
            function(**given)


@pytest.mark.parametrize("case, device", on_devices([*CASES, Case("dropout", dtype=F32, dropout_p=0.3)]))
def test_many_incoming_gradients_at_a_time(case, device):
    """By is_grads_batched, as torch.autograd.functional.jacobian(vectorize=True) does it, and by torch.vmap."""
    inputs = case.tensors(device, requires_grad=True)
    options = case.options(device) | dict(deterministic=True)
    if case.sinks is not None:
        options["sinks"].requires_grad_()
        inputs.append(options["sinks"])
    out, lse = flashtile.attention(*inputs[:3], return_lse=True, **options)
    alone = flashtile.attention(*inputs[:3], **options)
    douts, dlses = (torch.stack(x) for x in zip(case.incoming(out, lse), [3 * out.detach(), lse.detach()], strict=True))
    for results, incoming in (([out, lse], [douts, dlses]), ([alone], [douts]), ([lse], [dlses])):

        def gradients(*incoming, results=results):
            return torch.autograd.grad(results, inputs, incoming, retain_graph=True)

        expected = [torch.stack(x) for x in zip(*(gradients(*one) for one in zip(*incoming, strict=True)), strict=True)]
        batched = torch.autograd.grad(results, inputs, incoming, retain_graph=True, is_grads_batched=True)
        for found in (batched, torch.vmap(gradients)(*incoming)):
            for a, b in zip(found, expected, strict=True):
                assert_bitwise(a, b)


def test_a_jacobian():
    q, k, v = (x[:1, :3, :1, :8].contiguous() for x in Case("jacobian", dtype=F32).tensors())
    jacobian = torch.autograd.functional.jacobian
    found = jacobian(lambda q: flashtile.attention(q, k, v), q, vectorize=True)
    assert_bitwise(found, jacobian(lambda q: flashtile.attention(q, k, v), q))


def test_the_parts_of_a_nested_tensor_are_a_ragged_batch():
    """As the message says that refuses nested tensors, with gradients too."""
    sequences = [torch.randn(length, 2, 16) for length in (5, 0, 9)]
    x = torch.nested.nested_tensor(sequences, layout=torch.jagged, requires_grad=True)
    begins = x.offsets().int()
    tables = dict(cu_seqlens_q=begins, cu_seqlens_k=begins)
    for function in (flashtile.attention_varlen, torch.compile(flashtile.attention_varlen, backend="aot_eager")):
        for i in range(3):
            given = [x.values().detach()] * 3
            given[i] = x
            with pytest.raises(
                NotImplementedError, match=rf"^attention_varlen: {'qkv'[i]} is a nested tensor, .* values"
            ):
                function(*given, **tables)
    with pytest.raises(NotImplementedError, match=r"^attention_kvcache: q is a nested tensor, .* values\(\) as q"):
        cache = torch.zeros(3, 20, 2, 16)
        flashtile.attention_kvcache(x.detach(), cache, cache, cache_seqlens=3)
    out = flashtile.attention_varlen(x.values(), x.values(), x.values(), **tables)
    for found, y in zip(out.split([5, 0, 9]), sequences, strict=True):
        assert_bitwise(found, flashtile.attention(y[None], y[None], y[None])[0])
    out.sum().backward()
    assert x.grad.is_nested
