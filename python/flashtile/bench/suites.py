"""The shapes that are timed, suite by suite."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any

from flashtile.bench import drawn, invariant, largest
from flashtile.bench.cases import TRAINING, Case, Work
from flashtile.bench.columns import KINDS

TOKENS = 16384
HIDDEN = 2048
LLAMA_HEADS, LLAMA_KV_HEADS = (32, 64), 8  # Llama 3 8B and 70B
RAGGED_HEADS = ((16, 16), (32, 8))
DECODE_HEADS = ((32, 8, 128), (16, 16, 128), (64, 8, 64))  # H_q, H_k, D
DECODE_SIZES = ((1, 8192), (1, 131072), (4, 8192), (16, 8192), (64, 4096), (128, 4096), (128, 8192))  # B, S_k
PREFILL_SIZES = ((16, 128, 2048), (4, 512, 8192), (1, 2048, 32768))  # B, S_q, S_k
CASCADES = ((64, 8192, 512), (16, 32768, 512))  # B, keys of all, keys of each
# Chunks, their queries, their keys, single tokens, whose keys are spread over a range.
MIXED_BATCHES = ((4, 512, 8192, 64), (2, 2048, 8192, 128), (1, 512, 8192, 128), (1, 2048, 8192, 16))
MIXED_HEADS = ((32, 8, 128), (16, 16, 128))  # H_q, H_k, D
FEWEST_HELD, MOST_HELD = 4096, 16384
TREE_LAYOUTS = (("fan_out_tree", 0), ("fan_out_tree", 16), ("random_tree", 16))  # kinds, page sizes
TREE_SIZES = tuple(itertools.product((6, 16, 64), (1, 16, 64), (2048, 8192)))  # S_q, B, S_k
TREE_HEADS = ((32, 8, 64), (32, 8, 128))  # H_q, H_k, D
MASK_TOKENS = 32768
MASK_HEADS = ((32, 8, 64), (16, 16, 128), (8, 8, 256))  # H_q, H_k, D
LONG_MASKS = ("causal", "causal_document", "document", "share_question")
NAMES = (
    *("forward", "backward", "varlen", "masks", "decode", "prefill", "serving", "fp8"),
    *("memory", "host", "cpu", "random", "invariant", "max-logits"),
)
# Suites of calls with an option and without: each module has cases_of(dtype, part of a GPU's lengths) and peers_of().
OF_OPTIONS = {module.SUITE: module for module in (invariant, largest)}
MEMORY = (Work.FORWARD, Work.FORWARD_WITH_GRAD, Work.BACKWARD)


def cases(
    name: str, *, dtype: str = "bfloat16", device_type: str = "cuda", full: bool = False, seed: int = 0
) -> list[Case]:
    """The cases of one suite. `full` adds the lengths in between, to "masks" what kinds lack of heads and lengths, to
    "random", which alone knows seeds, as many cases again. `dtype` is ignored by "cpu" and "random", which have
    several."""
    if name in ("forward", "backward"):
        return _gpu(Work(name), dtype, full)
    if name == "varlen":
        return _varlen(dtype, device_type, full)
    if name == "masks":
        return _masks(dtype, device_type, full)
    if name == "decode":
        return _decode(dtype, device_type)
    if name == "prefill":
        return _prefill(dtype, device_type)
    if name == "serving":
        return _serving(dtype, device_type)
    if name == "fp8":
        return _fp8(dtype, full)
    if name == "memory":
        return _memory(dtype, full)
    if name == "host":
        return _host(dtype, device_type)
    if name == "cpu":
        return _cpu()
    if name in OF_OPTIONS:
        return OF_OPTIONS[name].cases_of(dtype, 1 if device_type == "cuda" else 8)
    if name == "random":
        return drawn.cases(seed, times=2 if full else 1)
    raise ValueError(f"bench: suite is {name!r}, expected one of {', '.join(NAMES)}")


def quick(name: str, *, dtype: str = "bfloat16", device_type: str = "cuda") -> list[Case]:
    """A few small cases that show in seconds that everything runs; their ratios say little."""
    if name == "host":
        return _host(dtype, device_type)
    if name == "varlen":
        return [
            Case.ragged(lengths, *heads, 64, dtype=dtype, causal=True, work=work)
            for work, (lengths, heads) in itertools.product(
                TRAINING, (((128, 128), (2, 2)), ((37, 3, 256), (2, 2)), ((37, 3, 256), (4, 1)))
            )
        ]
    if name == "masks":
        return [
            Case(2, 256, 256, 4, 2, 64, 64, dtype=dtype, columns=kind, work=work)
            for work, kind in itertools.product(TRAINING, KINDS)
        ]
    if name == "decode":
        sizes = ((1, 512, 4, 2, 64), (3, 128, 4, 4, 64), (2, 256, 8, 1, 128))
        return [Case.decode(*each, dtype=dtype) for each in sizes]
    if name == "prefill":
        return [Case.prefill(*each, dtype=dtype) for each in ((2, 64, 256, 4, 2, 64), (1, 192, 320, 8, 1, 128))]
    if name == "serving":
        return [
            Case.cascade(3, 64, 48, 4, 2, 64, dtype=dtype),
            Case.mixed((24, 40, 1, 1), (100, 40, 70, 1), 4, 2, 64, dtype=dtype),
            Case.tree("fan_out_tree", 2, 16, 100, 4, 2, 64, dtype=dtype),
            Case.tree("random_tree", 3, 8, 70, 4, 2, 64, dtype=dtype, page_size=16),
        ]
    if name == "fp8":
        heads = ((1, 256, 2, 2, 64), (2, 200, 4, 2, 128), (1, 130, 2, 1, 256))
        return [
            Case(batch, rows, rows, heads_q, heads_k, head_dim, head_dim, dtype=dtype, causal=causal, work=Work.FP8)
            for (batch, rows, heads_q, heads_k, head_dim), causal in itertools.product(heads, (False, True))
        ]
    if name == "random":
        return _of_every_kind(dtype)
    if name in OF_OPTIONS:
        return OF_OPTIONS[name].cases_of(dtype, 64)
    if name == "cpu":
        dtype = "float32"
    works = {"cpu": TRAINING, "memory": MEMORY}.get(name) or (Work(name),)
    return [
        Case.square(1, 256, 2, 64, dtype=dtype, causal=causal, work=work)
        for work, causal in itertools.product(works, (False, True))
    ]


def _of_every_kind(dtype: str) -> list[Case]:
    window: dict[str, Any] = {"causal": True, "window": (20, 0)}
    given: Sequence[dict[str, Any]] = ({"softcap": 30.0}, {"alibi": True}, {"sinks": True}, {"dropout_p": 0.1}, window)
    problems = [
        *(Case(1, 61, 61, 4, 2, 64, 64, dtype=dtype, **options) for options in ({}, *given)),
        *(Case.ragged((37, 3, 64), 4, 1, 72, dtype=dtype, **options) for options in ({"causal": True}, *given)),
        Case(2, 24, 71, 2, 2, 64, 64, dtype=dtype, causal=True),
        Case(2, 64, 5, 2, 2, 64, 64, dtype=dtype),
    ]
    pages: dict[str, Any] = {"dtype": dtype, "page_size": drawn.PAGE_SIZE}
    return [
        *(dataclasses.replace(case, work=work) for case, work in itertools.product(problems, TRAINING)),
        Case.prefill(2, 24, 71, 4, 2, 64, **pages),
        Case.decode(3, 71, 4, 2, 64, **pages),
    ]


def demo(device_type: str) -> list[Case]:
    """What `flashtile demo` times: a few seconds' worth on this device."""
    if device_type == "cuda":
        return [
            Case.square(TOKENS // seqlen, seqlen, HIDDEN // head_dim, head_dim, causal=causal)
            for head_dim, seqlen, causal in itertools.product((64, 128), (2048, 8192), (False, True))
        ]
    return [
        Case.square(2, 1024, 4, head_dim, dtype=dtype, causal=True, work=work)
        for head_dim, dtype, work in itertools.product((64, 128), ("float32", "bfloat16"), TRAINING)
    ]


def _gpu(work: Work, dtype: str, full: bool) -> list[Case]:
    return _squares(work, dtype, _seqlens(full)) + _llama(work, dtype, (8192,))


def _fp8(dtype: str, full: bool) -> list[Case]:
    lengths = sorted({*_seqlens(full), 8192})
    return _squares(Work.FP8, dtype, lengths) + _llama(Work.FP8, dtype, (2048, 8192))


def _squares(work: Work, dtype: str, lengths: Sequence[int]) -> list[Case]:
    return [
        Case.square(TOKENS // seqlen, seqlen, HIDDEN // head_dim, head_dim, dtype=dtype, causal=causal, work=work)
        for head_dim, seqlen, causal in itertools.product((64, 128, 256), lengths, (False, True))
    ]


def _llama(work: Work, dtype: str, lengths: Sequence[int]) -> list[Case]:
    return [
        Case(TOKENS // seqlen, seqlen, seqlen, heads, LLAMA_KV_HEADS, 128, 128, dtype=dtype, causal=True, work=work)
        for seqlen, heads in itertools.product(lengths, LLAMA_HEADS)
    ]


def _seqlens(full: bool) -> tuple[int, ...]:
    return (512, 1024, 2048, 4096, 8192, 16384) if full else (512, 2048, 16384)


def _varlen(dtype: str, device_type: str, full: bool) -> list[Case]:
    # The equal lengths are the forward suite's, for what raggedness itself costs. On a CPU lengths and heads are an
    # eighth of a GPU's.
    part = 1 if device_type == "cuda" else 8
    cases = []
    for work in TRAINING:
        options = {"dtype": dtype, "work": work}
        for head_dim, seqlen, causal in itertools.product((64, 128, 256), _seqlens(full), (False, True)):
            heads, lengths = HIDDEN // head_dim // part, [seqlen // part] * (TOKENS // seqlen)
            cases.append(Case.ragged(lengths, heads, heads, head_dim, causal=causal, **options))
        cases += [
            Case.ragged(lengths, heads // part, kv_heads // part, 128, causal=True, **options)
            for lengths, (heads, kv_heads) in itertools.product((skewed(part), mixed(part)), RAGGED_HEADS)
        ]
    return cases


def _masks(dtype: str, device_type: str, full: bool) -> list[Case]:
    part = 1 if device_type == "cuda" else 8
    problems = [
        *((kind, 8192, heads) for heads, kind in itertools.product(MASK_HEADS, KINDS)),
        *((kind, 32768, MASK_HEADS[1]) for kind in LONG_MASKS),
    ]
    if full:
        pairs, head_dims = ((16, 16), (32, 8)), (64, 128, 256)
        problems += [
            (kind, seqlen, (*pair, head_dim))
            for seqlen, head_dim, pair, kind in itertools.product((8192, 32768), head_dims, pairs, KINDS)
        ]
    cases = []
    for work, (kind, seqlen, (heads, kv_heads, head_dim)) in itertools.product(TRAINING, dict.fromkeys(problems)):
        sizes = MASK_TOKENS // seqlen, seqlen // part, seqlen // part, heads // part, kv_heads // part
        cases.append(Case(*sizes, head_dim, head_dim, dtype=dtype, columns=kind, work=work))
    return cases


def skewed(part: int = 1) -> list[int]:
    """One long sequence in the midst of many short ones."""
    short = [100 // part] * 32
    return [*short, TOKENS // part, *short]


def mixed(part: int = 1) -> list[int]:
    """Lengths from 1 to 2048, the same in every run."""
    source = random.Random(0)
    return [source.randint(1, 2048 // part) for _ in range(32)]


def _decode(dtype: str, device_type: str) -> list[Case]:
    part = 1 if device_type == "cuda" else 8
    return [
        Case.decode(batch, seqlen // part, heads // part, kv_heads // part, head_dim, dtype=dtype)
        for (heads, kv_heads, head_dim), (batch, seqlen) in itertools.product(DECODE_HEADS, DECODE_SIZES)
    ]


def _prefill(dtype: str, device_type: str) -> list[Case]:
    part = 1 if device_type == "cuda" else 8
    return [
        Case.prefill(batch, chunk // part, seqlen // part, heads // part, kv_heads // part, head_dim, dtype=dtype)
        for (heads, kv_heads, head_dim), (batch, chunk, seqlen) in itertools.product(DECODE_HEADS, PREFILL_SIZES)
    ]


def _serving(dtype: str, device_type: str) -> list[Case]:
    part = 1 if device_type == "cuda" else 8
    cases = [
        Case.cascade(batch, prefix // part, own // part, heads // part, kv_heads // part, head_dim, dtype=dtype)
        for (heads, kv_heads, head_dim), (batch, prefix, own) in itertools.product(DECODE_HEADS, CASCADES)
    ]
    for (heads, kv_heads, head_dim), batch in itertools.product(MIXED_HEADS, MIXED_BATCHES):
        chunks, queries, keys, tokens = batch
        source = random.Random(0)
        held = [source.randint(FEWEST_HELD // part, MOST_HELD // part) for _ in range(tokens)]
        lengths = [*[queries // part] * chunks, *[1] * tokens]
        keys_of_each = [*[keys // part] * chunks, *held]
        cases.append(Case.mixed(lengths, keys_of_each, heads // part, kv_heads // part, head_dim, dtype=dtype))
    return cases + _trees(dtype, part)


def _trees(dtype: str, part: int) -> list[Case]:
    return [
        Case.tree(
            *(kind, batch, drafts, seqlen // part, heads // part, kv_heads // part, head_dim),
            dtype=dtype,
            page_size=page_size,
        )
        for (heads, kv_heads, head_dim), (kind, page_size), (drafts, batch, seqlen) in itertools.product(
            TREE_HEADS, TREE_LAYOUTS, TREE_SIZES
        )
    ]


def _memory(dtype: str, full: bool) -> list[Case]:
    # One sequence: what grows with its square shows soonest.
    return [
        Case.square(1, seqlen, HIDDEN // head_dim, head_dim, dtype=dtype, causal=True, work=work)
        for work, head_dim, seqlen in itertools.product(MEMORY, (64, 128, 256), _seqlens(full))
    ]


def _host(dtype: str, device_type: str) -> list[Case]:
    # A CPU call returns when the work is done, so only a problem of one token shows the cost of the call itself.
    seqlen = 128 if device_type == "cuda" else 1
    works = (Work.FORWARD, Work.FORWARD_WITH_GRAD, Work.COMPILED, Work.COMPILED_WITH_GRAD)
    return [Case.square(1, seqlen, 16, 128, dtype=dtype, work=work) for work in works]


def _cpu() -> list[Case]:
    return [
        Case.square(2, 2048, 8, head_dim, dtype=dtype, causal=causal, work=work)
        for work, head_dim, dtype, causal in itertools.product(
            TRAINING, (64, 128), ("float32", "bfloat16"), (False, True)
        )
    ]
