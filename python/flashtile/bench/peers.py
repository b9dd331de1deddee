"""Who is timed: flashtile, and PyTorch's kernels one by one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashtile.bench import options
from flashtile.bench.cases import Case, Inputs, Work
from flashtile.bench.oracle import Attention, attention_sdpa
from flashtile.fp8 import Quantized

OURS, MATH = "flashtile", "SDPA math"
PLAIN = "plain"  # flashtile's column of the case without its options
TRITON = "Triton"  # the ladder's rung
RECORDED = (Work.FORWARD_WITH_GRAD, Work.BACKWARD)  # by autograd
Setting = Callable[[], contextlib.AbstractContextManager[Any]]
Rounding = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Quantized]


@dataclasses.dataclass(frozen=True)
class Peer:
    """An attention and the setting that it runs in."""

    name: str
    attention: Attention
    setting: Setting = contextlib.nullcontext
    asked: Callable[[Case], Case] | None = None  # what it is asked for instead of a case; None: that
    heads_first: bool = False  # its tensors, (B, S, H, D), lie in memory as (B, H, S, D)
    rounding: Rounding | None = None  # what it makes of its inputs first, so that it computes with these
    by_inputs: bool = False  # it is judged by attention of the inputs too, not of these alone

    def laid_out(self, inputs: Inputs) -> Inputs:
        """The inputs in its layout."""
        if not self.heads_first:
            return inputs
        return Inputs(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs))


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A call with its inputs bound, to be timed inside its setting."""

    name: str
    call: Callable[[], object]
    setting: Setting = contextlib.nullcontext


def peers_of(device_type: str, attention: Callable[..., torch.Tensor]) -> list[Peer]:
    """`attention`, which has flashtile's signature, PyTorch's kernels on this kind of device and, where Triton is
    installed, the ladder's in Triton."""
    if device_type == "cuda":
        theirs = [Peer(name, attention_sdpa, setting) for name, setting in cuda_settings().items()]
        if importlib.util.find_spec("triton"):
            theirs.append(Peer(TRITON, _attention_triton))
    else:
        theirs = [Peer("SDPA", attention_sdpa)]
    return [Peer(OURS, dense(attention)), *theirs]


def dense(attention: Callable[..., Any]) -> Attention:
    """A function of flashtile's signature, called as a case asks for it."""

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> Any:
        return attention(q, k, v, causal=case.causal, **options.arguments(case, q.device))

    return ours


def contestant(peer: Peer, inputs: Inputs, case: Case) -> Contestant:
    """Binds a peer to its inputs. A backward call differentiates a graph that is made here, once."""
    inputs = peer.laid_out(inputs)
    q, k, v = (t.detach().requires_grad_(case.work in RECORDED) for t in inputs[:3])
    if case.over_a_cache:  # of its own: memory that others have just read is a tenth faster to find for a small batch
        k, v = k.clone(), v.clone()
    if case.work is not Work.BACKWARD:
        return Contestant(peer.name, lambda: peer.attention(q, k, v, case), peer.setting)
    with peer.setting():
        out = peer.attention(q, k, v, case)
    call = functools.partial(torch.autograd.grad, out, (q, k, v), inputs.dout, retain_graph=True)
    return Contestant(peer.name, call, peer.setting)


def host_contestants(attention: Callable[..., torch.Tensor], inputs: Inputs, case: Case) -> list[Contestant]:
    """The bare calls: no wrapper around them, and SDPA's transposed views made beforehand. Or both compiled."""
    with_grad = case.work in (Work.FORWARD_WITH_GRAD, Work.COMPILED_WITH_GRAD)
    q, k, v = (t.detach().requires_grad_(with_grad) for t in inputs[:3])
    heads_first = [t.transpose(1, 2) for t in (q, k, v)]
    sdpa: Callable[..., torch.Tensor] = torch.nn.functional.scaled_dot_product_attention
    if case.work in (Work.COMPILED, Work.COMPILED_WITH_GRAD):
        # Of SDPA its own choice alone: a graph keeps the kernel that it was made with.
        ours, its = (torch.compile(function, fullgraph=True, dynamic=False) for function in (attention, sdpa))
        return [Contestant(OURS, lambda: ours(q, k, v)), Contestant("SDPA", lambda: its(*heads_first))]
    settings: dict[str, Setting] = {"SDPA": contextlib.nullcontext}
    if q.is_cuda:
        settings["SDPA FA2"] = cuda_settings()["SDPA FA2"]
    theirs = [Contestant(name, lambda: sdpa(*heads_first), setting) for name, setting in settings.items()]
    return [Contestant(OURS, lambda: attention(q, k, v)), *theirs]


def output_of(found: Any, q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The output of somebody else's function, which may have returned it first in a tuple; a RuntimeError says what is
    none."""
    out = found[0] if isinstance(found, tuple) and found else found
    expected = (*q.shape[:-1], v.shape[-1])
    if not isinstance(out, torch.Tensor):
        raise RuntimeError(f"its function returned {type(out).__name__}, expected a tensor")
    if out.shape != expected:
        raise RuntimeError(f"its function returned shape {tuple(out.shape)}, expected {expected}")
    return out


def math_setting() -> contextlib.AbstractContextManager[Any]:
    return sdpa_kernel(SDPBackend.MATH)


def _attention_triton(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> torch.Tensor:
    from flashtile.reference import triton_flash2

    if refused := options.words(case):
        raise NotImplementedError(f"triton_flash2: has no argument for {refused}")
    return triton_flash2.attention(q, k, v, causal=case.causal)


def cuda_settings() -> dict[str, Setting]:
    backends = {
        "SDPA FA2": SDPBackend.FLASH_ATTENTION,
        "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
        "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    return {name: functools.partial(sdpa_kernel, backend) for name, backend in backends.items()}
