"""The compiled module. Arguments stand as in C++: every option is given, None stands for one left out."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.function import FunctionCtx

_Options = tuple[Any, ...]  # in the order of `ATTENTION` in _options.py
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
    Tensor | None,  # k_descale
    Tensor | None,  # v_descale
]
_CacheOptions = tuple[Any, ...]  # in the order of `CACHE`

class Unreadable(NotImplementedError):
    """No kernel can read an operand as it lies in memory, but a contiguous copy of it."""

class Explained(BaseException):
    """Ends a call within `explain`, and says how it would be computed."""

def forward(q: Tensor, k: Tensor, v: Tensor, options: _Options, out: Tensor | None = None) -> Tensor: ...
def forward_with_lse(
    q: Tensor, k: Tensor, v: Tensor, options: _Options, out: Tensor | None = None
) -> tuple[Tensor, Tensor]: ...
def forward_with_state(q: Tensor, k: Tensor, v: Tensor, options: _Options) -> tuple[Tensor, Tensor, Tensor]: ...
def saving_forward(
    ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, options: _Options, sinks: Tensor | None = None
) -> Tensor: ...

# Of float32 numbers on a CPU, which stand for e4m3 ones: they have been multiplied with their descales.
def forward_rounding_weights(q: Tensor, k: Tensor, v: Tensor, options: _Options) -> tuple[Tensor, Tensor]: ...
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
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tensors: _CacheTensors,
    options: _CacheOptions,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]: ...
def check_place(function: str, out: Tensor, read: dict[str, Tensor]) -> None: ...  # for what is copied to out
def described(object: object) -> str: ...  # for messages: in one line, of 80 characters or so
def check_options(function: str, options: _Options) -> None: ...  # raises what the call would
def check_cache_options(function: str, options: _CacheOptions) -> None: ...
def quantize(
    function: str,
    tensors: tuple[Tensor, ...],  # queries, keys, values
    numbers: tuple[Tensor, ...],  # four of them in an int32
    descales: tuple[Tensor, ...],
    block: int,
    rotates: bool,
    signs: tuple[int, ...],
) -> None: ...
def quantize_ragged(
    function: str,
    x: Tensor,
    begins: Tensor,
    numbers: Tensor,  # four of them in an int32
    descale: Tensor,  # zeros
    largest: Tensor,  # zeros
    rotates: bool,
    signs: tuple[int, ...],
) -> None: ...

# Merges up to 8 results over disjoint keys; with `state` None sums them. `adds`: what out, of float32, and state hold
# counts as one more.
def merge(
    out: Tensor,  # (B, S, H, D_v)
    state: Tensor | None,  # (2, B, H, S), as forward_with_state returns it
    parts: Sequence[tuple[int, int, Tensor, Tensor | None]],  # begin and end of rows, their out and state
    unit: float,  # of scores
    adds: bool,
) -> None: ...
def unit_of_scores(scale: float, softcap: float, alibi: bool) -> float: ...  # what `merge` is given

# Both are put on a stream of `device`, at the address `stream`: a write to counters of 32 bits, which may be another
# GPU's, and a wait until each is at `value` or beyond.
def write_counters(addresses: Sequence[int], value: int, device: int, stream: int) -> None: ...
def wait_for_counters(addresses: Sequence[int], value: int, device: int, stream: int) -> None: ...

# device: None for that of the tensors. Returns None where no kernel was called.
def explain(function: Callable[..., object], device: str | None, *args: Any, **kwargs: Any) -> str | None: ...
def info() -> dict[str, Any]: ...

CUDA_REMEDY: str  # what to do about a build without CUDA

# For JAX: {target: {platform: capsule of a handler}}.
XLA_HANDLERS: dict[str, dict[str, object]]

def _enable_exchange(enabled: bool) -> None: ...
def _limit_compute_capability(limit: int) -> None: ...
