"""explain, info, the docstrings' examples, and what the package exports."""

import concurrent.futures
import doctest
import importlib
import itertools
import re

import pytest
import reference
import torch
from cases import CASES, DEVICE_PARAMS, F16, Case
from torch._subclasses import FakeTensorMode

import flashtile
from flashtile.masks import ColumnMask


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_explain_names_the_kernel(device):
    case = Case("explain", dtype=F16, heads_q=4, heads_k=2, head_dim=72, causal=True)
    text = flashtile.explain(*case.tensors(device), **case.options(device))
    kernel = re.search(r"\b(cpu|sm\d+)_f16_d\d+_v\d+_m\d+_n\d+_s\d+_w\d+\b", text)
    assert kernel, text
    assert kernel[0] in flashtile.info()["forward_kernels"]


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_explain_names_the_options(device):
    inputs = Case("explain", dtype=F16).tensors(device)
    plain = flashtile.explain(*inputs)
    sinks = torch.zeros(2, dtype=torch.bfloat16, device=device)
    text = flashtile.explain(*inputs, sinks=sinks, dropout_p=0.25, deterministic=True)
    for option in (", sinks", ", dropout 0.25", ", deterministic"):
        assert option in text and option not in plain


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize(
    "band", [{}, {"causal": True}, {"window": (100, 30)}, {"window": (300, -200)}, {"window": (-900, None)}], ids=str
)
def test_explain_counts_the_blocks_of_a_column_mask(device, band):
    q = torch.randn(1, 700, 2, 64, dtype=F16, device=device)
    k = torch.randn(1, 900, 2, 64, dtype=F16, device=device)
    bounds = torch.randint(0, 701, (1, 2, 9, 4), generator=torch.Generator().manual_seed(0)).sort(-1).values
    mask = ColumnMask(bounds.int().repeat_interleave(100, dim=2), 700).to(device)
    text = flashtile.explain(q, k, k, mask=mask, **band)
    tile_m, tile_n = map(int, re.search(r"tile +(\d+) rows × (\d+) keys", text).groups())
    seen = mask.to_dense() & reference.visible(700, 900, **band, device=device)
    kinds = []
    for head, row, key in itertools.product(range(2), range(0, 700, tile_m), range(0, 900, tile_n)):
        block = seen[0, head, row : row + tile_m, key : key + tile_n]
        whole = block.all() and block.shape[1] == tile_n
        kinds.append("interior" if whole else "edge" if block.any() else "skipped")
    counts = [kinds.count(kind) for kind in ("interior", "edge", "skipped")]
    assert "blocks    {} interior, {} at an edge, {} skipped".format(*counts) in text
    assert "\n  blocks " not in flashtile.explain(q, k, k, **band)


def test_distances_beyond_any_length_count_as_such():
    q, mask = torch.ones(1, 64, 2, 64), ColumnMask.document([30, 34])
    for far, near in (((2**70, -(2**70)), (64, -64)), ((None, -(2**70)), (None, -64)), ((2**70, None), None)):
        texts = [flashtile.explain(q, q, q, mask=mask, window=window) for window in (far, near)]
        counts = [re.findall(r"blocks .*", text) for text in texts]
        assert counts[0] == counts[1] != []


@pytest.mark.gpu
def test_explain_of_misaligned_tensors_is_that_of_their_copies():
    case = Case("explain", dtype=F16, layout="misaligned")
    dense = [x.contiguous() for x in case.tensors("cuda")]
    assert flashtile.explain(*case.tensors("cuda")) == flashtile.explain(*dense)


def described(*shape, dtype=F16):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    "name, like, kernel",
    [
        ("H100", "H100: compute capability 9.0, 132 multiprocessors", "sm90_"),
        ("nvidia h200", "H200: compute capability 9.0, 132 multiprocessors", "sm90_"),
        ("9.0", "H100: compute capability 9.0, 132 multiprocessors", "sm90_"),
        ("sm_80", "A100: compute capability 8.0, 108 multiprocessors", "sm80_"),
        ("rtx-4090", "RTX 4090: compute capability 8.9, 128 multiprocessors", "sm80_"),
        ("B200", "B200: compute capability 10.0, 148 multiprocessors", "sm80_"),
    ],
)
def test_explain_of_a_gpu_that_need_not_be_here(name, like, kernel):
    q, k = described(64, 4096, 32, 128), described(64, 4096, 8, 128)
    text = flashtile.explain(q, k, k, causal=True, device=name)
    assert text.startswith(f"on the GPU {like}\nflashtile forward plan\n")
    kernels = re.findall(r"  kernel    (\w+?_)", text)
    assert kernels == [kernel, kernel]
    assert ("(not in this build)" in text) != any(
        name.startswith(kernel) for name in flashtile.info()["forward_kernels"]
    )


