"""attention_kvcache under a column mask of the last keys: trees of drafted tokens, and any other intervals."""

import dataclasses

import cached
import pytest
import torch
from cached import Cached, ints, results, with_own_caches
from cases import BF16, DEVICE_PARAMS, DTYPES, F16, F32, on_devices
from compare import assert_bitwise, assert_same
from hypothesis import given as hypothesis_given
from hypothesis import settings
from hypothesis import strategies as st
from test_kvcache import cached_cases, check
from test_kvcache_laws import assert_close, sequence
from test_properties import random_problems
from traced import compiled

import flashtile
from flashtile import _capability
from flashtile.masks import ColumnMask

LEAST, MOST = -(2**31), 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Masked(Cached):
    """A case of caches with a mask. Its ranges are any, or trees, each of as many drafts as its sequence has queries,
    where the columns suffice."""

    columns: int = 9  # N
    masks: int = 1  # H
    each: bool = False  # whether each sequence has a mask of its own
    trees: bool = False

    def arguments(self, device="cpu"):
        return super().arguments(device) | {"mask": self.mask().to(device)}

    def mask(self):
        generator = torch.Generator().manual_seed(29 + self.columns)
        lengths = self.lengths_q or (self.seqlen_q,) * self.batch
        entries = lengths if self.each else (max(lengths, default=0),)
        make = tree_ranges if self.trees else any_ranges
        shape = (len(entries), self.masks, self.columns, 4)
        ranges = [make(generator, queries, self.columns) for queries in entries for _ in range(self.masks)]
        return ColumnMask(torch.stack(ranges).view(shape) if ranges else ints([]).view(shape), self.seqlen_q)


def any_ranges(generator, queries, columns):
    """(N, 4): none, one or two intervals, backward ones, and such that reach far beyond the rows."""

    def chosen(of):
        of = torch.tensor(of)
        return of[torch.randint(len(of), (columns, 4), generator=generator)]

    ranges = torch.randint(-3, queries + 4, (columns, 4), generator=generator)
    far = chosen([0, 0, 0, 0, 0, 0, 0, 1]) == 1
    ranges = ranges.where(~far, chosen([LEAST, MOST, 0, LEAST + 1, MOST - 1]))
    ranges[torch.rand(columns, generator=generator) < 0.3] = 0
    return ranges.int()


def tree_ranges(generator, queries, columns):
    """(N, 4), the tree behind a context that is hidden from nobody."""
    drafts = min(queries, columns)
    tree = ColumnMask.tree(random_tree(generator, drafts), context=columns - drafts)
    return tree.ranges[0, 0]


def random_tree(generator, count):
    """Parents in depth-first order: each token hangs on the one before, on one of its ancestors, or on none."""
    parents, path = [], []
    for token in range(count):
        del path[int(torch.randint(0, len(path) + 1, (), generator=generator)) :]
        parents.append(path[-1] if path else -1)
        path.append(token)
    return parents


