"""attention_cascade: a prefix that is read once for all sequences, and what each has of its own, are the keys of one
call."""

import math

import cached
import pytest
import torch
from cached import Cached, ints, with_own_caches
from cases import BF16, DEVICE_PARAMS, DTYPES, F16, F32, on_devices
from compare import assert_accurate, assert_bitwise, largest, score_rounding
from hypothesis import given as hypothesis_given
from hypothesis import settings
from hypothesis import strategies as st
from test_kvcache_fp8 import in_8_bits

import flashtile
from flashtile.masks import ColumnMask

each_device = pytest.mark.parametrize("device", DEVICE_PARAMS)


def prefix_of(case, rows, device):
    """(k_prefix, v_prefix)."""
    dims = case.head_dim, case.head_dim_v or case.head_dim
    generator = torch.Generator().manual_seed(29)
    return [torch.randn(rows, case.heads_k, dim, generator=generator).to(device, case.dtype) for dim in dims]


def arguments(case, device):
    """Those of attention_cascade, but for the prefix."""
    given = case.arguments(device)
    assert given.pop("window") is None
    return given


def whole(given, prefix):
    """Arguments of attention_kvcache: contiguous caches in which the prefix stands in front of each sequence's rows."""
    names = [
        name for name in given if name not in ("k_new", "v_new", "block_table", "cache_batch_idx", "cache_seqlens")
    ]
    found = {name: given[name] for name in names}
    ends = [end for _, end in cached.counted(given)]
    for name, first, cache in zip(("k_cache", "v_cache"), prefix, cached.appended(given), strict=True):
        rows = len(first) + max(ends, default=0)
        found[name] = cache.new_full((len(ends), rows, *first.shape[1:]), math.nan)
        for b, end in enumerate(ends):
            found[name][b, : len(first) + end] = torch.cat([first, cache[cached.place_of(given, b, 0, end)]])
    return found | dict(cache_seqlens=ints([len(prefix[0]) + end for end in ends], given["q"].device))


def check(given, prefix, **how):
    """`how` hands over the prefix otherwise than as it is."""
    expected, own = whole(given, prefix), with_own_caches(given)
    handed = how or dict(k_prefix=prefix[0], v_prefix=prefix[1])
    out, lse = flashtile.attention_cascade(**handed, **own, return_lse=True)
    dtype = given["q"].dtype
    exact_out, exact_lse = cached.attention(expected)
    rough_out, _ = cached.attention(expected, dtype=dtype)
    _, rough_lse = cached.attention(expected, dtype=F32)
    assert out.dtype is dtype and lse.dtype is F32
    assert_accurate(out, exact_out, rough_out, "out", 2 * score_rounding(exact_lse, exact_out))
    assert_accurate(lse, exact_lse, rough_lse, "lse", 2 * score_rounding(exact_lse))
    for found, name in zip(cached.appended(given), ("k_cache", "v_cache"), strict=True):
        assert_bitwise(own[name], found, name)
    place = torch.empty_like(out)
    assert flashtile.attention_cascade(**handed, **with_own_caches(given), out=place) is place
    assert_bitwise(place, out)


def _cases():
    layouts = (dict(), dict(page_size=16), dict(indexed=True), dict(page_size=3))
    ragged = dict(lengths_q=(1, 0, 70, 17, 5), held=(90, 40, 70, 130, 600), tail=9)
    cases = []
    for i, dtype in enumerate(DTYPES):
        for j, layout in enumerate(layouts):
            sizes = dict(dtype=dtype, head_dim=(64, 128)[(i + j) % 2], **layout)
            cases += [
                Cached("decode", held=(97, 40, 1, 130), **sizes),
                Cached("decode_append", held=(97, 40, 0, 130), new=1, heads_q=8, **sizes),
                Cached("drafts", seqlen_q=5, held=(97, 40, 5, 130), softcap=9.0, magnitude=4.0, **sizes),
                Cached("chunks_append", seqlen_q=70, new=70, scale=0.3, **sizes),
                Cached("sinks", seqlen_q=3, new=3, sinks=0.0, causal=j % 2 == 0, **sizes),
                Cached("ragged", **ragged, **sizes),
                Cached("ragged_append", **ragged | dict(held=(90, 40, 0, 130, 600), new=0), **sizes),
                Cached("nothing_of_its_own", held=(0, 0), causal=False, **sizes),
                Cached("large_scores", magnitude=100.0, held=(97, 40, 1, 130), **sizes),
            ]
        cases.append(Cached("many_sequences", held=tuple(range(1, 65)), dtype=dtype, heads_q=8, page_size=16))
        cases.append(Cached("D192_Dv128", head_dim=192, head_dim_v=128, dtype=dtype, held=(9, 50)))
        cases.append(Cached("D72_Dv40", head_dim=72, head_dim_v=40, dtype=dtype, held=(9, 50), layout="gaps"))
        for name, sizes in dict(no_queries=dict(seqlen_q=0), no_batch=dict(held=()), no_heads=dict(heads_q=0)).items():
            cases.append(Cached(name, dtype=dtype, **sizes))
    return cases


