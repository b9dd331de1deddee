"""Under torch.compile on a GPU alone: CUDA graphs, and a host that does not wait."""

import pytest
import torch
from cases import BF16, Case
from compare import assert_bitwise
from torch._dynamo.utils import counters
from waiting import host_never_waits

import flashtile

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def graphed(function):
    return torch.compile(function, mode="reduce-overhead", fullgraph=True)


def assert_graphs_were_captured():
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("sinks", [None, 0.0])
def test_training_in_cuda_graphs(sinks):
    """Forward and backward: a few runs, of which the first ones warm up and capture."""
    case = Case("training", dtype=BF16, heads_q=6, heads_k=2, causal=True, sinks=sinks, seqlen_q=200, seqlen_k=200)
    options = case.options("cuda") | dict(deterministic=True, return_lse=True)

    def function(q, k, v):
        out, lse = flashtile.attention(q * 2, k, v, **options)
        return out + 1, lse

    call = graphed(function)
    for step in range(4):
        inputs = [(x + step).detach().requires_grad_() for x in case.tensors("cuda")]
        torch.compiler.cudagraph_mark_step_begin()
        found, expected = call(*inputs), function(*inputs)
        gradients = []
        for out, lse in (found, expected):
            gradients.append(torch.autograd.grad(out.square().sum() + lse.sum(), inputs))
        for a, b in zip((*found, *gradients[0]), (*expected, *gradients[1]), strict=True):
            assert_bitwise(a, b)
    assert_graphs_were_captured()


def test_dropout_is_drawn_anew_in_each_run():
    """The seed lies on the CPU, which no CUDA graph holds."""
    inputs = Case("dropout", dtype=BF16).tensors("cuda", requires_grad=True)
    call = graphed(lambda *x: flashtile.attention(*x, dropout_p=0.5, deterministic=True))

    def run(seed):
        torch.manual_seed(seed)
        out = call(*inputs)
        return [x.clone() for x in (out, *torch.autograd.grad(out.square().sum(), inputs))]

    first = run(0)
    for seed in (1, 2, 3):
        assert not torch.equal(run(seed)[0], first[0])
    for a, b in zip(run(0), first, strict=True):
        assert_bitwise(a, b)


@pytest.mark.parametrize("paged", [False, True])
def test_decoding_in_cuda_graphs(paged):
    """Token by token into caches in place, with the lengths on the GPU."""
    layers, batch, pages, page_size = 2, 3, 12, 16
    shape = (pages, page_size) if paged else (batch, pages * page_size // batch)
    caches = torch.randn(layers, 2, *shape, 2, 64, dtype=BF16, device="cuda")
    expected_caches = caches.clone()
    table = torch.randperm(pages, device="cuda").int().view(batch, -1) if paged else None
    torch._dynamo.mark_static_address(caches)

    def step(x, caches, held):
        for k_cache, v_cache in caches:
            new = dict(k_new=x[:, :, :2], v_new=x[:, :, 2:4])
            x = x + flashtile.attention_kvcache(
                x, k_cache, v_cache, cache_seqlens=held, block_table=table, num_splits=1, **new
            )
        return x

    call = graphed(step)
    held = torch.tensor([0, 5, 30], dtype=torch.int32, device="cuda")
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(batch, 1, 8, 64, dtype=BF16, device="cuda")
            torch.compiler.cudagraph_mark_step_begin()
            assert_bitwise(call(x, caches, held), step(x, expected_caches, held))
            assert_bitwise(caches, expected_caches)
            held = held + 1
    assert_graphs_were_captured()


def test_the_host_never_waits():
    inputs = Case("waiting", dtype=BF16, causal=True).tensors("cuda", requires_grad=True)
    call = torch.compile(flashtile.attention, fullgraph=True)

    def run():
        torch.autograd.grad(call(*inputs, causal=True).sum(), inputs)

    run()
    with host_never_waits():
        run()
