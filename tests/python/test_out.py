"""out=: the same bits as without it, in the tensor that is given and nowhere else, without a copy."""

import contextlib
import math

import pytest
import torch
from cached import Cached, with_own_caches
from cases import BF16, DEVICE_PARAMS, F16, F32, Case, lay_out, on_devices
from compare import assert_bitwise
from ragged import Ragged
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from traced import compiled, quiet

import flashtile
from flashtile.fp8 import quantize

pytestmark = quiet

LAYOUTS = ("contiguous", "heads first", "sequence first", "gaps", "packed", "reversed batch")
CASES = [
    Case("dense", dtype=F32, causal=True, heads_q=4),
    Case("sinks", dtype=F16, window=(20, 3), sinks=0.0, head_dim_v=32),
    Case("decoding", dtype=BF16, seqlen_q=1, heads_q=8, seqlen_k=500),
    Case("dropout", dtype=BF16, dropout_p=0.3),
    Case("nothing", dtype=F16, batch=0),
    Ragged("ragged", dtype=F16, causal=True, tail=9),
    Ragged("ragged_used", dtype=BF16, used_q=(60, 0, 0, 130, 5), heads_q=4, heads_k=2),
    Cached("cached", dtype=F16, new=1, page_size=16),
    Cached("cached_prefill", dtype=BF16, seqlen_q=150, new=150, held=(90, 40, 0, 130)),
    Cached("cached_ragged", dtype=F16, lengths_q=(3, 0, 70, 5), tail=5, leftpad=(3, 0, 0, 9), page_size=16),
    Cached("cached_turned", dtype=F32, seqlen_q=5, new=5, rotary=32, sinks=0.0),
]


def function_of(case):
    """f(**arguments), and its keyword arguments on a device."""
    if isinstance(case, Cached):
        return flashtile.attention_kvcache, lambda device: with_own_caches(case.arguments(device))
    function = flashtile.attention_varlen if isinstance(case, Ragged) else flashtile.attention
    return function, lambda device: dict(zip("qkv", case.tensors(device), strict=True)) | case.options(device)


def place_like(out, layout):
    """NaN, in another layout of memory that is NaN too."""
    nan = torch.full_like(out, math.nan)
    return lay_out(nan, layout) if out.dim() == 4 else lay_out(nan[None], layout)[0]


def assert_nearly(actual, expected, what):
    eps = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=8 * eps, atol=8 * eps, equal_nan=True, msg=what)


def whole_memory(x):
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("case, device", on_devices(CASES))
def test_the_same_bits_in_the_given_place(case, device, return_lse, layout):
    """On a GPU it may take another kernel over a cache, where rows of out have no one stride."""
    function, arguments = function_of(case)
    same = assert_bitwise if device == "cpu" or not isinstance(case, Cached) else assert_nearly
    expected, expected_lse = function(**arguments(device), return_lse=True)
    place = place_like(expected, layout)
    version = place._version
    result = function(**arguments(device), out=place, return_lse=return_lse)
    if return_lse:
        result, lse = result
        same(lse, expected_lse, "lse")
    assert result is place and place._version > version
    same(place, expected, "out")
    untouched = whole_memory(place).numel() - place.numel()
    assert int(whole_memory(place).isnan().sum()) == untouched + int(expected.isnan().sum())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_is_copied_or_allocated(case):
    """As far as PyTorch knows."""
    function, arguments = function_of(case)
    given = arguments("cpu")
    place = torch.empty_like(function(**given))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        function(**given, out=place)
    seen = {event.key for event in profiled.key_averages()}
    assert any(key.startswith("flashtile::") for key in seen)
    assert not {key for key in seen if key.startswith(("aten::empty", "aten::new_", "aten::copy", "aten::clone"))}


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("out_dtype", [None, F16, BF16])
def test_of_e4m3_numbers(out_dtype, device):
    q, k, v = (torch.randn(2, 70, 4, 64, device=device).to(BF16) for _ in range(3))
    *numbers, q_descale, k_descale, v_descale = quantize(q, k, v)
    options = dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, out_dtype=out_dtype, return_lse=True)
    expected, expected_lse = flashtile.attention(*numbers, **options)
    place = place_like(expected, "heads first")
    out, lse = flashtile.attention(*numbers, **options, out=place)
    assert out is place
    assert_bitwise(place, expected)
    assert_bitwise(lse, expected_lse, "lse")
    with pytest.raises(TypeError, match=f"^attention: out has dtype float32, expected {str(expected.dtype)[6:]}$"):
        flashtile.attention(*numbers, **options, out=place.float())


