"""flashtile.masks: what is refused, and what messages say."""

import pytest
import torch

from flashtile import masks
from flashtile.masks import ColumnMask


def int32(*shape):
    return torch.zeros(*shape, dtype=torch.int32)


RANGES = int32(1, 1, 6, 4)
OFFSETS = torch.tensor([0, 6], dtype=torch.int32)
SIZE = "an int from 0 to 2^30 - 1"


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: ColumnMask([0], 6), TypeError, ": ranges is of type list, expected a torch.Tensor"),
        (lambda: ColumnMask(RANGES.long(), 6), TypeError, ": ranges has dtype torch.int64, expected torch.int32"),
        (lambda: ColumnMask(int32(6, 4), 6), ValueError, ": ranges has shape (6, 4), expected (B, H, S_k, 4)"),
        (
            lambda: ColumnMask(int32(1, 1, 6, 2), 6),
            ValueError,
            ": ranges has shape (1, 1, 6, 2), expected (B, H, S_k, 4)",
        ),
        (lambda: ColumnMask(RANGES, -1), ValueError, f": seqlen_q is -1, expected {SIZE}"),
        (lambda: ColumnMask(RANGES, None), TypeError, f": seqlen_q is None, expected {SIZE}"),
        (lambda: ColumnMask(RANGES, 6.0), TypeError, f": seqlen_q is 6.0, expected {SIZE}"),
        (
            lambda: ColumnMask(RANGES, 6, (OFFSETS, OFFSETS)),
            ValueError,
            ": seqlen_q is 6, expected None, as cu_seqlens are given",
        ),
        (
            lambda: ColumnMask(int32(2, 1, 6, 4), None, (OFFSETS, OFFSETS)),
            ValueError,
            ": ranges has shape (2, 1, 6, 4), expected (1, H, T_k, 4), as cu_seqlens are given",
        ),
        (
            lambda: ColumnMask(RANGES, None, (OFFSETS, OFFSETS.long())),
            TypeError,
            ": cu_seqlens[1] has dtype torch.int64, expected torch.int32",
        ),
        (
            lambda: ColumnMask(RANGES, None, (OFFSETS, OFFSETS[:1])),
            ValueError,
            ": cu_seqlens[1] has shape (1,), expected (B + 1), as the other",
        ),
        (
            lambda: ColumnMask(RANGES, None, (OFFSETS.to("meta"), OFFSETS)),
            ValueError,
            ": cu_seqlens[0] is on meta, expected cpu",
        ),
        (lambda: ColumnMask.causal(3, "4"), TypeError, f".causal: seqlen_k is '4', expected {SIZE}"),
        (lambda: ColumnMask.full(2**30, 4), ValueError, f": seqlen_q is 1073741824, expected {SIZE}"),
        (lambda: ColumnMask.document([3, -1]), ValueError, f".document: lengths[1] is -1, expected {SIZE}"),
        (lambda: ColumnMask.document(7), TypeError, ".document: lengths is 7, expected ints"),
        (
            lambda: ColumnMask.causal_document([3.0]),
            TypeError,
            f".causal_document: lengths[0] is 3.0, expected {SIZE}",
        ),
        (
            lambda: ColumnMask.causal_blockwise([-2]),
            ValueError,
            f".causal_blockwise: lengths[0] is -2, expected {SIZE}",
        ),
        (
            lambda: ColumnMask.share_question([(1, [1]), (2, [3, -3])]),
            ValueError,
            f".share_question: groups[1][1][1] is -3, expected {SIZE}",
        ),
        (
            lambda: ColumnMask.sliding_window(6, 0),
            ValueError,
            ".sliding_window: window is 0, expected an int from 1 to 2^30 - 1",
        ),
        (
            lambda: ColumnMask.global_sliding_window(6, 1, (1,)),
            ValueError,
            ".global_sliding_window: window is (1,), expected 2 ints",
        ),
        (lambda: ColumnMask.prefix_lm(6, 7), ValueError, ".prefix_lm: prefix is 7, expected an int from 0 to 6"),
        (
            lambda: ColumnMask.prefix_document([(1, 2), (4, 3)]),
            ValueError,
            ".prefix_document: groups[1][0] is 4, expected an int from 0 to 3",
        ),
        (
            lambda: ColumnMask.random_eviction([1]),
            TypeError,
            ".random_eviction: evicted_at is of type list, expected a torch.Tensor",
        ),
        (
            lambda: ColumnMask.random_eviction(torch.ones(3)),
            TypeError,
            ".random_eviction: evicted_at has dtype torch.float32, expected torch.int32 or torch.int64",
        ),
        (
            lambda: ColumnMask.random_eviction(torch.tensor(3)),
            ValueError,
            ".random_eviction: evicted_at has shape (), expected (S), (H, S) or (B, H, S)",
        ),
        (
            lambda: ColumnMask.qk_sparse(6, [(1, 3), (2, 4)]),
            ValueError,
            ".qk_sparse: spans[1] is (2, 4), expected it to begin at 3 or later",
        ),
        (
            lambda: ColumnMask.image_blocks([(1, 7)], 6),
            ValueError,
            ".image_blocks: spans[0] is (1, 7), expected 0 ≤ begin ≤ end ≤ 6",
        ),
        (
            lambda: ColumnMask.image_blocks([(1, 2, 3)], 6),
            ValueError,
            ".image_blocks: spans[0] is (1, 2, 3), expected 2 ints",
        ),
        (
            lambda: ColumnMask.chunked(6, 0),
            ValueError,
            ".chunked: chunk is 0, expected an int from 1 to 2^30 - 1",
        ),
        (lambda: ColumnMask.tree([0]), ValueError, ".tree: parents[0] is 0, expected -1"),
        (
            lambda: ColumnMask.tree([-1, 0, 0, 1]),
            ValueError,
            ".tree: parents[3] is 1, expected -1, 2 or an ancestor of 2 (depth-first order)",
        ),
        (
            lambda: ColumnMask.tree([-1, 1]),
            ValueError,
            ".tree: parents[1] is 1, expected -1, 0 or an ancestor of 0 (depth-first order)",
        ),
        (
            lambda: ColumnMask.from_ranges([(0, 2)], [], None, 4, 4),
            ValueError,
            ".from_ranges: k_ranges has 0 entries, expected 1, as q_ranges",
        ),
        (
            lambda: ColumnMask.from_ranges([(0, 2)], [(0, 5)], None, 4, 4),
            ValueError,
            ".from_ranges: k_ranges[0] is (0, 5), expected 0 ≤ begin ≤ end ≤ 4",
        ),
        (
            lambda: ColumnMask.from_ranges([(0, 2)], [(0, 4)], [4], 4, 4),
            ValueError,
            ".from_ranges: types[0] is 4, expected an int from 0 to 3",
        ),
        (
            lambda: ColumnMask.from_ranges([(0, 1), (2, 3), (4, 5)], [(1, 2)] * 3, None, 6, 4),
            ValueError,
            ".from_ranges: column 1 of batch entry 0, head 0 needs 3 hidden intervals, expected at most 2",
        ),
        (
            lambda: ColumnMask.from_dense(torch.ones(4, 4)),
            TypeError,
            ".from_dense: visible has dtype torch.float32, expected torch.bool",
        ),
        (
            lambda: ColumnMask.from_dense(torch.ones(4, dtype=torch.bool)),
            ValueError,
            ".from_dense: visible has shape (4,), expected (S_q, S_k), (H, S_q, S_k) or (B, H, S_q, S_k)",
        ),
        (
            lambda: ColumnMask.from_startend_row_indices(int32(1, 1, 6, 1).long(), True),
            TypeError,
            ".from_startend_row_indices: indices has dtype torch.int64, expected torch.int32",
        ),
        (
            lambda: ColumnMask.from_startend_row_indices(int32(1, 1, 6, 4), True),
            ValueError,
            ".from_startend_row_indices: indices has shape (1, 1, 6, 4), expected (B, H, S_k, 1 or 2), "
            "since causal is True",
        ),
        (
            lambda: ColumnMask.from_startend_row_indices(int32(1, 1, 6, 1), False),
            ValueError,
            ".from_startend_row_indices: indices has shape (1, 1, 6, 1), expected (B, H, S_k, 2 or 4), "
            "since causal is False",
        ),
        (
            lambda: ColumnMask.from_startend_row_indices(int32(1, 1, 6, 1), 1),
            TypeError,
            ".from_startend_row_indices: causal is 1, expected True or False",
        ),
        (
            lambda: ColumnMask.from_startend_row_indices(int32(1, 1, 6, 1), True, -2),
            ValueError,
            f".from_startend_row_indices: seqlen_q is -2, expected {SIZE}",
        ),
        (lambda: ColumnMask.stack([]), ValueError, ".stack: masks is empty, expected at least one"),
        (
            lambda: ColumnMask.stack([ColumnMask.full(3, 3), ColumnMask.full(3, 4)]),
            ValueError,
            ".stack: masks[1] has S_k = 4, expected 3",
        ),
        (
            lambda: ColumnMask.stack([ColumnMask.full(3, 3), ColumnMask.full(2, 3)]),
            ValueError,
            ".stack: masks[1] has S_q = 2, expected 3",
        ),
        (
            lambda: ColumnMask.concatenate([ColumnMask.full(3, 3), torch.ones(3)]),
            TypeError,
            ".concatenate: masks[1] is of type Tensor, expected a ColumnMask",
        ),
        (
            lambda: ColumnMask.concatenate([ColumnMask(int32(2, 1, 6, 4), 6)]),
            ValueError,
            ".concatenate: masks[0] has B = 2, expected 1",
        ),
        (
            lambda: ColumnMask.concatenate([ColumnMask(int32(1, 2, 6, 4), 6), ColumnMask.full(3, 3)]),
            ValueError,
            ".concatenate: masks[1] has H = 1, expected 2",
        ),
        (
            lambda: masks.ranges_of("ColumnMask", torch.ones(3), None),
            TypeError,
            ": mask is a tensor of shape (3,), expected a flashtile.masks.ColumnMask or None",
        ),
        (
            lambda: ColumnMask.full(3, 3).split(),
            ValueError,
            ".split: the mask is of no ragged batch, expected one that concatenate() made",
        ),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error) as raised:
        make()
    assert str(raised.value) == f"ColumnMask{message}"
