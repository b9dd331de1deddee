"""return_max_logits: the largest score of each head beside the results of attention, attention_varlen and
attention_kvcache, whatever else a call is asked for, and without a bit of it being another."""

import math
import re

import pytest
import ragged
import reference
import test_max_logits
import torch
from cached import Cached, ints, with_own_caches
from cases import BF16, CASES, DEVICE_PARAMS, F16, F32, Case, on_devices
from compare import assert_bitwise, assert_same
from hypothesis import given as hypothesis_given
from hypothesis import settings
from hypothesis import strategies as st
from ragged import Ragged
from test_column_mask import random_mask
from test_kvcache_fp8 import E4M3
from test_kvcache_laws import assert_close
from test_kvcache_masks import Masked
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from traced import compiled, quiet

import flashtile
from flashtile import _C, _capability
from flashtile._ops import call_kvcache
from flashtile._options import attention_options
from flashtile.masks import ColumnMask


def asked(function, given, **others):
    """{out, lse, max_logits} of a call that is asked for all of them, and for each two alone."""
    out, lse, largest = function(**given, **others, return_lse=True, return_max_logits=True)
    without = function(**given, **others, return_lse=True)
    alone = function(**given, **others, return_max_logits=True)
    assert len(without) == 2 and len(alone) == 2
    assert largest.dtype is F32 and not largest.requires_grad and largest.is_contiguous()
    check = same_as_without(given | others)
    check(dict(out=out, lse=lse), dict(zip(("out", "lse"), without, strict=True)))
    check(dict(out=alone[0]), dict(out=out))
    assert_bitwise(alone[1], largest, "max_logits")
    return dict(out=out, lse=lse, max_logits=largest)


def same_as_without(given):
    """How results of a call have to be those of one without max_logits: to the bit, but on Hopper, which has kernels of
    its own for it, unless they are batch-invariant."""
    return assert_close if given["q"].is_cuda and not given.get("batch_invariant", False) else assert_same


def assert_near(found, expected, name, rounded_to=None):
    """To the bit on the CPU; of a GPU both are of forwards that may differ in their last bits, those of numbers that
    were rounded to a dtype."""
    if found.is_cuda:
        eps = torch.finfo(rounded_to or found.dtype).eps
        torch.testing.assert_close(found, expected, rtol=0, atol=8 * eps * expected.abs().max().item())
    else:
        assert_bitwise(found, expected, name)


def scores_of(options):
    """Without what changes no score."""
    return {name: x for name, x in options.items() if name not in ("sinks", "dropout_p", "seed")}


def named(q, k, v, options):
    return dict(q=q, k=k, v=v) | options


# ---- attention and attention_varlen


@pytest.mark.parametrize("case, device", on_devices(CASES))
def test_dense(case, device):
    (q, k, v), options = case.tensors(device), case.options(device)
    found = asked(flashtile.attention, named(q, k, v, options))["max_logits"]
    test_max_logits.check(found, q, k, **scores_of(options))


@pytest.mark.parametrize("case, device", on_devices(ragged.CASES))
def test_ragged(case, device):
    """Each sequence has its own, of the rows that count alone: the others are NaN."""
    (q, k, v), options = case.tensors(device), case.options(device)
    found = asked(flashtile.attention_varlen, named(q, k, v, options))["max_logits"]
    check_sequences(case, device, q, k, found)


def check_sequences(case, device, q, k, found):
    assert found.shape == (case.entries, case.heads_q)
    options = scores_of(Case.options(case, device))
    slopes = options.pop("alibi_slopes", None)
    for b, (rows, keys) in enumerate(case.spans()):
        own = slopes[b : b + 1] if slopes is not None and slopes.dim() == 2 else slopes
        test_max_logits.check(found[b : b + 1], q[None, rows], k[None, keys], alibi_slopes=own, **options)


