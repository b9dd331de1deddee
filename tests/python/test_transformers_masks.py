"""attn_implementation="flashtile": what masks, offsets and positions say, and what is refused."""

import functools
import importlib

import numpy as np
import pytest
import torch
from cases import BF16
from test_transformers import (  # noqa: F401
    SIZES,
    _fallbacks_are_errors,
    _registered,
    assert_close,
    dense,
    integration,
    layer,
    masking_utils,
    model_of,
    rows,
    switched,
    tokens,
    transformers,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from waiting import host_never_waits

import flashtile

masks = importlib.import_module("flashtile.integrations._masks")
CAUSAL, BIDIRECTIONAL = masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function


def band(length, left, right):
    distance = torch.arange(length) - torch.arange(length)[:, None]
    return (distance >= -left) & (distance <= right)


@pytest.mark.parametrize("says_causal", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_the_mask_knows_better_than_the_layer(says_causal, padded):
    """As for eager attention, whatever a layer takes itself for."""
    overlay, both = masking_utils.sliding_window_overlay(4), masking_utils.sliding_window_bidirectional_overlay(4)
    rules = {
        CAUSAL: band(9, 9, 0),
        BIDIRECTIONAL: band(9, 9, 9),
        masking_utils.and_masks(overlay, CAUSAL): band(9, 3, 0),
        masking_utils.and_masks(both, BIDIRECTIONAL): band(9, 4, 4),
    }
    inputs = rows(9, 9)
    padding = (
        torch.tensor([[1] * 9, [0] * 3 + [1] * 6, [1] * 5 + [0] * 4]).bool() if padded else torch.ones(3, 9).bool()
    )
    for rule, seen in rules.items():
        mask = integration.mask(3, 9, 9, mask_function=rule, attention_mask=padding if padded else None)
        expected = dense(inputs, seen & padding[:, None, None]).float()
        module = layer(says_causal)
        for window in (4, 5):
            out, _ = integration.attend(module, *inputs, mask, sliding_window=window)
            torch.testing.assert_close(out[padding], expected[padding])
        module.config = transformers.MistralConfig(sliding_window=4)
        out, _ = integration.attend(module, *inputs, mask)
        torch.testing.assert_close(out[padding], expected[padding])


def columns_of(mask, q_length, kv_length, batch=1):
    """The ranges that a mask holds written out, (B, 1, S_q, S_k); None if it holds none."""
    told = masks.read(mask, batch, q_length, kv_length)
    return None if told is None or told.columns is None else masks.written_out(told, q_length, kv_length, "cpu")


def test_windows_that_no_layer_knows_are_told_of_each_key():
    rule = masking_utils.and_masks(BIDIRECTIONAL, masking_utils.sliding_window_bidirectional_overlay(3))
    for window, is_known in ((8, False), (None, True), (3, True), (4, True)):
        mask = integration.mask(1, 9, 9, mask_function=rule, config=transformers.MistralConfig(sliding_window=window))
        seen = columns_of(mask, 9, 9)
        assert (seen is None) == is_known
        if not is_known:
            assert torch.equal(seen, band(9, 3, 3)[None, None])
            out, _ = integration.attend(layer(), *rows(9, 9, batch=1), mask)
            torch.testing.assert_close(out, dense(rows(9, 9, batch=1), seen).float())


@pytest.mark.parametrize("q_length, q_offset, kv_length", [(1, 3, 9), (4, 0, 9), (2, 5, 7), (2, torch.tensor(7), 9)])
def test_windows_of_two_sides_before_the_end(q_length, q_offset, kv_length):
    """Where the last query does not meet the last key, or the host does not know."""
    rule = masking_utils.sliding_window_bidirectional_mask_function(2)
    mask = integration.mask(1, q_length, kv_length, q_offset, mask_function=rule)
    whole = q_offset + q_length == kv_length and isinstance(q_offset, int)
    seen = columns_of(mask, q_length, kv_length)
    assert (seen is None) == (whole or q_length == 1)
    if q_length == 1:
        seen = masks.written_out(masks.read(mask, 1, 1, kv_length), 1, kv_length, "cpu")
    if not whole:
        assert torch.equal(seen, band(9, 2, 2)[q_offset : q_offset + q_length, :kv_length][None, None])


def test_masks_that_models_go_on_working_with_are_dense():
    place = {"mask_function": BIDIRECTIONAL, "attention_mask": torch.ones(2, 5).bool()}
    assert integration.mask(2, 5, 5, **place, allow_is_bidirectional_skip=False).shape == (2, 1, 5, 5)
    assert integration.mask(2, 5, 5, **place, allow_is_bidirectional_skip=True).dtype is torch.int64


def test_rules_that_are_no_functions():
    even = functools.partial(lambda which, batch, head, row, column: which(row) & which(column), lambda x: x % 2 == 0)
    for rule in (even, masking_utils.and_masks(CAUSAL, even)):
        mask = integration.mask(1, 5, 5, mask_function=rule)
        assert torch.equal(mask, masking_utils.sdpa_mask(1, 5, 5, mask_function=rule, allow_is_causal_skip=False))


def test_numbers_of_sequences_that_do_not_stand_together():
    """As models give them that have chains of their own; those of transformers never come again."""
    numbers = torch.tensor([[0, 1, 0, 0, 1]])
    rule = masking_utils.and_masks(BIDIRECTIONAL, masking_utils.packed_sequence_mask_function(numbers))
    if masks.RENUMBERED is not None:  # transformers 5.4 makes no difference
        mask = integration.mask(1, 5, 5, mask_function=rule)
        assert torch.equal(mask, (numbers[0] == numbers[0][:, None])[None, None])


WRONG_MASKS = {"rank 0": (), "rank 1": (9,), "rank 3": (3, 5, 9), "rank 5": (1, 3, 1, 5, 9), "batch": (2, 9)}


@pytest.mark.parametrize("shape", WRONG_MASKS.values(), ids=WRONG_MASKS)
def test_masks_of_other_shapes_are_refused(shape):
    message = r'^attn_implementation="flashtile": attention_mask has shape \(.*\), expected padding \(B, S_k\)[^\n]*$'
    for dtype in (torch.bool, torch.int64):
        with pytest.raises(ValueError, match=message):
            integration.attend(layer(), *rows(5, 9), torch.ones(shape, dtype=dtype))
    if len(shape) != 2:
        with pytest.raises(ValueError, match=message):
            integration.mask(3, 5, 9, attention_mask=torch.ones(shape).bool())
    if len(shape) in (1, 3):
        with pytest.raises(ValueError, match=message):
            switched(model_of("llama"), "flashtile")(tokens(), attention_mask=torch.ones(shape).bool())


def test_masks_of_two_dimensions():
    inputs, padding = rows(5, 9), torch.tensor([[1] * 9, [0] * 6 + [1] * 3, [1] * 7 + [0] * 2])
    for causal in (False, True):
        seen = padding.bool()[:, None, None].expand(-1, 1, 5, -1)
        seen = seen.tril(4) if causal else seen
        out, _ = integration.attend(layer(causal), *inputs, padding)
        counts = padding[:, 4:].bool() if causal else torch.ones(3, 5, dtype=torch.bool)
        torch.testing.assert_close(out[counts], dense(inputs, seen).float()[counts])


@pytest.mark.parametrize("width", [0, 3, 4])
def test_masks_of_two_dimensions_narrower_than_the_queries(width):
    """Nothing says which of the queries count. Where rows have no order, nothing has to."""
    query, key, value = rows(5, 9)
    message = rf'^attn_implementation="flashtile": attention_mask has shape \(3, {width}\), expected padding [^\n]*$'
    for ordered in ({}, {"is_causal": False, "sliding_window": 2}):
        with pytest.raises(ValueError, match=message):
            integration.attend(layer(), query, key, value, torch.ones(3, width), **ordered)
    out, _ = integration.attend(layer(False), query, key, value, torch.ones(3, width))
    expected, _ = integration.attend(layer(False), query, key[:, :, :width], value[:, :, :width])
    torch.testing.assert_close(out, expected)


def test_masks_of_two_dimensions_shorter_than_a_cache():
    """They say what of a static cache is written."""
    inputs = rows(5, 12)
    written = torch.tensor([[1] * 9, [0] * 6 + [1] * 3, [0] + [1] * 8])
    out, _ = integration.attend(layer(), *inputs, written)
    query, key, value = inputs
    expected = dense(
        (query, key[:, :, :9], value[:, :, :9]), written.bool()[:, None, None].expand(-1, 1, 5, -1).tril(4)
    )
    torch.testing.assert_close(out[written[:, 4:].bool()], expected.float()[written[:, 4:].bool()])


OFFSETS = {
    "int64": torch.tensor([0, 4, 4, 15]),
    "int32": torch.tensor([0, 4, 4, 15], dtype=torch.int32),
    "list": [0, 4, 4, 15],
    "tuple": (0, 4, 4, 15),
    "numpy": np.array([0, 4, 4, 15]),
}


@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS)
def test_offsets_of_every_kind(offsets):
    inputs = rows(5, 5)
    out, _ = integration.attend(layer(), *inputs, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in inputs)
    options = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), OFFSETS["int32"])
    assert torch.equal(out.flatten(0, 1), flashtile.attention_varlen(q, k, v, causal=True, **options))


