"""The passes by themselves, of flashtile.compat: what libraries of context parallelism build their attention from."""

import importlib.util
import socket
import subprocess
import sys

import pytest
import ragged
import reference
import torch
from cases import BF16, F16, F32, Case, on_devices
from compare import assert_accurate, assert_bitwise, score_rounding
from ragged import Ragged
from theirs import SMALL, assert_refuses, fa2, fa3

import flashtile

GROUPS = dict(seqlen_q=40, seqlen_k=70, heads_q=4, heads_k=2)
RAGGED = dict(heads_q=4, heads_k=2, lengths_q=(40, 0, 33, 1), lengths_k=(50, 7, 20, 30))
OF_2 = dict(alibi="per batch and head", dropout_p=0.2)
BANDED = dict(window=(20, 9), scale=0.2, softcap=7.0)
CASES = [
    Case("dense", dtype=F32, **GROUPS),
    Case("dense_banded", dtype=F16, **BANDED, **GROUPS),
    Case("dense_causal", dtype=BF16, causal=True, head_dim_v=40, **GROUPS),
    Case("dense_odd", dtype=F32, head_dim=20, head_dim_v=13, **GROUPS),
    Ragged("ragged", dtype=F32, causal=True, window=(30, None), **RAGGED),
    Ragged("ragged_odd", dtype=BF16, head_dim=36, **RAGGED),
]
OF_2_ALONE = [Case("dense_dropped", dtype=F32, **OF_2, **GROUPS), Ragged("ragged_dropped", dtype=F16, **OF_2, **RAGGED)]
USED = dict(used_q=(40, 0, 20, 1), used_k=(30, 7, 20, 0))
OF_3_ALONE = [Ragged("used", dtype=F32, tail=5, **USED, **RAGGED)]


def passes_2(inputs, options, dout):
    """(out, lse, softmax_d, dq, dk, dv), of flashtile's options."""
    begins = [options.get(f"cu_seqlens_{side}") for side in "qk"]
    tables = () if begins[0] is None else (*begins, 50, 60)
    varlen = "_varlen" if tables else ""
    sides = tuple(-1 if n is None else n for n in options["window"] or (None, None))
    dropout_p, slopes = options.get("dropout_p", 0.0), options.get("alibi_slopes")
    scores = (dropout_p, options["scale"], options["causal"], *sides, options["softcap"], slopes)
    forward = getattr(fa2, f"_flash_attn{varlen}_forward")
    out, lse, s_dmask, rng_state = forward(*inputs, *tables, *scores, False)
    assert s_dmask.shape == (0,) and rng_state.shape == (2,) and rng_state.dtype is torch.int64
    places = [torch.full_like(x, torch.nan) for x in inputs]
    backward = getattr(fa2, f"_flash_attn{varlen}_backward")
    softmax_d = backward(dout, *inputs, out, lse, *places, *tables, *scores, True, rng_state)
    return out, lse, softmax_d, *places


def passes_3(inputs, options, dout):
    tables = {name: options[name] for name in options if name.startswith("cu_seqlens")}
    used = {side: options.get(f"seqused_{side}") for side in "qk"}
    left, right = (-1 if n is None else n for n in options["window"] or (None, None))
    scores = dict(softmax_scale=options["scale"], window_size_left=left, window_size_right=right)
    scores["softcap"] = options["softcap"]
    lengths = {f"seqused_{side}": x for side, x in used.items()}
    results = fa3._flash_attn_forward(*inputs, causal=options["causal"], **tables, **lengths, **scores)
    out, lse, *partial = results
    assert [x.numel() for x in partial] == [0, 0]
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in inputs)
    lengths = {f"sequed_{side}": x for side, x in used.items()}  # so it is spelled
    given = dict(dq=dq, dk=dk, dv=dv, is_causal=options["causal"], **tables, **lengths, **scores)
    return out, lse, fa3._flash_attn_backward(dout, *inputs, out, lse, **given), dq, dk, dv


PASSES = [(passes_2, p) for p in on_devices(CASES + OF_2_ALONE)] + [
    (passes_3, p) for p in on_devices(CASES + OF_3_ALONE)
]


