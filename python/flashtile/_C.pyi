"""The compiled module. Arguments stand as in C++: every option is given, None stands for one left out."""

from typing import Any, SupportsFloat, SupportsIndex

from torch import Tensor

class Misaligned(NotImplementedError):
    """A CUDA kernel reads 16 bytes at a time, and an operand's address or stride is no multiple of 16 bytes."""

def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    causal: bool,
    window_left: SupportsIndex | None,
    window_right: SupportsIndex | None,
    scale: SupportsFloat | None,
    softcap: SupportsFloat,
    with_lse: bool,
    num_threads: int,
) -> tuple[Tensor, Tensor | None]: ...
def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    alibi_slopes: Tensor | None,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    causal: bool,
    window_left: SupportsIndex | None,
    window_right: SupportsIndex | None,
    scale: SupportsFloat | None,
    softcap: SupportsFloat,
    num_threads: int,
) -> None: ...
def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    causal: bool,
    window_left: SupportsIndex | None,
    window_right: SupportsIndex | None,
    scale: SupportsFloat | None,
    softcap: SupportsFloat,
    num_threads: int,
) -> str: ...
def info() -> dict[str, Any]: ...
def _enable_exchange(enabled: bool) -> None: ...
