"""explain, info, the docstrings' examples, and what the package exports."""

import concurrent.futures
import doctest
import importlib
import re

import pytest
import torch
from cases import DEVICE_PARAMS, F16, Case
from torch._subclasses import FakeTensorMode

import flashtile


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


@pytest.mark.gpu
def test_explain_of_misaligned_tensors_is_that_of_their_copies():
    case = Case("explain", dtype=F16, layout="misaligned")
    dense = [x.contiguous() for x in case.tensors("cuda")]
    assert flashtile.explain(*case.tensors("cuda")) == flashtile.explain(*dense)


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
    compat = ("compat", "compat.bert_padding", "compat.flash_attn", "compat.flash_attn_interface")
    for name in ("attention", "combine", "explain", "info", "kvcache", "sdpa", "varlen", *compat):
        # flashtile.attention is the function; the module of that name stands in sys.modules.
        results = doctest.testmod(importlib.import_module(f"flashtile.{name}"), raise_on_error=False)
        assert results.failed == 0
        assert name == "info" or results.attempted >= 4


def test_exports():
    functions = ["attention", "attention_kvcache", "attention_varlen", "combine", "explain", "info"]
    functions += ["scaled_dot_product_attention"]
    assert sorted(flashtile.__all__) == ["__version__", *functions]
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", flashtile.__version__)
