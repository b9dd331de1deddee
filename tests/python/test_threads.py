"""Any number of threads, of one call or of many callers, gives the same bits."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import BF16, F32, Case
from compare import assert_same
from test_backward import differentiable, gradient_names

import flashtile

CASES = [
    Case("causal", dtype=F32, causal=True, heads_q=6, heads_k=2, seqlen_q=300, seqlen_k=300),
    Case("window", dtype=BF16, window=(70, 10), heads_q=4, heads_k=1, seqlen_q=200, seqlen_k=500, head_dim=128),
    Case(
        "sinks_dropout",
        dtype=F32,
        causal=True,
        heads_q=6,
        heads_k=2,
        seqlen_q=300,
        seqlen_k=300,
        sinks=0.0,
        dropout_p=0.3,
    ),
]


@pytest.fixture
def set_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def forward_and_backward(case):
    inputs, options = differentiable(case)
    out, lse = flashtile.attention(*inputs[:3], return_lse=True, **options)
    gradients = torch.autograd.grad([out, lse], inputs, [torch.ones_like(out), torch.ones_like(lse)])
    return dict(zip(("out", "lse", *gradient_names(case)), (out, lse, *gradients), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_thread_counts_agree_bitwise(case, set_threads):
    set_threads(1)
    expected = forward_and_backward(case)
    for threads in (2, 3, 7, 16):
        set_threads(threads)
        assert_same(forward_and_backward(case), expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_callers_at_the_same_time(case, set_threads):
    """The module lets go of the GIL while it computes, so its calls do overlap."""
    set_threads(2)
    expected = forward_and_backward(case)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(forward_and_backward, [case] * 24):
            assert_same(found, expected)


# Only attention computes in the child: PyTorch's own operators may wait for threads that it does not have.
FORKED = """
import os, torch, flashtile
torch.set_num_threads(2)
q = torch.randn(1, 600, 4, 64)
expected = flashtile.attention(q, q, q).tolist()
child = os.fork()
if child == 0:
    os._exit(0 if flashtile.attention(q, q, q).tolist() == expected else 1)
assert os.waitpid(child, 0)[1] == 0
assert flashtile.attention(q, q, q).tolist() == expected
"""


def test_a_forked_process_computes():
    """Data loaders fork; the child has none of the threads that its parent computed with."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], check=True, timeout=120)