def test_wrong_offsets_are_refused():
    start, good = '^attn_implementation="flashtile": ', [0, 4, 15]
    for q, k, message in (
        (good, None, "cu_seq_lens_k is None, expected offsets, since cu_seq_lens_q is given$"),
        (None, good, "cu_seq_lens_q is None, expected offsets, since cu_seq_lens_k is given$"),
        ([good], good, r"cu_seq_lens_q has shape \(1, 3\) and dtype torch.int64, expected integers"),
        (good, 15, "cu_seq_lens_k is a int, expected integers"),
        (good, torch.tensor(15), r"cu_seq_lens_k has shape \(\) and dtype torch.int64, expected integers"),
        (good, [0.0, 15.0], "cu_seq_lens_k has .* torch.float32, expected integers"),
        ("long", good, "cu_seq_lens_q is a str, expected integers"),
        ([0, [1]], good, "cu_seq_lens_q is a list, expected integers"),
    ):
        for mask in (None, integration.mask(3, 5, 5), torch.ones(3, 5)):
            with pytest.raises(ValueError, match=start + message):
                integration.attend(layer(), *rows(5, 5), mask, cu_seq_lens_q=q, cu_seq_lens_k=k)


# Positions, and how long the sequences are that they tell of.
POSITIONS = {
    "one": ([[0, 1, 2, 3, 4, 5]], None),
    "later": ([[7, 8, 9, 10, 11, 12]], None),
    "gaps": ([[0, 1, 2, 5, 6, 9]], None),  # as transformers' flash attention has it
    "twice": ([[0, 1, 1, 2, 3, 3]], None),
    "two": ([[0, 1, 2, 0, 1, 2]], [3, 3]),
    "of one token": ([[0, 0, 0, 1, 0, 1]], [1, 1, 2, 2]),
    "as of RoBERTa": ([[2, 3, 4, 5, 2, 3]], [4, 2]),
    "cut off": ([[5, 6, 7, 0, 1, 2]], [3, 3]),
    "cut off twice": ([[5, 6, 3, 4, 5, 6]], [2, 4]),
    "batch": ([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]], [3, 3, 6]),
    "batch of one each": ([[0, 1, 2, 3, 4, 5], [3, 4, 5, 6, 7, 8]], None),
}


