"""The compiled module. Arguments stand as in C++: every option is given, None stands for one left out."""

from typing import Any, SupportsFloat, SupportsIndex

from torch import Tensor

_Window = tuple[SupportsIndex | None, SupportsIndex | None] | None
_Options = tuple[bool, _Window, SupportsFloat | None, SupportsFloat]  # causal, window, scale, softcap

class Misaligned(NotImplementedError):
    """A CUDA kernel reads 16 bytes at a time, and an operand's address or stride is no multiple of 16 bytes."""

class Buffer:
    """Memory from PyTorch's allocator that no tensor shows; freed with the object."""

def forward(
    q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None, options: _Options, with_lse: bool
) -> tuple[Tensor, Tensor | None]: ...
def forward_keeping_lse(
    q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None, options: _Options
) -> tuple[Tensor, Tensor | Buffer]: ...
def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | Buffer,
    alibi_slopes: Tensor | None,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    options: _Options,
) -> None: ...
def explain(q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None, options: _Options) -> str: ...
def info() -> dict[str, Any]: ...
def _enable_exchange(enabled: bool) -> None: ...
