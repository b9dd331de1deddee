"""attention_kvcache on a GPU alone: streams, graphs, and what tables hold that the host does not read."""

import math

import cached
import pytest
import torch
from apart import assert_survives
from cached import Cached, arguments, ints, results, with_own_caches
from cases import BF16, F16, on_devices
from compare import assert_bitwise, assert_same
from test_kvcache_errors import misaligned
from test_kvcache_laws import FIXED, LAWS, assert_close
from waiting import host_never_waits

import flashtile


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["q", "k_new", "v_new", "rotary_cos", "rotary_sin"])
def test_misaligned_operands_are_copied(name):
    given = arguments("dense", {}, "cuda")
    assert_same(results(given | {name: misaligned(given[name])}), results(given))


@pytest.mark.gpu
@pytest.mark.parametrize("case, device", on_devices(LAWS, ["cuda"]))
def test_the_host_never_waits(case, device):
    given = case.arguments(device)
    with host_never_waits():
        flashtile.attention_kvcache(**given, return_lse=True)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, *FIXED], ids=str)
@pytest.mark.parametrize(
    "shape", [dict(seqlen_q=1, new=1), dict(seqlen_q=5, new=5, rotary=32), dict(lengths_q=(3, 0, 9), new=0)], ids=str
)
def test_a_captured_graph(shape, options):
    """Replays go by what the tables and the caches hold then."""
    sizes = dict(dtype=BF16, heads_q=8, page_size=16, head_dim=128, leftpad=(0, 0, 0)) | shape
    steps = [
        Cached("first", held=(700, 40, 0), room=500, **sizes),
        Cached("even", held=(300, 300, 300), room=900, **sizes),
        Cached("empty", held=(0, 0, 0), room=1200, **sizes),
        Cached("long", held=(1, 1190, 2), room=10, **sizes | dict(leftpad=(1, 500, 0))),
    ]
    if "lengths_q" in shape:
        steps.append(Cached("others", held=(100, 600, 3), room=600, **sizes | dict(lengths_q=(0, 12, 0))))
    pages = max(step.seqlen_k for step in steps) // 16
    problems = [resized(step.arguments("cuda") | options, pages) for step in steps]
    given = with_own_caches(problems[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # as PyTorch asks: once outside the capture, on another stream
        flashtile.attention_kvcache(**with_own_caches(given), return_lse=True)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flashtile.attention_kvcache(**given, return_lse=True)
    for problem in problems:
        for name, x in problem.items():
            if isinstance(x, torch.Tensor):
                given[name].copy_(x)
        out.fill_(7), lse.fill_(7)
        graph.replay()
        found = dict(out=out, lse=lse, k_cache=given["k_cache"], v_cache=given["v_cache"])
        assert_same(found, results(problem))


def resized(given, pages):
    """With as many pages for each sequence, and in all, as every problem of a graph has."""
    table = torch.nn.functional.pad(given["block_table"], (0, pages - given["block_table"].shape[1]), value=-1)
    total = len(table) * pages + 3
    caches = {}
    for name in ("k_cache", "v_cache"):
        x = given[name]
        caches[name] = torch.cat([x, x.new_full((total - len(x), *x.shape[1:]), math.nan)])
    return given | caches | dict(block_table=table)


GUARDED = """
import itertools
import torch, flashtile
torch.manual_seed(0)
limits = torch.iinfo(torch.int32)
floats = dict(dtype=torch.float16, device="cuda")
B = 9
def garbage(count, length):
    return [x.int().cuda() for x in (
        torch.randint(limits.min, limits.max, (count,)),
        torch.randint(-2000, 2000, (count,)),
        torch.full((count,), limits.max),
        torch.full((count,), limits.min),
        torch.linspace(length, 0, count),
        torch.tensor([0, limits.max] * count)[:count],
    )]
def guarded(shape, dims):  # caches between guards, which nothing may touch
    caches = [torch.full((shape[0] + 2, *shape[1:], dim), 7.0, **floats) for dim in dims]
    return caches, [x[1:-1] for x in caches]
def check(caches):
    torch.cuda.synchronize()
    for x in caches:
        assert (x[0] == 7).all() and (x[-1] == 7).all(), "a guard was written"
"""
DECODING = """
T, S = 70, 300
for head_dim, page_size, dim_v in ((64, 16, 64), (128, 3, 128), (256, 64, 72), (72, 1, 256)):
    per_sequence = S // page_size
    for paged in (False, True):
        caches, (k_cache, v_cache) = guarded((40, page_size, 2) if paged else (B, S, 2), (head_dim, dim_v))
        cos = torch.randn(50, 16, **floats)
        for ragged, appends, splits in itertools.product((False, True), (False, True), (0, 3, -1)):
            lead = (T,) if ragged else (B, 5)
            q = torch.randn(*lead, 8, head_dim, **floats)
            options = {"num_splits": splits} if splits >= 0 else {"batch_invariant": True}
            options |= {"rotary_cos": cos, "rotary_sin": cos}
            if appends:
                new = [torch.randn(*lead, 2, dim, **floats) for dim in (head_dim, dim_v)]
                options |= {"k_new": new[0], "v_new": new[1]}
            lengths = garbage(B, S)
            for i, (held, skipped) in enumerate(zip(lengths, lengths[1:] + lengths[:1])):
                options |= {"cache_seqlens": held, "leftpad": skipped}
                if ragged:
                    options["cu_seqlens_q"] = garbage(B + 1, S)[i]
                if paged:
                    options["block_table"] = garbage(B * per_sequence, S)[i].view(B, per_sequence)
                else:
                    options["cache_batch_idx"] = garbage(B, S)[-1 - i]
                flashtile.attention_kvcache(q, k_cache, v_cache, return_lse=True, **options)
        check(caches)
"""
# Enough rows for Hopper's kernel of many, which decoding does not enter. Of pages of 16 rows and more TMA loads boxes,
# of others warps gather rows, unless there are so many queries that the cache is copied.
PREFILL = """
S = 640
sizes = ((64, 16, 64, 300), (128, 48, 128, 300), (256, 64, 256, 300), (72, 32, 40, 300))
sizes += ((64, 1, 64, 60), (128, 3, 128, 60), (256, 1, 256, 60), (72, 5, 40, 60), (128, 1, 128, 300))
for head_dim, page_size, dim_v, queries in sizes:
    T, per_sequence = 7 * queries, S // page_size
    for paged in (False, True):
        caches, (k_cache, v_cache) = guarded((40, page_size, 2) if paged else (B, S, 2), (head_dim, dim_v))
        cos = torch.randn(700, 16, **floats)
        for ragged, appends in itertools.product((False, True), (False, True)):
            lead = (T,) if ragged else (B, queries)
            q = torch.randn(*lead, 16, head_dim, **floats)
            options = {"window": (200, None)} if appends else {"causal": True}
            if appends:
                new = [torch.randn(*lead, 2, dim, **floats) for dim in (head_dim, dim_v)]
                options |= {"k_new": new[0], "v_new": new[1], "rotary_cos": cos, "rotary_sin": cos}
            for i, held in enumerate(garbage(B, S)):
                options["cache_seqlens"] = held
                if page_size < 16:
                    options["leftpad"] = garbage(B, S)[i - 1]
                if ragged:
                    options["cu_seqlens_q"] = garbage(B + 1, T)[i]
                if paged:
                    options["block_table"] = garbage(B * per_sequence, S)[i].view(B, per_sequence)
                flashtile.attention_kvcache(q, k_cache, v_cache, return_lse=True, **options)
        check(caches)
"""
ALIVE = """
q = torch.randn(2, 1, 4, 64, **floats)
k_cache = torch.randn(2, 10, 4, 64, **floats)
assert flashtile.attention_kvcache(q, k_cache, k_cache, cache_seqlens=10).isfinite().all()
print("alive")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("options", [dict(num_splits=3), dict(batch_invariant=True)], ids=str)
def test_an_odd_number_of_parts(options):
    """They lie in memory where 16 bytes can be read at a time."""
    q = torch.randn(1, 1, 4, 128, device="cuda", dtype=BF16)
    k, v = torch.randn(2, 1, 3000, 1, 128, device="cuda", dtype=BF16)
    given = dict(q=q, k_cache=k, v_cache=v, cache_seqlens=3000)
    assert_close(results(given | options), results(given))


@pytest.mark.gpu
@pytest.mark.parametrize("calls", [DECODING, PREFILL], ids=["decoding", "prefill"])
def test_garbage_in_tables_stays_inside_the_tensors(calls):
    assert_survives(GUARDED + calls + ALIVE)


# Rows enough for Hopper's forward kernel.
FAR_APART = """
import itertools
import torch, flashtile
torch.manual_seed(0)
ROWS, STEP = 1200, 1 << 19
memory = torch.empty(ROWS, STEP, dtype=torch.float16, device="cuda")
lengths = torch.tensor([400, 151, 0], dtype=torch.int32, device="cuda")
dims = ((64, 64), (128, 128), (192, 128), (256, 256), (256, 8), (136, 40), (72, 256))
for (head_dim, head_dim_v), PAGE in itertools.product(dims, (16, 1)):
    PAGES = ROWS // PAGE
    table = torch.randperm(PAGES, device="cuda").int().reshape(3, -1)
    q = torch.randn(3, 300, 16, head_dim, dtype=memory.dtype, device="cuda")
    near = [torch.randn(PAGES, PAGE, 4, dim, dtype=memory.dtype, device="cuda") for dim in (head_dim, head_dim_v)]
    widths = [x[0, 0].numel() for x in near]
    far = [
        y.unflatten(1, x.shape[2:]).unflatten(0, x.shape[:2])
        for x, y in zip(near, memory[:, : sum(widths)].split(widths, 1))
    ]
    for x, y in zip(near, far):
        y.copy_(x)
    for causal in (False, True):
        options = dict(cache_seqlens=lengths, block_table=table, causal=causal, return_lse=True)
        found, expected = (flashtile.attention_kvcache(q, *caches, **options) for caches in (far, near))
        assert all(map(torch.equal, found, expected)), (head_dim, head_dim_v, causal)
print("alive")
"""


@pytest.mark.gpu
def test_rows_far_apart():
    """Before the first row lies memory that is nobody's; and nobody asks for it."""
    assert_survives(FAR_APART)


@pytest.mark.gpu
def test_rows_without_room_are_not_written():
    """On CUDA, where nothing can be refused: as if they had not been given."""
    case = Cached("crowded", dtype=F16, held=(100, 60, 0), seqlen_q=3, new=8, room=0, page_size=4)
    given = case.arguments("cuda")
    fits = dict(zip(("k_new", "v_new"), (given[name][:, :5] for name in ("k_new", "v_new")), strict=True))
    short = ints([103, 103, 103], "cuda")
    given |= dict(block_table=ints(torch.arange(81).view(3, 27).tolist(), "cuda"), cache_seqlens=short)
    given["batch_invariant"] = True  # else the number of splits may go by that of new rows
    for name in ("k_cache", "v_cache"):
        given[name] = torch.randn(81, *given[name].shape[1:], generator=cached.seeded(4)).to("cuda", F16)
    assert_same(results(given), results(given | fits))


@pytest.mark.gpu
def test_more_than_65535_sequences():
    """All alike, so that the first and the last have one answer."""
    count = 70_001
    case = Cached("many", dtype=BF16, held=(9,), new=1, page_size=16, heads_q=2, heads_k=1, room=6)
    one = case.arguments("cuda")
    given = {
        name: x.repeat(count, *(1,) * (x.dim() - 1))
        for name, x in one.items()
        if name in ("q", "k_new", "v_new", "cache_seqlens")
    }
    page = int(one["block_table"][0, 0])
    for name in ("k_cache", "v_cache"):
        given[name] = one[name][page].repeat(count, 1, 1, 1)
    given["block_table"] = torch.arange(count, dtype=torch.int32, device="cuda")[:, None]
    found, alone = results(given), results(one)
    for b in (0, 1, 35_000, 65_535, 65_536, count - 1):
        assert_close({"out": found["out"][b : b + 1]}, {"out": alone["out"]})
        assert_bitwise(found["k_cache"][b], alone["k_cache"][page])
