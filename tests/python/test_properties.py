"""Random shapes and options, shrunk to the smallest that fails."""

import ragged
import reference
import torch
from cases import BF16, F16, F32, LAYOUTS, Case
from compare import assert_accurate, difference_rounding, score_rounding, sink_rounding
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ragged import Ragged
from test_backward import differentiable, gradient_names, reference_gradients

import flashtile

distances = st.none() | st.integers(0, 60) | st.integers(-60, 60)
lengths = st.integers(0, 150)


@st.composite
def options_and_sizes(draw):
    heads_k = draw(st.integers(1, 3))
    return dict(
        dtype=draw(st.sampled_from([F32, F16, BF16])),
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


@st.composite
def cases(draw):
    sizes = dict(batch=draw(st.integers(0, 3)), seqlen_q=draw(lengths), seqlen_k=draw(lengths))
    return Case("random", **sizes, **draw(options_and_sizes()))


@st.composite
def ragged_cases(draw):
    fields = {}
    count = draw(st.integers(0, 5))
    for name in ("q", "k"):
        chosen = draw(st.lists(lengths, min_size=count, max_size=count))
        fields[f"lengths_{name}"] = tuple(chosen)
        fields[f"used_{name}"] = draw(st.none() | st.tuples(*(st.integers(0, length) for length in chosen)))
    return Ragged("random", tail=draw(st.integers(0, 40)), **fields, **draw(options_and_sizes()))


random_problems = settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@random_problems
@given(cases())
@example(
    Case("one key", F32, 3, seqlen_q=1, seqlen_k=1, heads_q=1, heads_k=1, head_dim=8, head_dim_v=32, dropout_p=0.125)
)
@example(
    Case("one key", F16, 1, seqlen_q=1, seqlen_k=1, heads_q=2, heads_k=1, head_dim=8, head_dim_v=24, dropout_p=0.125)
)
def test_forward_and_backward_of_random_problems(case):
    check(case, flashtile.attention, reference.attention)


@settings(random_problems, max_examples=150)
@given(ragged_cases())
def test_forward_and_backward_of_random_ragged_problems(case):
    check(case, flashtile.attention_varlen, ragged.attention)


def check(case, attention, formula):
    inputs, options = differentiable(case)
    out, lse = attention(*inputs[:3], return_lse=True, **options)
    exact_out, exact_lse = formula(*case.tensors(), **case.options())
    rough_out, _ = formula(*case.tensors(), dtype=case.dtype, **case.options())
    _, rough_lse = formula(*case.tensors(), dtype=F32, **case.options())
    assert_accurate(out.detach(), exact_out, rough_out, "out", slack=2 * score_rounding(exact_lse, exact_out))
    assert_accurate(lse.detach(), exact_lse, rough_lse, "lse", slack=2 * score_rounding(exact_lse))

    dout, dlse = case.incoming(out, lse)
    found = torch.autograd.grad([out, lse], inputs, [dout, dlse])
    exact = reference_gradients(case, torch.float64, dout, dlse, formula)
    rough = reference_gradients(case, case.dtype, dout, dlse, formula)
    q, k, v, result = (x.detach() for x in (*inputs[:3], out))
    of_dq, of_dk = difference_rounding(q, k, v, dout, case.scale, case.dropout_p, result)
    for what, *values in zip(gradient_names(case), found, exact, rough, strict=True):
        slack = 4 * score_rounding(exact_lse, values[1]) + {"dq": of_dq, "dk": of_dk}.get(what, 0.0)
        if what == "dsinks":
            slack += sink_rounding(out, lse, dout, inputs[3])
        assert_accurate(*values, what, slack=slack)
