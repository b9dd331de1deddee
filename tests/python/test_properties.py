"""Random shapes and options, shrunk to the smallest that fails."""

import reference
import torch
from cases import BF16, F16, F32, LAYOUTS, Case
from compare import assert_accurate, score_rounding, sink_rounding
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_backward import differentiable, gradient_names, reference_gradients

import flashtile

distances = st.none() | st.integers(0, 60)
lengths = st.integers(0, 150)


@st.composite
def cases(draw):
    heads_k = draw(st.integers(1, 3))
    return Case(
        "random",
        dtype=draw(st.sampled_from([F32, F16, BF16])),
        batch=draw(st.integers(0, 3)),
        seqlen_q=draw(lengths),
        seqlen_k=draw(lengths),
        heads_q=heads_k * draw(st.integers(1, 4)),
        heads_k=heads_k,
        head_dim=8 * draw(st.integers(1, 20)),
        head_dim_v=8 * draw(st.integers(1, 20)),
        causal=draw(st.booleans()),
        window=draw(st.none() | st.tuples(distances, distances)),
        scale=draw(st.none() | st.floats(-1, 1, width=32)),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.0, 15.0])),
        alibi=draw(st.sampled_from([None, "per head", "per batch and head"])),
        layout=draw(st.sampled_from(LAYOUTS)),
        sinks=draw(st.none() | st.floats(-10, 10, width=16)),
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.125, 0.5])),
    )


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_forward_and_backward_of_random_problems(case):
    inputs, options = differentiable(case)
    out, lse = flashtile.attention(*inputs[:3], return_lse=True, **options)
    exact_out, exact_lse = reference.attention(*case.tensors(), **case.options())
    rough_out, _ = reference.attention(*case.tensors(), dtype=case.dtype, **case.options())
    _, rough_lse = reference.attention(*case.tensors(), dtype=F32, **case.options())
    assert_accurate(out.detach(), exact_out, rough_out, "out", slack=2 * score_rounding(exact_lse, exact_out))
    assert_accurate(lse.detach(), exact_lse, rough_lse, "lse", slack=2 * score_rounding(exact_lse))

    dout, dlse = torch.ones_like(out), torch.ones_like(lse)
    found = torch.autograd.grad([out, lse], inputs, [dout, dlse])
    exact = reference_gradients(case, torch.float64, dout, dlse)
    rough = reference_gradients(case, case.dtype, dout, dlse)
    for what, *values in zip(gradient_names(case), found, exact, rough, strict=True):
        slack = 4 * score_rounding(exact_lse, values[1])
        if what == "dsinks":
            slack += sink_rounding(out, lse, dout, inputs[3])
        assert_accurate(*values, what, slack=slack)
