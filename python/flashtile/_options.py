"""The options of a call, in one list for attention and one for caches.

Callers give options by name. From there on they go as a tuple in the order of these lists, which is also that of the
compiled module, where None stands for one left out. What follows from the lists is worked out once, at import, so that
no call pays for it.
"""

from typing import NamedTuple


class Option(NamedTuple):
    name: str
    arguments: str  # of an operator of torch.library, as its schema has them
    default: object = None  # but attention_kvcache is causal by default, and asks the mode for batch_invariant


SCORES = (
    Option("alibi_slopes", "Tensor? alibi_slopes"),
    Option("sinks", "Tensor? sinks"),
    Option("mask", "Tensor? mask"),  # a ColumnMask's ranges
    Option("causal", "bool causal", False),
    Option("window", "SymInt? window_left, SymInt? window_right"),
    Option("scale", "Scalar? scale"),
    Option("softcap", "Scalar softcap", 0.0),
)
ATTENTION = (
    *SCORES,
    Option("dropout_p", "float dropout_p", 0.0),
    Option("seed", "Tensor? seed"),
    Option("deterministic", "bool? deterministic"),
    Option("batch_invariant", "bool? batch_invariant"),
    # A tuple; None where the batch is dense. Only the operators of ragged batches have these arguments.
    Option("sequences", "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k"),
    # A tuple; None where none of them is given. Only the operators of e4m3 numbers have these arguments, in front.
    Option("fp8", "Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, ScalarType out_dtype"),
    Option("max_logits", ""),  # (B, H_q), float32, a result; operators have no such argument
)
CACHE = (
    *SCORES,
    Option("rotary_interleaved", "bool rotary_interleaved", True),
    Option("num_splits", "SymInt num_splits", 0),
    Option("batch_invariant", "bool batch_invariant", False),
    Option("return_lse", "", False),  # operators always do
    Option("max_logits", ""),
)


def _places(options, *names):
    listed = [option.name for option in options]
    return [listed.index(name) for name in names]


def _arguments(options):
    return ", ".join(option.arguments for option in options if option.arguments)


# Places in the tuple, where tensors come first.
ALIBI_SLOPES, SINKS, MASK, WINDOW, SCALE, SOFTCAP = _places(
    SCORES, "alibi_slopes", "sinks", "mask", "window", "scale", "softcap"
)
TENSORS = sum(option.arguments.startswith("Tensor?") for option in SCORES)
DROPOUT_P, SEED, DETERMINISTIC, BATCH_INVARIANT, SEQUENCES, FP8, MAX_LOGITS = _places(
    ATTENTION, "dropout_p", "seed", "deterministic", "batch_invariant", "sequences", "fp8", "max_logits"
)
(RETURN_LSE,) = _places(CACHE, "return_lse")

# The arguments of operators, as their schemas have them.
DENSE_ARGUMENTS = _arguments(ATTENTION[:SEQUENCES])
RAGGED_ARGUMENTS = _arguments(ATTENTION[:FP8])
FP8_ARGUMENTS = ATTENTION[FP8].arguments
CACHE_ARGUMENTS = _arguments(CACHE)
# A window is two arguments, so that what stands behind it is one place further on than in the tuple.
DENSE_COUNT, CACHE_COUNT = SEQUENCES + 1, RETURN_LSE + 1
SEED_ARGUMENT, BATCH_INVARIANT_ARGUMENT = SEED + 1, BATCH_INVARIANT + 1

# flashtile.distributed adds one more behind them: where a call lies in a larger one, of which it is a part. It is the
# tuple (batch, head, row, column, ahead): of the first element of its scores, from which dropout counts, and of how far
# ALiBi's diagonal is ahead of the one on which the call's last row meets its last key.
PLACE = len(ATTENTION)

_DEFAULTS = {option.name: option.default for option in ATTENTION}


def attention_options(**given):
    """The tuple of `ATTENTION`, for callers who do not know of every option."""
    return tuple({**_DEFAULTS, **given}.values())


def replaced(options, place, value):
    return (*options[:place], value, *options[place + 1 :])
