"""The operators, and all that traces them: torch.compile, torch.export, torch.func, modes."""

import io
import shutil
import subprocess
import sys
import warnings

import pytest
import torch
from cached import Cached, ints
from cases import BF16, DEVICE_PARAMS, F16, F32, SEED, Case, on_devices
from compare import assert_bitwise
from ragged import Ragged
from test_backward import differentiable
from test_kvcache import assert_same, results
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import flashtile
from flashtile import _C
from flashtile.compat import flash_attn, flash_attn_interface

# What TorchDynamo does with the rest of PyTorch.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

everything = dict(
    window=(50, 7), softcap=10.0, scale=0.3, alibi="per batch and head", sinks=0.0, dropout_p=0.2, head_dim=72
)
grouped = dict(heads_q=6, heads_k=2)
CASES = [
    Case("plain", dtype=F32),
    Case("causal", dtype=BF16, causal=True, **grouped),
    Case("sinks", dtype=F16, sinks=0.0, head_dim_v=128),
    Case("everything", dtype=F32, head_dim_v=40, layout="gaps", **grouped, **everything),
    Case("everything", dtype=BF16, layout="packed", **everything),
    Case("misaligned", dtype=BF16, layout="misaligned", causal=True),
    Case("no_keys", dtype=F16, seqlen_k=0),
    Ragged("ragged", dtype=F32, causal=True, **grouped),
    Ragged("ragged", dtype=BF16, tail=3, **grouped),
    Ragged("used", dtype=F16, used_q=(60, 1, 0, 7, 0), used_k=(90, 0, 33, 130, 0), head_dim_v=128),
    Ragged("everything", dtype=F32, layout="gaps", tail=2, **grouped, **everything),
]
CACHES = [
    Cached("decode", dtype=F32),
    Cached("append", dtype=BF16, new=1),
    Cached("pages", dtype=F16, seqlen_q=5, new=5, page_size=16, rotary=32, head_dim_v=128),
    Cached("indexed", dtype=F32, seqlen_q=3, indexed=True, causal=False, window=(20, 5), leftpad=(3, 0, 0, 30)),
    Cached("ragged", dtype=BF16, lengths_q=(1, 0, 17, 5), new=0, page_size=16, tail=3, sinks=0.0, rotary=16),
    Cached("options", dtype=F32, new=3, alibi="per batch and head", softcap=5.0, scale=0.3, num_splits=2),
    Cached("invariant", dtype=F16, interleaved=False, rotary=64, new=2, batch_invariant=True),
]


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch.compiler.reset()


def compiled(function, backend="aot_eager", **options):
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def attend(case, inputs, options, **others):
    """Of the inputs of `differentiable`."""
    function = flashtile.attention_varlen if isinstance(case, Ragged) else flashtile.attention
    sinks = dict(sinks=inputs[3]) if len(inputs) > 3 else {}
    return function(*inputs[:3], **{**options, **sinks}, **others)


def assert_all_bitwise(found, expected):
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert_bitwise(a, b, f"number {i}")


def gradients_of(function, inputs):
    """Through out and lse, and through out alone, as of a sum: expanded, with strides of 0."""
    out, lse = function(*inputs)
    incoming = [torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).to(x) for x in (out, lse)]
    both = torch.autograd.grad([out, lse], inputs, incoming)
    return (*both, *torch.autograd.grad(function(*inputs)[0].sum(), inputs))


