"""attn_implementation="flashtile": rules of transformers that become column masks, next to its own dense masks."""

import functools
import importlib
import warnings

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_transformers import (  # noqa: F401
    DECODER,
    _fallbacks_are_errors,
    _registered,
    assert_close,
    dense,
    integration,
    layer,
    masking_utils,
    masks,
    places,
    rows,
    switched,
    tokens,
    transformers,
)
from test_transformers_masks import columns_of
from test_transformers_models import check, check_generation
from torch._subclasses.fake_tensor import FakeTensorMode
from waiting import host_never_waits

import flashtile

blockwise = getattr(masking_utils, "blockwise_overlay", None)
compose = getattr(masking_utils, "packed_sequence_compatibility_function", None)
columns = importlib.import_module("flashtile.integrations._columns")
CAUSAL = masking_utils.causal_mask_function
pytestmark = pytest.mark.skipif(blockwise is None or compose is None, reason="of a transformers later than 5.4")


@st.composite
def blocks(draw, batch, length, sound=True):
    """Numbers of blocks, each of which stands together if they are `sound`; -1 where there is none."""
    entries = []
    for _ in range(batch):
        lengths = draw(st.lists(st.integers(1, 5), min_size=length, max_size=length))
        numbers = [draw(st.sampled_from([-1, n if sound else n % 2])) for n in range(length)]
        entries.append([number for n, of in zip(numbers, lengths, strict=True) for number in [n] * of][:length])
    return torch.tensor(entries)


@st.composite
def rules(draw, batch, length, depth=2):
    """A rule of those that are known, and whether it has blocks."""
    kinds = ["causal", "bidirectional", "left", "both", "chunk", "blocks", *(["all", "any"] if depth > 0 else [])]
    kind = draw(st.sampled_from(kinds))
    if kind in ("all", "any"):
        parts = draw(st.lists(rules(batch, length, depth - 1), min_size=1, max_size=3))
        functions, blocked = zip(*parts, strict=True)
        return (masking_utils.and_masks if kind == "all" else masking_utils.or_masks)(*functions), any(blocked)
    if kind == "causal":
        return CAUSAL, False
    if kind == "bidirectional":
        return masking_utils.bidirectional_mask_function, False
    if kind == "left":
        return masking_utils.sliding_window_overlay(draw(st.integers(1, 9))), False
    if kind == "both":
        return masking_utils.sliding_window_bidirectional_overlay(draw(st.integers(0, 9))), False
    if kind == "chunk":
        padding = torch.tensor(draw(st.lists(st.integers(0, length), min_size=batch, max_size=batch)))
        return masking_utils.chunked_overlay(draw(st.integers(1, 9)), padding), False
    return blockwise(draw(blocks(batch, length))), True


