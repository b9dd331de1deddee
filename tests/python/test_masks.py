"""Masks of row intervals agree with what their kinds mean, written out by definition over rows i and columns j."""

import doctest
import itertools
import re
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtile import _mask_kinds, masks
from flashtile.masks import ColumnMask

random_masks = settings(max_examples=200, deadline=None, derandomize=True)


def grid(seqlen_q, seqlen_k=None):
    """Row and column numbers that broadcast to the mask."""
    return torch.arange(seqlen_q)[:, None], torch.arange(seqlen_q if seqlen_k is None else seqlen_k)


def owner(lengths):
    """Which part each token is of."""
    return torch.tensor([part for part, length in enumerate(lengths) for _ in range(length)], dtype=torch.int64)


def same(x):
    return x[:, None] == x


def causal(seqlen):
    i, j = grid(seqlen)
    return j <= i


def assert_is(mask, visible):
    visible = visible[(None,) * (4 - visible.dim())]
    dense = mask.to_dense()
    assert dense.dtype == torch.bool and dense.shape == visible.shape
    assert torch.equal(dense, visible)
    assert mask.sparsity() == pytest.approx(1 - visible.double().mean().item() if visible.numel() else 0)
    mask.check()
    begin, end = mask.ranges[..., 0::2], mask.ranges[..., 1::2]
    assert torch.all((begin < end) | ((begin == 0) & (end == 0))), "an interval that hides nothing is not (0, 0)"


# The kinds.

LENGTHS = [[], [5], [1, 1, 1], [3, 0, 4], [0, 7, 0], [13, 2, 31, 1, 18]]


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(0, 0), (0, 3), (3, 0), (1, 1), (17, 17), (9, 23), (23, 9)])
def test_full_and_causal(seqlen_q, seqlen_k):
    i, j = grid(seqlen_q, seqlen_k)
    assert_is(ColumnMask.full(seqlen_q, seqlen_k), torch.ones(seqlen_q, seqlen_k, dtype=torch.bool))
    assert_is(ColumnMask.causal(seqlen_q, seqlen_k), j <= i + seqlen_k - seqlen_q)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("given_as", [list, tuple, torch.tensor])
def test_documents(lengths, given_as):
    document = owner(lengths)
    given = given_as(lengths)
    assert_is(ColumnMask.document(given), same(document))
    assert_is(ColumnMask.causal_document(given), same(document) & causal(sum(lengths)))


@pytest.mark.parametrize("groups", [[], [(3, [])], [(2, [2, 1]), (1, [1])], [(5, [4, 0, 9, 3]), (0, [2, 6]), (7, [1])]])
def test_share_question(groups):
    parts = [(group, part) for group, (question, answers) in enumerate(groups) for part in range(1 + len(answers))]
    lengths = [length for question, answers in groups for length in (question, *answers)]
    group, part = (owner(lengths).apply_(lambda place, at=at: parts[place][at]) for at in (0, 1))
    reads = same(group) & (same(part) | (part == 0))
    assert_is(ColumnMask.share_question(groups), reads & causal(sum(lengths)))


@pytest.mark.parametrize("seqlen, window", [(0, 1), (9, 1), (20, 7), (20, 20), (20, 50)])
def test_sliding_window(seqlen, window):
    i, j = grid(seqlen)
    assert_is(ColumnMask.sliding_window(seqlen, window), (j <= i) & (i - j < window))


@pytest.mark.parametrize("first", [0, 1, 4, 30])
@pytest.mark.parametrize("window", [(0, 0), (3, 3), (5, 1), (0, 8), (40, 40)])
def test_global_sliding_window(first, window):
    i, j = grid(23)
    near = (j >= i - window[0]) & (j <= i + window[1])
    assert_is(ColumnMask.global_sliding_window(23, first, window), near | (i < first) | (j < first))


@pytest.mark.parametrize("seqlen, prefix", [(0, 0), (11, 0), (11, 4), (11, 11)])
def test_prefix_lm(seqlen, prefix):
    i, j = grid(seqlen)
    assert_is(ColumnMask.prefix_lm(seqlen, prefix), (j < prefix) | (j <= i))


@pytest.mark.parametrize("groups", [[], [(2, 4), (1, 2)], [(0, 5), (7, 7), (0, 0), (3, 20)]])
def test_prefix_document(groups):
    lengths = [length for _, length in groups]
    prefix = torch.cat([torch.arange(length) < prefix for prefix, length in groups] or [torch.zeros(0).bool()])
    assert_is(ColumnMask.prefix_document(groups), same(owner(lengths)) & (prefix | causal(sum(lengths))))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_causal_blockwise(lengths):
    i, _ = grid(sum(lengths))
    in_last = i >= sum(lengths[:-1])
    assert_is(ColumnMask.causal_blockwise(lengths), causal(sum(lengths)) & (same(owner(lengths)) | in_last))


