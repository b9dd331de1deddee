"""Gradients on a GPU alone: sizes beyond 32-bit offsets, blocks of keys that take turns, runs that agree to the bit,
graphs."""

import pytest
import reference
import torch
from cases import BF16, F16, SEED, Case, randn
from compare import assert_accurate, assert_bitwise

import flashtile
from flashtile import _capability

pytestmark = pytest.mark.gpu


def backward(q, k, v, dout, **options):
    """out, lse, dq, dk, dv."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse = flashtile.attention(q, k, v, return_lse=True, **options)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), dout)


def check_found(found, q, k, v, dout, **options):
    """dq, dk and dv, against float64."""
    grads = []
    for dtype in (torch.float64, q.dtype):
        x = [y.detach().to(dtype).requires_grad_() for y in (q, k, v)]
        out, _ = reference.attention(*x, dtype=dtype, **options)
        grads.append(torch.autograd.grad(out, x, dout.to(dtype)))
    for what, x, exact, rough in zip(("dq", "dk", "dv"), found, *grads, strict=True):
        assert_accurate(x, exact, rough, what)


def check_gradients(q, k, v, dout, **options):
    """Against float64, for the first and the last KV head: the formula takes S_q × S_k each."""
    dq, dk, dv = backward(q, k, v, dout, **options)[2:]
    options.pop("deterministic", None)
    group = q.shape[2] // k.shape[2]
    for head in {0, k.shape[2] - 1}:
        mine = (slice(None), slice(None), slice(head * group, (head + 1) * group))
        theirs = (slice(None), slice(None), slice(head, head + 1))
        check_found((dq[mine], dk[theirs], dv[theirs]), q[mine], k[theirs], v[theirs], dout[mine], **options)


@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_long_sequences(head_dim, causal):
    check_gradients(*(randn(1, 4096, heads, head_dim) for heads in (4, 2, 2, 4)), causal=causal)


@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize("head_dim", [128, 256])
def test_gradients_of_more_than_2_to_31_elements(head_dim):
    """The last head's gradients are those it has alone. One block of keys: nothing adds up in dq. Its queries are
    divided among thread blocks, alone among more of them."""
    seqlen = 2**31 // (64 * head_dim) + 100
    tensors = [randn(1, length, 64, head_dim) for length in (seqlen, 30, 30, seqlen)]
    many = backward(*tensors)
    alone = backward(*(x[:, :, -1:] for x in tensors))
    assert_bitwise(many[2][:, :, -1:], alone[2], "dq")
    for a, b in zip(many[3:], alone[3:], strict=True):
        torch.testing.assert_close(a[:, :, -1:], b, rtol=2 * torch.finfo(BF16).eps, atol=1e-4 * b.abs().max().item())


@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize("head_dim", [64, 96, 256])
@pytest.mark.parametrize("batch, heads", [(70_001, 1), (1, 70_001)])
def test_gradients_of_more_than_65535_heads_and_sequences(batch, heads, head_dim):
    """The last head's gradients are those it has alone; on Hopper those of D64 come from another kernel then."""
    tensors = [randn(batch, length, heads, head_dim) for length in (20, 30, 30, 20)]
    found = [x[-1:, :, -1:] for x in backward(*tensors, causal=True)[2:]]
    last = [x[-1:, :, -1:] for x in tensors]
    if head_dim == 64:
        check_found(found, *last, causal=True)
    else:
        for what, a, b in zip(("dq", "dk", "dv"), found, backward(*last, causal=True)[2:], strict=True):
            assert_bitwise(a, b, what)


@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128])
@pytest.mark.parametrize("batch, heads_q, heads_k", [(2, 6, 2), (1, 7, 1), (150, 2, 1)])
@pytest.mark.parametrize(
    "seqlen_q, seqlen_k, options",
    [
        (300, 77, {}),
        (1, 128, {}),
        (1000, 2, {}),
        (128, 128, {"causal": True}),
        (40, 128, {"causal": True}),
        (128, 100, {"window": (30, 20)}),
        (700, 100, {"window": (30, 20)}),  # in which many queries see no key, as in the next
        (500, 60, {"causal": True}),
        (130, 128, {"softcap": 20.0}),
        (200, 128, {"deterministic": True}),
    ],
    ids=str,
)
def test_gradients_over_one_block_of_keys(seqlen_q, seqlen_k, options, batch, heads_q, heads_k, head_dim):
    """On Hopper it forms the whole of dq, unless there are queries that see none of its keys: dq of these is 0."""
    shapes = ((seqlen_q, heads_q), (seqlen_k, heads_k), (seqlen_k, heads_k), (seqlen_q, heads_q))
    check_gradients(*(randn(batch, *shape, head_dim) for shape in shapes), **options)


