"""Peers that are found: each adapter computes the case through functions of the package's signatures, and what is
missing, broken or wrong is said."""

import importlib
import sys
import types

import pytest
import torch
from test_bench import EFFORT
from test_bench_peers import outside_bare

import flashtile
import flashtile.compat
from flashtile.bench import command, decode, found, run, timing
from flashtile.bench.cases import Case, Work, make_inputs
from flashtile.bench.oracle import attention_float64
from flashtile.bench.peers import MATH, OURS, RECORDED, Peer
from flashtile.compat import flash_attn, flash_attn_interface

CPU = torch.device("cpu")
DENSE = [
    Case(2, 24, 24, 4, heads_k, 16, 16, dtype="float32", causal=causal, work=work)
    for heads_k in (2, 4)
    for causal in (False, True)
    for work in (Work.FORWARD, Work.BACKWARD)
]
RAGGED = [
    Case.ragged((5, 17, 1), 4, heads, 16, dtype="float32", causal=causal)
    for heads in (2, 4)
    for causal in (False, True)
]
CACHED = [
    Case.decode(2, 128, 4, 2, 16, dtype="float32"),
    Case.decode(2, 128, 4, 4, 16, dtype="float32"),
    Case.prefill(2, 8, 64, 4, 2, 16, dtype="float32"),
    Case.decode(3, 48, 4, 2, 16, dtype="float32", page_size=16),
    Case.prefill(2, 8, 37, 4, 2, 16, dtype="float32", page_size=16),
]


def dense(q, k, v, causal):
    """By PyTorch, masks aligned at the last key."""
    return outside_bare(q, k, v, causal)


class FlashAttention4(types.ModuleType):
    """FlashAttention-4's functions: no cache among them, and a pair of results."""

    @staticmethod
    def flash_attn_func(q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, num_splits=1):
        assert num_splits == 1, "SplitKV not supported"
        return dense(q, k, v, causal), None

    @staticmethod
    def flash_attn_varlen_func(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, causal=False
    ):
        tables = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        return flashtile.attention_varlen(q, k, v, causal=causal, **tables), None


class BatchPrefillWithRaggedKVCacheWrapper:
    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        assert kv_layout == "NHD" and float_workspace_buffer.dtype is torch.uint8

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        head_dim_vo=None,
        *,
        causal=False,
        q_data_type="float16",
        kv_data_type=None,
    ):
        self.tables = {"cu_seqlens_q": qo_indptr, "cu_seqlens_k": kv_indptr}
        self.sizes = (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, q_data_type, kv_data_type)
        self.causal = causal

    def run(self, q, k, v):
        assert self.sizes == (q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.dtype, k.dtype)
        return flashtile.attention_varlen(q, k, v, causal=self.causal, **self.tables)


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False):
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        q_data_type,
        kv_data_type,
    ):
        assert self.use_tensor_cores == (num_qo_heads > num_kv_heads)
        pages = indptr.diff()
        self.block_table = torch.stack(indices.split(pages.tolist()))
        self.held = ((pages - 1) * page_size + last_page_len).int()

    def run(self, q, paged_kv_cache):
        assert q.dim() == 3
        tables = {"cache_seqlens": self.held, "block_table": self.block_table}
        return flashtile.attention_kvcache(q[:, None], *paged_kv_cache, **tables).squeeze(1)


def flash_infer():
    module = types.ModuleType("flashinfer")
    module.BatchPrefillWithRaggedKVCacheWrapper = BatchPrefillWithRaggedKVCacheWrapper
    module.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper
    return module


class BottomRight:
    """xFormers' LowerTriangularFromBottomRightMask."""


class BlockDiagonalMask:
    def __init__(self, lengths, causal=False):
        self.lengths, self.causal = lengths, causal

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqlen=None, *, device=None):
        return cls(list(q_seqlen))

    def make_causal(self):
        return BlockDiagonalMask(self.lengths, True)


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None):
    assert query.shape[2:-1] == key.shape[2:-1] == value.shape[2:-1]
    assert query.dim() == 4 or not query.requires_grad, "no backward in five dimensions"
    q, k, v = (x.flatten(2, -2) for x in (query, key, value))
    if isinstance(attn_bias, BlockDiagonalMask):
        parts = zip(*(x.split(attn_bias.lengths, dim=1) for x in (q, k, v)), strict=True)
        out = torch.cat([dense(*part, attn_bias.causal) for part in parts], dim=1)
    else:
        assert attn_bias is None or isinstance(attn_bias, BottomRight)
        out = dense(q, k, v, attn_bias is not None)
    return out.view(query.shape)


def x_formers():
    module = types.ModuleType("xformers.ops")
    module.memory_efficient_attention = memory_efficient_attention
    biases = types.SimpleNamespace(BlockDiagonalMask=BlockDiagonalMask, LowerTriangularFromBottomRightMask=BottomRight)
    module.fmha = types.SimpleNamespace(attn_bias=biases)
    return module


