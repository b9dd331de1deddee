"""The function of torch.nn.functional, for code that calls it already."""

import sys
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from ._core import DTYPES, WIDEST, is_compiling, under_functorch
from ._invariance import is_batch_invariant
from ._legible import is_fake, is_plain, legible_mask, legible_operand
from ._padding import attend_padded, attend_visible, visible_first
from ._sdpa_mask import first_columns, refuse_misfit, written_out
from .attention import attention
from .masks import ColumnMask

_pytorch = F.scaled_dot_product_attention  # at import: who puts flashtile's in its place still wants fallbacks
_said: set[str] = set()  # what calls would have had to be, of all that fell back


class FallbackWarning(UserWarning):
    """PyTorch computed what flashtile does not serve."""


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | ColumnMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention``, with its arguments and results, by flashtile's kernels.

    For query head h and query row i, with KV head g = h // (H_q / H_k)::

        s[j] = scale · query[..., h, i] · key[..., g, j]          for every visible column j
        out  = Σ_j softmax(s)[j] · keep[j] / (1 - dropout_p) · value[..., g, j]

    Column j is visible unless ``is_causal`` and j > i, or ``attn_mask`` hides it. So here the first query row meets the
    first key: masks are aligned at the top left, where those of :func:`flashtile.attention` are at the bottom right.

    Args:
        query: (..., H_q, S_q, D), (H_q, S_q, D) or (S_q, D). float16 or bfloat16; on the CPU also float32. D is at most
            256. Any strides; views of (..., S, H, D) are as good as contiguous tensors. What is no multiple of 8, or
            has no contiguous last dimension, is copied.
        key: (..., H_k, S_k, D), of query's dtype, device and leading dimensions.
        value: (..., H_k, S_k, D_v). D_v obeys the rule for D and may differ from it.
        attn_mask: True where a key is visible, broadcastable to (..., H_q, S_q, S_k), and alike for all heads and
            queries: its last but second and its last but first dimension have size 1 or stride 0, as in a padding mask
            (B, 1, 1, S_k). It may hide any keys, and the host reads no value of it: visible keys and values are
            gathered to the front (a copy) and attended to as a ragged batch, on every device. Or a
            ``torch.nn.attention.bias.CausalBias`` of the size (S_q, S_k), which takes no memory. Or a
            :class:`flashtile.masks.ColumnMask` of S_q rows and S_k columns, whose batch is 1 or that of the leading
            dimensions, flattened, and whose heads are 1, H_k or H_q; ``is_causal`` may be given with it. PyTorch, where
            it has to compute, gets it written out.
        dropout_p: the probability with which a weight is dropped, rounded to a multiple of 1/256. The seed is drawn
            from PyTorch's CPU generator, so torch.manual_seed repeats it; other weights are dropped than by PyTorch.
        is_causal: hide columns right of the diagonal that begins at the top left.
        scale: factor of the scores; by default 1/√D.
        enable_gqa: let H_q be a multiple of H_k. Heads are read by index, not copied.

    Returns:
        out, (..., H_q, S_q, D_v), of query's dtype, or of the one that torch.autocast asks for. Differentiable once. A
        row that sees no key has out = 0 and gradients 0; PyTorch's is 0 or NaN, by version and backend.

    Whatever else PyTorch takes, it computes: biases, masks that differ from query to query or head to head, wider
    heads, other dtypes and devices, broadcast keys, nested tensors and subclasses, transforms of torch.func,
    forward-mode differentiation. On a GPU it gets copies of what its kernels would misread, and a float32 bias of
    16-bit queries in their dtype. A :class:`flashtile.sdpa.FallbackWarning` names the argument, once for each reason in
    a process; ``warnings.simplefilter("error", FallbackWarning)`` makes an error of every such call. Nothing is said
    under torch.compile and torch.export. In a :func:`batch_invariant_mode` such calls are refused. The function may
    take the place of PyTorch's: set ``torch.nn.functional.scaled_dot_product_attention`` to it.

    Raises:
        ValueError: key or value do not fit query: D, S_k or leading dimensions differ, or the groups of heads are not
            whole. PyTorch's kernels may read past the end of such tensors. Or a ColumnMask does not fit them.
        What PyTorch raises: other illegal arguments go to its function.

    Example:
        >>> import torch, flashtile
        >>> query = torch.randn(2, 8, 100, 64)
        >>> key, value = torch.randn(2, 2, 8, 120, 64)
        >>> flashtile.scaled_dot_product_attention(query, key, value, is_causal=True).shape
        torch.Size([2, 8, 100, 64])
        >>> lengths = torch.tensor([120, 77])
        >>> padding = torch.arange(120) < lengths[:, None, None, None]
        >>> flashtile.scaled_dot_product_attention(query, key, value, padding).shape
        torch.Size([2, 8, 100, 64])
        >>> prefix = flashtile.masks.ColumnMask.prefix_lm(100, prefix=30)
        >>> flashtile.scaled_dot_product_attention(query, query, query, prefix).shape
        torch.Size([2, 8, 100, 64])

    Sources: those of :func:`attention`.
    """
    if isinstance(attn_mask, ColumnMask):
        _refuse_misfits(query, key, value, enable_gqa)
        refuse_misfit(attn_mask, query, key)
    try:
        return served(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    except (TypeError, ValueError, NotImplementedError) as refusal:
        if is_batch_invariant():
            raise NotImplementedError(
                "scaled_dot_product_attention: batch_invariant_mode is on, expected a call that flashtile serves: the "
                "bits of PyTorch's kernels are others"
            ) from refusal
        reason = None if is_compiling() or is_fake(query) else str(refusal)
    _refuse_misfits(query, key, value, enable_gqa)
    if isinstance(attn_mask, ColumnMask):
        legible, is_causal = written_out(attn_mask, query, key, is_causal), False
    else:
        legible = legible_mask(attn_mask, query, key)
    query, key, value = (legible_operand(x) for x in (query, key, value))
    out = _by_pytorch(
        query, key, value, legible, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
    if reason is None:
        return out  # a graph has no place for a warning
    # Only now: an illegal call is PyTorch's to explain.
    expected = reason.partition(", expected ")[2]
    if expected not in _said:
        message = f"scaled_dot_product_attention: {reason}; PyTorch computes such calls (said once)"
        warnings.warn(message, FallbackWarning, stacklevel=2)
        _said.add(expected)
    return out


def _refuse_misfits(query, key, value, enable_gqa):
    """PyTorch 2.13 does not compare all sizes: its CPU kernels read past the end of a value that is shorter than key,
    divide by zero heads, and give results of what cannot be multiplied where a size is 0."""
    tensors = (query, key, value)
    if not all(isinstance(x, Tensor) and not x.is_nested and x.dim() >= 2 for x in tensors):
        return
    head_dim, seqlen_k = query.shape[-1], key.shape[-2]
    for name, x, axis, size, form in (
        ("key", key, -1, head_dim, f"(..., H_k, S_k, {head_dim}), with D of query"),
        ("value", value, -2, seqlen_k, f"(..., H_k, {seqlen_k}, D_v), with S_k of key"),
    ):
        if x.shape[axis] != size:
            raise ValueError(f"scaled_dot_product_attention: {name} has shape {tuple(x.shape)}, expected {form}")
    grouped = enable_gqa is True and min(x.dim() for x in tensors) >= 3
    heads = [x.shape[-3] for x in tensors] if grouped else [1, 1, 1]
    try:
        torch.broadcast_shapes(*(x.shape[: -3 if grouped else -2] for x in tensors))
        fits = 0 not in heads[1:] and heads[0] % heads[1] == 0 == heads[0] % heads[2]
    except RuntimeError:
        fits = False
    if not fits:
        found = ", ".join(str(tuple(x.shape)) for x in tensors)
        rule = "H_q a multiple of H_k, and leading dimensions" if grouped else "leading dimensions"
        raise ValueError(
            f"scaled_dot_product_attention: query, key and value have shapes {found}, expected {rule} that broadcast"
        )


def _by_pytorch(query, key, value, attn_mask, **options):
    if not all(isinstance(x, Tensor) and x.is_cuda and x.numel() == 0 for x in (query, key, value)):
        return _pytorch(query, key, value, attn_mask, **options)
    # Of an empty batch PyTorch 2.11 gives None, or says that it has no kernel (an H200).
    mask = attn_mask.cpu() if isinstance(attn_mask, Tensor) else attn_mask
    return _pytorch(query.cpu(), key.cpu(), value.cpu(), mask, **options).to(query.device)


def served(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse=False):
    """Out, of four dimensions also (out, lse), or an exception that says "found, expected what is served"; flashtile's
    functions raise the same."""
    for name, option in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(option, bool):
            raise NotImplementedError(f"{name} is of type {type(option).__name__}, expected a bool")
    for name, option in (("dropout_p", dropout_p), ("scale", 1.0 if scale is None else scale)):
        if not isinstance(option, (float, int)) and not _is_number(option):
            raise NotImplementedError(f"{name} is of type {type(option).__name__}, expected a number")
    for x in (query, key, value):
        if not is_plain(x) or x.is_nested or x.layout is not torch.strided:
            kind = "nested, " if getattr(x, "is_nested", False) else ""
            found = f"query, key or value is {kind}of type {type(x).__name__} and layout {getattr(x, 'layout', None)}"
            raise NotImplementedError(f"{found}, expected a plain dense torch.Tensor")
    if under_functorch():
        raise NotImplementedError("query, key or value are under a transform of torch.func, expected none")
    if query.dim() == key.dim() == value.dim() == 2 and not enable_gqa:
        out = served(query[None], key[None], value[None], attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return out[0]
    device = query.device.type
    if device not in DTYPES:
        raise NotImplementedError(f"query is on {query.device}, expected the CPU or a CUDA device")
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (
            x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x for x in (query, key, value)
        )
    if query.dtype not in DTYPES[device]:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES[device])
        raise NotImplementedError(f"query has dtype {query.dtype}, expected {names} on {device}")
    if not query.dtype == key.dtype == value.dtype:
        raise NotImplementedError(f"key and value have dtypes {key.dtype} and {value.dtype}, expected that of query")
    leading, seqlen_q, seqlen_k, head_dim_v = _sizes(query.shape, key.shape, value.shape, enable_gqa)

    batched = key.shape[0] == query.shape[0]  # of (N, S, D): heads without groups may as well be a batch
    causal, window, keys, mask = False, None, None, None
    if attn_mask is not None:
        if isinstance(attn_mask, ColumnMask):
            mask, batched = attn_mask, False  # which has heads
        elif _is_causal_bias(attn_mask):
            size = attn_mask.seq_len_q, attn_mask.seq_len_kv
            if is_causal or size != (seqlen_q, seqlen_k):
                raise ValueError(f"attn_mask has size {size}, expected a CausalBias of size (S_q, S_k), no is_causal")
            causal = attn_mask.variant == type(attn_mask.variant).LOWER_RIGHT
            is_causal = not causal
        elif is_causal:
            raise NotImplementedError("attn_mask is given with is_causal, expected one of them")
        else:
            keys = _visible_keys(attn_mask, query, seqlen_k, batched)
    if is_causal:
        if seqlen_q < seqlen_k:  # no row sees the others
            key, value = key[..., :seqlen_q, :], value[..., :seqlen_q, :]
            mask = mask and first_columns(mask, seqlen_q)
        causal = bool(seqlen_q <= seqlen_k)  # of sizes that a graph leaves open
        window = None if causal else (None, seqlen_q - seqlen_k)

    if len(leading) != 2:
        query, key, value = (_with_heads(x, batched).flatten(0, -4) for x in (query, key, value))
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    options = {"causal": causal, "window": window, "scale": scale, "dropout_p": dropout_p, "return_lse": return_lse}
    if keys is None:
        result = attend_padded(attention, q, k, v, mask=mask, **options)
    else:
        result = _attend_to(keys, q, k, v, options)
    out, *lse = result if return_lse else (result,)
    out = out.transpose(1, 2)
    if len(leading) != 2:
        out = out.reshape(*leading, seqlen_q, head_dim_v)
    return (out, *lse) if return_lse else out


def _is_number(x):
    """Whether PyTorch takes `x`, no float or int, where it asks for a float."""
    if isinstance(x, Tensor):
        return x.dim() == 0 and not x.requires_grad
    numpy = sys.modules.get("numpy")
    numbers = (torch.SymFloat, torch.SymInt, *((numpy.number, numpy.bool_) if numpy else ()))
    return is_compiling() or isinstance(x, numbers)  # a compiler has forms of its own for numbers


def _sizes(query, key, value, enable_gqa):
    """What stands before S_q in query's shape, S_q, S_k, D_v."""
    if len(query) == len(key) == len(value) > 2:
        *leading, heads_q, seqlen_q, head_dim = query
        *leading_k, heads_k, seqlen_k, _ = key
        *leading_v, heads_v, seqlen_v, head_dim_v = value
        for name, dim in (("query", head_dim), ("value", head_dim_v)):
            if not 1 <= dim <= WIDEST:
                raise NotImplementedError(f"{name} has head dimension {dim}, expected one from 1 to {WIDEST}")
        if leading == leading_k == leading_v and heads_k == heads_v and seqlen_k == seqlen_v:
            if enable_gqa or heads_q == heads_k:
                return (*leading, heads_q), seqlen_q, seqlen_k, head_dim_v
    found = ", ".join(str(tuple(shape)) for shape in (query, key, value))
    raise NotImplementedError(
        f"query, key and value have shapes {found}, expected (..., H_q, S_q, D), (..., H_k, S_k, D) and "
        "(..., H_k, S_k, D_v) with the same leading dimensions, and H_q = H_k unless enable_gqa"
    )


