"""The attention backend "flashtile" of diffusers: what its native backend and the formula say, of tensors and of tiny
models with random weights, and on the ranks of diffusers' context parallelism."""

import doctest
import enum
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import reference
import torch
from cases import BF16, DTYPES, F32
from compare import assert_accurate

import flashtile

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here is to be downloaded
diffusers = pytest.importorskip("diffusers", minversion="0.40", reason="needs diffusers 0.40 or newer")
dispatch = importlib.import_module("diffusers.models.attention_dispatch")
integration = importlib.import_module("flashtile.integrations.diffusers")

F64 = torch.float64
HERE = Path(__file__).parent
HEADS = dict(num_attention_heads=2, attention_head_dim=16)
FLUX = dict(in_channels=4, num_layers=1, num_single_layers=1, joint_attention_dim=32, pooled_projection_dim=32)
QWEN = dict(in_channels=16, out_channels=4, num_layers=2, joint_attention_dim=16)
WAN = dict(patch_size=(1, 2, 2), in_channels=4, out_channels=4, text_dim=16, freq_dim=32, ffn_dim=32, num_layers=1)
MODELS = {  # the class, what it is made of, shapes of its inputs
    "flux": (
        "FluxTransformer2DModel",
        HEADS | FLUX | dict(axes_dims_rope=(4, 4, 8)),
        dict(hidden_states=(2, 12, 4), encoder_hidden_states=(2, 7, 32), pooled_projections=(2, 32), timestep=(2,))
        | dict(img_ids=(12, 3), txt_ids=(7, 3)),
    ),
    "qwen image": (  # its text is padded
        "QwenImageTransformer2DModel",
        HEADS | QWEN | dict(axes_dims_rope=(8, 4, 4)),
        dict(hidden_states=(2, 12, 16), encoder_hidden_states=(2, 7, 16), timestep=(2,)),
    ),
    "wan": (  # a head dimension that is no multiple of 8, and attention to a text
        "WanTransformer3DModel",
        WAN | dict(num_attention_heads=2, attention_head_dim=12, rope_max_seq_len=32),
        dict(hidden_states=(2, 4, 2, 4, 6), encoder_hidden_states=(2, 5, 16), timestep=(2,)),
    ),
}


@pytest.fixture(autouse=True)
def _registered():
    """Choosing a backend for a model chooses it for the process."""
    integration.register()
    before = dispatch._AttentionBackendRegistry.get_active_backend()[0]
    yield
    dispatch._AttentionBackendRegistry.set_active_backend(before)


def dispatched(q, k, v, backend="flashtile", **options):
    return dispatch.dispatch_attention_fn(q, k, v, backend=dispatch.AttentionBackendName(backend), **options)


def tensors(heads_k=2, seqlen_k=19, head_dim_v=16, dtype=F32, head_dim=16):
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, 13, 4, head_dim), (2, seqlen_k, heads_k, head_dim), (2, seqlen_k, heads_k, head_dim_v))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def differentiated(function, inputs):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


