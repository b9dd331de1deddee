"""attention_kvcache: accuracy over the cases of caches and over random problems, rotation, autograd, and where tables
and operands may lie."""

import dataclasses

import cached
import pytest
import torch
from cached import REMOVED, Cached, arguments, ints, numbers, results, with_own_caches
from cases import BF16, DEVICE_PARAMS, F16, F32, on_devices
from compare import assert_accurate, assert_bitwise, assert_same, largest, score_rounding
from hypothesis import given as hypothesis_given
from hypothesis import settings
from hypothesis import strategies as st
from test_properties import options_and_sizes, random_problems

import flashtile


def check(case, device, attention_kvcache):
    given = case.arguments(device)
    copies = {name: x.clone() for name, x in given.items() if isinstance(x, torch.Tensor)}
    exact_out, exact_lse = cached.attention(given)
    rough_out, _ = cached.attention(given, dtype=case.dtype)
    _, rough_lse = cached.attention(given, dtype=F32)  # statistics are float32 for every dtype
    found = results(given, attention_kvcache)

    out, lse = found["out"], found["lse"]
    assert out.dtype is case.dtype and lse.dtype is F32
    assert out.is_contiguous() and lse.is_contiguous()
    rotation = rotation_rounding(case, given)
    assert_accurate(
        out, exact_out, rough_out, "out", 2 * score_rounding(exact_lse, exact_out) + 2 * rotation * largest(exact_out)
    )
    assert_accurate(lse, exact_lse, rough_lse, "lse", 2 * score_rounding(exact_lse) + rotation)
    check_caches(case, found, given)
    for name, x in copies.items():
        assert_bitwise(given[name], x, name)
    assert_bitwise(attention_kvcache(**with_own_caches(given)), out)


eps32 = torch.finfo(F32).eps


def rotation_rounding(case, given):
    """Of a score: an element of a rotated query may be rounded to the other side than the formula's."""
    if not case.rotary:
        return 0.0
    scale = case.head_dim**-0.5 if case.scale is None else abs(case.scale)
    k_cache, _ = cached.appended(given)
    return torch.finfo(case.dtype).eps * scale * largest(given["q"]) * largest(k_cache)


def check_caches(case, found, given):
    """Appended rows are k_new and v_new; all others have their bits, NaN where nothing counts."""
    expected = dict(zip(("k_cache", "v_cache"), cached.appended(given), strict=True))
    assert_bitwise(found["v_cache"], expected["v_cache"], "v_cache")
    if not case.rotary:
        assert_bitwise(found["k_cache"], expected["k_cache"], "k_cache")
        return
    eps = torch.finfo(case.dtype).eps
    torch.testing.assert_close(found["k_cache"], expected["k_cache"], rtol=eps, atol=8 * eps32, equal_nan=True)
    for b, (held, end) in enumerate(cached.counted(given)):
        for x in (found["k_cache"], expected["k_cache"]):
            x[cached.place_of(given, b, held, end)] = 0
    assert_bitwise(found["k_cache"], expected["k_cache"], "k_cache")


@pytest.mark.parametrize("case, device", on_devices(cached.CASES))
def test_each_case(case, device, attention_kvcache):
    check(case, device, attention_kvcache)


SPLIT = [
    dataclasses.replace(case, num_splits=1 + i % 7)
    for i, case in enumerate(cached.CASES)
    if case.name.startswith(("D", "group", "long", "ragged", "everything", "rotary", "no_", "padded", "sinks"))
]
INVARIANT = [dataclasses.replace(case, batch_invariant=True) for case in cached.CASES]


@pytest.mark.parametrize("case, device", on_devices(SPLIT, ["cuda"]))
def test_split_cases(case, device, attention_kvcache):
    check(case, device, attention_kvcache)


@pytest.mark.parametrize("case, device", on_devices(INVARIANT, ["cuda"]))
def test_batch_invariant_cases(case, device, attention_kvcache):
    check(case, device, attention_kvcache)


