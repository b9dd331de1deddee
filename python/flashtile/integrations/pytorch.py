"""PyTorch's own flash attention, computed by flashtile: torch.nn.attention's registry of implementations."""

import torch
import torch.nn.attention
from torch import Tensor

from .. import _C
from .._autograd import attend
from .._core import readable
from .._invariance import is_batch_invariant
from .._options import BATCH_INVARIANT, attention_options, replaced
from .._padding import contiguous

NAME = "flashtile"


def register() -> None:
    """Adds "flashtile" to the flash attention implementations that PyTorch (2.10 or newer) can be told to use on CUDA.

    From ``torch.nn.attention.activate_flash_attention_impl("flashtile")`` on, in this process, flashtile's kernels
    compute what PyTorch's flash attention does: ``scaled_dot_product_attention`` where it takes that way (see
    ``torch.nn.attention.sdpa_kernel``), ``torch.nn.attention.varlen`` and nested tensors, with gradients and dropout.
    PyTorch still decides which calls go that way. ``restore_flash_attention_impl()`` undoes it. Registering alone, or
    importing this module, changes nothing.

    Dropout's seed is drawn from PyTorch's CPU generator; other weights are dropped than by PyTorch. Arguments that
    flashtile has no kernel for (alibi_slopes, block_table, return_debug_mask, seqused_k of a dense batch) raise
    NotImplementedError; ``scaled_dot_product_attention`` passes none of them.

    Raises:
        NotImplementedError: this PyTorch has no such registry.

    Example:
        >>> import torch, flashtile.integrations.pytorch
        >>> flashtile.integrations.pytorch.register()
        >>> "flashtile" in torch.nn.attention.list_flash_attention_impls()
        True
        >>> torch.nn.attention.activate_flash_attention_impl("flashtile")
        >>> torch.nn.attention.restore_flash_attention_impl()
    """
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        raise NotImplementedError(f"register: PyTorch is {torch.__version__}, expected 2.10 or newer")
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_activate)


class _Activation:
    """What PyTorch's registry keeps, and calls ``remove()`` of."""

    def __init__(self, library):
        self.library = library

    def remove(self):
        self.library._destroy()


def _activate(device_type="CUDA"):
    library = torch.library.Library("aten", "IMPL", device_type)
    for name, function in _FUNCTIONS.items():
        if hasattr(torch.ops.aten, name):  # the last one is newer than the others
            library.impl(name, function)
    return _Activation(library)


# From here on, functions have the arguments and results of PyTorch's operators. Dispatch has left autograd behind when
# it comes here, and PyTorch calls the backward operators by itself.


def _forward(
    query,
    key,
    value,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    return_debug_mask,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    seqused_k=None,
    alibi_slopes=None,
    block_table=None,
    num_splits=None,
):
    unserved = {"alibi_slopes": alibi_slopes, "block_table": block_table}
    unserved["return_debug_mask"] = return_debug_mask or None
    unserved["seqused_k"] = seqused_k if cum_seq_q is None else None
    for name, given in unserved.items():
        if given is not None:
            raise NotImplementedError(
                f"_flash_attention_forward: {name} is given, expected none where flashtile is the implementation"
            )
    # Backward must drop the same weights. A seed on the CPU spares it to wait for the device.
    seed = torch.randint(2**63 - 1, (), device="cpu") if dropout_p else None
    sequences = None if cum_seq_q is None else (cum_seq_q, cum_seq_k, None, seqused_k)
    options = _options(is_causal, window_size_left, window_size_right, scale, dropout_p, seed, sequences)
    with torch.no_grad():
        out, lse = attend("_flash_attention_forward", *map(contiguous, (query, key, value)), options, True)
    if seed is None:
        seed = query.new_empty(2, dtype=torch.uint64)
    # Backward may run on a thread that is in no mode: it is told by where this is, which means nothing else.
    place = "cpu" if is_batch_invariant() else query.device
    return out, lse, seed, torch.empty((), dtype=torch.uint64, device=place), query.new_empty(0)


def _forward_inplace(out: Tensor, *args, **kwargs):
    result, lse, *_ = _forward(*args, **kwargs)
    out.copy_(result)
    return lse


def _backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    rng_state,
    unused,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
):
    seed = rng_state if dropout_p else None
    sequences = None if cum_seq_q is None else (cum_seq_q, cum_seq_k, None, None)
    options = _options(is_causal, window_size_left, window_size_right, scale, dropout_p, seed, sequences)
    options = replaced(options, BATCH_INVARIANT, unused.device != query.device)
    q, k, v, out, dout = (readable(contiguous(x)) for x in (query, key, value, out, grad_out))
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    _C.backward(dout, None, q, k, v, out, logsumexp, *gradients, None, options)
    return tuple(gradients)


def _sdpa_forward(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    max_q, max_k = query.shape[2], key.shape[2]
    out, lse, *rest = _forward(q, k, v, None, None, max_q, max_k, dropout_p, is_causal, return_debug_mask, scale=scale)
    out = out.transpose(1, 2)
    # torch.compile counts on a result laid out as query is.
    like_query = torch.empty_like(query) if out.shape == query.shape else out
    if like_query.stride() != out.stride():
        out = like_query.copy_(out)
    return out, lse, None, None, max_q, max_k, *rest


def _sdpa_backward(grad_out, query, key, value, out, *args, **kwargs):
    gradients = _backward(*(x.transpose(1, 2) for x in (grad_out, query, key, value, out)), *args, **kwargs)
    return tuple(x.transpose(1, 2) for x in gradients)


def _options(causal, left, right, scale, dropout_p, seed, sequences):
    return attention_options(
        causal=causal,
        window=(_distance(left), _distance(right)),
        scale=scale,
        dropout_p=dropout_p,
        seed=None if seed is None else int(seed),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        sequences=sequences,
    )


def _distance(side):
    """PyTorch says -1 or None for an unbounded side of a window."""
    return None if side is None or side < 0 else side


_FUNCTIONS = {
    "_flash_attention_forward": _forward,
    "_flash_attention_backward": _backward,
    "_scaled_dot_product_flash_attention": _sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
    "_flash_attention_forward_no_dropout_inplace": _forward_inplace,
}
