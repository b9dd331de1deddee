"""Attention for JAX: the same kernels, called by XLA, with gradients, ``jax.jit`` and ``jax.vmap``.

XLA calls them through its foreign function interface, in its own memory and on its own stream; no array goes through
PyTorch or the host. Needs jax 0.6 or newer (``pip install flashtile[jax]``), which nothing else in flashtile imports.

Source: XLA's custom calls, https://openxla.org/xla/custom_call.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array
from jax.custom_batching import custom_vmap, sequential_vmap
from jax.custom_derivatives import SymbolicZero

from . import _C
from ._arguments import as_integer
from ._options import attention_options
from .attention import Window

__all__ = ["attention"]

for _target, _handlers in _C.XLA_HANDLERS.items():
    for _platform, _handler in _handlers.items():
        jax.ffi.register_ffi_target(_target, _handler, platform=_platform)

_FLOATS = ("float32", "float16", "bfloat16")
_Numbers = tuple[tuple[str, np.generic], ...]  # the options that are no arrays, as XLA takes them


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    dropout_p: float = 0.0,
    seed: int | Array | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Exact attention of JAX's arrays: :func:`flashtile.attention`, whose docstring has the formula.

    Options that are no arrays are constants of the compiled program, so ``jax.jit`` wants those that it is given as
    static. Gradients are those of reverse mode, once. ``jax.vmap`` puts the mapped axis into the batch and calls the
    kernel once; where results would depend on the place in the batch, that is with dropout, where sinks are mapped, and
    in a backward with sinks, it makes one call for each entry. XLA does not divide a call among devices by itself: on
    several, call it in ``jax.shard_map(..., check_vma=False)``, each with entries or heads of its own.

    Args:
        q: (B, S_q, H_q, D). float16 or bfloat16; on the CPU also float32. D is a multiple of 8, at most 256.
        k: (B, S_k, H_k, D), of q's dtype. H_q is a multiple of H_k.
        v: (B, S_k, H_k, D_v). D_v obeys the rule for D and may differ from it.
        causal: hide columns right of the diagonal, on which the last query meets the last key.
        window: (left, right), inclusive distances from the diagonal, in tokens; None on a side: unbounded.
        scale: factor of the scores; by default 1/√D.
        softcap: bound of the scores; 0: none.
        alibi_slopes: float32, (H_q) or (B, H_q). Gets no gradient.
        sinks: (H_q), any floating dtype, summed in float32: a logit for each query head that no value belongs to.
        dropout_p: the probability, at least 0 and below 1, with which a weight is dropped; 0: none. It is rounded to a
            multiple of 1/256.
        seed: of dropout, which needs one: an int from 0 to 2^64 - 1, which drops the same weights as in
            :func:`flashtile.attention`. It is a constant, too: another one compiles anew. On the CPU it may be an array
            of dtype uint32 and shape () instead, such as ``jax.random.bits(key)``, another in each call.
        deterministic: whether the gradients must be the same bits in every run. On the CPU they always are.
        return_lse: also return lse.

    Returns:
        out, (B, S_q, H_q, D_v), of q's dtype; with ``return_lse`` the pair (out, lse), where lse is the natural
        logarithm, float32, (B, H_q, S_q). Both are differentiable with respect to q, k, v and sinks.

    Raises:
        TypeError: an argument has the wrong type or dtype; or JAX differentiates in forward mode.
        ValueError: shapes or option values break the rules above, or there is dropout and no seed.
        NotImplementedError: slopes that require a gradient, or a second derivative.
        jax.errors.JaxRuntimeError: what only the device tells, as the call runs: float32 on CUDA, a build without CUDA,
            a seed that is an array on CUDA.

    Example:
        >>> import jax, flashtile.jax
        >>> q = jax.random.normal(jax.random.key(0), (2, 100, 8, 64))
        >>> k, v = jax.random.normal(jax.random.key(1), (2, 2, 120, 2, 64))
        >>> flashtile.jax.attention(q, k, v, causal=True).shape
        (2, 100, 8, 64)
        >>> loss = jax.jit(lambda q: flashtile.jax.attention(q, k, v, window=(64, 0)).sum())
        >>> jax.grad(loss)(q).shape
        (2, 100, 8, 64)
    """
    given = {"q": q, "k": k, "v": v, "alibi_slopes": alibi_slopes, "sinks": sinks}
    for name, x in given.items():
        if not isinstance(x, jax.Array | np.ndarray) and (x is not None or name in "qkv"):
            raise TypeError(f"attention: {name} is of type {type(x).__name__}, expected a jax.Array")
    if return_lse is not False and return_lse is not True:
        raise TypeError(f"attention: return_lse is {_C.described(return_lse)}, expected True or False")
    seed_array = seed if isinstance(seed, jax.Array) else None
    if seed_array is not None and (seed_array.dtype != np.uint32 or seed_array.shape != ()):
        found = f"of dtype {seed_array.dtype} and shape {seed_array.shape}"
        raise TypeError(f"attention: seed is {found}, expected an int, or an array of dtype uint32 and shape ()")
    options: dict[str, Any] = {
        "causal": causal,
        "window": window,
        "scale": scale,
        "softcap": softcap,
        "dropout_p": dropout_p,
        "seed": seed if seed_array is None else None,
        "deterministic": deterministic,
    }
    _C.check_options("attention", attention_options(**options))
    if dropout_p > 0 and seed is None:
        raise ValueError(f"attention: seed is None, expected an int or an array, as dropout_p is {dropout_p}")
    out, lse = _attend(q, k, v, alibi_slopes, sinks, seed_array, _numbers_of(**options))
    return (out, lse) if return_lse else out