# ---- rotation


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype, device", [(F32, "cpu"), *((d, p) for d in (F16, BF16) for p in DEVICE_PARAMS[:1])])
def test_rotated_keys_are_rounded_once(dtype, device, interleaved):
    check_rotated_keys(dtype, device, interleaved)


@pytest.mark.gpu
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_rotated_keys_are_rounded_once_on_gpus(dtype, interleaved):
    check_rotated_keys(dtype, "cuda", interleaved)


def check_rotated_keys(dtype, device, interleaved):
    case = Cached("keys", dtype=dtype, held=(3000, 0, 7), new=33, rotary=96, head_dim=128, interleaved=interleaved)
    given = case.arguments(device)
    found = results(given)["k_cache"]
    for b, (held, end) in enumerate(cached.counted(given)):
        rows = found[cached.place_of(given, b, held, end)].double()
        exact_given = given | {name: given[name].double() for name in ("k_new", "rotary_cos", "rotary_sin")}
        exact = cached.rotated_by(exact_given, exact_given["k_new"][b], held)
        # Half a spacing of the dtype, and the roundings of float32 products of numbers up to 5.
        bar = torch.finfo(dtype).eps / 2 * exact.abs() + 8 * eps32 + torch.finfo(dtype).smallest_normal
        assert ((rows - exact).abs() <= bar).all()
        assert torch.equal(rows[..., 96:], exact[..., 96:]), "what is behind R elements changes"


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_only_distances_count(device, interleaved):
    """All that a rotation is for: scores of rotated queries and keys, moved together, are the same."""
    dtype = F32 if device == "cpu" else F16
    case = Cached("moved", dtype=dtype, held=(0,), new=60, seqlen_q=60, rotary=64, interleaved=interleaved, room=2000)
    given = case.arguments(device)
    angles = torch.outer(torch.arange(cached.POSITIONS), 10.0 ** -torch.linspace(0, 3, 32))
    given |= {f"rotary_{f}": getattr(angles, f)().to(device, dtype) for f in ("cos", "sin")}
    lses = [
        flashtile.attention_kvcache(
            **with_own_caches(given) | dict(cache_seqlens=first, leftpad=ints([first], device), return_lse=True)
        )[1]
        for first in (0, 1, 1500)
    ]
    for lse in lses[1:]:
        torch.testing.assert_close(lse, lses[0], rtol=0, atol=5e-5 if dtype is F32 else 2e-2)


# ---- autograd


def test_inputs_that_require_a_gradient_are_refused():
    case = Cached("gradients", dtype=F32, new=1, rotary=16, sinks=0.0, alibi="per head")
    floats = ("q", "k_cache", "v_cache", "k_new", "v_new", "rotary_cos", "rotary_sin", "alibi_slopes", "sinks")
    for name in floats:
        given = case.arguments()
        given[name].requires_grad_()
        with pytest.raises(NotImplementedError, match=rf"^attention_kvcache: {name} requires grad, expected .*no_grad"):
            flashtile.attention_kvcache(**given)
        with torch.no_grad():
            assert not flashtile.attention_kvcache(**given).requires_grad
    for name in ("scale", "softcap"):
        with pytest.raises(NotImplementedError, match=rf"^attention_kvcache: {name} requires grad, expected .*detach"):
            flashtile.attention_kvcache(**case.arguments() | {name: torch.tensor(0.5, requires_grad=True)})
    given = case.arguments()
    with torch.autograd.forward_ad.dual_level():
        given["q"] = torch.autograd.forward_ad.make_dual(given["q"], given["q"])
        with pytest.raises(NotImplementedError, match=r"^attention_kvcache: q carries a forward-mode tangent"):
            flashtile.attention_kvcache(**given)
        number = torch.autograd.forward_ad.make_dual(torch.tensor(0.5), torch.tensor(1.0))
        with pytest.raises(NotImplementedError, match=r"^attention_kvcache: scale carries a forward-mode tangent"):
            flashtile.attention_kvcache(**case.arguments() | dict(scale=number))


