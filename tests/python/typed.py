"""What type checkers make of the public functions. Nobody runs this: test_typing.py has it checked."""

import torch
from torch import Tensor
from typing_extensions import assert_type

import flashtile
import flashtile.masks
from flashtile.compat.flash_attn import flash_attn_func


def dense(q: Tensor, flag: bool) -> None:
    assert_type(flashtile.attention(q, q, q), Tensor)
    assert_type(flashtile.attention(q, q, q, causal=True, window=(3, None), return_lse=False), Tensor)
    assert_type(flashtile.attention(q, q, q, return_lse=True), tuple[Tensor, Tensor])
    assert_type(flashtile.attention(q, q, q, out=q, return_lse=True), tuple[Tensor, Tensor])
    assert_type(flashtile.attention(q, q, q, return_max_logits=True), tuple[Tensor, ...])
    _, _, largest = flashtile.attention(q, q, q, return_lse=True, return_max_logits=True)
    assert_type(largest, Tensor)
    assert_type(flashtile.attention(q, q, q, return_max_logits=flag), Tensor | tuple[Tensor, ...])
    either = flashtile.attention(q, q, q, return_lse=flag)
    assert isinstance(either, tuple)
    assert_type(either, tuple[Tensor, Tensor])


def ragged(q: Tensor, cu_seqlens: Tensor, flag: bool) -> None:
    out = flashtile.attention_varlen(q, q, q, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=3)
    assert_type(out, Tensor)
    out, lse = flashtile.attention_varlen(q, q, q, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, return_lse=True)
    assert_type(lse, Tensor)
    flashtile.attention_varlen(q, q, q, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, return_lse=flag)
    pair = flashtile.attention_varlen(q, q, q, cu_seqlens_q=q, cu_seqlens_k=q, return_max_logits=True)
    assert_type(pair, tuple[Tensor, ...])


def cached(q: Tensor, cache: Tensor, flag: bool) -> None:
    assert_type(flashtile.attention_kvcache(q, cache, cache, cache_seqlens=7), Tensor)
    assert_type(flashtile.attention_kvcache(q, cache, cache, cache_seqlens=7, out=q), Tensor)
    pair = flashtile.attention_kvcache(q, cache, cache, cache_seqlens=q.int(), return_lse=True)
    assert_type(pair, tuple[Tensor, Tensor])
    flashtile.attention_kvcache(q, cache, cache, cache_seqlens=7, return_lse=flag)
    found = flashtile.attention_kvcache(q, cache, cache, cache_seqlens=7, return_lse=True, return_max_logits=True)
    assert_type(found, tuple[Tensor, ...])


def cascaded(q: Tensor, cache: Tensor, flag: bool) -> None:
    assert_type(flashtile.attention_cascade(q, q, q, cache, cache, cache_seqlens=7), Tensor)
    pair = flashtile.attention_cascade(q, q, q, cache, cache, cache_seqlens=7, prefix_seqlen=q, return_lse=True)
    assert_type(pair, tuple[Tensor, Tensor])
    flashtile.attention_cascade(q, q, q, cache, cache, cache_seqlens=7, return_lse=flag)


def others(q: Tensor) -> None:
    assert_type(flashtile.scaled_dot_product_attention(q, q, q, None, 0.0, True), Tensor)
    assert_type(flashtile.scaled_dot_product_attention(q, q, q, flashtile.masks.ColumnMask.full(3, 3)), Tensor)
    assert_type(flashtile.combine([q, q], [q, q]), tuple[Tensor, Tensor])
    assert_type(flashtile.max_logits(q, q, causal=True, window=(3, None)), Tensor)
    assert_type(flashtile.explain(q, q, q, causal=True, device=torch.device("cpu")), str)
    assert_type(flashtile.explain(q, q, q, device="H100"), str)
    assert_type(str(flashtile.info()), str)
    flash_attn_func(q, q, q, causal=True)


def wrong(q: Tensor) -> None:
    """Each line is an error: one that a checker does not find makes its `ignore` one that nobody needs."""
    flashtile.attention(q, q)  # type: ignore[call-overload]
    flashtile.attention(q, q, q, None)  # type: ignore[call-overload]
    flashtile.attention(q, q, q, is_causal=True)  # type: ignore[call-overload]
    flashtile.attention(q, q, q, attn_mask=q)  # type: ignore[call-overload]
    flashtile.attention(q, q, q, window=3)  # type: ignore[call-overload]
    flashtile.attention_varlen(q, q, q)  # type: ignore[call-overload]
    flashtile.attention_kvcache(q, q, q)  # type: ignore[call-overload]
    _ = flashtile.attention(q, q, q).nothing  # type: ignore[attr-defined]
    _ = flashtile.attention(q, q, q, return_lse=True).shape  # type: ignore[attr-defined]
