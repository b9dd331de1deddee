"""Attention from JAX: the accuracy and the bits that PyTorch gets, under every transformation of JAX that is served."""

import doctest
import functools
import importlib
import os
import shutil
import subprocess
from pathlib import Path

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # else JAX takes most of a GPU, which others share

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_backward
import test_forward
import torch
from apart import assert_survives
from cases import BF16, CASES, F16, F32, SEED, Case, on_devices
from traced import assert_all_bitwise

import flashtile
import flashtile.jax

ROOT = Path(__file__).parents[2]
DTYPES = {F32: jnp.float32, F16: jnp.float16, BF16: jnp.bfloat16}
EVERYTHING = dict(window=(50, 7), softcap=10.0, scale=0.3, sinks=0.0, dropout_p=0.2, heads_q=6, heads_k=2)
attention = flashtile.jax.attention


def to_jax(x):
    return jnp.asarray(x.detach().float().cpu().numpy(), DTYPES[x.dtype])


def to_torch(x, device="cpu"):
    (dtype,) = (dtype for dtype, theirs in DTYPES.items() if theirs == x.dtype)
    return torch.from_numpy(np.array(x, np.float32)).to(device, dtype)


@pytest.fixture(autouse=True)
def device_of_jax(request):
    """That of the case; the CPU where there is none, even if JAX prefers a GPU."""
    name = "cpu" if "device" not in request.fixturenames else request.getfixturevalue("device")
    try:
        device = jax.devices(name)[0]
    except RuntimeError:
        pytest.skip("needs a CUDA device, and JAX finds none")
    with jax.default_device(device):
        yield


class ByJax(torch.autograd.Function):
    """Of PyTorch's tensors (out, lse), which JAX computes and differentiates: what checks PyTorch's checks JAX's."""

    @staticmethod
    def forward(ctx, options, *inputs):
        ctx.device = inputs[0].device
        (out, lse), ctx.vjp = jax.vjp(functools.partial(with_lse, **options), *map(to_jax, inputs))
        return to_torch(out, ctx.device), to_torch(lse, ctx.device)

    @staticmethod
    def backward(ctx, *cotangents):
        return None, *(to_torch(x, ctx.device) for x in ctx.vjp(tuple(map(to_jax, cotangents))))


def with_lse(q, k, v, sinks=None, **options):
    return attention(q, k, v, sinks=sinks, return_lse=True, **options)


def by_jax(*inputs, sinks=None, return_lse=False, **options):
    if "alibi_slopes" in options:
        options["alibi_slopes"] = to_jax(options["alibi_slopes"])
    out, lse = ByJax.apply(options, *inputs, *(() if sinks is None else (sinks,)))
    return (out, lse) if return_lse else out


NAMES = """D8 D40 D72 D128 D256 D192_Dv128 D8_Dv256 S1x129 S63x65 S333x77_causal S200x100 H6over3 H8over1 H32over1
window5_0_S70x190 windowNone_3_S190x70 window40_200_S130x130 everything softcap_causal alibi alibi_causal scale_zero
scale_negative_alibi large_scores_causal mostly_blind blind_window sinks sinks_causal sinks_above_all dropout_causal
sinks_dropout_alibi sinks_dropout_everything no_queries no_keys no_tokens no_batch no_heads
no_keys_sinks_dropout""".split()
CHOSEN = [case for case in CASES if case.name in NAMES]


def test_the_cases_are_found():
    assert {case.name for case in CHOSEN} == set(NAMES) and {case.dtype for case in CHOSEN} == set(DTYPES)


@pytest.mark.parametrize("case, device", on_devices(CHOSEN))
def test_accuracy(case, device):
    test_forward.check(by_jax, case, *case.tensors(device), **case.options(device))


