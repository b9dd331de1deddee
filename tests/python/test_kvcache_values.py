"""What attention_kvcache refuses by what tables hold: lengths, padding, pages, entries and begins. Nothing is written
then, and the message says what was expected."""

import pytest
from cached import REMOVED, assert_refused, numbers

# What only the CPU's tables are known to hold. name: (base, what arguments become: values, or functions of good ones,
# what the message holds)
BAD_VALUES = {
    "negative length": (
        "dense",
        dict(cache_seqlens=numbers(20, -1)),
        "cache_seqlens has -1 at index 1, expected from 0 to 50",
    ),
    "more than there is room": (
        "dense",
        dict(cache_seqlens=numbers(51, 3)),
        "cache_seqlens has 51 at index 0, expected from 0 to 50",
    ),
    "one length for all": ("paged", dict(cache_seqlens=51), "cache_seqlens has 51 at index 0, expected from 0 to 50"),
    "no room for new rows": (
        "paged",
        dict(cache_seqlens=numbers(20, 48)),
        "k_new has 3 rows for the sequence at index 1, expected at most 2, .* 48 .* 50",
    ),
    "no room for ragged rows": (
        "ragged",
        dict(cache_seqlens=numbers(49, 0)),
        "k_new has 2 rows for the sequence at index 0, expected at most 1",
    ),
    "negative padding": ("dense", dict(leftpad=numbers(-1, 0)), "leftpad has -1 at index 0, expected from 0 to .* 23"),
    "padding beyond all rows": (
        "dense",
        dict(leftpad=numbers(0, 34)),
        "leftpad has 34 at index 1, expected from 0 to .* 33",
    ),
    "a negative page": (
        "paged",
        dict(block_table=lambda x: x.index_fill(1, x[0, 1:2].long(), -1)),
        r"block_table has -1 at index \(0, 1\), expected from 0 to 11, a page of k_cache",
    ),
    "no such page": (
        "paged",
        dict(block_table=lambda x: x + 5),
        r"block_table has 12 at index \(1, 2\), expected from 0 to 11",
    ),
    "a page of new rows alone": (
        "paged",
        dict(cache_seqlens=numbers(20, 30), block_table=lambda x: x.where(x != 8, 12)),
        r"block_table has 12 at index \(1, 3\), expected from 0 to 11",
    ),
    "a page that two sequences write to": (
        "paged",
        dict(cache_seqlens=numbers(20, 32), block_table=lambda x: x.where(x != 8, 2)),
        r"block_table has 2 at index \(0, 2\), expected another page, as k_new is written to its row 2 for .* index 1",
    ),
    "a page that one writes and another reads": (
        "paged",
        dict(block_table=lambda x: x.where(x != 7, 2)),
        r"block_table has 2 at index \(1, 2\), expected another page, as k_new is written to its row 0 for .* index 0",
    ),
    "a page in two places of a sequence": (
        "paged",
        dict(block_table=lambda x: x.where(x != 2, 1)),
        r"block_table has 1 at index \(0, 1\), expected another page, as k_new is written to its row 0",
    ),
    "no such entry": (
        "indexed",
        dict(cache_batch_idx=numbers(4, 0)),
        "cache_batch_idx has 4 at index 0, expected from 0 to 3, an entry of k_cache",
    ),
    "a negative entry": (
        "indexed",
        dict(cache_batch_idx=numbers(0, -1)),
        "cache_batch_idx has -1 at index 1, expected from 0 to 3",
    ),
    "an entry of two": (
        "indexed",
        dict(cache_batch_idx=numbers(2, 2)),
        "cache_batch_idx has 2 at index 1, expected another entry for each sequence where k_new",
    ),
    "first begin not 0": ("ragged", dict(cu_seqlens_q=numbers(1, 2, 6)), "cu_seqlens_q has 1 at index 0, expected 0"),
    "decreasing begins": (
        "ragged",
        dict(cu_seqlens_q=numbers(0, 6, 5)),
        "cu_seqlens_q has 5 at index 2, expected at least 6",
    ),
    "begins beyond T_q": (
        "ragged",
        dict(cu_seqlens_q=numbers(0, 2, 7)),
        "cu_seqlens_q has 7 at index 2, expected at most 6 = T_q",
    ),
    "too few positions": (
        "dense",
        dict(rotary_cos=lambda x: x[:32], rotary_sin=lambda x: x[:32]),
        r"rotary_cos has shape \(32, 16\), expected at least 33 positions, as the sequence at index 1 has",
    ),
    "queries without a position": (
        "dense",
        dict(cache_seqlens=0, leftpad=REMOVED, k_new=lambda x: x[:, :2], v_new=lambda x: x[:, :2], causal=False),
        "q has 3 rows for the sequence at index 0, expected at most 2",
    ),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_values(name):
    base, changes, message = BAD_VALUES[name]
    assert_refused(base, changes, ValueError, message, "cpu")