@pytest.mark.parametrize("rows", [0, 1, 300])
@pytest.mark.parametrize("case, device", on_devices(_cases()))
def test_each_case(case, device, rows):
    check(arguments(case, device), prefix_of(case, rows, device))


def in_pages(x, page_size, pages):
    """A cache of NaN in whose `pages` the rows `x` stand."""
    cache = x.new_full((int(pages.max()) + 2, page_size, *x.shape[1:]), math.nan)
    row = torch.arange(len(x), device=x.device)
    cache[pages[row // page_size].long(), row % page_size] = x
    return cache


@each_device
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_prefix_in_pages_of_its_own(page_size, as_tensor, device):
    """Of a page that is not full, and of a length that only the device knows."""
    case = Cached("decode", dtype=BF16, held=(97, 40, 1, 130), page_size=16)
    prefix = prefix_of(case, 150, device)
    count = math.ceil(150 / page_size)
    table = torch.randperm(count + 4, generator=torch.Generator().manual_seed(3))[:count].int().to(device)
    k_prefix, v_prefix = (in_pages(x, page_size, table) for x in prefix)
    length = ints([150], device) if as_tensor else 150
    tables = dict(prefix_table=table, prefix_seqlen=length)
    check(arguments(case, device), prefix, k_prefix=k_prefix, v_prefix=v_prefix, **tables)
    longer = [torch.cat([x, torch.full_like(x, math.nan)]) for x in prefix]
    check(arguments(case, device), prefix, k_prefix=longer[0], v_prefix=longer[1], prefix_seqlen=length)


@each_device
@pytest.mark.parametrize("kind", [None, "all", "rows"])
@pytest.mark.parametrize("case", ["dense", "ragged"])
def test_pages_that_sequences_share(case, kind, device):
    """As serving engines have them, of which the first two tables begin alike; of 8-bit numbers too."""
    sizes = dict(seqlen_q=1) if case == "dense" else dict(lengths_q=(1, 20, 6), tail=4)
    case = Cached(case, dtype=BF16, page_size=16, held=(97, 60, 130), shared=True, **sizes)
    given, pages = arguments(case, device), 2
    given["block_table"][:, :pages] = given["block_table"][0, :pages]
    if kind is not None:
        given = in_8_bits(given, kind, torch.float8_e4m3fn)
    expected = flashtile.attention_kvcache(**given, return_lse=True)
    held = dict(cache_seqlens=given["cache_seqlens"] - 16 * pages, block_table=given["block_table"][:, pages:])
    shared = dict(prefix_table=given["block_table"][0, :pages], prefix_seqlen=16 * pages)
    caches = given["k_cache"], given["v_cache"]
    found = flashtile.attention_cascade(given.pop("q"), *caches, **given | held, **shared, return_lse=True)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=2 * torch.finfo(BF16).eps * largest(expected[0]))
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-4)


@each_device
def test_a_tree_of_drafts_behind_a_prefix(device):
    case = Cached("tree", dtype=BF16, seqlen_q=5, held=(97, 40, 5, 130), causal=False)
    mask = ColumnMask.tree([-1, 0, 1, 0, -1]).to(device)
    check(arguments(case, device) | dict(mask=mask), prefix_of(case, 200, device))


@each_device
def test_rows_in_front_of_their_own_keys_see_the_whole_prefix(device):
    """Where a sequence has more queries than keys of its own."""
    case = Cached("few_keys", dtype=BF16, seqlen_q=5, held=(2, 0))
    given, prefix = arguments(case, device), prefix_of(case, 50, device)
    out = flashtile.attention_cascade(k_prefix=prefix[0], v_prefix=prefix[1], **given)
    alone = flashtile.attention(given["q"].flatten(0, 1)[None], *(x[None] for x in prefix))[0].unflatten(0, (2, 5))
    torch.testing.assert_close(out[0, :3], alone[0, :3], rtol=0, atol=1e-2)
    torch.testing.assert_close(out[1], alone[1], rtol=0, atol=1e-2)


@each_device
@settings(max_examples=30, deadline=None)
@hypothesis_given(data=st.data())
def test_any_sizes(device, data):
    draw = data.draw
    batch, heads_k, group = draw(st.integers(1, 6)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4, 7]))
    lengths = draw(st.lists(st.integers(1, 40), min_size=batch, max_size=batch))
    case = Cached(
        "any",
        dtype=F32 if device == "cpu" else draw(st.sampled_from([F16, BF16])),
        heads_q=group * heads_k,
        heads_k=heads_k,
        head_dim=draw(st.sampled_from([64, 80, 128])),
        held=tuple(draw(st.integers(0, 200)) + n for n in lengths),
        lengths_q=tuple(lengths),
        new=draw(st.sampled_from([None, 0])),
        tail=draw(st.integers(0, 5)),
        page_size=draw(st.sampled_from([None, 1, 16, 24])),
        softcap=draw(st.sampled_from([0.0, 5.0])),
        causal=draw(st.booleans()),
        sinks=draw(st.sampled_from([None, 0.0])),
    )
    check(arguments(case, device), prefix_of(case, draw(st.integers(0, 500)), device))