@pytest.mark.parametrize("case, device", on_devices(CHOSEN))
def test_accuracy_of_gradients(case, device):
    test_backward.check(case, device, by_jax, torch.autograd.grad, deterministic=False)


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1, 2**64 - 1, SEED])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_are_those_of_pytorch(dtype, seed):
    """So the same seed drops the same weights."""
    case = Case("everything", dtype=dtype, head_dim_v=40, alibi="per head", **EVERYTHING)
    inputs, options = test_backward.differentiable(case)
    options["seed"] = seed
    found, expected = ([*f(*inputs[:3], return_lse=True, **options)] for f in (by_jax, flashtile.attention))
    for results in (found, expected):
        results += torch.autograd.grad(results, inputs, case.incoming(*results))
    assert_all_bitwise(found, expected)


def arrays(case, *lead):
    """The arrays of a case by name, of seeded values, with more dimensions in front."""
    shapes = {
        "q": (case.batch, case.seqlen_q, case.heads_q, case.head_dim),
        "k": (case.batch, case.seqlen_k, case.heads_k, case.head_dim),
        "v": (case.batch, case.seqlen_k, case.heads_k, case.head_dim),
    }
    generator = np.random.default_rng(3)
    values = {name: jnp.asarray(generator.normal(size=(*lead, *s)), DTYPES[case.dtype]) for name, s in shapes.items()}
    if case.alibi:
        values["alibi_slopes"] = jnp.asarray(generator.uniform(0.01, 0.5, (*lead, case.heads_q)), jnp.float32)
    if case.sinks is not None:
        values["sinks"] = jnp.asarray(generator.normal(size=(*lead, case.heads_q)), jnp.float32)
    return values


def both_passes(options, values):
    """[out, lse, dq, dk, dv, dsinks] of a dict of arrays."""
    slopes = {name: x for name, x in values.items() if name == "alibi_slopes"}
    learned = {name: x for name, x in values.items() if name not in slopes}
    results, vjp = jax.vjp(lambda learned: attention(**learned, **slopes, **options, return_lse=True), learned)
    return [*results, *vjp(tuple(jnp.cos(x) for x in results))[0].values()]


def assert_same_bits(found, expected):
    assert_all_bitwise(map(to_torch, found), map(to_torch, expected))


SMALL = dict(seqlen_q=9, seqlen_k=14, heads_q=4, heads_k=2, head_dim=16, dtype=F32)
PLAIN = Case("plain", **SMALL)
MAPPED = [  # a case, its options, and the names of what is mapped
    *((PLAIN, {"causal": True}, names) for names in ("q", "k", "v", "q k v")),
    *((Case("alibi", alibi="per head", **SMALL), {"softcap": 3.0}, n) for n in ("alibi_slopes", "q alibi_slopes", "k")),
    *((Case("sinks", sinks=0.0, **SMALL), {"window": (5, 1)}, names) for names in ("q", "sinks", "q k v sinks")),
    *((Case("drop", sinks=0.0, alibi="per head", **SMALL), {"dropout_p": 0.3, "seed": 5}, n) for n in ("q", "k sinks")),
]


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("case, options, names", MAPPED)
def test_vmap_is_a_call_for_each_entry(case, options, names, axis):
    """Whatever is mapped, over the first of its axes or the last; for gradients too."""
    alone, many, names = arrays(case), arrays(case, 3), names.split()
    values = alone | {name: jnp.moveaxis(many[name], 0, axis) for name in names}
    axes = {name: axis if name in names else None for name in alone}
    function = functools.partial(both_passes, options)
    found = jax.vmap(function, in_axes=(axes,))(values)
    for i in range(3):
        assert_same_bits([x[i] for x in found], function(alone | {name: many[name][i] for name in names}))


def test_vmap_over_nothing():
    q, k, v = jnp.ones((3, 2, 5, 4, 16))

    def total(q):
        return flashtile.jax.attention(q, k, v, causal=True).sum()

    none = jnp.zeros((0, *q.shape))
    assert jax.vmap(lambda q: flashtile.jax.attention(q, k, v))(none).shape == none.shape
    assert jax.vmap(jax.grad(total))(none).shape == none.shape