@pytest.mark.parametrize("positions, lengths", POSITIONS.values(), ids=POSITIONS)
def test_where_positions_start_again(positions, lengths):
    position_ids = torch.tensor(positions)
    offsets = masks.offsets_of_restarts(position_ids, *position_ids.shape)
    if lengths is None:
        assert offsets is None
    else:
        assert offsets.dtype is torch.int32 and offsets.diff().tolist() == lengths and offsets[0] == 0
    with torch.inference_mode():
        again = masks.offsets_of_restarts(torch.tensor(positions), *position_ids.shape)
    assert (again is None) if lengths is None else torch.equal(again, offsets)
    if len(positions) == 1 and positions[0][0] == min(positions[0]) == 0:  # transformers 5.4 knows no other beginning
        theirs = importlib.import_module("transformers.modeling_flash_attention_utils")
        packed = theirs._is_packed_sequence(position_ids, 1)
        (cu_seq_lens, _), _ = theirs.prepare_fa_kwargs_from_position_ids(position_ids)
        expected = cu_seq_lens.diff().tolist() if packed else [6]
        assert (lengths or [6]) == expected


def test_positions_of_other_shapes_say_nothing():
    for position_ids in (None, torch.zeros(1, 4), torch.zeros(3, 1, 5), torch.zeros(5), [[0, 0]], torch.zeros(2, 1)):
        assert masks.offsets_of_restarts(position_ids, 1, 5) is None
    assert masks.offsets_of_restarts(torch.zeros(1, 1), 1, 1) is None


