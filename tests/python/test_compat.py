"""flashtile.compat: the signatures of flash-attn, its semantics, what it refuses, and the way to take its place."""

import functools
import inspect
import re
import subprocess
import sys
from pathlib import Path

import cached
import pytest
import ragged
import reference
import torch
from cached import Cached
from cases import BF16, F16, F32, Case, on_devices
from compare import assert_accurate, assert_bitwise, score_rounding
from ragged import Ragged
from test_kvcache import check as check_cache
from theirs import SMALL, assert_refuses, fa2, fa3, in_their_terms, of_each_module, packed

import flashtile
import flashtile.compat
from flashtile.compat import _common, bert_padding
from flashtile.compat.layers import rotary

# Of flash-attn 2.8.3 and of FlashAttention-3's hopper/flash_attn_interface.py.
UNBOUNDED = ("window_size", (-1, -1))
MASK = [("softmax_scale", None), ("causal", False), UNBOUNDED, ("softcap", 0.0)]
OPTIONS = [("dropout_p", 0.0), *MASK, ("alibi_slopes", None), ("deterministic", False), ("return_attn_probs", False)]
DESCALES = [("q_descale", None), ("k_descale", None), ("v_descale", None)]
BAND = [UNBOUNDED, ("attention_chunk", 0), ("softcap", 0.0)]
OPTIONS_3 = [("softmax_scale", None), ("causal", False), ("qv", None), *DESCALES, *BAND, ("num_splits", 1)]
OPTIONS_3 += [("pack_gqa", None), ("deterministic", False), ("sm_margin", 0), ("return_attn_probs", False)]
PACKED_3 = [("softmax_scale", None), ("causal", False), *DESCALES, *BAND, ("deterministic", False)]
PACKED_3 += [("num_heads_q", None), ("sm_margin", 0), ("return_attn_probs", False)]
ROTARY = [("rotary_cos", None), ("rotary_sin", None)]
HELD = [("cache_seqlens", None), ("cache_batch_idx", None), ("cache_leftpad", None)]
CACHE = [("k", None), ("v", None), *ROTARY, *HELD, ("block_table", None), *MASK, ("rotary_interleaved", True)]
CACHE += [("alibi_slopes", None), ("num_splits", 0), ("return_softmax_lse", False)]
CACHE_3 = [("k", None), ("v", None), ("qv", None), *ROTARY, *HELD, ("page_table", None), ("cu_seqlens_q", None)]
CACHE_3 += [("cu_seqlens_k_new", None), ("max_seqlen_q", None), ("rotary_seqlens", None), *DESCALES]
CACHE_3 += [("softmax_scale", None), ("causal", False), *BAND, ("rotary_interleaved", True)]
CACHE_3 += [("scheduler_metadata", None), ("num_splits", 0), ("pack_gqa", None), ("sm_margin", 0)]
CACHE_3 += [("return_softmax_lse", False)]
SEQUENCES = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
TURN = [("interleaved", False), ("seqlen_offsets", 0)]
# (module, function): the parameters without a default, then those with one
SIGNATURES = {
    (fa2, "flash_attn_func"): ("q k v", OPTIONS),
    (fa2, "flash_attn_kvpacked_func"): ("q kv", OPTIONS),
    (fa2, "flash_attn_qkvpacked_func"): ("qkv", OPTIONS),
    (fa2, "flash_attn_varlen_func"): (f"q k v {SEQUENCES}", [*OPTIONS, ("block_table", None)]),
    (fa2, "flash_attn_varlen_kvpacked_func"): (f"q kv {SEQUENCES}", OPTIONS),
    (fa2, "flash_attn_varlen_qkvpacked_func"): ("qkv cu_seqlens max_seqlen", OPTIONS),
    (fa2, "flash_attn_with_kvcache"): ("q k_cache v_cache", CACHE),
    (fa3, "flash_attn_func"): ("q k v", OPTIONS_3),
    (fa3, "flash_attn_qkvpacked_func"): ("qkv", PACKED_3),
    (fa3, "flash_attn_varlen_func"): (f"q k v {SEQUENCES}", [("seqused_q", None), ("seqused_k", None), *OPTIONS_3]),
    (fa3, "flash_attn_with_kvcache"): ("q k_cache v_cache", CACHE_3),
    (fa3, "flash_attn_combine"): ("out_partial lse_partial", [("out", None), ("out_dtype", None)]),
    (bert_padding, "pad_input"): ("hidden_states indices batch seqlen", []),
    (bert_padding, "unpad_input"): ("hidden_states attention_mask", [("unused_mask", None)]),
    (bert_padding, "unpad_input_for_concatenated_sequences"): ("hidden_states attention_mask_in_length", []),
    (rotary, "apply_rotary_emb"): (
        "x cos sin",
        [("interleaved", False), ("inplace", False), TURN[1], ("cu_seqlens", None), ("max_seqlen", None)],
    ),
    (rotary, "apply_rotary_emb_qkv_"): (
        "qkv cos sin",
        [("cos_k", None), ("sin_k", None), *TURN, ("num_heads_q", None)],
    ),
    (rotary, "apply_rotary_emb_kv_"): ("kv cos sin", TURN),
    (rotary, "RotaryEmbedding"): (
        "dim",
        [("base", 10000.0), ("interleaved", False), ("scale_base", None), ("device", None)],
    ),
}