def agrees(mask, place, counts=None):
    """Whether a mask holds what transformers' own says, of the rows that count."""
    expected = masking_utils.sdpa_mask(**place, allow_is_causal_skip=False)
    batch, q_length, kv_length = (place[name] for name in ("batch_size", "q_length", "kv_length"))
    found = masks.written_out(masks.read(mask, batch, q_length, kv_length), q_length, kv_length, "cpu")
    found = found.expand(batch, 1, q_length, kv_length)[:, 0]
    counts = torch.ones(batch, q_length, dtype=torch.bool) if counts is None else counts
    return torch.equal(found[counts], expected.expand(batch, 1, -1, -1)[:, 0][counts])


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.data())
def test_every_rule(data):
    """Of any cache: a part of its keys that begins anywhere, with some that are not written yet."""
    batch, q_length = data.draw(st.integers(1, 2), "batch"), data.draw(st.integers(1, 8), "q_length")
    held, tail = data.draw(st.integers(0, 8), "held"), data.draw(st.integers(0, 3), "unwritten")
    dropped, end = data.draw(st.integers(0, held), "kv_offset"), held + q_length
    rule, blocked = data.draw(rules(batch, end + tail), "rule")
    padding = None
    if data.draw(st.booleans(), "padded"):
        padding = torch.tensor(data.draw(st.lists(st.booleans(), min_size=batch * end, max_size=batch * end)))
        padding = padding.reshape(batch, end)
    place = dict(batch_size=batch, q_length=q_length, kv_length=end + tail - dropped, kv_offset=dropped)
    place |= dict(q_offset=held, mask_function=rule, attention_mask=padding, device="cpu")
    on_device = data.draw(st.booleans(), "q_offset is a tensor")
    ranges = columns.ranges_of(
        rule,
        batch,
        q_length,
        place["kv_length"],
        torch.tensor(held) if on_device else held,
        dropped,
        padding,
        "cpu",
    )
    assert ranges.dtype is torch.int32 and ranges.shape in {(n, 1, place["kv_length"], 4) for n in (1, batch)}
    flashtile.masks.ColumnMask(ranges, q_length).check()
    counts = None if padding is None or not blocked else padding[:, held:end]
    assert agrees(masks.write_columns(ranges, q_length), place, counts)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_every_rule_of_packed_sequences(data):
    """Whose places are renumbered; blocks of the whole row may be added."""
    batch, length = data.draw(st.integers(1, 2), "batch"), data.draw(st.integers(2, 16), "length")
    rule, blocked = data.draw(rules(batch, length), "rule")
    assume(not blocked)
    begins = [
        [True, *data.draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1))] for _ in range(batch)
    ]
    place_in_row = torch.arange(length).expand(batch, -1)
    position_ids = place_in_row - place_in_row.where(torch.tensor(begins), 0).cummax(-1).values
    position_ids = position_ids + data.draw(st.integers(0, 2), "first")
    number = (position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)
    rule = compose(rule, position_ids, number)
    added = data.draw(st.booleans(), "blocks")
    if added:
        rule = masking_utils.or_masks(rule, blockwise(data.draw(blocks(batch, length))))
    padding = torch.tensor(data.draw(st.lists(st.booleans(), min_size=batch * length, max_size=batch * length)))
    padding = padding.reshape(batch, length) if data.draw(st.booleans(), "padded") else None
    place = dict(batch_size=batch, q_length=length, kv_length=length, mask_function=rule, attention_mask=padding)
    ranges = columns.ranges_of(rule, batch, length, length, 0, 0, padding, "cpu")
    assert agrees(masks.write_columns(ranges, length), place, padding if added else None)
    mask = integration.mask(**place)
    assert mask.dtype is not torch.bool
    if padding is not None or masks.rule_of(rule) is None:
        assert agrees(mask, place, padding if added else None)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_blocks_in_parts(data):
    """A dense mask, unless what parts a block is padding."""
    batch, length = data.draw(st.integers(1, 2), "batch"), data.draw(st.integers(2, 12), "length")
    numbers = data.draw(blocks(batch, length, sound=False), "numbers")
    padding = torch.tensor(data.draw(st.lists(st.booleans(), min_size=batch * length, max_size=batch * length)))
    padding = padding.reshape(batch, length) if data.draw(st.booleans(), "padded") else None
    rule = masking_utils.or_masks(CAUSAL, blockwise(numbers))
    place = dict(batch_size=batch, q_length=length, kv_length=length, mask_function=rule, attention_mask=padding)
    whole = True
    for n, entry in enumerate(numbers.tolist()):
        counted = [number for i, number in enumerate(entry) if padding is None or padding[n, i]]
        runs = [number for i, number in enumerate(counted) if number >= 0 and (i == 0 or counted[i - 1] != number)]
        whole = whole and len(set(runs)) == len(runs)
    mask = integration.mask(**place)
    assert (mask.dtype is torch.bool) != whole
    if whole:
        assert agrees(mask, place, padding)
    else:
        assert torch.equal(mask, masking_utils.sdpa_mask(**place, allow_is_causal_skip=False))


def dense_rules():
    numbers, position_ids = torch.tensor([[0, 0, 1, 1, 1]]), torch.tensor([[0, 1, 0, 1, 2]])
    blocked = masking_utils.or_masks(CAUSAL, blockwise(numbers))
    packed, both = masking_utils.packed_sequence_mask_function(numbers), masking_utils.and_masks
    return {
        "a function of the caller's": both(CAUSAL, lambda b, h, q, k: (q + k) % 2 == 0),
        "no function": functools.partial(CAUSAL),
        "blocks of renumbered places": compose(blocked, position_ids, numbers),
        "numbers of the model's own": packed,
        "and causality": both(packed, CAUSAL),
        "or causality": masking_utils.or_masks(packed, CAUSAL),
        "renumbered places alone": masking_utils.remap_positions_for_packed_sequence(CAUSAL, position_ids),
        "packed within a union": both(compose(CAUSAL, position_ids, numbers), masking_utils.or_masks(packed, CAUSAL)),
        "no window": both(masking_utils.sliding_window_overlay(0), masking_utils.bidirectional_mask_function),
        "blocks of one entry more": masking_utils.or_masks(CAUSAL, blockwise(numbers.repeat(2, 1))),
    }