def _numbers_of(*, causal, window, scale, softcap, dropout_p, seed, deterministic) -> _Numbers:
    """Of NumPy's types, since Python's own would become those of 32 bits, and without those that are None."""
    left, right = window or (None, None)

    def integer(x):
        return None if x is None else np.int64(as_integer(x))

    numbers = {
        "causal": np.bool_(causal),
        "window_left": integer(left),
        "window_right": integer(right),
        "scale": None if scale is None else np.float64(scale),
        "softcap": np.float64(softcap),
        "dropout_p": np.float64(dropout_p),
        "seed": None if seed is None else np.uint64(seed).astype(np.int64),  # XLA's attributes have no uint64
        "deterministic": np.bool_(deterministic),
    }
    return tuple((name, x) for name, x in numbers.items() if x is not None)


@functools.partial(jax.jit, static_argnames="numbers")
def _attend(q, k, v, alibi_slopes, sinks, seed, numbers):
    if sinks is not None and jnp.issubdtype(sinks.dtype, jnp.floating):
        sinks = sinks.astype(np.float32)
    _check(q, k, v, alibi_slopes, sinks, numbers)
    if alibi_slopes is not None:  # a row for each entry, so that a mapped axis can join the batch
        alibi_slopes = jnp.broadcast_to(alibi_slopes, (q.shape[0], q.shape[2]))
    return _attention(numbers, q, k, v, alibi_slopes, sinks, seed)


def _check(q, k, v, alibi_slopes, sinks, numbers):
    """Raises what `flashtile.attention` would on the CPU, of which it asks for a plan, with tensors without memory."""

    def described(name, x, dtypes=_FLOATS):
        if x is None:
            return None
        if x.dtype.name not in dtypes:
            expected = ", ".join(dtypes[:-1]) + " or " * (len(dtypes) > 1) + dtypes[-1]
            raise TypeError(f"attention: {name} has dtype {x.dtype.name}, expected {expected}")
        return torch.empty(x.shape, dtype=getattr(torch, x.dtype.name), device="meta")

    options = {name: x.item() for name, x in numbers}
    options["window"] = options.pop("window_left", None), options.pop("window_right", None)
    options["seed"] = None  # which has been looked at
    options["alibi_slopes"] = described("alibi_slopes", alibi_slopes, ("float32",))
    options["sinks"] = described("sinks", sinks, ("float32",))
    operands = [described(name, x) for name, x in (("q", q), ("k", k), ("v", v))]
    _C.explain(_C.forward, "cpu", *operands, attention_options(**options))


# ---- Derivatives.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(numbers, *operands):
    return _forward(numbers, saves=False)(*operands)


def _saving_attention(numbers, *operands):
    if any(x.perturbed for x in jax.tree.leaves(operands[3])):
        raise NotImplementedError(
            "attention: alibi_slopes requires a gradient, expected slopes that do not: "
            "no kernel computes it; nearest supported: jax.lax.stop_gradient(alibi_slopes)"
        )
    operands = jax.tree.map(lambda x: x.value, operands)
    out, lse, state = _once(_forward(numbers, saves=True), *operands)
    return (out, lse), (*operands, out, state)


def _gradients(numbers, saved, cotangents):
    out = saved[-2]
    dout, dlse = cotangents
    dout = jnp.zeros_like(out) if isinstance(dout, SymbolicZero) else dout
    dlse = None if isinstance(dlse, SymbolicZero) else dlse
    dq, dk, dv, dsinks = _once(_backward(numbers), *saved, dout, dlse)
    return dq, dk, dv, None, dsinks, None  # neither slopes nor a seed have one


