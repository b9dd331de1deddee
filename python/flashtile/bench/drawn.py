"""Cases drawn at random, so that a shape or an option that no suite lists is timed too.

The space, where "log-uniform" is a whole number whose logarithm is uniform:

- Kinds, in these numbers (`KINDS`): self-attention; self-attention within ragged batches; a chunk, causal, of new
  tokens over a longer context; queries over few keys, not causal; over pages of 16 rows a chunk, and decoding.
- D as models have it (`HEAD_DIMS`, with weights), D_v = D; bfloat16 four times as often as float16.
- S log-uniform from 128 to 16384, of a context or a cache its keys; every other time a multiple of 16, else none. A
  batch is one of B sequences, 1 to 64, so that B·S is about a log-uniform number of tokens, 1,024 to 49,152 of them.
- A ragged batch has 2 to 64 sequences (log-uniform), each drawn as S is, from 16 tokens on, together as many tokens.
- A chunk has 16 to S / 2 tokens; few keys are 1 to 256; both log-uniform. One key alone has no backward, since its
  weight is 1 and all but one of the gradients are 0.
- Heads: H_q = H_k (weight 3), groups of 2, 4, 7, 8 (1 each), H_k = 1 (1); H_q at most 64, H_k log-uniform.
- Self-attention and ragged batches are causal every other time. Every third of them has one option: a window (causal),
  softcap, ALiBi, sinks or dropout, alike often.
- What would take a forward of more than `MOST_FLOPS`, or more than `MOST_SCORES` for one KV head in the float64 check,
  is drawn again, and so is a window in which all sequences fit.
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

from flashtile.bench.cases import TRAINING, Case

KINDS = {"self": 42, "ragged": 15, "chunk": 9, "cross": 9, "prefill": 7, "decode": 8}
HEAD_DIMS = {32: 1, 64: 4, 72: 1, 80: 1, 88: 1, 96: 1, 104: 1, 112: 1, 128: 5, 160: 1, 192: 1, 256: 1}
GROUPS = {1: 3, 2: 1, 4: 1, 7: 1, 8: 1, None: 1}  # None: one KV head for all
WINDOWS, SOFTCAPS = (128, 512, 1000, 4096), (30.0, 50.0)
SEQLENS, TOKENS = (128, 16384), (1024, 49152)
SHORTEST = 16  # in a ragged batch; of fewer numbers it would be chance who has the smaller errors
MOST_SEQUENCES = MOST_HEADS = 64
MOST_KEYS = 256  # where they are few
PAGE_SIZE = 16
MOST_FLOPS = 2e13  # about 40 ms of an H200, and half a second of its slowest contestant's backward
MOST_SCORES = 2**29  # 4 GiB in float64, of which a backward keeps several copies


def cases(seed: int, times: int = 1) -> list[Case]:
    """The cases of a seed, the same on every machine: of each problem the forward and, but over a cache, the backward.
    `times` as many of each kind are drawn."""
    source = random.Random(seed)
    found = []
    for kind, count in KINDS.items():
        for _ in range(count * times):
            case = _drawn(kind, source)
            no_backward = case.over_a_cache or case.seqlen_k == 1
            found += [case] if no_backward else [dataclasses.replace(case, work=work) for work in TRAINING]
    return found


def _drawn(kind: str, source: random.Random) -> Case:
    while True:
        case = _drawn_of_any_size(kind, source)
        longest = max(case.lengths or [case.seqlen_k])
        queries = longest if case.lengths else case.seqlen_q
        scores = case.heads_q // case.heads_k * queries * longest
        tokens = (1 if case.lengths else case.batch) * (case.seqlen_q if kind == "cross" else case.seqlen_k)
        hides = case.window is None or longest > (case.window[0] or 0)
        if TOKENS[0] <= tokens <= TOKENS[1] and case.flops <= MOST_FLOPS and scores <= MOST_SCORES and hides:
            return case


def _drawn_of_any_size(kind: str, source: random.Random) -> Case:
    heads_q, heads_k = _heads(source)
    head_dim = source.choices(list(HEAD_DIMS), list(HEAD_DIMS.values()))[0]
    sizes = heads_q, heads_k, head_dim
    options: dict[str, Any] = {"dtype": source.choices(("bfloat16", "float16"), (4, 1))[0]}
    if kind in ("self", "ragged"):
        options |= {"causal": source.random() < 0.5} | _option(source)
    if kind == "ragged":
        count = _log_uniform(2, MOST_SEQUENCES, source)
        return Case.ragged([_length(SHORTEST, SEQLENS[1], source) for _ in range(count)], *sizes, **options)
    seqlen = _length(*SEQLENS, source)
    batch = min(max(_log_uniform(*TOKENS, source) // seqlen, 1), MOST_SEQUENCES)
    if kind == "cross":
        keys = _log_uniform(1, MOST_KEYS, source)
        return Case(batch, seqlen, keys, *sizes, head_dim, **options)
    if kind == "self":
        return Case(batch, seqlen, seqlen, *sizes, head_dim, **options)
    if kind == "decode":
        return Case.decode(batch, seqlen, *sizes, page_size=PAGE_SIZE, **options)
    chunk = _log_uniform(16, seqlen // 2, source)
    if kind == "prefill":
        return Case.prefill(batch, chunk, seqlen, *sizes, page_size=PAGE_SIZE, **options)
    return Case(batch, chunk, seqlen, *sizes, head_dim, causal=True, **options)


def _heads(source: random.Random) -> tuple[int, int]:
    group = source.choices(list(GROUPS), list(GROUPS.values()))[0]
    if group is None:
        return _log_uniform(2, MOST_HEADS, source), 1
    heads_k = _log_uniform(1, MOST_HEADS // group, source)
    return group * heads_k, heads_k


def _option(source: random.Random) -> dict[str, Any]:
    """None at all, or every third time one."""
    if source.random() >= 1 / 3:
        return {}
    window = {"causal": True, "window": (source.choice(WINDOWS), 0)}
    softcap = {"softcap": source.choice(SOFTCAPS)}
    return source.choice((window, softcap, {"alibi": True}, {"sinks": True}, {"dropout_p": 0.1}))


def _length(least: int, most: int, source: random.Random) -> int:
    """Every other time the multiple of 16 at or below what is drawn, but at least `least`; else no multiple."""
    length = _log_uniform(least, most, source)
    if source.random() < 0.5:
        return max(length - length % 16, least)
    if length % 16:
        return length
    return length + 1 if length < most else length - 1


def _log_uniform(least: int, most: int, source: random.Random) -> int:
    return min(int(least * math.exp(source.random() * math.log((most + 1) / least))), most)