@pytest.mark.parametrize("head_dim, head_dim_v", [(64, 64), (64, 24), (96, 72), (104, 128)])
def test_gradients_over_one_block_of_keys_in_float16_and_of_packed_heads(head_dim, head_dim_v):
    q, k = randn(3, 200, 6, head_dim).to(F16)[:, :, 1:5], randn(3, 90, 6, head_dim).to(F16)[:, :, 2:4]
    check_gradients(q, k, *(randn(3, *shape, head_dim_v).to(F16) for shape in ((90, 2), (200, 4))))


@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(33, 1100), (300, 100), (500, 500)])
@pytest.mark.parametrize("batch, heads_q, heads_k", [(12, 8, 8), (1, 8, 1)])
def test_gradients_of_calls_in_a_row(batch, heads_q, heads_k, seqlen_q, seqlen_k, head_dim):
    """A kernel that starts while the one before runs waits for it: what calls before have left where this one's
    workspace lies, of other inputs, is in no gradient."""
    shapes = ((seqlen_q, heads_q), (seqlen_k, heads_k), (seqlen_k, heads_k), (seqlen_q, heads_q))
    calls = [[(1 + i % 3) * randn(batch, *shape, head_dim) for shape in shapes] for i in range(6)]
    alone = []
    for tensors in calls:
        alone.append(backward(*tensors)[2:])
        torch.cuda.synchronize()
    for _ in range(5):
        in_a_row = [backward(*tensors)[2:] for tensors in calls]
        for mine, theirs in zip(in_a_row, alone, strict=True):
            for what, a, b in zip(("dq", "dk", "dv"), mine, theirs, strict=True):
                # dq is summed in any order.
                slack = 2 * torch.finfo(BF16).eps
                torch.testing.assert_close(a, b, rtol=slack, atol=1e-3 * b.abs().max().item(), msg=what)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_key_blocks_of_more_heads_than_take_turns(head_dim):
    """35 KV heads of 16 or 32 blocks: the last section of them, see KeyBlock, is not full."""
    # Alone, several thread blocks may share a block, or a row of the forward: sums of another order, and an out that is
    # rounded another way, which changes delta.
    slack = 2 * torch.finfo(BF16).eps
    tensors = [randn(5, 2000, 7, head_dim) for _ in range(4)]
    together = backward(*tensors, causal=True)
    for b in range(5):
        alone = backward(*(x[b : b + 1] for x in tensors), causal=True)
        for a, b_alone in zip(together[3:], alone[3:], strict=True):
            torch.testing.assert_close(a[b : b + 1], b_alone, rtol=slack, atol=4e-3 * b_alone.abs().max().item())


@pytest.mark.parametrize("head_dim, head_dim_v", [(64, 64), (96, 72), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (101, 13)}, {"window": (37, None)}], ids=str)
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(500, 500), (150, 900), (900, 150)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_key_blocks_that_thread_blocks_take_in_turn(
    seqlen_q, seqlen_k, group, options, head_dim, head_dim_v, deterministic
):
    """As on Hopper, where they are many and see few queries, some of them none; alone each has a thread block, or
    several, and a forward that may split keys."""
    shapes = ((seqlen_q, group, head_dim), (seqlen_k, 1, head_dim), (seqlen_k, 1, head_dim_v))
    tensors = [randn(240, *shape) for shape in (*shapes, (seqlen_q, group, head_dim_v))]
    options = {"deterministic": deterministic, **options}
    out, _, *together = backward(*tensors, **options)
    for b in (0, 121, 239):
        out_alone, _, *alone = backward(*(x[b : b + 1] for x in tensors), **options)
        same_forward = torch.equal(out[b : b + 1], out_alone)  # not where it has another tile, or splits keys
        for what, a, b_alone in zip(("dq", "dk", "dv"), together, alone, strict=True):
            if what == "dq" and deterministic and same_forward:
                assert_bitwise(a[b : b + 1], b_alone, what)
                continue
            # The same float32 parts add up in any order: a rounding or two of the result, and of the parts that cancel;
            # and an out that is rounded another way changes delta, by an eps of the largest result at the most.
            slack = (1e-4 if same_forward else torch.finfo(BF16).eps) * b_alone.abs().max().item()
            torch.testing.assert_close(a[b : b + 1], b_alone, rtol=2 * torch.finfo(BF16).eps, atol=slack)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "kv"])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("batch, heads_q, heads_k", [(9, 8, 8), (1, 16, 1)])
