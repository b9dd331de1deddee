"""What attention_kvcache refuses by the look of its arguments: nothing is written then, and the message says what was
expected."""

import math

import pytest
import torch
from cached import REMOVED, SHARED, arguments, assert_refused, numbers
from cases import DEVICE_PARAMS

import flashtile
from flashtile import _C
from flashtile._options import CACHE


def misaligned(x):
    """Neither the address nor a stride is a multiple of 16 bytes."""
    return torch.nn.functional.pad(x, (1, 2))[..., 1:-2]


# name: (base, what arguments become: values, or functions of good ones, exception, what the message holds)
BAD = {
    "q of rank 3": (
        "dense",
        dict(q=lambda x: x[0]),
        ValueError,
        r"q has shape \(3, 4, 64\), expected 4 dimensions = \(B, S_q",
    ),
    "ragged q of rank 4": (
        "ragged",
        dict(q=lambda x: x[None]),
        ValueError,
        r"q has shape .*, expected 3 dimensions = \(T_q, H",
    ),
    "q is a list": ("dense", dict(q=[1.0]), TypeError, "q is of type list, expected a torch.Tensor"),
    "q is a list, one length": ("dense", dict(q=[1.0], cache_seqlens=3), TypeError, "q is of type list, expected"),
    "q of int32": ("dense", dict(q=torch.Tensor.int), TypeError, "q has dtype int32, expected float32, float16 or"),
    "caches of rank 3": (
        "dense",
        dict(k_cache=lambda x: x[0]),
        ValueError,
        r"k_cache has shape .*, expected 4 dimensions = \(B_cache",
    ),
    "pages of rank 3": (
        "paged",
        dict(v_cache=lambda x: x[0]),
        ValueError,
        r"v_cache has shape .*, expected 4 dimensions = \(pages",
    ),
    "k_cache of another D": (
        "dense",
        dict(k_cache=lambda x: x[..., :32]),
        ValueError,
        r"k_cache has shape \(4, 50, 2, 32\), expected \(4, 50, 2, 64\) = \(B_cache, S_cache, H_k, D\)",
    ),
    "v_cache of fewer rows": (
        "paged",
        dict(v_cache=lambda x: x[:, :9]),
        ValueError,
        r"v_cache has shape \(12, 9, 2, 64\), expected \(12, 10, 2, 64\) = \(pages, page_size, H_k, D_v\)",
    ),
    "k_cache of another dtype": (
        "dense",
        dict(k_cache=torch.Tensor.bfloat16),
        TypeError,
        "k_cache has dtype bfloat16, expected float16, as q",
    ),
    "v_cache with gaps": (
        "dense",
        dict(v_cache=lambda x: x.repeat_interleave(2, 3)[..., ::2]),
        ValueError,
        "v_cache has stride 2 in its last dimension, expected 1",
    ),
    "no cache": ("dense", dict(v_cache=None), TypeError, "v_cache is of type NoneType, expected a torch.Tensor"),
    "H_q no multiple of H_k": (
        "dense",
        dict(q=lambda x: x[:, :, :3]),
        ValueError,
        "q has H_q = 3 heads, expected a multiple of H_k = 2",
    ),
    "D no multiple of 8": (
        "dense",
        dict(q=lambda x: x[..., :60], k_cache=lambda x: x[..., :60]),
        ValueError,
        r"q has shape \(2, 3, 4, 60\), expected D to be a multiple of 8",
    ),
    "fewer entries than sequences": (
        "dense",
        dict(k_cache=lambda x: x[:1], v_cache=lambda x: x[:1]),
        ValueError,
        r"k_cache has shape \(1, 50, 2, 64\), expected B_cache of at least B = 2",
    ),
    "pages of no rows": (
        "paged",
        dict(k_cache=lambda x: x[:, :0], v_cache=lambda x: x[:, :0]),
        ValueError,
        r"k_cache has shape \(12, 0, 2, 64\), expected pages of at least one row",
    ),
    "no lengths": (
        "dense",
        dict(cache_seqlens=None),
        TypeError,
        "cache_seqlens is None, expected a torch.Tensor or an int",
    ),
    "a length of a float": (
        "dense",
        dict(cache_seqlens=3.0),
        TypeError,
        "cache_seqlens is 3.0, expected a torch.Tensor or an int",
    ),
    "a list of lengths": (
        "dense",
        dict(cache_seqlens=[20, 30]),
        TypeError,
        r"cache_seqlens is \[20, 30\], expected a torch.Tensor or an int",
    ),
    "a negative length": (
        "dense",
        dict(cache_seqlens=-1),
        ValueError,
        r"cache_seqlens is -1, expected an int from 0 to 2\^31 - 1",
    ),
    "a huge length": (
        "dense",
        dict(cache_seqlens=2**31),
        ValueError,
        r"cache_seqlens is 2147483648, expected an int from 0 to",
    ),
    "lengths of int64": (
        "dense",
        dict(cache_seqlens=torch.Tensor.long),
        TypeError,
        "cache_seqlens has dtype torch.int64, expected int32",
    ),
    "lengths of float32": (
        "dense",
        dict(cache_seqlens=torch.Tensor.float),
        TypeError,
        "cache_seqlens has dtype float32, expected int32",
    ),
    "other sequences": (
        "dense",
        dict(cache_seqlens=numbers(20)),
        ValueError,
        r"cache_seqlens has shape \(1,\), expected \(2,\) = \(B\)",
    ),
    "lengths with gaps": (
        "dense",
        dict(cache_seqlens=lambda x: x.repeat_interleave(2)[::2]),
        ValueError,
        r"cache_seqlens has strides \(2,\), expected a contiguous tensor",
    ),
    "no v_new": ("dense", dict(v_new=REMOVED), ValueError, "v_new is missing, expected a tensor, as k_new is given"),
    "no k_new": ("dense", dict(k_new=REMOVED), ValueError, "k_new is missing, expected a tensor, as v_new is given"),
    "k_new of other heads": (
        "dense",
        dict(k_new=lambda x: x[:, :, :1]),
        ValueError,
        r"k_new has shape \(2, 3, 1, 64\), expected \(2, 3, 2, 64\) = \(B, S_new, H_k, D\)",
    ),
    "v_new of fewer rows": (
        "dense",
        dict(v_new=lambda x: x[:, :2]),
        ValueError,
        r"v_new has shape \(2, 2, 2, 64\), expected \(2, 3, 2, 64\) = \(B, S_new, H_k, D_v\)",
    ),
    "ragged k_new of other rows": (
        "ragged",
        dict(k_new=lambda x: x[:5]),
        ValueError,
        r"k_new has shape \(5, 2, 64\), expected \(6, 2, 64\) = \(T_q, H_k, D\)",
    ),
    "ragged v_new of rank 4": (
        "ragged",
        dict(v_new=lambda x: x[None]),
        ValueError,
        r"v_new has shape .* = \(T_q, H_k, D_v\)",
    ),
    "k_new of float32": (
        "dense",
        dict(k_new=torch.Tensor.float),
        TypeError,
        "k_new has dtype float32, expected float16, as q",
    ),
    "pages and entries": (
        "paged",
        dict(cache_batch_idx=numbers(0, 1)),
        ValueError,
        "cache_batch_idx is given, expected none with a block_table",
    ),
    "a table of rank 1": (
        "paged",
        dict(block_table=lambda x: x[0]),
        ValueError,
        r"block_table has shape \(5,\), expected 2 dimensions = \(B, pages",
    ),
    "a table of other sequences": (
        "paged",
        dict(block_table=lambda x: x[:1]),
        ValueError,
        r"block_table has shape \(1, 5\), expected \(2, 5\) = \(B, pages of a sequence\)",
    ),
    "a table of int64": (
        "paged",
        dict(block_table=torch.Tensor.long),
        TypeError,
        "block_table has dtype torch.int64, expected int32",
    ),
    "a table with gaps": (
        "paged",
        dict(block_table=lambda x: x.repeat_interleave(2, 1)[:, ::2]),
        ValueError,
        "block_table has stride 2 in its last dimension, expected 1",
    ),
    "a list of pages": (
        "paged",
        dict(block_table=[[0]]),
        TypeError,
        "block_table is of type list, expected a torch.Tensor",
    ),
    "entries of int64": (
        "indexed",
        dict(cache_batch_idx=torch.Tensor.long),
        TypeError,
        "cache_batch_idx has dtype torch.int64, expected int32",
    ),
    "entries of other sequences": (
        "indexed",
        dict(cache_batch_idx=numbers(1)),
        ValueError,
        r"cache_batch_idx has shape \(1,\), expected \(2,\) = \(B\)",
    ),
    "padding of int64": (
        "dense",
        dict(leftpad=torch.Tensor.long),
        TypeError,
        "leftpad has dtype torch.int64, expected int32",
    ),
    "padding of other sequences": (
        "dense",
        dict(leftpad=numbers(0, 0, 0)),
        ValueError,
        r"leftpad has shape \(3,\), expected \(2,\) = \(B\)",
    ),
    "no sines": (
        "dense",
        dict(rotary_sin=REMOVED),
        ValueError,
        "rotary_sin is missing, expected a tensor, as rotary_cos is given",
    ),
    "no cosines": (
        "dense",
        dict(rotary_cos=REMOVED),
        ValueError,
        "rotary_cos is missing, expected a tensor, as rotary_sin is given",
    ),
    "R no multiple of 16": (
        "dense",
        dict(rotary_cos=lambda x: x[:, :12]),
        ValueError,
        r"rotary_cos has shape \(60, 12\), expected R to be a multiple of 16",
    ),
    "R above D": (
        "dense",
        dict(rotary_cos=lambda x: x.repeat(1, 3)),
        ValueError,
        r"rotary_cos has shape \(60, 48\), expected R to be a multiple of 16 from 16 to D = 64",
    ),
    "other sines": (
        "dense",
        dict(rotary_sin=lambda x: x[:, :8]),
        ValueError,
        r"rotary_sin has shape \(60, 8\), expected \(60, 16\) = \(positions, R / 2\)",
    ),
    "cosines of float32": (
        "dense",
        dict(rotary_cos=torch.Tensor.float),
        TypeError,
        "rotary_cos has dtype float32, expected float16, as q",
    ),
    "no positions": (
        "dense",
        dict(rotary_cos=lambda x: x[:0], rotary_sin=lambda x: x[:0]),
        ValueError,
        "rotary_cos has shape .*, expected at least one position",
    ),
    "one cache for both": (
        "dense",
        dict(v_cache=SHARED),
        ValueError,
        "v_cache shares memory with k_cache, expected a cache of its own memory, as k_new is given",
    ),
    "pages for both": (
        "paged",
        dict(v_cache=SHARED),
        ValueError,
        "v_cache shares memory with k_cache, expected a cache",
    ),
    "interleaved of an int": (
        "dense",
        dict(rotary_interleaved=1),
        TypeError,
        "rotary_interleaved is 1, expected True or False",
    ),
    "begins of int64": (
        "ragged",
        dict(cu_seqlens_q=torch.Tensor.long),
        TypeError,
        "cu_seqlens_q has dtype torch.int64, expected int32",
    ),
    "begins of rank 2": (
        "ragged",
        dict(cu_seqlens_q=lambda x: x[None]),
        ValueError,
        r"cu_seqlens_q has shape \(1, 3\), expected 1 dimensions",
    ),
    "begins of rank 0, one length": (
        "ragged",
        dict(cu_seqlens_q=lambda x: x[0], cache_seqlens=3),
        ValueError,
        r"cu_seqlens_q has shape \(\), expected 1 dimensions",
    ),
    "no begins": (
        "ragged",
        dict(cu_seqlens_q=numbers()),
        ValueError,
        r"cu_seqlens_q has shape \(0,\), expected .*1 .*= \(B \+ 1\)",
    ),
    "causal of an int": ("dense", dict(causal=1), TypeError, "causal is 1, expected True or False"),
    "window of an int": ("dense", dict(window=3), TypeError, "window is 3, expected None or a tuple"),
    "negative softcap": ("dense", dict(softcap=-1.0), ValueError, "softcap is -1, expected a number of at least 0"),
    "scale is text": ("dense", dict(scale="1"), TypeError, "scale is '1', expected a number or None"),
    "infinite scale": ("dense", dict(scale=math.inf), ValueError, "scale is inf, expected a finite float32 number"),
    "slopes of other heads": (
        "dense",
        dict(alibi_slopes=lambda x: torch.ones(3, device=x.device)),
        ValueError,
        r"alibi_slopes has shape \(3,\), expected \(4,\) = \(H_q\)",
    ),
    "slopes of other sequences": (
        "ragged",
        dict(alibi_slopes=lambda x: torch.ones(3, 4, device=x.device)),
        ValueError,
        r"alibi_slopes has shape \(3, 4\), expected \(2, 4\) = \(B, H_q\)",
    ),
    "sinks of other heads": (
        "dense",
        dict(sinks=lambda x: torch.ones(2, device=x.device)),
        ValueError,
        r"sinks has shape \(2,\), expected \(4,\) = \(H_q\)",
    ),
    "negative splits": ("dense", dict(num_splits=-1), ValueError, "num_splits is -1, expected at least 0"),
    "splits of a float": ("dense", dict(num_splits=2.0), TypeError, "num_splits is 2.0, expected an int of at least 0"),
    "splits of None": ("dense", dict(num_splits=None), TypeError, "num_splits is None, expected an int of at least 0"),
    "splits of an invariant call": (
        "dense",
        dict(num_splits=2, batch_invariant=True),
        ValueError,
        "num_splits is 2, expected 0 with batch_invariant",
    ),
    "invariant is text": (
        "dense",
        dict(batch_invariant="yes"),
        TypeError,
        "batch_invariant is 'yes', expected True or False",
    ),
    "return_lse of an int": ("dense", dict(return_lse=1), TypeError, "return_lse is 1, expected True or False"),
}


