"""flashtile: exact attention for PyTorch that never stores the score matrix."""

from ._build import VERSION as __version__
from ._invariance import batch_invariant_mode
from .attention import attention
from .cascade import attention_cascade
from .combine import combine
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
    "info",
    "max_logits",
    "scaled_dot_product_attention",
]
