"""``attn_implementation="flashtile"`` for models of transformers 5."""

import functools
import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.integrations.flash_attention import get_target_dtype
from transformers.utils import logging
from transformers.utils.import_utils import is_tracing

from .._core import WIDEST, is_compiling
from .._padding import attend_padded, attend_visible, gathered, visible_first
from ..attention import attention
from ..kvcache import attention_kvcache
from ..masks import ColumnMask
from ..sdpa import scaled_dot_product_attention
from ..varlen import attention_varlen
from . import _columns
from ._masks import (
    ALL_OF,
    Rule,
    Told,
    offsets_of,
    offsets_of_restarts,
    read,
    rule_of,
    write,
    write_columns,
    written_out,
)

NAME = "flashtile"
# Arguments of some models that change what attention is.
_NOT_SERVED = ("block_indices", "cache", "head_mask", "indices", "position_bias", "sinks")
_log = logging.get_logger(__name__)


def register() -> None:
    """Makes ``attn_implementation="flashtile"`` work in this process.

    It is for models that transformers has flash attention for; others are refused with NotImplementedError when they
    are made, and so are those that choose a class by the name of the attention (GPT-J, GPT-Neo, Falcon, Bark). Llama 4,
    which lacks it for its chunks alone, is served. Registers :func:`attend` and :func:`mask` with transformers'
    ``AttentionInterface`` and ``AttentionMaskInterface``. A second call changes nothing. transformers takes every name
    with "flash" in it for a package or a kernel to download, and for one without chunks, so two of its functions are
    wrapped to let this one pass: ``PreTrainedModel._check_and_adjust_attn_implementation`` and, where chunks are
    masked, ``masking_utils.is_flash_attention_requested``.

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
        def checked(self, attn_implementation, *args, **options):
            if attn_implementation != NAME:
                return check(self, attn_implementation, *args, **options)
            model, nearest = type(self).__name__, "sdpa" if self._supports_sdpa else "eager"
            if not (
                self._supports_flash_attn or _lacks_only_chunks(type(self))
            ):  # whose layers may ask for more than attend has arguments for
                raise _refusal(f"{model} is no model that transformers has flash attention for", nearest)
            if _has_table_of_classes(type(self)):
                raise _refusal(f"{model} has a class for each attention that it knows, and takes no other", nearest)
            return self.get_correct_attn_implementation(NAME)

        setattr(checked, NAME, True)
        PreTrainedModel._check_and_adjust_attn_implementation = checked

    asked = getattr(masking_utils, "is_flash_attention_requested", None)
    if asked is not None and not hasattr(asked, NAME):

        @functools.wraps(asked)
        def asked_for_another(config=None, *args, **options):
            return getattr(config, "_attn_implementation", None) != NAME and asked(config, *args, **options)

        setattr(asked_for_another, NAME, True)
        masking_utils.is_flash_attention_requested = asked_for_another


def _lacks_only_chunks(model):
    """Whether chunks are why transformers has no flash attention for a model."""
    return any(base.__name__ == "Llama4PreTrainedModel" for base in model.__mro__)


def _has_table_of_classes(model):
    """As models have that are older than AttentionInterface: a dict in their module, by names of implementations."""
    modules = {base.__module__ for base in model.__mro__ if issubclass(base, PreTrainedModel)} & sys.modules.keys()
    tables = (value for module in modules for value in vars(sys.modules[module]).values() if isinstance(value, dict))
    return any(isinstance(table.get("flash_attention_2"), type) for table in tables)


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
    position_ids: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """The attention of a layer, as transformers calls it.

    Args:
        module: the layer. Its ``is_causal`` counts where the argument is None.
        query: (B, H_q, S_q, D). The rules are those of :func:`flashtile.attention`, but D may be any, and float32 on
            CUDA is cast to the dtype of the layer's weights, or to what torch.autocast asks for. With a D or D_v above
            256 PyTorch computes, with a :class:`flashtile.sdpa.FallbackWarning`.
        key: (B, H_k, S_k, D). H_q is a multiple of H_k; heads are read by index.
        value: (B, H_k, S_k, D_v).
        attention_mask: what :func:`mask` returned, which also says whether a row sees later keys and how far, whatever
            the layer says; or (B, S_k), True or 1 where a key counts; or a mask of the caller's own, (B, 1 or H_q, S_q,
            S_k), which then says all, and goes to :func:`flashtile.scaled_dot_product_attention`.
        dropout: the probability with which a weight is dropped.
        scaling: factor of the scores; by default 1/√D.
        sliding_window: how many keys a row sees, its own and those before it; without causality as many on both sides.
        softcap: bound of the scores.
        is_causal: whether a row sees no keys after its own.
        s_aux: (H_q), a sink for each head. Gets a gradient.
        cu_seq_lens_q: integers, (sequences + 1), a tensor or a list: without padding, where each sequence begins that
            the rows of all entries hold, one behind the other, and where the last one ends.
        cu_seq_lens_k: the same for keys. Both are given, or none.
        position_ids: (B, S_q). Without padding and a cache that holds keys, a sequence begins where positions start
            again, as for transformers' flash attention. The host reads them, once for all layers of a model.

    Returns:
        out, (B, S_q, H_q, D_v), and None: the weights are never formed. Rows of padding are 0 where a layer is
        causal or has a window.

    Raises:
        NotImplementedError: an argument of a model asks for what flashtile does not do.
        ValueError: attention_mask has another shape, or is padding of fewer keys than queries where a layer is causal
            or has a window; one of cu_seq_lens_q and cu_seq_lens_k is missing; sliding_window is below 1.
    """
    for name in _NOT_SERVED:
        if kwargs.get(name) is not None:
            raise _refusal(f"{name} is given, expected None")
    if kwargs.get("output_attentions"):
        _log.warning_once(f"{NAME} never forms the weights that output_attentions=True asks for: they will be None")
    if query.is_cuda and query.dtype is torch.float32:
        dtype = get_target_dtype(query, module)  # layers in bfloat16 whose norms are in float32
        query, key, value = (x.to(dtype) for x in (query, key, value))

    if attention_mask is not None and attention_mask.dim() == 2:
        key, value = (x[:, :, : attention_mask.shape[1]] for x in (key, value))  # of a static cache what it holds
    (batch, _, seqlen_q, _), seqlen_k = query.shape, key.shape[2]
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    word = Rule(causal, None if sliding_window is None else sliding_window - 1)
    told = _told(module, attention_mask, word, batch, seqlen_q, seqlen_k)
    if told is None:
        for name, given in (("softcap", softcap), ("s_aux", s_aux)):
            if given is not None:
                shape = tuple(attention_mask.shape)
                raise _refusal(f"{name} is given with an attention_mask of shape {shape}, expected padding (B, S_k)")
        out = scaled_dot_product_attention(
            query, key, value, attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None

    if not (cu_seq_lens_q is None and cu_seq_lens_k is None):
        given = {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
        offsets = tuple(_offsets(given, name, query.device) for name in given)
        told = Told(told.rule, offsets=offsets) if told.keys is told.columns is None else told
    elif told.offsets is told.columns is None and seqlen_q == seqlen_k:
        told = _with_documents(told, position_ids, batch, seqlen_q)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if told.offsets is not None:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out = _attend(q, k, v, told, dropout, scaling, softcap, s_aux)
    return out if told.offsets is None else out.unflatten(0, (batch, seqlen_q)), None


def _told(module, attention_mask, word, batch, seqlen_q, seqlen_k):
    """What attention_mask says, and `word`, that of the layer, where it says nothing; None if it says all."""
    if attention_mask is None:
        return Told(word)
    shape = attention_mask.shape
    if len(shape) == 2 and shape[0] in (1, batch):
        visible = attention_mask[:, shape[1] - seqlen_k :].bool().expand(batch, -1)
        ordered = seqlen_q > 1 and word != Rule(False, None)
        if ordered and seqlen_k < seqlen_q:  # it would have to say which queries count, too
            expected = f"padding (B, S_k) of at least {seqlen_q} keys, one for each query"
            raise ValueError(
                f'attn_implementation="{NAME}": attention_mask has shape {tuple(shape)}, expected {expected}'
            )
        parts = (visible, visible[:, -seqlen_q:]) if ordered else (visible,)
        return Told(word, *map(visible_first, parts))
    if len(shape) != 4:
        expected = f"padding (B, S_k) of {batch} entries, or (B, 1 or H_q, S_q, S_k)"
        raise ValueError(f'attn_implementation="{NAME}": attention_mask has shape {tuple(shape)}, expected {expected}')
    if attention_mask.dtype not in (torch.int32, torch.int64):
        return None
    told = read(attention_mask, batch, seqlen_q, seqlen_k)
    if told is None or not _knows_of(module, word, told.rule.distance):
        found = f"attention_mask has shape {tuple(shape)}, {attention_mask.dtype}"
        expected = f"the one made for {seqlen_q} queries and {seqlen_k} keys, padding (B, S_k), or bool"
        raise _refusal(f"{found}, expected {expected}")
    return told


def _knows_of(module, word, distance):
    """Whether the layer or its config has such a window; some count a row itself."""
    if distance is None or distance == word.distance:
        return True
    try:
        window = getattr(module.config, "sliding_window", None)
    except (AttributeError, RuntimeError):  # the latter where layers have configs of their own
        window = None
    return any(known is not None and abs(distance - known) <= 1 for known in (word.distance, window))


def _offsets(given, name, device):
    if given[name] is None:
        (other,) = given.keys() - {name}
        raise ValueError(f'attn_implementation="{NAME}": {name} is None, expected offsets, since {other} is given')
    found, offsets = f"is a {type(given[name]).__name__}", None
    if isinstance(given[name], Tensor | Sequence) or hasattr(given[name], "__array__"):
        try:
            offsets = torch.as_tensor(given[name], device=device)
        except (TypeError, ValueError, RuntimeError):  # a list of another thing
            pass
    if offsets is not None and offsets.dim() == 1 and offsets.dtype in (torch.int32, torch.int64):
        return offsets.int()
    if offsets is not None:
        found = f"has shape {tuple(offsets.shape)} and dtype {offsets.dtype}"
    raise ValueError(f'attn_implementation="{NAME}": {name} {found}, expected integers, (sequences + 1)')


def _with_documents(told, position_ids, batch, seqlen):
    """With the sequences that position_ids tell of, where nothing is padding. transformers' flash attention looks for
    them in batches of one, and so is a mask looked at that may hide nothing."""
    if told.keys is not None and (batch > 1 or is_tracing(position_ids)):
        return told
    offsets = offsets_of_restarts(position_ids, batch, seqlen)
    if offsets is None or (told.keys is not None and told.keys[1].item() < seqlen):
        return told
    return Told(told.rule, offsets=(offsets, offsets))


def _attend(q, k, v, told, dropout, scaling, softcap, sinks):
    """Of (B, S, H, D), or (T, H, D) where there are offsets."""
    widest = max(q.shape[-1], v.shape[-1])
    if widest > WIDEST:
        for name, given in (("softcap", softcap), ("s_aux", sinks)):
            if given is not None:
                raise _refusal(f"{name} is given with head dimension {widest}, expected at most {WIDEST}", "eager")
        return _attend_written_out(q, k, v, told, dropout, scaling)
    causal, distance = told.rule
    if distance is not None and distance < 0:
        raise ValueError(f'attn_implementation="{NAME}": sliding_window is {distance + 1}, expected None or at least 1')
    options = {"causal": causal, "window": None if distance is None else (distance, distance), "scale": scaling}
    options |= {"softcap": softcap or 0.0, "sinks": sinks}
    if told.offsets is not None:
        cu_seqlens_q, cu_seqlens_k = told.offsets
        options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        return attend_padded(attention_varlen, q, k, v, dropout_p=dropout, **options)
    if told.columns is not None:
        return attend_padded(
            attention, q, k, v, mask=ColumnMask(told.columns, q.shape[1]), dropout_p=dropout, **options
        )
    if told.queries is None and _decodes(q, k, v, sinks, dropout):
        lengths = k.shape[1]
        if told.keys is not None:
            order, lengths = told.keys
            k, v = gathered(k, order), gathered(v, order)
        return attend_padded(attention_kvcache, q, k, v, cache_seqlens=lengths, **options)
    if told.keys is None:
        return attend_padded(attention, q, k, v, dropout_p=dropout, **options)
    return attend_visible(q, k, v, told.keys, told.queries, dropout_p=dropout, **options)


def _attend_written_out(q, k, v, told, dropout, scaling):
    """By PyTorch's function, which has no bound for D: :func:`flashtile.scaled_dot_product_attention` says so."""
    if told.offsets is not None:
        q, k, v = (x[None] for x in (q, k, v))
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    options = {"dropout_p": dropout, "scale": scaling, "enable_gqa": True}
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    if told == Told(Rule(True, None)) and seqlen_q == seqlen_k:
        out = scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    elif told == Told(Rule(False, None)):
        out = scaled_dot_product_attention(query, key, value, **options)
    else:
        seen = written_out(told, seqlen_q, seqlen_k, q.device)
        blind = ~seen.any(dim=-1, keepdim=True)
        out = scaled_dot_product_attention(query, key, value, seen | blind, **options).masked_fill(blind, 0)
    out = out.transpose(1, 2)
    return out if told.offsets is None else out[0]


