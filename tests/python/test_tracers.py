"""The other tracers: torch.export, AOTInductor, torch.fx, torch.jit, torch.func, selective checkpoints."""

import io
import shutil
import subprocess
import sys
import warnings

import pytest
import torch
from cached import ints
from cases import BF16, DEVICE_PARAMS, F32, Case, on_devices
from compare import assert_bitwise
from test_backward import differentiable
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from traced import CASES, assert_all_bitwise, attend, dropout, gradients_of, grouped, quiet, seeded_gradients

import flashtile
from flashtile import _C

pytestmark = quiet


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


class Sdpa(torch.nn.Module):
    def __init__(self, options):
        super().__init__()
        self.options = options

    def forward(self, query, key, value, *attn_mask):
        return flashtile.scaled_dot_product_attention(query, key, value, *attn_mask, **self.options)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("call", ["causal", "of any length", "grouped", "padding", "columns"])
def test_export_of_sdpa(call, strict, device):
    """What stands for a tensor while a graph is traced is of no class that flashtile leaves to PyTorch."""
    heads_k, length, options, mask, lengths = 4, 9, dict(is_causal=call in ("causal", "of any length")), (), None
    if call == "of any length":
        length, lengths = 20, ({2: torch.export.Dim("S", min=2, max=64)},) * 3
    elif call == "grouped":
        heads_k, options = 2, dict(enable_gqa=True, scale=0.3)
    elif call == "padding":
        mask = (torch.arange(9, device=device) < torch.tensor([9, 5], device=device)[:, None, None, None],)
    elif call == "columns":
        options = dict(attn_mask=flashtile.masks.ColumnMask.prefix_lm(9, prefix=3, device=device))

    def arguments(rows):
        shapes = ((2, heads, rows, 16) for heads in (4, heads_k, heads_k))
        return (*(torch.randn(shape, dtype=BF16, device=device) for shape in shapes), *mask)

    model = Sdpa(options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", flashtile.sdpa.FallbackWarning)
        program = torch.export.export(model, arguments(9), dynamic_shapes=lengths, strict=strict)
    assert any("flashtile" in str(node.target) for node in program.graph.nodes)
    given = arguments(length)
    assert_bitwise(program.module()(*given), model(*given))


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

    kernel = _C.forward_with_state
    monkeypatch.setattr(_C, "forward_with_state", forward)
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


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_vmap_over_caches(device):
    """An entry each, which is written where it lies; a cache that several entries would write is refused."""
    options = dict(dtype=BF16, device=device)
    q, new = torch.randn(3, 2, 1, 4, 16, **options), torch.randn(3, 2, 1, 2, 16, **options)
    caches, held = torch.randn(2, 3, 2, 9, 2, 16, **options), ints([3, 4], device)
    expected_caches = caches.clone()

    def step(q, k_cache, v_cache, new):
        return flashtile.attention_kvcache(q, k_cache, v_cache, cache_seqlens=held, k_new=new, v_new=new)

    found = torch.vmap(step)(q, *caches, new)
    assert_all_bitwise(found, [step(*given) for given in zip(q, *expected_caches, new, strict=True)])
    assert_bitwise(caches, expected_caches)
    with pytest.raises(NotImplementedError, match=r"^attention_kvcache: k_cache is one for all entries of vmap"):
        torch.vmap(step, in_dims=(0, None, None, 0))(q, *caches[:, 0], new)
    assert_bitwise(caches, expected_caches)

    def read(q, k_cache):
        return flashtile.attention_kvcache(q, k_cache, caches[1, 0], cache_seqlens=held)

    found = torch.vmap(read)(q, caches[0])
    assert_all_bitwise(found, [read(*given) for given in zip(q, caches[0], strict=True)])
