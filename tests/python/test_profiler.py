"""PyTorch's profiler sees each call by its name, once, eager or traced."""

import collections

import pytest
import torch
from cached import Cached
from cases import BF16, DEVICE_PARAMS, F32, Case
from ragged import Ragged
from traced import quiet

import flashtile

pytestmark = quiet


def named(profile):
    """How often each of flashtile's names was seen."""
    names = (event.name for event in profile.events() if str(event.device_type).endswith("CPU"))
    return collections.Counter(name.removeprefix("flashtile::") for name in names if name.startswith("flashtile::"))


def profiled(function, **options):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options) as profile:
        function()
    return profile


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_attention(device, return_lse):
    q, k, v = Case("profiled", dtype=BF16).tensors(device, requires_grad=True)

    def call():
        result = flashtile.attention(q, k, v, return_lse=return_lse)
        torch.autograd.grad([x.sum() for x in result] if return_lse else result.sum(), (q, k, v))

    profile = profiled(call, record_shapes=True)
    assert named(profile) == dict(attention=1, attention_backward=1)
    (event,) = (x for x in profile.events() if x.name == "flashtile::attention")
    assert [list(x) for x in event.input_shapes[:3]] == [list(x.shape) for x in (q, k, v)]
    with torch.no_grad():
        assert named(profiled(lambda: flashtile.attention(q, k, v))) == dict(attention=1)
    with torch.autograd.profiler.profile() as profile:  # the older one
        flashtile.attention(q, k, v)
    assert [event.name for event in profile.function_events].count("flashtile::attention") == 1


def test_a_call_that_is_tried_twice_is_seen_once():
    """Of copies: what is negated lazily, and what autocast casts."""
    q, k, v = Case("copied", dtype=F32).tensors()
    assert named(profiled(lambda: flashtile.attention(torch._neg_view(q), k, v))) == dict(attention=1)
    with torch.autocast("cpu", dtype=BF16):
        assert named(profiled(lambda: flashtile.attention(q, k.to(BF16), v))) == dict(attention=1)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_ragged_batches_and_caches(device):
    case = Ragged("profiled", dtype=BF16)
    inputs, tables = case.tensors(device, requires_grad=True), case.tables(device)
    profile = profiled(lambda: flashtile.attention_varlen(*inputs, **tables).sum().backward())
    assert named(profile) == dict(attention_varlen=1, attention_varlen_backward=1)
    for new in (None, 1):
        given = Cached("profiled", dtype=BF16, new=new).arguments(device)
        assert named(profiled(lambda: flashtile.attention_kvcache(**given))) == dict(attention_kvcache=1)  # noqa: B023


def test_refused_calls_leave_nothing_open():
    """What comes later stands beside the refused call, not within it."""
    q, k, v = Case("refused", dtype=F32).tensors()

    def call():
        with pytest.raises(TypeError):
            flashtile.attention(q, k.double(), v)
        flashtile.attention(q, k, v)

    calls = [event for event in profiled(call).events() if event.name == "flashtile::attention"]
    assert len(calls) == 2 and all(event.cpu_parent is None for event in calls)


def test_traced_calls_have_the_names_of_operators():
    q, k, v = Case("traced", dtype=F32).tensors()
    function = torch.compile(flashtile.attention, backend="aot_eager")
    function(q, k, v)
    assert named(profiled(lambda: function(q, k, v)))["attention_forward"] == 1
