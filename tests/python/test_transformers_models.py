"""attn_implementation="flashtile" next to eager attention, of tiny models of many families."""

import functools
import inspect
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_transformers import DECODER, PADDING, SIZES, _registered, assert_close, places, switched, tokens  # noqa: F401

import flashtile

transformers = pytest.importorskip("transformers", minversion="5.4", reason="needs transformers 5.4 or newer")

BASE = DECODER | dict(initializer_range=0.3, sliding_window=5)
LAYERS = dict(layer_types=["sliding_attention", "full_attention"])
EXPERTS = dict(num_local_experts=3, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16)
GEMMA = LAYERS | dict(query_pre_attn_scalar=8, attn_logit_softcapping=1.0, tie_word_embeddings=False)
QWEN = LAYERS | dict(use_sliding_window=True)
CAUSAL = {  # a model, and what its config has besides BASE
    "Afmoe": EXPERTS | dict(global_attn_every_n_layers=2, num_dense_layers=1),
    "Cohere2": LAYERS,
    "DiffLlama": {},
    "Exaone4": LAYERS,
    "GPT2": dict(n_embd=32, n_head=4, n_layer=2, n_positions=64, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
    "Gemma": {},
    "Gemma2": GEMMA,
    "Gemma3Text": GEMMA | dict(attn_logit_softcapping=None),
    "Gemma4Text": LAYERS | dict(global_head_dim=264, hidden_size_per_layer_input=8, vocab_size_per_layer_input=99),
    "GptOss": EXPERTS | LAYERS,
    "Granite": {},
    "Lfm2": dict(layer_types=["conv", "full_attention"]),
    "Ministral": LAYERS,
    "Mistral": {},
    "Mixtral": EXPERTS,
    "ModernBertDecoder": LAYERS,
    "Moshi": {},
    "OPT": dict(ffn_dim=48, word_embed_proj_dim=32, dropout=0.0, init_std=0.3),
    "Olmo3": LAYERS,
    "Phi3": {},
    "Phimoe": EXPERTS,
    "Qwen2": QWEN,
    "Qwen2Moe": QWEN | EXPERTS | dict(shared_expert_intermediate_size=16),
    "Qwen3": QWEN,
    "SmolLM3": QWEN,
    "Starcoder2": dict(residual_dropout=0.0, embedding_dropout=0.0),
    "VaultGemma": GEMMA,
}
IN_PARTS = ["Cohere2", "GPT2", "Gemma2", "Gemma3Text", "Gemma", "GptOss", "Mistral", "Phi3", "Qwen2", "Qwen2Moe"]
ENCODER = SIZES | dict(max_position_embeddings=64, initializer_range=0.3, pad_token_id=0, bos_token_id=1)
ENCODERS = {
    "Bert": {},
    "Electra": dict(embedding_size=32),
    "Esm": dict(position_embedding_type="rotary", mask_token_id=98, token_dropout=False),
    "EuroBert": dict(num_key_value_heads=2),
    "ModernBert": LAYERS | dict(local_attention=8),
    "NomicBert": {},
    "Roberta": {},
    "Ultrabert": LAYERS | dict(sliding_window=4, num_key_value_heads=2, head_dim=8),
}
HEADS = dict(encoder_attention_heads=4, decoder_attention_heads=4, encoder_layers=2, decoder_layers=2)
SPECIAL = dict(bos_token_id=1, eos_token_id=None, pad_token_id=0, decoder_start_token_id=1, forced_eos_token_id=None)
BART = HEADS | SPECIAL | dict(d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=99, init_std=0.3)
BART |= dict(max_position_embeddings=64, dropout=0.0)
SEQ2SEQ = {
    "Bart": BART,
    "M2M100": BART,
    "Pegasus": BART,
    "T5Gemma": SPECIAL
    | dict(vocab_size=99, initializer_range=0.3, encoder=BASE | GEMMA, decoder=BASE | GEMMA, dropout_rate=0.0),
}
AUDIO = {  # of signals or spectra of this shape
    "Moonshine": ((2, 8000), SPECIAL | DECODER | dict(encoder_num_hidden_layers=2, decoder_num_hidden_layers=2)),
    "Whisper": ((2, 8, 100), BART | dict(max_source_positions=50, max_target_positions=32, num_mel_bins=8)),
}
AUDIO["Moonshine"][1].update(encoder_num_attention_heads=4, decoder_num_attention_heads=4, initializer_range=0.3)
WIDE = "Gemma4Text"  # whose heads are for PyTorch


@functools.cache
def model_of(name, *heads):
    """Weights so large that attention is no mean over all."""
    plain = name.removesuffix("Text")
    classes = [plain + head for head in heads if hasattr(transformers, plain + head)]
    if not classes or not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    sizes = {**CAUSAL, **ENCODERS, **SEQ2SEQ, **{audio: sizes for audio, (_, sizes) in AUDIO.items()}}[name]
    sizes = (BASE if name in CAUSAL else ENCODER if name in ENCODERS else {}) | sizes
    torch.manual_seed(5)
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, classes[0])._from_config(config, attn_implementation="eager").eval()
    if not model._can_set_attn_implementation():
        pytest.skip(f"{name} of transformers {transformers.__version__} keeps the attention it was made with")
    return model


@pytest.fixture(autouse=True)
def _fallbacks_are_errors(request):
    with warnings.catch_warnings():
        expected = WIDE in request.node.name
        warnings.simplefilter("ignore" if expected else "error", flashtile.sdpa.FallbackWarning)
        yield


