"""Partial results of a rank's rows and keys: what is put together, what is left where a call wrote it, what travels."""

import itertools
import types

import pytest
import torch
from cases import BF16, F32
from compare import assert_bitwise
from hypothesis import given
from hypothesis import strategies as st

import flashtile
from flashtile.bench.ranks import _Nobody
from flashtile.distributed import Layout, _local, _rows
from flashtile.distributed._prepare import share_of
from flashtile.distributed._rows import Sums, kinds_of
from flashtile.distributed._share import Attend

ROWS, RANKS = 64, 4
WINDOW = 9
CAUSAL_WINDOW = dict(causal=True, window=(WINDOW, None))
DOCUMENTS = (0, 10, 75, 81, 170, 256)
KINDS = {  # options, and where documents begin
    "window": (CAUSAL_WINDOW, None),
    "documents": (dict(causal=True), DOCUMENTS),
    "documents with a window": (CAUSAL_WINDOW, (*DOCUMENTS[:-1], 239)),  # the last rows belong to none
    "both sides": (dict(window=(5, 3)), None),
}
on_kinds = pytest.mark.parametrize(
    "kind, layout",
    [("both sides", "contiguous"), *itertools.product([*KINDS][:3], ["zigzag", "contiguous"])],
)

runs = st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted).filter(lambda run: run[0] < run[1])


@given(data=st.data(), parts=st.lists(st.tuples(runs, st.sampled_from([BF16, F32])), max_size=20))
def test_sums_of_any_parts(data, parts):
    """In any dtypes, of any rows: rounded once, whether they come by themselves or as what travels of them."""
    like = torch.empty(2, 20, 1, 8, dtype=BF16)
    dtype = data.draw(st.sampled_from([BF16, F32]))
    generator = torch.Generator().manual_seed(len(parts))
    sums, travelled, exact = Sums(like), Sums(like), torch.zeros(like.shape)
    for (begin, end), of_part in parts:
        x = torch.randint(-200, 200, (2, end - begin, 1, 8), generator=generator).to(of_part)
        exact[:, begin:end] += x
        sums.add(begin, end, x.clone())
        travelled.add(begin, end, x)
    assert_bitwise(sums.finish(dtype), exact.to(dtype))
    found, again = travelled.parts(), Sums(like)
    assert [(begin, end, x.dtype) for begin, end, x, _ in found] == kinds_of([(*run, of) for run, of in parts])
    for begin, end, x, _ in found:
        assert x.shape[1] == end - begin
        again.add(begin, end, x)
    assert_bitwise(again.finish(dtype), exact.to(dtype))


def test_two_parts_of_16_bits_travel_apart():
    halves = (0, 8, BF16), (4, 12, BF16)
    assert kinds_of([*halves, (20, 21, F32)]) == [*halves, (20, 21, F32)]
    assert kinds_of([*halves, (11, 13, BF16)]) == [(0, 13, F32)]
    assert kinds_of([(0, 4, F32), (4, 8, F32), (7, 9, F32)]) == [(0, 4, F32), (4, 9, F32)]


class Counted:
    """One rank's forward and backward, with messages that arrive at once and hold anything: its calls of the kernels,
    and the rows that merges go over, of q and of keys."""

    def __init__(self, monkeypatch, rank, layout, method, options, documents):
        core, kernels = types.SimpleNamespace(**vars(_rows._C)), (_local.forward_with_state, _local.gradients)
        self.calls, self.merged = 0, {4: 0, 2: 0}  # by the heads of each

        def merge(out, *given):
            self.merged[out.shape[2]] += out.shape[1]
            _rows_merge(out, *given)

        def counted(kernel):
            def call(*given):
                self.calls += 1
                return kernel(*given)

            return call

        _rows_merge, core.merge = core.merge, merge
        generator = torch.Generator().manual_seed(rank)
        shapes = [(1, ROWS, heads, 16) for heads in (4, 2, 2, 4)]
        *leaves, self.dout = (torch.randn(shape, generator=generator).to(BF16) for shape in shapes)
        self.leaves = [x.requires_grad_() for x in leaves]
        share = share_of(_Nobody(rank, RANKS), self.leaves, layout, method, documents, options)
        with monkeypatch.context() as patched:
            patched.setattr(_rows, "_C", core)
            for name, kernel in zip(("forward_with_state", "gradients"), kernels, strict=True):
                patched.setattr(_local, name, counted(kernel))
            self.out, self.lse = Attend.apply(*self.leaves, None, share)
            self.of_forward = self.calls, dict(self.merged)
            self.calls, self.merged = 0, {4: 0, 2: 0}
            self.gradients = torch.autograd.grad(self.out, self.leaves, self.dout)


def ranks_that_are_met(rank, layout, options, documents):
    """For each row of the rank, which ranks' keys it sees, and for each of its keys, which ranks' rows see it."""
    layout = Layout.of(layout, ROWS * RANKS, RANKS)
    owners = torch.empty(ROWS * RANKS, dtype=torch.long)
    for owner in range(RANKS):
        owners[layout.positions(owner)] = owner
    i, j = torch.arange(ROWS * RANKS)[:, None], torch.arange(ROWS * RANKS)
    left, right = options.get("window", (None, None))
    seen = (j <= i) if options.get("causal") else torch.ones_like(i == j)
    if left is not None:
        seen = seen & (j >= i - left)
    if right is not None:
        seen = seen & (j <= i + right)
    if documents is not None:
        document = torch.bucketize(j, torch.tensor(documents), right=True)
        seen = seen & (document[:, None] == document) & (j < documents[-1])
    mine = layout.positions(rank)
    return (
        [{owners[x].item() for x in torch.nonzero(of_row).flatten()} for of_row in of]
        for of in (seen[mine], seen.T[mine])
    )


