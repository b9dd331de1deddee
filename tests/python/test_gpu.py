"""The forward on a GPU alone: sizes beyond 32-bit offsets, streams, graphs, several devices."""

import concurrent.futures
import os
import subprocess
import sys

import pytest
import reference
import torch
from cases import BF16, F16, F32, SEED, Case, randn
from compare import assert_accurate, assert_bitwise

import flashtile
from flashtile import _C

pytestmark = pytest.mark.gpu


def check_rows(q, k, v, rows, **options):
    """Compares the rows `rows` of every head; the float64 reference of the whole would not fit."""
    out, lse = flashtile.attention(q, k, v, return_lse=True, **options)
    exact_out, exact_lse = reference.attention(q, k, v, rows=rows, **options)
    rough_out, _ = reference.attention(q, k, v, rows=rows, dtype=q.dtype, **options)
    _, rough_lse = reference.attention(q, k, v, rows=rows, dtype=F32, **options)
    assert_accurate(out[:, rows], exact_out, rough_out, "out")
    assert_accurate(lse[:, :, rows], exact_lse, rough_lse, "lse")
    return out, lse


def sample(length, count=24):
    """Row numbers: the first, the last, and some between, on the GPU."""
    return torch.linspace(0, length - 1, count, device="cuda").long().unique()


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_long_sequences(head_dim, causal):
    q, k, v = (randn(1, 16384, heads, head_dim) for heads in (4, 2, 2))
    check_rows(q, k, v, sample(16384), causal=causal)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_long_sequences_with_sinks_and_dropout(head_dim):
    q, k, v = (randn(1, 16384, heads, head_dim) for heads in (4, 2, 2))
    sinks = torch.linspace(-3, 9, 4, device="cuda")
    check_rows(q, k, v, sample(16384), causal=True, sinks=sinks)
    check_rows(q, k, v, sample(16384), window=(9001, 3), sinks=sinks, dropout_p=0.1, seed=SEED)


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("ragged", [False, True])
def test_many_tiles_that_see_nothing(head_dim, ragged):
    """A tile waits for the next before it is finished; those that see nothing come many in a row."""
    heads, seqlens_q = 40, (3000, 64, 5000, 3000)
    for seqlen_q in seqlens_q[:1] if ragged else seqlens_q:
        lengths = torch.tensor(seqlens_q if ragged else [seqlen_q])
        q = randn(int(lengths.sum()), heads, head_dim)
        k, v = (randn(64 * len(lengths), heads, head_dim) for _ in range(2))
        begins = [0, *lengths.cumsum(0).tolist()]
        if ragged:
            tables = dict(cu_seqlens_q=begins, cu_seqlens_k=range(0, 64 * len(begins), 64))
            tables = {name: torch.tensor(list(x), dtype=torch.int32, device="cuda") for name, x in tables.items()}
            out, lse = flashtile.attention_varlen(q, k, v, causal=True, return_lse=True, **tables)
        else:
            out, lse = (x[0] for x in flashtile.attention(q[None], k[None], v[None], causal=True, return_lse=True))
        for i, end in enumerate(begins[1:]):
            keys = slice(64 * i, 64 * (i + 1))
            alone = flashtile.attention(q[None, end - 64 : end], k[None, keys], v[None, keys], causal=True)[0]
            torch.testing.assert_close(out[end - 64 : end], alone, rtol=0.02, atol=0.02)
            assert not out[begins[i] : end - 64].any(), "a row that sees nothing is not 0"
            assert torch.all(lse[:, begins[i] : end - 64] == -torch.inf)


@pytest.mark.usefixtures("much_memory")
def test_more_than_2_to_31_elements_of_q():
    seqlen = 2**31 // (64 * 128) + 100
    q, k, v = randn(1, seqlen, 64, 128), randn(1, 100, 64, 128), randn(1, 100, 64, 128)
    assert q.numel() > 2**31
    check_rows(q, k, v, sample(seqlen))


