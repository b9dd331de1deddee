"""What vLLM's and SGLang's calls have each for itself: parameters, versions, refusals, and being found by engines."""

import functools
import inspect
import subprocess
import sys

import cached
import pytest
import torch
from cached import Cached, ints
from cases import F16, F32, Case
from compare import assert_bitwise
from test_compat_serving import STAGES, by_sglang, by_vllm, each_module, place_for
from theirs import assert_refuses, seen_in_chunks
from traced import quiet

from flashtile import _C, _capability
from flashtile.compat import _cache, _serving, flash_attn, flash_attn_interface, sgl_kernel, vllm_flash_attn

pytestmark = quiet


def test_sglangs_page_table_of_sequences():
    given = Cached("mixed", dtype=F32, page_size=16, **STAGES["mixed"]).arguments()
    begins, held = given["cu_seqlens_q"], given["cache_seqlens"]
    tables = dict(seqused_k=held, page_table=given["block_table"])
    tensors = (given["q"], given["k_cache"], given["v_cache"])
    out = sgl_kernel.flash_attn_varlen_func(*tensors, begins, begins, 40, 90, causal=True, **tables)
    assert_bitwise(out, by_sglang(given))


@pytest.mark.parametrize("chunk", [None, 0, 16])
def test_sglangs_chunks_with_sinks(chunk):
    case = Cached("chunks", dtype=F32, lengths_q=(3, 20), held=(50, 40), sinks=0.0, heads_q=2, page_size=16)
    given = case.arguments()
    _, place = place_for(given["q"], 64)
    by_sglang(given, attention_chunk=chunk, out=place)
    for b, rows in enumerate(cached.spans(2, 0, given["cu_seqlens_q"])):
        where = cached.place_of(given, b, 0, case.held[b])
        seen = seen_in_chunks(case.lengths_q[b], case.held[b], chunk or 0, causal=True)[None, None]
        keys, values = (given[name][where][None] for name in ("k_cache", "v_cache"))
        exact, _ = cached.reference.attention(given["q"][None, rows], keys, values, sinks=given["sinks"], mask=seen)
        torch.testing.assert_close(place[rows].double(), exact[0], rtol=0, atol=1e-5)
    dense = Case("dense", dtype=F32, batch=1, sinks=0.0)
    (q, k, v), sinks = (x[0] for x in dense.tensors()), dense.options()["sinks"]
    begins, place = (ints((0, 65)), ints((0, 97))), torch.empty(65, 2, 64)
    how = dict(causal=True, attention_chunk=chunk, sinks=sinks)
    sgl_kernel.flash_attn_varlen_func(q, k, v, *begins, 65, 97, **how, out=place)
    seen = seen_in_chunks(65, 97, chunk or 0, causal=True)[None, None]
    exact, _ = cached.reference.attention(q[None], k[None], v[None], sinks=sinks, mask=seen)
    torch.testing.assert_close(place.double(), exact[0], rtol=0, atol=1e-5)


@each_module
def test_caches_that_get_new_rows(module):
    case = Cached("append", dtype=F32, seqlen_q=5, new=5, rotary=32, sinks=0.0, leftpad=(3, 0, 0, 9), indexed=True)
    given = case.arguments()
    expected = cached.results(given)
    mine = cached.with_own_caches(given)
    sinks = {"s_aux" if module is vllm_flash_attn else "sinks": mine.pop("sinks")}
    names = dict(k_new="k", v_new="v", leftpad="cache_leftpad", scale="softmax_scale")
    theirs = {names.get(name, name): x for name, x in mine.items() if name != "window"}
    place = torch.empty_like(expected["out"])
    out, lse, *_ = module.flash_attn_with_kvcache(**theirs, **sinks, out=place, return_softmax_lse=True)
    assert out is place
    for name, x in dict(out=place, lse=lse, k_cache=mine["k_cache"], v_cache=mine["v_cache"]).items():
        assert_bitwise(x, expected[name], name)