@pytest.mark.parametrize("shape", [(0,), (19,), (3, 19), (2, 3, 19)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_random_eviction(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    evicted_at = torch.randint(-3, 30, shape, generator=generator, dtype=dtype)
    i, _ = grid(shape[-1])
    assert_is(ColumnMask.random_eviction(evicted_at), causal(shape[-1]) & (i < evicted_at[..., None, :]))


@pytest.mark.parametrize("spans", [[], [(0, 3)], [(2, 2), (4, 9), (9, 10), (17, 19)], [(0, 19)]])
def test_qk_sparse_and_image_blocks(spans):
    i, j = grid(19)
    together = torch.zeros(19, 19, dtype=torch.bool)
    for begin, end in spans:
        together |= (begin <= i) & (i < end) & (begin <= j) & (j < end)
    assert_is(ColumnMask.qk_sparse(19, spans), causal(19) & ~together)
    assert_is(ColumnMask.image_blocks(spans, 19), causal(19) | together)
    for window in (1, 3, 19):
        near = causal(19) & (i - j < window)
        assert_is(ColumnMask.image_blocks(spans, 19, window=window), near | together)
    if spans:
        assert_is(ColumnMask.qk_sparse(19, torch.tensor(spans)), causal(19) & ~together)


@pytest.mark.parametrize("seqlen, chunk", [(0, 4), (12, 1), (12, 4), (13, 4), (13, 50)])
def test_chunked(seqlen, chunk):
    i, j = grid(seqlen)
    assert_is(ColumnMask.chunked(seqlen, chunk), (j <= i) & (i // chunk == j // chunk))


@st.composite
def trees(draw):
    """Parents of tokens in depth-first order: each hangs on the one before, on one of its ancestors, or on none."""
    parents, path = [], []
    for token in range(draw(st.integers(0, 24))):
        del path[draw(st.integers(0, len(path))) :]
        parents.append(path[-1] if path else -1)
        path.append(token)
    return parents


@random_masks
@given(trees(), st.integers(0, 7))
def test_tree(parents, context):
    count = len(parents)
    seen = torch.ones(count, context + count, dtype=torch.bool)
    seen[:, context:] = False
    for token in range(count):
        at = token
        while at != -1:
            seen[token, context + at] = True
            at = parents[at]
    assert_is(ColumnMask.tree(parents, context=context), seen)
    assert_is(ColumnMask.tree(torch.tensor(parents, dtype=torch.int32), context=context), seen)


# Other representations.

FULL, CAUSAL, INVERSE_CAUSAL, BI_CAUSAL = range(4)


def rectangles_written_out(rectangles, seqlen_q, seqlen_k):
    i, j = grid(seqlen_q, seqlen_k)
    visible = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool)
    for (q_begin, q_end), (k_begin, k_end), kind in rectangles:
        shown = (q_begin <= i) & (i < q_end) & (k_begin <= j) & (j < k_end)
        if kind in (CAUSAL, BI_CAUSAL):
            shown &= j - k_end <= i - q_end
        if kind in (INVERSE_CAUSAL, BI_CAUSAL):
            shown &= j - k_begin >= i - q_begin
        visible |= shown
    return visible


def hidden_runs(visible):
    """How many intervals of rows are hidden, for each column of the last two dimensions."""
    hidden = torch.nn.functional.pad(~visible, (0, 0, 1, 0))
    return (hidden[..., 1:, :] & ~hidden[..., :-1, :]).sum(-2)


def first_refused(visible):
    """What an error says of the first column that needs too many intervals, of (B, H, S_q, S_k); None if none does."""
    runs = hidden_runs(visible)
    if runs.le(2).all():
        return None
    batch, head, column = (runs > 2).nonzero()[0].tolist()
    count = runs[batch, head, column]
    return f"column {column} of batch entry {batch}, head {head} needs {count} hidden intervals, expected at most 2"


def spans_up_to(length):
    return st.tuples(st.integers(0, length), st.integers(0, length)).map(lambda pair: tuple(sorted(pair)))


@st.composite
def rectangle_lists(draw):
    seqlen_q, seqlen_k = draw(st.integers(0, 20)), draw(st.integers(0, 20))
    rectangle = st.tuples(spans_up_to(seqlen_q), spans_up_to(seqlen_k), st.integers(0, 3))
    return draw(st.lists(rectangle, max_size=5)), seqlen_q, seqlen_k


@random_masks
@given(rectangle_lists())
def test_from_ranges(case):
    rectangles, seqlen_q, seqlen_k = case
    q_ranges, k_ranges, types = ([rectangle[at] for rectangle in rectangles] for at in range(3))
    visible = rectangles_written_out(*case)
    refused = first_refused(visible[None, None])
    for as_given in (list, torch.tensor):
        given = as_given(q_ranges), as_given(k_ranges), as_given(types), seqlen_q, seqlen_k
        if refused is None:
            assert_is(ColumnMask.from_ranges(*given), visible)
        else:
            with pytest.raises(ValueError, match=f"^ColumnMask.from_ranges: {re.escape(refused)}$"):
                ColumnMask.from_ranges(*given)


def test_types_of_ranges_are_as_ffa_documents_them():
    tall = [ColumnMask.from_ranges([(0, 5)], [(0, 2)], [kind], 5, 2).picture().split() for kind in range(4)]
    wide = [ColumnMask.from_ranges([(0, 2)], [(0, 5)], [kind], 2, 5).picture().split() for kind in range(4)]
    assert tall == [
        ["##"] * 5,
        ["..", "..", "..", "#.", "##"],
        ["##", ".#", "..", "..", ".."],
        [".."] * 5,
    ]
    assert wide == [["#####"] * 2, ["####.", "#####"], ["#####", ".####"], ["####.", ".####"]]


def test_ranges_without_types_are_full():
    assert_is(ColumnMask.from_ranges([(0, 2), (2, 3)], [(0, 2), (2, 3)], None, 3, 3), same(owner([2, 1])))


def test_many_ranges_of_a_long_mask():
    lengths = [1000 + 7 * n for n in range(60)]
    bounds = list(itertools.pairwise(itertools.accumulate(lengths, initial=0)))
    mask = ColumnMask.from_ranges(bounds, bounds, [CAUSAL] * 60, sum(lengths), sum(lengths))
    expected = ColumnMask.causal_document(lengths)
    for of in (slice(0, 4, 2), slice(1, 4, 2)):  # begins and ends, whatever the order of a column's intervals
        assert torch.equal(mask.ranges[..., of].sort().values, expected.ranges[..., of].sort().values)


@st.composite
def dense_masks(draw):
    """Of random hidden intervals, two or more in a column."""
    batch, heads, seqlen_q, seqlen_k = (draw(st.integers(*bounds)) for bounds in ((1, 2), (1, 3), (0, 12), (0, 6)))
    visible = torch.ones(batch, heads, seqlen_q, seqlen_k, dtype=torch.bool)
    for place in itertools.product(range(batch), range(heads), range(seqlen_k)):
        for begin, end in draw(st.lists(spans_up_to(seqlen_q), max_size=draw(st.sampled_from([2, 2, 2, 4])))):
            visible[(*place[:2], slice(begin, end), place[2])] = False
    return visible


@random_masks
@given(dense_masks())
def test_from_dense_undoes_to_dense(visible):
    refused = first_refused(visible)
    if refused is not None:
        with pytest.raises(ValueError, match=f"^ColumnMask.from_dense: {re.escape(refused)}$"):
            ColumnMask.from_dense(visible)
        return
    mask = ColumnMask.from_dense(visible)
    assert_is(mask, visible)
    assert torch.equal(ColumnMask.from_dense(mask.to_dense()).ranges, mask.ranges)
    assert torch.equal(ColumnMask.from_dense(visible[0]).ranges, mask.ranges[:1])
    assert torch.equal(ColumnMask.from_dense(visible[0, 0]).ranges, mask.ranges[:1, :1])


@st.composite
def flashmask_indices(draw):
    shape = [draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(0, 7))]
    causal, count = draw(st.sampled_from([(True, 1), (True, 2), (False, 2), (False, 4)]))
    seqlen_q = draw(st.none() | st.integers(0, 9))
    rows = st.integers(-3, 12) | st.sampled_from([-(2**31), 2**31 - 1])
    size = shape[0] * shape[1] * shape[2] * count
    values = draw(st.lists(rows, min_size=size, max_size=size))
    return torch.tensor(values, dtype=torch.int32).reshape(*shape, count), causal, seqlen_q


@random_masks
@given(flashmask_indices())
def test_startend_row_indices(case):
    indices, causal, seqlen_q = case
    seqlen_k = indices.shape[2]
    rows = seqlen_k if seqlen_q is None else seqlen_q
    i, j = grid(rows, seqlen_k)
    bounds = [bound[:, :, None, :] for bound in indices.unbind(-1)]  # each (B, H, 1, S_k)
    hidden = i >= bounds[0]
    if (causal, len(bounds)) == (False, 2):
        hidden |= i < bounds[1]
    if len(bounds) == (2 if causal else 4):
        hidden &= i < bounds[1]
    if len(bounds) == 4:
        hidden |= (i >= bounds[2]) & (i < bounds[3])
    if causal:
        hidden |= j > i + seqlen_k - rows
    assert_is(ColumnMask.from_startend_row_indices(indices, causal, seqlen_q), ~hidden)


def test_flashmask_kinds_are_those_of_its_benchmark():
    """The tensors that FlashMask's own tests give for a few kinds, of 8 tokens."""

    def flashmask(causal, *bounds):
        return ColumnMask.from_startend_row_indices(torch.tensor(bounds, dtype=torch.int32).T[None, None], causal)

    def assert_same(mask, other):
        assert torch.equal(mask.to_dense(), other.to_dense())

    assert_same(ColumnMask.sliding_window(8, 3), flashmask(True, [3, 4, 5, 6, 7, 8, 8, 8]))
    assert_same(ColumnMask.causal_document([3, 5]), flashmask(True, [3, 3, 3, 8, 8, 8, 8, 8]))
    assert_same(ColumnMask.document([3, 5]), flashmask(False, [3, 3, 3, 8, 8, 8, 8, 8], [0, 0, 0, 3, 3, 3, 3, 3]))
    assert_same(ColumnMask.share_question([(3, [2, 3])]), flashmask(True, [8, 8, 8, 5, 5, 8, 8, 8]))
    assert_same(
        ColumnMask.causal_blockwise([2, 3, 3]),
        flashmask(True, [2, 2, 5, 5, 5, 8, 8, 8], [5, 5, 5, 5, 5, 8, 8, 8]),
    )
    assert_same(ColumnMask.prefix_lm(8, 3), flashmask(False, [8] * 8, [0, 0, 0, 3, 4, 5, 6, 7]))
    assert_same(ColumnMask.qk_sparse(8, [(2, 5)]), flashmask(True, [8, 8, 2, 3, 4, 8, 8, 8], [8, 8, 5, 5, 5, 8, 8, 8]))
    assert_same(
        ColumnMask.global_sliding_window(8, 1, (2, 1)),
        flashmask(False, [8, 4, 5, 6, 7, 8, 8, 8], [8] * 8, [0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 2, 3, 4, 5, 6]),
    )


# What masks say and become.


def test_docstrings_draw_what_they_describe():
    results = doctest.testmod(masks), doctest.testmod(_mask_kinds, globs=vars(masks).copy())
    assert [of_module.failed for of_module in results] == [0, 0]
    assert sum(of_module.attempted for of_module in results) > 20


def test_intervals_are_taken_literally():
    """They may overlap, be turned round, and reach beyond the rows."""
    columns = [[1, 3, 2, 5], [5, 2, 0, 1], [-4, 2, 6, 99], [3, 3, 7, 1], [-9, 99, 2, 3], [4, 1, 2, 3]]
    mask = ColumnMask(torch.tensor(columns, dtype=torch.int32)[None, None], 8)
    i, _ = grid(8)
    begin_0, end_0, begin_1, end_1 = torch.tensor(columns).T
    visible = ~(((begin_0 <= i) & (i < end_0)) | ((begin_1 <= i) & (i < end_1)))
    assert torch.equal(mask.to_dense()[0, 0], visible)
    assert mask.sparsity() == pytest.approx(1 - visible.double().mean().item())


@pytest.mark.parametrize(
    "place, interval, found", [((1, 2, 3, 1), 1, "(7, 6)"), ((0, 0, 0, 0), 0, "(-1, 4)"), ((1, 0, 4, 0), 0, "(2, 9)")]
)
def test_check_names_the_first_wrong_interval(place, interval, found):
    ranges = torch.zeros(2, 3, 5, 4, dtype=torch.int32)
    batch, head, column, _ = place
    begin, end = map(int, found.strip("()").split(","))
    ranges[batch, head, column, 2 * interval : 2 * interval + 2] = torch.tensor([begin, end])
    ranges[1, 2, 4] = 77  # the last one of all
    ranges[1, 2, 4, 1] = 76
    with pytest.raises(ValueError) as error:
        ColumnMask(ranges, 8).check()
    assert str(error.value) == (
        f"ColumnMask.check: interval {interval} of column {column} of batch entry {batch}, head {head} is {found}, "
        "expected 0 ≤ begin ≤ end ≤ S_q = 8"
    )


def test_a_batch_of_one_is_that_of_many():
    mask = ColumnMask.causal(3, 4)
    assert torch.equal(mask.to_dense(batch=5), mask.to_dense().expand(5, 1, 3, 4))


def test_stack():
    parts = [ColumnMask.causal_document([2, 4]), ColumnMask.full(6, 6), ColumnMask.document([5, 1])]
    assert_is(ColumnMask.stack(parts), torch.cat([part.to_dense() for part in parts]))


def test_ragged_batches():
    parts = [ColumnMask.causal_document([2, 3]), ColumnMask.full(0, 2), ColumnMask.causal(4, 3), ColumnMask.full(2, 0)]
    mask = ColumnMask.concatenate(parts)
    assert mask.ranges.shape == (1, 1, 10, 4) and mask.seqlen_q is None
    assert [offsets.tolist() for offsets in mask.cu_seqlens] == [[0, 5, 5, 9, 11], [0, 5, 7, 10, 10]]
    assert repr(mask) == "ColumnMask(B=4, H=1, T_k=10, device=cpu)"
    for part, own in zip(mask.split(), parts, strict=True):
        assert torch.equal(part.to_dense(), own.to_dense())
    dense = torch.cat([part.to_dense().flatten() for part in parts])
    assert mask.sparsity() == pytest.approx(1 - dense.double().mean().item())
    mask.check()
    assert mask.to("cpu").cu_seqlens is not None

    mask.ranges[0, 0, 8] = torch.tensor([0, 1, 2, 5])
    message = "interval 1 of column 8 of batch entry 0, head 0 is (2, 5), expected 0 ≤ begin ≤ end ≤ S_q = 4"
    with pytest.raises(ValueError, match=re.escape(message)):
        mask.check()
    for method in ("to_dense", "picture"):
        with pytest.raises(ValueError, match=f"ColumnMask.{method}: the mask is of a ragged batch, expected one of"):
            getattr(mask, method)()


def test_a_mask_is_small_moves_and_does_not_change():
    mask = ColumnMask.document([3, 4])
    assert repr(mask) == "ColumnMask(B=1, H=1, S_q=7, S_k=7, device=cpu)"
    assert mask.to("meta").device.type == "meta" and mask.to("meta").seqlen_q == 7
    assert ColumnMask.document([3, 4], device="meta").ranges.shape == mask.ranges.shape
    assert ColumnMask.full(5, 2, device="meta").device.type == "meta"
    with pytest.raises(AttributeError):
        mask.seqlen_q = 3
    gaps = torch.zeros(1, 1, 6, 8, dtype=torch.int32)[..., ::2]
    assert ColumnMask(gaps, 3).ranges.is_contiguous()
    heads = torch.zeros(1, 4, 6, 4, dtype=torch.int32)[:, ::2]
    assert ColumnMask(heads, 3).ranges.data_ptr() == heads.data_ptr()


def test_pictures_of_long_masks_show_shares():
    assert ColumnMask.causal(64, 64).picture(size=4).split() == ["+...", "#+..", "##+.", "###+"]
    assert ColumnMask.full(0, 3).picture() == ""
    heads = torch.stack([torch.ones(2, 2), torch.eye(2)]).bool()
    assert ColumnMask.from_dense(heads).picture(head=1) == "#.\n.#"
    shares = ColumnMask.sliding_window(1000, 130)._shares("picture", 0, 0, 7)
    i, j = grid(1000)
    visible, bounds = ((j <= i) & (i - j < 130)).double(), [1000 * n // 7 for n in range(8)]
    cells = [[visible[a:b, c:d].mean() for c, d in itertools.pairwise(bounds)] for a, b in itertools.pairwise(bounds)]
    torch.testing.assert_close(shares, torch.tensor(cells, dtype=torch.float64))


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot_writes_a_file(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    for name, mask in {"short": ColumnMask.causal(5, 9), "long": ColumnMask.document([700, 1300])}.items():
        for path in (tmp_path / f"{name}.{suffix}", str(tmp_path / f"{name}-as-text.{suffix}")):
            mask.plot(path)
    assert len(list(tmp_path.iterdir())) == 4 and all(path.stat().st_size > 1000 for path in tmp_path.iterdir())


def test_plot_draws_into_axes():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.add_subplot()
    assert ColumnMask.causal(8, 8).plot(axes) is axes
    (image,) = axes.images
    assert torch.equal(torch.as_tensor(image.get_array().data), ColumnMask.causal(8, 8).to_dense()[0, 0].double())


def test_plot_says_what_it_lacks(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'flashtile[plot]'")):
        ColumnMask.causal(2, 2).plot("mask.png")
