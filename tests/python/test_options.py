"""Eager calls and those that PyTorch traces judge arguments alike: the same values count as numbers, and the others
have the same message, of one line."""

import fractions
import inspect
import math

import numpy as np
import pytest
import torch
from cached import Cached
from cases import F32, ILLEGAL, Case
from compare import assert_bitwise
from ragged import Ragged
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from traced import quiet

import flashtile
from flashtile import _C
from flashtile._options import ATTENTION, CACHE, RETURN_LSE, SCORES, SEQUENCES, TENSORS, replaced
from flashtile.masks import ColumnMask

pytestmark = quiet

DENSE = dict(zip("qkv", Case("options", dtype=F32, seqlen_q=5, seqlen_k=7, head_dim=16).tensors(), strict=True))
_ragged = Ragged("options", dtype=F32, head_dim=16)
RAGGED = dict(zip("qkv", _ragged.tensors(), strict=True)) | _ragged.tables()
CACHED = Cached("options", dtype=F32, head_dim=16, held=(5, 9), room=3).arguments()
MASKS = {
    "attention": ColumnMask.full(5, 7),
    "attention_varlen": ColumnMask.concatenate([ColumnMask.full(5, 7)] * (len(RAGGED["cu_seqlens_q"]) - 1)),
    "attention_kvcache": ColumnMask.full(1, 7),
}
OTHERS = ("sequences", "fp8", "max_logits")  # which are made of several arguments, or of none
CALLS = {
    "attention": (flashtile.attention, DENSE),
    "attention_varlen": (flashtile.attention_varlen, RAGGED),
    "attention_kvcache": (flashtile.attention_kvcache, CACHED),
}


def eager(function, given):
    return function(**given)


def explained(function, given):
    return flashtile.explain(**given)


def _mapped(given):
    """The name of an operand that is right."""
    return next(name for name in ("q", "v", "v_cache") if _is_dense(given.get(name)))


def _is_dense(x):
    return isinstance(x, torch.Tensor) and x.layout is torch.strided


def vmapped(function, given):
    name = _mapped(given)
    call = torch.vmap(lambda x: function(**{**given, name: x}), randomness="same")
    return call(given[name][None])[0]


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
    name = _mapped(given)
    call = make_fx(lambda x: function(**{**given, name: x}), tracing_mode="symbolic", _allow_non_fake_inputs=True)
    return call(given[name])(given[name])


TRACERS = [vmapped, under_compile, fake, exported, symbolic]


class Index:
    """An integer of someone else's."""

    def __index__(self):
        return 5


SERVED = [
    *(("attention", "scale", x) for x in (True, 2**70, fractions.Fraction(1, 2), torch.tensor([0.5]))),
    *(("attention_kvcache", "softcap", x) for x in (2, 2**70, fractions.Fraction(1, 2), torch.tensor(2))),
    *(("attention_varlen", "window", (x, None)) for x in (True, -3, 2**70, -(2**70), torch.tensor(2))),
    ("attention", "window", (4, -2)),
    ("attention_kvcache", "window", (None, -1)),
    *(("attention_kvcache", "num_splits", x) for x in (2, 2**70, torch.tensor([2]))),
    ("attention", "seed", Index()),
    ("attention_varlen", "window", (None, Index())),
]

_operand = ([1.0], np.ones((2, 3)), torch.eye(3).to_sparse())
_required = (*_operand, None)
_flag = (1, "yes", torch.tensor(True), torch.ones(2, 3), np.ones(2), None)
_number = ("x", [1.0], 1j, torch.ones(60, 90), 10**400, np.ones(500))
_of_type = {
    "Tensor?": (0.0, *_operand),
    "bool": _flag,
    "bool?": _flag[:-1],
    "Scalar": (*_number, None),
    "Scalar?": _number,
    "float": (*_number, None),
    "SymInt": (None, 2.0, "x", torch.ones(2)),
}
_others = dict(
    window=("big", 7, [1, 2], (1, 2, 3), (1.5, 0), (None, torch.ones(2)), torch.ones(2)),
    seed=(-1, 2**64, 1.0, "x", torch.tensor(1.0), torch.ones(2, dtype=torch.int64), np.ones(2)),
    mask=(0.0, [1.0], np.ones((2, 3)), torch.ones(2, 3)),  # callers give a ColumnMask
)


def _of(options):
    return {x.name: _others[x.name] if x.name in _others else _of_type[x.arguments.split()[0]] for x in options}


