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
from ._options import (
    ALIBI_SLOPES,
    CACHE_ARGUMENTS,
    DENSE_ARGUMENTS,
    DENSE_COUNT,
    MASK,
    RETURN_LSE,
    SEED,
    SEED_ARGUMENT,
    SEQUENCES,
    SINKS,
    WINDOW,
    replaced,
)

_INTEGERS = (int, torch.SymInt)
_REALS = (int, float, torch.SymInt, torch.SymFloat)
_INT64 = -(2**63), 2**63 - 1


def of_attention(function, q, options):
    """`options` of `_C.forward` as the operators take them, a seed as a tensor of q's kind: fake where q is."""
    _require_given(function, alibi_slopes=options[ALIBI_SLOPES], sinks=options[SINKS], mask=options[MASK])
    sequences, seed = options[SEQUENCES], options[SEED]
    if sequences is not None:
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = sequences
        require_tensors(function, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        _require_given(function, seqused_q=seqused_q, seqused_k=seqused_k)
    if not isinstance(seed, Tensor):
        seed = as_number(seed)
    fits = _is_seed(seed)
    given = _plain(DENSE_ARGUMENTS, options[:SEQUENCES], fits, lambda: _C.check_options(function, options))
    return (*replaced(given, SEED_ARGUMENT, _seed_tensor(seed, q)), *(sequences or ()))


def of_cache(function, options):
    """`options` of `_C.kvcache` as the operators take them, which always return lse."""
    _require_given(function, alibi_slopes=options[ALIBI_SLOPES], sinks=options[SINKS], mask=options[MASK])
    fits = isinstance(options[RETURN_LSE], bool)
    return _plain(CACHE_ARGUMENTS, options[:RETURN_LSE], fits, lambda: _C.check_cache_options(function, options))


def to_attention(*given, fp8=None):
    """The options of `_C.forward`, of an operator's arguments."""
    window, sequences = given[WINDOW : WINDOW + 2], given[DENSE_COUNT:] or None
    options = (*given[:WINDOW], window, *given[WINDOW + 2 : DENSE_COUNT], sequences, fp8, None)
    seed = options[SEED]
    return options if seed is None else replaced(options, SEED, operator.index(seed) % 2**64)


def to_cache(*given):
    """Those of `_C.kvcache`."""
    return (*given[:WINDOW], given[WINDOW : WINDOW + 2], *given[WINDOW + 2 :], True, None)


def _require_given(function, **operands):
    require_tensors(function, **{name: x for name, x in operands.items() if x is not None})


def _plain(arguments, options, fits, check):
    """`options` as these arguments, of which a window is two. Unless `fits` and all are plainly of their type, `check`
    refuses the call, or takes what is left for numbers too."""
    window = options[WINDOW]
    is_pair = isinstance(window, tuple) and len(window) == 2
    given = (*options[:WINDOW], *(window if is_pair else (None, None)), *options[WINDOW + 1 :])
    kinds = [argument.split(" ")[0] for argument in arguments.split(", ")]
    given = [_number(kind, x) if _is_number(kind) else x for kind, x in zip(kinds, given, strict=True)]
    fits = fits and (is_pair or window is None)
    if not (fits and all(_fits(kind, x) for kind, x in zip(kinds, given, strict=True))):
        check()
        given = [_converted(kind, x) for kind, x in zip(kinds, given, strict=True)]
    return given


def _is_number(kind):
    return kind.startswith(("SymInt", "Scalar", "float"))


def _fits(kind, x):
    if kind == "Tensor?":
        return True  # tensors have been looked at, a seed too
    if x is None:
        return kind.endswith("?")
    if not _is_number(kind):
        return isinstance(x, bool)
    return _is_plain(x, _INTEGERS if kind.startswith("SymInt") else _REALS)


def _converted(kind, x):
    if not _is_number(kind):
        return x
    return as_integer(x) if kind.startswith("SymInt") else _as_real(x)


def _number(kind, x):
    x = as_number(x)
    return as_integer(x) if kind.startswith("SymInt") and isinstance(x, int) else x


def as_number(x):
    """A number of NumPy's, or a tensor that holds one, as Python's."""
    if isinstance(x, _REALS) or not hasattr(x, "item") or not all(size == 1 for size in x.shape):
        return x
    return x.item()


def _is_plain(x, types):
    return isinstance(x, types) and (not isinstance(x, int) or _INT64[0] <= x <= _INT64[1])


def as_integer(x):
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