@pytest.mark.parametrize("name", dense_rules() if blockwise and compose else [])
def test_other_rules_stay_dense(name):
    rule = dense_rules()[name]
    place = dict(batch_size=1, q_length=5, kv_length=5, mask_function=rule)
    mask = integration.mask(**place)
    assert torch.equal(mask, masking_utils.sdpa_mask(**place, allow_is_causal_skip=False))


def test_a_mask_takes_memory_for_its_columns_alone():
    rule = masking_utils.chunked_causal_mask_function(100, torch.zeros(2, dtype=torch.int64))
    mask = integration.mask(2, 500, 3000, 2500, mask_function=rule)
    assert mask.dtype is torch.int32 and mask.untyped_storage().nbytes() == 2 * (500 + 3000) * 4 * 4


def test_the_host_reads_no_mask():
    """Fake tensors have no values to be read; of blocks it would."""
    with FakeTensorMode():
        padding, held = torch.ones(2, 9, dtype=torch.bool), torch.tensor(4)
        chunked = masking_utils.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int64))
        place = dict(q_length=5, kv_length=12, q_offset=held, attention_mask=padding)
        assert integration.mask(2, **place, mask_function=chunked).shape == (2, 5, 12 + 5, 4)
        blocked = masking_utils.or_masks(CAUSAL, blockwise(torch.zeros(2, 12, dtype=torch.int64)))
        assert integration.mask(2, **place, mask_function=blocked).dtype is torch.bool


def test_softcap_sinks_and_gradients():
    """As with the masks that layers take apart, and unlike with dense ones."""
    rule = masking_utils.or_masks(CAUSAL, blockwise(torch.tensor([[0, 0, 0, -1, 1, 1, 1, -1, -1]] * 3)))
    mask = integration.mask(3, 9, 9, mask_function=rule)
    seen, sinks = columns_of(mask, 9, 9, 3), torch.randn(4)
    results = []
    for attended in (
        lambda *x: integration.attend(layer(), *x[:3], mask, softcap=0.7, s_aux=x[3])[0],
        lambda *x: dense(x[:3], seen, x[3], 0.7),
    ):
        leaves = [x.clone().requires_grad_() for x in (*rows(9, 9), sinks)]
        out = attended(*leaves)
        probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
        results.append([out, *torch.autograd.grad((out * probe).sum(), leaves)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_a_gpu_is_not_waited_for():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only Hopper's kernels take column masks")
    inputs = [x.to("cuda", torch.bfloat16) for x in rows(5, 12)]
    padding = torch.tensor([[1] * 9, [0] * 6 + [1] * 3, [1] * 7 + [0] * 2], device="cuda").bool()
    rule = masking_utils.chunked_causal_mask_function(4, torch.tensor([0, 6, 0], device="cuda"))
    place = dict(q_length=5, kv_length=12, q_offset=torch.tensor(4, device="cuda"), device="cuda", mask_function=rule)

    def attended():
        return integration.attend(layer(), *inputs, integration.mask(3, attention_mask=padding, **place))[0]

    expected = attended()  # what is done once is done now
    with host_never_waits():
        out = attended()
    assert torch.equal(out, expected)
    seen = masking_utils.sdpa_mask(3, **place, attention_mask=padding, allow_is_causal_skip=False)
    torch.testing.assert_close(out.double(), dense(inputs, seen), rtol=0, atol=0.03)


def test_wide_heads_are_for_pytorch(monkeypatch):
    monkeypatch.setattr(flashtile.sdpa, "_said", set())
    rule = masking_utils.chunked_causal_mask_function(4, torch.zeros(3, dtype=torch.int64))
    mask = integration.mask(3, 9, 9, mask_function=rule)
    seen, inputs = columns_of(mask, 9, 9, 3), [torch.cat([x] * 33, dim=-1) for x in rows(9, 9)]  # 264
    with pytest.warns(flashtile.sdpa.FallbackWarning, match="head dimension 264"):
        out, _ = integration.attend(layer(), *inputs, mask)
    torch.testing.assert_close(out, dense(inputs, seen).float())


def test_columns_say_all():
    """Neither positions nor offsets nor what the layer says of itself counts, as for eager attention."""
    rule = masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64))
    inputs, mask = rows(6, 6, batch=1), integration.mask(1, 6, 6, mask_function=rule)
    expected, _ = integration.attend(layer(), *inputs, mask)
    offsets = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), (0, 3, 6))
    for options in (offsets, {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}, {"sliding_window": 2}):
        assert torch.equal(integration.attend(layer(False), *inputs, mask, **options)[0], expected)


