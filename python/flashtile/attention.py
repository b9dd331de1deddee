"""Dense attention: defaults, outputs and autograd around the compiled core."""

import operator

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from . import _C

Window = tuple[int | None, int | None] | None
_CONTIGUOUS = torch.contiguous_format
_under_functorch = torch._C._are_functorch_transforms_active


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, ``softmax(scale · q kᵀ + mask) v``, without storing the scores.

    For batch b, query head h and query row i, with KV head g = h // (H_q / H_k), diagonal d = i + S_k - S_q::

        s[j]   = scale · q[b, i, h] · k[b, j, g]                       for every visible column j
        s[j]   = softcap · tanh(s[j] / softcap)                        if softcap > 0
        s[j]   = s[j] - alibi_slopes[h] · |j - d|                      if alibi_slopes are given
        lse    = log(Σ_j exp(s[j]) + exp(sinks[h]))                    the sink only if sinks are given
        out    = Σ_j exp(s[j] - lse) · keep[j] / (1 - dropout_p) · v[b, j, g]

    Column j is visible unless ``causal`` and j > d, or ``window=(left, right)`` and not -left ≤ j - d ≤ right.
    So the last query row meets the last key: masks are aligned at the bottom right. Masks intersect.

    Args:
        q: (B, S_q, H_q, D). float16 or bfloat16; on the CPU also float32. D is a multiple of 8, at most 256.
        k: (B, S_k, H_k, D), of q's dtype and device. H_q is a multiple of H_k.
        v: (B, S_k, H_k, D_v). D_v obeys the rule for D and may differ from it.
            q, k and v take any strides with a contiguous last dimension. CUDA kernels read 16 bytes at a time: an
            operand whose address or strides are no multiples of 16 bytes is copied first. Under torch.autocast, q, k
            and v of several dtypes, or of one that no kernel serves, are cast to the dtype that it asks for.
        causal: hide columns right of the diagonal.
        window: (left, right), inclusive distances from the diagonal, in tokens; None on a side: unbounded.
        scale: factor of the scores, any finite number; by default 1/√D.
        softcap: bound of the scores, in units of scaled scores; 0: none.
        alibi_slopes: float32, (H_q) or (B, H_q). Gets no gradient.
        sinks: (H_q), any floating dtype, summed in float32: a logit for each query head that no value belongs to. It
            takes weight from the columns, and gets a gradient.
        dropout_p: the probability, at least 0 and below 1, with which a weight is dropped; 0: none. Also in backward,
            where the same weights are dropped. Pass 0 in evaluation.
        seed: of dropout, an int from 0 to 2^64 - 1. A weight is dropped by its place (b, h, i, j) and the seed alone,
            alike on every device. By default drawn from PyTorch's CPU generator, so torch.manual_seed and activation
            checkpointing repeat it; in a captured CUDA graph it is fixed.
        deterministic: whether the gradients must be the same bits in every run. By default what
            torch.are_deterministic_algorithms_enabled() says when backward runs.
        return_lse: also return lse.

    Returns:
        out, (B, S_q, H_q, D_v), contiguous, of q's dtype; with ``return_lse`` the pair (out, lse), where lse is the
        natural logarithm, float32, (B, H_q, S_q). Both are differentiable with respect to q, k, v and sinks, once.
        Sums and softmax statistics are float32. On CUDA the parts of dq add up in no fixed order unless
        ``deterministic``, so its last bits may differ from run to run (not on Hopper where D or D_v is above 128);
        everything else repeats to the bit. A row that sees no column has out = 0, lse = -inf (or the sink) and
        gradients 0.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, strides, devices or option values break the rules above.
        NotImplementedError: legal, but no kernel serves it (float32 on CUDA, a GPU older than sm_80, slopes that
            require a gradient, forward-mode differentiation).
        RuntimeError: the CUDA runtime failed.

    Example:
        >>> import torch, flashtile
        >>> q = torch.randn(2, 100, 8, 64)
        >>> k, v = torch.randn(2, 2, 120, 2, 64)
        >>> flashtile.attention(q, k, v, causal=True).shape
        torch.Size([2, 100, 8, 64])
        >>> out, lse = flashtile.attention(q, k, v, window=(64, 0), return_lse=True)
        >>> lse.shape
        torch.Size([2, 8, 100])

    Sources: online softmax, Milakov and Gimelshein 2018 (arXiv:1805.02867); tiling and recomputation,
    FlashAttention (Dao et al. 2022, arXiv:2205.14135) and FlashAttention-2 (Dao 2023, arXiv:2307.08691); grouped
    queries, Ainslie et al. 2023 (arXiv:2305.13245); ALiBi, Press et al. 2021 (arXiv:2108.12409); sliding window,
    Longformer (Beltagy et al. 2020, arXiv:2004.05150); softcap, Gemma 2 (2024, arXiv:2408.00118); sinks, gpt-oss
    (2025, arXiv:2508.10925); dropout's random numbers, Philox 4×32-10 (Salmon et al. 2011,
    doi:10.1145/2063384.2063405).
    """
    if forward_ad._current_level >= 0:
        _refuse_tangents(q=q, k=k, v=v, sinks=sinks)
    if alibi_slopes is not None:
        _refuse_gradient(alibi_slopes)
    if sinks is not None:
        sinks = _float32(sinks)
    if dropout_p and seed is None:
        seed = int(torch.randint(2**63 - 1, (), device="cpu"))
    try:
        differentiable = is_grad_enabled() and (
            q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
        )
    except AttributeError:
        differentiable = False  # one is no tensor; the module says which
    options = (alibi_slopes, sinks, causal, window, scale, softcap, dropout_p, seed, deterministic)
    try:
        if differentiable:
            apply = (_AttentionWithLse if return_lse else _Attention).quick_apply
            # Autograd takes time for each argument, even if it is None.
            return apply(q, k, v, options) if sinks is None else apply(q, k, v, options, sinks)
        return _C.forward_with_lse(q, k, v, options) if return_lse else _C.forward(q, k, v, options)
    except _C.Misaligned:
        readable = _aligned
    except (TypeError, RuntimeError):
        if differentiable and _under_functorch():
            raise NotImplementedError("attention: called under a transform of torch.func, expected none") from None
        dtype = _autocast_dtype(q, k, v)
        if dtype is None:
            raise
        readable = operator.methodcaller("to", dtype)
    return attention(
        readable(q),
        readable(k),
        readable(v),
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_p=dropout_p,
        seed=seed,
        deterministic=deterministic,
        return_lse=return_lse,
    )


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> str:
    """Says how ``attention`` would compute these arguments: kernel, tile, grid, memory, FLOPs, bytes, and why.

    Takes the arguments of :func:`attention` and raises what it raises; computes nothing.

    >>> import torch, flashtile
    >>> q = torch.randn(1, 1024, 8, 64)
    >>> print(flashtile.explain(q, q, q, causal=True))  # doctest: +SKIP
    """
    sinks = None if sinks is None else _float32(sinks)
    options = (alibi_slopes, sinks, causal, window, scale, softcap, dropout_p, seed, deterministic)
    try:
        return _C.explain(q, k, v, options)
    except _C.Misaligned:
        return _C.explain(_aligned(q), _aligned(k), _aligned(v), options)


class _Attention(torch.autograd.Function):
    """Returns out."""

    # (ctx, q, k, v, options, sinks=None): sets ctx.unsaved = (lse, options), saves the rest, sinks at the end
    forward = staticmethod(_C.saving_forward)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        return _gradients(ctx, dout, None, *ctx.unsaved, *ctx.saved_tensors)


class _AttentionWithLse(torch.autograd.Function):
    """Returns (out, lse)."""

    @staticmethod
    def forward(ctx, q, k, v, options, *sinks):
        out, lse = _C.forward_with_lse(q, k, v, options)
        ctx.unsaved = (options,)
        ctx.save_for_backward(lse, q, k, v, options[0], out, *sinks)
        ctx.set_materialize_grads(False)  # a loss of one output must not pay for zeros of the other
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        lse, *saved = ctx.saved_tensors
        return _gradients(ctx, dout, dlse, lse, *ctx.unsaved, *saved)


# Function.apply without its Python half, which serves torch.func and takes 3 µs of the 12 of a call with gradients.
for _function in (_Attention, _AttentionWithLse):
    _function.quick_apply = super(torch.autograd.Function, _function).apply


def _gradients(ctx, dout, dlse, lse, options, q, k, v, alibi_slopes, out, sinks=None):
    dout = torch.zeros_like(out) if dout is None else _dense(dout)
    if dlse is not None:
        dlse = dlse.contiguous()
    gradients = [
        torch.empty_like(x, memory_format=_CONTIGUOUS) if needed else None
        for x, needed in zip((q, k, v), ctx.needs_input_grad, strict=False)
    ]
    dsinks = torch.empty_like(sinks) if sinks is not None and ctx.needs_input_grad[4] else None
    *scalars, deterministic = options[2:]
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    _C.backward(dout, dlse, q, k, v, out, lse, *gradients, dsinks, (alibi_slopes, sinks, *scalars, deterministic))
    return (*gradients, None) if sinks is None else (*gradients, None, dsinks)


def _float32(sinks):
    """Few numbers, which models keep in their own dtype; autograd casts the gradient back."""
    return sinks.float() if isinstance(sinks, Tensor) and sinks.is_floating_point() else sinks


def _refuse_gradient(alibi_slopes):
    if is_grad_enabled() and getattr(alibi_slopes, "requires_grad", False):
        raise NotImplementedError(
            "attention: alibi_slopes requires grad, expected slopes that do not: "
            "no kernel computes their gradient; nearest supported: alibi_slopes.detach()"
        )


def _refuse_tangents(**tensors):
    for name, x in tensors.items():
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"attention: {name} carries a forward-mode tangent, expected none: only reverse mode is supported"
            )


def _autocast_dtype(*tensors):
    """What torch.autocast asks for, where it is active and not all tensors are of that dtype; else None."""
    if not all(isinstance(x, Tensor) for x in tensors):
        return None
    device_type = tensors[0].device.type
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    dtype = torch.get_autocast_dtype(device_type)
    return None if all(x.dtype == dtype for x in tensors) else dtype


def _aligned(x):
    """`x`, or a contiguous copy if its address or a stride is no multiple of 16 bytes."""
    size = x.element_size()
    if x.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in x.stride()[:-1]):
        return x
    return x.clone(memory_format=_CONTIGUOUS)


def _dense(x):
    """`x` as a kernel can read it: autograd expands gradients of sums with stride 0, and slices those of parts."""
    if x.stride(-1) != 1:
        return x.contiguous()
    return _aligned(x) if x.is_cuda else x