class Recorded(TorchDispatchMode):
    """[(operator, arguments)] of flashtile."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "flashtile":
            self.calls.append((func, args))
        return func(*args, **kwargs or {})

    @property
    def names(self):
        return [func._schema.name.removeprefix("flashtile::") for func, _ in self.calls]


# ---- attention, dense and ragged


@pytest.mark.parametrize("case, device", on_devices(CASES))
def test_opcheck(case, device):
    inputs, options = differentiable(case, device)
    with Recorded() as recorded:
        out, lse = attend(case, inputs, options, return_lse=True, deterministic=True)
        torch.autograd.grad([out, lse], inputs, [torch.ones_like(out), torch.ones_like(lse)], retain_graph=True)
        torch.autograd.grad(out, inputs[:2], torch.ones_like(out))
    name = "attention_varlen" if isinstance(case, Ragged) else "attention"
    name += "_dropout" if options.get("dropout_p") else ""
    assert recorded.names == [f"{name}_forward", f"{name}_backward", f"{name}_backward"]
    torch.library.opcheck(getattr(torch.ops.flashtile, name).default, recorded.calls[0][1])
    for op, given in recorded.calls:
        torch.library.opcheck(op, [x.detach() if isinstance(x, torch.Tensor) else x for x in given])


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
        asked.append(arguments[-1][8])
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


# ---- dropout


def dropout(q, k, v):
    return flashtile.attention(q * 1.5, k, v, dropout_p=0.3, deterministic=True).sin()


def seeded_gradients(function, inputs, seed=1):
    torch.manual_seed(seed)
    out = function(*inputs)
    torch.manual_seed(-1)
    return out, *torch.autograd.grad(out.square().sum(), inputs)


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
def test_opcheck_of_caches(case, device):
    given = case.arguments(device)
    with Recorded() as recorded:
        flashtile.attention_kvcache(**given)
    assert recorded.names == ["attention_kvcache_append" if "k_new" in given else "attention_kvcache"]
    for op, arguments in recorded.calls:
        torch.library.opcheck(op, arguments)


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


def test_only_what_is_written_is_declared():
    read = torch.ops.flashtile.attention_kvcache.default._schema
    append = torch.ops.flashtile.attention_kvcache_append.default._schema
    assert not read.is_mutable
    assert [x.name for x in append.arguments if x.is_write] == ["k_cache", "v_cache"]


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


@pytest.mark.parametrize("name", COMPAT_CALLS)
@pytest.mark.parametrize("module", [flash_attn, flash_attn_interface], ids=["FA2", "FA3"])
def test_compat(module, name):
    def function(x, cu, n):
        found = COMPAT_CALLS[name](module, x, cu, n)
        return found if isinstance(found, tuple) else (found,)

    given = _packed()
    assert_all_bitwise(compiled(function)(*given), function(*given))


# ---- other tracers


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = torch.nn.Linear(64, 3 * 64)

    def forward(self, x):
        q, k, v = self.projection(x).unflatten(-1, (3, 4, 16)).unbind(-3)
        return flashtile.attention(q, k, v, causal=True).flatten(2)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("strict", [False, True])
def test_export(strict, device):
    model, memory = Model().to(device, BF16), io.BytesIO()
    x, other = (torch.randn(2, length, 64, dtype=BF16, device=device) for length in (10, 33))
    lengths = {"x": {1: torch.export.Dim("S", min=2, max=500)}}
    program = torch.export.export(model, (x,), dynamic_shapes=lengths, strict=strict)
    torch.export.save(program, memory)
    memory.seek(0)
    loaded = torch.export.load(memory)
    assert torch.ops.flashtile.attention.default in [node.target for node in loaded.graph.nodes]
    assert_bitwise(loaded.module()(other), model(other))


class Layer(torch.nn.Module):
    """Attention of four heads over two within x, (B, S, 8, D), and over a cache into which it writes x."""

    def __init__(self):
        super().__init__()
        self.sinks = torch.nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x, k_cache, v_cache, held):
        q, k, v = (x * 2).split([4, 2, 2], dim=2)
        scores = dict(causal=True, window=(7, None), softcap=9.0, sinks=self.sinks)
        out, lse = flashtile.attention(q, k, v, return_lse=True, **scores)
        return flashtile.attention_kvcache(q, k_cache, v_cache, cache_seqlens=held, k_new=k, v_new=v) + out, lse


@pytest.fixture
def aot_device(request, monkeypatch):
    """A device for which AOTInductor finds what it compiles and links with, and can load what it made."""
    if shutil.which("g++") is None:
        pytest.skip("AOTInductor needs a C++ compiler, expected g++")
    if request.param == "cuda":
        from torch.utils.cpp_extension import CUDA_HOME

        if CUDA_HOME is None:
            pytest.skip("AOTInductor needs CUDA's headers, expected nvcc on PATH or CUDA_HOME")
        monkeypatch.setenv("CUDA_HOME", CUDA_HOME)  # PyTorch links the stub of libcuda only where it is set
        # With PyTorch 2.11 on an H200 a model of PyTorch's own operators ended in a segmentation fault when loaded.
        without_us = """