def test_vmap_of_vmap():
    values = arrays(PLAIN, 2, 3)
    function = functools.partial(both_passes, {"causal": True})
    found = jax.vmap(jax.vmap(function))(values)
    for i, j in np.ndindex(2, 3):
        assert_same_bits([x[i, j] for x in found], function({name: x[i, j] for name, x in values.items()}))


def test_the_gradient_of_what_is_not_mapped_is_a_sum():
    alone, many = arrays(PLAIN), arrays(PLAIN, 3)

    def loss(k, q):
        return jnp.sin(attention(q, k, alone["v"])).sum()

    found = jax.grad(lambda k: jax.vmap(loss, (None, 0))(k, many["q"]).sum())(alone["k"])
    expected = sum(jax.grad(loss)(alone["k"], q) for q in many["q"])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_mapped_axis_without_a_call_for_each_entry():
    """What can join the batch does, in a backward as well."""
    function = jax.vmap(functools.partial(both_passes, {"causal": True}))
    assert "while" not in str(jax.make_jaxpr(function)(arrays(PLAIN, 3)))
    assert jax.jit(function).lower(arrays(PLAIN, 3)).as_text().count("custom_call @flashtile_") == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_jit(dtype):
    case = Case("everything", dtype=dtype, alibi="per head", **EVERYTHING)
    function = functools.partial(both_passes, {"window": (50, 7), "dropout_p": 0.2, "seed": SEED})
    assert_same_bits(jax.jit(function)(arrays(case)), function(arrays(case)))


def layers(q, k, v, remat, scanned):
    """Three of them, each with keys of its own."""

    def layer(x, given):
        return x + jnp.tanh(attention(x, *given, causal=True, softcap=4.0)), None

    layer = jax.checkpoint(layer) if remat else layer
    if scanned:
        return jax.lax.scan(layer, q, (k, v))[0]
    for given in zip(k, v, strict=True):
        q, _ = layer(q, given)
    return q


