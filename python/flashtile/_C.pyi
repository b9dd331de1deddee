"""The compiled module. Arguments stand as in C++: every option is given, None stands for one left out."""

from collections.abc import Callable
from typing import Any, SupportsFloat, SupportsIndex

from torch import Tensor
from torch.autograd.function import FunctionCtx

_Sequences = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
_Window = tuple[SupportsIndex | None, SupportsIndex | None] | None
_Options = tuple[
    Tensor | None,  # alibi_slopes
    Tensor | None,  # sinks
    bool,  # causal
    _Window,
    SupportsFloat | None,  # scale
    SupportsFloat,  # softcap
    SupportsFloat,  # dropout_p
    int | None,  # seed
    bool | None,  # deterministic
    _Sequences | None,  # None: dense
]
_CacheTensors = tuple[
    Tensor | None,  # k_new
    Tensor | None,  # v_new
    Tensor | None,  # rotary_cos
    Tensor | None,  # rotary_sin
    Tensor,  # cache_seqlens
    Tensor | None,  # block_table
    Tensor | None,  # cache_batch_idx
    Tensor | None,  # leftpad
    Tensor | None,  # cu_seqlens_q
]
_CacheOptions = tuple[
    Tensor | None,  # alibi_slopes
    Tensor | None,  # sinks
    bool,  # causal
    _Window,
    SupportsFloat | None,  # scale
    SupportsFloat,  # softcap
    bool,  # rotary_interleaved
    SupportsIndex,  # num_splits
    bool,  # batch_invariant
    bool,  # return_lse
]

class Unreadable(NotImplementedError):
    """No kernel can read an operand as it lies in memory, but a contiguous copy of it."""

class Explained(BaseException):
    """Ends a call within `explain`, and says how it would be computed."""

def forward(q: Tensor, k: Tensor, v: Tensor, options: _Options) -> Tensor: ...
def forward_with_lse(q: Tensor, k: Tensor, v: Tensor, options: _Options) -> tuple[Tensor, Tensor]: ...
def forward_with_state(q: Tensor, k: Tensor, v: Tensor, options: _Options) -> tuple[Tensor, Tensor, Tensor]: ...
def saving_forward(
    ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, options: _Options, sinks: Tensor | None = None
) -> Tensor: ...
def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    rows: object,  # the state that forward_with_state returns or saving_forward left in ctx.unsaved, or an lse
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dsinks: Tensor | None,
    options: _Options,
) -> None: ...
def kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tensors: _CacheTensors, options: _CacheOptions
) -> tuple[Tensor, Tensor | None]: ...
def described(object: object) -> str: ...  # for messages: in one line, of 80 characters or so
def check_options(function: str, options: _Options) -> None: ...  # raises what the call would
def check_cache_options(function: str, options: _CacheOptions) -> None: ...

# device: None for that of the tensors. Returns None where no kernel was called.
def explain(function: Callable[..., object], device: str | None, *args: Any, **kwargs: Any) -> str | None: ...
def info() -> dict[str, Any]: ...

CUDA_REMEDY: str  # what to do about a build without CUDA

def _enable_exchange(enabled: bool) -> None: ...
def _limit_compute_capability(limit: int) -> None: ...
