"""Peers that run only where they are asked for: FlexAttention, and attentions from outside; one that has the name of a
package that was found takes its place."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from flashtile._refusal import Refusal
from flashtile.bench import decode, found, options, ragged
from flashtile.bench.cases import Case, Work
from flashtile.bench.columns import is_hidden, mask_of
from flashtile.bench.fp8 import IN_16_BITS
from flashtile.bench.masked import BAND, VARLEN, Renamed, as_documents
from flashtile.bench.memory import FORMULA
from flashtile.bench.options import alibi_slopes
from flashtile.bench.peers import MATH, TRITON, Peer, cuda_settings, output_of
from flashtile.bench.ragged import DENSE, TORCH_VARLEN
from flashtile.bench.report import BEST_PEER, BEST_VARLEN, FORMS, OF_MATMUL, OF_READ
from flashtile.bench.rivals import CUDNN_HEADS_FIRST
from flashtile.bench.serving import CAUSAL

FLEX = "Flex"
PEER_FORM = "NAME=MODULE:FUNCTION"
# A column, or an entry of the summary, already has these names.
TAKEN = (
    *decode.OURS_ALL,
    *cuda_settings(),
    CUDNN_HEADS_FIRST,
    MATH,
    FORMULA,
    TRITON,
    FLEX,
    DENSE,
    BAND,
    VARLEN,
    CAUSAL,
    IN_16_BITS,
    TORCH_VARLEN,
    BEST_PEER,
    BEST_VARLEN,
    OF_MATMUL,
    OF_READ,
    FORMS,
)
FLEX_SUITES = ("forward", "backward", "masks", "decode", "random")
PEER_SUITES = tuple(suite for suite in found.SUITES if suite != "serving")


def further_peers(suite: str, texts: Sequence[str] = (), *, flex: bool = False) -> list[Peer]:
    """What `--flex` and each `--peer NAME=MODULE:FUNCTION` ask for; a Refusal says what is wrong with them."""
    for argument, given, takers in (("--flex", flex, FLEX_SUITES), ("--peer", texts, PEER_SUITES)):
        if given and suite not in takers:
            expected = " or ".join(map(repr, takers))
            raise Refusal(f"bench: {argument} is given with suite {suite!r}, expected suite {expected}")
    # Flex comes first: it clears what torch.compile holds, and a compiled peer behind it compiles in its own check.
    peers = [Peer(FLEX, FlexAttention())] if flex else []
    for text in texts:
        peer = outside_peer(text)
        if peer.name in (*TAKEN, *(other.name for other in peers)):
            raise Refusal(f"bench: --peer {text!r} is named {peer.name!r}, expected a name that is not taken")
        if suite == "masks":
            peer = dataclasses.replace(peer, attention=Renamed(peer.attention, as_documents))
        peers.append(peer)
    return peers


def outside_peer(text: str) -> Peer:
    """The peer that NAME=MODULE:FUNCTION stands for; FUNCTION(q, k, v, causal), of ragged batches and of caches
    FUNCTION(q, k, v, **arguments) of `ragged` and `decode`, returns out, or a tuple of out first. In a backward
    autograd differentiates it. What a case asks for beside is a keyword more."""
    name, _, target = text.partition("=")
    module_name, _, function_name = target.partition(":")
    if not (name and module_name and function_name):
        raise Refusal(f"bench: --peer is {text!r}, expected {PEER_FORM}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # what a module does as it is imported may fail in any way
        reason = f"{type(error).__name__}: {error}"
        raise Refusal(
            f"bench: --peer {text!r} has module {module_name!r}, expected one that can be imported ({reason})"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        found = repr(function) if hasattr(module, function_name) else "nothing"
        raise Refusal(f"bench: --peer {text!r} finds {found} in {module_name!r}, expected a function")
    return Peer(name, Outside(function))


def deterministic(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """What gradients cost that repeat to the bit: --peer deterministic=flashtile.bench.further:deterministic"""
    from flashtile import attention

    return attention(q, k, v, causal=causal, deterministic=True)


class Outside:
    """A function from outside, refused what its signature has no argument for."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._case: Case | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> torch.Tensor:
        if case is not self._case:  # to compare their values would take a microsecond of each timed call
            self._prepare(case)
        return output_of(self._result(q, k, v, case), q, v)

    def _prepare(self, case: Case) -> None:
        asked = [*options.names(case), *(["block_table"] if case.page_size else [])]
        if missing := [name for name in asked if not _takes(self._function, name)]:
            raise NotImplementedError(f"--peer: its function has no argument {' and '.join(missing)}")
        self._paged = decode.Paged(self._function, case.page_size)
        self._case = case

    def _result(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> Any:
        if case.page_size:
            return self._paged(q, k, v, case)
        if case.over_a_cache:
            return self._function(q, k, v, **decode.arguments(case, q.device))
        if case.lengths is None:
            return self._function(q, k, v, case.causal, **options.arguments(case, q.device))
        return self._function(q, k, v, **ragged.arguments(case, q.device))


def _takes(function: Callable[..., Any], name: str) -> bool:
    """Whether the function has such a keyword; one that does not say what it has is asked."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(
        of.kind is inspect.Parameter.VAR_KEYWORD or (of.name == name and of.kind in by_keyword) for of in parameters
    )


class FlexAttention:
    """PyTorch's FlexAttention. A case's first call, its check, compiles; the timed calls find that."""

    def __init__(self) -> None:
        self._case: Case | None = None
        self._compiled: Callable[..., torch.Tensor] = flex_attention
        self._block_mask: BlockMask | None = None
        self._scores: dict[str, Any] = {}

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> torch.Tensor:
        try:
            if case != self._case:
                self._prepare(q, k, v, case)
            return self._attend(q, k, v, case)
        except Exception as error:  # a compiler fails in ways of its own; each means that there is no kernel
            raise NotImplementedError(f"FlexAttention: {type(error).__name__}: {error}") from error

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> torch.Tensor:
        # A forward is checked without autograd and timed with it, which to torch.compile would be two functions.
        with torch.set_grad_enabled(case.work is Work.BACKWARD):
            out = self._compiled(
                *(t.transpose(1, 2) for t in (q, k, v)),
                block_mask=self._block_mask,
                enable_gqa=q.shape[2] != k.shape[2],
                **self._scores,
            )
        return out.transpose(1, 2)

    def _prepare(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> None:
        self._case = None  # where anything below fails, nothing is prepared
        if case.lengths is not None:
            raise NotImplementedError("it is not asked for ragged batches here")
        if refused := options.words(case, served=["window", "mask", "softcap", "alibi_slopes"]):
            raise NotImplementedError(f"it is not asked for {refused} here")
        # Without this a second shape would be compiled as a dynamic one, and after a few torch.compile gives up.
        torch.compiler.reset()
        self._block_mask = block_mask(case, q.device)
        modified = score_function(case, q.device)
        self._scores = {} if modified is None else {"score_mod": modified}
        self._compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        if case.work is Work.BACKWARD:
            # A backward is compiled as it first runs: here, so that its failure is a refusal too. Compiled by a run
            # that frees its graph, it would refuse the timed ones, which keep theirs.
            out = self._attend(q, k, v, case)
            torch.autograd.grad(out, (q, k, v), torch.zeros_like(out), retain_graph=True)
        self._case = case


def block_mask(case: Case, device: torch.device) -> BlockMask | None:
    """FlexAttention's form of the mask, in blocks of 128 rows and columns; None where all is seen."""
    lengths = case.seqlen_q, case.seqlen_k
    if not case.columns:
        seen = mask_function(case)
        return None if seen is None else create_block_mask(seen, None, None, *lengths, device=device)
    create: Callable[..., BlockMask] = create_block_mask
    if device.type == "cuda":  # else it would write out what is seen, several times over
        create = torch.compile(create_block_mask, dynamic=False)
    return create(column_function(case, device), len(mask_of(case, device).ranges), None, *lengths, device=device)


def column_function(case: Case, device: torch.device) -> Callable[..., torch.Tensor]:
    """A column mask as FlexAttention asks for it."""
    ranges = mask_of(case, device).ranges[:, 0].expand(case.batch, -1, -1)
    begin_0, end_0, begin_1, end_1 = (bound.contiguous() for bound in ranges.unbind(-1))  # (B, S_k) each

    def seen(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        place = batch, column
        return ~is_hidden(row, (begin_0[place], end_0[place], begin_1[place], end_1[place]))

    return seen


def mask_function(case: Case) -> Callable[..., torch.Tensor] | None:
    """The contract's mask as FlexAttention asks for it: may this row see this column? None where all may."""
    if case.is_full:
        return None
    left, right = case.window or (None, None)
    if case.causal:
        right = 0 if right is None else min(right, 0)
    if left is None and right is None:
        return None

    def seen(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        distance = column - (row + case.seqlen_k - case.seqlen_q)
        if right is None:
            return distance >= -(left or 0)
        if left is None:
            return distance <= right
        return (distance >= -left) & (distance <= right)

    return seen


def score_function(case: Case, device: torch.device) -> Callable[..., torch.Tensor] | None:
    """What becomes of a scaled score by softcap and ALiBi, as FlexAttention asks for it; None where it stays."""
    if not (case.softcap or case.alibi):
        return None
    slopes = alibi_slopes(case.heads_q, device) if case.alibi else None

    def modified(
        score: torch.Tensor, batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor
    ) -> torch.Tensor:
        if case.softcap:
            score = case.softcap * torch.tanh(score / case.softcap)
        if slopes is not None:
            score = score - slopes[head] * (column - (row + case.seqlen_k - case.seqlen_q)).abs()
        return score

    return modified
