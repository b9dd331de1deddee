"""Layouts, and the calls that a rank's share is made of: no rank, no kernel."""

import doctest
import importlib
import itertools

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtile.distributed import Layout, work_of_rows
from flashtile.distributed._heads import Heads
from flashtile.distributed._pairs import ALIGNED, FAR, Band, Places, calls_of, needed_keys, visible
from flashtile.distributed.layout import rows_of
from flashtile.masks import ColumnMask

NAMES = ("zigzag", "head_tail", "contiguous")


@st.composite
def layouts(draw):
    length, ranks = draw(st.integers(0, 60)), draw(st.integers(1, 5))
    name = draw(st.sampled_from([*NAMES, "balanced"]))
    if name != "balanced":
        return Layout.of(name, length, ranks)
    work = draw(st.lists(st.integers(0, 9), min_size=length, max_size=length))
    return Layout.balanced(work, ranks)


@given(layout=layouts())
def test_each_row_has_one_rank(layout):
    places = torch.cat([layout.positions(rank) for rank in range(layout.ranks)])
    assert sorted(places.tolist()) == list(range(layout.length))
    for rank in range(layout.ranks):
        mine = layout.positions(rank).tolist()
        assert mine == sorted(mine) and len(mine) == layout.rows(rank)


@pytest.mark.parametrize("length, ranks", [(64, 4), (16, 2), (3, 3), (1, 4), (0, 2)])
def test_named_layouts_are_of_chunks(length, ranks):
    rows = torch.arange(length)
    for rank in range(ranks):
        found = Layout.contiguous(length, ranks).positions(rank)
        expected = dict(enumerate(rows.chunk(ranks))).get(rank, rows[:0])
        assert found.tolist() == expected.tolist()
        if length % (2 * ranks) == 0 and length:
            halves = rows.chunk(2 * ranks)
            found = Layout.zigzag(length, ranks).positions(rank)
            assert found.tolist() == torch.cat([halves[rank], halves[-1 - rank]]).tolist()


@pytest.mark.parametrize(
    "runs, message",
    [
        ((((0, 2),), ((3, 4),)), "row 2 has no rank"),
        ((((0, 3),), ((2, 4),)), "row 2 has two ranks"),
        ((((2, 4), (0, 2)),), r"runs\[0\] is .* expected \(begin, end\) in ascending order"),
    ],
)
def test_wrong_layouts_are_refused(runs, message):
    with pytest.raises(ValueError, match=message):
        Layout(runs)


