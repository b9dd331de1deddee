"""What is read and what is written: nothing outside the views, every element of the outputs, whatever memory held."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import BF16, DEVICE_PARAMS, F16, F32, LAYOUTS, Case, lay_out, on_devices
from compare import assert_bitwise

import flashtile

LAYOUT_CASES = [
    Case("causal", dtype=F32, causal=True, heads_q=4, heads_k=2, head_dim=72, head_dim_v=40, batch=3),
    Case("window", dtype=F16, window=(33, 8), heads_q=4, heads_k=2, head_dim=128, seqlen_q=129, seqlen_k=191),
    Case("full", dtype=BF16, heads_q=3, heads_k=3, head_dim=96, seqlen_q=1, seqlen_k=130),
]


@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("case, device", on_devices(LAYOUT_CASES))
def test_layouts_agree_bitwise(case, device, layout, attention):
    """NaN stands in every gap of the strided views, so a stray read shows, and so does a result left unwritten."""
    dense = case.tensors(device)
    expected = attention(*dense, return_lse=True, **case.options(device))
    found = attention(*(lay_out(x, layout) for x in dense), return_lse=True, **case.options(device))
    assert_bitwise(found[0], expected[0], "out")
    assert_bitwise(found[1], expected[1], "lse")
    assert found[0].is_contiguous()


@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("case, device", on_devices(LAYOUT_CASES, ["cpu"]))
def test_gradients_of_layouts_agree_bitwise(case, device, layout, attention, gradients):
    results = []
    for change in (lambda x: x, lambda x: lay_out(x, layout)):
        inputs = [change(x).detach().requires_grad_() for x in case.tensors(device)]
        out = attention(*inputs, **case.options(device))
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(device, case.dtype)
        results.append(gradients(out, inputs, change(dout)))
    for what, found, expected in zip(("dq", "dk", "dv"), *results, strict=True):
        assert_bitwise(found, expected, what)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_operands_may_overlap(device, attention):
    """One buffer seen as q, k and v, and a key head expanded over the batch with stride 0."""
    x = Case("one", dtype=F16, seqlen_q=80, heads_q=2).tensors(device)[0]
    assert_bitwise(attention(x, x, x, causal=True), attention(x, x.clone(), x.clone(), causal=True))
    shared = x[:1].expand_as(x)
    assert_bitwise(attention(x, shared, shared), attention(x, shared.contiguous(), shared.contiguous()))


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_inputs_are_not_written(device, attention):
    inputs = Case("inputs", dtype=F16, layout="gaps", causal=True).tensors(device)
    copies = [x.clone() for x in inputs]
    attention(*inputs, causal=True)
    for x, copy in zip(inputs, copies, strict=True):
        assert_bitwise(x, copy, "input")


HEAP = """
import torch, flashtile
torch.manual_seed(0)
def show(*tensors):
    for x in tensors:
        print(x.nan_to_num(neginf=-1).double().mul(torch.arange(x.numel()).view(x.shape).sin()).sum().item().hex())
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    for sq, sk, d, dv in ((65, 97, 64, 64), (1, 130, 40, 72), (130, 3, 256, 8)):
        q, k, v = torch.randn(2, sq, 4, d), torch.randn(2, sk, 2, d), torch.randn(2, sk, 2, dv)
        q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
        sinks = torch.randn(4, requires_grad=True)
        for more in ({}, {"sinks": sinks}, {"dropout_p": 0.3, "seed": 5}):
            out, lse = flashtile.attention(q, k, v, causal=True, softcap=5.0, return_lse=True, **more)
            inputs = [q, k, v, *([sinks] if "sinks" in more else [])]
            grads = torch.autograd.grad([out, lse], inputs, [torch.ones_like(out), torch.ones_like(lse)])
            show(out, lse, *grads)
    q, k, v = torch.randn(140, 4, 40), torch.randn(160, 2, 40), torch.randn(160, 2, 72)
    inputs = [*(x.to(dtype).requires_grad_() for x in (q, k, v)), torch.randn(4, requires_grad=True)]
    tables = {"cu_seqlens_q": torch.tensor([0, 70, 70, 71, 130]), "cu_seqlens_k": torch.tensor([0, 50, 60, 60, 150])}
    tables["seqused_k"] = torch.tensor([45, 10, 0, 77])
    tables = {name: x.int() for name, x in tables.items()}
    out, lse = flashtile.attention_varlen(*inputs[:3], sinks=inputs[3], causal=True, return_lse=True, **tables)
    show(out, lse, *torch.autograd.grad([out, lse], inputs, [torch.ones_like(out), torch.ones_like(lse)]))
"""


def test_the_heap_before_does_not_show():
    """Every allocation, of workspaces too, is filled with bytes that are NaN in float16 and -1e38 in float32."""

    def run(fill):
        environment = os.environ | {"MALLOC_PERTURB_": fill, "OMP_NUM_THREADS": "2"}
        return subprocess.run([sys.executable, "-c", HEAP], env=environment, check=True, capture_output=True, text=True)

    clean, perturbed = run("0").stdout, run("1").stdout
    assert clean.count("\n") == 9 * (5 + 6 + 5) + 3 * 6 and "nan" not in clean
    assert perturbed == clean


def test_the_state_of_the_softmax_goes_with_the_graph():
    q = torch.zeros(1, 2**14, 16, 8, requires_grad=True)  # 2 MiB of the softmax
    k = v = torch.zeros(1, 1, 16, 8)
    status = Path("/proc/self/status").read_text
    before = int(re.search(r"VmRSS:\s+(\d+)", status()).group(1))
    for _ in range(300):
        flashtile.attention(q, k, v)
    assert int(re.search(r"VmRSS:\s+(\d+)", status()).group(1)) - before < 150 * 1024


def test_the_state_of_the_softmax_serves_as_often_as_the_graph():
    inputs = Case("again", dtype=F32, causal=True).tensors(requires_grad=True)
    out = flashtile.attention(*inputs, causal=True)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    out_too, _ = flashtile.attention(*inputs, causal=True, return_lse=True)
    for again in (torch.autograd.grad(out, inputs, dout), torch.autograd.grad(out_too, inputs, dout)):
        for a, b in zip(again, first, strict=True):
            assert_bitwise(a, b)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, inputs, dout)
