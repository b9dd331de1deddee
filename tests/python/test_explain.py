"""explain, info, the docstrings' examples, and what the package exports."""

import doctest
import importlib
import re

import pytest
import torch
from cases import DEVICE_PARAMS, F16, Case

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


def test_docstring_examples_run():
    compat = ("compat", "compat.bert_padding", "compat.flash_attn", "compat.flash_attn_interface")
    for name in ("attention", "combine", "info", "kvcache", "sdpa", "varlen", *compat):
        # flashtile.attention is the function; the module of that name stands in sys.modules.
        results = doctest.testmod(importlib.import_module(f"flashtile.{name}"), raise_on_error=False)
        assert results.failed == 0
        assert name == "info" or results.attempted >= 4


def test_exports():
    functions = ["attention", "attention_kvcache", "attention_varlen", "combine", "explain", "info"]
    functions += ["scaled_dot_product_attention"]
    assert sorted(flashtile.__all__) == ["__version__", *functions]
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", flashtile.__version__)
