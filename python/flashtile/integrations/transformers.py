"""``attn_implementation="flashtile"`` for models of transformers 5."""

import functools

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.integrations.flash_attention import get_target_dtype
from transformers.utils import logging

from .._padding import attend_padded, attend_visible, gathered, visible_first
from ..attention import attention
from ..kvcache import attention_kvcache
from ..sdpa import scaled_dot_product_attention
from ..varlen import attention_varlen

NAME = "flashtile"
# Arguments of some models that change what attention is.
_NOT_SERVED = ("block_indices", "cache", "head_mask", "indices", "position_bias", "sinks")
_log = logging.get_logger(__name__)


def register() -> None:
    """Makes ``attn_implementation="flashtile"`` work in this process.

    It is for models that transformers has flash attention for; others are refused with NotImplementedError. Registers
    :func:`attend` and :func:`mask` with transformers' ``AttentionInterface`` and ``AttentionMaskInterface``. A second
    call changes nothing. transformers takes every name with "flash" in it for a package or a kernel to download, so
    ``PreTrainedModel._check_and_adjust_attn_implementation`` is wrapped to let this one pass.

    Example:
        >>> import flashtile.integrations.transformers
        >>> flashtile.integrations.transformers.register()
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=99)
        >>> config._attn_implementation = "flashtile"  # or from_pretrained(..., attn_implementation="flashtile")
        >>> model = LlamaForCausalLM(config)
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
    check = PreTrainedModel._check_and_adjust_attn_implementation
    if not hasattr(check, NAME):

        @functools.wraps(check)
        def checked(self, attn_implementation, is_init_check=False, **options):
            if attn_implementation == NAME:
                if not self._supports_flash_attn:  # whose layers say themselves what window they have
                    raise _refusal(f"{type(self).__name__} is no model that transformers has flash attention for")
                return self.get_correct_attn_implementation(NAME, is_init_check)
            return check(self, attn_implementation, is_init_check, **options)

        setattr(checked, NAME, True)
        PreTrainedModel._check_and_adjust_attn_implementation = checked


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """The attention of a layer, as transformers calls it.

    Args:
        module: the layer. Its ``is_causal`` counts where the argument is None.
        query: (B, H_q, S_q, D). The rules are those of :func:`flashtile.attention`, but D may be any up to 256, and
            float32 on CUDA is cast to the dtype of the layer's weights, or to what torch.autocast asks for.
        key: (B, H_k, S_k, D). H_q is a multiple of H_k; heads are read by index.
        value: (B, H_k, S_k, D_v).
        attention_mask: what :func:`mask` returned; or (B, S_k), True or 1 where a key counts; or a mask of the caller's
            own, (B, 1 or H_q, S_q, S_k), which then says all, and goes to
            :func:`flashtile.scaled_dot_product_attention`.
        dropout: the probability with which a weight is dropped.
        scaling: factor of the scores; by default 1/√D.
        sliding_window: how many keys a row sees, its own and those before it; without causality as many on both sides.
        softcap: bound of the scores.
        is_causal: whether a row sees no keys after its own.
        s_aux: (H_q), a sink for each head. Gets a gradient.
        cu_seq_lens_q: integers, (sequences + 1): without a mask, where each sequence begins that the rows of all
            entries hold, one behind the other, and where the last one ends.
        cu_seq_lens_k: the same for keys.

    Returns:
        out, (B, S_q, H_q, D_v), and None: the weights are never formed. Rows of padding are 0 where a layer is
        causal or has a window.

    Raises:
        NotImplementedError: an argument of a model asks for what flashtile does not do.
    """
    for name in _NOT_SERVED:
        if kwargs.get(name) is not None:
            raise _refusal(f"{name} is given, expected None")
    if kwargs.get("output_attentions"):
        _log.warning_once(f"{NAME} never forms the weights that output_attentions=True asks for: they will be None")
    if query.is_cuda and query.dtype is torch.float32:
        dtype = get_target_dtype(query, module)  # layers in bfloat16 whose norms are in float32
        query, key, value = (x.to(dtype) for x in (query, key, value))

    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = None if sliding_window is None else (sliding_window - 1, sliding_window - 1)
    options = {"causal": causal, "window": window, "scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
    (batch, _, seqlen_q, _), seqlen_k = query.shape, key.shape[2]
    if attention_mask is not None and attention_mask.dim() == 2:
        visible = attention_mask[:, -seqlen_k:].bool()
        ordered = seqlen_q > 1 and (causal or window is not None)
        attention_mask = _table(visible, visible[:, -seqlen_q:] if ordered else None)

    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if attention_mask is None and cu_seq_lens_q is None:
        if _decodes(q, k, v, s_aux, dropout):
            out = attend_padded(attention_kvcache, q, k, v, cache_seqlens=seqlen_k, **options)
        else:
            out = attend_padded(attention, q, k, v, dropout_p=dropout, **options)
    elif attention_mask is None:
        out = _attend_packed(q, k, v, cu_seq_lens_q.int(), cu_seq_lens_k.int(), dropout, options)
    elif attention_mask.shape == (1, 1, 1, batch * seqlen_q + 1) and attention_mask.dtype is torch.int32:
        out = _attend_packed(q, k, v, *(attention_mask.flatten(),) * 2, dropout, options)
    elif attention_mask.shape[1:3] == (1, 1) and attention_mask.dtype is torch.int64:
        keys, queries = _table_parts(attention_mask, seqlen_q, seqlen_k)
        options["causal"] = causal and queries is not None
        if queries is None and _decodes(q, k, v, s_aux, dropout):
            k, v = gathered(k, keys[0]), gathered(v, keys[0])
            out = attend_padded(attention_kvcache, q, k, v, cache_seqlens=keys[1], **options)
        else:
            out = attend_visible(q, k, v, keys, queries, dropout_p=dropout, **options)
    else:
        for name, given in (("softcap", softcap), ("s_aux", s_aux)):
            if given is not None:
                shape = tuple(attention_mask.shape)
                raise _refusal(f"{name} is given with an attention_mask of shape {shape}, expected padding (B, S_k)")
        out = scaled_dot_product_attention(
            query, key, value, attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
        ).transpose(1, 2)
    return out, None


def _decodes(q, k, v, sinks, dropout):
    """Few queries, and nobody asks for gradients: attention_kvcache has keys in parts, which fill a GPU."""
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    return q.shape[1] < k.shape[1] and not wanted and not dropout and not torch.is_autocast_enabled(q.device.type)


def _attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, dropout, options):
    out = attend_padded(
        attention_varlen,
        *(x.flatten(0, 1) for x in (q, k, v)),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        dropout_p=dropout,
        **options,
    )
    return out.unflatten(0, q.shape[:2])


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function=masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs,
) -> Tensor | None:
    """The mask of a model's layers of one kind, as transformers asks for it, in the form that :func:`attend` takes.

    A layer says itself whether it is causal and what window it has, so a mask holds what else hides keys: padding, and
    the part of a static cache that is not yet written. It is made once for all layers, and the host reads no
    tensor for it.

    Args:
        batch_size: B.
        q_length: S_q.
        kv_length: S_k, of a static cache its capacity.
        q_offset: the first query's place.
        kv_offset: the first key's place.
        mask_function: transformers' rule of which query sees which key.
        attention_mask: (B, places), True where a token counts, False where it is padding.
        device: of the mask.

    Returns:
        None if nothing else hides keys; (B, 1, 1, n), int64, for padding; (1, 1, 1, n), int32, for packed sequences; a
        dense mask (B, 1, S_q, S_k), bool, for any rule but causality, windows and packed sequences.
    """
    rules = list(_rules(mask_function))
    packed = [_closure(rule)["packed_sequence_mask"] for rule in rules if rule.__code__ is _PACKED]
    if not all(rule.__code__ in _KNOWN for rule in rules) or (packed and attention_mask is not None):
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return masking_utils.sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            device=device,
            **kwargs,
        )
    if packed:
        return _packed_offsets(packed[0])

    causal = masking_utils.causal_mask_function in rules
    end = q_offset + q_length
    filled = not causal or (isinstance(end, int) and end >= kv_offset + kv_length)
    if attention_mask is None and filled:
        return None
    places = torch.arange(kv_length, device=device) + kv_offset
    visible = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    if not filled:
        visible = visible & (places < end)
    if attention_mask is not None:
        padding = masking_utils.prepare_padding_mask(attention_mask.bool(), kv_length, kv_offset)
        visible = visible & padding[:, kv_offset : kv_offset + kv_length]
    queries = None
    if q_length > 1 and (causal or len(rules) > 1):
        queries = visible.index_select(1, torch.arange(q_length, device=device) + (q_offset - kv_offset))
    return _table(visible, queries)


def _table(keys, queries):
    """(B, 1, 1, n) int64 of `keys` (B, S_k) and `queries` (B, S_q) or None, which are True for rows that count: for
    each the count and the order of :func:`visible_first`. Queries are left out where it does not matter which key they
    meet on the diagonal. Four dimensions, because transformers hands on as it is what has so many."""
    parts = []
    for visible in (keys,) if queries is None else (keys, queries):
        order, count = visible_first(visible)
        parts += [count[:, None], order]
    return torch.cat(parts, dim=-1)[:, None, None]


def _table_parts(table, seqlen_q, seqlen_k):
    """What attend_visible takes as keys and queries."""
    sizes = [1, seqlen_k] if table.shape[-1] == 1 + seqlen_k else [1, seqlen_k, 1, seqlen_q]
    if table.shape[-1] != sum(sizes):
        found = f"attention_mask has shape {tuple(table.shape)}, int64, with {seqlen_q} queries and {seqlen_k} keys"
        raise _refusal(f"{found}, expected the one that was made for them, padding (B, S_k), or bool")
    parts = table[:, 0, 0].split(sizes, dim=-1)
    pairs = [(order, count[:, 0].int()) for count, order in zip(parts[::2], parts[1::2], strict=True)]
    return (*pairs, None)[:2]


def _packed_offsets(sequence):
    """(1, 1, 1, B·S + 1) int32, where each sequence begins, of `sequence` (B, S): which one of its entry a row belongs
    to, never decreasing. The host need not know how many there are: those that no row belongs to are empty."""
    begins = torch.ones_like(sequence)
    begins[:, 1:] = sequence[:, 1:] != sequence[:, :-1]
    number = begins.flatten().cumsum(0) - 1
    lengths = torch.zeros_like(number).scatter_add_(0, number, torch.ones_like(number))
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()[None, None, None]


def _refusal(what):
    return NotImplementedError(f'attn_implementation="{NAME}": {what}; nearest supported: attn_implementation="sdpa"')


# transformers hands over a rule as a function of indices, made of others. Functions that one `def` has made share their
# code, and what they were made of stands in their closures.


def _rules(function):
    """The functions of which `function` is the intersection, without the renumbering that packed sequences ask for."""
    if function.__code__ is _ALL_OF:
        for part in _closure(function)["mask_functions"]:
            yield from _rules(part)
    elif function.__code__ is _RENUMBERED:
        yield from _rules(_closure(function)["mask_function"])
    else:
        yield function


def _closure(function):
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__), strict=True))


_ALL_OF = masking_utils.and_masks().__code__
_PACKED = masking_utils.packed_sequence_mask_function(None).__code__
_renumber = getattr(masking_utils, "remap_positions_for_packed_sequence", None)  # later than transformers 5.4
_RENUMBERED = _renumber and _renumber(None, None).__code__
_KNOWN = (
    masking_utils.causal_mask_function.__code__,
    masking_utils.bidirectional_mask_function.__code__,
    masking_utils.sliding_window_overlay(0).__code__,
    masking_utils.sliding_window_bidirectional_overlay(0).__code__,
    _PACKED,
)
