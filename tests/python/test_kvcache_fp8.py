"""attention_kvcache over caches of 8-bit numbers: beside attention over the numbers times their descales, for the cases
of caches; rows that are appended; what is unusual."""

import dataclasses
import math

import cached
import pytest
import torch
from cached import Cached, ints, with_own_caches
from cases import BF16, DEVICE_PARAMS, F16, F32
from compare import assert_accurate, assert_bitwise, largest, score_rounding
from hypothesis import given as hypothesis_given
from hypothesis import settings
from hypothesis import strategies as st
from test_kvcache import cached_cases, rotation_rounding
from test_kvcache_masks import Masked
from test_properties import random_problems

import flashtile
from flashtile import _C

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
KINDS = ("none", "all", "heads", "rows")  # what has a descale of its own
NAMES = ("k_cache", "v_cache")


def numbers(x, stored):
    """The nearest ones; what is beyond the largest is that."""
    return x.float().clamp(-LARGEST[stored], LARGEST[stored]).to(stored)


def descale_of(kind, given, name, seed):
    """Powers of two, so that numbers times them are numbers of 16 bits; of rows they are those of NaN, too."""
    cache = given[name]
    shape = dict(all=(1,), heads=(len(given["cache_seqlens"]), cache.shape[2]), rows=cache.shape[:3])[kind]
    powers = torch.randint(-5, 3, shape, generator=torch.Generator().manual_seed(seed))
    return (2.0**powers).to(cache.device)


def in_8_bits(given, kind, stored):
    """The same arguments with caches of 8-bit numbers."""
    given = dict(given)
    for seed, name in enumerate(NAMES):
        if kind != "none":
            given[f"{name[0]}_descale"] = descale_of(kind, given, name, seed)
        given[name] = numbers(given[name] * (1 if stored is E5M2 else 2), stored)
    return given


def whole(given, dtype):
    """Arguments of the same call over numbers times their descales, in `dtype`, without descales."""
    found = {name: x for name, x in given.items() if not name.endswith("_descale")}
    for name in NAMES:
        cache, descale = given[name].double(), given.get(f"{name[0]}_descale")
        if descale is None or descale.dim() == 1:
            found[name] = (cache * (1 if descale is None else descale.double())).to(dtype)
        elif descale.dim() == 3:
            found[name] = (cache * descale[..., None].double()).to(dtype)
        else:  # sequences may share pages, so that each gets an entry of its own
            entries = [cache[cached.place_of(given, b, 0, n)] for b, n in enumerate(given["cache_seqlens"].tolist())]
            rows = max((len(x) for x in entries), default=0)
            apart = torch.full((len(entries), max(rows, 1), *cache.shape[2:]), math.nan, dtype=torch.float64)
            apart = apart.to(cache.device)
            for b, x in enumerate(entries):
                apart[b, : len(x)] = x * descale[b][:, None].double()
            found[name] = apart.to(dtype)
    if given.get("k_descale") is not None and given["k_descale"].dim() == 2:
        found.pop("block_table", None)
        found.pop("cache_batch_idx", None)
    return found


def after(given, caches):
    """Arguments of a call that finds the new rows in its caches."""
    found = {name: x for name, x in given.items() if name not in ("k_new", "v_new")} | caches
    found["cache_seqlens"] = ints([end for _, end in cached.counted(given)], given["q"].device)
    return found


def check_appended(given, caches):
    """Rows that are given become the nearest numbers; where each has a descale, its largest element the largest."""
    for b, (held, end) in enumerate(cached.counted(given)):
        if held == end:
            continue
        place = cached.place_of(given, b, held, end)
        rows = cached.rotated_by(given, cached.rows_of(given, "k_new")[b], held), cached.rows_of(given, "v_new")[b]
        for name, x in zip(NAMES, rows, strict=True):
            stored, descale = given[name].dtype, caches.get(f"{name[0]}_descale")
            if descale is None:
                descale = torch.ones((), device=x.device)
            elif descale.dim() == 3:
                descale = descale[place]
                rounded = 1e-2 if "rotary_cos" in given and name == "k_cache" else 1e-6
                largest_of = x.float().abs().amax(-1)
                torch.testing.assert_close(descale, largest_of / LARGEST[stored], rtol=rounded, atol=0)
                descale = descale[..., None]
            elif descale.dim() == 2:
                descale = descale[b][:, None]
            found, expected = caches[name][place], numbers(x.float() / descale, stored)
            if name == "v_cache" or "rotary_cos" not in given:
                assert_bitwise(found.view(torch.uint8), expected.view(torch.uint8), name)
            else:  # an element of a rotated row may be rounded to the other side, and its number then
                step = 0.13 if stored is E4M3 else 0.26
                torch.testing.assert_close(found.float(), expected.float(), rtol=step, atol=0.02)
        for name in NAMES:
            caches[name][place] = given[name][place]
    for name in NAMES:
        assert_bitwise(caches[name].view(torch.uint8), given[name].view(torch.uint8), name)


