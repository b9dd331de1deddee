"""flashtile.compat: the signatures of flash-attn, its functions without a cache, and the way to take its place."""

import functools
import inspect
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import ragged
import reference
import torch
from cases import BF16, F16, F32, Case, on_devices
from compare import assert_accurate, assert_bitwise, score_rounding
from ragged import Ragged
from theirs import SMALL, fa2, fa3, in_their_terms, of_each_module, packed

import flashtile
from flashtile.compat import _passes_2, _passes_3, _ragged, bert_padding, sgl_kernel, vllm_flash_attn
from flashtile.compat.layers import rotary

# Of flash-attn 2.8.3, of FlashAttention-3's hopper/flash_attn_interface.py, of vLLM 0.33 and of sglang-kernel 0.4.10.
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
PLAN = [("qkv_dtype", BF16), ("headdim_v", None), ("cu_seqlens_q", None), ("cu_seqlens_k_new", None)]
PLAN += [("cache_leftpad", None), ("page_size", None), ("max_seqlen_k_new", 0), ("causal", False), UNBOUNDED]
PLAN += [("attention_chunk", 0), ("has_softcap", False), ("num_splits", 0), ("pack_gqa", None), ("sm_margin", 0)]
PLAN_VLLM = [parameter for parameter in PLAN if parameter[0] != "attention_chunk"]
PLAN_SGLANG = [*PLAN[:3], ("cu_seqlens_k", None), PLAN[3], ("seqused_q", None), ("leftpad_k", None), *PLAN[5:]]
VARLEN_VLLM = [("cu_seqlens_k", None), ("seqused_k", None), ("q_v", None), ("dropout_p", 0.0), ("softmax_scale", None)]
VARLEN_VLLM += [("causal", False), ("window_size", None), ("softcap", 0.0), ("alibi_slopes", None)]
VARLEN_VLLM += [("deterministic", False), ("return_attn_probs", False), ("block_table", None)]
VARLEN_VLLM += [("return_softmax_lse", False), ("out", None), ("scheduler_metadata", None), *DESCALES]
VARLEN_VLLM += [("num_splits", 0), ("output_scale", None), ("fa_version", 2), ("s_aux", None), ("cp_world_size", 1)]
VARLEN_VLLM += [("cp_rank", 0), ("cp_tot_seqused_k", None), ("mask_mod", None), ("block_sparse_tensors", None)]
VARLEN_VLLM += [("aux_tensors", None), ("aux_tensor_leading_dims", None), ("dynamic_causal", None)]
VARLEN_VLLM += [("gather_kv_indices", None), ("gather_kv_valid_length", None)]
LAST_SGLANG = [("sinks", None), ("score_mod", None), ("aux_tensors", None), ("ver", 3), ("out", None)]
CACHE_SGLANG = [(name, None if name == "attention_chunk" else default) for name, default in CACHE_3]
CACHE_SGLANG = [*CACHE_SGLANG[:-2], ("only_qv", False), *CACHE_SGLANG[-2:], *LAST_SGLANG]
VARLEN_SGLANG = [("max_seqlen_q", None), ("max_seqlen_k", None), ("seqused_q", None), ("seqused_k", None)]
VARLEN_SGLANG += [("page_table", None), *OPTIONS_3[:-3], ("only_qv", False), ("sm_margin", 0)]
VARLEN_SGLANG += [("return_softmax_lse", False), *LAST_SGLANG]
SEQUENCES = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
# Of the passes by themselves.
SIDES = [("window_size_left", -1), ("window_size_right", -1)]
PASS = "dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes"
GIVEN = "dout q k v out softmax_lse"
PLACES = "dq dk dv"
VARLEN_PASS = [*SIDES, ("softcap", 0.0), ("alibi_slopes", None), ("return_softmax", False), ("block_table", None)]
VARLEN_PASS += [("leftpad_k", None), ("seqused_k", None), ("zero_tensors", False), ("num_splits", 0)]
TABLES_3 = [("cu_seqlens_q", None), ("cu_seqlens_k", None)]
LONGEST = [("max_seqlen_q", None), ("max_seqlen_k", None)]
PASS_3 = [("k_new", None), ("v_new", None), ("qv", None), ("out_", None), *TABLES_3, ("cu_seqlens_k_new", None)]
PASS_3 += [("seqused_q", None), ("seqused_k", None), *LONGEST, ("page_table", None), ("kv_batch_idx", None)]
PASS_3 += [("leftpad_k", None), *ROTARY, ("seqlens_rotary", None), *DESCALES, ("softmax_scale", None)]
PASS_3 += [("causal", False), *SIDES, ("attention_chunk", 0), ("softcap", 0.0), ("rotary_interleaved", True)]
PASS_3 += [("scheduler_metadata", None), ("num_splits", 1), ("pack_gqa", None), ("sm_margin", 0)]
BACK_3 = [*TABLES_3, ("sequed_q", None), ("sequed_k", None), *LONGEST, ("dq", None), ("dk", None), ("dv", None)]
BACK_3 += [("softmax_scale", None), ("is_causal", False), *SIDES, ("softcap", 0.0), ("deterministic", False)]
BACK_3 += [("sm_margin", 0)]
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
    (fa3, "get_scheduler_metadata"): (
        "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens",
        PLAN,
    ),
    (vllm_flash_attn, "flash_attn_varlen_func"): ("q k v max_seqlen_q cu_seqlens_q max_seqlen_k", VARLEN_VLLM),
    (vllm_flash_attn, "get_scheduler_metadata"): (
        "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens",
        PLAN_VLLM,
    ),
    (sgl_kernel, "flash_attn_varlen_func"): ("q k v cu_seqlens_q cu_seqlens_k", VARLEN_SGLANG),
    (sgl_kernel, "flash_attn_with_kvcache"): ("q k_cache v_cache", CACHE_SGLANG),
    (sgl_kernel, "get_scheduler_metadata"): (
        "batch_size max_seqlen_q max_seqlen_k num_heads num_heads_k headdim cache_seqlens",
        PLAN_SGLANG,
    ),
    (fa2, "_flash_attn_forward"): (f"q k v {PASS} return_softmax", []),
    (fa2, "_flash_attn_varlen_forward"): (f"q k v {SEQUENCES} dropout_p softmax_scale causal", VARLEN_PASS),
    (fa2, "_flash_attn_backward"): (f"{GIVEN} {PLACES} {PASS} deterministic", [("rng_state", None)]),
    (fa2, "_flash_attn_varlen_backward"): (
        f"{GIVEN} {PLACES} {SEQUENCES} {PASS} deterministic",
        [("rng_state", None), ("zero_tensors", False)],
    ),
    (fa3, "_flash_attn_forward"): ("q k v", PASS_3),
    (fa3, "_flash_attn_backward"): (GIVEN, BACK_3),
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
    out, lse, *rest = getattr(module, name)(*tensors, *tables, return_attn_probs=True, **in_their_terms(options))
    assert len(rest) == (module is fa2)
    if rest and not options.get("dropout_p"):
        assert rest[0].shape == (0,)  # S_dmask, which there is with dropout alone
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
def test_windows_are_anything_that_holds_two_integers(module):
    q, k, v = SMALL.tensors()
    expected = flashtile.attention(q, k, v, window=(3, None))
    for window_size in (
        [3, -1],
        torch.tensor([3, -1]),
        numpy.array([3, -1]),
        (numpy.int64(3), numpy.int32(-1)),
        (torch.tensor(3), torch.tensor(-1)),
    ):
        assert_bitwise(module.flash_attn_func(q, k, v, window_size=window_size), expected)
        assert_bitwise(module.flash_attn_with_kvcache(q, k, v, window_size=window_size), expected)


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