def _is_causal_bias(attn_mask):
    bias = sys.modules.get("torch.nn.attention.bias")  # takes a second to import, and who has a bias has done so
    return bias is not None and isinstance(attn_mask, bias.CausalBias)


def _with_heads(x, batched):
    """`x` as (..., H, S, D) of at least four dimensions; the first of three is the batch, or the heads."""
    return x.unsqueeze(1 if batched else 0) if x.dim() == 3 else x


def _visible_keys(attn_mask, query, seqlen_k, batched):
    """(B, S_k) bool of a mask that is alike for all heads and queries, by its shape and strides; None if none asks."""
    if not is_plain(attn_mask) or attn_mask.dtype is not torch.bool or attn_mask.device != query.device:
        kind = f", {attn_mask.dtype} on {attn_mask.device}" if isinstance(attn_mask, Tensor) else ""
        found = f"attn_mask is a {type(attn_mask).__name__}{kind}"
        raise NotImplementedError(f"{found}, expected a plain Tensor of booleans on query's device")
    expected = "one that broadcasts to (..., H_q, S_q, S_k) and is alike for all heads and queries by shape or stride"
    refusal = NotImplementedError(f"attn_mask has shape {tuple(attn_mask.shape)}, expected {expected}")
    if attn_mask.dim() < 2:
        raise refusal
    try:
        mask = attn_mask.expand(*query.shape[:-1], seqlen_k)
    except RuntimeError:
        raise refusal from None
    if query.numel() == 0:
        return None
    mask = _with_heads(mask, batched)
    if any(mask.shape[dim] > 1 and mask.stride(dim) != 0 for dim in (-3, -2)):
        raise refusal
    return mask[..., 0, 0, :].flatten(0, -2)


def _attend_to(keys, q, k, v, options):
    """Without a mask no key has a place of its own, so those that `keys` (B, S_k) shows may stand in front."""
    (batch, seqlen_q), seqlen_k = q.shape[:2], k.shape[1]
    if batch * max(seqlen_q, seqlen_k) >= 2**31:
        found = f"query and key have {batch} x {seqlen_q} and {batch} x {seqlen_k} rows"
        raise NotImplementedError(f"{found}, expected less than 2^31 of either with an attn_mask")
    return attend_visible(q, k, v, visible_first(keys), **options)
