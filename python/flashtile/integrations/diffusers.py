"""``set_attention_backend("flashtile")`` for models of diffusers."""

import enum
import inspect

import diffusers
import torch
from packaging.version import Version
from torch import Tensor

from ..compat._passes import run_backward
from ..sdpa import served

try:
    from diffusers.models import attention_dispatch as dispatch
except ImportError:  # it is older than its attention backends
    dispatch = None

NAME = "flashtile"
_OLDEST = "0.40"  # whose ring attention hands keys, out and lse to a backend's backward


def register() -> None:
    """Makes "flashtile" an attention backend of diffusers in this process.

    From then on ``model.set_attention_backend("flashtile")`` and ``with diffusers.attention_backend("flashtile")`` take
    it, and so does context parallelism, ring and Ulysses. It is for models that call diffusers' dispatcher, such as
    Flux, Qwen-Image, Wan and HunyuanVideo. Registers :func:`attend` with diffusers' registry of backends, and adds the
    name to its enumeration ``AttentionBackendName``, where diffusers looks up what a backend may be called. A second
    call changes nothing.

    Raises:
        NotImplementedError: this diffusers has no such registry, or another one.

    Example:
        >>> import torch, flashtile.integrations.diffusers
        >>> flashtile.integrations.diffusers.register()
        >>> from diffusers import FluxTransformer2DModel
        >>> sizes = dict(num_layers=1, num_single_layers=1, num_attention_heads=2, attention_head_dim=16)
        >>> model = FluxTransformer2DModel(
        ...     in_channels=4, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8), **sizes
        ... )
        >>> model.set_attention_backend("flashtile")  # or from_pretrained(...) first
    """
    if not _is_known():
        raise NotImplementedError(
            f"register: diffusers is {diffusers.__version__}, expected {_OLDEST} or newer, with the registry of "
            "attention backends that 0.42 has"
        )
    dispatch._AttentionBackendRegistry.register(_member(), supports_context_parallel=True)(attend)


def _is_known():
    """Whether diffusers' dispatcher has what is used of it."""
    if dispatch is None or Version(diffusers.__version__) < Version(_OLDEST):
        return False
    names = getattr(dispatch, "AttentionBackendName", None)
    enumerated = isinstance(names, enum.EnumMeta) and issubclass(names, str)
    registry = getattr(dispatch, "_AttentionBackendRegistry", None)
    return (
        enumerated
        and hasattr(dispatch, "_wait_tensor")
        and {"backend", "supports_context_parallel"} <= _parameters(registry, "register")
        and {"return_lse", "forward_op", "backward_op", "_parallel_config"}
        <= _parameters(dispatch, "_templated_context_parallel_attention")
    )


def _parameters(place, name):
    function = getattr(place, name, None)
    return set() if function is None else inspect.signature(function).parameters.keys()


def _member():
    """The enumeration's member of this name. Python has no way to add one, so it is entered where a class statement
    would have."""
    names = dispatch.AttentionBackendName
    if NAME not in names._value2member_map_:
        member = str.__new__(names, NAME)
        member._name_, member._value_ = NAME.upper(), NAME
        member.__objclass__, member._sort_order_ = names, len(names)
        setattr(names, member._name_, member)
        names._member_names_.append(member._name_)
        names._member_map_[member._name_] = member
        names._value2member_map_[NAME] = member
    return names(NAME)


