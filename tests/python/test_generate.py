"""examples/generate.py: both caches give the same text, pages come back, and what is wrong is seen."""

import runpy
import types
from pathlib import Path

import pytest
import torch

import flashtile

CPU = torch.device("cpu")
generate = types.SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "examples" / "generate.py")))
SMALL = generate.Config(vocabulary=50, layers=2, width=64, heads=4, kv_heads=2)
OPTIONS = ["--device=cpu", "--requests=12", "--prompt=40", "--output=8", "--slots=4", "--vocabulary=50"]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return generate.Llama(SMALL)


def requests(*sizes):
    return [generate.Request([(7 * i + size) % 50 for i in range(size)], count) for size, count in sizes]


def paged(pages, page_size=16, slots=3, longest=64):
    return generate.PagedCache(SMALL, slots, longest, pages, page_size, CPU, torch.float32)


def texts(model, cache, wanted, slots=3):
    generate.Generator(model, cache, slots, CPU)(wanted)
    assert [len(request.tokens) for request in wanted] == [request.count for request in wanted]
    return [request.tokens for request in wanted]


SIZES = (1, 1), (40, 5), (16, 17), (3, 1), (17, 9), (30, 20)


@pytest.mark.parametrize("pages, page_size", [(4, 16), (12, 16), (64, 1), (49, 3), (1, 64)])
def test_the_text_depends_on_neither_pages_nor_neighbours(model, pages, page_size):
    cache = paged(pages, page_size)
    found = texts(model, cache, requests(*SIZES))
    expected = [texts(model, paged(1, 64, slots=1), requests(size), slots=1)[0] for size in SIZES]
    assert found == expected
    assert found == texts(model, generate.PaddedCache(SMALL, 3, 64, CPU, torch.float32), requests(*SIZES))
    assert sorted(cache.free_pages) == list(range(3, 3 + pages)) and not cache.owned_pages
    assert (cache.block_table == torch.arange(3)[:, None]).all() and not cache.held.any()


def test_nobody_owns_the_page_of_another_or_of_slots_without_a_request(model):
    cache, seen = paged(7), set()
    admit = cache.admit

    def watched(slot, length):
        admitted = admit(slot, length)
        owned = [page for pages in cache.owned_pages.values() for page in pages]
        assert sorted(owned + cache.free_pages) == list(range(3, 10))
        seen.add((admitted, len(cache.owned_pages)))
        return admitted

    cache.admit = watched
    texts(model, cache, requests(*SIZES))
    assert (True, 3) in seen  # as many at once as there are slots
    assert any(not admitted for admitted, _ in seen)  # and somebody waited for pages


def test_a_request_that_never_fits_is_refused(model):
    with pytest.raises(ValueError, match="a request of 20 rows does not fit into the cache"):
        texts(model, paged(1), requests((16, 5)))


def test_a_difference_counts_up_to_the_first_token_that_differs():
    def request(tokens, logits):
        return generate.Request([1], len(tokens), tokens, logits)

    ours, theirs = request([3, 4, 5], [1.0, 2.0, 9.0]), request([3, 7, 5], [1.25, 2.5, 1.0])
    assert generate.largest_difference([ours], [ours]) == 0
    assert generate.largest_difference([ours], [theirs]) == 0.5


def test_both_generate_the_same(capsys):
    generate.main(OPTIONS)
    assert "12 of 12 texts are the same" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [{"scale": 0.19}, {"rotary_interleaved": True}, {"causal": False}])
def test_a_wrong_attention_fails(wrong, monkeypatch):
    right = flashtile.attention_kvcache
    monkeypatch.setattr(flashtile, "attention_kvcache", lambda *args, **options: right(*args, **options | wrong))
    with pytest.raises(SystemExit, match="flashtile and SDPA do not agree"):
        generate.main(OPTIONS)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_on_a_gpu(dtype):
    small = ["--layers=2", "--width=256", "--heads=4", "--kv-heads=2"]
    generate.main([*OPTIONS, *small, "--device=cuda", f"--dtype={dtype}", "--requests=40"])