@pytest.mark.parametrize("module, name", SIGNATURES, ids=lambda x: getattr(x, "__name__", x))
def test_signatures(module, name):
    required, optional = SIGNATURES[module, name]
    parameters = inspect.signature(getattr(module, name)).parameters.values()
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    assert [p.name for p in parameters if p.default is p.empty] == required.split()
    assert [(p.name, p.default) for p in parameters if p.default is not p.empty] == optional


def call(module, name, pack, q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, **options):
    """(out, lse), of flashtile's options."""
    tensors, tables = PACKS[pack](q, k, v), ()
    if cu_seqlens_q is not None:
        tables = (cu_seqlens_q, 40) if len(tensors) == 1 else (cu_seqlens_q, cu_seqlens_k, 40, torch.tensor(50))
    options |= {"num_heads_q": q.shape[2]} if pack == "in a row" else {}
    out, lse, *nothing = getattr(module, name)(*tensors, *tables, return_attn_probs=True, **in_their_terms(options))
    assert nothing == ([None] if module is fa2 else [])
    return out, lse


PACKS = {
    "apart": lambda q, k, v: (q, k, v),
    "kv": lambda q, k, v: (q, packed(k, v)),
    "qkv": lambda q, k, v: (packed(q, k, v),),
    "in a row": lambda q, k, v: (torch.cat((q, k, v), dim=2),),
}
GROUPS = dict(seqlen_q=40, seqlen_k=70, heads_q=4, heads_k=2)
SELF = dict(seqlen_q=70, seqlen_k=70, heads_q=3, heads_k=3)
RAGGED = dict(heads_q=4, heads_k=2, lengths_q=(40, 0, 33, 1), lengths_k=(50, 7, 20, 30))
RAGGED_SELF = dict(heads_q=3, heads_k=3, lengths_q=(40, 0, 33, 1), lengths_k=(40, 0, 33, 1))
USED = dict(used_q=(40, 0, 20, 1), used_k=(30, 7, 20, 0))
SLOPES = dict(dtype=F32, alibi="per batch and head", dropout_p=0.2)
BANDED = dict(dtype=F16, window=(20, 9), scale=0.2, softcap=7.0)
CAUSAL = dict(dtype=BF16, causal=True, window=(30, None))
ODD = dict(dtype=F32, head_dim=20, window=(None, 5))  # no multiple of 8
OF_2 = [SLOPES, SLOPES | BANDED, CAUSAL, ODD]
OF_3 = [BANDED, CAUSAL, ODD]
SERVED = [
    (fa2, "flash_attn_func", "apart", GROUPS | dict(head_dim_v=13), OF_2),
    (fa2, "flash_attn_kvpacked_func", "kv", GROUPS, OF_2),
    (fa2, "flash_attn_qkvpacked_func", "qkv", SELF, OF_2),
    (fa2, "flash_attn_varlen_func", "apart", RAGGED | dict(head_dim_v=13), OF_2),
    (fa2, "flash_attn_varlen_kvpacked_func", "kv", RAGGED, OF_2),
    (fa2, "flash_attn_varlen_qkvpacked_func", "qkv", RAGGED_SELF, OF_2),
    (fa3, "flash_attn_func", "apart", GROUPS | dict(head_dim_v=40), OF_3),
    (fa3, "flash_attn_qkvpacked_func", "qkv", SELF, OF_3),
    (fa3, "flash_attn_qkvpacked_func", "in a row", GROUPS | dict(seqlen_q=70), OF_3),
    (fa3, "flash_attn_varlen_func", "apart", RAGGED | USED, OF_3),
]
ON_EACH_DEVICE = [
    pytest.param(functools.partial(call, *function), *p.values, id=f"{function[1]}-{p.id}", marks=p.marks)
    for *function, sizes, variants in SERVED
    for p in on_devices([(Ragged if "varlen" in function[1] else Case)("", **(sizes | fields)) for fields in variants])
]