def test_explain_of_a_gpu_fits_its_multiprocessors_and_shared_memory():
    q = described(64, 4096, 32, 128)
    grids = [int(re.search(r"grid +(\d+)", flashtile.explain(q, q, q, device=gpu))[1]) for gpu in ("H100", "H20")]
    assert grids == [132, 78]  # Hopper's forward is persistent
    for gpu, limit in (("A100", 163), ("A10", 99), ("L4", 99), ("RTX 5090", 99), ("H100", 227), ("B200", 227)):
        for head_dim in (64, 128, 256):
            q = described(64, 4096, 32, head_dim)
            found = [float(kib) for kib in re.findall(r"shared +([\d.]+) KiB", flashtile.explain(q, q, q, device=gpu))]
            assert len(found) == 2 and max(found) <= limit


def test_explain_plans_real_tensors_for_another_device():
    q = torch.ones(2, 100, 4, 64, dtype=F16)
    cu_seqlens = torch.tensor([0, 60, 100], dtype=torch.int32)
    for tensors, options in (
        ((q, q, q), {}),
        ((q[0], q[0], q[0]), dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)),
        ((q, q.clone(), q.clone()), dict(cache_seqlens=7, k_new=q[:, :5], v_new=q[:, 5:10], num_splits=2)),
    ):
        text = flashtile.explain(*tensors, **options, device="A100")
        assert " on cuda:0" in text and "sm80_f16" in text
        assert " on cpu" in flashtile.explain(*tensors, **options)  # nothing stays behind


def test_explain_of_described_tensors_on_the_cpu():
    """Of which it reads the tables alone."""
    real, shape = torch.ones(2, 100, 4, 64), (2, 100, 4, 64)
    q = described(*shape, dtype=torch.float32)
    for device in ("cpu", torch.device("cpu"), "cpu:0"):
        assert flashtile.explain(q, q, q, device=device) == flashtile.explain(real, real, real)
    held = torch.tensor([3, 4], dtype=torch.int32)
    plan = flashtile.explain(real, real, real, cache_seqlens=held)
    assert flashtile.explain(q, q, q, cache_seqlens=held, device="cpu") == plan
    with pytest.raises(TypeError, match="cache_seqlens has no memory, expected a tensor with data"):
        flashtile.explain(q, q, q, cache_seqlens=held.to("meta"), device="cpu")
    with pytest.raises(ValueError, match=r"^attention_kvcache: cache_seqlens .*101"):
        flashtile.explain(q, q, q, cache_seqlens=held + 98, device="cpu")


@pytest.mark.gpu
def test_explain_of_described_tensors_on_this_gpu():
    real = torch.ones(2, 100, 4, 64, dtype=F16, device="cuda")
    q = described(2, 100, 4, 64)
    assert flashtile.explain(q, q, q, device="cuda") == flashtile.explain(real, real, real)


@pytest.mark.parametrize("device", ["X100", "", "cuda:", "cuda:-1", "cuda:1x", "8.8"])
def test_explain_refuses_a_device_that_it_does_not_know(device):
    q = described(1, 8, 1, 8)
    with pytest.raises(ValueError, match=f"^explain: device is {device}, expected cpu, cuda, A100, .* such as 9.0$"):
        flashtile.explain(q, q, q, device=device)
    with pytest.raises(
        NotImplementedError, match=r"^attention: q is on cuda:0 \(T4, compute capability 7.5\), expected"
    ):
        flashtile.explain(q, q, q, device="T4")


@pytest.mark.parametrize(
    "names, plan, words",
    [
        (("few_rows",), 0, "splits +{} of a tile's keys"),  # a forward of few tiles
        (("few_keys", "few_blocks"), 1, "parts +{} thread blocks share"),  # a backward of few blocks of keys
    ],
)
def test_explain_tells_how_work_is_shared_where_there_is_little(names, plan, words):
    """Of the cases of these names, which shall have as little on Hopper, and not where there is more."""
    few = [case for case in CASES if case.name.startswith(names) and case.dtype is F16]
    assert few
    for case in few:
        text = flashtile.explain(*case.tensors(), **case.options(), device="H100")
        assert re.search(words.format(r"([2-9]|\d\d+)"), text.split("\n\n")[plan]), f"{case}\n{text}"
    many = described(8, 4096, 32, 128)
    assert not re.search(words.format(r"\d+"), flashtile.explain(many, many, many, device="H100"))


def test_explain_prints_sizes_that_people_can_read():
    big = described(8, 32768, 16, 128)
    text = flashtile.explain(big, big, big, causal=True, device="H100")
    forward, backward = text.split("\n\n")[:2]
    assert "work      35.19 TFLOP\n" in forward and "traffic   4.016 GiB at the least" in forward
    assert re.search(r"shared +2\d\d(\.\d)? KiB per block", forward)
    assert re.search(r"workspace [\d.]+ GiB\n", backward)
    tiny = torch.ones(1, 1, 1, 8)
    text = flashtile.explain(tiny, tiny, tiny)
    assert "work      32 FLOP\n" in text and "traffic   132 bytes at the least" in text