# diffusers hands a backend what it has a parameter for, by name.


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config=None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention as diffusers' dispatcher calls it: what :func:`flashtile.scaled_dot_product_attention` computes by
    itself, of tensors whose sequence comes before the heads.

    Args:
        query: (B, S_q, H_q, D). float16 or bfloat16; on the CPU also float32. D is at most 256.
        key: (B, S_k, H_k, D).
        value: (B, S_k, H_k, D_v).
        attn_mask: bool, True where a key is visible: (B, S_k), or one that broadcasts to (B, H_q, S_q, S_k) and is
            alike for all heads and queries by shape or stride, as (B, 1, 1, S_k). It may hide any keys, and the host
            does not wait for it.
        dropout_p: the probability with which a weight is dropped.
        is_causal: hide columns right of the diagonal that begins at the top left. Not with attn_mask.
        scale: factor of the scores; by default 1/√D.
        enable_gqa: let H_q be a multiple of H_k. Heads are read by index, not copied.
        return_lse: also return lse.

    Returns:
        out, (B, S_q, H_q, D_v), or with `return_lse` the pair (out, lse): float32, (B, H_q, S_q), under context
        parallelism (B, S_q, H_q), as diffusers' flash backends have it, and there without a gradient. A row that sees
        no key has out = 0 and gradients 0.

    Raises:
        NotImplementedError: legal, but not served: a bias, a mask of another kind, a wider head, another dtype or
            device; under ring attention any mask, dropout, and gradients of more than two ranks.
        ValueError, TypeError: as of :func:`flashtile.attention`. Under context parallelism diffusers itself refuses
            is_causal and enable_gqa.
    """
    options = (attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse)
    if _parallel_config is None:
        return _attend(query, key, value, *options)
    ring = _parallel_config.context_parallel_config.ring_degree > 1
    return dispatch._templated_context_parallel_attention(
        query,
        key,
        value,
        *options,
        forward_op=_ring_forward if ring else _ulysses_forward,
        backward_op=_ring_backward if ring else _ulysses_backward,
        _parallel_config=_parallel_config,
    )


def _attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse):
    if isinstance(attn_mask, Tensor) and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]  # which diffusers' native backend takes for padding, too
    heads_first = (x.transpose(1, 2) for x in (query, key, value))
    try:
        result = served(*heads_first, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse)
    except NotImplementedError as refusal:
        raise _refusal(refusal, 'attention backend "native"') from None
    out, *lse = result if return_lse else (result,)
    return (out.transpose(1, 2), *lse) if return_lse else out.transpose(1, 2)


def _refusal(what, nearest):
    return NotImplementedError(f'attention backend "{NAME}": {what}; nearest supported: {nearest}')


# What diffusers' context parallelism calls, inside of its own functions of autograd, whose `ctx` it is. Ulysses has
# whole sequences of some heads, once: a graph of their own knows all that a backward needs.


def _ulysses_forward(
    ctx,
    query,
    key,
    value,
    attn_mask,
    dropout_p,
    is_causal,
    scale,
    enable_gqa,
    return_lse,
    _save_ctx=True,
    _parallel_config=None,
):
    differentiated = _save_ctx and any(ctx.needs_input_grad)
    leaves = [x.detach().requires_grad_(differentiated) for x in (query, key, value)]
    with torch.set_grad_enabled(differentiated):
        result = _attend(*leaves, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse)
    out, *lse = result if return_lse else (result,)
    if differentiated:
        ctx.graph = out, leaves
    return (out.detach(), lse[0].detach().transpose(1, 2)) if return_lse else out.detach()


def _ulysses_backward(ctx, grad_out, **_):
    return torch.autograd.grad(*ctx.graph, grad_out)


# A ring calls with one rank's keys after the other, and asks for the gradients of each part with out and lse of all.


def _ring_forward(
    ctx,
    query,
    key,
    value,
    attn_mask,
    dropout_p,
    is_causal,
    scale,
    enable_gqa,
    return_lse,
    _save_ctx=True,
    _parallel_config=None,
):
    # A mask would be that of the caller's keys, with the keys of every rank, and a backward does not know of seeds.
    for name, found, expected in (("attn_mask", attn_mask, None), ("dropout_p", dropout_p or None, 0)):
        if found is not None:
            raise _refusal(f"{name} is given with ring attention, expected {expected}", "ulysses_degree")
    key, value = map(dispatch._wait_tensor, (key, value))  # that are on their way from another rank
    out, lse = _attend(query, key, value, None, 0.0, is_causal, scale, enable_gqa, return_lse)
    if _save_ctx:
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
    return out, lse.transpose(1, 2)


def _ring_backward(ctx, grad_out, *, query, key, value, out, lse):
    ranks = ctx._parallel_config.context_parallel_config.ring_degree
    if ranks > 2:  # diffusers sends dK and dV the other way round than its keys come, which is one way for two
        found = f"gradients are asked for with ring_degree {ranks}, of which diffusers {diffusers.__version__} adds up"
        raise _refusal(f"{found} those of other keys, expected 2", "ulysses_degree")
    key, value = map(dispatch._wait_tensor, (key, value))
    places = {name: torch.empty_like(x) for name, x in (("dq", query), ("dk", key), ("dv", value))}
    run_backward(
        "ring attention",
        grad_out,
        query,
        key,
        value,
        out,
        lse.transpose(1, 2),
        places,
        softmax_scale=ctx.scale,
        causal=False,
        window_size=None,
        softcap=0.0,
        deterministic=False,
    )
    return tuple(places.values())
