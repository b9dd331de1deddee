"""The passes of FlashAttention-3 by themselves, which ``flash_attn_interface`` has under names with an underscore.

One forward is all of its functions: a dense batch, a ragged one, or attention over a cache, by the arguments that are
given. It returns (out, softmax_lse, out_accum, softmax_lse_accum), the last two without elements: partial results are
not kept. The backward writes into dq, dk and dv, each a tensor or None, and returns softmax_d, Σ dout · out of each
row, float32, of softmax_lse's shape, without the rows of padding that the original's has.
"""

import torch
from torch import Tensor

from .._padding import contiguous
from ..attention import attention
from ..varlen import attention_varlen
from ._cache import attend_used_queries
from ._chunks import length_of
from ._common import attend, flag, has_8_bits, refuse_unserved, require_place, require_tensors, written
from ._passes import run_backward
from ._ragged import attend_ragged

Forward = tuple[Tensor, Tensor, Tensor, Tensor]


def forward(
    function,
    q,
    k,
    v,
    *,
    attention_chunk,
    return_attn_probs,
    tables=None,
    q_descale,
    k_descale,
    v_descale,
    **options,
):
    """Out, or (out, softmax_lse), of keys that are in no cache. `tables` are the arguments of `attend_ragged`. As in
    the original, descales have no effect on numbers of 16 bits."""
    if has_8_bits(q):
        out_dtype = getattr(options.get("out"), "dtype", None)
        options |= dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, out_dtype=out_dtype)
    options["return_lse"] = flag(function, "return_attn_probs", return_attn_probs)
    chunk = length_of(function, attention_chunk)
    if chunk == 0 and tables is None:
        return attend(function, attention, q, k, v, **options)
    options |= {name: contiguous(x) for name, x in (tables or {}).items()}
    if chunk == 0 and options["cu_seqlens_q"] is not None and options["cu_seqlens_k"] is not None:
        return attend(function, attention_varlen, q, k, v, **options)
    return attend_ragged(function, q, k, v, attention_chunk=chunk, **options)


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Forward:
    """The forward pass. Autograd sees it too, if an input requires a gradient and the keys are in no cache."""
    function = "_flash_attn_forward"
    refuse_unserved(function, qv=qv)
    require_tensors(function, q=q, k=k, v=v)
    if out_ is not None:
        dtype = torch.bfloat16 if has_8_bits(q) else q.dtype
        shape = (*q.shape[:-1], *v.shape[-1:])
        require_place(function, "out_", out_, shape, dtype, q.device)
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    place = None if differentiated else out_  # where autograd keeps the result, the other is a copy
    window_size = (window_size_left, window_size_right)
    options = dict(softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap)
    options |= dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    cached = dict(
        k=k_new,
        v=v_new,
        block_table=page_table,
        cache_batch_idx=kv_batch_idx,
        leftpad=leftpad_k,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
    )
    if all(x is None for x in cached.values()):
        tables = dict(seqused_q=seqused_q, seqused_k=seqused_k, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        if all(x is None for x in tables.values()):
            tables = None
        options |= dict(attention_chunk=attention_chunk, tables=tables, deterministic=False, out=place)
        out, lse = forward(function, q, k, v, return_attn_probs=True, **options)
    else:
        refuse_unserved(function, cu_seqlens_k=cu_seqlens_k)
        out, lse = attend_used_queries(
            function,
            q,
            k,
            v,
            seqused_q=seqused_q,
            cache_seqlens=seqused_k,
            rotary_interleaved=rotary_interleaved,
            rotary_seqlens=seqlens_rotary,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k_new=cu_seqlens_k_new,
            attention_chunk=attention_chunk,
            num_splits=num_splits,
            out=place,
            return_lse=True,
            **cached,
            **options,
        )
    return written(function, "out_", out_, out), lse, *nothing_kept(lse)


def nothing_kept(lse):
    """(out_accum, softmax_lse_accum), as they are where keys are not divided."""
    return lse.new_empty(0), lse.new_empty(0)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """The backward pass, of a dense batch or, with cu_seqlens on a side or both, of a ragged one."""
    sequences = (cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k)
    return run_backward(
        "_flash_attn_backward",
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dict(dq=dq, dk=dk, dv=dv),
        softmax_scale=softmax_scale,
        causal=is_causal,
        window_size=(window_size_left, window_size_right),
        softcap=softcap,
        deterministic=deterministic,
        sequences=None if all(x is None for x in sequences) else tuple(map(contiguous, sequences)),
    )
