"""The mode in which all calls are batch-invariant that do not say otherwise."""

import contextlib
import threading
from collections.abc import Iterator

import torch

from . import _C
from ._options import ALIBI_SLOPES, SEQUENCES, SINKS, replaced

# Not a context variable, since TorchDynamo guards what it reads of this one; nor a class with a default, for the same
# reason. A thread that has never been in the mode would pay a third of a µs for each call: hence the second variable.
_of_thread = threading.local()
_is_in_use = False


@contextlib.contextmanager
def batch_invariant_mode(enabled: bool | None = True) -> Iterator[None]:
    """One set of bits from training to decoding: batch_invariant=True for all calls that leave it open.

    A context manager, and a decorator, for the calls of this thread: of :func:`attention`, :func:`attention_varlen` and
    :func:`attention_kvcache`, and of whatever calls these: :func:`scaled_dot_product_attention`, which leaves nothing
    to PyTorch then, the drop-ins of ``flashtile.compat``, and the integrations. Backward is as the forward was, on
    any thread.

    Then a token's out and lse have the same bits in training, in a dense or a ragged batch, in any chunk of a prefill
    over a cache, contiguous or in pages, and in decoding, alone or in any batch; and the gradients of a sequence's q, k
    and v are the same alone and beside others, dense or ragged, and in every run. What has no such bits is refused.

    Args:
        enabled: True; False, which ends the mode of a context around this one; or None: whenever
            torch.are_deterministic_algorithms_enabled().

    Raises:
        TypeError: enabled is something else.

    Example:
        >>> import torch, flashtile
        >>> q, k, v = torch.randn(3, 2, 100, 8, 64)
        >>> with flashtile.batch_invariant_mode():
        ...     out = flashtile.attention(q, k, v, causal=True)
        >>> torch.equal(out[1:], flashtile.attention(q[1:], k[1:], v[1:], causal=True, batch_invariant=True))
        True

    Source: He et al. 2025, Defeating Nondeterminism in LLM Inference.
    """
    if enabled is not None and not isinstance(enabled, bool):
        found = _C.described(enabled)
        raise TypeError(f"batch_invariant_mode: enabled is {found}, expected True, False or None")
    global _is_in_use
    _is_in_use = True
    before = getattr(_of_thread, "enabled", False)
    _of_thread.enabled = enabled
    try:
        yield
    finally:
        _of_thread.enabled = before


def is_batch_invariant() -> bool:
    """Whether calls of this thread are, that leave it open."""
    if not _is_in_use:
        return False
    enabled: bool | None = getattr(_of_thread, "enabled", False)
    return torch.are_deterministic_algorithms_enabled() if enabled is None else enabled


def with_whole_sequences(options, return_lse):
    """The options of a ragged batch without seqused_q, which kernels over a cache do not know: the rows of a sequence
    that do not count become a sequence of their own, without keys. Where that would not do, since a sink shows in any
    row's lse, or a table is no table, the options stay, for the module to refuse them."""
    tables, slopes = options[SEQUENCES], options[ALIBI_SLOPES]
    cu_seqlens_q, cu_seqlens_k, used_q, used_k = tables
    given = [x for x in tables if x is not None]
    if used_q is None or (return_lse and options[SINKS] is not None) or not all(map(_is_table, given)):
        return options
    first, ends = cu_seqlens_q[:-1], cu_seqlens_q[1:]
    if not all(x.shape == first.shape for x in (cu_seqlens_k[1:], *given[2:])):
        return options
    counted = torch.minimum(first + used_q.clamp(min=0), ends)
    cu_seqlens_q = torch.cat((torch.stack((first, counted), dim=1).flatten(), cu_seqlens_q[-1:]))
    cu_seqlens_k = cu_seqlens_k.repeat_interleave(2)[1:]
    if used_k is not None:
        used_k = torch.stack((used_k, torch.zeros_like(used_k)), dim=1).flatten()
    if isinstance(slopes, torch.Tensor) and slopes.dim() == 2:
        options = replaced(options, ALIBI_SLOPES, slopes.repeat_interleave(2, dim=0))
    return replaced(options, SEQUENCES, (cu_seqlens_q, cu_seqlens_k, None, used_k))


def _is_table(x):
    return isinstance(x, torch.Tensor) and x.dtype is torch.int32 and x.dim() == 1