def test_masks_of_other_rows_are_refused():
    rule = masking_utils.chunked_causal_mask_function(4, torch.zeros(3, dtype=torch.int64))
    mask = integration.mask(3, 6, 9, 3, mask_function=rule)
    for wrong, inputs in (
        (mask, rows(5, 9)),
        (mask, rows(6, 8)),
        (mask[:2], rows(6, 9)),
        (mask.long(), rows(6, 9)),
        (mask[..., :3], rows(6, 9)),
        (mask[:, :, :9], rows(6, 9)),
    ):
        with pytest.raises(NotImplementedError, match=r"attention_mask has shape .*, expected the one made for "):
            integration.attend(layer(), *inputs, wrong)


@pytest.mark.parametrize("q_length", [1, 4])
def test_masks_of_changing_sizes_in_a_compiled_layer(q_length):
    module = layer()

    def attended(*inputs):
        return integration.attend(module, *inputs)[0]

    compiled = torch.compile(attended, backend="aot_eager", fullgraph=True, dynamic=True)
    for held in (5, 6, 8):
        rule = masking_utils.chunked_causal_mask_function(3, torch.tensor([0, 2, 1]))
        padding = torch.arange(held) >= torch.tensor([0, 2, 1])[:, None]
        mask = integration.mask(3, q_length, held, held - q_length, mask_function=rule, attention_mask=padding)
        inputs = *rows(q_length, held), mask
        torch.testing.assert_close(compiled(*inputs), attended(*inputs))


# ---- models

TEXT = DECODER | dict(initializer_range=0.3)
LOCAL = dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"])
VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, patch_size=4)
IMAGE = 98  # the token that stands for a part of an image
PALI = dict(projection_dim=32, image_token_index=IMAGE, pad_token_id=0)
PALI_VISION = VISION | dict(image_size=8, projection_dim=32)
CHUNKS = dict(intermediate_size_mlp=48, attention_chunk_size=4, num_local_experts=3, num_experts_per_tok=1)
MODELS = {
    "llama4": ("Llama4", "Llama4ForCausalLM", "Llama4TextConfig", TEXT | CHUNKS | dict(num_hidden_layers=4)),
    "gemma3": (
        "Gemma3",
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        dict(text_config=TEXT | LOCAL, vision_config=VISION | dict(image_size=16), mm_tokens_per_image=4)
        | dict(image_token_index=IMAGE, pad_token_id=0),
    ),
    "paligemma": (
        "PaliGemma",
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        PALI | dict(text_config=TEXT | dict(model_type="gemma"), vision_config=PALI_VISION),
    ),
    "paligemma2": (
        "PaliGemma",
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        PALI
        | dict(
            text_config=TEXT | LOCAL | dict(model_type="gemma2", attn_logit_softcapping=1.0, query_pre_attn_scalar=8),
            vision_config=PALI_VISION,
        ),
    ),
}
PADDING = {
    "none": [[1] * 15] * 3,
    "left": [[1] * 15, [0] * 3 + [1] * 12, [0] * 5 + [1] * 10],
    "right": [[1] * 15, [1] * 12 + [0] * 3, [1] * 10 + [0] * 5],
}


@functools.cache
def model_of(name):
    """Weights so large that attention is no mean over all."""
    _, model, config, sizes = MODELS[name]
    torch.manual_seed(5)
    model = getattr(transformers, model)
    return model._from_config(getattr(transformers, config)(**sizes), attn_implementation="eager").eval()


def inputs_of(name, padding, images=True):
    """Fifteen tokens a row, of which five, from the sixth on, are of the two images or the one."""
    counts = torch.tensor(PADDING[padding])
    inputs = {"input_ids": tokens(3, 15).clamp(max=IMAGE - 1), "attention_mask": counts}
    if name == "llama4":
        return inputs | {"position_ids": places(counts)}
    places_of_images = torch.zeros(3, 15, dtype=torch.bool)
    places_of_images[:, 5:9] = True
    inputs["token_type_ids"] = places_of_images.long()
    if name.startswith("paligemma"):
        suffix = torch.arange(15) >= torch.tensor([11, 10, 9])[:, None]
        inputs["token_type_ids"] = (suffix & counts.bool()).long()  # padding, too, has type 0, of the prefix
    if images:
        size = model_of(name).config.vision_config.image_size
        inputs["pixel_values"] = torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(1))
        inputs["input_ids"] = inputs["input_ids"].masked_fill(places_of_images, IMAGE)
    return inputs


