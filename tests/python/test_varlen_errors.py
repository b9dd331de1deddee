"""What attention_varlen refuses, by the look of its arguments and by what tables hold; the message says what was
expected."""

import pytest
import ragged
import torch
from cached import numbers
from cases import DEVICE_PARAMS, F16, F32
from ragged import Ragged

import flashtile
from flashtile import _C
from flashtile._options import attention_options
from flashtile.masks import ColumnMask


def test_forward_mode_is_refused():
    case = Ragged("transforms", dtype=F32)
    (q, k, v), tables = case.tensors(), case.tables()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(k, k)
        with pytest.raises(NotImplementedError, match=r"^attention_varlen: k carries a forward-mode tangent"):
            flashtile.attention_varlen(q, dual, v, **tables)
        dual = torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2))
        with pytest.raises(NotImplementedError, match=r"^attention_varlen: alibi_slopes carries a forward-mode"):
            flashtile.attention_varlen(q, k, v, alibi_slopes=dual, **tables)
    slopes = torch.ones(2, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"^attention_varlen: alibi_slopes requires grad"):
        flashtile.attention_varlen(q, k, v, alibi_slopes=slopes, **tables)


def ones(*shape):
    return lambda x: torch.ones(shape, device=x.device)


# name: (what arguments become: values, or functions of good ones, exception, what the message holds)
BAD = {
    "q of rank 4": (
        dict(q=lambda x: x[None]),
        ValueError,
        r"q has shape \(1, 5, 4, 64\), expected 3 dimensions = \(T_q, H",
    ),
    "k of rank 4": (
        dict(k=lambda x: x[None]),
        ValueError,
        r"k has shape \(1, 7, 2, 64\), expected 3 dimensions = \(T_k, H",
    ),
    "v of fewer rows": (
        dict(v=lambda x: x[1:]),
        ValueError,
        r"v has shape \(6, 2, 64\), expected \(7, 2, 64\) = \(T_k, H_k, D_v\)",
    ),
    "k of another D": (
        dict(k=lambda x: x[..., :32]),
        ValueError,
        r"k has shape \(7, 2, 32\), expected \(7, 2, 64\) = \(T_k, H_k, D\)",
    ),
    "H_q no multiple of H_k": (dict(q=lambda x: x[:, :3]), ValueError, "q has H_q = 3 heads, expected a multiple of"),
    "D no multiple of 8": (
        dict(q=lambda x: x[..., :60], k=lambda x: x[..., :60]),
        ValueError,
        r"q has shape \(5, 4, 60\), expected D to be a multiple of 8",
    ),
    "q of int32": (dict(q=torch.Tensor.int), TypeError, "q has dtype int32, expected float32, float16 or bfloat16"),
    "k of another dtype": (dict(k=torch.Tensor.bfloat16), TypeError, "k has dtype bfloat16, expected float16, as q"),
    "no table": (dict(cu_seqlens_q=None), TypeError, "cu_seqlens_q is of type NoneType, expected a torch.Tensor"),
    "no table of keys": (
        dict(cu_seqlens_k=None),
        TypeError,
        "cu_seqlens_k is of type NoneType, expected a torch.Tensor",
    ),
    "a list": (dict(cu_seqlens_q=[0, 2, 5]), TypeError, "cu_seqlens_q is of type list, expected a torch.Tensor"),
    "int64": (dict(cu_seqlens_q=torch.Tensor.long), TypeError, "cu_seqlens_q has dtype torch.int64, expected int32"),
    "int64 of keys": (
        dict(cu_seqlens_k=torch.Tensor.long),
        TypeError,
        "cu_seqlens_k has dtype torch.int64, expected int32",
    ),
    "float32": (dict(cu_seqlens_k=torch.Tensor.float), TypeError, "cu_seqlens_k has dtype float32, expected int32"),
    "used of int64": (dict(seqused_q=torch.Tensor.long), TypeError, "seqused_q has dtype torch.int64, expected int32"),
    "used of bool": (dict(seqused_k=torch.Tensor.bool), TypeError, "seqused_k has dtype torch.bool, expected int32"),
    "a list of used": (dict(seqused_k=[4, 3]), TypeError, "seqused_k is of type list, expected a torch.Tensor"),
    "rank 2": (
        dict(cu_seqlens_q=lambda x: x[None]),
        ValueError,
        r"cu_seqlens_q has shape \(1, 3\), expected 1 dimensions = \(B \+ 1\)",
    ),
    "rank 0": (dict(cu_seqlens_q=lambda x: x[0]), ValueError, r"cu_seqlens_q has shape \(\), expected 1 dimensions"),
    "no numbers": (
        dict(cu_seqlens_q=numbers()),
        ValueError,
        r"cu_seqlens_q has shape \(0,\), expected .*1 .*= \(B \+ 1\)",
    ),
    "other sequences of keys": (
        dict(cu_seqlens_k=numbers(0, 7)),
        ValueError,
        r"cu_seqlens_k has shape \(2,\), expected \(3,\) = \(B \+ 1\)",
    ),
    "used of other sequences": (
        dict(seqused_q=numbers(2, 3, 0)),
        ValueError,
        r"seqused_q has shape \(3,\), expected \(2,\) = \(B\)",
    ),
    "used keys of rank 2": (
        dict(seqused_k=lambda x: x[None]),
        ValueError,
        r"seqused_k has shape \(1, 2\), expected 1 dimensions = \(B\)",
    ),
    "a table with gaps": (
        dict(cu_seqlens_q=lambda x: x.repeat_interleave(2)[::2]),
        ValueError,
        r"cu_seqlens_q has strides \(2,\), expected a contiguous tensor",
    ),
    "used with gaps": (
        dict(seqused_k=lambda x: x.repeat_interleave(2)[::2]),
        ValueError,
        r"seqused_k has strides \(2,\), expected a contiguous tensor",
    ),
    "slopes of other sequences": (
        dict(alibi_slopes=ones(3, 4)),
        ValueError,
        r"alibi_slopes has shape \(3, 4\), expected \(2, 4\) = \(B, H_q\)",
    ),
    "sinks of other heads": (
        dict(sinks=ones(2)),
        ValueError,
        r"sinks has shape \(2,\), expected \(4,\) = \(H_q\)",
    ),
    "window of an int": (dict(window=3), TypeError, "window is 3, expected None or a tuple"),
    "negative longest": (dict(max_seqlen_q=-1), ValueError, "max_seqlen_q is -1, expected an int of at least 0"),
    "longest of floats": (dict(max_seqlen_k=3.0), TypeError, "max_seqlen_k is 3.0, expected an int of at least 0"),
    "longest is text": (dict(max_seqlen_k="7"), TypeError, "max_seqlen_k is '7', expected an int of at least 0"),
    "longest of float32": (
        dict(max_seqlen_q=ones()),
        TypeError,
        "max_seqlen_q has dtype torch.float32, expected an int of at least 0",
    ),
}
# What only the CPU's tables are known to hold.
BAD_VALUES = {
    "first not 0": (dict(cu_seqlens_q=numbers(1, 2, 5)), "cu_seqlens_q has 1 at index 0, expected 0"),
    "first of keys not 0": (dict(cu_seqlens_k=numbers(-1, 2, 5)), "cu_seqlens_k has -1 at index 0, expected 0"),
    "decreasing": (dict(cu_seqlens_q=numbers(0, 5, 4)), "cu_seqlens_q has 4 at index 2, expected at least 5"),
    "decreasing keys": (dict(cu_seqlens_k=numbers(0, -3, 4)), "cu_seqlens_k has -3 at index 1, expected at least 0"),
    "beyond T_q": (dict(cu_seqlens_q=numbers(0, 2, 6)), "cu_seqlens_q has 6 at index 2, expected at most 5 = T_q"),
    "beyond T_k": (
        dict(cu_seqlens_k=numbers(0, 2**31 - 1, 7)),
        "cu_seqlens_k has 2147483647 at index 1, expected at most 7",
    ),
    "negative used": (dict(seqused_q=numbers(2, -1)), "seqused_q has -1 at index 1, expected from 0 to .* 3"),
    "more used than there are": (dict(seqused_q=numbers(3, 3)), "seqused_q has 3 at index 0, expected from 0 to .* 2"),
    "more keys used": (dict(seqused_k=numbers(4, 4)), "seqused_k has 4 at index 1, expected from 0 to .* 3"),
    "not 0 without sequences": (
        dict(cu_seqlens_q=numbers(3), cu_seqlens_k=numbers(0), seqused_q=None, seqused_k=None),
        "cu_seqlens_q has 3 at index 0, expected 0",
    ),
}