def small_cache(device, **options):
    """A cache in which nothing is, to which the call would write."""
    k_cache, v_cache = torch.zeros(2, 3, 64, 2, 64, dtype=F16, device=device)
    table = torch.zeros(1, 3, dtype=torch.int32, device=device)
    q, rows = torch.ones(2, 1, 5, 2, 64, dtype=F16, device=device)
    options = dict(cache_seqlens=7, k_new=rows, v_new=rows, block_table=table) | options
    return (q, k_cache, v_cache), options


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_explain_of_a_cache_writes_nothing(device):
    tensors, options = small_cache(device)
    text = flashtile.explain(*tensors, **options)
    assert "3 of 3 pages of 64 rows" in text and "5 new ones" in text
    assert not tensors[1].any() and not tensors[2].any()
    flashtile.attention_kvcache(*tensors, **options)
    assert tensors[1].any()


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_explain_of_a_ragged_batch(device):
    q = torch.ones(10, 2, 64, dtype=F16, device=device)
    begins = torch.tensor([0, 4, 10], dtype=torch.int32, device=device)
    text = flashtile.explain(q, q, q, cu_seqlens_q=begins, cu_seqlens_k=begins)
    assert "ragged T_q=10" in text and "forward plan" in text and "backward plan" in text


def test_explain_does_not_ask_for_gradients_either():
    x = torch.ones(1, 5, 2, 64)
    assert flashtile.explain(x.clone().requires_grad_(), x, x, return_lse=True) == flashtile.explain(x, x, x)


def test_explain_follows_the_process_in_what_is_deterministic():
    x = torch.ones(1, 5, 2, 64)
    torch.use_deterministic_algorithms(True)
    try:
        assert ", deterministic" in flashtile.explain(x, x, x)
        assert ", deterministic" not in flashtile.explain(x, x, x, deterministic=False)
    finally:
        torch.use_deterministic_algorithms(False)


def test_calls_compute_again_after_explain():
    """Also after one that was refused; and other threads compute all the while."""
    x = torch.ones(1, 5, 2, 64)

    asked = []

    class Asking:  # who asks for its attributes is explaining a call
        def __getattr__(self, name):
            asked.append(name)
            with concurrent.futures.ThreadPoolExecutor() as pool:
                assert torch.equal(pool.submit(flashtile.attention, x, x, x).result(), x)
            raise AttributeError(name)

    flashtile.explain(x, x, x)
    assert torch.equal(flashtile.attention(x, x, x), x)
    for wrong in (x[..., :7], Asking()):
        with pytest.raises((TypeError, ValueError)):
            flashtile.explain(x, wrong, x)
        assert torch.equal(flashtile.attention(x, x, x), x)
    assert asked


def test_explain_wants_tensors_that_hold_data():
    with FakeTensorMode():
        x = torch.empty(1, 5, 2, 64)
        with pytest.raises(NotImplementedError, match=r"^explain: "):
            flashtile.explain(x, x, x)


def test_info_prints_what_it_holds():
    info = flashtile.info()
    assert info["flashtile"] == flashtile.__version__ and info["torch"] == torch.__version__
    assert any(name.startswith("cpu_f32") for name in info["forward_kernels"])
    assert any(name.startswith("cpu_f32") for name in info["backward_kernels"])
    assert info["built_with_cuda"] == any(name.startswith("sm") for name in info["forward_kernels"])
    lines = str(info).splitlines()
    assert len(lines) == len(info) and all(
        line.startswith(name.replace("_", " ")) for line, name in zip(lines, info, strict=True)
    )
    assert ("make build CUDA=PYPI" in str(info)) != info["built_with_cuda"]  # what to do about a build without


def test_docstring_examples_run():
    compat = (
        "compat",
        "compat.bert_padding",
        "compat.flash_attn",
        "compat.flash_attn_interface",
        "compat.layers.rotary",
    )
    for name in (
        "attention",
        "cascade",
        "combine",
        "explain",
        "info",
        "kvcache",
        "max_logits",
        "sdpa",
        "varlen",
        *compat,
    ):
        # flashtile.attention is the function; the module of that name stands in sys.modules.
        results = doctest.testmod(importlib.import_module(f"flashtile.{name}"), raise_on_error=False)
        assert results.failed == 0
        assert name == "info" or results.attempted >= 4


def test_exports():
    functions = [
        "attention",
        "attention_cascade",
        "attention_kvcache",
        "attention_varlen",
        "batch_invariant_mode",
        "combine",
        "explain",
        "info",
    ]
    functions += ["max_logits", "scaled_dot_product_attention"]
    assert sorted(flashtile.__all__) == ["__version__", *functions]
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", flashtile.__version__)