ADAPTERS = {
    "FA2": lambda: found.FlashAttention(flash_attn),
    "FA3": lambda: found.FlashAttention(flash_attn_interface),
    "FA4": lambda: found.FlashAttention(FlashAttention4("flash_attn.cute")),
    "FlashInfer": lambda: found.FlashInfer(flash_infer()),
    "xFormers": lambda: found.XFormers(x_formers()),
}


def attention_of(case):
    if case.over_a_cache:
        return flashtile.attention_kvcache
    return flashtile.attention if case.lengths is None else flashtile.attention_varlen


@pytest.mark.parametrize("name", ADAPTERS)
def test_every_adapter_is_right_in_one_case_after_another(name):
    """One adapter for all, as a run has it; the cases come in turn, so that nothing planned for one serves another."""
    peer = Peer(name, found.Adapted(name, ADAPTERS[name]()))
    for case in [*DENSE, *RAGGED, *CACHED, *DENSE[:2]]:
        (cell,) = run.run_cases([case], CPU, EFFORT, attention_of(case), [peer])
        entry = {entry.name: entry for entry in cell.entries}[name]
        if name == "FlashInfer" and case.work is Work.BACKWARD:
            assert entry == run.Entry(name, refusal="FlashInfer has no backward")
        else:
            assert not entry.refusal and not entry.wrong and entry.timing, (case, entry)


def test_flash_attention_4_divides_keys_where_it_has_a_kernel_for_it(monkeypatch):
    asked = []
    module = types.SimpleNamespace(flash_attn_func=lambda q, k, v, **options: asked.append(options) or (q, None))
    on_gpu = types.SimpleNamespace(device=torch.device("cuda"))
    _, k, v, _ = make_inputs(CACHED[0], CPU)
    for capability in ((9, 0), (10, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, here=capability: here)
        found.FlashAttention(module)(on_gpu, k, v, CACHED[0])
    assert asked == [{"causal": True}, {"causal": True, "num_splits": 0}, {"causal": True}]


@pytest.mark.parametrize("work", RECORDED)
def test_flashinfer_is_not_measured_in_what_it_does_not_record(work):
    case = Case.square(1, 16, 2, 16, dtype="float32", work=work)
    with pytest.raises(NotImplementedError, match="no backward"):
        ADAPTERS["FlashInfer"]()(*make_inputs(case, CPU)[:3], case)


@pytest.mark.parametrize(
    "options, refused", [({"window": (2, 0)}, "windows"), ({"alibi": True}, "ALiBi"), ({"softcap": 30.0}, "softcap")]
)
def test_no_adapter_is_asked_for_options(options, refused):
    case = Case.square(1, 16, 2, 16, dtype="float32", **options)
    peer = Peer("FA2", found.Adapted("FA2", found.FlashAttention(flash_attn)))
    (cell,) = run.run_cases([case], CPU, EFFORT, flashtile.attention, [peer])
    assert cell.entries[-1] == run.Entry("FA2", refusal=f"FA2 is not asked for {refused} here")


def test_flashinfer_decodes_whole_pages_alone():
    case = Case.decode(2, 37, 4, 2, 16, dtype="float32", page_size=16)
    with pytest.raises(NotImplementedError, match="whole pages alone"):
        ADAPTERS["FlashInfer"]()(*make_inputs(case, CPU)[:3], case)


@pytest.fixture
def installed(monkeypatch):
    """Packages that can be imported: a name's module, or the error that importing it ends in."""
    modules = {}

    def import_module(name):
        if name not in modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])
        if isinstance(modules[name], Exception):
            raise modules[name]
        return modules[name]

    monkeypatch.setattr(importlib, "import_module", import_module)
    return modules


def named(name, **attributes):
    module = types.ModuleType(name)
    vars(module).update({"__file__": "somewhere.py"} | attributes)
    return module


def test_what_is_not_installed_is_not_mentioned(installed):
    assert found.found_peers("varlen", "cuda") == ([], {})


def test_what_is_installed_is_found_with_its_version(installed):
    installed["flash_attn_interface"] = named("flash_attn_interface", __version__="3.0")
    installed["xformers.ops"] = named("xformers.ops")
    peers, versions = found.found_peers("forward", "cuda")
    assert [peer.name for peer in peers] == [MATH, "FA3", "xFormers"]
    assert versions == {"FA3": "3.0", "xFormers": "of an unknown version"}
    assert [peer.name for peer in found.found_peers("decode", "cuda")[0]] == ["FA3", "xFormers"]


@pytest.mark.parametrize("suite, device_type", [("host", "cuda"), ("cpu", "cuda"), ("varlen", "cpu")])
def test_nothing_is_looked_for_where_nothing_would_run(installed, suite, device_type):
    installed["flash_attn"] = RuntimeError("must not be imported")
    assert found.found_peers(suite, device_type) == ([], {})


