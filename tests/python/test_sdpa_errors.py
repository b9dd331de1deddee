"""flashtile.scaled_dot_product_attention: what is refused, by whom, and what may take PyTorch's place."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import BF16, F32
from compare import assert_bitwise
from test_sdpa import _nothing_said, served, tensors  # noqa: F401
from torch.nn.attention.bias import causal_upper_left

import flashtile
from flashtile.sdpa import FallbackWarning

F64 = torch.float64
sdpa = flashtile.scaled_dot_product_attention


ILLEGAL = {
    "no tensor": lambda q, k, v, f: f([1.0], k, v),
    "no tensor, with a mask": lambda q, k, v, f: f([1.0], k, v, torch.ones(5, 7)),
    "dtypes": lambda q, k, v, f: f(q.half(), k, v),
    "mask's size": lambda q, k, v, f: f(q, k, v, torch.ones(2, 1, 1, 6, dtype=torch.bool)),
    "mask's rank": lambda q, k, v, f: f(q, k, v, torch.ones(7, dtype=torch.bool)),
    "mask's dtype": lambda q, k, v, f: f(q, k, v, torch.ones(2, 1, 1, 7, dtype=torch.int32)),
    "bias and causal": lambda q, k, v, f: f(q, k, v, causal_upper_left(5, 7), is_causal=True),
    "probability": lambda q, k, v, f: f(q, k, v, dropout_p=1.5),
    "one dimension": lambda q, k, v, f: f(q[0, 0, 0], k, v),
    "devices": lambda q, k, v, f: f(q, k.to("meta"), v),
}


@pytest.mark.parametrize("call", ILLEGAL.values(), ids=ILLEGAL)
def test_errors_are_those_of_pytorch(call):
    with pytest.raises(Exception) as theirs:
        call(*tensors(), F.scaled_dot_product_attention)
    with pytest.raises(theirs.type) as ours:
        call(*tensors(), served)
    assert str(ours.value) == str(theirs.value) and not isinstance(ours.value, Warning)


# What PyTorch 2.13 reads past the end of, divides by zero for, or answers at random; and what it refuses too.
MISFITS = {
    "short values": (
        [(2, 4, 5, 16), (2, 4, 70, 16), (2, 4, 7, 16)],
        False,
        r"value has .*, expected \(\.\.\., H_k, 70, D_v",
    ),
    "long values": (
        [(2, 4, 5, 16), (2, 4, 7, 16), (2, 4, 70, 16)],
        False,
        r"value has .*, expected \(\.\.\., H_k, 7, D_v",
    ),
    "of one head": ([(5, 16), (7, 16), (6, 16)], False, r"value has shape \(6, 16\), expected \(\.\.\., H_k, 7, D_v\)"),
    "no values": ([(2, 4, 5, 16), (2, 4, 7, 16), (2, 4, 0, 16)], False, "value has"),
    "narrow queries": (
        [(2, 4, 5, 8), (2, 4, 7, 16), (2, 4, 7, 16)],
        False,
        r"key has .*, expected \(\.\.\., H_k, S_k, 8\)",
    ),
    "wide queries without keys": ([(2, 4, 5, 24), (2, 4, 0, 16), (2, 4, 0, 16)], False, "key has"),
    "no queries": ([(2, 4, 0, 8), (2, 4, 7, 16), (2, 4, 7, 16)], False, "key has"),
    "heads": ([(2, 4, 5, 16), (2, 2, 7, 16), (2, 2, 7, 16)], False, "expected leading dimensions that broadcast"),
    "heads of values": ([(2, 4, 0, 16), (2, 4, 7, 16), (2, 3, 7, 16)], False, "expected leading dimensions that"),
    "groups": ([(2, 4, 5, 16), (2, 3, 7, 16), (2, 3, 7, 16)], True, "expected H_q a multiple of H_k"),
    "groups of values": ([(2, 4, 5, 16), (2, 2, 7, 16), (2, 3, 7, 16)], True, "expected H_q a multiple of H_k"),
    "groups of no heads": ([(2, 4, 5, 16), (2, 0, 7, 16), (2, 4, 7, 16)], True, "expected H_q a multiple of H_k"),
    "batches": ([(3, 4, 5, 16), (2, 4, 7, 16), (2, 4, 7, 16)], False, "that broadcast"),
    "batches, grouped": ([(3, 4, 5, 16), (2, 2, 7, 16), (2, 2, 7, 16)], True, "that broadcast"),
    "five dimensions": ([(2, 3, 4, 5, 16), (2, 2, 4, 7, 16), (2, 2, 4, 7, 16)], False, "that broadcast"),
}


@pytest.mark.parametrize("dtype", [F32, torch.float64])
@pytest.mark.parametrize("shapes, enable_gqa, message", MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_is_refused(shapes, enable_gqa, message, dtype):
    """PyTorch does not get to see it, whether the sizes are the reason or, as float64, something else."""
    inputs = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    with pytest.raises(ValueError, match=f"^scaled_dot_product_attention: .*{message}") as refusal:
        sdpa(*inputs, enable_gqa=enable_gqa)
    assert "\n" not in str(refusal.value)


def test_what_broadcasts_is_left_to_pytorch():
    for shapes, enable_gqa in (
        ([(2, 4, 5, 16), (4, 7, 16), (1, 4, 7, 16)], False),
        ([(4, 5, 16), (2, 4, 7, 16), (7, 16)], False),
        ([(2, 4, 5, 16), (1, 2, 7, 16), (2, 1, 7, 16)], True),
    ):
        inputs = [torch.randn(shape) for shape in shapes]
        flashtile.sdpa._said.clear()
        with pytest.warns(FallbackWarning, match="have shapes"):
            out = sdpa(*inputs, enable_gqa=enable_gqa)
        assert_bitwise(out, F.scaled_dot_product_attention(*inputs, enable_gqa=enable_gqa))


class _Duck:
    def __bool__(self):
        return True

    def __float__(self):
        return 0.5


NO_NUMBERS = ["yes", None, [0.5], Fraction(1, 2), Decimal("0.5"), 1j, np.array(0.5), torch.ones(1), _Duck()]
NO_NUMBERS.append(torch.tensor(0.5, requires_grad=True))
NO_BOOLS = [1, 0, 1.0, "yes", None, np.True_, np.array(True), torch.tensor(True), _Duck()]
WRONG = [(name, x) for name in ("is_causal", "enable_gqa") for x in NO_BOOLS]
WRONG += [(name, x) for name in ("dropout_p", "scale") for x in NO_NUMBERS if name == "dropout_p" or x is not None]
WRONG += [("attn_mask", x) for x in (True, 1, "yes", [[True]], np.ones((5, 7), dtype=bool))]


@pytest.mark.parametrize(
    "name, value", WRONG, ids=[f"{name} {type(x).__name__} {n}" for n, (name, x) in enumerate(WRONG)]
)
def test_types_are_those_of_pytorch(name, value):
    with pytest.raises(TypeError) as theirs:
        F.scaled_dot_product_attention(*tensors(), **{name: value})
    with pytest.raises(TypeError, match=f"'{name}'") as ours:
        served(*tensors(), **{name: value})
    assert str(ours.value).replace(" (position 4)", "") == str(theirs.value)


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), torch.tensor(0.5), True, 1, np.int64(1), np.True_])
def test_numbers_of_every_kind(value):
    inputs = tensors()
    assert_bitwise(served(*inputs, scale=value), served(*inputs, scale=float(value)))
    torch.manual_seed(1)
    dropped = served(*inputs, dropout_p=value / 4)
    torch.manual_seed(1)
    assert_bitwise(dropped, served(*inputs, dropout_p=float(value / 4)))


def test_in_the_place_of_pytorchs_function(monkeypatch):
    inputs, layer = tensors(dtype=F64), torch.nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
    x = torch.randn(2, 9, 32)
    expected = F.scaled_dot_product_attention(*inputs), layer(x)
    monkeypatch.setattr(F, "scaled_dot_product_attention", sdpa)
    with pytest.warns(FallbackWarning, match="float64"):
        assert_bitwise(F.scaled_dot_product_attention(*inputs), expected[0])
    torch.testing.assert_close(layer(x), expected[1])
    with pytest.raises(RuntimeError, match="the same dtype"):  # an illegal call
        F.scaled_dot_product_attention(inputs[0].half(), *inputs[1:])


@pytest.mark.parametrize("shape", [(5, 7), (1, 1), (2, 1, 1, 7)])
def test_float32_biases_of_float64_scores(shape):
    """Which PyTorch 2.13 takes, and reads as float64 on the CPU."""
    inputs, bias = tensors(dtype=F64), torch.randn(shape)
    with pytest.warns(FallbackWarning, match="query has dtype"):
        out = sdpa(*inputs, bias)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(*inputs, bias.double()))


def test_more_rows_than_tables_count_are_refused():
    q, k = (torch.empty(2**20, seqlen, 1, 8, device="meta") for seqlen in (1, 2**11))
    with pytest.raises(NotImplementedError, match=", expected "):
        flashtile.sdpa._attend_to(torch.empty(k.shape[:2], dtype=torch.bool, device="meta"), q, k, k, {})


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_autocast_casts_no_integers(dtype):
    query, key, value = tensors()
    for inputs in ((query, key, value.to(dtype)), [x.to(dtype) for x in (query, key, value)]):
        with torch.autocast("cpu", BF16):
            with pytest.raises(Exception) as theirs:
                F.scaled_dot_product_attention(*inputs)
            with pytest.raises(theirs.type):
                served(*inputs)