@pytest.mark.parametrize("function, case, device", ON_EACH_DEVICE)
def test_results_and_gradients(function, case, device):
    inputs, options = case.tensors(device), case.options(device)
    if case.dropout_p > 0:
        torch.manual_seed(0)
        options["seed"] = int(torch.randint(2**63 - 1, ()))
    torch.manual_seed(0)
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, lse = function(*leaves, **options)
    dout, dlse = case.incoming(out, lse)
    found = [out, lse, *torch.autograd.grad([out, lse], leaves, [dout, dlse])]
    formula = ragged.attention if isinstance(case, Ragged) else reference.attention

    def differentiated(dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        results = formula(*leaves, dtype=dtype, **options)
        return [*results, *torch.autograd.grad(results, leaves, [dout.to(dtype), dlse.to(dtype)])]

    exact, rough = differentiated(torch.float64), differentiated(case.dtype)
    rough[1] = formula(*inputs, dtype=F32, **options)[1]  # statistics are float32 for every dtype
    for what, mine, best, worse in zip(("out", "lse", "dq", "dk", "dv"), found, exact, rough, strict=True):
        assert mine.dtype is (F32 if what == "lse" else case.dtype)
        slack = 4 * score_rounding(exact[1], None if what == "lse" else best)
        assert_accurate(mine.detach(), best.detach(), worse.detach(), what, slack=slack)


ROTATED = dict(rotary=32, seqlen_q=5, new=5)
CACHES = [
    Cached("one_token", dtype=BF16, new=1, causal=False, rotary=32, interleaved=False),
    Cached("append", dtype=F16, **ROTATED, indexed=True),
    Cached("window", dtype=F32, causal=False, window=(30, 2), softcap=9.0, scale=0.2, interleaved=False, **ROTATED),
    Cached("pages", dtype=F32, seqlen_q=3, new=7, page_size=16, head_dim_v=40, leftpad=(3, 0, 0, 50)),
]
OF_2_ALONE = [Cached("slopes", dtype=F32, seqlen_q=3, alibi="per batch and head", num_splits=3)]
OF_3_ALONE = [Cached("ragged", dtype=F32, lengths_q=(3, 0, 1, 20), new=0, rotary=32, tail=4)]
OF_3_ALONE += [Cached("ragged_pages", dtype=F32, lengths_q=(3, 0, 1, 20), page_size=3, causal=False)]


def with_kvcache_2(return_lse=False, **options):
    return fa2.flash_attn_with_kvcache(**in_their_terms(options), return_softmax_lse=return_lse)


def with_kvcache_3(return_lse=False, block_table=None, **options):
    table = options.get("cu_seqlens_q") if "k_new" in options else None
    options = in_their_terms(options) | {"page_table": block_table, "cu_seqlens_k_new": table}
    return fa3.flash_attn_with_kvcache(**options, return_softmax_lse=return_lse)


@pytest.mark.parametrize("case, device", on_devices(CACHES + OF_2_ALONE))
def test_caches_2(case, device):
    check_cache(case, device, with_kvcache_2)


@pytest.mark.parametrize("case, device", on_devices(CACHES + OF_3_ALONE))
def test_caches_3(case, device):
    check_cache(case, device, with_kvcache_3)


@of_each_module
def test_caches_are_full_by_default(module):
    q, k, v = SMALL.tensors()
    assert_bitwise(module.flash_attn_with_kvcache(q, k, v), flashtile.attention(q, k, v))
    pages = torch.tensor([[1, 0]], dtype=torch.int32)
    paged = {"block_table" if module is fa2 else "page_table": pages}
    rows = [x.flip(0).flatten(0, 1)[None] for x in (k, v)]
    assert_bitwise(module.flash_attn_with_kvcache(q[:1], k, v, **paged), flashtile.attention(q[:1], *rows))


def test_cache_lengths_may_be_an_int():
    arguments = Cached("equal", dtype=F32, held=(60, 60), new=1).arguments()
    caches = {name: arguments[name].clone() for name in ("k_cache", "v_cache")}
    expected = flashtile.attention_kvcache(**(arguments | caches))
    assert_bitwise(with_kvcache_2(**(arguments | {"cache_seqlens": 60})), expected)


def test_varlen_with_pages():
    case = Cached("pages", dtype=F32, lengths_q=(3, 0, 1, 20), page_size=16, alibi="per head")
    arguments = in_their_terms(case.arguments())
    begins = torch.nn.functional.pad(arguments.pop("cache_seqlens").cumsum(0), (1, 0)).int()
    q, k, v, cu_seqlens_q = (arguments.pop(name) for name in ("q", "k_cache", "v_cache", "cu_seqlens_q"))
    function = functools.partial(fa2.flash_attn_varlen_func, q, k, v, cu_seqlens_q, begins, 20, 130, **arguments)
    out, lse, nothing = function(return_attn_probs=True)
    assert nothing is None
    for found, expected in zip((out, lse), cached.attention(case.arguments()), strict=True):
        assert_accurate(found, expected, expected, slack=2e-6)
    with pytest.raises(
        NotImplementedError, match=r"^flash_attn_varlen_func: dropout_p is 0\.1, expected 0.*block_table"
    ):
        function(dropout_p=0.1)


@of_each_module
def test_results_alone(module):
    """Without return_attn_probs there is one tensor."""
    q, k, v = SMALL.tensors()
    begins = torch.tensor([0, 8, 20], dtype=torch.int32)
    assert_bitwise(module.flash_attn_func(q, k, v), flashtile.attention(q, k, v))
    found = module.flash_attn_varlen_func(q[0], k[0], v[0], begins, begins, 12, 12)
    assert_bitwise(found, flashtile.attention_varlen(q[0], k[0], v[0], cu_seqlens_q=begins, cu_seqlens_k=begins))
    assert_bitwise(module.flash_attn_qkvpacked_func(packed(q, k, v)), flashtile.attention(q, k, v))


def test_no_bound_is_below_zero():
    q, k, v = SMALL.tensors()
    for options in ({}, dict(window_size=(-1, -1)), dict(window_size=[-7, -2]), dict(softcap=-1.0)):
        assert_bitwise(fa2.flash_attn_func(q, k, v, **options), flashtile.attention(q, k, v))
    one_sided = flashtile.attention(q, k, v, window=(0, None))
    assert_bitwise(fa2.flash_attn_func(q, k, v, window_size=(0, -1)), one_sided)


@of_each_module
def test_any_strides(module):
    def strided(x):
        return x.mT.contiguous().mT

    q, k, v = SMALL.tensors()
    assert_bitwise(module.flash_attn_func(strided(q), strided(k), strided(v)), flashtile.attention(q, k, v))
    results = []
    for change in (strided, torch.clone):
        new = [change(x[:, :3]) for x in (q, k, v)]
        caches = [k.clone(), v.clone()]
        results.append([module.flash_attn_with_kvcache(new[0], *caches, *new[1:], cache_seqlens=4), *caches])
    for found, expected in zip(*results, strict=True):
        assert_bitwise(found, expected)


def test_dropout_follows_the_generator():
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append([fa2.flash_attn_func(*SMALL.tensors(), 0.5) for _ in range(2)])
    (first, second), again, (other, _) = results
    assert_bitwise(again[0], first)
    assert_bitwise(again[1], second)
    assert not torch.equal(first, second) and not torch.equal(first, other)


@pytest.mark.parametrize("deterministic, expected", [(True, True), (False, None)])
def test_deterministic_is_passed_on(deterministic, expected, monkeypatch):
    passed = []

    def spy(function, *args, deterministic, **options):
        passed.append(deterministic)
        return function(*args, **options)

    for module in (fa2, fa3):
        for name in ("attention", "attention_varlen"):
            monkeypatch.setattr(module, name, functools.partial(spy, getattr(flashtile, name)))
    cases = [p.values for p in ON_EACH_DEVICE if not p.marks]
    for function, case, device in cases:
        function(*case.tensors(device), deterministic=deterministic, **case.options(device))
    assert passed == [expected] * len(cases)


@of_each_module
def test_splits_are_passed_on(module, monkeypatch):
    passed = []
    monkeypatch.setattr(_common, "attention_kvcache", lambda *args, num_splits, **options: passed.append(num_splits))
    for num_splits in (0, 1, 5, -1):
        module.flash_attn_with_kvcache(*SMALL.tensors(), num_splits=num_splits)
    assert passed == [0, 1, 5, 0]


def test_hints_change_nothing():
    q, k, v = SMALL.tensors()
    begins = torch.tensor([0, 8, 20], dtype=torch.int32)
    hints = dict(pack_gqa=True, sm_margin=8)
    plan = hints | dict(scheduler_metadata=torch.zeros(4), max_seqlen_q=20)
    for function, args, options in [
        (fa3.flash_attn_func, (q, k, v), hints | dict(num_splits=4)),
        (fa3.flash_attn_varlen_func, (q[0], k[0], v[0], begins, begins, 12, 12), hints | dict(num_splits=4)),
        (fa3.flash_attn_qkvpacked_func, (packed(q, k, v),), dict(sm_margin=8)),
        (fa3.flash_attn_with_kvcache, (q, k, v), plan),
    ]:
        assert_bitwise(function(*args, **options), function(*args))


def unserved():
    """pytest parameters: function of FlashAttention-3, its argument, a value, and what the message says of it."""
    found = r"a tensor of shape \(2, 2\), expected None; nearest supported: "
    values = dict.fromkeys(("qv", "q_descale", "k_descale", "v_descale", "rotary_seqlens"), (torch.ones(2, 2), found))
    values["attention_chunk"] = (64, "64, expected 0; nearest supported: ")
    return [
        pytest.param(name, argument, *values[argument], id=f"{name}-{argument}")
        for module, name in SIGNATURES
        for argument in inspect.signature(getattr(module, name)).parameters
        if argument in values
    ]


@pytest.mark.parametrize("name, argument, value, message", unserved())
def test_unserved_arguments(name, argument, value, message):
    required = SIGNATURES[fa3, name][0].split()
    assert_refuses(getattr(fa3, name), NotImplementedError, f"{argument} is {message}", *required, **{argument: value})


@of_each_module
def test_positions_that_differ_are_refused(module):
    q, k, v = SMALL.tensors()
    tables = dict(rotary_cos=torch.ones(20, 8), rotary_sin=torch.ones(20, 8), cache_seqlens=4)
    refused = functools.partial(assert_refuses, module.flash_attn_with_kvcache, NotImplementedError)
    message = "rotary_cos is given with 2 queries and 3 new keys, expected as many of both"
    refused(message, q[:, :2], k, v, k[:, :3], v[:, :3], causal=True, **tables)
    message = "rotary_cos is given without a mask, expected causal=True, a window_size, or a single query"
    refused(message, q[:, :2], k, v, k[:, :2], v[:, :2], **tables)


def test_ragged_keys_and_positions_that_differ_are_refused():
    case = Cached("ragged", dtype=F32, lengths_q=(1, 1, 1, 1), new=0, rotary=32, causal=False)
    arguments = in_their_terms(case.arguments())
    table = arguments.pop("cu_seqlens_q")
    for own, new, message in [
        (table, table, "rotary_cos is given without a mask, expected causal=True"),
        (table, None, "cu_seqlens_k_new is None, expected cu_seqlens_q itself; nearest supported: "),
        (table, table.clone(), "cu_seqlens_k_new is another tensor than cu_seqlens_q, expected cu_seqlens_q itself"),
        (None, table, "cu_seqlens_k_new is another tensor than cu_seqlens_q, expected None"),
    ]:
        tables = dict(cu_seqlens_q=own, cu_seqlens_k_new=new)
        assert_refuses(fa3.flash_attn_with_kvcache, NotImplementedError, message, **arguments, **tables)


def test_bad_arguments_are_named():
    (q, k, v), packs = SMALL.tensors(), packed(*SMALL.tensors())
    rotary = dict(rotary_cos=torch.ones(40, 8), rotary_sin=torch.ones(40, 8))
    parts = (torch.zeros(2, *q.shape), torch.zeros(2, *q.shape[:3]))
    for function, message, *args in [
        (fa2.flash_attn_with_kvcache, "cache_seqlens is None, expected", q, k, v, k, v),
        (fa2.flash_attn_qkvpacked_func, r"qkv has shape \(2, 20, 2, 16\), expected \(B, S, 3", q),
        (fa2.flash_attn_kvpacked_func, r"kv has shape \(2, 20, 3, 2, 16\), expected \(B, S_k, 2, H_k, D", q, packs),
        (fa2.flash_attn_varlen_kvpacked_func, "kv has shape", q[0], k, *[None] * 4),
        (fa2.flash_attn_varlen_qkvpacked_func, "qkv has shape", q[0], None, None),
        (fa3.flash_attn_qkvpacked_func, "qkv has shape", q),
        (fa3.flash_attn_combine, r"out has shape \(2, 20, 2, 8\), expected \(2, 20, 2, 16\)", *parts, q[..., :8]),
        (bert_padding.unpad_input, r"attention_mask has shape \(2, 9\), expected \(2, 20\)", q, torch.ones(2, 9)),
        (bert_padding.unpad_input, "unused_mask has shape", q, q[..., 0, 0], q),
    ]:
        assert_refuses(function, ValueError, message, *args)
    assert_refuses(fa3.flash_attn_with_kvcache, ValueError, "k is None, expected new keys", q, k, v, **rotary)
    for heads in (1, 3):
        message = rf"qkv has shape .* expected \(B, S, H_q \+ 2 · H_k, D\), H_q being num_heads_q = {heads}"
        assert_refuses(fa3.flash_attn_qkvpacked_func, ValueError, message, q, num_heads_q=heads)
    message = "out has dtype torch.float32, expected torch.float16"
    assert_refuses(fa3.flash_attn_combine, TypeError, message, *parts, q, F16)
    for function, name, *args in [
        (fa2.flash_attn_kvpacked_func, "kv", q, [k, v]),
        (fa3.flash_attn_combine, "lse_partial", parts[0], [k, v]),
        (fa3.flash_attn_combine, "out", *parts, [k]),
        (bert_padding.unpad_input, "attention_mask", q, [[True]]),
        (bert_padding.unpad_input, "hidden_states", [q], k[..., 0, 0]),
    ]:
        assert_refuses(function, TypeError, f"{name} is of type list, expected a torch.Tensor", *args)
    message = "qkv is of type NoneType, expected a torch.Tensor"
    assert_refuses(fa3.flash_attn_qkvpacked_func, TypeError, message, None, num_heads_q=2)
    message = "cu_seqlens_k is of type list, expected a torch.Tensor"
    assert_refuses(fa2.flash_attn_varlen_func, TypeError, message, q[0], k, v, None, [0], 1, 1, block_table=k)


def test_flashtile_names_what_no_wrapper_looks_at():
    q, k, v = SMALL.tensors()
    refuses = functools.partial(assert_refuses, fa2.flash_attn_func, name="attention")
    refuses(ValueError, "k has shape", q, k[..., :12], v)  # where operands might be padded
    refuses(TypeError, "k is of type NoneType", q, None, v)
    refuses(TypeError, "window is 5", q, k, v, window_size=5)
    refuses(TypeError, "softcap is None", q, k, v, softcap=None)
    refuses = functools.partial(assert_refuses, name="attention_kvcache")
    rotary = dict(rotary_cos=q, rotary_sin=q, cache_seqlens=3)
    for module in (fa2, fa3):
        refuses(module.flash_attn_with_kvcache, TypeError, "k_cache is of type NoneType", q, None, v)
        refuses(module.flash_attn_with_kvcache, ValueError, "k_cache has shape", q, k[0, 0, 0], v)
        refuses(module.flash_attn_with_kvcache, TypeError, "q is of type NoneType", None, k, v, k[:, :0], k, **rotary)
    leaves = SMALL.tensors(requires_grad=True)
    message = "q requires grad, expected inputs that do not: there is no backward"
    assert_refuses(fa2.flash_attn_with_kvcache, NotImplementedError, message, *leaves, name="attention_kvcache")


def test_combine():
    q, k, v = SMALL.tensors()
    parts = [fa3.flash_attn_func(q, k[:, x], v[:, x], return_attn_probs=True) for x in (slice(7), slice(7, 20))]
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    exact, exact_lse = reference.attention(q, k, v)
    out, lse = fa3.flash_attn_combine(outs, lses.mT)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse.mT.double(), exact_lse, rtol=0, atol=1e-6)
    rounded, _ = fa3.flash_attn_combine(outs, lses.mT, out_dtype=F16)
    assert_bitwise(rounded, out.to(F16))
    for place in (torch.empty_like(out), torch.empty_like(rounded)):
        written, _ = fa3.flash_attn_combine(outs, lses.mT, out=place)
        assert written is place
        assert_bitwise(place, out.to(place.dtype))