def arguments(changes, device):
    """Of two sequences, with 2 and 3 queries, and 4 and 3 keys."""
    shapes = dict(q=(5, 4, 64), k=(7, 2, 64), v=(7, 2, 64))
    good = {name: torch.randn(shape).to(device, F16) for name, shape in shapes.items()}
    tables = dict(
        cu_seqlens_q=numbers(0, 2, 5),
        cu_seqlens_k=numbers(0, 4, 7),
        seqused_q=numbers(2, 3),
        seqused_k=numbers(4, 3),
    )
    good |= {name: table(good["q"]) for name, table in tables.items()}
    return good | {name: x(good.get(name, good["q"])) if callable(x) else x for name, x in changes.items()}


def assert_refused(changes, exception, message, device):
    with pytest.raises(exception, match=f"^attention_varlen: {message}") as raised:
        flashtile.attention_varlen(**arguments(changes, device))
    assert raised.type is exception


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_bad_input(name, device):
    assert_refused(*BAD[name], device)


@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_values(name):
    changes, message = BAD_VALUES[name]
    assert_refused(changes, ValueError, message, "cpu")


@pytest.mark.parametrize("name", ["q", *ragged.TABLES[:3]])
def test_bad_input_that_requires_grad(name):
    """Nothing is kept for a backward that never comes; the message is the same."""
    given = arguments({name: torch.Tensor.long}, "cpu")
    given["k"].requires_grad_()
    with pytest.raises(TypeError, match=f"^attention_varlen: {name} has dtype torch.int64, expected "):
        flashtile.attention_varlen(**given, return_lse=True)