def check(case, device, kind, stored, attention_kvcache=flashtile.attention_kvcache):
    given = in_8_bits(case.arguments(device), kind, stored)
    used = with_own_caches(given) | {name: x.clone() for name, x in given.items() if name.endswith("descale")}
    out, lse = attention_kvcache(**used, return_lse=True)
    caches = {name: used[name] for name in used if name in NAMES or name.endswith("descale")}
    now = after(given, caches)
    exact_out, exact_lse = cached.attention(whole(now, torch.float64))
    rough_out, _ = cached.attention(whole(now, case.dtype), dtype=case.dtype)
    _, rough_lse = cached.attention(whole(now, case.dtype), dtype=F32)
    assert out.dtype is case.dtype and lse.dtype is F32
    rotation = rotation_rounding(case, whole(now, torch.float64))
    assert_accurate(
        out, exact_out, rough_out, "out", 2 * score_rounding(exact_lse, exact_out) + 2 * rotation * largest(exact_out)
    )
    assert_accurate(lse, exact_lse, rough_lse, "lse", 2 * score_rounding(exact_lse) + rotation)
    if device == "cpu":
        expected = flashtile.attention_kvcache(**whole(now, case.dtype), return_lse=True)
        assert_bitwise(out, expected[0], "out")
        assert_bitwise(lse, expected[1], "lse")
    check_appended(given, {name: x.clone() for name, x in caches.items()})
    again = with_own_caches(given) | {name: x.clone() for name, x in given.items() if name.endswith("descale")}
    assert_bitwise(attention_kvcache(**again), out)


