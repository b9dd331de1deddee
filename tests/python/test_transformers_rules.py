"""attn_implementation="flashtile": any rule for a mask that transformers composes, over any cache and any padding."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_transformers import (  # noqa: F401
    _fallbacks_are_errors,
    _registered,
    dense,
    integration,
    layer,
    masking_utils,
    masks,
    rows,
)
from torch._subclasses.fake_tensor import FakeTensorMode


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.data())
def test_every_mask(data):
    """Any cache and any padding: rows that count get what transformers' own mask, written out, gives them."""
    length = data.draw(st.integers(1, 6), "q_length")
    held = data.draw(st.integers(0, 8), "held")
    causal = data.draw(st.booleans(), "causal")
    tail = data.draw(st.integers(0, 4), "unwritten") if causal else 0
    sliding_window = data.draw(st.none() | st.integers(1, 6), "window")
    # A static cache without causality does not happen. There, the host has to know which key the last query meets.
    on_device = data.draw(st.booleans(), "q_offset is a tensor") and (causal or sliding_window is None)
    dropped = data.draw(st.integers(0, held if sliding_window is not None else 0), "kv_offset")
    dropped = 0 if sliding_window is None else min(dropped, max(0, held - sliding_window + 1))
    if sliding_window is None:
        padding = torch.tensor([data.draw(st.lists(st.booleans(), min_size=held + length, max_size=held + length))])
    else:  # distances are between tokens that count, so these stand together
        begin, end = sorted(data.draw(st.tuples(*[st.integers(0, held + length)] * 2)))
        padding = (torch.arange(held + length) >= begin)[None] & (torch.arange(held + length) < end)
    padding = torch.cat([padding, torch.ones_like(padding)])
    given_mask = data.draw(st.sampled_from([padding, None]), "attention_mask")

    base = masking_utils.causal_mask_function if causal else masking_utils.bidirectional_mask_function
    if sliding_window is not None:
        overlay = "sliding_window_overlay" if causal else "sliding_window_bidirectional_overlay"
        distance = sliding_window if causal else sliding_window - 1
        base = masking_utils.and_masks(getattr(masking_utils, overlay)(distance), base)
    arguments = dict(batch_size=2, q_length=length, kv_length=held + length + tail - dropped, kv_offset=dropped)
    arguments |= dict(mask_function=base, attention_mask=given_mask, device="cpu", allow_is_causal_skip=False)
    arguments |= dict(q_offset=torch.tensor(held) if on_device else held)
    seen = masking_utils.sdpa_mask(**arguments)
    inputs = rows(length, arguments["kv_length"], batch=2)
    sinks, softcap = torch.randn(4), data.draw(st.sampled_from([None, 0.7]), "softcap")
    out, none = integration.attend(
        layer(causal),
        *inputs,
        integration.mask(**arguments),
        sliding_window=sliding_window,
        softcap=softcap,
        s_aux=sinks,
    )
    counts = torch.ones(2, length, dtype=torch.bool) if given_mask is None else given_mask[:, held : held + length]
    expected = dense(inputs, seen, sinks, softcap).float()
    assert none is None and out.isfinite().all()
    torch.testing.assert_close(out[counts], expected[counts], rtol=1e-4, atol=1e-5)
    told = masks.read(integration.mask(**arguments), 2, length, arguments["kv_length"])
    if told is not None:
        whole = masks.written_out(told, length, arguments["kv_length"], "cpu").expand(2, 1, -1, -1)
        assert torch.equal(whole[:, 0][counts], seen.expand(2, 1, -1, -1)[:, 0][counts])


def pack(rule, sequence):
    """As transformers does it, where position_ids tell which sequence a row is in."""
    compose = getattr(masking_utils, "packed_sequence_compatibility_function", None)  # later than transformers 5.4
    if compose is None:
        return masking_utils.and_masks(rule, masking_utils.packed_sequence_mask_function(sequence))
    return compose(rule, torch.zeros_like(sequence), sequence)


def test_the_host_reads_no_mask():
    """Fake tensors have no values to be read."""
    causal = masking_utils.causal_mask_function
    with FakeTensorMode():
        padding, held, numbers = (
            torch.ones(2, 9, dtype=torch.bool),
            torch.tensor(4),
            torch.zeros(2, 5, dtype=torch.int64),
        )
        place = dict(q_length=5, kv_length=12, q_offset=held, attention_mask=padding, mask_function=causal)
        assert integration.mask(2, **place).shape == (2, 2, 3, 1 + 12 + 1 + 5)
        packed = pack(causal, numbers)
        assert integration.mask(2, 5, 5, mask_function=packed).shape == (1, 2, 1, 11)


def test_an_empty_mask_where_nothing_is_hidden():
    assert integration.mask(2, 5, 5).numel() == 0
    assert integration.mask(2, 1, 9, q_offset=8).numel() == 0
    assert integration.mask(2, 5, 7, mask_function=masking_utils.bidirectional_mask_function).numel() == 0
    assert integration.mask(2, 5, 9).numel() > 0  # four places of a static cache are not yet written