@pytest.mark.usefixtures("much_memory")
def test_more_than_2_to_31_elements_of_k():
    seqlen = 2**31 // (64 * 128) + 100
    q, k, v = randn(1, 40, 64, 128), randn(1, seqlen, 64, 128), randn(1, seqlen, 64, 128)
    assert k.numel() > 2**31
    out, lse = flashtile.attention(q, k, v, causal=True, return_lse=True)
    for head in (0, 31, 63):  # float64 copies of all heads would take 70 GB
        heads = slice(head, head + 1)
        found = check_rows(q[:, :, heads], k[:, :, heads], v[:, :, heads], sample(40), causal=True)
        # Alone a head's keys are split among thread blocks, and so its weights are relative to other references. Each
        # weight is rounded by up to 2^-9 of it, which leaves 9e-6 in the mean of so many: this is five times that.
        torch.testing.assert_close(out[:, :, heads], found[0], rtol=2 * torch.finfo(BF16).eps, atol=4.5e-5)
        torch.testing.assert_close(lse[:, heads], found[1], rtol=1e-6, atol=1e-5)


@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize("batch, heads", [(70_001, 1), (1, 70_001), (700, 101)])
def test_more_than_65535_heads_and_sequences(batch, heads):
    q, k, v = randn(batch, 20, heads, 64), randn(batch, 33, heads, 64), randn(batch, 33, heads, 64)
    check_rows(q, k, v, sample(20), causal=True)


@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize("batch, heads", [(70_001, 1), (1, 70_001)])
def test_sinks_and_dropout_of_more_than_65535_heads_and_sequences(batch, heads):
    q, k, v = randn(batch, 20, heads, 64), randn(batch, 33, heads, 64), randn(batch, 33, heads, 64)
    sinks = torch.linspace(-3, 5, heads, device="cuda")
    check_rows(q, k, v, sample(20), causal=True, sinks=sinks, dropout_p=0.2, seed=SEED)


@pytest.fixture(params=["exchange", "attributes"])
def way(request):
    """How the module learns of tensors and streams."""
    _C._enable_exchange(request.param == "exchange")
    yield request.param
    _C._enable_exchange(True)


@pytest.mark.usefixtures("way")
def test_the_current_stream_orders_the_work():
    """The input is written late on a side stream; a launch on any other stream would read what was there before."""
    q, k, v = Case("stream", dtype=F16, seqlen_q=500, seqlen_k=500).tensors("cuda")
    expected = flashtile.attention(q, k, v)
    late = torch.zeros_like(q)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # cycles, some 30 ms
        late.copy_(q)
        out = flashtile.attention(late, k, v)
        copied = out.clone()
    stream.synchronize()
    assert_bitwise(copied, expected)