import torch
program = torch.export.export(torch.nn.ReLU(), (torch.ones(9, device="cuda"),))
torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(program))(torch.ones(9, device="cuda"))
"""
        if (code := subprocess.run([sys.executable, "-c", without_us], capture_output=True).returncode) != 0:
            pytest.skip(f"AOTInductor of PyTorch {torch.__version__} loads no model of its own: exit status {code}")
    return request.param


@pytest.mark.parametrize("aot_device", DEVICE_PARAMS, indirect=True)
def test_aot_inductor(aot_device, tmp_path):
    """As C++ that calls the operators through PyTorch's dispatcher, at another length than the exported one too."""
    options = dict(dtype=BF16, device=aot_device)

    def arguments(length):
        x, *caches = torch.randn(2, length, 8, 64, **options), *torch.randn(2, 2, 40, 2, 64, **options)
        return x, *(cache.clone() for cache in caches), ints([0, 5], aot_device)

    model = Layer().requires_grad_(False).to(aot_device)
    lengths = dict(x={1: torch.export.Dim("S", min=2, max=30)}, k_cache=None, v_cache=None, held=None)
    program = torch.export.export(model, arguments(10), dynamic_shapes=lengths, strict=False)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
    call = torch._inductor.aoti_load_package(path)
    for length in (10, 25):
        given = arguments(length)
        others = [x.clone() for x in given]
        assert_all_bitwise(call(*given), model(*others))
        assert_all_bitwise(given, others)


@pytest.mark.parametrize("inside", [True, False])
def test_fake_tensors(inside):
    mode = FakeTensorMode()
    with mode:
        q, k, v = Case("fake", dtype=F32, head_dim_v=128).tensors(requires_grad=True)
        if inside:
            out, lse = flashtile.attention(q, k, v, dropout_p=0.1, return_lse=True)
    if not inside:
        out, lse = flashtile.attention(q, k, v, return_lse=True)
    assert (out.shape, lse.shape, lse.dtype) == ((2, 65, 2, 128), (2, 2, 65), F32)
    assert [x.shape for x in torch.autograd.grad(out.sum(), (q, k, v))] == [x.shape for x in (q, k, v)]


@pytest.mark.parametrize("new, held", [(0, None), (1, None), (0, 3)])
def test_fake_caches(new, held):
    """Outside of their mode."""
    mode, given = FakeTensorMode(), Cached("fake", dtype=F32, new=new).arguments()
    if held is not None:
        given["cache_seqlens"] = held
    expected = flashtile.attention_kvcache(**given, return_lse=True)
    fake = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    found = flashtile.attention_kvcache(**fake, return_lse=True)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(mode):
    """Of tensors with data too nothing is computed unseen."""
    inputs = Case("graph", dtype=F32).tensors()
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda *x: flashtile.attention(*x), tracing_mode=mode)(*inputs)
    others = [x + 1 for x in inputs]
    assert_bitwise(graph(*others), flashtile.attention(*others))