@pytest.mark.parametrize("case", [case for case in CASES if case.dropout_p == 0 and case.batch > 0], ids=str)
def test_compiled_and_transformed_calls_write_it_too(case):
    function, arguments = function_of(case)
    torch.compiler.reset()
    expected = function(**arguments("cpu"))
    place, given = place_like(expected, "contiguous"), arguments("cpu")
    result = compiled(lambda place: function(**given, out=place))(place)
    assert_bitwise(result, expected)
    assert_bitwise(place, expected)
    place, given = place_like(expected, "gaps"), arguments("cpu")
    make_fx(lambda place: function(**given, out=place))(place)
    assert_bitwise(place, expected)


def test_rows_between_those_of_inputs_are_its_own_memory():
    """One buffer may hold queries, keys, values and the result of each row."""
    rows = torch.randn(2, 30, 4, 2, 16)
    q, k, v, place = rows.unbind(2)
    expected = flashtile.attention(q, k, v)
    assert_bitwise(flashtile.attention(q, k, v, out=place), expected)
    assert_bitwise(rows[:, :, 3], expected)
    rows[:, :, 3] = 0
    with FlopCounterMode(display=False):
        flashtile.attention(q, k, v, out=place)
    assert_bitwise(rows[:, :, 3], expected)


def test_without_gradients_inputs_may_require_one():
    q, k, v = torch.randn(3, 2, 30, 4, 16).unbind()
    with torch.no_grad():
        place = torch.empty_like(q)
        flashtile.attention(q.requires_grad_(), k, v, out=place)
    assert not place.requires_grad
    assert_bitwise(place, flashtile.attention(q, k, v).detach())


