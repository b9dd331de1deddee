"""Caches of keys and values: cases of what serving asks for, the formula for them, calls that write copies of caches,
and good arguments, which tests spoil one at a time."""

import dataclasses
import itertools
import math

import pytest
import reference
import torch
from cases import BF16, DTYPES, F16, F32, Case, lay_out
from compare import assert_bitwise

import flashtile
from flashtile._options import SCORES

POSITIONS = 4500  # that rotary tables of cases have


@dataclasses.dataclass(frozen=True)
class Cached(Case):
    """Everything that does not count is NaN: rows of a cache that are not held, or are padding, or in no sequence's
    page, and rows of q behind the last sequence. Page numbers that are not needed are no page's."""

    batch: int = dataclasses.field(default=0, init=False)
    seqlen_k: int = dataclasses.field(default=0, init=False)  # capacity of a sequence
    seqlen_q: int = 1
    heads_q: int = 4
    heads_k: int = 2
    causal: bool = True
    held: tuple = (97, 40, 0, 130)
    new: int | None = None  # rows that each sequence is given; of a ragged q as many as queries, whatever it says
    lengths_q: tuple | None = None  # of a ragged q
    tail: int = 0  # rows of it behind the last sequence
    page_size: int | None = None  # None: contiguous
    shared: bool = False  # sequences begin with the first one's pages
    indexed: bool = False  # sequences have entries of a larger cache, in another order
    leftpad: tuple | None = None
    rotary: int = 0
    interleaved: bool = True
    room: int = 37  # rows beyond those that are needed
    num_splits: int = 0
    batch_invariant: bool = False

    def __post_init__(self):
        capacity = max((n + m for n, m in zip(self.held, self.added(), strict=True)), default=0) + self.room
        if self.page_size is not None:
            capacity = math.ceil(capacity / self.page_size) * self.page_size
        object.__setattr__(self, "seqlen_k", capacity)
        object.__setattr__(self, "batch", len(self.held))

    def added(self):
        """Rows for each sequence."""
        if self.new is None:
            return (0,) * len(self.held)
        return (self.new,) * len(self.held) if self.lengths_q is None else self.lengths_q

    def arguments(self, device="cpu"):
        """The keyword arguments of flashtile.attention_kvcache and of the formula. What a row holds does not depend on
        where it lies."""
        head_dim_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        generator = torch.Generator().manual_seed(17)

        def rows(count, heads, dim, seed=None):
            values = torch.randn(count, heads, dim, generator=generator if seed is None else seeded(seed))
            return values.to(self.dtype).to(device)

        def in_layout(x, layout):
            return lay_out(x, layout) if x.dim() == 4 else lay_out(x[None], layout)[0]

        lengths = (self.seqlen_q,) * self.batch if self.lengths_q is None else self.lengths_q
        queries = torch.cat([self.magnitude * rows(n, self.heads_q, self.head_dim) for n in (*lengths, self.tail)])
        given = {"q": queries}
        if self.lengths_q is None:
            given["q"] = queries.unflatten(0, (self.batch, self.seqlen_q))
        else:
            given["cu_seqlens_q"] = ints([sum(lengths[:b]) for b in range(self.batch + 1)], device)
            queries[sum(lengths) :] = math.nan
        given |= self.tables(device)
        for name, dim in (("k", self.head_dim), ("v", head_dim_v)):
            cache = torch.full((self.entries_of_cache(), self.page_size or self.seqlen_k, self.heads_k, dim), math.nan)
            cache = cache.to(device, self.dtype)
            for b, held in enumerate(self.held):
                first = self.leftpad[b] if self.leftpad else 0
                values = rows(held, self.heads_k, dim, seed=2 * b + (name == "v"))
                place = places(b, held, cache.shape[1], **self.tables(device))
                cache[tuple(x[first:] for x in place)] = values[first:]
            # A cache that a kernel cannot read is refused, where other operands are copied.
            given[f"{name}_cache"] = in_layout(cache, "gaps" if self.layout == "misaligned" else self.layout)
            if self.new is not None:
                new = torch.cat([rows(n, self.heads_k, dim) for n in (*self.added(), self.tail)])
                if self.lengths_q is None:
                    new = new[: self.batch * self.new].unflatten(0, (self.batch, self.new))
                given[f"{name}_new"] = in_layout(new, self.layout)
        given["q"] = in_layout(given["q"], self.layout)
        given["cache_seqlens"] = ints(self.held, device)
        if self.leftpad is not None:
            given["leftpad"] = ints(self.leftpad, device)
        if self.rotary:
            angles = torch.outer(torch.arange(POSITIONS), 10000.0 ** -torch.linspace(0, 1, self.rotary // 2))
            given |= {f"rotary_{f}": getattr(angles, f)().to(device, self.dtype) for f in ("cos", "sin")}
            given["rotary_interleaved"] = self.interleaved
        if self.num_splits:
            given["num_splits"] = self.num_splits
        if self.batch_invariant:
            given["batch_invariant"] = True
        return given | self.options(device)

    def entries_of_cache(self):
        if self.page_size is None:
            return self.batch + 2 * self.indexed
        return self.batch * self.seqlen_k // self.page_size + 3

    def tables(self, device="cpu"):
        """Those that say where rows lie."""
        order = torch.randperm(self.entries_of_cache(), generator=seeded(3))
        if self.page_size is None:
            return {"cache_batch_idx": ints(order[: self.batch].tolist(), device)} if self.indexed else {}
        pages = self.seqlen_k // self.page_size
        table = order[: self.batch * pages].reshape(self.batch, pages)
        for b, (held, added) in enumerate(zip(self.held, self.added(), strict=True)):
            if self.shared:
                common = min(held, self.held[0]) // self.page_size
                table[b, :common] = table[0, :common]
            table[b, math.ceil((held + added) / self.page_size) :] = (-1, 2**31 - 1, -(2**31))[b % 3]
        return {"block_table": table.to(device, torch.int32)}


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def ints(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def places(b, count, page_size, block_table=None, cache_batch_idx=None):
    """(entry, row) of a cache, where the first `count` rows of sequence b lie."""
    table = cache_batch_idx if block_table is None else block_table
    row = torch.arange(count, device=None if table is None else table.device)
    if block_table is None:
        return torch.full_like(row, b if cache_batch_idx is None else int(cache_batch_idx[b])), row
    return block_table[b].long()[row // page_size], row % page_size


def rotated(x, position, cos, sin, interleaved):
    """`x`, (rows, H, D), each row by the angles of its position; rounded once, to its dtype."""
    position = position.clamp(0, len(cos) - 1)
    cos, sin = (table[position].double()[:, None] for table in (cos, sin))  # (rows, 1, R / 2)
    width = cos.shape[2]
    shape = (width, 2) if interleaved else (2, width)
    pairs = x[..., : 2 * width].double().unflatten(2, shape)
    a, b = pairs.unbind(3 if interleaved else 2)
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=3 if interleaved else 2)
    return torch.cat([turned.flatten(2).to(x.dtype), x[..., 2 * width :]], dim=2)


def spans(count, rows, begins=None):
    """[rows of sequence b], in what stands one behind the other."""
    begins = [rows * b for b in range(count + 1)] if begins is None else begins.tolist()
    return [slice(*ends) for ends in itertools.pairwise(begins)]


def counted(given):
    """[(rows that the cache holds, with those that it is given)] of each sequence; `given` are arguments."""
    held = given["cache_seqlens"].tolist()
    if "k_new" not in given:
        return [(n, n) for n in held]
    added = spans(len(held), given["k_new"].shape[1], given.get("cu_seqlens_q"))
    return [(n, n + rows.stop - rows.start) for n, rows in zip(held, added, strict=True)]


def place_of(given, b, first, end):
    return tuple(x[first:] for x in places(b, end, given["k_cache"].shape[1], **tables_of(given)))


def tables_of(given):
    return {name: given.get(name) for name in ("block_table", "cache_batch_idx")}


def rotated_by(given, x, first):
    """`x`, whose first row has the position `first`, by the tables that are given."""
    if "rotary_cos" not in given:
        return x
    position = torch.arange(first, first + len(x), device=x.device)
    return rotated(x, position, given["rotary_cos"], given["rotary_sin"], given["rotary_interleaved"])


def rows_of(given, name):
    """Of q, k_new or v_new: (rows, H, D) of each sequence."""
    x = given[name]
    flat = x if "cu_seqlens_q" in given else x.flatten(0, 1)
    return [flat[rows] for rows in spans(len(given["cache_seqlens"]), x.shape[1], given.get("cu_seqlens_q"))]


def appended(given):
    """(k_cache, v_cache) as they become; those of `given` stay as they are."""
    k_cache, v_cache = (given[name].clone() for name in ("k_cache", "v_cache"))
    if "k_new" in given:
        for b, (held, end) in enumerate(counted(given)):
            place = place_of(given, b, held, end)
            k_cache[place] = rotated_by(given, rows_of(given, "k_new")[b], held)
            v_cache[place] = rows_of(given, "v_new")[b]
    return k_cache, v_cache


def attention(given, dtype=torch.float64):
    """(out, lse) of flashtile.attention_kvcache(**given), sequence by sequence; the caches stay as they are."""
    *rows, heads, _ = given["q"].shape
    out = torch.zeros(math.prod(rows), heads, given["v_cache"].shape[3], dtype=dtype, device=given["q"].device)
    lse = torch.full((heads, len(out)), -math.inf, dtype=dtype, device=out.device)
    for rows, operands, options in sequences(given):
        part, part_lse = reference.attention(*operands, dtype=dtype, **options)
        out[rows], lse[:, rows] = part[0], part_lse[0]
    if "cu_seqlens_q" in given:
        return out, lse
    return out.unflatten(0, given["q"].shape[:2]), lse.unflatten(1, given["q"].shape[:2]).transpose(0, 1)


def max_logits(given, dtype=torch.float64):
    """The largest scores of the same call, (B, H_q)."""
    q = given["q"]
    found = torch.empty(len(given["cache_seqlens"]), q.shape[-2], dtype=dtype, device=q.device)
    for b, (_, (mine, keys, _), options) in enumerate(sequences(given)):
        options.pop("sinks", None)
        found[b] = reference.max_logits(mine, keys, dtype=dtype, **options)[0]
    return found


def sequences(given):
    """Of each one (its rows of q, one behind the other; its queries, keys and values, as they are attended to; the
    formula's options)."""
    k_cache, v_cache = appended(given)
    q = given["q"] if "cu_seqlens_q" in given else given["q"].flatten(0, 1)
    options = {"causal": True} | {x.name: given[x.name] for x in SCORES if x.name in given}
    slopes, mask = options.pop("alibi_slopes", None), options.pop("mask", None)
    queries = spans(len(given["cache_seqlens"]), given["q"].shape[1], given.get("cu_seqlens_q"))
    for b, (rows, (_, end)) in enumerate(zip(queries, counted(given), strict=True)):
        place = place_of(given, b, int(given["leftpad"][b]) if "leftpad" in given else 0, end)
        mine = rotated_by(given, q[rows], end - (rows.stop - rows.start))
        own = slopes[b : b + 1] if slopes is not None and slopes.dim() == 2 else slopes
        seen = None if mask is None else seen_under(mask, b, len(mine), len(place[0]))
        operands = mine[None], k_cache[place][None], v_cache[place][None]
        yield rows, operands, dict(options, alibi_slopes=own, mask=seen)


def seen_under(mask, b, queries, keys):
    """(1, H, queries, keys) bool: what sequence b sees under a column mask, whose columns are its last keys."""
    ranges = mask.ranges[b if len(mask.ranges) > 1 else 0].long()[:, None]  # (H, 1, N, 4)
    row = torch.arange(queries, device=ranges.device)[:, None]
    hidden = (ranges[..., 0] <= row) & (row < ranges[..., 1]) | (ranges[..., 2] <= row) & (row < ranges[..., 3])
    columns = hidden.shape[2]
    seen = torch.ones(len(hidden), queries, keys, dtype=torch.bool, device=ranges.device)
    seen[..., max(keys - columns, 0) :] = ~hidden[..., max(columns - keys, 0) :]
    return seen[None]


def with_own_caches(given):
    """The same arguments, with caches that a call may write."""
    return given | {name: copy_of(given[name]) for name in ("k_cache", "v_cache")}


def copy_of(x):
    """With its strides, and what lies between."""
    memory = x.untyped_storage().clone()
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(memory, x.storage_offset(), x.shape, x.stride())


def results(given, function=flashtile.attention_kvcache):
    """out, lse and the caches after a call, which leaves those of `given` alone."""
    given = with_own_caches(given)
    out, lse = function(**given, return_lse=True)
    return dict(out=out, lse=lse, k_cache=given["k_cache"], v_cache=given["v_cache"])


REMOVED, SHARED = object(), object()  # what an argument becomes: none at all, or k_cache


def arguments(base, changes, device):
    """Good ones but for `changes`, of two sequences with 20 and 30 held rows, 3 queries and 3 new rows each; caches of
    50 rows a sequence."""
    shapes = dict(q=(2, 3, 4, 64), k_cache=(4, 50, 2, 64), v_cache=(4, 50, 2, 64), k_new=(2, 3, 2, 64))
    if base == "paged":
        shapes |= dict(k_cache=(12, 10, 2, 64), v_cache=(12, 10, 2, 64))
    if base == "ragged":
        shapes |= dict(q=(6, 4, 64), k_new=(6, 2, 64))
    shapes["v_new"] = shapes["k_new"]
    given = {name: torch.randn(shape).to(device, F16) for name, shape in shapes.items()}
    given |= dict(cache_seqlens=ints([20, 30], device), leftpad=ints([0, 7], device))
    given |= {name: torch.randn(60, 16).to(device, F16) for name in ("rotary_cos", "rotary_sin")}
    if base == "paged":
        given["block_table"] = torch.arange(10, dtype=torch.int32, device=device).view(2, 5)
    if base == "indexed":
        given["cache_batch_idx"] = ints([3, 1], device)
    if base == "ragged":
        given["cu_seqlens_q"] = ints([0, 2, 6], device)
    given |= {name: x(given.get(name, given["q"])) if callable(x) else x for name, x in changes.items()}
    given |= {"v_cache": given["k_cache"]} if changes.get("v_cache") is SHARED else {}
    return {name: x for name, x in given.items() if x is not REMOVED}


def numbers(*values):
    return lambda x: ints(values, x.device)


def assert_refused(base, changes, exception, message, device):
    """And nothing is written."""
    given = arguments(base, changes, device)
    caches = {name: given[name].clone() for name in ("k_cache", "v_cache") if isinstance(given[name], torch.Tensor)}
    with pytest.raises(exception, match=f"^attention_kvcache: {message}") as raised:
        flashtile.attention_kvcache(**given)
    assert raised.type is exception
    for name, x in caches.items():
        assert_bitwise(given[name], x, name)


def _cases():
    """Pairwise, as in cases.py: each axis is walked while the others take turns."""
    cases = []

    def add(name, **fields):
        fields.setdefault("dtype", DTYPES[len(cases) % 3])
        cases.append(Cached(name, **fields))

    pages = (None, 16, 1, 64, 3, 256)
    layouts = (dict(), dict(page_size=16), dict(indexed=True), dict(page_size=3), dict(page_size=64, shared=True))
    everything = dict(
        window=(60, 9), softcap=10.0, scale=0.3, alibi="per batch and head", sinks=0.0, leftpad=(5, 0, 0, 130)
    )
    for i, dim in enumerate((64, 128, 256, 72, 8, 96)):
        for j, dtype in enumerate(DTYPES):
            sizes = dict(head_dim=dim, dtype=dtype, page_size=pages[(i + j) % 6])
            add(f"D{dim}", seqlen_q=(1, 5, 17)[j], new=(None, 5, 17)[(i + j) % 3], **sizes)
    for i, (dim, dim_v) in enumerate(((128, 64), (64, 128), (192, 128), (256, 40), (72, 136))):
        for dtype in (F16, BF16) if i else DTYPES:
            sizes = dict(head_dim=dim, head_dim_v=dim_v, dtype=dtype)
            add(f"D{dim}_Dv{dim_v}", seqlen_q=1 + i, new=1 + i, **sizes, **layouts[i])
    for i, group in enumerate((1, 2, 3, 4, 6, 8, 16, 71)):
        for j, seqlen_q in enumerate((1, 5, 64)):
            heads = dict(heads_q=2 * group, heads_k=2) if group < 71 else dict(heads_q=71, heads_k=1)
            add(f"group{group}", seqlen_q=seqlen_q, new=2 if i % 2 else None, **heads, **layouts[(i + j) % 5])
    for i, seqlen_q in enumerate((1, 2, 5, 17, 64, 130)):
        for j, new in enumerate((None, seqlen_q, seqlen_q + 3)):
            sizes = dict(seqlen_q=seqlen_q, new=new, dtype=DTYPES[(i + j) % 3], head_dim=(64, 128)[j % 2])
            add(f"Sq{seqlen_q}", page_size=pages[(i + j) % 6], **sizes)
            add(f"Sq{seqlen_q}_full", causal=False, leftpad=(90, 3, 0, 0), **sizes, **layouts[(i + j) % 5])
    held = dict(held=(3000, 1, 0, 4097), heads_q=2, heads_k=1)
    for i, layout in enumerate((dict(), dict(page_size=256), dict(page_size=16), dict(page_size=1))):
        add("long", seqlen_q=1, dtype=DTYPES[i % 3], **layout, **held)
        add("long_several", seqlen_q=5, new=5, dtype=DTYPES[(i + 1) % 3], **layout, **held)
    add("long_window", seqlen_q=2, window=(1000, 0), dtype=BF16, page_size=64, **held)

    many = dict(seqlen_q=150, heads_q=16, heads_k=4)  # rows: Hopper's forward kernel goes over the cache
    pages = itertools.cycle((None, 16, 64, 48, 256))
    for dim, dim_v in ((64, 64), (128, 128), (256, 256), (72, 40), (192, 128)):
        for j, dtype in enumerate((F16, BF16)):
            sizes = dict(head_dim=dim, head_dim_v=dim_v, dtype=dtype, **many)
            append = dict(new=150, rotary=dim // 16 * 16, interleaved=j == 0)
            add("prefill", page_size=next(pages), **sizes)
            add("prefill_append", page_size=next(pages), **append, **sizes)
            add("prefill_full", causal=False, new=7, page_size=next(pages), **sizes)
    for i, dim in enumerate((64, 96, 128, 192, 256)):  # packs that leave rows of a tile idle
        few = dict(seqlen_q=37, heads_q=14, heads_k=2, held=(150, 40, 160, 37), head_dim=dim)
        add("prefill_of_seven_heads", page_size=(16, None)[i % 2], dtype=(F16, BF16)[i % 2], **few)
    options = dict(window=(60, 9), softcap=10.0, scale=0.3, alibi="per batch and head")
    for i, layout in enumerate(
        (dict(), dict(page_size=16), dict(page_size=64, shared=True), dict(indexed=True, room=46))
    ):
        dtype = (F16, BF16)[i % 2]
        add("prefill_options", new=150, rotary=32, dtype=dtype, **many, **options, **layout)
        add("prefill_sinks", sinks=0.0, dtype=dtype, **many, **layout)
        add("prefill_window", window=(100, 0), head_dim=128, dtype=dtype, **many, **layout)
        add("prefill_gaps", new=150, dtype=dtype, layout="gaps", **many, **layout)
        heads = dict(heads_q=16, heads_k=2, lengths_q=(150, 0, 301, 17, 90), held=(90, 40, 0, 130, 600), tail=9)
        add("prefill_ragged", dtype=dtype, new=0, **heads, **layout)
        add("prefill_ragged_full", dtype=dtype, causal=False, head_dim=128, **heads, **layout)
        # Chunks, and tokens or a few drafts, between which seven queries of four heads are the bound.
        lengths = (1, 200, 0, 7, 8, 1, 130, 2)[i:] + (1, 200, 0, 7, 8, 1, 130, 2)[:i]
        heads = dict(heads_q=8, heads_k=2, lengths_q=lengths, held=(90, 300, 3, 0, 500, 200, 0, 77))
        add("mixed", dtype=dtype, head_dim=(64, 128, 256, 96)[i], tail=(0, 30)[i % 2], **heads, **layout)
        options_of_mixed = options | dict(sinks=0.0, rotary=32, new=0)
        add("mixed_append", dtype=dtype, head_dim=(128, 64)[i % 2], **options_of_mixed, **heads, **layout)

    lengths = dict(lengths_q=(1, 0, 70, 17, 5), held=(90, 40, 0, 130, 600))
    for i, layout in enumerate(layouts):
        for dtype in (F32, BF16) if i % 2 else (F16, BF16):
            add("ragged", dtype=dtype, head_dim=(64, 128)[i % 2], tail=7 * i, **lengths, **layout)
            add("ragged_append", dtype=dtype, new=0, tail=7 * i, **lengths, **layout)
    heads = dict(heads_q=8, heads_k=1)
    add("ragged_rotary", new=0, rotary=64, leftpad=(3, 0, 0, 130, 7), page_size=16, tail=9, **lengths, **heads)
    add("ragged_everything", new=0, page_size=16, **(everything | lengths | dict(leftpad=(3, 0, 0, 130, 7))))
    add("ragged_empty", lengths_q=(0, 0), held=(0, 90), tail=40, dtype=F16)

    for i, (rotary, dim) in enumerate(((64, 64), (16, 64), (48, 128), (128, 128), (256, 256), (64, 72))):
        for interleaved in (True, False):
            sizes = dict(head_dim=dim, rotary=rotary, interleaved=interleaved, dtype=DTYPES[(i + interleaved) % 3])
            add(f"rotary{rotary}", seqlen_q=(1, 5, 64)[i % 3], new=(1, 5, 64)[i % 3], **sizes, **layouts[i % 5])
    add("rotary_queries_alone", seqlen_q=5, rotary=32, dtype=BF16, page_size=16)
    add("rotary_more_keys", seqlen_q=3, new=40, rotary=32, dtype=F16, leftpad=(20, 40, 0, 3))
    add("rotary_before_the_first", seqlen_q=50, rotary=32, dtype=F32, held=(10, 0, 70, 50))

    for i, dtype in enumerate(DTYPES):
        sizes = dict(seqlen_q=(1, 17, 5)[i], new=(None, 17, 5)[i], dtype=dtype)
        add("window", window=(16, 3), causal=False, **sizes, **layouts[i])
        add("window_causal", window=(40, None), leftpad=(50, 0, 0, 9), **sizes, **layouts[i + 1])
        add("softcap", softcap=5.0, magnitude=4.0, **sizes, **layouts[i + 2])
        add("alibi", alibi="per head", **sizes, **layouts[i])
        add("alibi_of_sequences", alibi="per batch and head", **sizes, **layouts[i + 1])
        add("sinks", sinks=0.0, **sizes, **layouts[i + 2])
        add("scale_negative", scale=-0.2, **sizes, **layouts[i])
        add("large_scores", magnitude=100.0, **sizes, **layouts[i + 1])
        add("everything", rotary=32, head_dim=72, head_dim_v=40, **sizes, **layouts[i], **everything)
        add("everything_paged", rotary=32, head_dim=128, layout="gaps", **sizes, **layouts[3], **everything)
    for i, layout in enumerate(("heads first", "sequence first", "gaps", "misaligned", "packed", "reversed batch")):
        sizes = dict(seqlen_q=5, new=5, head_dim=72, rotary=16 * (i % 3), layout=layout)
        add(layout.replace(" ", "_"), **sizes, **layouts[i % 5])
    add("padded_away", leftpad=(97, 40, 0, 130), seqlen_q=3, dtype=F16)
    add("full_caches", room=0, held=(100, 100), new=28, seqlen_q=28, dtype=BF16)
    add("full_pages", room=0, held=(100, 100), new=28, seqlen_q=28, page_size=64, dtype=F16)
    for name, sizes in {
        "no_queries": dict(seqlen_q=0),
        "no_queries_append": dict(seqlen_q=0, new=3, page_size=16),
        "no_keys": dict(held=(0, 0)),
        "no_keys_sinks": dict(held=(0, 0), sinks=0.0, page_size=16),
        "no_capacity": dict(held=(0, 0), room=0),
        "no_batch": dict(held=()),
        "no_batch_paged": dict(held=(), page_size=16),
        "no_heads": dict(heads_q=0),
        "nothing_new": dict(new=0, seqlen_q=2),
    }.items():
        add(name, **sizes)
    return cases


CASES = _cases()
