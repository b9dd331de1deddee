"""Eager calls and those that PyTorch traces judge options alike: the same values are taken for numbers, and the others
have the same message, of one line."""

import fractions
import math

import pytest
import torch
from cached import Cached
from cases import F32, Case
from compare import assert_bitwise
from ragged import Ragged
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from traced import quiet

import flashtile

pytestmark = quiet

DENSE = dict(zip("qkv", Case("options", dtype=F32, seqlen_q=5, seqlen_k=7, head_dim=16).tensors(), strict=True))
_ragged = Ragged("options", dtype=F32, head_dim=16)
RAGGED = dict(zip("qkv", _ragged.tensors(), strict=True)) | _ragged.tables()
CACHE = Cached("options", dtype=F32, head_dim=16, held=(5, 9), room=3).arguments()
CALLS = {
    "attention": (flashtile.attention, DENSE),
    "attention_varlen": (flashtile.attention_varlen, RAGGED),
    "attention_kvcache": (flashtile.attention_kvcache, CACHE),
}


def eager(function, given):
    return function(**given)


def explained(function, given):
    return flashtile.explain(**given)


def vmapped(function, given):
    others = {name: x for name, x in given.items() if name != "q"}
    return torch.vmap(lambda q: function(q, **others), randomness="same")(given["q"][None])[0]


def under_compile(function, given):
    torch.compiler.reset()
    return torch.compile(function, backend="aot_eager")(**given)


def fake(function, given):
    mode = FakeTensorMode()
    return function(**{name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in given.items()})


def exported(function, given):
    tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    others = {name: x for name, x in given.items() if name not in tensors}

    class Module(torch.nn.Module):
        def forward(self, **tensors):
            return function(**tensors, **others)

    return torch.export.export(Module(), (), tensors, strict=False).module()(**tensors)


def symbolic(function, given):
    others = {name: x for name, x in given.items() if name != "q"}
    graph = make_fx(lambda q: function(q, **others), tracing_mode="symbolic", _allow_non_fake_inputs=True)
    return graph(given["q"])(given["q"])


TRACERS = [vmapped, under_compile, fake, exported, symbolic]

SERVED = [
    *(("attention", "scale", x) for x in (True, 2**70, fractions.Fraction(1, 2), torch.tensor([0.5]))),
    *(("attention_kvcache", "softcap", x) for x in (2, 2**70, fractions.Fraction(1, 2), torch.tensor(2))),
    *(("attention_varlen", "window", (x, None)) for x in (True, 2**70, torch.tensor(2))),
    *(("attention_kvcache", "num_splits", x) for x in (2, 2**70, torch.tensor([2]))),
]

_flags = [1, "yes", torch.tensor(True), torch.ones(2, 3)]
_no_numbers = ["x", [1.0], 1j, torch.ones(60, 90), 10**400]
REFUSED = [
    *(("attention", "causal", x) for x in (*_flags, None)),
    *(("attention_varlen", "return_lse", x) for x in (*_flags, None)),
    *(("attention", "deterministic", x) for x in _flags),
    *(
        ("attention", "window", x)
        for x in ("big", 7, [1, 2], (1, 2, 3), (1.5, 0), (None, torch.ones(2)), torch.ones(2))
    ),
    *(("attention", "scale", x) for x in _no_numbers),
    *(("attention_varlen", "softcap", x) for x in (*_no_numbers, None)),
    *(("attention", "dropout_p", x) for x in ("x", torch.ones(2), None)),
    *(("attention", "seed", x) for x in (-1, 2**64, 1.0, "x", torch.tensor(1.0), torch.ones(2, dtype=torch.int64))),
    *(("attention_kvcache", name, 1) for name in ("causal", "rotary_interleaved", "batch_invariant", "return_lse")),
    *(("attention_kvcache", "num_splits", x) for x in (None, 2.0, torch.ones(2))),
    *(("attention_kvcache", "scale", x) for x in ("x", torch.ones(60, 90))),
    *(("attention_kvcache", "window", x) for x in ("big", (1.5, 0))),
    *(("attention", "k", x) for x in ([1.0], None, torch.eye(3).to_sparse())),
    *(("attention_varlen", "cu_seqlens_k", x) for x in ([0, 4], None)),
    ("attention_kvcache", "block_table", [[0]]),
    *((name, "sinks", 0.0) for name in CALLS),
]
# What is known when the operator runs, which fake tensors do not.
WRONG_VALUES = [
    ("attention", "window", (-1, 0)),
    ("attention", "scale", math.nan),
    ("attention", "scale", 1e39),
    ("attention_varlen", "softcap", -1.0),
    ("attention", "dropout_p", 1.0),
    ("attention", "dropout_p", math.nan),
    ("attention_kvcache", "num_splits", -1),
    ("attention_kvcache", "num_splits", -(2**70)),
    ("attention_varlen", "cu_seqlens_k", torch.tensor(3, dtype=torch.int32)),
    ("attention_kvcache", "cache_seqlens", torch.tensor(3, dtype=torch.int32)),
    ("attention", "sinks", torch.tensor(1.0)),
]


def ids(value):
    return value if isinstance(value, str) else value.__name__ if callable(value) else f"{type(value).__name__}"


def arguments(name, option, value):
    function, given = CALLS[name]
    given = {**given, option: value}
    if option in ("dropout_p", "seed"):
        given = {"dropout_p": 0.5, "seed": 3} | given
    return function, given


def refusal(way, function, given):
    """(type, message) of the error."""
    with pytest.raises((TypeError, ValueError)) as raised:
        way(function, given)
    return raised.type, str(raised.value)


@pytest.mark.parametrize("name, option, value", SERVED, ids=ids)
@pytest.mark.parametrize("way", TRACERS)
def test_served(way, name, option, value):
    function, given = arguments(name, option, value)
    expected = function(**given)
    parts = value if isinstance(value, tuple) else (value,)
    if way in (fake, exported, symbolic) and any(isinstance(x, torch.Tensor) for x in parts):
        pytest.skip("PyTorch does not read a tensor's number here")
    found = way(function, given)
    if way is fake:
        assert found.shape == expected.shape
    else:
        assert_bitwise(found, expected)


@pytest.mark.parametrize("name, option, value", REFUSED, ids=ids)
def test_refused(name, option, value):
    function, given = arguments(name, option, value)
    kind, message = refusal(eager, function, given)
    assert message.startswith(f"{name}: {option}") and ("expected" in message or "dense" in message)
    assert len(message) < 250 and "\n" not in message
    assert refusal(explained, function, given) == (kind, message)
    for way in TRACERS:
        found = refusal(way, function, given)
        assert found[0] is kind and _without_reason(found[1]) == _without_reason(message), way


def _without_reason(message):
    """PyTorch's own words, which stand in brackets."""
    return message.partition(" dense strided tensor (")[0]


@pytest.mark.parametrize("name, option, value", WRONG_VALUES, ids=ids)
def test_values(name, option, value):
    function, given = arguments(name, option, value)
    expected = refusal(eager, function, given)
    assert expected[1].startswith(f"{name}: {option}") and "\n" not in expected[1]
    for way in (explained, vmapped, under_compile, exported):
        assert refusal(way, function, given) == expected, way