def test_autograd_notices_a_cache_that_has_changed():
    given = Cached("changed", dtype=F32, held=(40,), new=1).arguments()
    for name in ("k_cache", "v_cache"):
        x = torch.ones_like(given[name], requires_grad=True)
        total = (x * given[name]).sum()
        flashtile.attention_kvcache(**given)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()
    unchanged = {name: x for name, x in given.items() if name not in ("k_new", "v_new")}
    total = (x * given["v_cache"]).sum()
    flashtile.attention_kvcache(**unchanged)
    total.backward()


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_inference_mode(device):
    case = Cached("inference", dtype=F16, new=1)
    expected = results(case.arguments(device))
    with torch.inference_mode():
        assert_same(results(case.arguments(device)), expected)


# ---- random problems


@st.composite
def cached_cases(draw):
    fields = draw(options_and_sizes())
    fields.pop("dropout_p")
    lengths = st.integers(0, 40)
    count = draw(st.integers(0, 4))
    held = tuple(draw(st.lists(st.integers(0, 150), min_size=count, max_size=count)))
    ragged = draw(st.booleans())
    fields["new"] = draw(st.none() | lengths)
    if ragged:
        fields["lengths_q"] = tuple(draw(st.lists(lengths, min_size=count, max_size=count)))
        fields["tail"] = draw(st.sampled_from([0, 0, 7]))
    else:
        fields["seqlen_q"] = draw(lengths)
    if draw(st.booleans()):
        fields |= dict(page_size=draw(st.integers(1, 40)), shared=draw(st.booleans()))
    else:
        fields["indexed"] = draw(st.booleans())
    if draw(st.booleans()):
        fields["leftpad"] = tuple(draw(st.integers(0, n)) for n in held)
    queries = fields["lengths_q"] if ragged else (fields["seqlen_q"],) * count
    added = (0,) * count if fields["new"] is None else queries if ragged else (fields["new"],) * count
    if any(n > m + a for n, m, a in zip(queries, held, added, strict=True)):
        fields["causal"] = True  # else a query that is rotated may see keys, and have no position
    fields["rotary"] = 16 * draw(st.integers(0, fields["head_dim"] // 16))
    return Cached("random", held=held, interleaved=draw(st.booleans()), room=draw(lengths), **fields)


@settings(random_problems, max_examples=150)
@hypothesis_given(cached_cases())
def test_random_problems(case):
    check(case, "cpu", flashtile.attention_kvcache)


# ---- tables


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_what_is_not_needed_is_not_looked_at(device):
    """Pages behind a sequence's rows or of padding alone, and entries shared by sequences that nothing is given."""
    given = arguments("paged", {}, device)
    expected = results(given)
    given["block_table"][:, 4] = -1
    assert_same(results(given), expected)
    given["leftpad"][:] = ints([10, 20], device)
    expected = results(given)
    given["block_table"][0, 0], given["block_table"][1, :2] = 99, -7
    assert_same(results(given), expected)
    shared = arguments("indexed", dict(cache_batch_idx=numbers(2, 2), k_new=REMOVED, v_new=REMOVED), device)
    out = flashtile.attention_kvcache(**shared)
    assert out.shape == shared["q"].shape and out.isfinite().all()


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_tables_may_be_parts_of_larger_ones(device):
    given = arguments("paged", {}, device)
    expected = results(given)
    wide = torch.full((2, 9), 12, dtype=torch.int32, device=device)
    wide[:, :5] = given["block_table"]
    assert_same(results(given | dict(block_table=wide[:, :5])), expected)


def test_new_rows_may_overlap_with_their_place():
    """On the CPU, where one row is written at a time."""
    memory = torch.randn(2, 10 * 64 + 8)
    k_cache, v_cache = memory[:, : 10 * 64].view(2, 1, 10, 1, 64)
    k_new, v_new = memory[:, 5 * 64 + 8 : 6 * 64 + 8].view(2, 1, 1, 1, 64)  # row 5, and eight elements on
    expected = k_new.clone(), v_new.clone()
    flashtile.attention_kvcache(torch.randn(1, 1, 1, 64), k_cache, v_cache, cache_seqlens=5, k_new=k_new, v_new=v_new)
    assert torch.equal(k_cache[:, 5:6], expected[0])
    assert torch.equal(v_cache[:, 5:6], expected[1])


def held_rows(x, name, first):
    """Views of rows of the caches, as a caller has them who keeps everything in one place."""
    return x[name][:, first : first + 3]


PLACES = {
    "their destination": dict(k_new=("k_cache", 5), v_new=("v_cache", 5)),
    "a row before": dict(k_new=("k_cache", 4), v_new=("v_cache", 4)),
    "a row behind": dict(k_new=("k_cache", 6), v_new=("v_cache", 6)),
    "each other's destination": dict(k_new=("v_cache", 5), v_new=("k_cache", 5)),
    "queries": dict(q=("k_cache", 6)),
}


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_operands_may_lie_in_the_caches(place, rotary, device):
    """They are what they were before the call."""
    shapes = dict(
        q=(2, 3, 2, 64), k_cache=(2, 20, 2, 64), v_cache=(2, 20, 2, 64), k_new=(2, 3, 2, 64), v_new=(2, 3, 2, 64)
    )
    given = {name: torch.randn(shape).to(device, BF16) for name, shape in shapes.items()}
    given |= dict(cache_seqlens=torch.tensor([5, 5], dtype=torch.int32, device=device))
    if rotary:
        given |= {name: torch.randn(30, 16).to(device, BF16) for name in ("rotary_cos", "rotary_sin")}
    given |= {name: held_rows(given, *where) for name, where in PLACES[place].items()}
    expected = results(given)  # whose caches are copies
    out, lse = flashtile.attention_kvcache(**given, return_lse=True)
    assert_same(dict(out=out, lse=lse, k_cache=given["k_cache"], v_cache=given["v_cache"]), expected)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_caches_may_lie_between_each_other(paged, device):
    """(pages, 2, page_size, H, D) and (pages, page_size, H, D + D_v)."""
    case = Cached("interleaved", dtype=BF16, new=2, seqlen_q=2, page_size=16 if paged else None)
    given = case.arguments(device)
    expected = results(given)
    caches = [given["k_cache"], given["v_cache"]]
    stacked = torch.stack(caches, 1).unbind(1)
    packed = torch.cat(caches, -1).split([x.shape[-1] for x in caches], -1)
    for k_cache, v_cache in (stacked, packed):
        found = given | dict(k_cache=k_cache, v_cache=v_cache)
        out, lse = flashtile.attention_kvcache(**found, return_lse=True)
        assert_same(dict(out=out, lse=lse, k_cache=k_cache, v_cache=v_cache), expected)


def test_one_cache_may_be_both_where_new_rows_are_too():
    given = Cached("both", dtype=F32, new=2, seqlen_q=2).arguments()
    cache, new = given["k_cache"].clone(), given["k_new"]
    expected = results(given | dict(v_cache=given["k_cache"].clone(), v_new=new.clone()))
    out = flashtile.attention_kvcache(**{**given, "k_cache": cache, "v_cache": cache, "v_new": new})
    assert_same(
        dict(out=out, k_cache=cache, v_cache=cache), {name: expected[name] for name in ("out", "k_cache", "v_cache")}
    )
    read = {name: x for name, x in given.items() if not name.endswith("_new")} | dict(k_cache=cache, v_cache=cache)
    assert_bitwise(
        flashtile.attention_kvcache(**read), flashtile.attention_kvcache(**{**read, "v_cache": cache.clone()})
    )