def _cases():
    cases = []

    def add(name, **fields):
        fields.setdefault("dtype", DTYPES[len(cases) % 3])
        i = len(cases)
        fields = dict(masks=(1, 2, 4)[i % 3], each=i % 2 == 1, trees=i % 4 < 2) | fields
        cases.append(Masked(name, **fields))

    pages = (None, 16, 1, 48)
    for i, dim in enumerate((64, 80, 128, 256)):
        for j, queries in enumerate((1, 2, 5, 16, 33, 64, 100)):
            sizes = dict(head_dim=dim, seqlen_q=queries, new=(None, queries)[j % 2], page_size=pages[(i + j) % 4])
            add(f"D{dim}", columns=(queries, queries + 7)[i % 2], **sizes)
    add("narrow_values", head_dim=128, head_dim_v=40, seqlen_q=6)
    for group in (1, 3, 8, 16, 20):
        heads = dict(heads_q=2 * group, heads_k=2, masks=2 * group)
        add(f"group{group}", seqlen_q=5, new=5, head_dim=128, dtype=BF16, each=True, **heads)
    for columns in (0, 1, 30, 64, 97, 200, 5000):  # to all keys of each sequence, and beyond
        add(
            f"N{columns}",
            columns=columns,
            seqlen_q=4,
            head_dim=(64, 128)[columns % 2],
            dtype=(F16, BF16, F32)[columns % 3],
        )
        add(f"N{columns}", columns=columns, seqlen_q=70, heads_q=2, masks=2, page_size=16, dtype=F16)
    for length in (1000, 4133):
        add("long", held=(length, 17, length - 500), seqlen_q=8, new=8, columns=8, head_dim=128, dtype=BF16, each=True)
    for group in (1, 3, 7, 16, 20):  # many rows of a group, which share a mask
        heads = dict(heads_q=2 * group, heads_k=2, masks=1 + group % 2)
        for queries in (20, 45):
            sizes = dict(seqlen_q=queries, new=queries, columns=queries + group, head_dim=(64, 128)[group % 2])
            add(f"rows{group}", page_size=(16, None)[queries % 2], **sizes, **heads)
    for dim in (64, 96, 128, 192, 256):
        heads = dict(heads_q=8, heads_k=4, masks=4, each=True, dtype=(F16, BF16)[dim // 32 % 2], head_dim=dim)
        for queries, page_size in ((70, 16), (150, None)):  # pages, and, of more than 132 tiles, rows
            sizes = dict(seqlen_q=queries, columns=queries, page_size=page_size)
            add("many", held=tuple(range(40, 900, 40)), **sizes, **heads)
        add("few_long", held=(2500, 1024, 31), seqlen_q=24, columns=30, trees=True, **heads)
    far = (  # whose blocks without an edge lie before those of the mask, or between them and a window's end
        dict(window=(600, None)),
        dict(window=(700, 9), causal=False),
        dict(softcap=9.0),
        dict(alibi="per head"),
        dict(sinks=0.0, window=(2, None)),
    )
    for i, chosen in enumerate(far):
        heads = dict(heads_q=8, heads_k=4, masks=4, each=True, dtype=(F16, BF16)[i % 2], head_dim=(64, 128)[i % 2])
        few, many = (2500, 1024, 31), tuple(range(40, 900, 40))
        # With split keys, without, and in rows, unless scores are mapped.
        for held, queries, page_size in ((few, 70, 16), (many, 70, 16), (many, 150, None)):
            sizes = dict(held=held, seqlen_q=queries, columns=150, page_size=page_size)
            add("far_" + "_".join(chosen), **sizes, **heads, **chosen)
    padded = dict(leftpad=(50, 37, 0, 130), seqlen_q=7, new=7)
    add("padded", columns=12, **padded)
    add("padded", columns=90, each=True, page_size=48, **padded)
    ragged = dict(lengths_q=(1, 0, 70, 17, 5), held=(90, 40, 0, 130, 600), new=0, tail=3)
    for i, dtype in enumerate(DTYPES):
        add("ragged", columns=(17, 70, 40)[i], each=i != 1, page_size=pages[i], trees=i == 0, dtype=dtype, **ragged)
    mixed = dict(lengths_q=(1, 300, 2, 0, 40), held=(900, 500, 30, 0, 70), new=0, tail=3)  # two kernels on Hopper
    for i, dtype in enumerate((F16, BF16)):
        sizes = dict(columns=(17, 330)[i], masks=1 + i, page_size=(16, None)[i], head_dim=(64, 128)[i])
        add("mixed", each=i == 0, dtype=dtype, **sizes, **mixed)
    options = (
        dict(causal=False),
        dict(causal=False, window=(30, 4)),
        dict(window=(5, None)),
        dict(softcap=9.0),
        dict(alibi="per head"),
        dict(alibi="per batch and head", sinks=0.0, softcap=5.0, scale=0.3),
        dict(sinks=1.0),
        dict(sinks=1.0, page_size=16),
        dict(window=(40, None), page_size=32),
        dict(rotary=32),
        dict(indexed=True, layout="gaps"),
        dict(page_size=16, shared=True, new=None),
    )
    for i, chosen in enumerate(options):
        for dtype, queries in ((F32, 6), (F16, 40), (BF16, 6)):
            name = "_".join(chosen)
            add(
                name,
                **(dict(seqlen_q=queries, new=queries, columns=11, dtype=dtype, head_dim=(64, 128)[i % 2]) | chosen),
            )
    return cases


CASES = _cases()
SPLIT = [dataclasses.replace(case, num_splits=1 + i % 7) for i, case in enumerate(CASES)]
INVARIANT = [dataclasses.replace(case, batch_invariant=True) for case in CASES]


@pytest.mark.parametrize("case, device", on_devices(CASES))
def test_each_case(case, device, attention_kvcache):
    check(case, device, attention_kvcache)


@pytest.mark.parametrize("case, device", on_devices(SPLIT, ["cuda"]))
def test_split_cases(case, device, attention_kvcache):
    check(case, device, attention_kvcache)


@pytest.mark.parametrize("case, device", on_devices(INVARIANT, ["cuda"]))
def test_batch_invariant_cases(case, device, attention_kvcache):
    check(case, device, attention_kvcache)


@st.composite
def masked_cases(draw):
    case = draw(cached_cases())
    fields = {field.name: getattr(case, field.name) for field in dataclasses.fields(case) if field.init}
    if draw(st.booleans()) and not case.rotary:
        fields["causal"] = False
    masks = draw(st.sampled_from([1, case.heads_k, case.heads_q]))
    columns = draw(st.integers(0, 60) | st.integers(0, 400))
    return Masked(**fields, columns=columns, masks=masks, each=draw(st.booleans()), trees=draw(st.booleans()))


@settings(random_problems, max_examples=150)
@hypothesis_given(masked_cases())
def test_random_problems(case):
    check(case, "cpu", flashtile.attention_kvcache)


@pytest.mark.gpu
@settings(random_problems, max_examples=150)
@hypothesis_given(masked_cases(), st.sampled_from([{}, {}, dict(batch_invariant=True), dict(num_splits=3)]))
def test_random_problems_on_gpus(case, order):
    if case.dtype is F32:
        case = dataclasses.replace(case, dtype=BF16)
    check(dataclasses.replace(case, **order), "cuda", flashtile.attention_kvcache)


# ---- laws

LAWS = [
    Masked("tree", dtype=BF16, seqlen_q=9, new=9, head_dim=128, heads_q=8, trees=True, each=True, masks=2),
    Masked("any", dtype=F16, seqlen_q=40, new=40, page_size=16, columns=61, masks=4, leftpad=(50, 37, 0, 9)),
    Masked("one", dtype=BF16, columns=30, head_dim=256, held=(300, 90, 1), each=True, window=(200, None)),
    Masked("long", dtype=BF16, seqlen_q=3, held=(3000, 1025, 1), columns=1500, head_dim=128, sinks=0.0),
    Masked("ragged", dtype=F16, lengths_q=(1, 0, 70, 17), new=0, columns=20, masks=2, each=True, causal=False),
    Masked("float32", dtype=F32, seqlen_q=6, new=6, columns=6, trees=True, alibi="per head", softcap=9.0),
]
each_law = pytest.mark.parametrize("case, device", on_devices(LAWS))
FIXED = [dict(batch_invariant=True), dict(num_splits=1), dict(num_splits=3)]
each_fixed = pytest.mark.parametrize("fixed", FIXED, ids=str)


@each_fixed
@each_law
def test_a_mask_that_hides_nothing_is_none(case, device, fixed):
    """To the bit, but in batch-invariant calls on Hopper, which have a kernel of their own there that takes no mask."""
    given = case.arguments(device) | fixed
    nothing = ColumnMask(torch.zeros_like(given["mask"].ranges), case.seqlen_q)
    with_mask, without = given | dict(mask=nothing), {name: x for name, x in given.items() if name != "mask"}
    if device == "cuda" and "batch_invariant" in fixed and _capability.of_device() == 90:
        assert_close(results(with_mask), results(without))
        with _capability.limited(80):
            assert_same(results(with_mask), results(without))
    else:
        assert_same(results(with_mask), results(without))


@each_fixed
@each_law
@pytest.mark.parametrize("more", [1, 16, 77, 3000])
def test_more_columns_that_hide_nothing_change_nothing(case, device, fixed, more):
    """Not even which of them come before a sequence's first key."""
    given = case.arguments(device) | fixed
    ranges = torch.nn.functional.pad(given["mask"].ranges, (0, 0, more, 0))
    assert_same(results(given | dict(mask=ColumnMask(ranges, case.seqlen_q))), results(given))


@each_fixed
@each_law
@pytest.mark.parametrize("page_size", [1, 16, 48])
def test_pages_are_a_contiguous_cache(case, device, page_size, fixed):
    found = results(dataclasses.replace(case, page_size=page_size).arguments(device) | fixed)
    expected = results(dataclasses.replace(case, page_size=None).arguments(device) | fixed)
    assert_same({what: found[what] for what in ("out", "lse")}, {what: expected[what] for what in ("out", "lse")})


@each_fixed
@each_law
def test_a_sequence_is_as_alone(case, device, fixed):
    given = case.arguments(device) | fixed
    together, ranges = results(given), given["mask"].ranges
    for b, rows in enumerate(cached.spans(case.batch, case.seqlen_q, given.get("cu_seqlens_q"))):
        own = ColumnMask(ranges[b : b + 1] if len(ranges) > 1 else ranges, case.seqlen_q)
        found = results(sequence(given, b) | dict(mask=own))
        if "cu_seqlens_q" in given:
            expected = dict(out=together["out"][rows], lse=together["lse"][:, rows])
        else:
            expected = dict(out=together["out"][b : b + 1], lse=together["lse"][b : b + 1])
        assert_same({what: found[what] for what in expected}, expected)


@each_law
def test_heads_that_share_a_mask_are_as_heads_that_have_it_each(case, device):
    """To the bit, but on Hopper, whose forward kernel serves many rows of heads that share one."""
    given = case.arguments(device)
    ranges = given["mask"].ranges.repeat_interleave(case.heads_q // case.masks, dim=1)
    with_each = given | dict(mask=ColumnMask(ranges, case.seqlen_q))
    if device == "cuda" and _capability.of_device() == 90:
        assert_close(results(with_each), results(given))
        with _capability.limited(80):
            assert_same(results(with_each), results(given))
    else:
        assert_same(results(with_each), results(given))


@pytest.mark.parametrize("queries", [1, 5, 40])
@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_a_mask_of_all_keys_is_that_of_attention(device, queries):
    dtype = F32 if device == "cpu" else BF16
    case = Masked("full", dtype=dtype, held=(130, 130), room=0, columns=130, each=True, masks=2, seqlen_q=queries)
    given = case.arguments(device)
    _, exact_lse = cached.attention(given)
    found = results(given)
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        torch.testing.assert_close(found["lse"].double(), exact_lse, rtol=0, atol=1e-2)
        return  # attention has column masks on Hopper alone
    dense = {name: given[name] for name in ("causal", "window", "scale", "softcap", "mask")}
    out, lse = flashtile.attention(given["q"], given["k_cache"], given["v_cache"], return_lse=True, **dense)
    assert_close(found, dict(out=out, lse=lse))


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_a_drafted_token_is_as_if_its_path_were_all_that_is_drafted(device, page_size):
    """What speculative decoding is for: a tree in one call gives what its paths give, each decoded by itself."""
    parents, held = [-1, 0, 1, 1, 0, 4, -1, 6], 50
    dtype = F32 if device == "cpu" else F16
    sizes = dict(dtype=dtype, held=(held,), seqlen_q=8, new=8, heads_q=6, page_size=page_size)
    given = Cached("paths", **sizes).arguments(device)
    out = flashtile.attention_kvcache(**with_own_caches(given), mask=ColumnMask.tree(parents, device=device))
    for token in range(8):
        path = [token]
        while parents[path[0]] != -1:
            path.insert(0, parents[path[0]])
        alone = given | {name: given[name][:, path] for name in ("q", "k_new", "v_new")}
        expected = flashtile.attention_kvcache(**with_own_caches(alone))[:, -1]
        torch.testing.assert_close(out[:, token], expected, rtol=0, atol=1e-5 if dtype is F32 else 4e-3)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_rows_that_see_nothing(device):
    dtype = F32 if device == "cpu" else F16
    case = Masked("hidden", dtype=dtype, held=(20, 90), seqlen_q=3, columns=90, heads_q=4, masks=4)
    given, sinks = case.arguments(device), torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)
    ranges = torch.zeros(1, 4, 90, 4, dtype=torch.int32, device=device)
    ranges[:, 1, :, :2] = ints([1, 2], device)  # the second head of the second row
    mask = ColumnMask(ranges, 3)
    out, lse = flashtile.attention_kvcache(**given | dict(mask=mask), return_lse=True)
    hidden = torch.zeros_like(lse, dtype=torch.bool)
    hidden[:, 1, 1] = True
    assert torch.equal(lse.isneginf(), hidden)
    assert torch.equal((out == 0).all(-1).transpose(1, 2), hidden)
    out, lse = flashtile.attention_kvcache(**given | dict(mask=mask), sinks=sinks, return_lse=True)
    assert torch.equal((out == 0).all(-1).transpose(1, 2), hidden)
    torch.testing.assert_close(lse[:, 1, 1], sinks[1].expand(2), rtol=0, atol=1e-6)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_ranges_may_be_parts_of_larger_ones_and_repeat_themselves(device):
    case = Masked("views", dtype=BF16, seqlen_q=6, new=6, columns=12, masks=4, each=True)
    given = case.arguments(device)
    ranges = given["mask"].ranges
    wide = torch.full((6, 9, 20, 4), 3, dtype=torch.int32, device=device)
    wide[1:5, 2:6, 5:17] = ranges
    assert_same(results(given | dict(mask=ColumnMask(wide[1:5, 2:6, 5:17], 6))), results(given))
    one = ranges[:1, :1]
    written_out = ColumnMask(one.repeat(4, 4, 1, 1), 6)
    assert_same(
        results(given | dict(mask=ColumnMask(one.expand(4, 4, 12, 4), 6))), results(given | dict(mask=written_out))
    )
    assert_same(results(given | dict(mask=ColumnMask(one, 6))), results(given | dict(mask=written_out)))


# ---- tracing and graphs


@pytest.mark.parametrize("new", [None, 5])
@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_compiled(device, new):
    given = Masked("compiled", dtype=F16, seqlen_q=5, new=new, trees=True, each=True, masks=2).arguments(device)
    assert_same(results(given, compiled(flashtile.attention_kvcache)), results(given))


@pytest.mark.gpu
def test_a_captured_graph_reads_the_mask_of_each_replay():
    given = Masked("graph", dtype=BF16, seqlen_q=8, head_dim=128, trees=True, each=True).arguments("cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        flashtile.attention_kvcache(**given)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashtile.attention_kvcache(**given)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        given["mask"].ranges.copy_(torch.stack([any_ranges(generator, 8, 9) for _ in range(4)])[:, None])
        graph.replay()
        assert_bitwise(out, flashtile.attention_kvcache(**given))


# ---- what is refused, and what is said

Q5 = ColumnMask.tree([-1, 0, 1, 0, -1])
REFUSED = {
    "ranges": (lambda mask: mask.ranges, TypeError, "mask is .*expected a flashtile.masks.ColumnMask or None"),
    "ragged": (
        lambda mask: ColumnMask.concatenate([mask, mask]),
        ValueError,
        "mask is ColumnMask.*expected one of equally",
    ),
    "queries": (lambda mask: ColumnMask.full(4, 5), ValueError, "mask has S_q = 4, expected 5, as q"),
    "entries": (
        lambda mask: ColumnMask.stack([mask] * 3),
        ValueError,
        r"mask has shape \(3, 1, 5, 4\), expected 1 or B = 4 entries in \(1 or B, 1 or H_k or H_q, N, 4\)",
    ),
    "heads": (
        lambda mask: ColumnMask(mask.ranges.repeat(1, 3, 1, 1), 5),
        ValueError,
        r"mask has shape \(1, 3, 5, 4\), expected 1, H_k = 2 or H_q = 4 heads",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_refused(name, device):
    """And nothing is written."""
    change, exception, message = REFUSED[name]
    given = Cached("refused", dtype=F16, seqlen_q=5, new=5).arguments(device)
    before = given["k_cache"].clone()
    with pytest.raises(exception, match=f"^attention_kvcache: {message}"):
        flashtile.attention_kvcache(**given, mask=change(Q5.to(device)))
    assert_bitwise(given["k_cache"], before)


@pytest.mark.gpu
def test_a_mask_of_another_device_is_refused():
    given = Cached("device", dtype=F16, seqlen_q=5).arguments("cuda")
    with pytest.raises(ValueError, match=r"^attention_kvcache: mask is on cpu, expected cuda:0, as q"):
        flashtile.attention_kvcache(**given, mask=Q5)


def test_explained():
    given = Cached("explained", dtype=F16, seqlen_q=5, new=5).arguments()
    plan = flashtile.explain(**given, mask=Q5)
    assert "causal, column mask (1, 1)" in plan
    assert "the last 5 keys of each have the column mask" in plan
    assert "column mask" not in flashtile.explain(**given)


@pytest.mark.parametrize("stored", [BF16, torch.float8_e4m3fn])
@pytest.mark.parametrize("gpu", ["A100", "H100"])
@pytest.mark.parametrize("queries", [1, 8, 64, 512])
def test_every_gpu_plans_what_it_plans_without_a_mask(gpu, queries, stored):
    """But where heads of a group have a mask each, which Hopper's forward kernel does not pack, and over 8-bit numbers:
    those are left to the kernels over a cache."""
    q = torch.empty(2, queries, 8, 128, dtype=BF16, device="meta")
    cache = torch.empty(2, 4096, 2, 128, dtype=BF16, device="meta").to(stored)
    lengths = torch.empty(2, dtype=torch.int32, device="meta")

    def explained(**mask):
        return flashtile.explain(q, cache, cache, cache_seqlens=lengths, device=gpu, **mask)

    assert ("kernel    sm90_" in explained()) == (gpu == "H100" and queries >= 8)
    for masks in (1, 2, 8):
        mask = ColumnMask(torch.empty(1, masks, queries, 4, dtype=torch.int32, device="meta"), queries)
        plan = explained(mask=mask)
        assert ("kernel    sm90_" in plan) == (gpu == "H100" and queries >= 8 and masks < 8 and stored is BF16)
        assert "widened" not in plan
        assert f"column mask (1, {masks})" in plan