def _decodes(q, k, v, sinks, dropout):
    """Few queries, and nobody asks for gradients: attention_kvcache has keys in parts, which fill a GPU."""
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    return q.shape[1] < k.shape[1] and not wanted and not dropout and not torch.is_autocast_enabled(q.device.type)


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
) -> Tensor:
    """The mask of a model's layers of one kind, as transformers asks for it, in the form that :func:`attend` takes.

    It says whether a row sees later keys and how far it sees, and holds what else hides keys: padding, and the part of
    a static cache that is not yet written. Or it holds the ranges of a :class:`flashtile.masks.ColumnMask`, where the
    rule is made of others as well: chunks, blocks of tokens that see each other, packed sequences with padding. It is
    made once for all layers, and the host reads no tensor for it but, of several queries, whether each block stands
    together.

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
        integers of four dimensions, as many as there are keys and queries, but for a small factor; a dense mask (B, 1,
        S_q, S_k), bool, for any rule but intersections and unions of causality, windows, chunks, blocks and packed
        sequences, where a block does not stand together, and where a model asks for one because it goes on working with
        it.

    Raises:
        ValueError: attention_mask has another shape.
    """
    if attention_mask is not None and attention_mask.dim() != 2:
        found = f"attention_mask has shape {tuple(attention_mask.shape)}"
        expected = "padding (B, S_k), or (B, 1 or H_q, S_q, S_k)"
        raise ValueError(f'attn_implementation="{NAME}": {found}, expected {expected}')
    rule, sequence = rule_of(mask_function) or (None, None)
    plain = rule == Rule(False, None)
    end, end_of_keys = q_offset + q_length, kv_offset + kv_length
    wanted = plain and kwargs.get("allow_is_bidirectional_skip") is False  # dense, as the model goes on working with it
    needed = rule is None or wanted
    if not needed and rule.distance is not None:
        # The last query has to meet the last key, and the layers have to know of the window.
        window = getattr(kwargs.get("config"), "sliding_window", None)
        needed = not rule.causal and not (isinstance(end, int) and end == end_of_keys)
        needed = needed or (isinstance(window, int) and abs(window - rule.distance) > 1)
    if needed or (sequence is not None and attention_mask is not None):
        place = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset}
        place |= {"kv_offset": kv_offset, "attention_mask": attention_mask, "device": device}
        columns = None if wanted else _as_columns(mask_function, **place)
        if columns is not None:
            return columns
        return _as_dense(mask_function, **place, **kwargs)
    if sequence is not None:
        return write(rule, offsets=offsets_of(sequence.diff(dim=-1, prepend=sequence[:, :1] - 1) != 0))

    filled = not rule.causal or (isinstance(end, int) and end >= end_of_keys)
    if attention_mask is None and filled:
        return write(rule, device=device)
    places = torch.arange(kv_length, device=device) + kv_offset
    visible = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    if not filled:
        visible = visible & (places < end)
    if attention_mask is not None:
        padding = masking_utils.prepare_padding_mask(attention_mask.bool(), kv_length, kv_offset)
        visible = visible & padding[:, kv_offset : kv_offset + kv_length]
    if q_length == 1 or plain:
        return write(rule, visible)
    rows = torch.arange(q_length, device=device) + (q_offset - kv_offset)
    return write(rule, visible, visible.index_select(1, rows))


def _as_columns(function, **place):
    """A mask without (S_q, S_k) elements of a rule for each key; None if there is none, or where a compiler is to keep
    a union in its graph."""
    if is_compiling() and getattr(function, "__code__", None) is not ALL_OF:
        return None
    return _looked_into(function, place)


@torch.compiler.disable  # compilers do not let closures be looked into
def _looked_into(function, place):
    if place["q_length"] == 1:
        return write(Rule(False, None), _as_dense(function, **place)[:, 0, 0]) if _columns.is_known(function) else None
    ranges = _columns.ranges_of(function, **place)
    return None if ranges is None else write_columns(ranges, place["q_length"])


def _as_dense(function, *, batch_size, **options):
    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return masking_utils.sdpa_mask(batch_size=batch_size, mask_function=function, **options)


def _refusal(what, nearest="sdpa"):
    return NotImplementedError(
        f'attn_implementation="{NAME}": {what}; nearest supported: attn_implementation="{nearest}"'
    )