PADDED = torch.arange(19) < torch.tensor([19, 8])[:, None]
HOLED = PADDED.roll(5, dims=1)
CALLS = {
    "plain": {},
    "scale": dict(scale=0.4),
    "causal": dict(is_causal=True),
    "padding": dict(attn_mask=PADDED[:, None, None]),
    "padding of two dimensions": dict(attn_mask=HOLED),
    "padding of all entries": dict(attn_mask=HOLED[1, None, None, None]),
    "expanded padding": dict(attn_mask=HOLED[:, None, None].expand(2, 4, 13, 19)),
    "padding and scale": dict(attn_mask=HOLED[:, None, None], scale=0.4),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("call", CALLS)
def test_calls(call, dtype):
    """As diffusers' native backend computes them, which is PyTorch's function."""
    options = CALLS[call] | dict(enable_gqa=True)
    inputs = tensors(head_dim_v=24, dtype=dtype)
    found = differentiated(lambda *x: dispatched(*x, **options), inputs)
    native = [
        differentiated(lambda *x: dispatched(*x, backend="native", **options), [x.to(t) for x in inputs])
        for t in (F64, dtype)
    ]
    for what, *results in zip(("out", "dq", "dk", "dv"), found, *native, strict=True):
        assert_accurate(*results, what)


@pytest.mark.parametrize("mask", [None, HOLED], ids=["plain", "padding"])
def test_lse(mask):
    q, k, v = tensors()
    seen = None if mask is None else mask[:, None, None].expand(-1, 1, 13, -1)
    options = dict(attn_mask=mask, enable_gqa=True, attention_kwargs={"return_lse": True})
    found = dispatched(q, k, v, **options)
    exact, rough = (reference.attention(q, k, v, mask=seen, dtype=dtype) for dtype in (F64, F32))
    for what, *results in zip(("out", "lse"), found, exact, rough, strict=True):
        assert_accurate(*results, what)


def test_dropout():
    q, k, v = tensors(heads_k=4)
    torch.manual_seed(7)
    found = dispatched(q, k, v, dropout_p=0.5)
    torch.manual_seed(7)
    expected = flashtile.attention(q, k, v, dropout_p=0.5)
    assert torch.equal(found, expected) and not torch.equal(found, dispatched(q, k, v))


def test_a_row_that_sees_nothing_is_zero():
    out, *gradients = differentiated(lambda *x: dispatched(*x, attn_mask=PADDED & False), tensors(heads_k=4))
    assert all((x == 0).all() for x in (out, *gradients))


REFUSED = {
    "a bias": (
        dict(attn_mask=torch.zeros(2, 1, 1, 19)),
        "attn_mask is a Tensor, torch.float32 on cpu, expected .*bool",
    ),
    "rows": (
        dict(attn_mask=torch.ones(13, 19).bool()),
        r"attn_mask has shape \(13, 19\), expected one that broadcasts",
    ),
    "causal": (dict(attn_mask=PADDED, is_causal=True), "attn_mask is given with is_causal, expected one of them"),
    "groups": (dict(enable_gqa=False), "query, key and value have shapes .*, expected .* H_q = H_k unless enable_gqa"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    options, message = REFUSED[case]
    nearest = '; nearest supported: attention backend "native"'
    with pytest.raises(NotImplementedError, match=f'^attention backend "flashtile": {message}.*{nearest}$'):
        dispatched(*tensors(), **dict(enable_gqa=True) | options)


def test_head_dimensions_above_256_are_refused():
    with pytest.raises(NotImplementedError, match="query has head dimension 264, expected one from 1 to 256; nearest"):
        dispatched(*tensors(heads_k=4, head_dim=264))


def made(name, dtype):
    kind, sizes, shapes = MODELS[name]
    torch.manual_seed(5)
    model = getattr(diffusers, kind)(**sizes).to(dtype)
    inputs = {what: torch.rand(shape).to(dtype) for what, shape in shapes.items()}
    if name == "qwen image":
        inputs |= dict(encoder_hidden_states_mask=torch.arange(7) < torch.tensor([[7], [3]]))
        inputs |= dict(img_shapes=[[(1, 3, 4)]] * 2)
    return model, inputs


def trained(name, backend, dtype, weights):
    """What a model returns, and the gradients of all its weights."""
    model, inputs = made(name, dtype)
    model.load_state_dict(weights)
    model.set_attention_backend(backend)
    (out,) = model(**inputs, return_dict=False)
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(out.square().sum(), parameters.values(), allow_unused=True)
    return {"out": out.detach()} | dict(zip(parameters, gradients, strict=True))


@pytest.fixture
def calls(monkeypatch):
    """How often flashtile is asked."""
    count = []
    original = integration.served
    monkeypatch.setattr(integration, "served", lambda *args: count.append(1) or original(*args))
    return count


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", MODELS)
def test_models(name, dtype, calls):
    weights = made(name, dtype)[0].state_dict()  # which float64 has, too
    found = trained(name, "flashtile", dtype, weights)
    assert len(calls) == 2
    exact = trained(name, "native", F64, weights)
    # The gradient of a bias of keys cancels: by PyTorch's own formula its error differs by the order of sums, which is
    # that of a processor. So both of PyTorch's ways to compute it say how exact the inputs' precision is.
    roughs = [trained(name, backend, dtype, weights) for backend in ("native", "_native_math")]
    assert len(calls) == 2
    for what, x in found.items():
        if x is None:
            assert exact[what] is None
            continue
        rough = max((each[what] for each in roughs), key=lambda each: (each - exact[what]).abs().max())
        assert_accurate(x, exact[what], rough, what)


def test_the_context_manager(calls):
    model, inputs = made("flux", F32)
    with diffusers.attention_backend("flashtile"):
        found = model(**inputs, return_dict=False)[0]
    assert len(calls) == 2
    expected = model(**inputs, return_dict=False)[0]
    assert len(calls) == 2
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_torch_compile():
    model, inputs = made("flux", F32)
    model.set_attention_backend("flashtile")
    (expected,) = model(**inputs, return_dict=False)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    (found,) = compiled(**inputs, return_dict=False)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_registering_twice_changes_nothing():
    names, registry = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry
    before = list(names), dict(names.__members__), dict(registry._backends), registry.get_active_backend()
    assert len(names) == len(set(names)) and names.FLASHTILE is names("flashtile") is names["FLASHTILE"]
    assert "flashtile" in registry._supports_context_parallel
    integration.register()
    after = list(names), dict(names.__members__), dict(registry._backends), registry.get_active_backend()
    assert after == before


IMPORTED = """
import sys, flashtile
assert "diffusers" not in sys.modules
import flashtile.integrations.diffusers
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
assert "flashtile" not in AttentionBackendName.__members__.values()
assert "flashtile" not in _AttentionBackendRegistry._backends
"""


def test_importing_changes_nothing():
    ended = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr


def without(*names):
    return SimpleNamespace(**{name: x for name, x in vars(dispatch).items() if name not in names})


OTHERS = {
    "none": None,
    "no registry": without("_AttentionBackendRegistry"),
    "no context parallelism": without("_templated_context_parallel_attention"),
    "another registry": SimpleNamespace(
        **vars(without("_AttentionBackendRegistry")),
        _AttentionBackendRegistry=SimpleNamespace(register=lambda name, function: None),
    ),
    "names of another kind": SimpleNamespace(
        **vars(without("AttentionBackendName")), AttentionBackendName=enum.Enum("AttentionBackendName", ["NATIVE"])
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_dispatcher_is_refused(other, monkeypatch):
    monkeypatch.setattr(integration, "dispatch", OTHERS[other])
    monkeypatch.setattr(diffusers, "__version__", "0.99.1")
    with pytest.raises(NotImplementedError, match=r"^register: diffusers is 0\.99\.1, expected 0\.40 or newer, with"):
        integration.register()


def test_an_older_version_is_refused(monkeypatch):
    monkeypatch.setattr(diffusers, "__version__", "0.39.0")
    with pytest.raises(NotImplementedError, match=r"^register: diffusers is 0\.39\.0, expected 0\.40 or newer"):
        integration.register()


@pytest.mark.parametrize("size", [2, 3])
def test_context_parallelism(size):
    """By the program diffusers_ranks.py."""
    command = [sys.executable, str(HERE / "diffusers_ranks.py"), str(size)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=HERE)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-8000:]
    assert re.search(r"^[1-9]\d* calls$", ended.stdout, re.MULTILINE)


def test_docstrings():
    results = doctest.testmod(integration)
    assert results.attempted > 0 and results.failed == 0