_attention.defvjp(_saving_attention, _gradients, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _once(function, *operands):
    return function(*operands)


def _refuse_second(function, *operands):
    raise NotImplementedError("attention: a second derivative is asked for, expected the first: no kernel computes it")


_once.defvjp(_refuse_second, _refuse_second)


# ---- Calls of XLA, and what a mapped axis makes of them.

# Of the operands of a backward those of a forward are the first.
_OPERANDS = ("q", "k", "v", "alibi_slopes", "sinks", "seed_array", "out", "state", "dout", "dlse")


@functools.lru_cache
def _forward(numbers: _Numbers, saves: bool) -> Callable[..., Any]:
    """Of the operands the function that returns (out, lse), or if it `saves` what a backward wants of each row,
    (out, lse, state)."""

    def forward(*operands):
        q, _, v, *_ = operands
        batch, seqlen, heads, _ = q.shape
        results = {
            "out": jax.ShapeDtypeStruct((batch, seqlen, heads, v.shape[3]), q.dtype),
            "lse": jax.ShapeDtypeStruct((batch, heads, seqlen), np.float32),
        }
        if saves:
            results["state"] = jax.ShapeDtypeStruct((2, batch, heads, seqlen), np.float32)
        return _call("flashtile_forward", operands, results, numbers)

    return _mapped_by_batch(forward, ("out", "lse", "state")[: 2 + saves], numbers)


@functools.lru_cache
def _backward(numbers: _Numbers) -> Callable[..., Any]:
    """Of the operands the function that returns (dq, dk, dv, dsinks), the last None where there are no sinks."""

    def backward(*operands):
        q, k, v, _, sinks, *_ = operands
        like = {"dq": q, "dk": k, "dv": v, "dsinks": sinks}
        results = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in like.items() if x is not None}
        gradients = _call("flashtile_backward", operands, results, numbers)
        return gradients if sinks is not None else (*gradients, None)

    return _mapped_by_batch(backward, ("dq", "dk", "dv", "dsinks"), numbers)


def _call(target, operands, results, numbers):
    """The handler finds each array by its name, which stands for its place among operands and results."""
    given = {name: x for name, x in zip(_OPERANDS, operands, strict=False) if x is not None}
    places = {name: np.int64(place) for place, name in enumerate([*given, *results])}
    return jax.ffi.ffi_call(target, tuple(results.values()))(*given.values(), **places, **dict(numbers))


def _mapped_by_batch(function, results, numbers):
    """`function` with a rule for jax.vmap: a mapped axis joins the batch, unless results depend on an entry's place
    there, as with dropout, or an array that is mapped, or a result, has no axis of the batch."""
    drops = dict(numbers)["dropout_p"] > 0
    mappable = custom_vmap(function)

    @mappable.def_vmap
    def rule(size, mapped, *operands):
        given = dict(zip(_OPERANDS, operands, strict=False))
        apart = any(m and _batch_axis(name) is None for name, m in zip(given, mapped, strict=True))
        if drops or apart or ("dsinks" in results and given["sinks"] is not None):
            axes = [0 if m else None for m in mapped]
            found = jax.vmap(sequential_vmap(mappable), in_axes=axes)(*operands)
        else:
            joined = [
                _joined(x, m, _batch_axis(name), size) for (name, x), m in zip(given.items(), mapped, strict=True)
            ]
            batch = operands[0].shape[1 if mapped[0] else 0]
            shares = (size, batch)
            found = [_parted(x, _batch_axis(name), shares) for name, x in zip(results, mappable(*joined), strict=True)]
        return tuple(found), jax.tree.map(lambda _: True, tuple(found))

    return mappable


def _batch_axis(name):
    """None where there is none."""
    return {"state": 1, "sinks": None, "dsinks": None, "seed_array": None}.get(name, 0)


def _joined(x, mapped, axis, size):
    """The first axis of `x`, or so many copies of it, joined with that of the batch."""
    if x is None or axis is None:
        return x
    if not mapped:
        x = jnp.broadcast_to(x, (size, *x.shape))
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], size * x.shape[axis + 1], *x.shape[axis + 2 :])


def _parted(x, axis, shares):
    """`x` with its axis of the batch in `shares`, of which the first is an axis in front."""
    if x is None:
        return x
    x = x.reshape(*x.shape[:axis], *shares, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)