@pytest.mark.parametrize("base", ["dense", "paged", "indexed", "ragged"])
@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_the_good_arguments_are_good(base, device):
    flashtile.attention_kvcache(**arguments(base, {}, device))


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_bad_input(name, device):
    assert_refused(*BAD[name], device)


def test_all_but_the_tensors_are_keywords():
    given = arguments("dense", {}, "cpu")
    with pytest.raises(TypeError, match="keyword-only argument: 'cache_seqlens'"):
        flashtile.attention_kvcache(given["q"], given["k_cache"], given["v_cache"], given["cache_seqlens"])
    del given["cache_seqlens"]
    with pytest.raises(TypeError, match="cache_seqlens"):
        flashtile.attention_kvcache(**given)


OPTIONS = (None,) * len(CACHE)


@pytest.mark.parametrize("tensors, options", [((), OPTIONS), ((None,) * 11, ()), ((None,) * 10, OPTIONS)])
def test_the_module_wants_all_places(tensors, options):
    given = arguments("dense", {}, "cpu")
    with pytest.raises(TypeError, match=rf"^attention_kvcache: expected (11 tensors|{len(OPTIONS)} options)"):
        _C.kvcache(given["q"], given["k_cache"], given["v_cache"], tensors, options)


# ---- what only a GPU has


@pytest.mark.gpu
@pytest.mark.parametrize(
    "base, name",
    [
        *(("dense", name) for name in ("k_cache", "v_cache", "k_new", "v_new", "cache_seqlens", "leftpad")),
        *(("dense", name) for name in ("rotary_cos", "rotary_sin")),
        ("paged", "block_table"),
        ("indexed", "cache_batch_idx"),
        ("ragged", "cu_seqlens_q"),
    ],
)
def test_tensors_on_another_device(base, name):
    message = f"{name} is on cpu, expected cuda:0, as q"
    assert_refused(base, {name: torch.Tensor.cpu}, ValueError, message, "cuda")


@pytest.mark.gpu
def test_float32_on_cuda():
    names = ("q", "k_cache", "v_cache", "k_new", "v_new", "rotary_cos", "rotary_sin")
    message = "q has dtype float32 .*expected float16 or bfloat"
    assert_refused("dense", dict.fromkeys(names, torch.Tensor.float), NotImplementedError, message, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("more", [(), ("q",)], ids=str)
@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_misaligned_caches_are_refused(name, more):
    message = f"{name} (is at an address|has strides).*16 bytes"
    assert_refused("dense", dict.fromkeys((name, *more), misaligned), NotImplementedError, message, "cuda")
