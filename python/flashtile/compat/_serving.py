"""What the forms have in common that serving engines gave flash-attn."""

import torch

from .. import _C, _capability
from ._cache import attend_used_queries
from ._common import described, drops, integer, refuse
from ._passes_3 import forward


def attend_sequences(
    function,
    q,
    k,
    v,
    *,
    block_table,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_q=None,
    seqused_k,
    num_splits=0,
    dropout_p=0.0,
    deterministic=False,
    return_lse,
    **options,
):
    """Out, or (out, lse): of keys in the pages that `block_table` names, or that stand in sequences."""
    if block_table is None:
        tables = dict(seqused_q=seqused_q, seqused_k=seqused_k, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        options |= dict(dropout_p=dropout_p, deterministic=deterministic, return_attn_probs=return_lse)
        return forward(function, q, k, v, tables=tables, **options)
    if seqused_k is None:
        raise ValueError(f"{function}: seqused_k is None, expected a tensor, since block_table is given")
    if drops(dropout_p):
        refuse(function, "dropout_p", described(dropout_p), "0.0, since block_table is given")
    options |= dict(block_table=block_table, cu_seqlens_q=cu_seqlens_q, seqused_q=seqused_q, return_lse=return_lse)
    options |= splits_of(function, num_splits)
    return attend_used_queries(function, q, k, v, cache_seqlens=seqused_k, **options)


def splits_of(function, num_splits):
    """Engines ask for one split where results must not depend on the batch. More are a bound for memory that a graph
    keeps, which flashtile has no need of: its plans depend on no length."""
    return dict(batch_invariant=True if integer(function, "num_splits", num_splits) == 1 else None)


def unsupported_reason(device=None):
    """Why nothing runs on the current GPU, or on `device`; None if all does, as where there is no GPU."""
    if not torch.cuda.is_available():
        return None
    if not _C.info()["built_with_cuda"]:
        return f"flashtile was built without CUDA; {_C.CUDA_REMEDY}"
    found = _capability.of_device(device)
    return None if found >= 80 else f"the GPU has compute capability {found / 10}, expected 8.0 or newer"
