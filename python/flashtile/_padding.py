"""Operands as other interfaces allow them: last dimensions that are not contiguous, or no multiples of 8."""

from torch import Tensor
from torch.nn.functional import pad


def attend_padded(attention, q, k, v, *, scale, **options):
    """``flashtile.attention`` or ``attention_varlen``, of copies where the operands are not as these want them."""
    q, k, v = contiguous(q), contiguous(k), contiguous(v)
    head_dim, head_dim_v = _last(q), _last(v)
    if head_dim % 8 == 0 == head_dim_v % 8 or _last(k) != head_dim:
        return attention(q, k, v, scale=scale, **options)
    if scale is None and head_dim > 0:
        scale = head_dim**-0.5
    result = attention(_padded(q), _padded(k), _padded(v), scale=scale, **options)
    out, *lse = result if isinstance(result, tuple) else (result,)
    out = out[..., :head_dim_v]
    return (out, *lse) if lse else out


def contiguous(x):
    """`x` with a contiguous last dimension; what is no tensor stays, for flashtile to say what is wrong."""
    return x.contiguous() if isinstance(x, Tensor) and x.dim() > 0 and x.stride(-1) != 1 else x


def _last(x):
    return x.shape[-1] if isinstance(x, Tensor) and x.dim() > 0 else 0


def _padded(x):
    """Zeros change no score, and values of 0 are cut off again."""
    return pad(x, (0, -_last(x) % 8)) if _last(x) % 8 != 0 else x
