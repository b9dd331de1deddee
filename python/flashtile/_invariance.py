"""The mode in which all calls are batch-invariant that do not say otherwise."""

import contextlib
import threading
from collections.abc import Iterator

import torch

from . import _C

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
