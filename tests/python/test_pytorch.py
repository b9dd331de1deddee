"""torch.nn.attention's registry: what activation replaces, that restoring undoes it, and results through autograd."""

import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.attention
import torch.nn.functional as F
from cases import BF16, F16, F32
from compare import assert_accurate

import flashtile
import flashtile.integrations.pytorch as integration

registry = torch.nn.attention
pytestmark = pytest.mark.skipif(
    not hasattr(registry, "register_flash_attention_impl"),
    reason="this PyTorch has no registry, expected 2.10 or newer",
)


@pytest.fixture
def activated():
    integration.register()
    registry.activate_flash_attention_impl("flashtile")
    yield
    if registry.current_flash_attention_impl() is not None:
        registry.restore_flash_attention_impl()


@pytest.fixture
def on_the_cpu():
    """PyTorch has no such operators there, so they are ours alone: dispatch and autograd are PyTorch's all the same."""
    activation = integration._activate("CPU")
    yield
    activation.remove()


def has_kernels(device_type):
    return [
        torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", device_type)
        for name in integration._FUNCTIONS
        if hasattr(torch.ops.aten, name)
    ]


def test_activation_and_restoring():
    before = has_kernels("CUDA")
    integration.register()
    integration.register()
    assert registry.list_flash_attention_impls().count("flashtile") == 1
    assert registry.current_flash_attention_impl() is None and has_kernels("CUDA") == before
    for _ in range(2):
        registry.activate_flash_attention_impl("flashtile")
        assert registry.current_flash_attention_impl() == "flashtile"
        assert all(has_kernels("CUDA")) and not any(has_kernels("CPU"))
        registry.restore_flash_attention_impl()
        assert registry.current_flash_attention_impl() is None and has_kernels("CUDA") == before


def test_nothing_happens_on_import():
    code = (
        "import flashtile.integrations.pytorch as ours, torch.nn.attention as registry\n"
        "assert 'flashtile' not in registry.list_flash_attention_impls()\n"
        "ours.register(); assert registry.current_flash_attention_impl() is None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_documentation():
    page = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
    section = page.partition("# PyTorch's own")[2].partition("\n## ")[0]
    (example,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    exec(example, {})
    assert registry.current_flash_attention_impl() is None
    assert doctest.testmod(integration).attempted >= 4 and doctest.testmod(integration).failed == 0


LAYOUTS = {
    "heads first": lambda x: x,
    "sequence first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sliced": lambda x: torch.cat([x, x], dim=-1)[..., : x.shape[-1]],
}


def inputs_of(layout, heads_k=4, lengths=(33, 33), dtype=F32, device="cpu"):
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, 4, lengths[0], 16), *[(2, heads_k, lengths[1], 16)] * 2)
    values = [LAYOUTS[layout](torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]
    return [x.detach().requires_grad_() for x in values]


def differentiated(function, inputs):
    out = function(*inputs)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(6)).to(out)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def check(found, inputs, **options):
    def stock(*inputs):
        return F.scaled_dot_product_attention(*inputs, **options)

    exact = differentiated(stock, [x.detach().double().requires_grad_() for x in inputs])
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        rough = differentiated(stock, inputs)
    for what, mine, best, worse in zip(("out", "dq", "dk", "dv"), found, exact, rough, strict=True):
        assert_accurate(mine, best, worse, what, slack=1e-5 if mine.dtype is F32 else 1e-3)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.4}], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_and_gradients(layout, options, dtype, on_the_cpu):
    inputs = inputs_of(layout, dtype=dtype)

    def ours(*inputs):
        out, *rest = torch.ops.aten._scaled_dot_product_flash_attention(*inputs, **options)
        assert out.stride() == torch.empty_like(inputs[0]).stride()  # as PyTorch's shape functions say
        assert rest[0].shape == (2, 4, 33) and rest[3:5] == [33, 33]
        return out

    check(differentiated(ours, inputs), inputs, **options)


def test_grouped_heads_and_other_lengths(on_the_cpu):
    """The last query meets the last key, which is what PyTorch's lower-right causal bias counts on."""
    inputs = inputs_of("heads first", heads_k=2, lengths=(20, 33))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*inputs, 0.0, True)
    expected = flashtile.attention(*(x.transpose(1, 2) for x in inputs), causal=True, return_lse=True)
    assert torch.equal(out.transpose(1, 2), expected[0]) and torch.equal(lse, expected[1])


