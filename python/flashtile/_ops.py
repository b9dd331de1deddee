"""The operators of torch.library, by which torch.compile, torch.export and torch.func know attention.

Eager calls do without the dispatcher (`_autograd.py`, `kvcache.py`) and give the same bits. An operator takes every
option, in the order of `_options.py`, a window as its two distances, and a seed as an integer tensor on the CPU, so
that a graph can draw one in each run. It always returns lse, and that of attention the state of the softmax, which its
backward wants.
"""

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import increment_version

from . import _C
from ._arguments import of_attention, of_cache, to_attention, to_cache
from ._build import NAMESPACE
from ._core import (
    forward_with_state,
    gradients,
    is_compiling,
    readable,
    readable_options,
    require_tensors,
    under_functorch,
)
from ._flops import append_flops, backward_flops, count_flops, forward_flops, kvcache_flops
from ._options import (
    BATCH_INVARIANT_ARGUMENT,
    CACHE_ARGUMENTS,
    CACHE_COUNT,
    DENSE_ARGUMENTS,
    DENSE_COUNT,
    RAGGED_ARGUMENTS,
    RETURN_LSE,
    SEED_ARGUMENT,
    SINKS,
    replaced,
)

_CACHE_TABLES = "Tensor cache_seqlens, Tensor? block_table, Tensor? cache_batch_idx, Tensor? leftpad"
_CACHE_REST = f"Tensor? rotary_cos, Tensor? rotary_sin, {_CACHE_TABLES}, Tensor? cu_seqlens_q, {{}}, {CACHE_ARGUMENTS}"
_DESCALES = "Tensor? k_descale, Tensor? v_descale"
_WRITTEN_DESCALES = "Tensor(c!)? k_descale, Tensor(d!)? v_descale"  # where each row has one
_FUNCTION = "attention_kvcache"  # to which the operators of caches belong
_RESULTS_AND_STATE = "(Tensor out, Tensor lse, Tensor state)"
_INCOMING = "Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor state, bool[4] needed"
_GRADIENTS = "(Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)"


# ---- attention, dense and ragged


def _forward(q, k, v, *options):
    out, lse, state = forward_with_state(q, k, v, to_attention(*options))
    return out, lse, state.clone() if state is lse else state  # each result of an operator has memory of its own


def empty_results(q, k, v, *_, dtype=None):
    *batch, rows, heads, _ = q.shape if q.dim() > 2 else (0, 0, 0)  # for the kernel to say what is wrong
    out = q.new_empty(*batch, rows, heads, *v.shape[-1:], dtype=dtype)
    return out, q.new_empty(*batch, heads, rows, dtype=torch.float32)


def _new_results_and_state(q, k, v, *options):
    out, lse = empty_results(q, k, v)
    state_is_lse = options[BATCH_INVARIANT_ARGUMENT] and q.device.type == "cuda"
    return out, lse, torch.empty_like(lse) if state_is_lse else lse.new_empty(2, *lse.shape)


def _backward(dout, dlse, q, k, v, out, state, needed, *options):
    found = gradients(needed, dout, dlse, q, k, v, out, state, to_attention(*options))
    return tuple(q.new_empty(0) if x is None else x for x in found)


def _new_gradients(dout, dlse, q, k, v, out, state, needed, *options):
    inputs = zip((q, k, v, options[SINKS]), needed, strict=True)
    return tuple(x.new_empty(x.shape) if wanted else q.new_empty(0) for x, wanted in inputs)


def _save(ctx, inputs, output):
    q, k, v, *options = inputs
    out, _, state = output
    ctx.options = [None if isinstance(x, Tensor) else x for x in options]
    ctx.mark_non_differentiable(state)
    ctx.save_for_backward(q, k, v, out, state, *(x if isinstance(x, Tensor) else None for x in options))
    ctx.set_materialize_grads(False)  # a loss of one output must not pay for zeros of the other


def _differentiated_by(backward):
    """The formula of autograd for results whose gradients `backward` computes."""

    def differentiate(ctx, dout, dlse, _):
        q, k, v, out, state, *tensors = ctx.saved_tensors
        options = [other if x is None else x for x, other in zip(tensors, ctx.options, strict=True)]
        needed = [*ctx.needs_input_grad[:3], ctx.needs_input_grad[3 + SINKS]]
        found = backward(dout, dlse, q, k, v, out, state, needed, *options)
        dq, dk, dv, dsinks = (x if wanted else None for x, wanted in zip(found, needed, strict=True))
        return dq, dk, dv, *replaced((None,) * len(options), SINKS, dsinks)

    return differentiate