def test_tables_are_keywords_and_required():
    given = arguments({}, "cpu")
    with pytest.raises(TypeError, match="positional"):
        flashtile.attention_varlen(*given.values())
    del given["cu_seqlens_k"]
    with pytest.raises(TypeError, match="cu_seqlens_k"):
        flashtile.attention_varlen(**given)


# The compiled module is checked too: it must not write through what Python would never hand it.
def test_a_mask_of_other_sequences():
    q = torch.ones(6, 2, 8)
    mask = ColumnMask.concatenate([ColumnMask.causal(3, 3)] * 2)
    whole = torch.tensor([0, 6], dtype=torch.int32)
    message = r": mask is ColumnMask\(B=2, .*, expected one of as many sequences as cu_seqlens_q, of shape \(2,\)"
    with pytest.raises(ValueError, match=f"^attention_varlen{message}"):
        flashtile.attention_varlen(q, q, q, cu_seqlens_q=whole, cu_seqlens_k=whole, mask=mask)
    with pytest.raises(ValueError, match=f"^max_logits{message}"):
        flashtile.max_logits(q, q, cu_seqlens_q=whole, cu_seqlens_k=whole, mask=mask)


@pytest.mark.parametrize("missing", ["dout", "out", "lse", "dk"])
def test_backward_needs_what_the_forward_wrote(missing):
    given = arguments({}, "cpu")
    out, lse = flashtile.attention_varlen(**given, return_lse=True)
    q, k, v, *tables = given.values()
    tensors = dict(dout=out, dlse=None, q=q, k=k, v=v, out=out, lse=lse)
    gradients = {f"d{name}": torch.full_like(given[name], 3) for name in "qkv"}
    tensors |= gradients
    tensors[missing] = tensors[missing][:1]
    options = attention_options(deterministic=False, sequences=tuple(tables))
    with pytest.raises(ValueError, match=f"^attention_varlen backward: {missing} has shape"):
        _C.backward(*tensors.values(), None, options)
    assert all((x == 3).all() for x in gradients.values()), "something was written"


@pytest.mark.parametrize("tables", [(), (None,) * 3, [None] * 4, "four"], ids=str)
def test_the_module_wants_all_tables(tables):
    q, k, v, *_ = arguments({}, "cpu").values()
    with pytest.raises(TypeError, match=r"^attention_varlen: expected 4 tables of sequences"):
        _C.forward(q, k, v, attention_options(sequences=tables))