@given(data=st.data(), ranks=st.integers(1, 6))
def test_balanced_work(data, ranks):
    """Each rank has as many rows, up to a chunk, and documents of any lengths give ranks about the same work."""
    lengths = data.draw(st.lists(st.integers(1, 300), min_size=4, max_size=12))
    work = [i + 1 for n in lengths for i in range(n)]
    layout = Layout.balanced(work, ranks)
    of_ranks = [sum(work[i] for i in layout.positions(rank).tolist()) for rank in range(ranks)]
    zigzag = Layout.zigzag(len(work), ranks)
    assert max(of_ranks) <= max(sum(work[i] for i in zigzag.positions(rank).tolist()) for rank in range(ranks)) * 1.2
    assert max(map(layout.rows, range(ranks))) <= -(-len(work) // ranks) + 16


def pairs_that_are_seen(rows, keys, band, documents):
    """(row, key) as a rank has them, by the definition."""

    def document(x):
        return 0 if documents is None else sum(x >= begin for begin in documents[:-1]) if x < documents[-1] else -1

    rows, keys = ([i for begin, end in runs for i in range(begin, end)] for runs in (rows, keys))
    return {
        (a, b)
        for a, i in enumerate(rows)
        for b, j in enumerate(keys)
        if document(i) == document(j) != -1 and -band.left <= j - i - band.shift <= band.right
    }


def pairs_of(call):
    for x in call.sequences:
        height, width = x.rows[1] - x.rows[0], x.keys[1] - x.keys[0]
        left, right = (FAR if side is None else side for side in x.window or (None, None))
        for a in range(height):
            for b in range(width):
                if -left <= b - a - (width - height) <= right:
                    yield x.rows[0] + a, x.keys[0] + b


sides = st.one_of(st.none(), st.integers(0, 30))


@settings(deadline=None, max_examples=300)
@given(
    layout=layouts(),
    cuts=st.one_of(st.none(), st.lists(st.integers(0, 60), max_size=5)),
    keys=st.one_of(st.none(), st.integers(1, 60)),
    window=st.one_of(st.none(), st.tuples(sides, sides)),
    causal=st.booleans(),
    data=st.data(),
)
def test_calls_see_each_pair_once(layout, cuts, keys, window, causal, data):
    length, documents, of_keys = layout.length, None, layout
    if cuts is not None:
        documents = (0, *sorted(min(cut, length) for cut in cuts))
    elif keys is not None:
        of_keys = Layout.zigzag(keys, layout.ranks)
    band = Band.of(causal, window, of_keys.length - length)
    places = data.draw(st.sampled_from([Places.ANY, Places.DISTANCES]))
    owner = data.draw(st.integers(0, layout.ranks - 1))
    rows, block = layout.runs[data.draw(st.integers(0, layout.ranks - 1))], of_keys.runs[owner]
    everything = ((0, of_keys.length),) if of_keys.length else ()
    if data.draw(st.booleans()):
        block = needed_keys(rows, everything, band, documents)
        assert {b for _, b in pairs_that_are_seen(rows, everything, band, documents)} <= {
            j for begin, end in block for j in range(begin, end)
        }
    calls = calls_of(rows, block, band, documents, places)
    found = [pair for call in calls for pair in pairs_of(call)]
    assert len(found) == len(set(found)) == sum(map(visible, calls))
    assert set(found) == pairs_that_are_seen(rows, block, band, documents)
    for call in calls:
        assert len({x.window for x in call.sequences}) == 1
        for x, y in zip(call.sequences, call.sequences[1:], strict=False):
            assert x.rows[1] == y.rows[0] and x.keys[1] == y.keys[0]  # as a ragged batch has them


@pytest.mark.parametrize("rank", range(3))
def test_chunks_under_a_window_are_a_dense_batch(rank):
    """Of as many keys each, but for those of the first rank: no key comes before the first row. The chunks of the last
    rank are neighbours, one sequence."""
    layout = Layout.zigzag(4 * 128, 4)
    rows, band = layout.runs[rank], Band.of(True, (32, None))
    (call,) = calls_of(rows, needed_keys(rows, ((0, 4 * 128),), band, None), band)
    assert len(call.sequences) == 2 and call.is_dense is (rank > 0)


@settings(deadline=None)
@given(ranks=st.integers(1, 4), window=st.one_of(st.none(), st.tuples(sides, sides)), data=st.data())
def test_calls_know_their_places(ranks, window, data):
    layout = Layout.zigzag(2 * ALIGNED * ranks * data.draw(st.integers(1, 3)), ranks)
    rows, keys = (layout.runs[data.draw(st.integers(0, ranks - 1))] for _ in range(2))
    row_places, key_places = ([i for begin, end in runs for i in range(begin, end)] for runs in (rows, keys))
    for call in calls_of(rows, keys, Band.of(True, window), None, Places.ALL):
        (x,) = call.sequences
        assert x.place == (row_places[x.rows[0]], key_places[x.keys[0]])
        assert x.place[0] % ALIGNED == x.place[1] % ALIGNED == 0
        assert row_places[x.rows[1] - 1] - key_places[x.keys[1] - 1] == x.ahead


@given(group=st.integers(1, 8), heads_k=st.integers(1, 8), ranks=st.integers(1, 8))
def test_heads_of_ranks(group, heads_k, ranks):
    """Each query head has one rank, which has its KV head, and no other's."""
    heads = Heads.of(group * heads_k, heads_k, ranks)
    assert rows_of(heads.queries) == group * heads_k and len(heads.queries) == len(heads.keys) == ranks
    for (begin, end), (first, last) in zip(heads.queries, heads.keys, strict=True):
        if begin < end:
            assert first == begin // group and last == (end - 1) // group + 1
            assert (end - begin) % (last - first) == 0
        else:
            assert first == last


@given(
    causal=st.booleans(),
    window=st.one_of(st.none(), st.tuples(sides, sides)),
    cuts=st.one_of(st.none(), st.lists(st.integers(0, 40), max_size=4)),
    data=st.data(),
)
def test_work_is_what_rows_see(causal, window, cuts, data):
    length, kinds = 40, None
    begins = [0, length] if cuts is None else [0, *sorted(cuts), length]
    if data.draw(st.booleans()):
        kinds = []
        for begin, end in itertools.pairwise(begins):
            bounds = st.tuples(*[st.integers(0, end - begin + 2)] * 4)
            ranges = data.draw(st.lists(bounds, min_size=end - begin, max_size=end - begin))
            ranges = torch.tensor(ranges, dtype=torch.int32).reshape(1, 1, -1, 4)
            kinds.append(ColumnMask(ranges, end - begin))
    expected = []
    for entry, (begin, end) in enumerate(itertools.pairwise(begins)):
        seen = reference.visible(end - begin, end - begin, causal, window)
        if kinds is not None:
            seen = seen & kinds[entry].to_dense()[0, 0]
        expected += seen.sum(1).tolist()
    given_mask = None if kinds is None else kinds[0] if cuts is None else ColumnMask.concatenate(kinds)
    tables = {} if cuts is None else {"cu_seqlens": begins}
    assert work_of_rows(length, causal=causal, window=window, mask=given_mask, **tables).tolist() == expected


@pytest.mark.parametrize("name", ["attention", "layout", "work", "_heads"])
def test_examples(name):
    assert doctest.testmod(importlib.import_module(f"flashtile.distributed.{name}")).failed == 0