@of_each_module
def test_tables_of_any_strides(module):
    x = torch.randn(10, 2, 16)
    begins = torch.arange(0, 11, 5, dtype=torch.int32)
    expected = module.flash_attn_varlen_func(x, x, x, begins, begins, 5, 5)
    strided = torch.arange(20, dtype=torch.int32)[0:11:5]
    if module is fa3:  # flash-attn 2 refuses such tables
        assert_bitwise(module.flash_attn_varlen_func(x, x, x, strided, strided, 5, 5), expected)
        used = torch.tensor([5, 9, 5], dtype=torch.int32)[::2]
        assert_bitwise(module.flash_attn_varlen_func(x, x, x, strided, begins, 5, 5, seqused_k=used), expected)


@of_each_module
def test_flags_are_whatever_says_yes_or_no(module):
    q, k, v = SMALL.tensors()
    for causal in (True, False):
        expected = module.flash_attn_func(q, k, v, causal=causal)
        for flag in (int(causal), numpy.bool_(causal), torch.tensor(causal), *([] if causal else [None])):
            assert_bitwise(module.flash_attn_func(q, k, v, causal=flag, deterministic=flag), expected)
            found = module.flash_attn_with_kvcache(q, k, v, causal=flag, return_softmax_lse=flag)
            assert isinstance(found, tuple) is causal
            assert_bitwise(found[0] if causal else found, module.flash_attn_with_kvcache(q, k, v, causal=causal))
    with pytest.raises(TypeError, match="causal is 'yes', expected a bool"):
        module.flash_attn_func(q, k, v, causal="yes")


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

    for module in (fa2, _passes_2, _passes_3, _ragged):
        for name in ("attention", "attention_varlen"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, functools.partial(spy, getattr(flashtile, name)))
    cases = [p.values for p in ON_EACH_DEVICE if not p.marks]
    for function, case, device in cases:
        function(*case.tensors(device), deterministic=deterministic, **case.options(device))
    q, k, v = SMALL.tensors()
    fa2.flash_attn_func(q, k, v, deterministic=deterministic)
    begins = torch.tensor([0, 20], dtype=torch.int32)
    fa2.flash_attn_varlen_func(q[0], k[0], v[0], begins, begins, 20, 20, deterministic=deterministic)
    assert passed == [expected] * (len(cases) + 2)