@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_column_masks(device, head_dim, softcap):
    case = Case("masked", dtype=BF16, seqlen_q=300, seqlen_k=333, heads_q=4, heads_k=2, head_dim=head_dim)
    q, k, v = case.tensors(device)
    mask = random_mask(300, 333, batch=2, heads=2, run=7).to(device)
    options = dict(window=(90, 40), softcap=softcap)
    found = asked(flashtile.attention, dict(q=q, k=k, v=v, mask=mask) | options)["max_logits"]
    test_max_logits.check(found, q, k, mask=mask.to_dense(), **options)

    masks = [random_mask(257, 129, run=5, seed=1), ColumnMask.causal_document([3, 40]), ColumnMask.full(0, 5)]
    together = ColumnMask.concatenate(masks).to(device)
    cu_seqlens_q, cu_seqlens_k = together.cu_seqlens
    q, k, v = q.flatten(0, 1)[:300], k.flatten(0, 1)[:177], v.flatten(0, 1)[:177]
    tables = dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    found = asked(flashtile.attention_varlen, dict(q=q, k=k, v=v, mask=together, softcap=softcap) | tables)
    rows, keys = ragged.used_rows(**tables)
    for b, mask in enumerate(masks):
        largest, dense = found["max_logits"][b : b + 1], mask.to(device).to_dense()
        test_max_logits.check(largest, q[None, rows[b]], k[None, keys[b]], mask=dense, softcap=softcap)


def integers(generator, least, most, *shape):
    return torch.randint(least, most + 1, shape, generator=generator)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@settings(max_examples=60, deadline=None)
