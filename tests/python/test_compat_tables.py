"""flashtile.compat: tables, and rows of keys and values, that flashtile gets in another order than they were given."""

import pytest
import torch
from theirs import assert_refuses, fa2, fa3

from flashtile.compat import sgl_kernel


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


ROWS, CACHE = torch.randn(5, 2, 16), torch.randn(4, 8, 2, 16)
BEGINS = {
    "descending": (ints(0, 3, 2), "cu_seqlens_{} has 2 at index 2, expected at least 3"),
    "beyond": (ints(0, 3, 9), "cu_seqlens_{} has 9 at index 2, expected at most 5 = T_{}"),
    "late": (ints(1, 3, 5), "cu_seqlens_{} has 1 at index 0, expected 0"),
}
LENGTHS = {
    "long": (ints(3, 3), "has 3 at index 1, expected from 0 to the sequence's length 2"),
    "negative": (ints(-1, 2), "has -1 at index 0, expected from 0 to the sequence's length 3"),
}


def over_pages(begins, used):
    table = ints(0, 1, 2, 3).view(2, 2)
    tables = dict(page_table=table, seqused_q=used, seqused_k=ints(6, 6))
    return sgl_kernel.flash_attn_varlen_func, (ROWS, CACHE, CACHE, begins, None), tables


def behind_padding(begins, leftpad, used=None, v=ROWS):
    scores = dict(dropout_p=0.0, softmax_scale=None, causal=False)
    tables = dict(leftpad_k=leftpad, seqused_k=used, max_seqlen_q=3, max_seqlen_k=3)
    return fa2._flash_attn_varlen_forward, (ROWS, ROWS, v, ints(0, 3, 5), begins), scores | tables


@pytest.mark.parametrize("what", BEGINS)
def test_begins_of_sequences(what):
    begins, message = BEGINS[what]
    for side, (function, args, options) in dict(
        q=over_pages(begins, ints(1, 1)), k=behind_padding(begins, ints(1, 1))
    ).items():
        assert_refuses(function, ValueError, message.format(side, side), *args, **options)


@pytest.mark.parametrize("what", LENGTHS)
def test_lengths_of_sequences(what):
    lengths, message = LENGTHS[what]
    begins = ints(0, 3, 5)
    for name, (function, args, options) in dict(
        seqused_q=over_pages(begins, lengths),
        leftpad_k=behind_padding(begins, lengths),
        seqused_k=behind_padding(begins, ints(0, 0), lengths),
    ).items():
        assert_refuses(function, ValueError, f"{name} {message}", *args, **options)
    function, args, options = behind_padding(begins, ints(1, 2), ints(3, 1))
    message = "leftpad_k has 2 at index 1, expected from 0 to seqused_k 1"
    assert_refuses(function, ValueError, message, *args, **options)


def test_lengths_up_to_the_largest():
    begins = ints(0, 3, 5)
    for function, args, options in (
        over_pages(begins, ints(3, 2)),
        over_pages(begins, ints(0, 0)),
        over_pages(ints(0, 0, 4), ints(0, 4)),
        behind_padding(begins, ints(3, 2)),
        behind_padding(begins, ints(0, 1), ints(0, 1)),
    ):
        function(*args, **options)


def test_values_that_are_not_those_of_the_keys():
    for v in (torch.randn(7, 2, 16), ROWS[:4], ROWS[:, :1]):
        function, args, options = behind_padding(ints(0, 3, 5), ints(1, 1), v=v)
        message = r"v has shape \(., ., 16\), expected \(5, 2, 16\) = \(T_k, H_k, D_v\)"
        assert_refuses(function, ValueError, message, *args, **options)
    k = torch.randn(2, 6, 2, 16)
    for v in (k.reshape(3, 4, 2, 16), k[:, :5], k[:1]):
        message = r"v has shape \(., ., 2, 16\), expected \(2, 6, 2, 16\) = \(B, S_k, H_k, D_v\)"
        assert_refuses(fa3.flash_attn_varlen_func, ValueError, message, ROWS, k, v, ints(0, 3, 5), None, 3, 6)
        results = dict(dout=ROWS, q=ROWS, k=k, v=v, out=ROWS, softmax_lse=torch.zeros(2, 5))
        assert_refuses(fa3._flash_attn_backward, ValueError, message, **results, cu_seqlens_q=ints(0, 3, 5))