def test_gradients_that_are_wanted_alone(batch, heads_q, heads_k, head_dim, ragged, wanted):
    """Where there are more blocks than multiprocessors, or several thread blocks share each, and in every replay of a
    graph."""
    dout, *inputs = (randn(batch, 1000, heads, head_dim) for heads in (heads_q, heads_q, heads_k, heads_k))
    begins = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * 1000

    def gradients(names):
        q, k, v = (x.requires_grad_(name in names) for name, x in zip("qkv", inputs, strict=True))
        options = dict(causal=True, deterministic=True)
        if ragged:
            tables = dict(cu_seqlens_q=begins, cu_seqlens_k=begins)
            out = flashtile.attention_varlen(*(x.flatten(0, 1) for x in (q, k, v)), **tables, **options).view_as(dout)
        else:
            out = flashtile.attention(q, k, v, **options)
        return torch.autograd.grad(out, [x for name, x in zip("qkv", (q, k, v), strict=True) if name in names], dout)

    expected = dict(zip("qkv", gradients("qkv"), strict=True))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # as PyTorch asks: once outside the capture, on another stream
        gradients(wanted)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(wanted)
    for _ in range(3):
        for x in found:
            x.fill_(7)
        graph.replay()
        for name, x in zip(wanted, found, strict=True):
            assert_bitwise(x, expected[name], f"d{name}")


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("heads_q, heads_k", [(8, 4), (16, 1)])
def test_dk_and_dv_repeat_bitwise(heads_q, heads_k, head_dim):
    tensors = [randn(2, 700, heads, head_dim) for heads in (heads_q, heads_k, heads_k, heads_q)]
    first = backward(*tensors, causal=True)
    for _ in range(100):
        found = backward(*tensors, causal=True)
        assert all(torch.equal(a, b) for a, b in zip(found[3:], first[3:], strict=True))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_dsinks_repeats_bitwise(head_dim):
    """By default too, and alone as among the other gradients."""
    q, k, v, dout = (randn(2, 700, heads, head_dim) for heads in (8, 4, 4, 8))
    sinks = torch.linspace(-3, 5, 8, device="cuda", requires_grad=True)
    options = dict(causal=True, sinks=sinks, dropout_p=0.2, seed=SEED)
    q.requires_grad_()
    out = flashtile.attention(q, k, v, **options)
    _, first = torch.autograd.grad(out, (q, sinks), dout)
    for _ in range(100):
        (found,) = torch.autograd.grad(flashtile.attention(q.detach(), k, v, **options), sinks, dout)
        assert_bitwise(found, first, "dsinks")


@pytest.fixture(params=["by the argument", "of PyTorch"])
def deterministic(request):
    """Who asks for gradients that repeat; the value is the argument."""
    if request.param == "by the argument":
        yield True
        return
    torch.use_deterministic_algorithms(True)
    yield None
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_a_thousand_deterministic_gradients_agree_bitwise(head_dim, causal, deterministic):
    """Beside other work, which takes multiprocessors at other moments in every run."""
    q, k, v, dout = (randn(2, 700, heads, head_dim) for heads in (8, 4, 4, 8))
    first = backward(q, k, v, dout, causal=causal, deterministic=deterministic)
    beside, stream = torch.zeros(2**20, device="cuda"), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # whose freed memory `beside` may have
    for _ in range(1000):
        with torch.cuda.stream(stream):
            beside.add_(1)
        found = backward(q, k, v, dout, causal=causal, deterministic=deterministic)
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))
    torch.cuda.current_stream().wait_stream(stream)  # before it gets the memory of `beside`


@pytest.mark.parametrize("head_dim, head_dim_v", [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("window", [None, (101, 0), (37, 250)])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1100, 1100), (300, 1500), (1500, 300)])
@pytest.mark.parametrize("more", [{}, {"dropout_p": 0.1, "seed": SEED}], ids=["plain", "dropout"])
@pytest.mark.parametrize("batch, heads_k", [(6, 4), (3, 1)])
def test_deterministic_gradients_of_any_shape(batch, heads_k, seqlen_q, seqlen_k, window, head_dim, head_dim_v, more):
    """Many more tiles than multiprocessors: a tile that waits for another one must not keep it from running; or few,
    which several thread blocks share."""
    widths = (head_dim, head_dim, head_dim_v, head_dim_v)
    sizes = ((seqlen_q, 16), (seqlen_k, heads_k), (seqlen_k, heads_k), (seqlen_q, 16))
    tensors = [randn(batch, *size, width) for size, width in zip(sizes, widths, strict=True)]
    options = dict(window=window, sinks=torch.linspace(-3, 5, 16, device="cuda"), **more)
    first = backward(*tensors, deterministic=True, **options)
    for _ in range(10):
        found = backward(*tensors, deterministic=True, **options)
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))
    for a, b in zip(first[2:], backward(*tensors, **options)[2:], strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=8 * torch.finfo(BF16).eps * b.abs().max().item())