@hypothesis_given(data=st.data())
def test_scores_that_are_exact(device, data):
    """Of integers so small that float32 holds all sums: the very largest one, however it lies among the others, and
    where all of them are negative, which rows that do not count are not."""
    rows, keys = (data.draw(st.integers(1, 400)) for _ in range(2))
    group = data.draw(st.sampled_from([1, 2, 3, 8]))
    signs = data.draw(st.sampled_from([(-3, 3, -3, 3), (1, 3, -3, -1), (1, 3, 1, 3), (0, 0, 0, 0), (-200, 200, -9, 9)]))
    scale = data.draw(st.sampled_from([2.0**-30, 0.125, 1.0, -0.5, 0.0, 2.0**20]))
    head_dim, causal = data.draw(st.sampled_from([64, 128, 256])), data.draw(st.booleans())
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    q = integers(generator, *signs[:2], 2, rows, 2 * group, head_dim).to(device, F16)
    k = integers(generator, *signs[2:], 2, keys, 2, head_dim).to(device, F16)
    _, found = flashtile.attention(q, k, k, causal=causal, scale=scale, return_max_logits=True)
    assert_bitwise(found, reference.max_logits(q, k, causal=causal, scale=scale).float(), "max_logits")

    used = [data.draw(st.integers(0, n)) for n in (rows, keys)]
    tables = dict(cu_seqlens_q=ints([0, rows, 2 * rows], device), cu_seqlens_k=ints([0, keys, 2 * keys], device))
    tables |= dict(seqused_q=ints([used[0], rows], device), seqused_k=ints([keys, used[1]], device))
    flat_q, flat_k = (x.flatten(0, 1).clone() for x in (q, k))
    flat_q[used[0] : rows] *= -1
    flat_k[keys + used[1] :] *= -1
    _, found = flashtile.attention_varlen(
        flat_q, flat_k, flat_k, **tables, causal=causal, scale=scale, return_max_logits=True
    )
    parts = (q[:1, : used[0]], k[:1]), (q[1:], k[1:, : used[1]])
    exact = [reference.max_logits(*part, causal=causal, scale=scale).float() for part in parts]
    assert_bitwise(found, torch.cat(exact), "max_logits")


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads(threads):
    """Several have items of the same head."""
    q, k, v = Case("threads", dtype=F32, seqlen_q=500, seqlen_k=300, heads_q=4, heads_k=2).tensors()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        _, found = flashtile.attention(q, k, v, causal=True, return_max_logits=True)
    finally:
        torch.set_num_threads(before)
    _, alone = flashtile.attention(q, k, v, causal=True, return_max_logits=True)
    assert_bitwise(found, alone, "max_logits")


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_operands_that_are_copied_or_cast(device):
    """What kernels raise is what the caller gets, also in the call that is made again. Of 3 heads, whose largest scores
    are no multiple of 16 bytes."""
    case = Case("again", dtype=F16, heads_q=3, heads_k=1, alibi="per head")
    (q, k, v), options = case.tensors(device), case.options(device) | dict(return_max_logits=True)
    _, expected = flashtile.attention(q, k, v, **options)
    _, found = flashtile.attention(torch._neg_view(-q), k.mT.contiguous().mT, v, **options)
    assert_bitwise(found, expected, "max_logits")
    with torch.autocast(device, F16):
        _, found = flashtile.attention(q.double(), k.float(), v.double(), **options)
    assert_bitwise(found, expected, "max_logits")
    given = dict(k_cache=k, v_cache=v, cache_seqlens=90, alibi_slopes=options["alibi_slopes"], return_max_logits=True)
    _, expected = flashtile.attention_kvcache(q, **given)
    _, found = flashtile.attention_kvcache(torch._neg_view(-q), **given)
    assert_bitwise(found, expected, "max_logits")


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_out(device):
    (q, k, v), out = Case("out").tensors(device), torch.empty(2, 65, 2, 64, dtype=BF16, device=device)
    found = flashtile.attention(q, k, v, out=out, return_max_logits=True)
    assert found[0] is out
    assert_bitwise(found[1], flashtile.attention(q, k, v, return_max_logits=True)[1], "max_logits")


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("sinks", [None, 0.0])
@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_gradients(device, sinks, return_lse):
    """They are those of the other results, and it has none."""
    case = Case("gradients", dtype=BF16, heads_q=4, heads_k=2, causal=True, sinks=sinks, dropout_p=0.2)
    options = case.options(device) | dict(deterministic=True, return_lse=return_lse)
    inputs = case.tensors(device, requires_grad=True)
    if sinks is not None:
        options["sinks"] = options["sinks"].requires_grad_()
        inputs = [*inputs, options["sinks"]]

    def gradients(results):
        results = results if return_lse else results[:1]
        return torch.autograd.grad(results, inputs, [torch.ones_like(x) for x in results])

    expected = flashtile.attention(*inputs[:3], **options)
    *found, largest = flashtile.attention(*inputs[:3], **options, return_max_logits=True)
    assert not largest.requires_grad and found[0].requires_grad
    plain = {name: x for name, x in options.items() if name in ("causal",)}
    test_max_logits.check(largest, *(x.detach() for x in inputs[:2]), **plain)
    expected = expected if return_lse else (expected,)
    for a, b in zip(gradients(found), gradients(expected), strict=True):
        # That of float32 sinks is a sum over out, whose roundings cancel in part.
        assert_near(a, b, "gradients", F16 if a.dtype is F32 else None)


INVARIANT = [
    Ragged("used", dtype=BF16, lengths_q=(90, 0, 70, 64), lengths_k=(120, 30, 65, 64), used_q=(70, 0, 0, 64)),
    Ragged("tail", dtype=F16, heads_q=8, causal=True, tail=9, used_k=(90, 0, 33, 130, 0), alibi="per batch and head"),
    Ragged("sinks", dtype=BF16, heads_q=4, sinks=0.0, window=(30, 2), head_dim=128),
]


@pytest.mark.parametrize("capability", [1000, 80])
@pytest.mark.parametrize("case, device", on_devices(INVARIANT))
def test_batch_invariant(case, device, capability):
    """A GPU may compute the call over k and v as a cache, and rows that do not count as sequences of their own."""
    (q, k, v), options = case.tensors(device), case.options(device)
    with _capability.limited(capability):
        found = asked(flashtile.attention_varlen, named(q, k, v, options), batch_invariant=True)["max_logits"]
        with flashtile.batch_invariant_mode():
            _, again = flashtile.attention_varlen(q, k, v, **options, return_max_logits=True)
    assert_bitwise(again, found, "max_logits")
    check_sequences(case, device, q, k, found)