_results = dict(return_lse=_flag, return_max_logits=_flag)
# torch.compile takes any int for a length: a look at it would tie the graph to it.
_lengths = (-1, -(10**400))
_longest = ("x", 1.5, torch.tensor(1.5), torch.ones(60, 90), np.ones(2), [5], *_lengths)
REFUSED = {  # values of every argument
    "attention": dict(
        **dict.fromkeys(("q", "k", "v"), _required),
        **_of(ATTENTION[:SEQUENCES]),
        out=_operand,
        **_results,
    ),
    "attention_varlen": dict(
        **dict.fromkeys(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"), _required),
        **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), _longest),
        **dict.fromkeys(("seqused_q", "seqused_k"), _operand),
        **_of(ATTENTION[:SEQUENCES]),
        out=_operand,
        **_results,
    ),
    "attention_kvcache": dict(
        **dict.fromkeys(("q", "k_cache", "v_cache"), _required),
        cache_seqlens=("x", 1.5, [3, 4], np.ones((60, 90)), torch.eye(2).to_sparse(), None, *_lengths, 2**31),
        **dict.fromkeys(("block_table", "cache_batch_idx", "leftpad", "cu_seqlens_q"), _operand),
        **dict.fromkeys(("k_new", "v_new", "rotary_cos", "rotary_sin"), _operand),
        **_of(CACHE[:RETURN_LSE]) | {"batch_invariant": _flag[:-1]},  # None asks the mode
        out=_operand,
        **_results,
    ),
}
# What is known when the operator runs, which fake tensors do not.
WRONG_VALUES = [
    *(("attention_varlen", option, value) for option, values in ILLEGAL.items() for value in values),
    *(("attention", x.name, y) for x in SCORES if x.arguments.startswith("Scalar") for y in (math.nan, 1e39)),
    ("attention_kvcache", "num_splits", -1),
    ("attention_kvcache", "num_splits", -(2**70)),
    ("attention_varlen", "cu_seqlens_k", torch.tensor(3, dtype=torch.int32)),
    ("attention_kvcache", "cache_seqlens", torch.tensor(3, dtype=torch.int32)),
    ("attention", "sinks", torch.tensor(1.0)),
    ("attention", "q", torch.ones(16)),
    ("attention", "q", DENSE["q"].int()),
    ("attention", "v", torch.tensor(1.0)),
    ("attention", "alibi_slopes", torch.ones(5)),
    ("attention_varlen", "k", RAGGED["k"].bool()),
    ("attention_varlen", "seqused_k", torch.ones(3)),
    ("attention_kvcache", "q", torch.ones(2, 16)),
    ("attention_kvcache", "k_cache", torch.ones(2)),
    ("attention_kvcache", "leftpad", torch.ones(2)),
]


def ids(value):
    return value if isinstance(value, str) else value.__name__ if callable(value) else f"{type(value).__name__}"


def arguments(name, option, value):
    function, given = CALLS[name]
    given = {**given, "window": (4, 1), "softcap": 3.0, option: value}
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


@pytest.mark.parametrize("name, option", [(name, option) for name in REFUSED for option in REFUSED[name]])
def test_refused(name, option):
    values = REFUSED[name][option]
    compiled = values[len(option) % len(values)]  # alone, since a refusal takes 0.7 s there
    for value in values:
        function, given = arguments(name, option, value)
        kind, message = refusal(eager, function, given)
        assert message.startswith((f"{name}: {option} ", f"{name}: {option}[")) and (
            "expected" in message or "dense" in message
        )
        assert len(message) < 250 and "\n" not in message
        assert refusal(explained, function, given) == (kind, message)
        for way in TRACERS:
            if way is not under_compile or value is compiled:
                found = refusal(way, function, given)
                assert found[0] is kind and _without_reason(found[1]) == _without_reason(message), way


def test_every_argument_has_values_that_are_refused():
    of_fp8 = {"q_descale", "k_descale", "v_descale", "out_dtype"}  # see test_attention_fp8.py
    for name, (function, _) in CALLS.items():
        assert REFUSED[name].keys() == inspect.signature(function).parameters.keys() - of_fp8, name


@pytest.mark.parametrize(
    "name, next_function, options",
    [
        ("attention", "attend", ATTENTION),
        ("attention_varlen", "attend", ATTENTION),
        ("attention_kvcache", "call_kvcache", CACHE),
    ],
)
def test_a_function_hands_options_over_in_the_order_of_the_list(name, next_function, options, monkeypatch):
    function, given = CALLS[name]
    calls = []
    monkeypatch.setitem(function.__globals__, next_function, lambda *call: calls.append(call) or (None, None))
    named = {option.name: object() for option in options if option.name not in (*OTHERS, "mask")}
    function(**given | named | dict(mask=MASKS[name]))
    handed = calls[0][4]  # behind q, k and v, or the caches, operands and tables
    found = {option.name: x for option, x in zip(options, handed, strict=True)}
    for option in OTHERS:
        found.pop(option, None)
    assert found.pop("mask") is MASKS[name].ranges
    assert found == named


@pytest.mark.parametrize("check, options", [(_C.check_options, ATTENTION), (_C.check_cache_options, CACHE)])
def test_the_compiled_module_takes_options_in_the_order_of_the_list(check, options):
    defaults = tuple(option.default for option in options)
    check("it", defaults)
    for place, option in enumerate(options):
        if place >= TENSORS and option.name not in OTHERS:  # a call looks at the others
            with pytest.raises(TypeError, match=rf"^it: {option.name} is <object "):
                check("it", replaced(defaults, place, object()))
    with pytest.raises(TypeError, match=f"^it: expected {len(options)} options"):
        check("it", defaults[1:])


@pytest.mark.parametrize("name, options", [("attention", ATTENTION), ("attention_kvcache", CACHE)])
def test_defaults_are_those_of_the_list(name, options):
    parameters = inspect.signature(CALLS[name][0]).parameters
    defaults = {option.name: option.default for option in options if option.name not in OTHERS}
    if name == "attention_kvcache":
        defaults |= dict(causal=True, batch_invariant=None)
    assert {option: parameters[option].default for option in defaults} == defaults


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