def _cases():
    """Every fourth case, by all kinds of descales and both kinds of numbers in turn."""
    fitting = [c for c in cached.CASES if c.head_dim % 16 == 0 and (c.head_dim_v or 16) % 16 == 0]
    fitting = [
        dataclasses.replace(c, dtype=(F16, BF16)[i % 2] if c.dtype is F32 else c.dtype) for i, c in enumerate(fitting)
    ]
    fitting = [c for c in fitting if c.layout not in ("misaligned", "gaps", "packed") and c.magnitude < 100]
    return [
        pytest.param(case, KINDS[i % 4], (E4M3, E5M2)[i // 4 % 2], id=f"{case.name}-{case.dtype}-{KINDS[i % 4]}-{i}")
        for i, case in enumerate(fitting)
    ]


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("case, kind, stored", _cases())
def test_each_case(case, kind, stored, device):
    check(case, device, kind, stored)


# Without a mask Hopper would widen the last one's cache ahead, and the second one's where rows have descales.
MASKED = [
    Masked(f"S{queries}", dtype=BF16, held=held, seqlen_q=queries, columns=queries + 5, page_size=16, head_dim=256)
    for queries, held in ((3, (97, 40, 0, 130)), (40, (97, 40, 0, 130)), (400, (1000, 450)))
]


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", MASKED, ids=str)
def test_under_a_column_mask(case, kind, device):
    check(case, device, kind, E4M3)


@settings(random_problems, max_examples=60)
@hypothesis_given(cached_cases(), st.sampled_from(KINDS), st.sampled_from((E4M3, E5M2)))
def test_random_problems(case, kind, stored):
    check(case, "cpu", kind, stored)


VARIED = [p.values[0] for p in _cases() if p.values[0].name.startswith(("D", "group", "long", "ragged", "everything"))]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", VARIED[::5], ids=str)
def test_splits_and_invariance(case, kind):
    check(dataclasses.replace(case, num_splits=3), "cuda", kind, E4M3)
    check(dataclasses.replace(case, batch_invariant=True), "cuda", kind, E5M2)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("stored", [E4M3, E5M2])
def test_every_number(stored, dtype):
    """Each of the 256 is read and written right, on a CPU; kernels see them in test_numbers_on_gpus."""
    check_numbers(stored, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("stored", [E4M3, E5M2])
def test_numbers_on_gpus(stored, dtype):
    check_numbers(stored, dtype, "cuda")


def check_numbers(stored, dtype, device):
    every = torch.arange(256, dtype=torch.uint8).view(stored).view(1, 1, 1, 256).to(device)
    q = torch.zeros(1, 1, 1, 256, dtype=dtype, device=device)
    out = flashtile.attention_kvcache(q, torch.zeros_like(every), every, cache_seqlens=1)
    assert torch.equal(out.nan_to_num(1e4), every.to(dtype).nan_to_num(1e4))
    # A query that picks one number of the key gives it as the score, which lse is.
    finite = every.float().isfinite()
    keys = torch.where(finite, every.float(), 1.0).to(stored).expand(1, 1, 1, 256)
    pick = torch.eye(256, dtype=dtype, device=device).view(1, 256, 1, 256)
    _, lse = flashtile.attention_kvcache(pick, keys, keys, cache_seqlens=1, causal=False, scale=1.0, return_lse=True)
    torch.testing.assert_close(lse[0, 0], keys[0, 0, 0].float(), rtol=1e-6, atol=1e-6)
    # Written: numbers, what lies between them, and what is beyond.
    x = torch.cat([every.float().nan_to_num(0, 0, 0).flatten()] * 4)
    x = x * torch.tensor([1.0, 1.03, 0.97, 1.0625], device=device).repeat_interleave(256)
    x = torch.cat([x, torch.tensor([math.inf, -math.inf, math.nan, 1e30, 6e4, 0.0, 2.0**-10, 3e-6], device=device)])
    x = torch.nn.functional.pad(x, (0, -len(x) % 256)).view(1, -1, 1, 256).to(dtype)
    cache = torch.zeros(x.shape, device=device).to(stored)
    other = cache.clone()
    flashtile.attention_kvcache(q, cache, other, k_new=x, v_new=x, cache_seqlens=0)
    for found in (cache, other):
        assert torch.equal(found.float().nan_to_num(1e6), numbers(x, stored).float().nan_to_num(1e6))


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_without_the_exchange_table(device):
    """By their attributes tensors are viewed the same, as on a PyTorch whose table knows no such numbers."""
    case = Cached("viewed", held=(100, 60), new=1, dtype=BF16, heads_q=8, heads_k=2)
    given = in_8_bits(case.arguments(device), "heads", E4M3)
    expected = flashtile.attention_kvcache(**with_own_caches(given))
    _C._enable_exchange(False)
    try:
        assert torch.equal(flashtile.attention_kvcache(**with_own_caches(given)), expected)
    finally:
        _C._enable_exchange(True)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("power", [-60, -30, 15, 60])
def test_queries_of_any_size(power, device):
    """Kernels compute in float16, which has fewer exponents than bfloat16."""
    case = Cached("sizes", held=(100, 300), heads_q=8, heads_k=2, head_dim=128, dtype=BF16)
    given = in_8_bits(case.arguments(device), "heads", E4M3)
    expected, lse = flashtile.attention_kvcache(**given, return_lse=True)
    given |= dict(q=given["q"] * 2.0**power, scale=128**-0.5 * 2.0**-power)
    found, found_lse = flashtile.attention_kvcache(**given, return_lse=True)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_lse, lse)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("kind", ["all", "heads", "rows"])
@pytest.mark.parametrize("seqlen_q, options", [(2, {"leftpad": (0, 0)}), (50, {}), (50, {"softcap": 20.0})])
def test_unusual_descales(seqlen_q, options, kind, device):
    """They are factors, whatever they are: 0 makes zeros, and a NaN makes NaN of what sees it."""
    case = Cached("unusual", held=(100, 60), heads_q=4, heads_k=2, seqlen_q=seqlen_q, dtype=BF16, **options)
    for value in (0.0, -0.5, 2.0**-40, 2.0**20):
        given = in_8_bits(case.arguments(device), kind, E4M3)
        for name in ("k_descale", "v_descale"):
            changed = given | {name: torch.full_like(given[name], value)}
            out = flashtile.attention_kvcache(**changed)
            exact, _ = cached.attention(whole(changed, torch.float64))
            torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2 * float(exact.abs().max()))
    for name in ("k_descale", "v_descale"):
        given = in_8_bits(case.arguments(device), kind, E4M3)
        given[name][-1] = math.nan
        out = flashtile.attention_kvcache(**given)
        assert out.isnan().all() if kind == "all" else out[1].isnan().all() and not out[0].isnan().any()


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_descales_of_rows_that_are_far_apart(device):
    """Rows of a block that count little have a large descale, and those that count a small one."""
    q = torch.zeros(1, 1, 1, 64, dtype=BF16, device=device)
    q[..., 0] = 8
    k = torch.zeros(1, 64, 1, 64, device=device)
    k[0, ::2, 0, 0], k[0, 1::2, 0, 0] = 40, -40
    v = torch.randn(1, 64, 1, 64, device=device, generator=torch.Generator(device).manual_seed(1))
    for power in (-60, -16, 0, 16):  # with 2^21 and more between them in a block, small ones lose bits
        descale = torch.ones(1, 64, 1, device=device)
        v_descale = descale.clone()
        v_descale[0, 1::2] = 2.0**power
        given = dict(k_cache=k.to(E4M3), v_cache=v.to(E4M3), k_descale=descale, v_descale=v_descale, cache_seqlens=64)
        out = flashtile.attention_kvcache(q, **given)
        expected = v.to(E4M3).float()[0, ::2, 0].mean(0)
        torch.testing.assert_close(out[0, 0, 0].float(), expected, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_compiled(device):
    case = Cached("compiled", held=(100, 60), new=1, page_size=16, dtype=BF16, heads_q=8, heads_k=2)
    for kind in KINDS:
        given = in_8_bits(case.arguments(device), kind, E4M3)
        copies = [
            with_own_caches(given) | {n: x.clone() for n, x in given.items() if n.endswith("descale")} for _ in "12"
        ]
        expected = flashtile.attention_kvcache(**copies[0])
        call = torch.compile(flashtile.attention_kvcache, fullgraph=True, backend="aot_eager")
        assert torch.equal(call(**copies[1]), expected)
        for name in ("k_cache", "v_cache"):
            assert_bitwise(copies[1][name].view(torch.uint8), copies[0][name].view(torch.uint8), name)
        if kind == "rows":
            assert_bitwise(copies[1]["k_descale"], copies[0]["k_descale"], "k_descale")


HEADS_FIRST = dict(page_size=16, layout="heads first")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "layout", [dict(), dict(page_size=48), dict(page_size=4), HEADS_FIRST, dict(indexed=True, room=30)], ids=str
)
@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("stored", [E4M3, E5M2])
def test_many_rows_over_many_blocks(stored, head_dim, dtype, layout):
    """Hopper's forward kernel widens them: tile after tile, and, for one sequence, with keys that are split."""
    sizes = dict(seqlen_q=100, heads_q=4, heads_k=2, head_dim=head_dim, dtype=dtype)
    for held in ((3000, 1, 0, 1500), (2500,)):
        for kind in ("none", "heads"):
            for options in (dict(), dict(window=(700, 0)), dict(causal=False, alibi="per head")):
                check(Cached("blocks", held=held, **sizes, **layout, **options), "cuda", kind, stored)


@pytest.mark.gpu
def test_a_graph():
    case = Cached("graph", held=(100, 60), new=1, page_size=16, dtype=BF16, heads_q=8, heads_k=2, head_dim=128)
    given = in_8_bits(case.arguments("cuda"), "rows", E4M3)
    expected = flashtile.attention_kvcache(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashtile.attention_kvcache(**given)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)


def test_a_plan_names_the_kernel():
    case = Cached("plan", held=(4000,) * 4, head_dim=128, dtype=BF16, heads_q=8, heads_k=2)
    given = in_8_bits(case.arguments(), "heads", E5M2)
    q, k_cache, v_cache = (given.pop(name).to("meta") for name in ("q", *NAMES))
    given = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    for gpu in ("H100", "A100"):
        assert "sm80_e5m2_d128" in flashtile.explain(q, k_cache, v_cache, device=gpu, **given)
    many = q.new_empty(4, 100, 8, 128)
    assert "sm90_e5m2_d128" in flashtile.explain(many, k_cache, v_cache, device="H100", **given)


def test_wrong_calls():
    case = Cached("wrong", held=(20, 30), dtype=F16)
    given = in_8_bits(case.arguments(), "heads", E4M3)
    rows = in_8_bits(case.arguments(), "rows", E4M3)
    for changes, error, message in (
        (
            dict(v_cache=given["v_cache"].to(E5M2)),
            TypeError,
            "v_cache has dtype float8_e5m2, expected float8_e4m3fn, as",
        ),
        (dict(v_cache=case.arguments()["v_cache"]), TypeError, "v_cache has dtype float16, expected float8_e4m3fn, as"),
        (dict(k_descale=given["k_descale"].double()), TypeError, "k_descale has dtype torch.float64, expected float32"),
        (
            dict(k_descale=given["k_descale"][:1]),
            ValueError,
            r"k_descale has shape \(1, 2\), expected \(1\), \(2, 2\) =",
        ),
        (dict(v_descale=rows["v_descale"]), ValueError, r"v_descale has shape .*, expected none of them for each row"),
        (dict(v_descale=None, k_descale=rows["k_descale"]), ValueError, "v_descale is missing, expected one for each"),
        (dict(k_descale=2.0), TypeError, "k_descale is of type float, expected a torch.Tensor"),
        (dict(k_descale=given["k_descale"].clone().requires_grad_()), NotImplementedError, "k_descale requires grad"),
        (case.arguments(), ValueError, "k_descale is given, expected none with caches of dtype float16"),
    ):
        with pytest.raises(error, match=f"^attention_kvcache: {message}"):
            flashtile.attention_kvcache(**given | changes)
    q = given["q"].to(E4M3)
    with pytest.raises(TypeError, match=r"^attention_kvcache: q has dtype float8_e4m3fn, expected float32"):
        flashtile.attention_kvcache(**given | dict(q=q))
