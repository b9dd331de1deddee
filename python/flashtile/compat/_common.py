"""What flash-attn's two interfaces have in common: its conventions, in flashtile's terms."""

import operator

import torch
from torch import Tensor

from .._core import is_compiling
from .._padding import attend_padded, contiguous
from ..kvcache import attention_kvcache

WindowSize = tuple[int, int]

_INSTEAD = {
    "attention_chunk": "flash_attn_varlen_func of the chunks",
    "cu_seqlens_k_new": "the tensor cu_seqlens_q, each sequence having as many new keys as queries",
    "qv": "torch.cat((q, qv), -1) as q, torch.cat((k, v), -1) as k",
    "rotary_seqlens": "q and k that are rotated before",
} | dict.fromkeys(("q_descale", "k_descale", "v_descale"), "float16 or bfloat16, which need no scales")


def refuse(function, argument, found, expected):
    instead = f"; nearest supported: {_INSTEAD[argument]}" if argument in _INSTEAD else ""
    raise NotImplementedError(f"{function}: {argument} is {found}, expected {expected}{instead}")


def refuse_unserved(function, attention_chunk=0, **unserved):
    """Arguments of FlashAttention-3 that ask for what flashtile does not compute."""
    if attention_chunk != 0:
        refuse(function, "attention_chunk", attention_chunk, 0)
    for name, x in unserved.items():
        if x is not None:
            refuse(function, name, described(x), None)


def attend(attention, q, k, v, *, softmax_scale, window_size, softcap, deterministic, **options):
    """``flashtile.attention`` or ``attention_varlen``. As in flash-attn, last dimensions need neither be contiguous nor
    multiples of 8."""
    return attend_padded(
        attention,
        q,
        k,
        v,
        window=_window(window_size),
        scale=softmax_scale,
        softcap=_softcap(softcap),
        deterministic=True if deterministic else None,
        **options,
    )


def attend_cache(
    function,
    q,
    k_cache,
    v_cache,
    k,
    v,
    *,
    cache_seqlens,
    block_table,
    rotary_cos,
    causal,
    window_size,
    softmax_scale,
    softcap,
    num_splits=0,
    cu_seqlens_q=None,
    **options,
):
    """``flashtile.attention_kvcache``."""
    window = _window(window_size)
    if cache_seqlens is None:
        if k is not None:
            raise ValueError(f"{function}: cache_seqlens is None, expected a tensor or an int, since k is given")
        cache_seqlens = _rows(k_cache) * (1 if block_table is None else _rows(block_table))
    if rotary_cos is not None:
        _check_positions(function, q, k, cu_seqlens_q, causal or window != (None, None))
    return attention_kvcache(
        contiguous(q),
        k_cache,
        v_cache,
        k_new=contiguous(k),
        v_new=contiguous(v),
        cache_seqlens=cache_seqlens,
        block_table=contiguous(block_table),
        rotary_cos=rotary_cos,
        cu_seqlens_q=cu_seqlens_q,
        causal=causal,
        window=window,
        scale=softmax_scale,
        softcap=_softcap(softcap),
        num_splits=max(num_splits, 0),
        **options,
    )


def _check_positions(function, q, k, cu_seqlens_q, masked):
    """flash-attn counts the positions of queries from the first new key, and without a mask gives all of them that of
    the first; flashtile goes by the key that each meets on the diagonal. Refuses where the two differ."""
    if k is None:
        raise ValueError(f"{function}: k is None, expected new keys, since rotary_cos is given")
    if cu_seqlens_q is None and _rows(q) != _rows(k):
        refuse(function, "rotary_cos", f"given with {_rows(q)} queries and {_rows(k)} new keys", "as many of both")
    if not masked and (cu_seqlens_q is not None or _rows(q) > 1):
        refuse(function, "rotary_cos", "given without a mask", "causal=True, a window_size, or a single query")


def _rows(x):
    """The size of dimension 1; 0 where there is none, for flashtile to say what is wrong."""
    return x.shape[1] if isinstance(x, Tensor) and x.dim() > 1 else 0