@pytest.mark.parametrize(
    "error, said",
    [
        (
            ImportError("undefined symbol: _ZN3c10\nin a file"),
            "cannot be imported: ImportError: undefined symbol: _ZN3c10",
        ),
        (ModuleNotFoundError("No module named 'einops'", name="einops"), "cannot be imported: ModuleNotFoundError: No"),
        (OSError("libcudart.so.12"), "cannot be imported: OSError: libcudart.so.12"),
    ],
)
def test_what_is_installed_and_broken_is_said(installed, error, said):
    installed["flash_attn"] = error
    peers, versions = found.found_peers("varlen", "cuda")
    assert peers == [] and versions["FA2"].startswith(said)


def test_a_folder_that_others_share_and_flashtiles_own_functions_are_no_package(installed):
    installed["flash_attn"] = types.ModuleType("flash_attn")  # where FlashAttention-4 alone is installed
    installed["flash_attn"].__file__ = None
    installed["flash_attn_interface"] = flash_attn_interface
    assert found.found_peers("varlen", "cuda") == ([], {})


def test_the_real_import_knows_what_is_absent():
    assert "no_such_package" not in sys.modules
    for name in ("no_such_package", "no_such_package.ops", "torch.no_such_module"):
        with pytest.raises(ModuleNotFoundError) as error:
            importlib.import_module(name)
        assert found._is_absent(error.value, name)
        assert not found._is_absent(error.value, "other")


def test_math_is_refused_where_its_scores_would_not_fit(monkeypatch):
    case = Case(2, 24, 48, 4, 2, 16, 16, dtype="float32", causal=True)
    inputs, needed = make_inputs(case, CPU)[:3], 4 * 4 * 2 * 4 * 24 * 48
    monkeypatch.setattr(found, "_free_bytes", lambda device: 2 * needed)
    torch.testing.assert_close(
        found.attention_math(*inputs, case).double(), attention_float64(*inputs, case), atol=1e-5, rtol=1e-5
    )
    monkeypatch.setattr(found, "_free_bytes", lambda device: 2 * needed - 2)
    with pytest.raises(NotImplementedError, match=r"its scores would take .* GiB, expected at most"):
        found.attention_math(*inputs, case)


def broken(q, k, v, case):
    raise TypeError("flash_attn_func() got an unexpected keyword [/b]\nand a trace")


def wrong(q, k, v, case):
    return 2 * flash_attn.flash_attn_func(q, k, v, causal=case.causal)


def test_a_found_peer_that_fails_or_is_wrong_is_a_note_and_the_others_run(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(timing, "CPU_EFFORT", EFFORT)
    peers = [Peer("A", found.Adapted("A", broken)), Peer("B", found.Adapted("B", wrong))]
    monkeypatch.setattr(command, "found_peers", lambda suite, device_type: (peers, {"A": "1.0"}))
    assert command.measure("cpu", cases=DENSE[:1], json_path=tmp_path / "run.json") == 0
    shown = capsys.readouterr().out
    assert "A 1.0" in shown
    assert "A did not run" in shown and "TypeError: flash_attn_func() got an unexpected keyword [/b]" in shown
    assert "B is WRONG" in shown
    assert '"peers": {' in (tmp_path / "run.json").read_text()


def test_an_outside_peer_takes_the_place_of_a_found_one_of_its_name(monkeypatch, tmp_path):
    monkeypatch.setattr(timing, "QUICK_EFFORT", EFFORT)
    monkeypatch.setattr(command, "found_peers", lambda *_: ([Peer("FA3", broken)], {}))
    path = tmp_path / "run.json"
    target = "FA3=flashtile:attention_varlen"
    assert command.measure("varlen", quick=True, dtype="float16", peers=[target], json_path=path) == 0
    for cell in command.report.read(path)["cells"]:
        assert list(cell["results"]).count("FA3") == 1 and "median_us" in cell["results"]["FA3"]


@pytest.mark.usefixtures("much_memory")
@pytest.mark.gpu
@pytest.mark.parametrize("suite", [suite for suite in found.SUITES if suite != "memory"])
def test_found_peers_on_a_gpu(suite, tmp_path):
    """Whatever is installed there: it runs or says why not, and what runs is right."""
    path = tmp_path / "gpu.json"
    assert command.measure(suite, quick=True, json_path=path) == 0
    names = {peer.name for peer in found.found_peers(suite, "cuda")[0]}
    assert (MATH in names) == (suite in found.MATH_SUITES)
    for cell in command.report.read(path)["cells"]:
        assert names <= set(cell["results"])
        for name in names | {OURS}:
            assert all(error["ok"] for error in cell["results"][name]["errors"].values()), (cell["name"], name)
        if MATH in names:
            assert "median_us" in cell["results"][MATH]


def test_decode_pages_divide_what_is_cached():
    for seqlen in (8192, 131072, 48, 130):
        size = found._page_size(Case.decode(1, seqlen, 2, 2, 64))
        assert seqlen % size == 0 and size <= max(decode.PAGE_SIZES)
