"""attention_varlen: accuracy over the ragged cases, laws that tie it to attention, and what may be handed over."""

import math

import pytest
import ragged
import test_backward
import test_forward
import torch
from cases import BF16, DEVICE_PARAMS, F16, F32, Case, on_devices
from compare import assert_bitwise, assert_same
from ragged import Ragged
from test_backward import differentiable, gradient_names

import flashtile
from flashtile import _C


@pytest.mark.parametrize("case, device", on_devices(ragged.CASES))
def test_forward_of_each_case(case, device, attention_varlen):
    options = case.options(device)
    test_forward.check(attention_varlen, case, *case.tensors(device), formula=ragged.attention, **options)


@pytest.mark.parametrize("case, device", on_devices(ragged.CASES))
def test_backward_of_each_case(case, device, attention_varlen, gradients):
    test_backward.check(case, device, attention_varlen, gradients, False, ragged.attention)


DETERMINISTIC = [
    case
    for case in ragged.CASES
    if case.name.startswith(("no_", "tail", "unused", "skewed", "short", "everything", "D64", "D128", "D192"))
]


@pytest.mark.parametrize("case, device", on_devices(DETERMINISTIC, ["cuda"]))
def test_deterministic_backward(case, device, attention_varlen, gradients):
    test_backward.check(case, device, attention_varlen, gradients, True, ragged.attention)


UNUSED = dict(lengths_q=(90, 0, 70, 33), lengths_k=(120, 30, 65, 40), used_q=(70, 0, 0, 33), used_k=(97, 13, 65, 0))
LAWS = [
    Ragged("full", dtype=F32, heads_q=4, heads_k=2),
    Ragged("causal", dtype=BF16, heads_q=4, heads_k=2, causal=True, head_dim=128, tail=9, **UNUSED),
    Ragged("window", dtype=F16, heads_q=4, heads_k=1, window=(20, 9), head_dim=72, layout="gaps", **UNUSED),
    Ragged("everything", dtype=BF16, softcap=8.0, alibi="per batch and head", scale=0.2, sinks=0.0, dropout_p=0.3),
    Ragged("wide", dtype=F16, head_dim=192, head_dim_v=128, causal=True, lengths_q=(100,) * 3, lengths_k=(90, 1, 140)),
]
each_law = pytest.mark.parametrize("case, device", on_devices(LAWS))
# Dropout, and slopes of their own, go by the number of the sequence.
each_law_without_numbers = pytest.mark.parametrize(
    "case, device", on_devices([case for case in LAWS if not case.dropout_p and case.alibi != "per batch and head"])
)