def require_tensors(function, **tensors):
    """Of arguments that are looked into before flashtile does."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{function}: {name} is of type {type(x).__name__}, expected a torch.Tensor")
        if x.layout is not torch.strided:
            raise TypeError(f"{function}: {name} has layout {x.layout}, expected {torch.strided}")


def unpacked(function, name, packed, shape):
    """The parts of a packed tensor, whose `shape` is written as in "(B, S, 3, H, D)"."""
    sizes = shape.strip("()").split(", ")
    require_rank(function, len(sizes), shape, **{name: packed})
    if packed.shape[-3] != int(sizes[-3]):
        raise ValueError(f"{function}: {name} has shape {tuple(packed.shape)}, expected {shape}")
    return packed.unbind(-3)


def _window(window_size):
    """None for unbounded sides, which flash-attn writes as -1."""
    if not isinstance(window_size, (tuple, list)):
        return window_size
    return tuple(None if isinstance(n, int) and n < 0 else n for n in window_size)


def _softcap(softcap):
    """0 for none, which flash-attn also writes as a negative number."""
    return 0.0 if isinstance(softcap, (int, float)) and softcap < 0 else softcap


def described(x):
    """In a message: short, and on one line, whatever it is."""
    if isinstance(x, Tensor):
        return f"a tensor of shape {tuple(x.shape)}"
    text = repr(x)
    return text if len(text) <= 60 and text.isprintable() else f"of type {type(x).__name__}"


def integer(function, name, x, at_least=None, expected="an int"):
    """`x` as an int, whatever kind of integer it is."""
    if at_least is not None:
        expected += f" of at least {at_least}"
    if not isinstance(x, int):
        try:
            x = operator.index(x)
        except (TypeError, RuntimeError):
            raise TypeError(f"{function}: {name} is {described(x)}, expected {expected}") from None
    if (at_least is not None and x < at_least) or x >= 2**63:
        raise ValueError(f"{function}: {name} is {described(x)}, expected {expected}, below 2^63")
    return x


def index_within(function, name, index, count, what):
    """`index` as an int64 tensor that names rows of `what`, which has `count`. Numbers that name none are refused on
    the CPU; those on a GPU are not known here, and the nearest rows are taken."""
    known = index.device.type == "cpu" and not is_compiling()
    if index.numel() > 0 and (known or count == 0):
        lowest, highest = (int(x) for x in index.aminmax()) if known else (0, 0)
        if lowest < 0 or highest >= count:
            found = lowest if lowest < 0 else highest
            raise ValueError(f"{function}: {name} is {found}, expected a row of {what}, which has {count}")
    return index.long().clamp(0, max(count - 1, 0))


def require_rank(function, rank, shape, **tensors):
    """`shape` says what the dimensions are, as "(B + 1)"."""
    require_tensors(function, **tensors)
    for name, x in tensors.items():
        if x.dim() != rank:
            raise ValueError(f"{function}: {name} has shape {tuple(x.shape)}, expected {shape}")


def require_table(function, shape, count=None, **tables):
    """int32, of a `shape` such as "(B + 1)", which is (count) where that is known."""
    require_rank(function, 1, shape, **tables)
    for name, x in tables.items():
        if count not in (None, x.shape[0]):
            raise ValueError(f"{function}: {name} has shape {tuple(x.shape)}, expected {(count,)} = {shape}")
        if shape == "(B + 1)" and x.shape[0] == 0:
            raise ValueError(f"{function}: {name} has shape (0,), expected {shape} with B of at least 0")
        if x.dtype != torch.int32:
            raise TypeError(f"{function}: {name} has dtype {x.dtype}, expected torch.int32")


def flag(function, name, x):
    """`x` as a bool, which an integer may stand for."""
    return x if isinstance(x, bool) else integer(function, name, x, expected="a bool") != 0


def unpacked_heads(function, qkv, num_heads_q):
    """q, k and v of (B, S, 3, H, D), or of (B, S, H_q + 2 · H_k, D) where `num_heads_q` says what H_q is."""
    require_tensors(function, qkv=qkv)
    if num_heads_q is None or qkv.dim() == 5:
        return unpacked(function, "qkv", qkv, "(B, S, 3, H, D)")
    heads_q = integer(function, "num_heads_q", num_heads_q, at_least=0)
    heads = qkv.shape[2] - heads_q if qkv.dim() == 4 else -1
    if heads < 0 or heads % 2 != 0:
        expected = f"(B, S, H_q + 2 · H_k, D), H_q being num_heads_q = {heads_q}"
        raise ValueError(f"{function}: qkv has shape {tuple(qkv.shape)}, expected {expected}")
    return qkv.split([heads_q, heads // 2, heads // 2], dim=2)
