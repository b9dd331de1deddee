"""attention_varlen on a GPU alone: streams, graphs, and what tables hold that the host does not read."""

import pytest
import ragged
import test_forward
import torch
from apart import assert_survives
from cases import BF16, on_devices
from compare import assert_same
from ragged import Ragged
from test_backward import differentiable
from test_varlen import LAWS, assert_close, options_with, part, results
from test_varlen_errors import arguments, assert_refused
from waiting import host_never_waits

import flashtile


@pytest.mark.gpu
@pytest.mark.parametrize("name", ragged.TABLES)
def test_tables_on_another_device(name):
    assert_refused({name: torch.Tensor.cpu}, ValueError, f"{name} is on cpu, expected cuda:0, as q", "cuda")


@pytest.mark.gpu
def test_float32_on_cuda():
    given = arguments({name: torch.Tensor.float for name in "qkv"}, "cuda")
    with pytest.raises(
        NotImplementedError, match=r"^attention_varlen: q has dtype float32 .*expected float16 or bfloat"
    ):
        flashtile.attention_varlen(**given)


@pytest.mark.gpu
@pytest.mark.parametrize("case, device", on_devices(LAWS, ["cuda"]))
def test_the_host_never_waits(case, device):
    inputs, options = differentiable(case, device)
    longest = torch.tensor(130, device=device)
    incoming = case.incoming(*flashtile.attention_varlen(*inputs[:3], return_lse=True, **options))
    with host_never_waits():
        results(case, inputs, options | dict(max_seqlen_q=longest, max_seqlen_k=longest), incoming)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim, head_dim_v", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_a_training_step_in_a_graph(head_dim, head_dim_v):
    """Replays go by what the tables hold then: other lengths of the same tokens."""
    sizes = dict(dtype=BF16, heads_q=4, heads_k=2, causal=True, sinks=0.0, head_dim=head_dim, head_dim_v=head_dim_v)
    batches = [
        Ragged("first", lengths_q=(100, 30, 0, 70), lengths_k=(90, 110, 5, 95), **sizes),
        Ragged("even", lengths_q=(50,) * 4, lengths_k=(75,) * 4, **sizes),
        Ragged("one", lengths_q=(0, 0, 200, 0), lengths_k=(0, 0, 300, 0), **sizes),
        Ragged("unused", lengths_q=(1, 2, 150, 3), lengths_k=(7, 120, 13, 60), tail=0, **sizes),
    ]
    inputs, options = differentiable(batches[0], "cuda")
    incoming = batches[0].incoming(*flashtile.attention_varlen(*inputs[:3], return_lse=True, **options))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # as PyTorch asks: once outside the capture, on another stream
        results(batches[0], inputs, options, incoming)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results(batches[0], inputs, options, incoming)
    for batch in batches:
        tables = batch.tables("cuda")
        for name, x in tables.items():
            options[name].copy_(x)
        for x in found.values():
            x.fill_(7)
        graph.replay()
        assert_same(found, results(batch, inputs, options_with(options, tables), incoming))


GARBAGE = """
import sys, torch, flashtile
torch.manual_seed(0)
limits = torch.iinfo(torch.int32)
T, B = 700, int(sys.argv[1])
tables = [
    torch.randint(limits.min, limits.max, (B + 1,)),
    torch.randint(-2000, 2000, (B + 1,)),
    torch.randint(0, T, (B + 1,)),
    torch.full((B + 1,), limits.max),
    torch.full((B + 1,), limits.min),
    torch.full((B + 1,), T),
    torch.linspace(T, 0, B + 1),
    torch.tensor([0, limits.max] * B)[: B + 1],
    torch.tensor([limits.min, limits.max] * B)[: B + 1],
]
tables = [x.int().cuda() for x in tables]
for head_dim in (64, 128, 192, 256):
    q, k, v = (torch.randn(T, heads, head_dim, device="cuda", dtype=torch.float16) for heads in (4, 2, 2))
    for x in (q, k, v):
        x.requires_grad_()
    for options in ({}, {"causal": True}, {"window": (30, 5), "dropout_p": 0.2, "seed": 1}):
        for deterministic in (False, True):
            for begins_q in tables:
                for begins_k in tables:
                    used = {"seqused_q": begins_k[1:], "seqused_k": begins_q[:-1]}
                    for more in ({}, used):
                        out, lse = flashtile.attention_varlen(
                            q, k, v, cu_seqlens_q=begins_q, cu_seqlens_k=begins_k, return_lse=True,
                            deterministic=deterministic, **options, **more
                        )
                        torch.autograd.grad([out, lse], (q, k, v), [torch.ones_like(out), torch.ones_like(lse)])
    torch.cuda.synchronize()
good = torch.tensor([0, 300, T], dtype=torch.int32, device="cuda")
out = flashtile.attention_varlen(q, k, v, cu_seqlens_q=good, cu_seqlens_k=good)
assert out.isfinite().all()
print("alive")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("sequences", [9, 32, 33])
def test_garbage_in_tables_stays_inside_the_tensors(sequences):
    assert_survives(GARBAGE, sequences)


FAR_APART = """
import torch, flashtile
torch.manual_seed(0)
T, STEP = 300, 1 << 21
memory = torch.empty(T, STEP, dtype=torch.float16, device="cuda")
begins = torch.tensor([0, 65, 66, 66, 170, 290], dtype=torch.int32, device="cuda")
options = dict(cu_seqlens_q=begins, cu_seqlens_k=begins, return_lse=True, deterministic=True)