@each_module
def test_one_split_is_batch_invariant(module, monkeypatch):
    passed = []

    def record(q, *_, num_splits, batch_invariant, **options):
        passed.append((num_splits, batch_invariant))
        return q

    monkeypatch.setattr(_cache, "attention_kvcache", record)
    given = Cached("decode", dtype=F32, page_size=16, **STAGES["decode"]).arguments()
    for num_splits in (0, 1, 16):
        (by_vllm if module is vllm_flash_attn else by_sglang)(given, num_splits=num_splits)
    assert passed == [(0, None), (0, True), (0, None)]  # None asks the mode


def test_vllms_function_of_caches_has_the_parameters_of_flash_attn_2():
    """And more by name alone."""
    theirs = inspect.signature(flash_attn.flash_attn_with_kvcache).parameters
    mine = inspect.signature(vllm_flash_attn.flash_attn_with_kvcache).parameters
    names = [name for name, parameter in mine.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert names == list(theirs) and all(mine[name].default == theirs[name].default for name in names)
    more = "out scheduler_metadata q_descale k_descale v_descale fa_version s_aux"
    assert list(mine)[len(names) :] == more.split()


@each_module
def test_nothing_is_planned(module):
    held = ints((3, 5))
    found = module.get_scheduler_metadata(2, 1, 100, 8, 2, 64, held, page_size=16, causal=True, num_splits=16)
    assert found.shape == (0,) and found.dtype is torch.int32
    assert vllm_flash_attn.compile_flash_attn_varlen_func_from_specs(q_shape=(1, 8, 64), fa_version=4) is None


def test_versions(monkeypatch):
    assert vllm_flash_attn.FA2_AVAILABLE and vllm_flash_attn.FA3_AVAILABLE and not vllm_flash_attn.FA4_AVAILABLE
    assert vllm_flash_attn.fa_version_unsupported_reason(4) == vllm_flash_attn.FA4_UNAVAILABLE_REASON
    assert not vllm_flash_attn.is_fa_version_supported(4)
    with pytest.raises(ValueError, match=r"^fa_version_unsupported_reason: fa_version is 5, expected 2, 3 or 4"):
        vllm_flash_attn.is_fa_version_supported(5)

    def said(available, cuda, capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
        monkeypatch.setattr(_serving._C, "info", lambda: {"built_with_cuda": cuda})
        monkeypatch.setattr(_capability, "of_device", lambda device=None: capability)
        reasons = [vllm_flash_attn.fa_version_unsupported_reason(version) for version in (2, 3)]
        assert reasons[0] == reasons[1]
        supported = reasons[0] is None
        assert vllm_flash_attn.is_fa_version_supported(3) is sgl_kernel.is_fa3_supported() is supported
        return reasons[0]

    assert said(False, False, 0) is None  # there are the CPU's kernels
    assert said(True, True, 80) is None and said(True, True, 90) is None
    assert vllm_flash_attn.is_fa_version_supported(3, device="cuda:0")
    assert said(True, True, 75) == "the GPU has compute capability 7.5, expected 8.0 or newer"
    assert said(True, False, 90) == f"flashtile was built without CUDA; {_C.CUDA_REMEDY}"


@pytest.mark.parametrize(
    "argument, found",
    [
        ("q_v", torch.ones(3)),
        ("output_scale", torch.ones(1)),
        ("mask_mod", len),
        ("block_sparse_tensors", (1,)),
        ("aux_tensors", [torch.ones(1)]),
        ("dynamic_causal", torch.ones(3)),
        ("gather_kv_indices", torch.ones(3)),
        ("cp_world_size", 2),
    ],
)
def test_vllms_requests_that_are_refused(argument, found):
    given = Cached("drafts", dtype=F32, page_size=16, **STAGES["drafts"]).arguments()
    function = functools.partial(by_vllm, given)
    message = f"{argument} is .*, expected "
    assert_refuses(function, NotImplementedError, message, **{argument: found}, name="flash_attn_varlen_func")


@pytest.mark.parametrize("masked", [dict(window=(20, 0)), dict(alibi="per head")])
def test_ranks_with_distances_are_refused(masked):
    given = Cached("decode", dtype=F32, page_size=16, **STAGES["decode"], **masked).arguments()
    message = "cp_world_size is 2, expected 1, or max_seqlen_q = 1 or causal=False, with neither"
    assert_refuses(
        by_vllm, NotImplementedError, message, given, cp_world_size=2, cp_rank=1, name="flash_attn_varlen_func"
    )


@pytest.mark.parametrize(
    "argument, found", [("qv", torch.ones(3)), ("only_qv", True), ("score_mod", len), ("aux_tensors", [1])]
)
def test_sglangs_requests_that_are_refused(argument, found):
    given = Cached("drafts", dtype=F32, page_size=16, **STAGES["drafts"]).arguments()
    named = {argument: found}
    message = f"{argument} is .*, expected (None|False)"
    function = functools.partial(by_sglang, given)
    assert_refuses(function, NotImplementedError, message, **named, name="flash_attn_with_kvcache")
    begins, tensors = given["cu_seqlens_q"], (given["q"],) * 3
    function = functools.partial(sgl_kernel.flash_attn_varlen_func, *tensors, begins, begins, 4, 4)
    assert_refuses(function, NotImplementedError, message, **named, name="flash_attn_varlen_func")


def test_calls_that_make_no_sense():
    given = Cached("decode", dtype=F32, page_size=16, **STAGES["decode"]).arguments()
    q, k, v, table, begins = (given[name] for name in ("q", "k_cache", "v_cache", "block_table", "cu_seqlens_q"))
    function = functools.partial(vllm_flash_attn.flash_attn_varlen_func, q, k, v, 1, begins, 130)
    refuse = functools.partial(assert_refuses, function, name="flash_attn_varlen_func")
    refuse(ValueError, "cu_seqlens_k and seqused_k are None, expected one of them", block_table=table)
    refuse(
        ValueError, "cu_seqlens_k is given, expected None, since block_table", cu_seqlens_k=begins, block_table=table
    )
    refuse(ValueError, "fa_version is 5, expected 2, 3 or 4", seqused_k=begins[1:], block_table=table, fa_version=5)
    message = r"dropout_p is 0\.1, expected 0\.0, since block_table is given"
    refuse(NotImplementedError, message, seqused_k=begins[1:], block_table=table, dropout_p=0.1)
    function = functools.partial(sgl_kernel.flash_attn_varlen_func, q, k, v, begins, begins, 1, 1, page_table=table)
    message = "seqused_k is None, expected a tensor, since block_table is given"
    assert_refuses(function, ValueError, message, name="flash_attn_varlen_func")


def test_a_place_that_does_not_fit_is_refused():
    given = Cached("decode", dtype=F32, page_size=16, head_dim=60, **STAGES["decode"]).arguments()
    for place, error in ((torch.empty(3, 4, 64), ValueError), (torch.empty(3, 4, 60, dtype=F16), TypeError)):
        with pytest.raises(error, match=r"^flash_attn_varlen_func: out has (shape|dtype)"):
            by_vllm(given, out=place)


@each_module
def test_a_place_or_sinks_that_do_not_fit_change_no_cache(module):
    """Also where rows are appended by a call of its own, or to a copy of the cache."""
    sinks = "s_aux" if module is vllm_flash_attn else "sinks"
    for head_dim, wrong in (
        (12, dict(out=torch.empty(1, 2, 4, 12, dtype=F16))),
        (16, dict(out=torch.empty(1, 2, 4, 8), rotary_seqlens=ints([3]))),
        (16, {sinks: torch.zeros(3), "rotary_seqlens": ints([3])}),
    ):
        if module is vllm_flash_attn and "rotary_seqlens" in wrong:
            continue
        caches = torch.zeros(2, 1, 10, 2, head_dim)
        q, new = torch.randn(1, 2, 4, head_dim), torch.ones(2, 1, 3, 2, head_dim)
        turned = torch.ones(9, 8) if head_dim == 16 else None
        options = dict(cache_seqlens=ints([2]), rotary_cos=turned, rotary_sin=turned)
        with pytest.raises((TypeError, ValueError), match=r"has (shape|dtype)"):
            module.flash_attn_with_kvcache(q, *caches, *new, **options, **wrong)
        assert not caches.any()


def test_some_queries_of_8_bits_over_pages():
    kind, one = torch.float8_e4m3fn, torch.full((2, 2), 0.5)
    q, cache = torch.randn(2, 3, 2, 16).to(kind), [torch.randn(4, 16, 2, 16).to(kind) for _ in "kv"]
    options = dict(page_table=ints([[0, 1], [2, 3]]), seqused_k=ints([10, 20]), causal=True)
    options |= dict(q_descale=one, k_descale=one, v_descale=one)
    place = torch.empty(2, 3, 2, 16, dtype=torch.bfloat16)
    out, *_ = flash_attn_interface._flash_attn_forward(q, *cache, seqused_q=ints([3, 3]), out_=place, **options)
    assert out is place
    assert_bitwise(out, flash_attn_interface._flash_attn_forward(q, *cache, **options)[0])


def test_some_queries_over_pages():
    """seqused_q: the others have no results, wherever they stand."""
    given = Cached("drafts", dtype=F32, page_size=16, **STAGES["drafts"]).arguments()
    q, k, v, table, begins = (given[name] for name in ("q", "k_cache", "v_cache", "block_table", "cu_seqlens_q"))
    lengths, used = begins.diff(), (begins.diff() - 1).clamp(min=0)
    options = dict(page_table=table, causal=True, return_softmax_lse=True)
    function = functools.partial(sgl_kernel.flash_attn_varlen_func, cu_seqlens_k=None, seqused_k=given["cache_seqlens"])
    rows = torch.cat([torch.arange(n) + begin for begin, n in zip(begins.tolist(), used.tolist(), strict=False)])
    few = torch.nn.functional.pad(used.cumsum(0), (1, 0)).int()
    expected = function(q[rows], k, v, few, max_seqlen_q=9, max_seqlen_k=130, **options)
    place = torch.empty_like(q)
    out, lse, *_ = function(q, k, v, begins, max_seqlen_q=9, max_seqlen_k=130, seqused_q=used, out=place, **options)
    assert out is place and rows.numel() < len(q) and used.equal((lengths - 1).clamp(min=0))
    assert_bitwise(out[rows], expected[0])
    assert_bitwise(lse[:, rows], expected[1])
    others = torch.ones(len(q), dtype=torch.bool).index_fill(0, rows, False)
    assert not out[others].any() and (lse[:, others] == -torch.inf).all()


INSTALLED = """
import sys, types
import flashtile.compat as compat
before = set(sys.modules)
vllm = sys.modules["vllm"] = types.ModuleType("vllm")  # which is there, or is not
vllm.__path__ = []
compat.install("vllm_flash_attn", "sgl_kernel")
compat.install("vllm_flash_attn")
from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata, is_fa_version_supported
from vllm.vllm_flash_attn import compile_flash_attn_varlen_func_from_specs, flash_attn_interface
from vllm.vllm_flash_attn.flash_attn_interface import FA2_AVAILABLE, fa_version_unsupported_reason
from vllm.vllm_flash_attn.layers.rotary import apply_rotary_emb
from vllm_flash_attn import flash_attn_with_kvcache
from sgl_kernel.flash_attn import flash_attn_with_kvcache as other
assert flash_attn_varlen_func is compat.vllm_flash_attn.flash_attn_varlen_func
assert flash_attn_with_kvcache is flash_attn_interface.flash_attn_with_kvcache
assert apply_rotary_emb is compat.layers.rotary.apply_rotary_emb
assert other is compat.sgl_kernel.flash_attn_with_kvcache
assert not {"flash_attn", "flash_attn_interface"} & set(sys.modules)
compat.uninstall()
del sys.modules["vllm"]
assert set(sys.modules) == before
try:
    compat.install("flash_attn", "vllm")
except ValueError as error:
    assert str(error).startswith("install: packages has 'vllm', expected one of flash_attn, flash_attn_interface, ")
else:
    raise AssertionError
assert set(sys.modules) == before
compat.install()
assert "flash_attn_interface" in sys.modules and "vllm.vllm_flash_attn" not in sys.modules
"""


def test_engines_import_it_once_it_is_installed():
    run = subprocess.run([sys.executable, "-c", INSTALLED], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