def results(case, inputs, options, incoming=None, function=flashtile.attention_varlen):
    """out, lse and the gradients, by name; of `incoming`, the gradients of out and lse, or the case's."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    options = options | ({"sinks": inputs[3]} if len(inputs) > 3 else {})
    out, lse = function(*inputs[:3], return_lse=True, deterministic=True, **options)
    gradients = torch.autograd.grad([out, lse], inputs, incoming or case.incoming(out, lse))
    return dict(zip(("out", "lse", *gradient_names(case)), (out.detach(), lse.detach(), *gradients), strict=True))


def assert_close(found, expected):
    """To the bit on the CPU; elsewhere other tiles may serve it."""
    for what, x in expected.items():
        if x.is_cuda:
            eps = torch.finfo(F32 if what == "lse" else found["out"].dtype).eps
            size = x.where(x.isfinite(), 0).abs().max().item() if x.numel() else 0
            torch.testing.assert_close(found[what], x, rtol=0, atol=8 * eps * max(size, 1))
        else:
            assert_bitwise(found[what], x, what)


def part(found, rows, keys):
    """Of one sequence or several, among the results of all."""
    cuts = {"out": rows, "lse": (slice(None), rows), "dq": rows, "dk": keys, "dv": keys}
    return {what: found[what][cut] for what, cut in cuts.items()}


def without_sinks_gradient(found):
    return {what: x for what, x in found.items() if what != "dsinks"}


@each_law
def test_each_sequence_is_as_alone(case, device):
    inputs, options = differentiable(case, device)
    together = results(case, inputs, options)
    for b, (rows, keys) in enumerate(case.spans()):
        # Dropout goes by the number of the batch entry: the last of a batch of equal ones has the same.
        entries = b + 1 if case.dropout_p else 1
        alone = [x[cut].expand(entries, -1, -1, -1) for x, cut in zip(inputs, (rows, keys, keys), strict=False)]
        dense = {name: x for name, x in options.items() if name not in ragged.TABLES}
        if case.alibi == "per batch and head":
            dense["alibi_slopes"] = dense["alibi_slopes"][b].expand(entries, -1).contiguous()
        dout, dlse = case.incoming(together["out"], together["lse"])
        incoming = dout[rows].expand(entries, -1, -1, -1), dlse[:, rows].expand(entries, -1, -1)
        expected = results(case, [*alone, *inputs[3:]], dense, incoming, flashtile.attention)
        assert_close(part(together, rows, keys), {w: x[-1] for w, x in without_sinks_gradient(expected).items()})


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (30, 4)}, {"sinks": 0.0, "dropout_p": 0.3}], ids=str
)
def test_equal_lengths_are_a_dense_batch(device, options):
    sizes = dict(dtype=F16, heads_q=4, heads_k=2, head_dim=64, **options)
    dense = Case("dense", batch=3, seqlen_q=130, seqlen_k=150, **sizes)
    even = Ragged("even", lengths_q=(130,) * 3, lengths_k=(150,) * 3, **sizes)
    inputs, options = differentiable(dense, device)
    out, lse = flashtile.attention(*inputs[:3], return_lse=True, **options)
    dout, dlse = dense.incoming(out, lse)
    expected = results(dense, inputs, options, (dout, dlse), flashtile.attention)
    rows = [*(x.flatten(0, 1) for x in inputs[:3]), *inputs[3:]]
    incoming = dout.flatten(0, 1), dlse.transpose(0, 1).flatten(1)
    found = results(even, rows, options | even.tables(device), incoming)
    flat = {what: x.flatten(0, 1) for what, x in expected.items() if what not in ("lse", "dsinks")}
    assert_close(found, flat | {"lse": expected["lse"].transpose(0, 1).flatten(1)})


@each_law_without_numbers
def test_order_of_sequences_does_not_matter(case, device):
    inputs, options = differentiable(case, device)
    incoming = case.incoming(*(x.detach() for x in flashtile.attention_varlen(*inputs[:3], return_lse=True, **options)))
    expected = results(case, inputs, options, incoming)
    order = range(case.entries - 1, -1, -1)
    spans = case.spans()
    gathered = [torch.cat([x[spans[b][side]] for b in order]) for side, x in zip((0, 1, 1), inputs[:3], strict=True)]
    dout = torch.cat([incoming[0][spans[b][0]] for b in order])
    dlse = torch.cat([incoming[1][:, spans[b][0]] for b in order], dim=1)
    lengths = [tuple(span[side].stop - span[side].start for span in reversed(spans)) for side in (0, 1)]
    backwards = Ragged("backwards", lengths_q=lengths[0], lengths_k=lengths[1])
    found = results(case, [*gathered, *inputs[3:]], options_with(options, backwards.tables(device)), (dout, dlse))
    for mine, theirs in zip(reversed(backwards.spans()), spans, strict=True):
        assert_close(part(found, *mine), part(expected, *theirs))


def options_with(options, tables):
    return {name: x for name, x in options.items() if name not in ragged.TABLES} | tables


@each_law_without_numbers
def test_splitting_the_batch_is_not_splitting(case, device):
    inputs, options = differentiable(case, device)
    out, lse = flashtile.attention_varlen(*inputs[:3], return_lse=True, **options)
    dout, dlse = case.incoming(out, lse)
    whole = results(case, inputs, options, (dout, dlse))
    for cut in range(case.entries + 1):
        row, key = sum(case.lengths_q[:cut]), sum(case.lengths_k[:cut])
        for first, rows, keys in ((True, slice(row), slice(key)), (False, slice(row, None), slice(key, None))):
            tables = {
                name: x[: cut + ("cu" in name)] if first else x[cut:] - (x[cut] if "cu" in name else 0)
                for name, x in case.tables(device).items()
            }
            parts = [*(x[span] for x, span in zip(inputs, (rows, keys, keys), strict=False)), *inputs[3:]]
            incoming = dout[rows], dlse[:, rows]
            found = results(case, parts, options_with(options, tables), incoming)
            assert_close(without_sinks_gradient(found), part(whole, rows, keys))


@each_law
def test_rows_that_do_not_count(case, device):
    """They may hold anything, in q, k, v and in the gradients that come in; their results are 0 and -inf."""
    case = Ragged(**{**fields_of(case), "tail": 40})
    inputs, options = differentiable(case, device)
    out, lse = flashtile.attention_varlen(*inputs[:3], return_lse=True, **options)
    expected = results(case, inputs, options)
    unused_q, unused_k = case.unused(0, device), case.unused(1, device)
    assert (expected["out"][unused_q] == 0).all() and (expected["lse"][:, unused_q] == -math.inf).all()
    assert (expected["dq"][unused_q] == 0).all()
    assert (expected["dk"][unused_k] == 0).all() and (expected["dv"][unused_k] == 0).all()
    for junk in (0.0, math.inf, 1e4):
        for side, x in zip((0, 1, 1), inputs, strict=False):
            x.data[case.unused(side, device)] = junk
        dout, dlse = case.incoming(out, lse)
        dout[unused_q], dlse[:, unused_q] = junk, junk
        assert_same(results(case, inputs, options, (dout, dlse)), expected)


def fields_of(case):
    return {name: x for name, x in vars(case).items() if name not in ("batch", "seqlen_q", "seqlen_k")}


@each_law
def test_a_sequence_does_not_see_its_neighbours(case, device):
    inputs, options = differentiable(case, device)
    expected = results(case, inputs, options)
    spans = case.spans()
    rows, keys = spans[2]
    for side, x in zip((0, 1, 1), inputs, strict=False):
        x.data[: spans[2][side].start] = math.nan
        x.data[spans[2][side].stop :] = math.nan
    assert_same(part(results(case, inputs, options), rows, keys), part(expected, rows, keys))


@each_law
def test_runs_agree_bitwise(case, device):
    inputs, options = differentiable(case, device)
    first = results(case, inputs, options)
    for _ in range(10):
        assert_same(results(case, inputs, options), first)


@each_law
def test_all_rows_used_is_none_given(case, device):
    inputs, options = differentiable(case, device)
    case = Ragged(**{**fields_of(case), "used_q": None, "used_k": None})
    for x in inputs[:3]:
        x.data = x.data.nan_to_num(1.0)
    options = options_with(options, case.tables(device))
    expected = results(case, inputs, options)
    used = {f"seqused_{x[-1]}": options[x].diff() for x in ("cu_seqlens_q", "cu_seqlens_k")}
    assert_same(results(case, inputs, options | used), expected)


@pytest.mark.parametrize("threads", [2, 3, 7])
@pytest.mark.parametrize("case", [*LAWS, *(x for x in ragged.CASES if x.name == "short_options")], ids=str)
def test_thread_counts_agree_bitwise(case, threads):
    inputs, options = differentiable(case)
    expected = results(case, inputs, options)
    try:
        torch.set_num_threads(threads)
        assert_same(results(case, inputs, options), expected)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (3,), (0, 2), (1, 3)])
@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_only_needed_gradients(needed, device):
    case = Ragged("partial", dtype=F16, sinks=0.0, causal=True, **UNUSED)
    inputs, options = differentiable(case, device)
    everything = results(case, inputs, options)
    for i, x in enumerate(inputs):
        x.requires_grad_(i in needed)
    out, lse = flashtile.attention_varlen(*inputs[:3], return_lse=True, deterministic=True, **options)
    torch.autograd.backward([out, lse], case.incoming(out, lse))
    for i, (what, x) in enumerate(zip(gradient_names(case), inputs, strict=True)):
        if i in needed:
            assert_bitwise(x.grad, everything[what], what)
        else:
            assert x.grad is None, f"{what} was computed though not asked for"


def test_one_output_differentiated_at_a_time():
    """An lse that was not asked for serves backward as well; a loss of one output never sees the other."""
    case = Ragged("split", dtype=F32, window=(9, 3), **UNUSED)
    inputs, options = differentiable(case)
    out, lse = flashtile.attention_varlen(*inputs, return_lse=True, **options)
    dout, dlse = case.incoming(out, lse)
    both = torch.autograd.grad([out, lse], inputs, [dout, dlse], retain_graph=True)
    only_out = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    only_lse = torch.autograd.grad(lse, inputs, dlse)
    plain = torch.autograd.grad(flashtile.attention_varlen(*inputs, **options), inputs, dout)
    for what, x, a, b, c in zip(gradient_names(case), both, only_out, only_lse, plain, strict=True):
        torch.testing.assert_close(a + b, x, rtol=0, atol=8 * torch.finfo(F32).eps * x.abs().max().item())
        assert_bitwise(a, c, what)


# ---- what may be handed over


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_longest_lengths_change_nothing(device):
    case = Ragged("longest", dtype=F16)
    inputs, options = case.tensors(device), case.options(device)
    expected = flashtile.attention_varlen(*inputs, **options)
    on_device = torch.tensor(130, device=device)
    for longest in (130, 0, 2**40, on_device, on_device.int()[None]):
        found = flashtile.attention_varlen(*inputs, max_seqlen_q=longest, max_seqlen_k=longest, **options)
        assert_bitwise(found, expected)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_autocast(device):
    case = Ragged("autocast", dtype=F32, causal=True, sinks=0.0, **UNUSED)
    inputs, options = case.tensors(device), case.options(device)
    expected = flashtile.attention_varlen(*(x.to(BF16) for x in inputs), return_lse=True, **options)
    with torch.autocast(device, dtype=BF16):
        found = flashtile.attention_varlen(*inputs[:2], inputs[2].to(BF16), return_lse=True, **options)
        with pytest.raises(TypeError, match=r"^attention_varlen: cu_seqlens_q has dtype torch.int64, expected int32"):
            long = options["cu_seqlens_q"].long()
            flashtile.attention_varlen(*inputs, **options | {"cu_seqlens_q": long})
    for what, a, b in zip(("out", "lse"), found, expected, strict=True):
        assert_bitwise(a, b, what)


@pytest.mark.parametrize("case, device", on_devices(LAWS))
def test_both_ways_into_the_module_agree(case, device):
    """By the exchange table, and by Python attributes as with a PyTorch older than 2.10."""
    inputs, options = differentiable(case, device)
    expected = results(case, inputs, options)
    _C._enable_exchange(False)
    try:
        assert_same(results(case, inputs, options), expected)
        with pytest.raises(TypeError, match=r"^attention_varlen: cu_seqlens_k has dtype torch.int64, expected int32"):
            long = options["cu_seqlens_k"].long()
            flashtile.attention_varlen(*inputs[:3], **options | {"cu_seqlens_k": long})
    finally:
        _C._enable_exchange(True)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("changed", ["q", *ragged.TABLES])
def test_changing_what_backward_needs_is_noticed(changed, return_lse):
    case = Ragged("changed", dtype=F32, **UNUSED)
    inputs, options = differentiable(case)
    out = flashtile.attention_varlen(*inputs, return_lse=return_lse, **options)
    total = (out[0] if return_lse else out).sum()
    with torch.no_grad():
        (inputs[0] if changed == "q" else options[changed]).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_checkpointing_drops_the_same_weights():
    case = Ragged("checkpoint", dtype=F32, causal=True)
    inputs, options = differentiable(case)

    def function(q, k, v):
        return flashtile.attention_varlen(q, k, v, dropout_p=0.5, **options)

    torch.manual_seed(1)
    expected = function(*inputs)
    torch.manual_seed(1)
    found = torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=False)
    torch.manual_seed(2)
    assert_bitwise(found, expected)
    gradients = [torch.autograd.grad(x.square().sum(), inputs) for x in (found, expected)]
    for a, b in zip(*gradients, strict=True):
        assert_bitwise(a, b)