def test_autograd_notices_that_it_has_changed():
    q, k, v = torch.randn(3, 2, 30, 4, 16).unbind()
    kept = torch.ones_like(q, requires_grad=True)
    product = kept * q.exp_()  # which keeps q
    flashtile.attention(k, k, v, out=q)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def spoiled(q):
    """what: (out, exception, what the message holds)."""
    wide, rows = torch.randn(2, 30, 4, 32), q.stride(1)
    return {
        "shape": (torch.empty(2, 30, 4, 8), ValueError, r"out has shape \(2, 30, 4, 8\), expected \(2, 30, 4, 16\)"),
        "rank": (torch.empty(30, 4, 16), ValueError, r"out has shape \(30, 4, 16\)"),
        "dtype": (torch.empty_like(q, dtype=F16), TypeError, r"out has dtype (torch\.)?float16, expected"),
        "integers": (torch.empty_like(q, dtype=torch.int64), TypeError, r"out has dtype torch\.int64, expected"),
        "type": ([1.0], TypeError, "out is of type list, expected a torch.Tensor"),
        "last stride": (wide[..., ::2], ValueError, "out has stride 2 in its last dimension, expected 1"),
        "one row": (q.new_empty(16).expand(2, 30, 4, 16), ValueError, "out has stride 0 in dimension 0, expected mem"),
        "device": (q.to("meta"), (TypeError, ValueError), "out is "),
        "rows that meet": (
            torch.zeros(q.numel()).as_strided(q.shape, (q.stride(0), rows // 2, 16, 1)),
            ValueError,
            rf"out has strides \({q.stride(0)}, {rows // 2}, 16, 1\), expected memory of its own for each row",
        ),
        "q": (q, ValueError, "out shares memory with q, expected memory of its own"),
        "negated": (torch._neg_view(torch.empty_like(q)), NotImplementedError, "out is negated lazily"),
        "gradient": (torch.empty_like(q).requires_grad_(), NotImplementedError, "out is given and a gradient is asked"),
    }


NAMES = tuple(spoiled(torch.empty(2, 30, 4, 16)))


def over_cache(q, k, v, **more):
    """With rows to append, of which nothing may be seen when the call is refused."""
    return flashtile.attention_kvcache(q, k, v, cache_seqlens=20, k_new=q[:, :5], v_new=q[:, :5], **more)


def behind_a_prefix(q, k, v, **more):
    new = dict(k_new=q[:, :5], v_new=q[:, :5])
    return flashtile.attention_cascade(q, k[0] * 2, v[0] * 2, k, v, cache_seqlens=20, **new, **more)


FUNCTIONS = {
    "attention": flashtile.attention,
    "attention_kvcache": over_cache,
    "attention_cascade": behind_a_prefix,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_cannot_be_written_is_refused(function, traced, name):
    q, k, v = torch.randn(3, 2, 30, 4, 16).unbind()
    place, error, message = spoiled(q)[name]
    before = [x.clone() for x in (q, k, v)]
    with FlopCounterMode(display=False) if traced else contextlib.nullcontext():
        with pytest.raises(error, match=f"^{function}: {message}") as raised:
            FUNCTIONS[function](q, k, v, out=place)
    assert name == "device" or raised.type is error
    assert "\n" not in str(raised.value)
    assert all(map(torch.equal, (q, k, v), before))


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_memory_of_inputs_is_refused(function, traced, name):
    """Also where rows are not the same ones."""
    memory = torch.randn(2, 60, 4, 16)
    q = torch.randn(2, 30, 4, 16)
    k, v, place = memory[:, 25:55], torch.randn(2, 30, 4, 16), memory[:, :30]
    suffix = "" if function == "attention" else "_cache"
    given = (q, k, v) if name == "k" else (q, v, k)
    before = memory.clone()
    with FlopCounterMode(display=False) if traced else contextlib.nullcontext():
        with pytest.raises(ValueError, match=f"^{function}: out shares memory with {name}{suffix}, expected"):
            FUNCTIONS[function](*given, out=place)
    assert torch.equal(memory, before)


def test_memory_of_a_prefix_is_refused():
    q, k, v = torch.randn(3, 2, 30, 4, 16).unbind()
    prefix = torch.randn(60, 4, 16)
    place = prefix.view(2, 30, 4, 16)
    for name, first in (("k_prefix", (prefix, prefix.clone())), ("v_prefix", (prefix.clone(), prefix))):
        with pytest.raises(ValueError, match=f"^attention_cascade: out shares memory with {name}, expected"):
            flashtile.attention_cascade(q, *first, k, v, cache_seqlens=30, out=place)


def test_caches_whose_rows_meet_are_refused():
    q, (k, v) = torch.randn(2, 3, 4, 16), torch.zeros(2, 2, 30, 4, 16)
    meeting = torch.zeros(k.numel()).as_strided(k.shape, (k.stride(0), 32, 16, 1))
    message = r"k_cache has strides \(1920, 32, 16, 1\), expected a cache of its own memory, as k_new is given"
    with pytest.raises(ValueError, match=f"^attention_kvcache: {message}"):
        flashtile.attention_kvcache(q, meeting, v, cache_seqlens=20, k_new=q, v_new=q)
    assert not meeting.any() and not v.any()
    flashtile.attention_kvcache(q, meeting, v, cache_seqlens=20)  # nothing is written


def test_memory_of_new_rows_is_refused():
    case = Cached("cached", dtype=F32, seqlen_q=5, new=5, heads_q=2)
    for name in ("k_new", "v_new"):
        given = case.arguments()
        with pytest.raises(ValueError, match=f"^attention_kvcache: out shares memory with {name}, expected"):
            flashtile.attention_kvcache(**given, out=given[name])


@pytest.mark.parametrize("name", ["q", "k", "v", "sinks"])
@pytest.mark.parametrize("traced", [False, True])
def test_gradients_are_refused(name, traced):
    given = dict(zip("qkv", torch.randn(3, 2, 30, 4, 16), strict=True)) | {"sinks": torch.zeros(4)}
    given[name].requires_grad_()
    place = torch.empty(2, 30, 4, 16)

    def call(place):
        return flashtile.attention(**given, out=place)

    with pytest.raises(NotImplementedError, match=r"^attention: out is given and a gradient is asked"):
        make_fx(call)(place) if traced else call(place)


@pytest.mark.parametrize("name", ["shape", "dtype", "type"])
def test_operators_refuse_the_same(name):
    """What copy_ would broadcast or cast."""
    q, k, v = torch.randn(3, 2, 30, 4, 16).unbind()
    place, error, message = spoiled(q)[name]
    with pytest.raises(error, match=f"attention: {message}"):
        make_fx(lambda q: flashtile.attention(q, k, v, out=place))(q)


def test_explain_plans_with_it():
    q, k, v = torch.randn(3, 2, 30, 4, 16).unbind()
    place = torch.zeros_like(q)
    assert flashtile.explain(q, k, v, out=place) == flashtile.explain(q, k, v)
    assert not place.any()
    shapes = [x.to("meta", BF16) for x in (q, k, v, place)]
    assert "sm90" in flashtile.explain(*shapes[:3], out=shapes[3], device="H100")


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_place_of_a_size_that_only_values_tell():
    """In graphs, where it is a symbol that nothing may be asked of."""

    class Some(torch.nn.Module):
        def forward(self, x, wanted):
            q = x[wanted.nonzero()[:, 0]][None]
            return flashtile.attention(q, q, q, out=torch.empty_like(q))

    given = torch.randn(10, 2, 16), torch.arange(10) % 2
    expected = Some()(*given)
    assert torch.equal(torch.compile(Some(), fullgraph=True, backend="aot_eager")(*given), expected)
    assert torch.equal(torch.export.export(Some(), given).module()(*given), expected)