class _Reads(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.count += name in ("nonzero", "_local_scalar_dense", "is_nonzero", "equal")
        return function(*args, **(kwargs or {}))


def test_positions_are_read_once():
    inputs = rows(6, 6, batch=1)
    position_ids, mask = torch.tensor([[0, 1, 2, 0, 1, 2]]), integration.mask(1, 6, 6)
    with _Reads() as reads:
        first, second = (integration.attend(layer(), *inputs, mask, position_ids=position_ids)[0] for _ in range(2))
    assert reads.count == 1 and torch.equal(first, second)
    position_ids.copy_(torch.arange(6))  # a change in place is noticed
    whole, _ = integration.attend(layer(), *inputs, mask, position_ids=position_ids)
    assert torch.equal(whole, integration.attend(layer(), *inputs)[0]) and not torch.equal(whole, first)
    many = rows(6, 6, batch=3)
    padding = integration.mask(3, 6, 6, attention_mask=torch.ones(3, 6).bool())
    with _Reads() as reads:  # those that models make themselves are one row for all
        integration.attend(layer(), *many, integration.mask(3, 6, 6), position_ids=torch.arange(6)[None])
        integration.attend(layer(), *many, padding, position_ids=torch.arange(6).repeat(3, 1))
    assert reads.count == 0


def test_positions_do_not_matter_where_something_is_hidden():
    inputs, position_ids = rows(6, 6, batch=1), torch.tensor([[0, 0, 0, 1, 2, 3]])  # padding at the left
    mask = integration.mask(1, 6, 6, attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1]]).bool())
    out, _ = integration.attend(layer(), *inputs, mask, position_ids=position_ids)
    assert torch.equal(out, integration.attend(layer(), *inputs, mask)[0])
    longer = rows(6, 9, batch=1)  # nor where a cache holds keys
    out, _ = integration.attend(layer(), *longer, integration.mask(1, 6, 9, 3), position_ids=position_ids)
    assert torch.equal(out, integration.attend(layer(), *longer)[0])


def test_fake_positions_are_not_read():
    with FakeTensorMode():
        assert masks.offsets_of_restarts(torch.zeros(2, 5, dtype=torch.int64), 2, 5).shape == (11,)


@pytest.mark.parametrize("q_length", [1, 4])
def test_masks_of_changing_sizes_in_a_compiled_layer(q_length):
    """As those of a cache that grows: the window is told by sizes, and stays."""
    module, rule = layer(), masking_utils.sliding_window_causal_mask_function(3)

    def attended(*inputs):
        return integration.attend(module, *inputs, sliding_window=3)[0]

    compiled = torch.compile(attended, backend="aot_eager", fullgraph=True, dynamic=True)
    for held in (5, 6, 8):
        padding = torch.tensor([[1] * held, [0] * 2 + [1] * (held - 2)] * 2)[:3].bool()
        place = {"attention_mask": padding, "mask_function": rule}
        inputs = *rows(q_length, held), integration.mask(3, q_length, held, held - q_length, **place)
        torch.testing.assert_close(compiled(*inputs), attended(*inputs))


@pytest.mark.parametrize("padded", [True, False])
def test_positions_in_a_compiled_layer(padded):
    inputs, position_ids = rows(6, 6, batch=1), torch.tensor([[0, 1, 2, 0, 1, 2]])
    padding = torch.tensor([[0, 1, 1, 1, 1, 1]]).bool() if padded else None
    mask, module = integration.mask(1, 6, 6, attention_mask=padding), layer()

    def attended(*inputs):
        return integration.attend(module, *inputs, mask, position_ids=position_ids)[0]

    found = torch.compile(attended, backend="aot_eager", fullgraph=True)(*inputs)
    torch.testing.assert_close(found, attended(*inputs))


@pytest.mark.parametrize("use_cache", [True, False])
def test_packed_sequences_in_a_compiled_model(use_cache):
    model, row = switched(model_of("mistral"), "flashtile"), tokens(1, 17)
    position_ids = torch.cat([torch.arange(length) for length in (6, 1, 10)])[None]
    with torch.no_grad():
        expected = model(row, position_ids=position_ids, use_cache=use_cache).logits
        found = torch.compile(model, backend="eager")(row, position_ids=position_ids, use_cache=use_cache).logits
    assert_close(found, expected)


def wide_rows(*sizes, **options):
    return [torch.cat([x] * 33, dim=-1) for x in rows(*sizes, **options)]  # 264


