"""The options of a call as the operators of torch.library take them: plain numbers, symbols of a tracer, tensors.

Eager calls hand their options to the compiled module, which judges each of them; the schemas of operators would take
others, and say other things. So here what is not plainly of its type goes to the module as well. Where PyTorch traces,
the values of numbers may be unknown, and are judged when the operator runs.
"""

import operator

import torch
from torch import Tensor

from . import _C
from ._core import require_tensors

_INTEGERS = (int, torch.SymInt)
_REALS = (int, float, torch.SymInt, torch.SymFloat)
_INT64 = -(2**63), 2**63 - 1


def of_attention(function, q, options):
    """`options` of `_C.forward`, in the order of the operators, a seed as a tensor of q's kind: fake where q is."""
    alibi_slopes, sinks, causal, window, scale, softcap, dropout_p, seed, deterministic, sequences = options
    _require_given(function, alibi_slopes=alibi_slopes, sinks=sinks)
    if sequences is not None:
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = sequences
        require_tensors(function, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        _require_given(function, seqused_q=seqused_q, seqused_k=seqused_k)
    if not isinstance(seed, Tensor):
        seed = _item(seed)
    flags = (causal,) if deterministic is None else (causal, deterministic)
    left, right, scale, softcap, dropout_p = _numbers(
        lambda: _C.check_options(function, options),
        window,
        scale,
        reals=(softcap, dropout_p),
        fits=_are_bool(flags) and _is_seed(seed),
    )
    scores = (alibi_slopes, sinks, causal, left, right, scale, softcap)
    return (*scores, dropout_p, _seed_tensor(seed, q), deterministic, *(sequences or ()))


def of_cache(function, options):
    """`options` of `_C.kvcache`, in the order of the operators, which always return lse."""
    alibi_slopes, sinks, causal, window, scale, softcap, interleaved, num_splits, invariant, return_lse = options
    _require_given(function, alibi_slopes=alibi_slopes, sinks=sinks)
    left, right, scale, softcap, num_splits = _numbers(
        lambda: _C.check_cache_options(function, options),
        window,
        scale,
        reals=(softcap,),
        integers=(num_splits,),
        fits=_are_bool((causal, interleaved, invariant, return_lse)),
    )
    return alibi_slopes, sinks, causal, left, right, scale, softcap, interleaved, num_splits, invariant


def _require_given(function, **operands):
    require_tensors(function, **{name: x for name, x in operands.items() if x is not None})


def _are_bool(flags):
    return all(isinstance(x, bool) for x in flags)


def _numbers(check, window, scale, *, reals, integers=(), fits):
    """(left, right, scale, *reals, *integers). Unless `fits` and all of them are plain numbers, `check` refuses the
    call, or takes what is left for numbers too."""
    is_pair = isinstance(window, tuple) and len(window) == 2
    left, right, *integers = map(_item, (*(window if is_pair else (None, None)), *integers))
    scale, *reals = map(_item, (scale, *reals))
    fits = fits and (is_pair or window is None)
    fits = fits and all(x is None or _is_plain(x, _INTEGERS) for x in (left, right))
    fits = fits and (scale is None or _is_plain(scale, _REALS))
    fits = fits and all(_is_plain(x, _INTEGERS) for x in integers) and all(_is_plain(x, _REALS) for x in reals)
    if not fits:
        check()
        left, right, *integers = map(_as_integer, (left, right, *integers))
        scale, *reals = map(_as_real, (scale, *reals))
    return left, right, scale, *reals, *integers


def _item(x):
    """A number of NumPy's, or a tensor that holds one, as Python's."""
    if isinstance(x, _REALS) or not hasattr(x, "item") or not all(size == 1 for size in x.shape):
        return x
    return x.item()


def _is_plain(x, types):
    return isinstance(x, types) and (not isinstance(x, int) or _INT64[0] <= x <= _INT64[1])


def _as_integer(x):
    """Beyond 64 bits the nearest one, as in the module."""
    return x if x is None or _is_plain(x, _INTEGERS) else min(max(operator.index(x), _INT64[0]), _INT64[1])


def _as_real(x):
    return x if x is None or _is_plain(x, _REALS) else float(x)


def _is_seed(seed):
    if isinstance(seed, Tensor):
        return seed.numel() == 1 and not seed.is_floating_point() and not seed.is_complex()
    return seed is None or (isinstance(seed, _INTEGERS) and 0 <= seed < 2**64)


def _seed_tensor(seed, q):
    """As an int64, for which the upper half of seeds becomes negative numbers."""
    if seed is None or isinstance(seed, Tensor):
        return seed
    seed = operator.index(seed) if not isinstance(seed, _INTEGERS) else seed
    if seed >= 2**63:
        seed = operator.index(seed) - 2**64  # a number even where it was a symbol, which cannot be that large
    return q.new_full((), seed, dtype=torch.int64, device="cpu")
