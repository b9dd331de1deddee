"""flashtile, exact attention for PyTorch, as Hugging Face's `kernels` loads it: `make hub` packs this file.

Beside flashtile's functions it has those that transformers looks for in a kernel, which are flash-attn's.
"""

from . import masks
from ._build import VERSION as __version__
from ._invariance import batch_invariant_mode
from .attention import attention
from .cascade import attention_cascade
from .combine import combine
from .compat.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from .explain import explain
from .info import info
from .kvcache import attention_kvcache
from .max_logits import max_logits
from .sdpa import scaled_dot_product_attention
from .varlen import attention_varlen

__all__ = [
    "__version__",
    "attention",
    "attention_cascade",
    "attention_kvcache",
    "attention_varlen",
    "batch_invariant_mode",
    "combine",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "info",
    "masks",
    "max_logits",
    "scaled_dot_product_attention",
]