def traced_by_jit(function, inputs):
    """Saved and read again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        stored = io.BytesIO()
        torch.jit.save(torch.jit.trace(function, inputs, check_trace=False), stored)
        stored.seek(0)
        return torch.jit.load(stored)


def test_jit_trace():
    inputs = Case("jit", dtype=F32, causal=True, sinks=0.0, head_dim_v=128, **grouped).tensors()

    def function(*x):
        return flashtile.attention(*x, causal=True, return_lse=True)

    call = traced_by_jit(function, inputs)
    others = [x[:1, :50].clone().requires_grad_() for x in inputs]
    assert_all_bitwise(call(*others), function(*others))
    assert_all_bitwise(gradients_of(call, others), gradients_of(function, others))


def test_jit_trace_of_a_cache():
    q, cache, new = torch.randn(2, 1, 4, 16), torch.zeros(2, 40, 2, 16), torch.randn(2, 1, 2, 16)

    def function(q, cache, new, held):
        return flashtile.attention_kvcache(q, cache, cache, k_new=new, v_new=new, cache_seqlens=held)

    call = traced_by_jit(function, (q, cache.clone(), new, ints([0, 0])))
    written, expected = cache.clone(), cache.clone()
    for held in (ints([0, 3]), ints([1, 4])):
        assert_bitwise(call(q, written, new, held), function(q, expected, new, held))
    assert_bitwise(written, expected)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_a_selective_checkpoint_may_keep_attention(device, monkeypatch):
    calls = []

    def forward(*arguments):
        calls.append(arguments)
        return kernel(*arguments)

    kernel = _C.forward_with_lse
    monkeypatch.setattr(_C, "forward_with_lse", forward)
    inputs = Case("kept", dtype=BF16).tensors(device, requires_grad=True)

    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op.namespace == "flashtile" else CheckpointPolicy.MUST_RECOMPUTE

    contexts = dict(context_fn=lambda: create_selective_checkpoint_contexts(policy))
    found = seeded_gradients(lambda *x: checkpoint(dropout, *x, use_reentrant=False, **contexts), inputs)
    assert len(calls) == 1
    assert_all_bitwise(found, seeded_gradients(dropout, inputs))


@pytest.mark.parametrize("case, device", on_devices([CASES[3], CASES[4], CASES[8], CASES[-1]]))
def test_transforms_of_gradients(case, device):
    inputs, options = differentiable(case, device)
    options |= dict(return_lse=True, deterministic=True)
    out, lse = attend(case, inputs, options)
    incoming = case.incoming(out, lse)
    expected = torch.autograd.grad([out, lse], inputs, incoming)
    given = [x.detach() for x in inputs]
    _, pull_back = torch.func.vjp(lambda *x: attend(case, x, options), *given)
    assert_all_bitwise(pull_back(tuple(incoming)), expected)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_gradients_of_each_sample(device):
    q, k, v = Case("samples", dtype=BF16, batch=3).tensors(device)
    sinks = torch.tensor([1.0, -1.0], device=device)

    def loss(sinks, q, k, v):
        inputs = (x[None] for x in (q, k, v))
        return flashtile.attention(*inputs, sinks=sinks, deterministic=True).square().sum()

    found = torch.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(None, 0, 0, 0))(sinks, q, k, v)
    for i in range(3):
        expected = torch.func.grad(loss, argnums=(0, 1))(sinks, q[i], k[i], v[i])
        assert_all_bitwise([x[i] for x in found], expected)


def test_vmap_within_a_compiled_function():
    inputs = Case("vmap", dtype=F32, batch=3).tensors()
    function = torch.vmap(lambda *x: flashtile.attention(*(each[None] for each in x)), randomness="error")
    assert_bitwise(compiled(function)(*inputs), function(*inputs))


def test_vmap_of_nothing_is_refused():
    x = torch.ones(0, 1, 5, 2, 16)
    for function in (flashtile.attention, torch.func.grad(lambda *x: flashtile.attention(*x).sum())):
        with pytest.raises(NotImplementedError, match=r"^attention: vmap has 0 entries, expected at least one"):
            torch.vmap(function)(x, x, x)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_dropout_under_vmap(randomness):
    q, k, v = (x.expand(4, *x.shape) for x in Case("vmap", dtype=F32).tensors())
    function = torch.vmap(lambda *x: flashtile.attention(*x, dropout_p=0.5), randomness=randomness)
    first, *others = function(q, k, v)
    assert all(torch.equal(x, first) == (randomness == "same") for x in others)


def test_second_derivatives_are_refused():
    q, k, v = Case("twice", dtype=F32).tensors()

    def gradient(q):
        return torch.func.grad(lambda x: flashtile.attention(x, k, v).square().sum())(q).sum()

    with pytest.raises(NotImplementedError, match=r"^attention: differentiated twice, expected once"):
        torch.func.grad(gradient)(q)
    with Recorded(), pytest.raises(NotImplementedError, match=r"^attention: differentiated twice, expected once"):
        q.requires_grad_()
        out = flashtile.attention(q, k, v)
        (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        dq.sum().backward()


# ---- errors


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


def flops_of(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("causal", [False, True])
def test_flops_are_those_of_pytorch_s_attention(causal):
    """What a mask hides counts there too."""
    q, k, v = (torch.randn(2, seqlen, 4, 64, requires_grad=True) for seqlen in (40, 50, 50))
    shapes = [(2, 4, seqlen, 64) for seqlen in (40, 50, 50)]
    forward, backward = sdpa_flop_count(*shapes), sdpa_backward_flop_count(shapes[0], *shapes)
    assert flops_of(lambda: flashtile.attention(q, k, v, causal=causal)) == forward
    for options in (dict(causal=causal), dict(causal=causal, dropout_p=0.1)):
        assert flops_of(lambda: flashtile.attention(q, k, v, **options).sum().backward()) == forward + backward  # noqa: B023


def test_flops_of_sequences_are_theirs_alone():
    q, k, v = torch.randn(10, 4, 64), torch.randn(12, 2, 64), torch.randn(12, 2, 32)
    tables = [torch.tensor(table, dtype=torch.int32) for table in ([0, 3, 10], [0, 5, 12], [4, 6])]
    begins = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), tables, strict=False))
    assert flops_of(lambda: flashtile.attention_varlen(q, k, v, **begins)) == (3 * 5 + 7 * 7) * 4 * 2 * (64 + 32)
    begins["seqused_k"] = tables[2]
    assert flops_of(lambda: flashtile.attention_varlen(q, k, v, **begins)) == (3 * 4 + 7 * 6) * 4 * 2 * (64 + 32)
    with FakeTensorMode(allow_non_fake_inputs=True):  # whose tables hold nothing: equally long ones
        fake = [torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v, *tables[:2])]
        begins = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), fake[3:], strict=True))
        assert flops_of(lambda: flashtile.attention_varlen(*fake[:3], **begins)) == 2 * 5 * 6 * 4 * 2 * (64 + 32)


def test_flops_over_a_cache_are_of_rows_that_count():
    cache, q = torch.zeros(2, 64, 2, 64), torch.randn(2, 3, 8, 64)
    held, new = torch.tensor([10, 20], dtype=torch.int32), torch.randn(2, 3, 2, 64)
    options = dict(cache_seqlens=held, leftpad=torch.tensor([0, 5], dtype=torch.int32))
    each = 3 * 8 * 2 * (64 + 64)
    assert flops_of(lambda: flashtile.attention_kvcache(q, cache, cache, **options)) == (10 + 15) * each
    options |= dict(k_new=new, v_new=new)
    assert flops_of(lambda: flashtile.attention_kvcache(q, cache, cache.clone(), **options)) == (13 + 18) * each
    pages = cache.reshape(8, 16, 2, 64)
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    options = dict(cache_seqlens=held, block_table=table)
    assert flops_of(lambda: flashtile.attention_kvcache(q, pages, pages, **options)) == (10 + 20) * each
    options["cu_seqlens_q"] = torch.tensor([0, 1, 5], dtype=torch.int32)
    ragged = q.flatten(0, 1)
    assert flops_of(lambda: flashtile.attention_kvcache(ragged, pages, pages, **options)) == (10 + 4 * 20) * each // 3