def _one_by_one(call, function="attention", written=()):
    """The rule by which vmap computes `call`: for each entry of its own, which needs what it writes for itself."""

    def entries(info, in_dims, *arguments):
        if info.batch_size == 0:
            raise NotImplementedError(f"{function}: vmap has 0 entries, expected at least one: it is a call for each")
        for place, name in written:
            if in_dims[place] is None:
                raise NotImplementedError(
                    f"{function}: {name} is one for all entries of vmap, expected one for each, as k_new is given"
                )

        def entry(i):
            pairs = zip(arguments, in_dims, strict=True)
            return call(*(x.select(dim, i) if isinstance(dim, int) else x for x, dim in pairs))

        results = zip(*map(entry, range(info.batch_size)), strict=True)
        stacked = tuple(torch.stack(parts) for parts in results)
        return stacked, (0,) * len(stacked)

    return entries


def _differentiable(call, save, differentiate):
    """`call` with its formula, also for transforms of torch.func."""

    class Differentiable(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*arguments):
            return call(*arguments)

    Differentiable.setup_context = staticmethod(save)
    Differentiable.backward = staticmethod(differentiate)
    return Differentiable.apply


def differentiable_once(compute):
    """`compute`, which computes gradients, as a function of autograd whose results refuse to be differentiated."""
    return _differentiable(compute, _save_nothing, _refuse_twice)


def _save_nothing(ctx, inputs, output):
    pass


def _refuse_twice(ctx, *_):
    raise NotImplementedError("attention: differentiated twice, expected once: no kernel computes second derivatives")


def attend_operator(function, q, k, v, options, return_lse):
    """What `_autograd.attend` returns, by way of an operator; a seed may be a tensor here."""
    given = of_attention(function, q, options)
    call = _attention_for(given)
    if not is_compiling() and under_functorch():
        call = _differentiable_calls[call]  # operators have no autograd there, and Dynamo cannot trace these functions
    out, lse, _ = call(q, k, v, *given)
    return (out, lse) if return_lse else out


def gradient_operator(function, needed, dout, dlse, q, k, v, out, state, options):
    """What `_core.gradients` returns, by way of an operator."""
    given = of_attention(function, q, options)
    found = _backwards[_attention_for(given)](dout, dlse, q, k, v, out, state, list(needed), *given)
    return [x if wanted else None for x, wanted in zip(found, needed, strict=True)]


def _attention_for(options):
    return _attentions[len(options) > DENSE_COUNT, options[SEED_ARGUMENT] is not None]


# ---- a cache of keys and values


def _kvcache(q, k_cache, v_cache, *others):
    return _append(q, k_cache, v_cache, None, None, *others)


def _append(q, k_cache, v_cache, k_new, v_new, rotary_cos, rotary_sin, *others):
    tables, options = others[:-CACHE_COUNT], to_cache(*others[-CACHE_COUNT:])
    return call_kvcache(k_cache, v_cache, (q, k_new, v_new, rotary_cos, rotary_sin), tables, options)


def call_kvcache(k_cache, v_cache, operands, tables, options, out=None):
    """(out, lse or None), where a tensor `out` is given in it. `operands` may be copied: q, k_new, v_new, rotary_cos,
    rotary_sin. `tables` are tensors of numbers of sequences, and of 8-bit caches the descales, which are written where
    rows are appended that have one each."""
    q, *optional = operands
    try:
        results = _C.kvcache(q, k_cache, v_cache, (*optional, *tables), options, out)
    except _C.Unreadable:
        written = () if optional[0] is None else (k_cache, v_cache)
        q, *optional = (readable(x, written) for x in operands)
        tensors = (*optional, *map(readable, tables[:-2]), *tables[-2:])
        try:
            results = _C.kvcache(q, k_cache, v_cache, tensors, readable_options(options), out)
        except _C.Unreadable as refusal:  # of a cache, which is written where it lies
            raise NotImplementedError(str(refusal)) from None
    if optional[0] is not None:  # autograd notices when a cache has changed that it keeps
        increment_version(k_cache)
        increment_version(v_cache)
        for descale in tables[-2:]:
            if descale is not None and descale.dim() == 3:
                increment_version(descale)
    if out is not None:
        increment_version(out)
    return results


def _new_cache_results(q, k_cache, v_cache, *_):
    return empty_results(q, k_cache, v_cache)