# ---- where PyTorch traces: by a call of its own

DENSE = Case("dense", heads_q=4, heads_k=2, causal=True, sinks=0.0, dropout_p=0.2, softcap=9.0, alibi="per head")
SEQUENCES = Ragged(
    "ragged", heads_q=4, heads_k=2, lengths_q=(70, 0, 9), lengths_k=(99, 4, 9), tail=3, used_q=(60, 0, 9)
)
TRACED_CACHES = [
    Cached("appended", dtype=BF16, new=3, seqlen_q=3, page_size=16, rotary=32, sinks=0.0),
    Cached("ragged", dtype=F16, new=0, lengths_q=(1, 0, 17, 5), tail=3, alibi="per batch and head", softcap=9.0),
    Cached("indexed", dtype=F16, seqlen_q=5, indexed=True, leftpad=(3, 0, 0, 30), window=(20, 5), causal=False),
    Masked("drafts", dtype=BF16, seqlen_q=9, new=9, trees=True, each=True, columns=9),
]


def problems():
    for case, function in ((DENSE, flashtile.attention), (SEQUENCES, flashtile.attention_varlen)):
        yield pytest.param(function, lambda device, case=case: named(*case.tensors(device), case.options(device)))
    for case in TRACED_CACHES:
        yield pytest.param(flashtile.attention_kvcache, lambda device, case=case: case.arguments(device), id=str(case))


def tensors_as(given, convert):
    return {name: convert(x) if isinstance(x, torch.Tensor) else x for name, x in given.items()}


def assert_same_largest(found, expected):
    """Multiplied with a power of two, scores are rounded as ever; a device may take another kernel."""
    (assert_close if expected.is_cuda else assert_same)(dict(lse=found), dict(lse=expected))


@quiet
@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("function, make", list(problems()))
def test_compiled(function, make, device):
    given = make(device)
    fresh = with_own_caches if "k_cache" in given else dict
    expected = function(**fresh(given), return_lse=True, return_max_logits=True)
    torch.compiler.reset()
    used = fresh(given)
    found = compiled(lambda given: function(**given, return_lse=True, return_max_logits=True))(used)
    assert_close(dict(out=found[0], lse=found[1]), dict(out=expected[0], lse=expected[1]))
    assert_same_largest(found[2], expected[2])
    torch.compiler.reset()
    found = compiled(lambda given: function(**given, return_max_logits=True))(fresh(given))
    assert len(found) == 2
    assert_same_largest(found[1], expected[2])


@pytest.mark.parametrize("function, make", list(problems())[:-1])
def test_fake(function, make):
    given = make("cpu")
    expected = function(**(with_own_caches(given) if "k_cache" in given else given), return_max_logits=True)
    with FakeTensorMode() as mode:
        found = function(**tensors_as(given, mode.from_tensor), return_max_logits=True)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]


def test_transforms():
    """Of torch.func: the gradient of out, beside which it stands, and many calls at once."""
    q, k, v = Case("transformed", dtype=F32, batch=3, heads_q=4, heads_k=2).tensors()

    def loss(q):
        out, largest = flashtile.attention(q, k, v, causal=True, return_max_logits=True)
        return out.square().sum(), largest

    _, expected = loss(q)
    _, found = torch.func.grad(loss, has_aux=True)(q)
    assert_same_largest(found, expected)

    def entry(q, k, v):
        return flashtile.attention(q[None], k[None], v[None], causal=True, return_max_logits=True)[1][0]

    assert_same_largest(torch.func.vmap(entry)(q, k, v), expected)

    def over_entry(q, k, v):
        given = dict(k_new=q[None, :4, :2], v_new=q[None, :4, :2], cache_seqlens=60)
        return flashtile.attention_kvcache(q[None], k[None], v[None], **given, return_max_logits=True)[1][0]

    caches = k.clone(), v.clone(), k.clone(), v.clone()
    alone = [over_entry(q[b], caches[0][b], caches[1][b]) for b in range(3)]
    assert_same_largest(torch.func.vmap(over_entry)(q, *caches[2:]), torch.stack(alone))