def assert_close(found, expected):
    """PyTorch hands its backward an lse, where flashtile's has the reference and the sum of each row."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_dropout_drops_the_same_weights_in_backward(on_the_cpu):
    inputs = inputs_of("sequence first")

    def ours(*inputs):
        return torch.ops.aten._scaled_dot_product_flash_attention(*inputs, 0.4)[0]

    def flashtiles(*inputs):
        return flashtile.attention(*(x.transpose(1, 2) for x in inputs), dropout_p=0.4).transpose(1, 2)

    results = []
    for function in (ours, flashtiles, ours):
        torch.manual_seed(1)
        results.append(differentiated(function, inputs))
    for first, second, third in zip(*results, strict=True):
        assert torch.equal(first, third)
        assert_close(first, second)
    assert not torch.equal(ours(*inputs), ours(*inputs))


def test_ragged_batches(on_the_cpu):
    varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    inputs = [torch.randn(30, 4, 16, requires_grad=True) for _ in range(3)]
    offsets = torch.tensor([0, 11, 11, 30], dtype=torch.int32)

    def theirs(*inputs):
        return varlen_attn(*inputs, offsets, offsets, 19, 19, window_size=(5, 0))

    def ours(*inputs):
        options = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "window": (5, 0)}
        return flashtile.attention_varlen(*inputs, **options)

    for found, expected in zip(differentiated(theirs, inputs), differentiated(ours, inputs), strict=True):
        assert_close(found, expected)


def ranks_of_context_parallel(size, device):
    program = Path(__file__).with_name("context_parallel_ranks.py")
    command = [sys.executable, str(program), str(size), device]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=program.parent)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-8000:]
    assert re.search(r"^[1-9]\d* calls$", ended.stdout, re.MULTILINE)


@pytest.mark.parametrize("size", [2, 3])
def test_context_parallel(size):
    ranks_of_context_parallel(size, "cpu")


@pytest.mark.gpu
def test_context_parallel_of_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    ranks_of_context_parallel(2, "cuda")


def test_what_is_refused(on_the_cpu):
    q = torch.randn(2, 9, 4, 16)
    lengths = torch.tensor([9, 3], dtype=torch.int32)
    unserved = {"alibi_slopes": torch.ones(4), "block_table": lengths[:, None], "seqused_k": lengths}
    for name, value in unserved.items():
        with pytest.raises(NotImplementedError, match=f"^_flash_attention_forward: {name} is given, expected none"):
            torch.ops.aten._flash_attention_forward(q, q, q, None, None, 9, 9, 0.0, False, False, **{name: value})
    with pytest.raises(NotImplementedError, match="return_debug_mask is given"):
        torch.ops.aten._scaled_dot_product_flash_attention(*[q.transpose(1, 2)] * 3, 0.0, False, True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_a_gpu(layout, is_causal, dtype, activated):
    inputs = inputs_of(layout, dtype=dtype, device="cuda")

    def flash(*inputs):
        with registry.sdpa_kernel(registry.SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(*inputs, is_causal=is_causal)

    found = differentiated(flash, inputs)
    ours = flashtile.attention(*(x.transpose(1, 2) for x in inputs), causal=is_causal).transpose(1, 2)
    assert torch.equal(found[0], ours)  # so it is flashtile's
    registry.restore_flash_attention_impl()
    check(found, inputs, is_causal=is_causal)
    check(differentiated(flash, inputs), inputs, is_causal=is_causal)


@pytest.mark.gpu
def test_dropout_on_a_gpu(activated):
    inputs = inputs_of("sequence first", dtype=BF16, device="cuda")

    def flash(*inputs):
        with registry.sdpa_kernel(registry.SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(*inputs, dropout_p=0.4)

    def ours(*inputs):
        return flashtile.attention(*(x.transpose(1, 2) for x in inputs), dropout_p=0.4, deterministic=True).transpose(
            1, 2
        )

    torch.manual_seed(1)
    found = differentiated(flash, inputs)
    torch.manual_seed(1)
    for mine, other in zip(found, differentiated(ours, inputs), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.gpu
def test_compiled_on_a_gpu(activated):
    inputs = inputs_of("heads first", dtype=BF16, device="cuda")

    def flash(*inputs):
        with registry.sdpa_kernel(registry.SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(*inputs, is_causal=True)

    check(differentiated(torch.compile(flash), inputs), inputs, is_causal=True)