def check(model, inputs, counts=None):
    """Logits of rows that count, and the gradients of all weights."""
    results = []
    for implementation in ("flashtile", "eager"):
        logits = switched(model, implementation)(**inputs).logits
        logits = logits if counts is None else logits[counts.bool()]
        probe = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        results.append([logits, *torch.autograd.grad((logits * probe).sum(), weights, allow_unused=True)])
    for found, expected in zip(*results, strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            assert_close(found, expected)


def check_generation(model, inputs, **options):
    """The tokens, and the logits that choose them, since some models like one token best wherever they are."""
    options |= dict(do_sample=False, max_new_tokens=7, min_new_tokens=7, pad_token_id=0)
    options |= dict(return_dict_in_generate=True, output_logits=True)
    found, expected = (
        switched(model, implementation).generate(**inputs, **options) for implementation in ("flashtile", "eager")
    )
    assert torch.equal(found.sequences, expected.sequences)
    assert_close(torch.stack(found.logits), torch.stack(expected.logits))


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", CAUSAL)
def test_decoders(name, padding):
    model = model_of(name, "ForCausalLM", "LMHeadModel")
    inputs, counts = {"input_ids": tokens()}, None
    if padding != "none":
        counts = inputs["attention_mask"] = torch.tensor(PADDING[padding])
        if "position_ids" in inspect.signature(model.forward).parameters:
            inputs["position_ids"] = places(counts)
    check(model, inputs, counts)


OPTIONS = {"dynamic": {}, "static": {"cache_implementation": "static"}, "beams": {"num_beams": 3}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", CAUSAL)
def test_generation(name, options):
    model = model_of(name, "ForCausalLM", "LMHeadModel")
    check_generation(model, {"input_ids": tokens(), "attention_mask": torch.tensor(PADDING["left"])}, **options)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_prompts_in_any_parts(data):
    """Over caches of every kind, with padding of every length on either side, and parts longer than the window."""
    model = model_of(data.draw(st.sampled_from(IN_PARTS), "name"), "ForCausalLM", "LMHeadModel")
    batch, length = data.draw(st.integers(1, 3), "batch"), data.draw(st.integers(2, 16), "length")
    ends = [*sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=4), "ends")), length]
    counts = torch.ones(batch, length, dtype=torch.int64)
    side = data.draw(st.sampled_from(["no mask", "none", "left", "right"]), "padding")
    for row in counts if side in ("left", "right") else ():
        hidden = data.draw(st.integers(0, length - 1), "hidden")
        row[:hidden] = 0
        row.copy_(row.flip(0) if side == "right" else row)
    kind = data.draw(st.sampled_from(["DynamicCache", "StaticCache"]), "cache")
    results = []
    for implementation in ("flashtile", "eager"):
        switched(model, implementation)
        capacity = {"max_cache_len": 20} if kind == "StaticCache" else {}
        cache, begin, parts = getattr(transformers, kind)(config=model.config, **capacity), 0, []
        for end in ends:
            inputs = {} if side == "no mask" else {"attention_mask": counts[:, :end]}
            if "position_ids" in inspect.signature(model.forward).parameters:
                inputs["position_ids"] = places(counts)[:, begin:end]
            with torch.no_grad():
                parts.append(model(tokens(batch, length)[:, begin:end], past_key_values=cache, **inputs).logits)
            begin = end
        results.append(torch.cat(parts, dim=1)[counts.bool()])
    assert_close(*results)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", ["Mistral", "Gemma2", "GptOss"])
def test_decoders_that_look_ahead(name, padding):
    """is_causal=False makes encoders of them, whose window has two sides."""
    counts = None if padding == "none" else torch.tensor(PADDING[padding])
    inputs = {"input_ids": tokens(), "attention_mask": counts, "is_causal": False, "use_cache": False}
    check(model_of(name, "ForCausalLM"), inputs, counts)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(name, padding):
    counts = None if padding == "none" else torch.tensor(PADDING[padding])
    check(model_of(name, "ForMaskedLM"), {"input_ids": tokens(), "attention_mask": counts}, counts)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", SEQ2SEQ)
def test_encoders_with_decoders(name, padding):
    inputs, counts = {"input_ids": tokens(), "decoder_input_ids": tokens(3, 13, 2)}, None
    if padding != "none":
        counts = inputs["attention_mask"] = inputs["decoder_attention_mask"] = torch.tensor(PADDING[padding])
    check(model_of(name, "ForConditionalGeneration"), inputs, counts)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", SEQ2SEQ)
def test_generation_of_encoders_with_decoders(name, options):
    model = model_of(name, "ForConditionalGeneration")
    check_generation(model, {"input_ids": tokens(), "attention_mask": torch.tensor(PADDING["right"])}, **options)


@pytest.mark.parametrize("padding", ["none", "right"])
@pytest.mark.parametrize("name", AUDIO)
def test_decoders_of_sound(name, padding):
    """Moonshine's say that they are not causal where they get a mask."""
    model, shape = model_of(name, "ForConditionalGeneration"), AUDIO[name][0]
    sound = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    inputs, counts = {model.main_input_name: sound, "decoder_input_ids": tokens(2, 13, 2)}, None
    if padding != "none":
        counts = inputs["decoder_attention_mask"] = torch.tensor(PADDING[padding])[:2]
    check(model, inputs, counts)
