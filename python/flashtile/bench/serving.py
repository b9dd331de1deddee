"""Batches as schedulers of serving engines make them: tokens to decode behind a prefix that all sequences share, chunks
of prompts together with tokens to decode, and trees of drafts. What a call of each takes, and who is timed on it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flashtile.bench import decode, ragged
from flashtile.bench.cases import Case, Work
from flashtile.bench.oracle import Attention
from flashtile.bench.peers import OURS, Peer

SUITE = "serving"
PAGE_SIZE, LARGER = decode.PAGE_SIZES  # of `flashtile`, and of a form of it
ONE_CALL, TWO_CALLS = decode.SERVING_FORMS
CAUSAL = "causal"  # flashtile's column of trees of drafts as one chain each


def attention_of_serving(*tensors: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """flashtile's function of a shared prefix or of caches alone, by how many tensors it is given."""
    import flashtile

    function = flashtile.attention_cascade if len(tensors) == 5 else flashtile.attention_kvcache
    return function(*tensors, **arguments)


def serving_peers_of(device_type: str, attention: Callable[..., torch.Tensor], case: Case) -> list[Peer]:
    """`attention`, which has the signature of `attention_of_serving`, by one call and by two; of trees with and without
    the mask."""
    if case.work is Work.TREE:
        tree, chain = (_over_a_cache(attention, case.page_size) for _ in range(2))
        return [Peer(OURS, tree), Peer(CAUSAL, chain, asked=without_mask)]
    if case.work is Work.CASCADE:
        cascade, whole = (Prefixed(attention, case, in_parts) for in_parts in (True, False))
        return [Peer(OURS, cascade), Peer(ONE_CALL, whole), *decode.sdpa_over_a_cache(device_type, case)]
    peers = []
    for size, suffix in ((PAGE_SIZE, ""), (LARGER, f" page {LARGER}")):
        batch = Mixed(attention, size)
        peers += [Peer(suffix.strip() or OURS, batch.together), Peer(TWO_CALLS + suffix, batch.apart)]
    return peers


def _over_a_cache(attention: Callable[..., torch.Tensor], page_size: int) -> Attention:
    return decode.Paged(attention, page_size) if page_size else decode.contiguous(attention)


def without_mask(case: Case) -> Case:
    return dataclasses.replace(case, columns="")


class Prefixed:
    """Pages of which sequences share their first ones, by attention_cascade or by one call that reads these for each
    sequence. A case's first call, its check, lays them out; the timed calls find that."""

    def __init__(self, attention: Callable[..., Any], case: Case, in_parts: bool) -> None:
        self._attention = attention
        self._in_parts = in_parts
        self._pages: tuple[torch.Tensor, ...] | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> Any:
        if self._pages is None:
            *pages, table = decode.in_pages(k, v, PAGE_SIZE)
            shared = case.prefix // PAGE_SIZE
            table[:, :shared] = table[0, :shared].clone()
            self._pages = *pages, table, table[0, :shared].clone(), table[:, shared:]
        k_pages, v_pages, table, of_prefix, own = self._pages
        if not self._in_parts:
            held = decode.cache_seqlens(case.batch, case.seqlen_k, q.device)
            return self._attention(q, k_pages, v_pages, cache_seqlens=held, block_table=table)
        held = decode.cache_seqlens(case.batch, case.seqlen_k - case.prefix, q.device)
        tables = dict(block_table=own, prefix_table=of_prefix, prefix_seqlen=case.prefix)
        return self._attention(q, k_pages, v_pages, k_pages, v_pages, cache_seqlens=held, **tables)


class Laid(NamedTuple):
    """A mixed batch as it is called with."""

    k_pages: torch.Tensor
    v_pages: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    held: torch.Tensor  # keys of each sequence
    chunks: int  # sequences in front that have several queries
    rows: int  # queries of these


class Mixed:
    """Ragged queries over pages, which both ways of calling share: chunks, and behind them single tokens. A case's
    first call, its check, lays them out; the timed calls find that."""

    def __init__(self, attention: Callable[..., Any], page_size: int) -> None:
        self._attention = attention
        self._page_size = page_size
        self._laid: Laid | None = None

    def together(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> Any:
        laid = self._laid_out(k, v, case)
        given = dict(cache_seqlens=laid.held, block_table=laid.block_table, cu_seqlens_q=laid.cu_seqlens_q)
        return self._attention(q, laid.k_pages, laid.v_pages, **given)

    def apart(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> torch.Tensor:
        """A call for the chunks and one for the single tokens, into the same tensor."""
        k_pages, v_pages, table, begins, held, chunks, rows = self._laid_out(k, v, case)
        out = q.new_empty(*q.shape[:2], v.shape[2])
        of_chunks = dict(cache_seqlens=held[:chunks], block_table=table[:chunks], cu_seqlens_q=begins[: chunks + 1])
        self._attention(q[:rows], k_pages, v_pages, out=out[:rows], **of_chunks)
        of_tokens = dict(cache_seqlens=held[chunks:], block_table=table[chunks:])
        self._attention(q[rows:, None], k_pages, v_pages, out=out[rows:, None], **of_tokens)
        return out

    def _laid_out(self, k: torch.Tensor, v: torch.Tensor, case: Case) -> Laid:
        if self._laid is None:
            lengths, held = case.lengths or (), case.held or ()
            chunks = sum(length > 1 for length in lengths)
            self._laid = Laid(
                *in_pages(k, v, held, self._page_size),
                ragged.cu_seqlens(lengths, k.device),
                torch.tensor(held, dtype=torch.int32, device=k.device),
                chunks,
                sum(lengths[:chunks]),
            )
        return self._laid


def in_pages(
    k: torch.Tensor, v: torch.Tensor, held: tuple[int, ...], page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sequences of so many rows, one behind the other in k and v, as pages that lie in random order, and the table of
    where; 0 in what a last page has too much, and where the table has no page."""
    counts = [-(-rows // page_size) for rows in held]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0))
    ends = list(itertools.accumulate(counts))
    table = torch.zeros(len(held), max(counts), dtype=torch.int32)
    for b, (end, count) in enumerate(zip(ends, counts, strict=True)):
        table[b, :count] = order[end - count : end]
    places = [
        table[b].long()[row // page_size] * page_size + row % page_size
        for b, rows in enumerate(held)
        for row in [torch.arange(rows)]
    ]
    place = torch.cat(places).to(k.device)
    pages = []
    for x in (k, v):
        rows = x.new_zeros(sum(counts) * page_size, *x.shape[1:])
        rows[place] = x
        pages.append(rows.unflatten(0, (-1, page_size)))
    return pages[0], pages[1], table.to(k.device)
