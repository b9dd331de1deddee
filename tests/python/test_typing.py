"""What type checkers, `inspect.signature` and the stub of the compiled module say of the functions is what they are."""

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashtile
from flashtile import _C

ROOT = Path(__file__).parents[2]
FUNCTIONS = (flashtile.attention, flashtile.attention_varlen, flashtile.attention_kvcache)
by_name = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)


@pytest.mark.parametrize("command", ["mypy", f"basedpyright --pythonpath {sys.executable}"])
def test_type_checkers_accept(command):
    """All of the package, and what typed.py says of the public functions."""
    name, *options = command.split()
    tool = Path(sys.executable).parent / name
    if not tool.exists() and not os.environ.get("FLASHTILE_CI"):
        pytest.skip(f"needs {name}: pip install --group typing")
    checked = subprocess.run([tool, *options], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def stub():
    """The functions of _C.pyi."""
    tree = ast.parse(Path(_C.__file__).with_name("_C.pyi").read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_stub_has_the_functions_of_the_compiled_module():
    compiled = {name: f for name in dir(_C) if hasattr(f := getattr(_C, name), "__nb_signature__")}
    assert set(stub()) == set(compiled)
    for name, node in stub().items():
        arguments = [*node.args.args, *filter(None, [node.args.vararg, node.args.kwarg])]
        ((signature, *_),) = compiled[name].__nb_signature__
        found = ast.parse(signature.replace("\\0", "None") + ": ...").body[0]
        theirs = [*found.args.args, *filter(None, [found.args.vararg, found.args.kwarg])]
        assert [argument.arg for argument in arguments] == [argument.arg for argument in theirs], name


def overloads(function):
    """As the source has them, without what each says of the results that it asks for."""
    tree = ast.parse(inspect.getsource(inspect.getmodule(function)))
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function.__name__]
    for node in found:
        flags = node.args.kwonlyargs[-2:]
        assert [flag.arg for flag in flags] == ["return_lse", "return_max_logits"]
        for place, flag in zip((-2, -1), flags, strict=True):
            flag.annotation = node.args.kw_defaults[place] = ast.Constant(None)
    return found


@by_name
def test_overloads_differ_in_wanted_results_alone(function):
    *declared, implementation = overloads(function)
    assert len(declared) == 5
    refused = [argument.arg for argument in implementation.args.args[3:]]
    assert refused == ["attn_mask", "is_causal"]
    del implementation.args.args[3:], implementation.args.defaults[:]
    assert {ast.unparse(node.args) for node in declared} == {ast.unparse(implementation.args)}


@by_name
def test_a_signature_has_what_is_served(function):
    parameters = inspect.signature(function).parameters
    assert {"return_lse", "return_max_logits"} <= set(parameters) and "causal" in parameters
    assert not {"attn_mask", "is_causal"} & set(parameters)
    assert set(parameters) <= set(function.__doc__.replace(":", " ").split())


@by_name
@pytest.mark.parametrize(
    "wrong, reason",
    [
        ({"is_causal": True}, "is_causal is given, expected causal"),
        ({"is_causal": False}, "is_causal is given, expected causal"),
        ({"is_causal": None}, "is_causal is given, expected causal"),
        (
            {"attn_mask": None, "is_causal": True},
            "attn_mask is given, expected causal, window, or sequences of attention_varlen",
        ),
        ({"attn_mask": torch.ones(2, 1, 1, 8, dtype=torch.bool)}, "attn_mask is given, expected causal, window, or "),
    ],
    ids=["causal", "not causal", "none", "both", "mask"],
)
def test_pytorchs_arguments_are_refused_with_the_function_that_takes_them(function, wrong, reason):
    q, needed = torch.ones(2, 8, 4, 16), {}
    if function is not flashtile.attention:
        table = torch.tensor([0, 3, 8], dtype=torch.int32)
        needed = {"cu_seqlens_q": table, "cu_seqlens_k": table, "cache_seqlens": 3}
        needed = {name: x for name, x in needed.items() if name in inspect.signature(function).parameters}
    with pytest.raises(TypeError) as refusal:
        function(q, q, q, **needed, **wrong)
    said = str(refusal.value)
    assert said.startswith(f"{function.__name__}: {reason}") and "\n" not in said
    assert "flashtile.scaled_dot_product_attention takes PyTorch's arguments" in said


def test_another_unknown_argument_is_pythons_to_refuse():
    q = torch.ones(2, 8, 4, 16)
    with pytest.raises(TypeError, match="unexpected keyword argument 'softmax_scale'"):
        flashtile.attention(q, q, q, softmax_scale=1.0)