@pytest.mark.parametrize("head_dim, head_dim_v", [(136, 136), (192, 128), (256, 256)])
def test_dq_of_wide_heads_repeats_bitwise_on_hopper(head_dim, head_dim_v, pytestconfig):
    limit = pytestconfig.getoption("--compute-capability") or 90
    if torch.cuda.get_device_capability() != (9, 0) or limit < 90:
        pytest.skip("only Hopper's kernels form dQ in a pass of its own")
    tensors = [randn(2, 700, *rest) for rest in ((8, head_dim), (4, head_dim), (4, head_dim_v), (8, head_dim_v))]
    first = backward(*tensors, causal=True)
    for _ in range(100):
        assert_bitwise(backward(*tensors, causal=True)[2], first[2], "dq")


def test_dout_may_be_misaligned_or_expanded():
    q, k, v = randn(2, 65, 4, 64), randn(2, 65, 2, 64), randn(2, 65, 2, 64)
    for dout in (randn(2, 65, 4, 67)[..., 1:65], torch.ones((), dtype=BF16, device="cuda").expand(q.shape)):
        expected = backward(q, k, v, dout.contiguous())
        for what, a, b in zip(("dk", "dv"), backward(q, k, v, dout)[3:], expected[3:], strict=True):
            assert_bitwise(a, b, what)


def test_a_training_step_in_a_graph():
    case = Case("graph", dtype=BF16, seqlen_q=90, seqlen_k=30, causal=True)
    q, k, v = case.tensors("cuda", requires_grad=True)
    dout = torch.randn_like(q)

    def step():
        return torch.autograd.grad(flashtile.attention(q, k, v, causal=True), (q, k, v), dout)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # as PyTorch asks: once outside the capture, on another stream
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for seed in range(3):
        with torch.no_grad():
            q.copy_(torch.randn(q.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        for what, a, b in zip(("dq", "dk", "dv"), found, step(), strict=True):
            assert_bitwise(a, b, what)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_a_deterministic_step_with_dropout_in_a_graph(head_dim):
    """The seed is drawn once, when the graph is captured; what a run counts begins anew in every replay."""
    case = Case("graph", dtype=BF16, seqlen_q=600, seqlen_k=500, causal=True, head_dim=head_dim)
    q, k, v = case.tensors("cuda", requires_grad=True)
    sinks = torch.ones(2, device="cuda", requires_grad=True)
    dout = torch.randn_like(q)

    def step():
        options = dict(causal=True, sinks=sinks, dropout_p=0.3, deterministic=True)
        out = flashtile.attention(q, k, v, **options)
        return out, *torch.autograd.grad(out, (q, k, v, sinks), dout)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    torch.manual_seed(4)
    with torch.cuda.graph(graph):
        found = step()
    torch.manual_seed(4)
    expected = step()
    for _ in range(20):
        for x in found:
            x.detach().fill_(7)
        graph.replay()
        for what, a, b in zip(("out", "dq", "dk", "dv", "dsinks"), found, expected, strict=True):
            assert_bitwise(a, b, what)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_backward_allocates_gradients_and_its_workspace(head_dim):
    # Tensors are multiples of 2 MiB, as PyTorch rounds large ones up to that.
    case = Case("memory", dtype=F16, batch=128, seqlen_q=1024, seqlen_k=1024, head_dim=head_dim)
    q, k, v = case.tensors("cuda", requires_grad=True)
    out = flashtile.attention(q, k, v)
    dout = torch.randn_like(out)
    torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # a block of it that is a little too large would be counted whole
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    rows = case.batch * case.heads_q * 1024  # in whole tiles
    expected = sum(2 * x.numel() for x in gradients) + 4 * rows * (case.head_dim + 4) + 8 * (rows // 64)
    assert torch.cuda.max_memory_allocated() - before <= expected + 4 * 512  # PyTorch rounds each to 512 bytes


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("capability", [80, 90])
def test_nan_is_not_dropped(head_dim, capability):
    """Where a weight stays, a NaN among the scores of its row reaches dv."""
    q, k, v = (torch.randn(1, 100, 1, head_dim, device="cuda", dtype=F16).requires_grad_() for _ in range(3))
    with torch.no_grad():
        q[0, 7] = float("nan")
    with _capability.limited(capability):
        out = flashtile.attention(q, k, v, dropout_p=0.3)
        (dv,) = torch.autograd.grad(out, [v], torch.ones_like(out))
    assert dv.isnan().all(dim=-1).float().mean() > 0.5