@pytest.fixture
def no_dense_masks(monkeypatch):
    """No mask of several queries is written out by flashtile's mask function, nor by its attention."""
    original, made = integration._as_dense, []

    def checked(function, **place):
        assert place["q_length"] == 1
        return original(function, **place)

    def noted(ranges, seqlen_q):
        made.append(ranges.shape)
        return masks.write_columns(ranges, seqlen_q)

    monkeypatch.setattr(integration, "_as_dense", checked)
    monkeypatch.setattr(integration, "write_columns", noted)
    yield made
    assert made


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name, padding, no_dense_masks):
    inputs = inputs_of(name, padding)
    check(model_of(name), inputs | {"use_cache": False}, inputs["attention_mask"])


@pytest.mark.parametrize("cache", ["dynamic", "static", "beams"])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", ["llama4", "gemma3", "paligemma"])
def test_generation(name, padding, cache, no_dense_masks):
    options = {"dynamic": {}, "static": {"cache_implementation": "static"}, "beams": {"num_beams": 2}}[cache]
    inputs = inputs_of(name, padding)
    inputs.pop("position_ids", None)
    check_generation(model_of(name), inputs, **options)


@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache"])
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", ["llama4", "gemma3"])
def test_prompts_in_parts(name, padding, kind, no_dense_masks):
    """Several new tokens at a time over a cache, of which parts of images see what is there; then one at a time."""
    whole, logits = inputs_of(name, padding, images=False), []
    counts = whole["attention_mask"]
    for implementation in ("flashtile", "eager"):
        model = switched(model_of(name), implementation)
        options = {"max_cache_len": 20} if kind == "StaticCache" else {}
        cache, parts = getattr(transformers, kind)(config=model.config.get_text_config(), **options), []
        with torch.no_grad():
            for begin, end in ((0, 3), (3, 9), (9, 13), (13, 14), (14, 15)):
                inputs = {"attention_mask": counts[:, :end], "past_key_values": cache}
                inputs["position_ids"] = places(counts)[:, begin:end]
                if name == "gemma3":
                    inputs["token_type_ids"] = whole["token_type_ids"][:, :end]
                parts.append(model(whole["input_ids"][:, begin:end], **inputs).logits)
        logits.append(torch.cat(parts, dim=1)[counts.bool()])
    assert_close(*logits)


def test_packed_sequences(no_dense_masks):
    """Chunks begin anew in each."""
    model, row, lengths = model_of("llama4"), tokens(1, 17), (6, 1, 10)
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        found = switched(model, "flashtile")(row, position_ids=position_ids, use_cache=False).logits
        switched(model, "eager")
        expected = torch.cat([model(part, use_cache=False).logits for part in row.split(lengths, dim=1)], dim=1)
    assert_close(found, expected)


@pytest.mark.parametrize("name", ["llama4", "gemma3"])
def test_compiled_models(name):
    """Of chunks the masks are column masks there, too; a union, as of blocks, is dense."""
    inputs = inputs_of(name, "left", images=False) | {"use_cache": False}
    counts = inputs["attention_mask"].bool()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error" if name == "llama4" else "ignore", flashtile.sdpa.FallbackWarning)
        expected = switched(model_of(name), "eager")(**inputs).logits[counts]
        model = switched(model_of(name), "flashtile")
        found = torch.compile(model, backend="eager")(**inputs).logits[counts]
    assert_close(found, expected)


def test_other_implementations_still_have_no_chunks():
    """transformers refuses its own flash attention for more keys than a chunk; registering again wraps nothing anew."""
    asked = masking_utils.is_flash_attention_requested
    integration.register()
    assert masking_utils.is_flash_attention_requested is asked
    for name, refused in (("flash_attention_2", True), ("sdpa", False), ("flashtile", False)):
        config = transformers.Llama4TextConfig(attention_chunk_size=4)
        config._attn_implementation = name
        assert asked(config) == refused
    assert asked(requested_attention_implementation="flash_attention_2")


def test_llama4_with_images_is_taken():
    """Its parts are made with the same implementation."""
    text = TEXT | CHUNKS | dict(num_hidden_layers=2)
    vision = dict(hidden_size=16, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=8)
    vision |= dict(patch_size=4, vision_output_dim=16, projector_input_dim=16, projector_output_dim=16)
    config = transformers.Llama4Config(text_config=text, vision_config=vision)
    model = transformers.Llama4ForConditionalGeneration._from_config(config, attn_implementation="flashtile")
    assert {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")} == {
        "flashtile"
    }
