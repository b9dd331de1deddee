"""What flash-attn's two interfaces have in common: its conventions, in flashtile's terms."""

import operator

import torch
from torch import Tensor

from .. import _core
from .._core import is_compiling, refuse_gradients_into
from .._padding import attend_padded

WindowSize = tuple[int, int]

_COLUMNS = "flashtile.attention_kvcache or attention_varlen with a flashtile.masks.ColumnMask"
_INSTEAD = {
    "attn_bias": "flashtile.scaled_dot_product_attention, which leaves biases to PyTorch",
    "output_dtype": "out.to(output_dtype)",
    "qv": "torch.cat((q, qv), -1) as q, torch.cat((k, v), -1) as k",
    "q_v": "torch.cat((q, q_v), -1) as q, torch.cat((k, v), -1) as k",
    "mask_mod": _COLUMNS,
    "block_sparse_tensors": _COLUMNS,
    "dynamic_causal": "one call for the sequences with causal=True, another for the rest",
    "output_scale": "an out of 16 bits, and its quantization after the call",
}


def refuse(function, argument, found, expected):
    instead = f"; nearest supported: {_INSTEAD[argument]}" if argument in _INSTEAD else ""
    raise NotImplementedError(f"{function}: {argument} is {found}, expected {expected}{instead}")


def refuse_unserved(function, **unserved):
    """Arguments that ask for what flashtile does not compute, unless they are None."""
    for name, x in unserved.items():
        if x is not None:
            refuse(function, name, described(x), None)


def attend(
    function, attention, q, k, v, *, softmax_scale, causal, window_size, softcap, deterministic, out=None, **options
):
    """``flashtile.attention`` or ``attention_varlen``. As in flash-attn, last dimensions need neither be contiguous nor
    multiples of 8."""
    if out is not None:
        refuse_gradients_into(function, out, q, k, v, options.get("sinks"))
        options |= dict(out=out)
    result = attend_padded(
        attention,
        q,
        k,
        v,
        causal=flag(function, "causal", causal),
        window=window_of(function, window_size),
        scale=softmax_scale,
        softcap=softcap_of(softcap),
        deterministic=flag(function, "deterministic", deterministic) or None,
        **options,
    )
    return written(function, "out", out, result, q=q, k=k, v=v)


def has_8_bits(x):
    """Whether `x` is of numbers that descales belong to."""
    return getattr(x, "dtype", None) in (torch.float8_e4m3fn, torch.float8_e5m2)


def window_of(function, window_size):
    """The two distances that anything holds, a tensor too; None for unbounded ones, which flash-attn writes as -1, and
    for the window if both are."""
    if window_size is None:
        return None
    try:
        if type(window_size) is tuple and window_size == (-1, -1):
            return None
        left, right = (n if n is None or isinstance(n, int) else operator.index(n) for n in window_size)
    except (TypeError, ValueError, RuntimeError):
        message = f"{function}: window_size is {described(window_size)}, expected two integers, (left, right)"
        raise TypeError(message) from None
    window = None if left is None or left < 0 else left, None if right is None or right < 0 else right
    return None if window == (None, None) else window


def softcap_of(softcap):
    """0 for none, which flash-attn also writes as a negative number."""
    return 0.0 if isinstance(softcap, (int, float)) and softcap < 0 else softcap


def drops(dropout_p):
    """Whether weights are dropped; where `dropout_p` is no number, flashtile says so."""
    try:
        return float(dropout_p) > 0
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        return False


def new_seed(dropout_p):
    """A seed where weights are dropped, as flashtile draws it, for callers that need it a second time; else None."""
    return torch.randint(2**63 - 1, (), device="cpu") if drops(dropout_p) else None


def flag(function, name, x):
    """`x` as a bool, which an integer, a bool of NumPy or None may stand for."""
    if isinstance(x, bool):
        return x
    if x is None:
        return False
    if isinstance(x, (int, torch.SymInt)):  # of a symbol nothing else may be asked
        return x != 0
    return integer(function, name, x.item() if getattr(x, "dtype", None) == "bool" else x, expected="a bool") != 0


def require_tensors(function, **tensors):
    """Of arguments that are looked into before flashtile does."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{function}: {name} is of type {type(x).__name__}, expected a torch.Tensor")
        if x.layout is not torch.strided:
            raise TypeError(f"{function}: {name} has layout {x.layout}, expected {torch.strided}")


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


def require_descales(function, shape, device, **descales):
    """Of numbers on a `device`, where they are looked into before flashtile does; `shape` is (B, H_k)."""
    require_tensors(function, **descales)
    for name, x in descales.items():
        if x.shape != shape:
            raise ValueError(f"{function}: {name} has shape {tuple(x.shape)}, expected {shape} = (B, H_k)")
        if x.dtype != torch.float32:
            raise TypeError(f"{function}: {name} has dtype {x.dtype}, expected torch.float32")
        if x.device != device:
            raise ValueError(f"{function}: {name} is on {x.device}, expected {device}")


def require_place(function, name, place, shape, dtype, device, **read):
    """Refuses what a result cannot be copied to, or what has elements in tensors that are `read`. flashtile has the
    same rules for a place that kernels write to, but that it also wants strides which these can write by."""
    require_tensors(function, **{name: place})
    _core.require_copyable(function, name, place, shape, dtype, device)
    if torch.is_grad_enabled() and place.requires_grad:
        refuse(function, name, "a tensor that requires grad", "one that does not, as it is written in place")
    for other, x in read.items():
        if isinstance(x, Tensor) and x.layout is torch.strided and _core.share_elements(place, x):
            raise ValueError(f"{function}: {name} shares memory with {other}, expected memory of its own")


def written(function, name, place, result, **read):
    """`result`, out or (out, ...), with out in the tensor `place` where that is given; it may be there already. Then it
    does not lie in tensors that were `read`."""
    if place is None:
        return result
    out, *others = result if isinstance(result, tuple) else (result,)
    if out is not place:
        require_place(function, name, place, out.shape, out.dtype, out.device, **read)
        place.copy_(out)
    return (place, *others) if others else place


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


def unpacked(function, name, packed, shape):
    """The parts of a packed tensor, whose `shape` is written as in "(B, S, 3, H, D)"."""
    sizes = shape.strip("()").split(", ")
    require_rank(function, len(sizes), shape, **{name: packed})
    if packed.shape[-3] != int(sizes[-3]):
        raise ValueError(f"{function}: {name} has shape {tuple(packed.shape)}, expected {shape}")
    return packed.unbind(-3)


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


def described(x):
    """In a message: short, and on one line, whatever it is."""
    if isinstance(x, Tensor):
        return f"a tensor of shape {tuple(x.shape)}"
    text = repr(x)
    return text if len(text) <= 60 and text.isprintable() else f"of type {type(x).__name__}"