INSTALLED = """
import importlib.util, sys, types
from packaging.version import parse
import flashtile.compat as compat
NAMES = "flash_attn", "flash_attn.flash_attn_interface", "flash_attn.bert_padding", "flash_attn.layers"
NAMES += "flash_attn.layers.rotary", "flash_attn_interface"
assert not any(name in sys.modules for name in NAMES), "importing installs"
for name in NAMES:
    theirs = sys.modules[name] = types.ModuleType(name)
    theirs.__file__ = "/real.py"
    before = dict(sys.modules)
    try:
        compat.install()
    except RuntimeError as error:
        assert str(error).startswith(f"install: {name} is already imported, from /real.py, expected"), error
    else:
        raise AssertionError(name)
    compat.uninstall()
    assert sys.modules == before and sys.modules.pop(name) is theirs
compat.install()
compat.install()
import flash_attn, flash_attn.bert_padding as padding, flash_attn_interface
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.flash_attn_interface import flash_attn_func as same
import flash_attn.layers.rotary
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb
assert flash_attn_func is same is compat.flash_attn.flash_attn_func is flash_attn.flash_attn_interface.flash_attn_func
assert padding is flash_attn.bert_padding is compat.bert_padding and unpad_input is padding.unpad_input
assert flash_attn.layers.rotary is compat.layers.rotary
assert apply_rotary_emb is flash_attn.layers.rotary.apply_rotary_emb
assert flash_attn_interface is compat.flash_attn_interface and flash_attn_interface is not flash_attn
assert all(importlib.util.find_spec(name) is not None for name in NAMES)
assert parse("2.8.3") < parse(flash_attn.__version__) < parse("2.8.4")
compat.uninstall()
compat.uninstall()
assert not any(name in sys.modules for name in NAMES)
exec(sys.argv[1], {})
assert "flash_attn" in sys.modules
"""


def test_install_and_uninstall():
    """In another process, which also runs the example of docs/migration.md, its first."""
    page = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
    example = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    run = subprocess.run([sys.executable, "-c", INSTALLED, example], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