def results(q, k, v, dout, causal):
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = flashtile.attention_varlen(*inputs, causal=causal, **options)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, inputs, dout)

for head_dim, head_dim_v in ((64, 64), (128, 128), (192, 128), (256, 256), (256, 8), (136, 40), (72, 256)):
    shapes = [(4, head_dim), (2, head_dim), (2, head_dim_v), (4, head_dim_v)]
    near = [torch.randn(T, *shape, dtype=memory.dtype, device="cuda") for shape in shapes]
    widths = [x[0].numel() for x in near]
    far = [x.unflatten(1, shape) for x, shape in zip(memory[:, : sum(widths)].split(widths, 1), shapes)]
    for x, y in zip(near, far):
        y.copy_(x)
    for causal in (False, True):
        assert all(map(torch.equal, results(*far, causal), results(*near, causal))), (head_dim, head_dim_v, causal)
print("alive")
"""


@pytest.mark.gpu
def test_rows_far_apart():
    """Before the first row lies memory that is nobody's; and nobody asks for it."""
    assert_survives(FAR_APART)


@pytest.mark.usefixtures("much_memory")
@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 256])
def test_more_than_65535_sequences(head_dim):
    """All alike, so that the first and the last have one answer."""
    count = 70_001
    case = Ragged("many", dtype=BF16, causal=True, heads_q=2, head_dim=head_dim, lengths_q=(5,), lengths_k=(9,))
    inputs = [x.repeat(count, 1, 1) for x in case.tensors("cuda")]
    begins = torch.arange(count + 1, dtype=torch.int32, device="cuda")
    found = results(
        case,
        inputs,
        dict(cu_seqlens_q=5 * begins, cu_seqlens_k=9 * begins, causal=True),
        ones_like_results(case, count),
    )
    alone = results(case, case.tensors("cuda"), case.options("cuda"), ones_like_results(case, 1))
    for b in (0, 1, 35_000, 65_535, 65_536, count - 1):
        rows, keys = slice(5 * b, 5 * b + 5), slice(9 * b, 9 * b + 9)
        assert_close(part(found, rows, keys), alone)


def ones_like_results(case, count):
    rows = count * case.seqlen_q
    out = torch.ones(rows, case.heads_q, case.head_dim, dtype=case.dtype, device="cuda")
    return out, torch.ones(case.heads_q, rows, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [1, 6, 16, 140])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_more_tiles_than_thread_blocks(head_dim, heads, causal, much_memory):
    """Whether sequences are listed whole or in parts, every tile is found."""
    lengths = (0, 1, 700, 0, 128, 129, 3, 300) * {1: 40, 6: 10, 16: 4, 140: 1}[heads]
    shape = dict(heads_q=heads, heads_k=heads, head_dim=head_dim, lengths_q=lengths, lengths_k=lengths[::-1], tail=200)
    case = Ragged("many", dtype=BF16, causal=causal, **shape)
    options = case.options("cuda")
    test_forward.check(flashtile.attention_varlen, case, *case.tensors("cuda"), formula=ragged.attention, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sequences", [3, 32, 33])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_each_replay_takes_every_tile(head_dim, sequences, causal):
    """Thread blocks count the tiles that are taken, in memory that nobody clears for a replay."""
    rows, heads = 6000, 16
    q, k, v = torch.randn(3, rows, heads, head_dim, dtype=BF16, device="cuda").unbind()
    begins = torch.zeros(sequences + 1, dtype=torch.int32, device="cuda")

    def attend():
        return flashtile.attention_varlen(q, k, v, cu_seqlens_q=begins, cu_seqlens_k=begins, causal=causal)

    def cut(*ends):
        begins.copy_(torch.tensor([0, *sorted(ends)], dtype=torch.int32))

    cut(*[rows] * sequences)
    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    generator = torch.Generator().manual_seed(sequences)
    for _ in range(5):
        cut(*torch.randint(rows, (sequences - 1,), generator=generator).tolist(), rows)
        for _ in range(2):
            out.fill_(7)
            graph.replay()
            assert_same({"out": out}, {"out": attend()})
    for begin, end in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True):
        one = slice(begin, end)
        alone = flashtile.attention(q[None, one], k[None, one], v[None, one], causal=causal)[0]
        assert_close({"out": out[one]}, {"out": alone})


@pytest.mark.usefixtures("much_memory")
@pytest.mark.gpu
def test_more_than_2_to_31_elements():
    rows = 2**31 // (64 * 128) + 200
    q = torch.randn(rows, 64, 128, dtype=BF16, device="cuda")
    k, v = torch.randn(2, rows, 64, 128, dtype=BF16, device="cuda")
    begins = torch.tensor([0, 150, rows - 170, rows], dtype=torch.int32, device="cuda")
    tables = dict(cu_seqlens_q=begins, cu_seqlens_k=begins, seqused_k=torch.tensor([150, 40, 170]).int().cuda())
    out = flashtile.attention_varlen(q, k, v, **tables)
    for cut in (slice(150), slice(rows - 170, rows)):
        alone = flashtile.attention(q[None, cut], k[None, cut], v[None, cut])[0]
        assert_close({"out": out[cut]}, {"out": alone})
