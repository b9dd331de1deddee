"""The operators: their schemas, shapes, FLOPs and errors."""

import pytest
import torch
from cached import Cached
from cases import F32, Case, on_devices
from ragged import Ragged
from test_backward import differentiable
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from traced import CACHES, CASES, Recorded, attend, quiet

import flashtile

pytestmark = quiet


@pytest.mark.parametrize("case, device", on_devices(CASES))
def test_opcheck(case, device):
    inputs, options = differentiable(case, device)
    with Recorded() as recorded:
        out, lse = attend(case, inputs, options, return_lse=True, deterministic=True)
        torch.autograd.grad([out, lse], inputs, [torch.ones_like(out), torch.ones_like(lse)], retain_graph=True)
        torch.autograd.grad(out, inputs[:2], torch.ones_like(out))
    name = "attention_varlen" if isinstance(case, Ragged) else "attention"
    name += "_dropout" if options.get("dropout_p") else ""
    assert recorded.names == [f"{name}_forward", f"{name}_backward", f"{name}_backward"]
    torch.library.opcheck(getattr(torch.ops.flashtile, name).default, recorded.calls[0][1])
    for op, given in recorded.calls:
        torch.library.opcheck(op, [x.detach() if isinstance(x, torch.Tensor) else x for x in given])


@pytest.mark.parametrize("case, device", on_devices(CACHES))
def test_opcheck_of_caches(case, device):
    given = case.arguments(device)
    with Recorded() as recorded:
        flashtile.attention_kvcache(**given)
    assert recorded.names == ["attention_kvcache_append" if "k_new" in given else "attention_kvcache"]
    for op, arguments in recorded.calls:
        torch.library.opcheck(op, arguments)


def test_only_what_is_written_is_declared():
    read = torch.ops.flashtile.attention_kvcache.default._schema
    append = torch.ops.flashtile.attention_kvcache_append.default._schema
    assert not read.is_mutable
    assert [x.name for x in append.arguments if x.is_write] == [
        "k_cache",
        "v_cache",
        "k_descale",
        "v_descale",
    ]


@pytest.mark.parametrize("inside", [True, False])
def test_fake_tensors(inside):
    mode = FakeTensorMode()
    with mode:
        q, k, v = Case("fake", dtype=F32, head_dim_v=128).tensors(requires_grad=True)
        if inside:
            out, lse = flashtile.attention(q, k, v, dropout_p=0.1, return_lse=True)
    if not inside:
        out, lse = flashtile.attention(q, k, v, return_lse=True)
    assert (out.shape, lse.shape, lse.dtype) == ((2, 65, 2, 128), (2, 2, 65), F32)
    assert [x.shape for x in torch.autograd.grad(out.sum(), (q, k, v))] == [x.shape for x in (q, k, v)]


@pytest.mark.parametrize("new, held", [(0, None), (1, None), (0, 3)])
def test_fake_caches(new, held):
    """Outside of their mode."""
    mode, given = FakeTensorMode(), Cached("fake", dtype=F32, new=new).arguments()
    if held is not None:
        given["cache_seqlens"] = held
    expected = flashtile.attention_kvcache(**given, return_lse=True)
    fake = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    found = flashtile.attention_kvcache(**fake, return_lse=True)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]


def test_second_derivatives_are_refused():
    q, k, v = Case("twice", dtype=F32).tensors()

    def gradient(q):
        return torch.func.grad(lambda x: flashtile.attention(x, k, v).square().sum())(q).sum()

    with pytest.raises(NotImplementedError, match=r"^attention: differentiated twice, expected once"):
        torch.func.grad(gradient)(q)
    with Recorded(), pytest.raises(NotImplementedError, match=r"^attention: differentiated twice, expected once"):
        q.requires_grad_()
        out = flashtile.attention(q, k, v)
        (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        dq.sum().backward()


def flops_of(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("causal", [False, True])
def test_flops_are_those_of_pytorch_s_attention(causal):
    """What a mask hides counts there too."""
    q, k, v = (torch.randn(2, seqlen, 4, 64, requires_grad=True) for seqlen in (40, 50, 50))
    shapes = [(2, 4, seqlen, 64) for seqlen in (40, 50, 50)]
    forward, backward = sdpa_flop_count(*shapes), sdpa_backward_flop_count(shapes[0], *shapes)
    assert flops_of(lambda: flashtile.attention(q, k, v, causal=causal)) == forward
    for options in (dict(causal=causal), dict(causal=causal, dropout_p=0.1)):
        assert flops_of(lambda: flashtile.attention(q, k, v, **options).sum().backward()) == forward + backward  # noqa: B023


def test_flops_of_sequences_are_theirs_alone():
    q, k, v = torch.randn(10, 4, 64), torch.randn(12, 2, 64), torch.randn(12, 2, 32)
    tables = [torch.tensor(table, dtype=torch.int32) for table in ([0, 3, 10], [0, 5, 12], [4, 6])]
    begins = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), tables, strict=False))
    assert flops_of(lambda: flashtile.attention_varlen(q, k, v, **begins)) == (3 * 5 + 7 * 7) * 4 * 2 * (64 + 32)
    begins["seqused_k"] = tables[2]
    assert flops_of(lambda: flashtile.attention_varlen(q, k, v, **begins)) == (3 * 4 + 7 * 6) * 4 * 2 * (64 + 32)
    with FakeTensorMode(allow_non_fake_inputs=True):  # whose tables hold nothing: equally long ones
        fake = [torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v, *tables[:2])]
        begins = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), fake[3:], strict=True))
        assert flops_of(lambda: flashtile.attention_varlen(*fake[:3], **begins)) == 2 * 5 * 6 * 4 * 2 * (64 + 32)


def test_flops_over_a_cache_are_of_rows_that_count():
    cache, q = torch.zeros(2, 64, 2, 64), torch.randn(2, 3, 8, 64)
    held, new = torch.tensor([10, 20], dtype=torch.int32), torch.randn(2, 3, 2, 64)
    options = dict(cache_seqlens=held, leftpad=torch.tensor([0, 5], dtype=torch.int32))
    each = 3 * 8 * 2 * (64 + 64)
    assert flops_of(lambda: flashtile.attention_kvcache(q, cache, cache, **options)) == (10 + 15) * each
    options |= dict(k_new=new, v_new=new)
    assert flops_of(lambda: flashtile.attention_kvcache(q, cache, cache.clone(), **options)) == (13 + 18) * each
    pages = cache.reshape(8, 16, 2, 64)
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    options = dict(cache_seqlens=held, block_table=table)
    assert flops_of(lambda: flashtile.attention_kvcache(q, pages, pages, **options)) == (10 + 20) * each
    options["cu_seqlens_q"] = torch.tensor([0, 1, 5], dtype=torch.int32)
    ragged = q.flatten(0, 1)
    assert flops_of(lambda: flashtile.attention_kvcache(ragged, pages, pages, **options)) == (10 + 4 * 20) * each // 3