def kvcache_operator(k_cache, v_cache, operands, tables, options):
    """What `call_kvcache` returns, by way of an operator: one that declares that it writes, or one that does not."""
    q, k_new, v_new, rotary_cos, rotary_sin = operands
    require_tensors(_FUNCTION, q=q, k_cache=k_cache, v_cache=v_cache, cache_seqlens=tables[0])
    optional = dict(k_new=k_new, v_new=v_new, rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    names = ("block_table", "cache_batch_idx", "leftpad", "cu_seqlens_q", "k_descale", "v_descale")
    optional.update(zip(names, tables[1:], strict=True))
    require_tensors(_FUNCTION, **{name: x for name, x in optional.items() if x is not None})
    given = (rotary_cos, rotary_sin, *tables, *of_cache(_FUNCTION, options))
    if k_new is None and v_new is None:
        out, lse = _attention_kvcache(q, k_cache, v_cache, *given)
    else:
        out, lse = _attention_kvcache_append(q, k_cache, v_cache, k_new, v_new, *given)
    return out, lse if options[RETURN_LSE] else None


# ---- their definitions

_differentiable_calls = {}  # by operator: the function that it stands for
_backwards = {}  # by operator: the one that computes its gradients
_library = torch.library.Library(NAMESPACE, "DEF")
_operators = getattr(torch.ops, NAMESPACE)


def define(name, arguments, results, kernel, new_results, *tags):
    """The kernel wants the last dimension contiguous, as it is in eager mode; a tag keeps compilers from others."""
    tags = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag, *tags)
    _library.define(f"{name}({arguments}) -> {results}", tags=tags)
    for backend in ("CPU", "CUDA"):
        _library.impl(name, kernel, backend)
    torch.library.register_fake(f"{NAMESPACE}::{name}", new_results, lib=_library)
    return getattr(_operators, name).default


def _define_attention(name, options, *tags):
    """An operator that autograd takes apart into one for each direction, so that no compiled call pays for autograd
    again."""
    inputs = f"Tensor q, Tensor k, Tensor v, {options}"
    forward = define(f"{name}_forward", inputs, _RESULTS_AND_STATE, _forward, _new_results_and_state, *tags)
    backward = define(f"{name}_backward", f"{_INCOMING}, {options}", _GRADIENTS, _backward, _new_gradients, *tags)
    formula = _differentiated_by(differentiable_once(backward))
    _library.define(f"{name}({inputs}) -> {_RESULTS_AND_STATE}", tags=(torch.Tag.pt2_compliant_tag,))
    differentiable = _differentiable(forward, _save, formula)
    _library.impl(name, differentiable, "CompositeImplicitAutograd")
    whole = getattr(_operators, name).default
    for call in (whole, forward, backward):
        torch.library.register_vmap(call, _one_by_one(call), lib=_library)
    count_flops(forward, forward_flops)
    count_flops(backward, backward_flops)
    _differentiable_calls[whole] = differentiable
    _backwards[whole] = backward
    return whole


def define_forward(name, arguments, kernel, new_results, flops, *tags, function="attention", written=()):
    """An operator without gradients that returns out and lse."""
    call = define(name, arguments, "(Tensor out, Tensor lse)", kernel, new_results, *tags)
    torch.library.register_vmap(call, _one_by_one(call, function, written), lib=_library)
    count_flops(call, flops)
    return call


# A CUDA graph would keep the seed of its capture.
EAGER = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()
_attentions = {  # by whether sequences are ragged, and whether there is a seed
    (False, False): _define_attention("attention", DENSE_ARGUMENTS),
    (False, True): _define_attention("attention_dropout", DENSE_ARGUMENTS, *EAGER),
    (True, False): _define_attention("attention_varlen", RAGGED_ARGUMENTS),
    (True, True): _define_attention("attention_varlen_dropout", RAGGED_ARGUMENTS, *EAGER),
}
_attention_kvcache = define_forward(
    "attention_kvcache",
    f"Tensor q, Tensor k_cache, Tensor v_cache, {_CACHE_REST.format(_DESCALES)}",
    _kvcache,
    _new_cache_results,
    kvcache_flops,
    function=_FUNCTION,
)
_attention_kvcache_append = define_forward(
    "attention_kvcache_append",
    f"Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k_new, Tensor? v_new, "
    f"{_CACHE_REST.format(_WRITTEN_DESCALES)}",
    _append,
    _new_cache_results,
    append_flops,
    function=_FUNCTION,
    written=((1, "k_cache"), (2, "v_cache")),
)