@pytest.mark.parametrize("remat", [False, True])
def test_scan_and_checkpoint(remat):
    alone, many = arrays(PLAIN), arrays(PLAIN, 3)

    def gradients(*how):
        return jax.grad(lambda *given: layers(*given, *how).sum(), (0, 1, 2))(alone["q"], many["k"], many["v"])

    for found, expected in zip(gradients(remat, True), gradients(False, False), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("used", [0, 1], ids=["out", "lse"])
def test_one_of_the_results_alone(used):
    """Gradients of the other are zeros that nobody computes."""
    values = arrays(PLAIN)

    def gradients(*cotangents):
        _, vjp = jax.vjp(lambda given: attention(**given, return_lse=True), values)
        return vjp(cotangents)[0]

    results = attention(**values, return_lse=True)
    given = [jnp.cos(x) if i == used else jnp.zeros_like(x) for i, x in enumerate(results)]
    expected = gradients(*given)
    found = jax.grad(lambda values: (attention(**values, return_lse=True)[used] * given[used]).sum())(values)
    assert_same_bits(found.values(), expected.values())


class TestSeeds:
    """That are arrays: they may be another in each call."""

    def test_the_bits_are_those_of_an_int(self):
        values, traces = arrays(PLAIN), []

        @jax.jit
        def function(values, seed):
            traces.append(seed)
            return both_passes({"dropout_p": 0.4, "seed": seed}, values)

        for seed in (0, 7, 2**32 - 1):
            found = function(values, jnp.asarray(seed, jnp.uint32))
            assert_same_bits(found, both_passes({"dropout_p": 0.4, "seed": seed}, values))
        assert len(traces) == 1

    def test_mapped(self):
        values, seeds = arrays(PLAIN), jax.random.bits(jax.random.key(1), (3,), jnp.uint32)
        function = functools.partial(attention, **values, dropout_p=0.4)
        found = jax.vmap(lambda seed: function(seed=seed))(seeds)
        assert_same_bits(found, [function(seed=int(seed)) for seed in seeds])
        assert not jnp.array_equal(found[0], found[1])

    def test_without_dropout_it_is_not_asked_for(self):
        values = arrays(PLAIN)
        assert_same_bits([attention(**values, seed=jnp.uint32(3))], [attention(**values)])


Q, K = (np.ones((2, length, heads, 16), np.float32) for length, heads in ((9, 4), (14, 2)))
F32_OR = "expected float32, float16 or bfloat16"


@pytest.mark.parametrize(
    "error, message, arguments",
    [
        (TypeError, "k is of type Tensor, expected a jax.Array", {"k": torch.ones(2, 14, 2, 16)}),
        (TypeError, "v is of type NoneType, expected a jax.Array", {"v": None}),
        (TypeError, "sinks is of type list, expected a jax.Array", {"sinks": [0.0] * 4}),
        (TypeError, f"q has dtype int32, {F32_OR}", {"q": Q.astype(np.int32)}),
        (TypeError, f"q has dtype float8_e4m3fn, {F32_OR}", {"q": Q.astype(jnp.float8_e4m3fn)}),
        (TypeError, "k has dtype float16, expected float32, as q", {"k": K.astype(np.float16)}),
        (ValueError, "q has shape (9, 4, 16), expected 4 dimensions = (B, S_q, H_q, D)", {"q": Q[0]}),
        (ValueError, "k has shape (2, 14, 2, 8), expected (2, 14, 2, 16) = (B, S_k, H_k, D)", {"k": K[..., :8]}),
        (ValueError, "q has H_q = 3 heads, expected a multiple of H_k = 2 of k", {"q": Q[:, :, :3]}),
        (ValueError, "alibi_slopes has shape (3,), expected (4,) = (H_q)", {"alibi_slopes": np.ones(3, np.float32)}),
        (TypeError, "alibi_slopes has dtype float16, expected float32", {"alibi_slopes": np.ones(4, np.float16)}),
        (TypeError, "sinks has dtype int32, expected float32", {"sinks": np.ones(4, np.int32)}),
        (ValueError, "sinks has shape (4, 1), expected 1 dimensions = (H_q)", {"sinks": np.ones((4, 1), np.float32)}),
        (TypeError, "causal is 1, expected True or False", {"causal": 1}),
        (TypeError, "return_lse is 'no', expected True or False", {"return_lse": "no"}),
        (TypeError, "window is [1, 2], expected None or a tuple (left, right)", {"window": [1, 2]}),
        (TypeError, "scale is 'large', expected a number or None", {"scale": "large"}),
        (ValueError, "scale is nan, expected a finite float32 number", {"scale": float("nan")}),
        (ValueError, "softcap is -1, expected", {"softcap": -1.0}),
        (ValueError, "dropout_p is 1, expected", {"dropout_p": 1.0, "seed": 1}),
        (ValueError, "seed is None, expected an int or an array, as dropout_p is 0.5", {"dropout_p": 0.5}),
        (TypeError, "seed is -1, expected an int from 0 to 2^64 - 1", {"dropout_p": 0.5, "seed": -1}),
        (TypeError, "seed is of dtype int32 and shape (), expected an int, or", {"seed": jnp.int32(1)}),
        (TypeError, "seed is of dtype uint32 and shape (2,), expected", {"seed": jnp.zeros(2, jnp.uint32)}),
    ],
)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_refused_before_anything_runs(transform, error, message, arguments):
    given = {"q": Q, "k": K, "v": K} | arguments
    with pytest.raises(error) as refusal:
        transform(lambda: attention(**given))()
    assert str(refusal.value).startswith(f"attention: {message}")


def test_an_option_that_is_traced_is_refused():
    with pytest.raises(TypeError, match=r"attention: scale is .*, expected a number or None"):
        jax.jit(lambda scale: attention(Q, K, K, scale=scale))(0.3)


def test_distances_and_numbers_of_any_kind():
    """As in flashtile.attention: beyond 64 bits, of NumPy, of JAX."""
    expected = attention(Q, K, K, window=(None, 3), scale=0.5)
    assert_same_bits([attention(Q, K, K, window=(10**30, np.int32(3)), scale=jnp.float32(0.5))], [expected])


@pytest.mark.parametrize(
    "message, function",
    [
        ("a second derivative is asked for", jax.grad(lambda q: jnp.sum(jax.grad(lambda q: run(q).sum())(q) ** 2))),
        ("a second derivative is asked for", jax.hessian(lambda q: run(q).sum())),
        ("alibi_slopes requires a gradient", jax.grad(lambda q: run(q, alibi_slopes=q[0, 0, :, 0]).sum())),
    ],
    ids=["second", "hessian", "slopes"],
)
def test_derivatives_that_are_refused(message, function):
    with pytest.raises(NotImplementedError, match=f"^attention: {message}"):
        function(Q)


def run(q, **options):
    return attention(q, K, K, **options)


def test_slopes_that_learn_nothing_are_served():
    found = jax.grad(lambda q: run(q, alibi_slopes=jax.lax.stop_gradient(q[0, 0, :, 0])).sum())(Q)
    assert_same_bits([found], [jax.grad(lambda q: run(q, alibi_slopes=Q[0, 0, :, 0]).sum())(Q)])


@pytest.mark.parametrize(
    "message, given",
    [
        ("INVALID_ARGUMENT: attention: softcap is -1, expected", {"softcap": np.float64(-1)}),
        ("UNIMPLEMENTED: attention: attribute softcap has another type", {"softcap": np.float32(1)}),
        ("UNIMPLEMENTED: attention: there is no buffer for v", {"v": np.int64(9)}),
        ("INVALID_ARGUMENT: attention: v has shape", {"v": np.int64(0)}),
    ],
)
def test_what_a_handler_refuses_is_an_error_of_xla(message, given):
    """Which a program may be that was not made by flashtile.jax."""
    call = jax.ffi.ffi_call("flashtile_forward", jax.ShapeDtypeStruct(Q.shape, Q.dtype))
    places = {name: np.int64(i) for i, name in enumerate(("q", "k", "v", "out"))}
    assert_same_bits([call(Q, K, K, **places)], [attention(Q, K, K)])
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(call(Q, K, K, **(places | given)))


SEVERAL_DEVICES = """
import functools, jax, jax.numpy as jnp, numpy as np, flashtile.jax
from jax.sharding import Mesh, PartitionSpec

assert jax.config.jax_enable_x64 and len(jax.devices()) == 2
q, k, v = (jax.random.normal(jax.random.key(i), (4, 9, 2, 16), jnp.float32) for i in range(3))
attend = functools.partial(flashtile.jax.attention, causal=True, scale=0.3)
spec = PartitionSpec("x")
mesh = Mesh(np.array(jax.devices()), ("x",))
shared = jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
gradients = [jax.jit(jax.grad(lambda *given: jnp.sin(f(*given)).sum(), (0, 1, 2)))(q, k, v) for f in (attend, shared)]
for found, expected in zip(*gradients):
    np.testing.assert_array_equal(found, expected)
print("alive")
"""


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="needs jax.shard_map, which is newer than this JAX")
def test_several_devices(monkeypatch):
    """In a process with 64-bit numbers, too, which leave options as they are."""
    for name, value in {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_ENABLE_X64": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert_survives(SEVERAL_DEVICES)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_declarations_of_xla_are_those_of_jaxlib():
    include = [jax.ffi.include_dir(), ROOT / "python" / "bindings"]
    command = ["g++", "-std=c++20", "-fsyntax-only", *(f"-I{folder}" for folder in include)]
    subprocess.run([*command, ROOT / "tests" / "python" / "xla_abi.cpp"], check=True)


def test_flashtile_alone_does_not_import_jax():
    assert_survives("import sys, flashtile; assert 'jax' not in sys.modules; print('alive')")


def test_docstring_examples_run():
    results = doctest.testmod(importlib.import_module("flashtile.jax"))
    assert results.failed == 0 and results.attempted >= 4