@pytest.mark.parametrize("kind", ["nothing", "both sides", "padding", "window", "positions", "offsets", "decoding"])
def test_wide_heads_are_for_pytorch(kind, monkeypatch):
    monkeypatch.setattr(flashtile.sdpa, "_said", set())
    seqlen_q, seen, options = (2 if kind == "decoding" else 6), band(6, 6, 0), {}
    inputs = wide_rows(seqlen_q, 6)
    counts = torch.tensor([[1] * 6, [0] * 2 + [1] * 4, [1] * 4 + [0] * 2]).bool()
    counts = counts if kind in ("padding", "window") else torch.ones(3, 6).bool()
    place = dict(attention_mask=counts if kind in ("padding", "window") else None)
    if kind == "both sides":
        seen, place = band(6, 6, 6), {"mask_function": BIDIRECTIONAL}
    if kind == "window":
        seen, options = band(6, 2, 0), {"sliding_window": 3}
        place["mask_function"] = masking_utils.sliding_window_causal_mask_function(3)
    mask = integration.mask(3, seqlen_q, 6, 6 - seqlen_q, **place)
    if kind == "positions":
        seen, options["position_ids"] = seen & (band(6, 6, 6).tril(0)), torch.tensor([[0, 1, 0, 1, 2, 3]] * 3)
    if kind == "offsets":
        options |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), (0, 2, 6, 8, 12, 14, 18))
    if kind in ("positions", "offsets"):
        number = torch.tensor([0, 0, 1, 1, 1, 1])
        seen = seen & (number == number[:, None])
    expected = dense(inputs, seen[6 - seqlen_q :] & counts[:, None, None]).float()
    with pytest.warns(flashtile.sdpa.FallbackWarning, match="head dimension 264"):
        out, _ = integration.attend(layer(), *inputs, mask, **options)
    counts = counts[:, 6 - seqlen_q :]
    torch.testing.assert_close(out[counts], expected[counts])
    assert out.isfinite().all() and (out[~counts] == 0).all()


def test_wide_heads_with_what_pytorch_has_not():
    for name, value in (("softcap", 2.0), ("s_aux", torch.ones(4))):
        with pytest.raises(NotImplementedError, match=f"{name} is given with head dimension 264, expected at most 256"):
            integration.attend(layer(), *wide_rows(5, 5), **{name: value})


@pytest.mark.parametrize(
    "name",
    [
        "BloomForCausalLM",
        "T5ForConditionalGeneration",
        "T5Gemma2Encoder",
        "T5Gemma2ForConditionalGeneration",
    ],
)
def test_models_without_flash_attention_are_refused(name):
    """Before any weight is made."""
    model = getattr(transformers, name)
    message = (
        f'^attn_implementation="flashtile": {name} is no model that [^\n]*; nearest supported: attn_implementation='
    )
    with pytest.raises(NotImplementedError, match=message):
        model._from_config(model.config_class(), attn_implementation="flashtile")


SMALL = dict(vocab_size=99, hidden_size=32, num_heads=4, num_layers=2)
TABLES = {
    "GPTJForCausalLM": ("GPTJConfig", dict(vocab_size=99, n_embd=32, n_head=4, n_layer=2, rotary_dim=4), "eager"),
    "GPTNeoForCausalLM": ("GPTNeoConfig", SMALL | dict(attention_types=[[["global", "local"], 1]]), "eager"),
    "FalconForCausalLM": ("FalconConfig", SIZES, "sdpa"),
    "BarkSemanticModel": ("BarkSemanticConfig", SMALL, "eager"),
}


@pytest.mark.parametrize("name", TABLES)
def test_models_with_tables_of_classes_are_refused(name):
    config, sizes, nearest = TABLES[name]
    config = getattr(transformers, config)(**sizes)
    message = rf'^attn_implementation="flashtile": {name} has a class .*; nearest supported: attn_imp.*="{nearest}"$'
    with pytest.raises(NotImplementedError, match=message):
        getattr(transformers, name)._from_config(config, attn_implementation="flashtile")
    getattr(transformers, name)._from_config(config, attn_implementation=nearest)


def test_other_implementations_are_checked_as_before():
    """Some models hand on their arguments by place."""
    check = transformers.PreTrainedModel._check_and_adjust_attn_implementation
    assert check(model_of("llama"), "eager", True, False) == "eager"
    assert check(model_of("llama"), "flashtile", True, False) == "flashtile"
    with pytest.raises(ValueError, match="nonsense"):
        check(model_of("llama"), "nonsense", False)


@pytest.mark.gpu
def test_a_gpu_is_waited_for_once():
    inputs = [x.to("cuda", BF16) for x in rows(6, 6, batch=1)]
    position_ids = torch.tensor([[0, 1, 2, 0, 1, 2]], device="cuda")

    def attended():
        mask = integration.mask(1, 6, 6, device="cuda")
        return integration.attend(layer(), *inputs, mask, position_ids=position_ids)[0]

    first = attended()
    with host_never_waits():
        second = attended()
    assert torch.equal(first, second)
    parts = [integration.attend(layer(), *(x[:, :, part] for x in inputs))[0] for part in (slice(3), slice(3, 6))]
    torch.testing.assert_close(first, torch.cat(parts, dim=1), rtol=0, atol=0.02)
