"""flashtile.compat.flashmask against FlashMask's own definition of its indices, written out."""

import inspect

import pytest
import reference
import torch
from cases import F32
from compare import assert_accurate

from flashtile.compat.flashmask import flashmask_attention

SEQLEN = 60
# Of paddle.nn.functional.flashmask_attention, and the last four of the package flash_mask.
OPTIONS = [("dropout", 0.0), ("causal", False), ("window_size", None), ("return_softmax_lse", False)]
OPTIONS += [("return_seed_offset", False), ("fixed_seed_offset", None), ("rng_name", ""), ("training", True)]
OPTIONS += [("name", None), ("softmax_scale", None), ("block_mask", None), ("use_varlen", False)]
OPTIONS += [("learnable_sink", None)]


def test_the_signature_is_theirs():
    parameters = list(inspect.signature(flashmask_attention).parameters.values())
    assert [p.name for p in parameters[:4]] == ["query", "key", "value", "startend_row_indices"]
    assert [(p.name, p.default) for p in parameters[4:]] == OPTIONS
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters[4:])


def tensors(heads_q=4, heads_k=2):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2, SEQLEN, heads, 16, generator=generator) for heads in (heads_q, heads_k, heads_k)]


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("causal, n", [(True, 1), (True, 2), (False, 2), (False, 4)])
def test_indices_mean_what_they_define(causal, n, heads):
    q, k, v = tensors()
    generator = torch.Generator().manual_seed(n)
    indices = torch.randint(0, SEQLEN + 1, (2, heads, SEQLEN, n), generator=generator).sort(-1).values.int()
    if n == 2 and not causal:
        indices = indices.flip(-1)  # rows from the first on are hidden, and those before the second
    row = torch.arange(SEQLEN)[:, None]
    bounds = [x.unsqueeze(2) for x in indices.unbind(-1)]
    if causal:
        hidden = (row >= bounds[0]) if n == 1 else (row >= bounds[0]) & (row < bounds[1])
    elif n == 2:
        hidden = (row >= bounds[0]) | (row < bounds[1])
    else:
        hidden = ((row >= bounds[0]) & (row < bounds[1])) | ((row >= bounds[2]) & (row < bounds[3]))
    out, lse = flashmask_attention(q, k, v, indices, causal=causal, return_softmax_lse=True, softmax_scale=0.3)
    exact, rough = (
        reference.attention(q, k, v, mask=~hidden, causal=causal, scale=0.3, dtype=dtype)
        for dtype in (torch.float64, F32)
    )
    assert_accurate(out, exact[0], rough[0], "out")
    assert_accurate(lse, exact[1], rough[1], "lse", slack=1e-6)


@pytest.mark.parametrize(
    "window_size, causal, window", [(7, True, (7, 0)), (7, False, (7, 7)), ((3, 9), False, (3, 9))]
)
def test_windows(window_size, causal, window):
    q, k, v = tensors()
    exact, rough = (reference.attention(q, k, v, window=window, dtype=dtype)[0] for dtype in (torch.float64, F32))
    assert_accurate(flashmask_attention(q, k, v, window_size=window_size, causal=causal), exact, rough)


def test_a_sink_is_learnt():
    q, k, v = tensors()
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0], requires_grad=True)
    exact, rough = (
        reference.attention(q, k, v, causal=True, sinks=sink.detach(), dtype=x)[0] for x in (torch.float64, F32)
    )
    out = flashmask_attention(q, k, v, causal=True, learnable_sink=sink, use_varlen=True)
    assert_accurate(out.detach(), exact, rough)
    out.sum().backward()
    assert sink.grad.any()


@pytest.mark.parametrize("window_size", [-1, (-1, 3), (3, -1)])
def test_a_window_of_negative_size_is_refused(window_size):
    with pytest.raises(ValueError, match=r"^flashmask_attention: window_size is .*, expected numbers of at least 0"):
        flashmask_attention(*tensors(), window_size=window_size)


def test_dropout_is_for_training():
    q, k, v = tensors()
    indices = torch.full((2, 1, SEQLEN, 1), SEQLEN, dtype=torch.int32)
    plain = flashmask_attention(q, k, v, indices, causal=True)
    assert torch.equal(flashmask_attention(q, k, v, indices, causal=True, dropout=0.5, training=False), plain)
    assert not torch.equal(flashmask_attention(q, k, v, indices, causal=True, dropout=0.5), plain)


@pytest.mark.parametrize(
    "dropout, error",
    [(float("nan"), ValueError), (-0.5, ValueError), (1.0, ValueError), ("x", TypeError), (..., TypeError)],
)
def test_dropout_is_a_probability(dropout, error):
    with pytest.raises(error, match=r"^attention: dropout_p is .*, expected a "):
        flashmask_attention(*tensors(), dropout=dropout)


def test_what_is_not_served_is_refused_by_name():
    q, k, v = tensors()
    for name, value in (("block_mask", q), ("fixed_seed_offset", q), ("return_seed_offset", True), ("rng_name", "x")):
        with pytest.raises(NotImplementedError, match=f"^flashmask_attention: {name} is "):
            flashmask_attention(q, k, v, **{name: value})
    indices = torch.zeros(2, 1, SEQLEN, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="window_size is 3, expected None with startend_row_indices"):
        flashmask_attention(q, k, v, indices, window_size=3)
