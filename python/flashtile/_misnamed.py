"""What PyTorch's scaled_dot_product_attention calls its arguments, and flashtile's own functions refuse by name: they
say which function takes them. That one has heads before the sequence, a mistake which no shape gives away."""

import inspect
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_EXPECTED = {"attn_mask": "causal, window, or sequences of attention_varlen", "is_causal": "causal"}


def hides_misnamed(function: Function) -> Function:
    """Takes these names out of the signature that people and tools see. The function itself stays as it is: parameters
    with a default cost a call a hundredth of a microsecond, where a wrapper or ``**kwargs`` would cost several."""
    signature = inspect.signature(function)
    shown = [parameter for name, parameter in signature.parameters.items() if name not in _EXPECTED]
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return function


def refuse_misnamed(function: str, attn_mask: object) -> NoReturn:
    """`attn_mask` is ... where it is not given, so that is_causal must be."""
    name = "is_causal" if attn_mask is ... else "attn_mask"
    raise TypeError(
        f"{function}: {name} is given, expected {_EXPECTED[name]}; flashtile.scaled_dot_product_attention takes "
        "PyTorch's arguments, with heads before the sequence"
    )
