"""New tokens over a cache of keys and values: what a call of it takes, and who is timed on it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from flashtile.bench import options
from flashtile.bench.cases import Case, Work
from flashtile.bench.oracle import Attention, attention_sdpa
from flashtile.bench.peers import OURS, PLAIN, Peer, cuda_settings

SUITES = ("decode", "prefill")
PAGE_SIZES = (16, 64)
# Pages of one row, as SGLang's are, and of (H_k, page_size, D), as FlashInfer's may be: in suite prefill alone, as the
# caches of a decode are so large that one more of them would leave no room for a peer.
ROWS, HEADS_FIRST = "page 1", "heads first"
PREFILL_FORMS = (ROWS, HEADS_FIRST)
GRAPH = "graph"
FP8 = "fp8"  # caches of e4m3 numbers
# That flashtile is timed in over a cache; in those of 8 bits on a GPU alone.
CACHE_FORMS = (
    OURS,
    *(f"page {size}" for size in PAGE_SIZES),
    *PREFILL_FORMS,
    GRAPH,
    FP8,
    *(f"{FP8} page {size}" for size in PAGE_SIZES),
)
SERVING_FORMS = ("one call", "two calls")  # of suite serving
OURS_ALL = (*CACHE_FORMS, *SERVING_FORMS, *(f"{SERVING_FORMS[1]} page {size}" for size in PAGE_SIZES[1:]), PLAIN)


def arguments(case: Case, device: torch.device) -> dict[str, Any]:
    """What `flashtile.attention_kvcache` and every --peer of SUITES are called with beside q and the caches."""
    lengths = cache_seqlens(case.batch, case.seqlen_k, device)
    return {"cache_seqlens": lengths, "causal": case.causal, **options.arguments(case, device)}


@functools.lru_cache(maxsize=8)  # made by a case's check, so that the timed calls launch nothing for it
def cache_seqlens(batch: int, seqlen: int, device: torch.device) -> torch.Tensor:
    return torch.full((batch,), seqlen, dtype=torch.int32, device=device)


def cache_peers_of(device_type: str, attention_kvcache: Callable[..., torch.Tensor], case: Case) -> list[Peer]:
    """`attention_kvcache`, which has flashtile's signature, on a contiguous cache and on pages, of 16 and of 8 bits;
    PyTorch's own."""
    peers = [Peer(OURS, contiguous(attention_kvcache))]
    peers += [Peer(f"page {size}", Paged(attention_kvcache, size)) for size in PAGE_SIZES]
    if case.work is Work.PREFILL:
        peers.append(Peer(ROWS, Paged(attention_kvcache, 1)))
        peers.append(Peer(HEADS_FIRST, Paged(attention_kvcache, PAGE_SIZES[0], heads_first=True)))
    if device_type == "cuda":
        peers.append(Peer(GRAPH, Replayed(contiguous(attention_kvcache))))
        peers.append(Peer(FP8, Narrowed(attention_kvcache)))
        peers += [Peer(f"{FP8} page {size}", Paged(attention_kvcache, size, NARROW)) for size in PAGE_SIZES]
    return [*peers, *sdpa_over_a_cache(device_type, case)]


def contiguous(attention_kvcache: Callable[..., Any]) -> Attention:
    """A function of flashtile's signature, called as a case asks for it."""

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> Any:
        return attention_kvcache(q, k, v, **arguments(case, q.device))

    return ours


def sdpa_over_a_cache(device_type: str, case: Case) -> list[Peer]:
    """PyTorch's own, whose caches are contiguous."""
    if device_type != "cuda":
        return [Peer("SDPA", attention_sdpa)]
    if case.work is Work.PREFILL:  # cuDNN's mask is aligned to the top left
        return [Peer("SDPA FA2", attention_lower_right, cuda_settings()["SDPA FA2"])]
    # The efficient backend takes no grouped heads, and does not divide keys among thread blocks.
    return [Peer(name, attention_sdpa, cuda_settings()[name]) for name in ("SDPA FA2", "SDPA cuDNN")]


def attention_lower_right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> torch.Tensor:
    """PyTorch's scaled_dot_product_attention, causal from the last key on."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    mask = causal_lower_right(case.seqlen_q, case.seqlen_k)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


NARROW = torch.float8_e4m3fn  # in which `make_inputs` draws keys and values of a cache


class Narrowed:
    """The same rows in 8 bits, which a case's first call, its check, makes of them."""

    def __init__(self, attention_kvcache: Callable[..., Any]) -> None:
        self._attention_kvcache = attention_kvcache
        self._caches: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> Any:
        if self._caches is None:
            self._caches = k.to(NARROW), v.to(NARROW)
        return self._attention_kvcache(q, *self._caches, **arguments(case, q.device))


class Paged:
    """The same rows in pages, for a function of flashtile's signature, in another dtype if one is given, and with heads
    before rows in memory if that is asked for. A case's first call, its check, lays them out; the timed calls find
    that."""

    def __init__(
        self,
        attention_kvcache: Callable[..., Any],
        page_size: int,
        dtype: torch.dtype | None = None,
        heads_first: bool = False,
    ) -> None:
        self._attention_kvcache = attention_kvcache
        self._page_size = page_size
        self._dtype = dtype
        self._heads_first = heads_first
        self._pages: tuple[torch.Tensor, ...] | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> Any:
        if self._pages is None:
            k_pages, v_pages, block_table = in_pages(k, v, self._page_size)
            if self._heads_first:
                k_pages, v_pages = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k_pages, v_pages))
            dtype = self._dtype or k.dtype
            self._pages = k_pages.to(dtype), v_pages.to(dtype), block_table
        k_pages, v_pages, block_table = self._pages
        return self._attention_kvcache(q, k_pages, v_pages, block_table=block_table, **arguments(case, q.device))


def in_pages(k: torch.Tensor, v: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """k and v as pages that lie in random order, and the table of where; the rest of a sequence's last page is 0."""
    batch, seqlen = k.shape[:2]
    of_each = -(-seqlen // page_size)
    if room := of_each * page_size - seqlen:
        k, v = (F.pad(t, (0, 0, 0, 0, 0, room)) for t in (k, v))
    generator = torch.Generator(k.device).manual_seed(0)
    order = torch.randperm(batch * of_each, generator=generator, device=k.device)
    pages = (t.unflatten(1, (-1, page_size)).flatten(0, 1)[order] for t in (k, v))
    return *pages, order.argsort().view(batch, -1).int()  # page i went to where `order` has i


class Replayed:
    """An attention as a CUDA graph, captured by a case's first call, its check."""

    def __init__(self, attention: Attention) -> None:
        self._attention = attention
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> torch.Tensor:
        if self._graph is None:
            self._attention(q, k, v, case)  # what a first call loads or makes cannot be captured
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._out = self._attention(q, k, v, case)
        self._graph.replay()
        return self._out
