"""FLOPs of the operators for torch.utils.flop_counter, which counts nothing of operators that it does not know.

By its own rules, so that a model counts the same with PyTorch's attention: a multiplication and an addition are two,
what a mask hides counts, and a backward forms the scores again.
"""

import itertools

from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ._options import DENSE_COUNT


def count_flops(operator, formula):
    """Has an operator counted by `formula`, which takes its arguments."""
    register_flop_formula(operator.overloadpacket, get_raw=True)(lambda *given, out_val=None: formula(*given))


def forward_flops(q, k, v, *options):
    return _pairs(q, k, _sequences(options)) * 2 * (q.shape[-1] + v.shape[-1])


def backward_flops(dout, dlse, q, k, v, out, state, needed, *options):
    return _pairs(q, k, _sequences(options)) * 2 * (3 * q.shape[-1] + 2 * v.shape[-1])


def kvcache_flops(q, k_cache, v_cache, *others):
    return append_flops(q, k_cache, v_cache, None, None, *others)


def append_flops(q, k_cache, v_cache, k_new, v_new, cos, sin, cache_seqlens, block_table, idx, leftpad, cu_q, *_):
    batch = cache_seqlens.shape[0]
    queries = _lengths(batch, q.shape[0] / max(batch, 1) if cu_q is not None else q.shape[1], cu_q)
    added = [0] * batch if k_new is None else queries if cu_q is not None else [k_new.shape[1]] * batch
    room = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    held, skipped = _values(cache_seqlens, [room] * batch), _values(leftpad, [0] * batch)
    keys = [min(a + b, room) - c for a, b, c in zip(held, added, skipped, strict=True)]
    return int(_sum_of_products(queries, keys) * q.shape[-2]) * 2 * (q.shape[-1] + v_cache.shape[-1])


def _sequences(options):
    return options[DENSE_COUNT:]  # (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), or nothing


def _pairs(q, k, sequences):
    """Of a query and a key, in all heads."""
    if not sequences:
        batch, seqlen_q, heads, _ = q.shape
        return batch * seqlen_q * k.shape[1] * heads
    cu_q, cu_k, used_q, used_k = sequences
    batch = cu_q.shape[0] - 1
    queries = _lengths(batch, q.shape[0] / max(batch, 1), cu_q, used_q)
    keys = _lengths(batch, k.shape[0] / max(batch, 1), cu_k, used_k)
    return int(_sum_of_products(queries, keys) * q.shape[1])


def _lengths(batch, average, cu_seqlens, used=None):
    """Of each sequence; where the tables hold no data, all are taken for average."""
    begins = _values(cu_seqlens, None)
    lengths = [average] * batch if begins is None else [end - begin for begin, end in itertools.pairwise(begins)]
    return _values(used, lengths)


def _values(table, default):
    return table.tolist() if type(table) is Tensor and not table.is_meta else default


def _sum_of_products(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))