@each_device
def test_traced(device):
    """A compiled call, and one under vmap, where `combine` stands for the kernel that puts results together."""
    case = Cached("decode", dtype=BF16, held=(97, 40, 1, 130), new=1, page_size=16)
    given, (k_prefix, v_prefix) = arguments(case, device), prefix_of(case, 150, device)
    expected = flashtile.attention_cascade(k_prefix=k_prefix, v_prefix=v_prefix, **with_own_caches(given))
    torch.compiler.reset()
    compiled = torch.compile(flashtile.attention_cascade, backend="aot_eager", fullgraph=True)
    found = compiled(k_prefix=k_prefix, v_prefix=v_prefix, **with_own_caches(given))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-2)

    def of_queries(q):
        return flashtile.attention_cascade(q, k_prefix, v_prefix, **held)

    held = {name: given[name] for name in ("k_cache", "v_cache", "cache_seqlens", "block_table")}
    both = torch.stack([given["q"], given["q"].flip(0)])
    one_by_one = torch.stack([of_queries(q) for q in both])
    torch.testing.assert_close(torch.vmap(of_queries)(both), one_by_one, rtol=0, atol=1e-2)


@pytest.mark.gpu
def test_in_a_cuda_graph():
    """Which goes by the lengths of each replay, of the prefix too."""
    case = Cached("decode", dtype=BF16, held=(97, 40, 1, 130), page_size=16)
    given, prefix = arguments(case, "cuda"), prefix_of(case, 150, "cuda")
    length = ints([150], "cuda")
    call = given | dict(k_prefix=prefix[0], v_prefix=prefix[1], prefix_seqlen=length)
    flashtile.attention_cascade(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashtile.attention_cascade(**call)
    for rows in (150, 20, 0):
        length.fill_(rows)
        graph.replay()
        assert_bitwise(out, flashtile.attention_cascade(**call | dict(prefix_seqlen=rows)))


WRONG = {
    "a rank": (dict(q=lambda x: x[0]), ValueError, r"attention_cascade: q has shape \(1, 4, 64\), expected \(B, S_q"),
    "a scalar of offsets": (
        dict(q=lambda x: x[:, 0], cu_seqlens_q=lambda x: ints([3])[0]),
        ValueError,
        r"attention_cascade: cu_seqlens_q has shape \(\), expected \(B \+ 1\)",
    ),
    "a scalar of keys": (
        dict(k_prefix=lambda x: x[0, 0, 0]),
        ValueError,
        r"attention_cascade: k_prefix has shape \(\), expected \(S_p, H_k, D\)",
    ),
    "other values": (
        dict(v_prefix=lambda x: x[..., :8]),
        ValueError,
        r"attention_cascade: v_prefix has shape \(50, 2, 8",
    ),
    "no prefix": (dict(k_prefix=lambda x: None), TypeError, "attention_cascade: k_prefix is of type NoneType"),
    "a flag": (dict(return_lse=lambda x: 1), TypeError, "attention_cascade: return_lse is 1, expected True or False"),
    "a table": (
        dict(prefix_table=lambda x: 3, prefix_seqlen=lambda x: 9),
        TypeError,
        "attention_cascade: prefix_table is of type int",
    ),
    "no length": (
        dict(prefix_table=lambda x: ints([0]), prefix_seqlen=lambda x: None),
        ValueError,
        "attention_cascade: prefix_seqlen is None, expected a length, as prefix_table is given",
    ),
    "other heads": (dict(k_prefix=lambda x: x[:, :1]), ValueError, "attention_kvcache: v_cache has shape"),
    "too long": (dict(prefix_seqlen=lambda x: 90), ValueError, "attention_kvcache: cache_seqlens has 90 at index 0"),
    "a gradient": (dict(q=lambda x: x.requires_grad_()), NotImplementedError, "attention_kvcache: q requires grad"),
    "a place": (dict(out=lambda x: torch.empty(3)), ValueError, r"attention_cascade: out has shape \(3,\), expected"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name):
    changes, exception, message = WRONG[name]
    case = Cached("refused", dtype=F16, held=(9, 20))
    k_prefix, v_prefix = prefix_of(case, 50, "cpu")
    given = arguments(case, "cpu") | dict(k_prefix=k_prefix, v_prefix=v_prefix)
    given |= {name: change(given.get(name)) for name, change in changes.items()}
    given |= dict(zip(("k_new", "v_new"), torch.ones(2, 2, 1, 2, 64, dtype=F16), strict=True))
    before = given["k_cache"].clone()
    with pytest.raises(exception, match=f"^{message}"):
        flashtile.attention_cascade(**given)
    assert_bitwise(given["k_cache"], before)