def test_hints_change_nothing():
    q, k, v = SMALL.tensors()
    begins = torch.tensor([0, 8, 20], dtype=torch.int32)
    hints = dict(pack_gqa=True, sm_margin=8)
    metadata = fa3.get_scheduler_metadata(2, 20, 20, 2, 2, 16, begins[1:], F32, causal=True, num_splits=3)
    assert metadata.dtype is torch.int32
    plan = hints | dict(scheduler_metadata=metadata, max_seqlen_q=20)
    for function, args, options in [
        (fa3.flash_attn_func, (q, k, v), hints | dict(num_splits=4)),
        (fa3.flash_attn_varlen_func, (q[0], k[0], v[0], begins, begins, 12, 12), hints | dict(num_splits=4)),
        (fa3.flash_attn_qkvpacked_func, (packed(q, k, v),), dict(sm_margin=8)),
        (fa3.flash_attn_with_kvcache, (q, k, v), plan),
    ]:
        assert_bitwise(function(*args, **options), function(*args))


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
NAMES += "flash_attn.layers.rotary", "flash_attn_interface", "flash_attn_3", "flash_attn_3.flash_attn_interface"
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
from flash_attn.flash_attn_interface import _flash_attn_forward, _wrapped_flash_attn_backward
from flash_attn_interface import _flash_attn_backward, get_scheduler_metadata
from flash_attn_3 import flash_attn_interface as interface_3
from flash_attn_3.flash_attn_interface import flash_attn_func as func_3
import flash_attn.layers.rotary
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb
assert flash_attn_func is same is compat.flash_attn.flash_attn_func is flash_attn.flash_attn_interface.flash_attn_func
assert padding is flash_attn.bert_padding is compat.bert_padding and unpad_input is padding.unpad_input
assert flash_attn.layers.rotary is compat.layers.rotary
assert apply_rotary_emb is flash_attn.layers.rotary.apply_rotary_emb
assert flash_attn_interface is compat.flash_attn_interface and flash_attn_interface is not flash_attn
assert interface_3 is flash_attn_interface and func_3 is interface_3.flash_attn_func
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


def test_flags_may_be_symbols():
    q = torch.randn(1, 4, 2, 16)
    compiled = torch.compile(
        lambda q, flag: fa2.flash_attn_func(q, q, q, return_attn_probs=flag),
        backend="aot_eager",
        fullgraph=True,
        dynamic=True,
    )
    assert isinstance(compiled(q, 2), tuple)