def test_streams_at_the_same_time():
    cases = [Case(f"{i}", dtype=F16, causal=i % 2 == 0, seqlen_q=300 + i, head_dim=(64, 128)[i % 2]) for i in range(8)]
    inputs = [case.tensors("cuda") for case in cases]
    expected = [flashtile.attention(*x, causal=case.causal) for x, case in zip(inputs, cases, strict=True)]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(10):
        found = []
        for x, case, stream in zip(inputs, cases, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(flashtile.attention(*x, causal=case.causal))
        torch.cuda.synchronize()
        for a, b in zip(found, expected, strict=True):
            assert_bitwise(a, b)


@pytest.mark.parametrize("layout", ["contiguous", "gaps", "misaligned"])
def test_graph_capture_and_replay(layout):
    case = Case("graph", dtype=BF16, causal=True, heads_q=4, heads_k=2, seqlen_q=200, seqlen_k=300, layout=layout)
    q, k, v = case.tensors("cuda")
    flashtile.attention(q, k, v, causal=True, return_lse=True)  # sets the kernel's attributes before the capture
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out, lse = flashtile.attention(q, k, v, causal=True, return_lse=True)
    for seed in range(3):
        q.copy_(torch.randn(q.shape, generator=torch.Generator().manual_seed(seed)))
        out.fill_(7)
        graph.replay()
        expected = flashtile.attention(q, k, v, causal=True, return_lse=True)
        assert_bitwise(out, expected[0], "out")
        assert_bitwise(lse, expected[1], "lse")


def test_a_first_call_may_be_captured():
    """In a fresh process: nothing of a first call forbids capture."""
    code = """
import torch, flashtile
q = torch.randn(1, 200, 2, 128, device="cuda", dtype=torch.float16)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = flashtile.attention(q, q, q)
graph.replay()
assert torch.equal(out, flashtile.attention(q, q, q))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_a_thousand_runs_agree_bitwise(head_dim):
    inputs = Case("again", head_dim=head_dim, heads_q=40, seqlen_q=700, seqlen_k=700).tensors("cuda")
    first = flashtile.attention(*inputs, causal=True, return_lse=True)
    for _ in range(1000):
        found = flashtile.attention(*inputs, causal=True, return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))


def test_each_gpu_gets_its_kernels(pytestconfig):
    q = randn(1, 128, 1, 128)
    limit = pytestconfig.getoption("--compute-capability") or 1000
    on_hopper = torch.cuda.get_device_capability() == (9, 0) and limit >= 90
    assert (" sm90_" if on_hopper else " sm80_") in flashtile.explain(q, q, q)


@pytest.mark.parametrize("seqlen", [100, 512, 1000, 5000])
def test_every_length_and_mask(seqlen):
    """Hopper's kernels are chosen by length and mask."""
    for heads_q, head_dim, head_dim_v in ((2, 64, 64), (2, 128, 128), (8, 128, 128), (2, 192, 128)):
        q, k, v = randn(1, seqlen, heads_q, head_dim), randn(1, seqlen, 2, head_dim), randn(1, seqlen, 2, head_dim_v)
        check_rows(q, k, v, sample(seqlen), causal=True)
        check_rows(q, k, v, sample(seqlen))
        check_rows(q, k, v, sample(seqlen), window=(seqlen // 2, 3))


def test_only_outputs_are_allocated():
    q, k, v = Case("memory", dtype=F16, seqlen_q=1000, seqlen_k=1000).tensors("cuda")
    flashtile.attention(q, k, v)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = flashtile.attention(q, k, v, return_lse=True)
    torch.cuda.synchronize()
    written = out.numel() * 2 + lse.numel() * 4
    assert torch.cuda.max_memory_allocated() - before <= written + 1024  # PyTorch rounds each to 512 bytes
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="global"):
        flashtile.attention(q, k, v, return_lse=True)  # whoever allocates past PyTorch here breaks the capture


@pytest.mark.parametrize("head_dim", [64, 256])
def test_a_thread_that_has_not_used_cuda(head_dim):
    """The driver launches for the calling thread's context, which a new thread has none of. PyTorch's allocator, which
    has blocks left over here, gives it none."""
    inputs = Case("thread", head_dim=head_dim, causal=True).tensors("cuda")
    expected = flashtile.attention(*inputs, causal=True)
    flashtile.attention(*inputs, causal=True)  # its memory is free again
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:
        found = pool.submit(flashtile.attention, *inputs, causal=True).result()
    assert_bitwise(found, expected)


several_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@several_gpus
def test_another_device_than_the_current_one():
    case = Case("device", dtype=BF16, causal=True)
    expected = flashtile.attention(*case.tensors("cuda:0"), causal=True)
    last = torch.cuda.device_count() - 1
    assert torch.cuda.current_device() == 0
    found = flashtile.attention(*case.tensors(f"cuda:{last}"), causal=True)
    assert found.device.index == last and torch.cuda.current_device() == 0
    torch.cuda.synchronize(last)
    assert_accurate(found.cpu(), expected.double().cpu(), expected.cpu())


@several_gpus
def test_tensors_of_two_gpus_are_refused():
    q, k, v = Case("mixed", dtype=BF16).tensors("cuda:0")
    with pytest.raises(ValueError, match=r"^attention: v is on cuda:1, expected cuda:0, as q"):
        flashtile.attention(q, k, v.to("cuda:1"))


def test_processes_share_a_gpu():
    code = """
import torch, flashtile
torch.manual_seed(0)
q = torch.randn(2, 700, 4, 64).to("cuda", torch.float16)
for _ in range(50):
    out = flashtile.attention(q, q, q, causal=True)
print(out.double().sum().item().hex())
"""
    device = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[-1]}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ | device)
        for _ in range(2)
    ]
    sums = [process.communicate()[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert sums[0] == sums[1] and sums[0].strip()