@pytest.mark.parametrize(
    "passes, case, device",
    [pytest.param(f, *p.values, id=f"{f.__name__}-{p.id}", marks=p.marks) for f, p in PASSES],
)
def test_results(passes, case, device):
    inputs, options = case.tensors(device), case.options(device)
    if case.dropout_p > 0:
        torch.manual_seed(0)
        options["seed"] = int(torch.randint(2**63 - 1, ()))
    torch.manual_seed(0)
    formula = ragged.attention if isinstance(case, Ragged) else reference.attention
    out_like, lse_like = formula(*inputs, **options)
    dout = case.incoming(out_like.to(case.dtype), lse_like.float())[0]
    found = passes(inputs, options, dout)

    def differentiated(dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out, lse = formula(*leaves, dtype=dtype, **options)
        softmax_d = (dout.to(dtype) * out.detach()).sum(-1).transpose(-1, -2)
        return [out, lse, softmax_d, *torch.autograd.grad(out, leaves, dout.to(dtype))]

    exact, rough = differentiated(torch.float64), differentiated(case.dtype)
    rough[1] = formula(*inputs, dtype=F32, **options)[1]  # statistics are float32 for every dtype
    for what, mine, best, worse in zip(("out", "lse", "softmax_d", "dq", "dk", "dv"), found, exact, rough, strict=True):
        assert mine.dtype is (F32 if what in ("lse", "softmax_d") else case.dtype)
        slack = 4 * score_rounding(exact[1], None if what == "lse" else best)
        if what == "softmax_d":
            unused = case.unused(0, device) if isinstance(case, Ragged) else None
            if unused is not None:
                mine, best, worse = (x[:, ~unused] for x in (mine, best, worse))  # elsewhere dout may be anything
            slack += torch.finfo(case.dtype).eps * dout.nan_to_num().abs().max().item() * case.head_dim
        assert_accurate(mine.detach(), best.detach(), worse.detach(), what, slack=slack)


@pytest.mark.parametrize("module", [fa2, fa3], ids=["2", "3"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_ring_of_blocks(module, dtype):
    """Context parallelism: each block of queries meets each block of keys that it may see, results are merged, and the
    gradients of the blocks, from the whole's out and softmax_lse, add up to those of the whole."""
    q, k, v = Case("ring", dtype=dtype, seqlen_q=96, seqlen_k=96, heads_q=4, heads_k=2).tensors()
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    blocks = [slice(n, n + 32) for n in (0, 32, 64)]
    sums = [torch.zeros(x.shape) for x in (q, k, v)]
    outs = []

    def options(i, j):
        sides = (0.125, i == j, -1, -1, 0.0)
        return (0.0, *sides, None) if module is fa2 else sides

    for i, rows in enumerate(blocks):
        parts = []
        for j, keys in enumerate(blocks[: i + 1]):
            if module is fa2:
                results = module._flash_attn_forward(q[:, rows], k[:, keys], v[:, keys], *options(i, j), False)
            else:
                results = module._flash_attn_forward(
                    q[:, rows], k[:, keys], v[:, keys], softmax_scale=0.125, causal=i == j
                )
            parts.append(results[:2])
        out, lse = flashtile.combine(*zip(*[(out.float(), lse) for out, lse in parts], strict=True))
        outs.append(out)
        for j, keys in enumerate(blocks[: i + 1]):
            inputs = (dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out.to(dtype), lse)
            places = [torch.empty_like(x) for x in inputs[1:4]]
            if module is fa2:
                module._flash_attn_backward(*inputs, *places, *options(i, j), False)
            else:
                named = dict(zip(("dq", "dk", "dv"), places, strict=True))
                module._flash_attn_backward(*inputs, **named, softmax_scale=0.125, is_causal=i == j)
            for total, place, part in zip(sums, (rows, keys, keys), places, strict=True):
                total[:, place] += part
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    exact, _ = reference.attention(*leaves, causal=True, scale=0.125)
    torch.testing.assert_close(torch.cat(outs, 1).double(), exact, rtol=0, atol=2e-6 if dtype is F32 else 2e-2)
    for total, best in zip(sums, torch.autograd.grad(exact, leaves, dout.double()), strict=True):
        torch.testing.assert_close(total.double(), best, rtol=0, atol=1e-5 if dtype is F32 else 6e-2)


def assert_nearly(found, exact):
    """Autograd's backward is given more of each row than its lse."""
    torch.testing.assert_close(found, exact, rtol=0, atol=4e-6)


def test_dropout_needs_its_state():
    q, k, v = SMALL.tensors()
    scores = (0.3, None, False, -1, -1, 0.0, None)
    out, lse, _, rng_state = fa2._flash_attn_forward(q, k, v, *scores, False)
    places = [torch.empty_like(x) for x in (q, k, v)]
    given = (out, q, k, v, out, lse, *places, *scores, False)
    message = "rng_state is of type NoneType, expected a torch.Tensor"
    assert_refuses(fa2._flash_attn_backward, TypeError, message, *given)
    fa2._flash_attn_backward(*given, rng_state)
    seed = int(rng_state[0])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = flashtile.attention(*leaves, dropout_p=0.3, seed=seed)
    assert_bitwise(out, expected.detach())
    for place, exact in zip(places, torch.autograd.grad(expected, leaves, out), strict=True):
        assert_nearly(place, exact)


def test_gradients_go_where_they_are_asked_for():
    q, k, v = SMALL.tensors()
    out, lse, _, _ = fa3._flash_attn_forward(q, k, v)
    packed = torch.zeros(2, 20, 3, 2, 16)
    fa3._flash_attn_backward(out, q, k, v, out, lse, **dict(zip(("dq", "dk", "dv"), packed.unbind(2), strict=True)))
    alone = torch.empty_like(k)
    fa3._flash_attn_backward(out, q, k, v, out, lse, dk=alone)
    assert_bitwise(alone, packed[:, :, 1])
    for place, error, message in (
        (alone[:1], ValueError, r"dv has shape \(1, 20, 2, 16\), expected \(2, 20, 2, 16\)"),
        (alone.int(), TypeError, "dv has dtype torch.int32, expected torch.float32"),
        ([alone], TypeError, "dv is of type list"),
    ):
        assert_refuses(fa3._flash_attn_backward, error, message, out, q, k, v, out, lse, dv=place)


def test_a_dense_side():
    """With cu_seqlens of the keys alone, queries, out and softmax_lse are dense."""
    q, k, v = SMALL.tensors()
    begins = torch.tensor([0, 8, 40], dtype=torch.int32)
    rows = [x.flatten(0, 1) for x in (k, v)]
    out, lse, *_ = fa3._flash_attn_forward(q, *rows, cu_seqlens_k=begins, causal=True)
    assert out.shape == q.shape and lse.shape == (2, 2, 20)
    places = [torch.empty_like(x) for x in (q, *rows)]
    named = dict(zip(("dq", "dk", "dv"), places, strict=True))
    softmax_d = fa3._flash_attn_backward(out, q, *rows, out, lse, cu_seqlens_k=begins, is_causal=True, **named)
    assert softmax_d.shape == lse.shape
    leaves = [x.clone().requires_grad_() for x in (q, *rows)]
    expected = fa3.flash_attn_varlen_func(*leaves, None, begins, None, None, causal=True)
    assert_bitwise(out, expected.detach())
    for place, exact in zip(places, torch.autograd.grad(expected, leaves, out), strict=True):
        assert_nearly(place, exact)


def test_one_forward_is_all_of_them():
    """Of FlashAttention-3: dense, in chunks, over a cache, into a given tensor."""
    q, k, v = SMALL.tensors()
    place = torch.empty_like(q)
    out, *_ = fa3._flash_attn_forward(q, k, v, out_=place, causal=True, attention_chunk=6)
    assert out is place
    assert_bitwise(place, fa3.flash_attn_func(q, k, v, causal=True, attention_chunk=6))
    lengths = torch.tensor([4, 0], dtype=torch.int32)
    given = (q[:, :3], k.clone(), v.clone(), k[:, 10:13], v[:, 10:13])
    out, *_ = fa3._flash_attn_forward(*given, seqused_k=lengths, causal=True)
    assert_bitwise(out, fa3.flash_attn_with_kvcache(*given, cache_seqlens=lengths, causal=True))
    function = fa3._flash_attn_forward
    assert_refuses(
        function, TypeError, "out_ has dtype torch.int64, expected torch.float32", q, k, v, out_=place.long()
    )
    out, lse, *_ = fa3._flash_attn_forward(*given, seqused_k=lengths, seqused_q=torch.tensor([3, 1]).int(), causal=True)
    expected = fa3._flash_attn_forward(*(x[:1] for x in given), seqused_k=lengths[:1], causal=True)
    assert_bitwise(out[:1], expected[0])
    assert_bitwise(lse[:1], expected[1])
    first = (given[0][1:, :1], *(x[1:] for x in given[1:]))
    expected = fa3._flash_attn_forward(*first, seqused_k=lengths[1:], causal=True)
    assert_bitwise(out[1:, :1], expected[0])
    assert not out[1:, 1:].any() and (lse[1:, :, 1:] == -torch.inf).all()


def test_padding_of_keys():
    """leftpad_k of FlashAttention-2's ragged forward, of pages and of sequences."""
    pages, q = torch.randn(2, 4, 16, 2, 16), torch.randn(6, 2, 16)
    table, begins = torch.tensor([[2, 1], [0, 3]], dtype=torch.int32), torch.tensor([0, 2, 6], dtype=torch.int32)
    begins_k, leftpad = torch.tensor([0, 20, 45], dtype=torch.int32), torch.tensor([3, 7], dtype=torch.int32)
    given = (q, *pages, begins, begins_k, 4, 25, 0.0, 0.25, True)
    out, lse, *_ = fa2._flash_attn_varlen_forward(*given, block_table=table, leftpad_k=leftpad)
    for rows, keys, pages_of in ((slice(0, 2), slice(3, 20), table[0]), (slice(2, 6), slice(7, 25), table[1])):
        k, v = (x[pages_of.long()].flatten(0, 1)[None, keys] for x in pages)
        exact, exact_lse = reference.attention(q[None, rows], k, v, causal=True, scale=0.25)
        torch.testing.assert_close(out[rows].double(), exact[0], rtol=0, atol=2e-6)
        torch.testing.assert_close(lse[:, rows].double(), exact_lse[0], rtol=0, atol=2e-6)
    k, v = (torch.cat([x[table[0].long()].flatten(0, 1)[:20], x[table[1].long()].flatten(0, 1)[:25]]) for x in pages)
    given = (q, k, v, begins, begins_k, 4, 25, 0.0, 0.25, True)
    for seqused in (None, torch.tensor([20, 25]).int()):
        found = fa2._flash_attn_varlen_forward(*given, leftpad_k=leftpad, seqused_k=seqused)
        torch.testing.assert_close(found[:2], (out, lse), rtol=0, atol=2e-6)


RING = """
import importlib, os, sys, types
import torch
import torch.distributed as dist
import flashtile.compat

rank, size, port = map(int, sys.argv[1:])
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
torch.set_num_threads(1)
flashtile.compat.install()
# Its adapters ask transformers for what transformers 5 has no more.
adapters = sys.modules["ring_flash_attn.adapters"] = types.ModuleType("adapters")
adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
ring = importlib.import_module("ring_flash_attn")
dist.init_process_group("gloo", rank=rank, world_size=size)
q, k, v, dout = torch.randn(4, 2, 32 * size, 4, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
exact_leaves = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
exact = torch.nn.functional.scaled_dot_product_attention(*exact_leaves, is_causal=True)
exact_grads = torch.autograd.grad(exact, exact_leaves, dout.double().transpose(1, 2))
halves = rank, 2 * size - 1 - rank
for name, part in (
    ("ring_flash_attn_func", lambda x: x.chunk(size, 1)[rank]),
    ("zigzag_ring_flash_attn_func", lambda x: torch.cat([x.chunk(2 * size, 1)[n] for n in halves], 1)),
    ("stripe_flash_attn_func", lambda x: x[:, rank::size]),
):
    leaves = [part(x).contiguous().requires_grad_() for x in (q, k, v)]
    out = getattr(ring, name)(*leaves, causal=True)
    found = [out, *torch.autograd.grad(out, leaves, part(dout).contiguous())]
    for x, best in zip(found, (exact, *exact_grads), strict=True):
        torch.testing.assert_close(x.double(), part(best.transpose(1, 2)), rtol=0, atol=0.05)
dist.destroy_process_group()
"""


def test_ring_flash_attn():
    """The package of that name, which has the passes from `flash_attn`, on two processes."""
    if importlib.util.find_spec("ring_flash_attn") is None:
        pytest.skip("needs the package ring-flash-attn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", RING]
    runs = [
        subprocess.Popen([*command, str(rank), "2", str(port)], stderr=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    try:
        for run in runs:
            _, said = run.communicate(timeout=300)
            assert run.returncode == 0, said
    finally:
        for run in runs:
            run.kill()