@pytest.mark.parametrize("wrong", [dict(scale=1e20), dict(softcap=3e17), dict(softcap=-1.0)], ids=str)
def test_a_traced_call_writes_nothing_when_it_is_refused(wrong):
    """It finds the largest scores in a call of its own, which has limits that the first one does not have."""
    (name, value), q = *wrong.items(), torch.ones(1, 2, 1, 8)
    place, caches = torch.zeros_like(q), torch.zeros(2, 1, 4, 1, 8)
    message = f": {name} is {re.escape(str(value))}, expected"
    with FlopCounterMode(display=False):
        with pytest.raises(ValueError, match=f"^attention{message}"):
            flashtile.attention(q, q, q, return_max_logits=True, out=place, **wrong)
        with pytest.raises(ValueError, match=f"^attention_kvcache{message}"):
            flashtile.attention_kvcache(
                q, *caches, cache_seqlens=0, k_new=q, v_new=q, return_max_logits=True, out=place, **wrong
            )
    assert not place.any() and not caches.any()


def test_queries_that_lie_in_the_cache():
    """They are those from before the new rows were written, of which vmap makes a call of the operator."""
    k_cache, v_cache = torch.randn(2, 1, 40, 2, 64)
    k_new, v_new = torch.randn(2, 1, 4, 2, 64)

    def call(k_cache, v_cache):
        given = dict(cache_seqlens=30, k_new=k_new, v_new=v_new, return_max_logits=True)
        return flashtile.attention_kvcache(k_cache[:, 30:34], k_cache, v_cache, **given)

    expected = call(k_cache.clone(), v_cache.clone())
    found = torch.func.vmap(call)(k_cache.clone()[None], v_cache.clone()[None])
    for x, y in zip(found, expected, strict=True):
        assert_bitwise(x[0], y)


# ---- what is refused, and what is planned


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_it_is_not_served_of_e4m3_numbers(device):
    q = torch.ones(1, 16, 2, 64, device=device).to(E4M3)
    message = "return_max_logits is True, expected False with q of torch.float8_e4m3fn; nearest supported: "
    with pytest.raises(NotImplementedError, match=f"^attention: {message}"):
        flashtile.attention(q, q, q, return_max_logits=True)
    flat, begins = q[0], ints([0, 16], device)
    with pytest.raises(NotImplementedError, match=f"^attention_varlen: {message}"):
        flashtile.attention_varlen(flat, flat, flat, cu_seqlens_q=begins, cu_seqlens_k=begins, return_max_logits=True)


BAD = {
    "shape": (torch.ones(2, 3), ValueError, r"has shape \(2, 3\), expected \(2, 4\) = \(B, H_q\)"),
    "rank": (torch.ones(8), ValueError, r"has shape \(8,\), expected 2 dimensions = \(B, H_q\)"),
    "dtype": (torch.ones(2, 4, dtype=BF16), TypeError, "has dtype bfloat16, expected float32"),
    "strides": (torch.ones(4, 2).T, ValueError, r"has strides \(1, 2\), expected a contiguous tensor"),
    "no tensor": (3, TypeError, "is of type int, expected a torch.Tensor"),
}


@pytest.mark.parametrize("name", BAD)
def test_the_module_looks_at_what_it_raises(name):
    largest, exception, message = BAD[name]
    q, k, v = Case("bad", heads_q=4, heads_k=2).tensors()
    with pytest.raises(exception, match=f"^attention: max_logits {message}"):
        _C.forward(q, k, v, attention_options(max_logits=largest))
    options = (None, None, None, True, None, None, 0.0, True, 0, False, False, largest)
    tensors = (None,) * 4 + (ints([9, 9]),) + (None,) * 6
    with pytest.raises(exception, match=f"^attention_kvcache: max_logits {message}"):
        _C.kvcache(q, k, v, tensors, options)


