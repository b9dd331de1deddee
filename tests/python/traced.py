"""Calls of the operators that tests trace, and what they compare."""

import pytest
import torch
from cached import Cached
from cases import BF16, F16, F32, Case
from compare import assert_bitwise
from ragged import Ragged
from torch.utils._python_dispatch import TorchDispatchMode

import flashtile

everything = dict(
    window=(50, 7), softcap=10.0, scale=0.3, alibi="per batch and head", sinks=0.0, dropout_p=0.2, head_dim=72
)
grouped = dict(heads_q=6, heads_k=2)
CASES = [
    Case("plain", dtype=F32),
    Case("causal", dtype=BF16, causal=True, **grouped),
    Case("sinks", dtype=F16, sinks=0.0, head_dim_v=128),
    Case("everything", dtype=F32, head_dim_v=40, layout="gaps", **grouped, **everything),
    Case("everything", dtype=BF16, layout="packed", **everything),
    Case("misaligned", dtype=BF16, layout="misaligned", causal=True),
    Case("no_keys", dtype=F16, seqlen_k=0),
    Ragged("ragged", dtype=F32, causal=True, **grouped),
    Ragged("ragged", dtype=BF16, tail=3, **grouped),
    Ragged("used", dtype=F16, used_q=(60, 1, 0, 7, 0), used_k=(90, 0, 33, 130, 0), head_dim_v=128),
    Ragged("everything", dtype=F32, layout="gaps", tail=2, **grouped, **everything),
]
CACHES = [
    Cached("decode", dtype=F32),
    Cached("append", dtype=BF16, new=1),
    Cached("pages", dtype=F16, seqlen_q=5, new=5, page_size=16, rotary=32, head_dim_v=128),
    Cached("indexed", dtype=F32, seqlen_q=3, indexed=True, causal=False, window=(20, 5), leftpad=(3, 0, 0, 30)),
    Cached("ragged", dtype=BF16, lengths_q=(1, 0, 17, 5), new=0, page_size=16, tail=3, sinks=0.0, rotary=16),
    Cached("options", dtype=F32, new=3, alibi="per batch and head", softcap=5.0, scale=0.3, num_splits=2),
    Cached("invariant", dtype=F16, interleaved=False, rotary=64, new=2, batch_invariant=True),
]

# What TorchDynamo does with the rest of PyTorch.
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def compiled(function, backend="aot_eager", **options):
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def attend(case, inputs, options, **others):
    """Of the inputs of `differentiable`."""
    function = flashtile.attention_varlen if isinstance(case, Ragged) else flashtile.attention
    sinks = dict(sinks=inputs[3]) if len(inputs) > 3 else {}
    return function(*inputs[:3], **{**options, **sinks}, **others)


def assert_all_bitwise(found, expected):
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert_bitwise(a, b, f"number {i}")


def gradients_of(function, inputs):
    """Through out and lse, and through out alone, as of a sum: expanded, with strides of 0."""
    out, lse = function(*inputs)
    incoming = [torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).to(x) for x in (out, lse)]
    both = torch.autograd.grad([out, lse], inputs, incoming)
    return (*both, *torch.autograd.grad(function(*inputs)[0].sum(), inputs))


def dropout(q, k, v):
    return flashtile.attention(q * 1.5, k, v, dropout_p=0.3, deterministic=True).sin()


def seeded_gradients(function, inputs, seed=1):
    torch.manual_seed(seed)
    out = function(*inputs)
    torch.manual_seed(-1)
    return out, *torch.autograd.grad(out.square().sum(), inputs)


class Recorded(TorchDispatchMode):
    """[(operator, arguments)] of flashtile."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "flashtile":
            self.calls.append((func, args))
        return func(*args, **kwargs or {})

    @property
    def names(self):
        return [func._schema.name.removeprefix("flashtile::") for func, _ in self.calls]