@on_kinds
def test_a_ring_goes_over_what_has_two_results(kind, layout, monkeypatch):
    """And over nothing else: not over rows and keys that only one call has, nor over blocks that pass."""
    options, documents = KINDS[kind]
    for rank in range(RANKS):
        found = Counted(monkeypatch, rank, layout, "ring", options, documents)
        of_rows, of_keys = ranks_that_are_met(rank, layout, options, documents)
        calls = len(set().union(*of_rows))
        rows, keys = (sum(len(met) > 1 for met in of) for of in (of_rows, of_keys))
        assert found.of_forward == (calls, {4: rows, 2: 0})
        assert (found.calls, found.merged) == (calls, {4: rows, 2: 2 * keys})  # of dk and of dv


@on_kinds
def test_what_is_gathered_is_one_call(kind, layout, monkeypatch):
    """Unless it is so much that a rank begins with its own keys."""
    options, documents = KINDS[kind]
    if kind == "documents":
        documents = (*range(0, ROWS * RANKS, 12), ROWS * RANKS)
    for rank in range(RANKS):
        found = Counted(monkeypatch, rank, layout, "all_gather", options, documents)
        assert found.of_forward == (1, {4: 0, 2: 0})
        assert found.calls == 1 and found.merged[4] == 0


def test_one_result_has_the_bits_of_the_local_call(monkeypatch):
    """Rows that see no other rank's keys, and keys that such rows alone see, whatever came of other ranks."""
    for rank in range(RANKS):
        found = Counted(monkeypatch, rank, "zigzag", "ring", CAUSAL_WINDOW, None)
        chunks = [(0, ROWS)] if rank == RANKS - 1 else [(0, ROWS // 2), (ROWS // 2, ROWS)]
        for first, last in chunks:
            leaves = [x[:, first:last].detach().requires_grad_() for x in found.leaves]
            out = flashtile.attention(*leaves, **CAUSAL_WINDOW)
            expected = [out, *torch.autograd.grad(out, leaves, found.dout[:, first:last])]
            whole = [found.out, *found.gradients]
            rows = slice(first + WINDOW, last)
            keys = slice(first + WINDOW, last - WINDOW)
            for name, x, y, of in zip(
                ("out", "dq", "dk", "dv"), whole, expected, (rows, rows, keys, keys), strict=True
            ):
                assert_bitwise(x[:, of], y[:, of.start - first : of.stop - first], name)


class Recorded(_Nobody):
    def __init__(self, rank):
        super().__init__(rank, RANKS)
        self.routes = []

    def deliver(self, route, sends, device):
        self.routes.append(route)
        return super().deliver(route, sends, device)


def test_gradients_of_a_ring_are_of_keys_that_were_seen():
    """And their memory is never exchanged for larger while what came is sent on from it."""
    group = Recorded(1)
    leaves = [torch.randn(1, ROWS, heads, 16, dtype=BF16, requires_grad=True) for heads in (4, 2, 2)]
    share = share_of(group, leaves, "zigzag", "ring", None, CAUSAL_WINDOW)
    Attend.apply(*leaves, None, share)[0].sum().backward()
    routes = [route for route in group.routes if route.channel == "gradients"]
    assert len(routes) == RANKS - 1 and len({route.size for route in routes}) == 1
    # The last keys of a chunk are seen by the next chunk's rows. Rank 1 gets what ranks have found up to rank 0: for
    # the keys of rank 3 rank 0, which sees none, for those of rank 2 also rank 3, and for its own ranks 2 and 0.
    of_keys = [[shape[1] for shape, _ in route.tensors[1]] for route in routes]
    assert of_keys == [[], [WINDOW] * 2, [WINDOW] * 4]


def test_gradients_of_gathered_keys_are_of_what_calls_see():
    """Two calls over all keys of a causal sequence, of which the rows of one see fewer: so fewer gradients travel."""
    runs_of = Layout.zigzag(ROWS * RANKS, RANKS).runs
    for owner in range(RANKS):
        group = Recorded(owner)
        leaves = [torch.randn(1, ROWS, heads, 16, dtype=BF16, requires_grad=True) for heads in (8, 1, 1)]
        share = share_of(group, leaves, "zigzag", "all_gather", None, dict(causal=True))
        Attend.apply(*leaves, None, share)[0].sum().backward()
        (route,) = (route for route in group.routes if route.channel == "gathered gradients")
        seen = [
            sum(max(min(end, stop) - begin, 0) for begin, end in runs_of[owner])
            for reader in range(RANKS)
            for _, stop in runs_of[reader]
            if reader != owner
        ]
        assert sum(shape[1] for shape, _ in route.tensors[owner]) == 2 * sum(seen)  # of dk and of dv


def test_neighbours_are_one_call():
    """Chunks that each see keys of their own; of several entries each chunk has a call."""
    for rank, batch in itertools.product(range(RANKS), (1, 2)):
        leaves = [torch.randn(batch, ROWS, heads, 16, dtype=BF16) for heads in (4, 2, 2)]
        share = share_of(_Nobody(rank, RANKS), leaves, "zigzag", "ring", None, CAUSAL_WINDOW)
        runs_of = Layout.zigzag(ROWS * RANKS, RANKS).runs[rank]
        assert len(share.local.calls(runs_of, runs_of)) == (1 if batch == 1 else len(runs_of))