@pytest.mark.parametrize(
    "rows, keys, head_dim", [(5, 9, 64), (0, 9, 64), (700, 300, 64), (4, 20000, 128), (33, 0, 192)]
)
@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_what_memory_held_is_no_score(device, rows, keys, head_dim):
    case = Case("held", dtype=F16, batch=2, seqlen_q=rows, seqlen_k=keys, heads_q=4, heads_k=2, head_dim=head_dim)
    q, k, v = case.tensors(device)
    held = [torch.full((2, 4), 1e30, device=device) for _ in range(3)]
    _C.forward(q, k, v, attention_options(max_logits=held[0]))
    test_max_logits.check(held[0], q, k)
    used, queries = ints([keys, keys // 2], device), ints([0, 2 * rows, 2 * rows], device)
    nothing, options = (None,) * 4, (None, None, None, True, None, None, 0.0, True, 0, False, False)
    call_kvcache(k, v, (q, *nothing), (used, None, None, None, None, None, None), (*options, held[1]))
    for b, n in enumerate((keys, keys // 2)):
        test_max_logits.check(held[1][b : b + 1], q[b : b + 1], k[b : b + 1, :n], causal=True)
    flat = q.flatten(0, 1)
    call_kvcache(k, v, (flat, *nothing), (used, None, None, None, queries, None, None), (*options, held[2]))
    test_max_logits.check(held[2][:1], flat[None], k[:1], causal=True)
    assert bool((held[2][1] == -math.inf).all())


@pytest.mark.parametrize("wrong", [dict(q=None), dict(q=torch.ones(5)), dict(q=torch.ones(1, 5, 2, 12)), dict(k=3)])
def test_others_are_refused_as_ever(wrong):
    given = dict(q=torch.ones(1, 5, 2, 8), k=torch.ones(1, 5, 2, 8), v=torch.ones(1, 5, 2, 8)) | wrong
    with pytest.raises((TypeError, ValueError)) as expected:
        flashtile.attention(**given)
    with pytest.raises(expected.type) as found:
        flashtile.attention(**given, return_max_logits=True)
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("device", ["cpu", "H100", "A100"])
def test_plans(device):
    """They are the same but on Hopper, where a forward that finds the largest scores has kernels of its own."""
    q, k, v = Case("planned", dtype=BF16).tensors()
    plans = [flashtile.explain(q, k, v, device=device, return_max_logits=wanted) for wanted in (False, True)]
    if device == "H100":
        assert "_max_logits" not in plans[0] and "_sinks_max_logits" in plans[1]
    else:
        assert plans[0] == plans[1]
    given = Cached("planned", dtype=BF16).arguments()
    plans = [flashtile.explain(**given, device=device, return_max_logits=wanted) for wanted in (False, True)]
    assert plans[0] == plans[1]


@pytest.mark.gpu
def test_a_captured_graph():
    """Each replay begins with -inf."""
    q, k, v = Case("captured", dtype=BF16, seqlen_q=300, seqlen_k=300).tensors("cuda")
    flashtile.attention(q, k, v, return_max_logits=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, found = flashtile.attention(q, k, v, return_max_logits=True)
    for factor in (4.0, -0.01):
        q.mul_(factor)
        graph.replay()
        assert_bitwise(found, flashtile.attention(q, k, v, return_max_logits=True)[1], "max_logits")


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_heads_that_see_nothing(device):
    """Beside heads that see something, and where there is no row at all."""
    q, k, v = Case("blind", heads_q=4, heads_k=2).tensors(device)
    _, found = flashtile.attention(q, k, v, window=(3, -5), return_max_logits=True)
    assert_bitwise(found, torch.full((2, 4), -math.inf, device=device), "max_logits")
    full = ColumnMask.full(65, 97)
    none = ColumnMask(ints([0, 65, 0, 0]).expand(1, 1, 97, 4), 65)
    mask = ColumnMask(torch.cat([full.ranges, none.ranges], 1), 65).to(device)
    _, found = flashtile.attention(q, k, v, mask=mask, return_max_logits=True)
    assert found.isneginf().tolist() == 2 * [[False, False, True, True]]
