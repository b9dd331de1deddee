"""A small Llama generates text for many requests at once, its keys and values in the pages of one cache.

Continuous batching: a request starts as soon as there is a slot and pages for it, and leaves as it ends; every decode
step serves all that run. The prompts of new requests go through the model together, one behind the other without
padding. The same loop then runs on PyTorch's attention with a padded cache, and must generate the same tokens.
The weights are random: what the text says means nothing, how it is made is what models do.
"""

import argparse
import collections
import dataclasses
import random
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import flashtile

DEFAULTS = {  # on a CPU, on CUDA
    "layers": (2, 16),
    "width": (128, 2048),
    "heads": (4, 32),
    "kv_heads": (2, 8),
    "vocabulary": (500, 32000),
    "requests": (24, 256),
    "prompt": (80, 2000),  # tokens of the longest
    "output": (24, 300),  # tokens of the longest
    "slots": (8, 64),  # requests that run at once
    "page_size": (16, 64),
    "dtype": ("float32", "bfloat16"),
}
# How far the logits of the tokens that are chosen, a few in size, may be off: most of it is the other layers' rounding.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2.5e-2, torch.bfloat16: 2e-1}


@dataclasses.dataclass(frozen=True)
class Config:
    vocabulary: int
    layers: int
    width: int
    heads: int
    kv_heads: int

    @property
    def head_dim(self):
        return self.width // self.heads


class Block(nn.Module):
    """x + attention(norm(x)), then x + SwiGLU(norm(x)). What attention does is up to the cache."""

    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim
        kv_width, hidden = config.kv_heads * config.head_dim, config.width * 8 // 3 // 16 * 16
        self.attention_norm = nn.RMSNorm(config.width)
        self.to_q = nn.Linear(config.width, config.width, bias=False)
        self.to_k = nn.Linear(config.width, kv_width, bias=False)
        self.to_v = nn.Linear(config.width, kv_width, bias=False)
        self.from_heads = nn.Linear(config.width, config.width, bias=False)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.to_gate = nn.Linear(config.width, hidden, bias=False)
        self.to_hidden = nn.Linear(config.width, hidden, bias=False)
        self.from_hidden = nn.Linear(hidden, config.width, bias=False)

    def forward(self, x, attend):
        y = self.attention_norm(x)
        q, k, v = (to(y).unflatten(-1, (-1, self.head_dim)) for to in (self.to_q, self.to_k, self.to_v))
        x = x + self.from_heads(attend(q, k, v).flatten(-2))
        y = self.mlp_norm(x)
        return x + self.from_hidden(F.silu(self.to_gate(y)) * self.to_hidden(y))


class Llama(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.to_logits = nn.Linear(config.width, config.vocabulary, bias=False)
        for linear in filter(lambda module: isinstance(module, nn.Linear), self.modules()):
            # Everything stays about 1 in size, and attention prefers some keys to others.
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)

    def forward(self, tokens, attend):
        """Tokens of any shape → (…, width). attend(layer, q, k, v) also rotates q and k and keeps k and v."""
        x = self.embedding(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, lambda q, k, v, layer=layer: attend(layer, q, k, v))
        return self.norm(x)


def rotary_tables(config, positions, device, dtype):
    """cos and sin of what each pair of features turns by at each position, (positions, D / 2)."""
    speeds = 10000.0 ** -(torch.arange(0, config.head_dim, 2, device=device) / config.head_dim)
    angles = torch.arange(positions, device=device)[:, None] * speeds
    return angles.cos().to(dtype), angles.sin().to(dtype)


class PagedCache:
    """Keys and values in pages that any slot may own, attended by flashtile.

    A slot owns as many pages as its request will ever need, so nobody who runs is ever short of one. The first pages
    are for slots without a request, one for each: these go through the decode step too, and that is where they write.
    """

    def __init__(self, config, slots, longest, pages, page_size, device, dtype):
        shape = (config.layers, slots + pages, page_size, config.kv_heads, config.head_dim)
        self.k, self.v = torch.zeros(2, *shape, device=device, dtype=dtype)
        self.cos, self.sin = rotary_tables(config, longest, device, dtype)
        self.page_size = page_size
        self.free_pages = list(range(slots, slots + pages))
        self.owned_pages = {}
        first = torch.arange(slots, dtype=torch.int32, device=device)
        self.block_table = first[:, None].repeat(1, -(-longest // page_size))
        self.held = torch.zeros(slots, dtype=torch.int32, device=device)  # rows that the cache has of each slot

    def admit(self, slot, length):
        """Whether there are pages for a sequence of this length; if so, the slot has them now."""
        count = -(-length // self.page_size)
        if count > len(self.free_pages):
            return False
        pages = self.owned_pages[slot] = [self.free_pages.pop() for _ in range(count)]
        self.block_table[slot, :count] = torch.tensor(pages, dtype=torch.int32)
        return True

    def release(self, slot):
        self.free_pages += self.owned_pages.pop(slot)
        self.block_table[slot] = slot
        self.held[slot] = 0

    def prefill(self, slots, lengths):
        """attend for the prompts of these slots, (T, H, D): one behind the other."""
        device = self.held.device
        begins = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(device, torch.int32)
        slots = torch.tensor(slots, device=device)
        of_slots = {"block_table": self.block_table[slots], "cache_seqlens": self.held[slots], "cu_seqlens_q": begins}
        return lambda layer, q, k, v: self._attend(layer, q, k, v, **of_slots)

    def decode(self, layer, q, k, v):
        """attend for one token of every slot, (slots, 1, H, D)."""
        return self._attend(layer, q, k, v, block_table=self.block_table, cache_seqlens=self.held)

    def _attend(self, layer, q, k, v, **of_slots):
        # One call rotates q and k, writes k and v behind the rows that are held, and attends to all of them.
        return flashtile.attention_kvcache(
            q,
            self.k[layer],
            self.v[layer],
            k_new=k,
            v_new=v,
            rotary_cos=self.cos,
            rotary_sin=self.sin,
            rotary_interleaved=False,
            **of_slots,
        )


class PaddedCache:
    """The same for PyTorch's attention: every slot has room for the longest sequence, and attends to all of it."""

    def __init__(self, config, slots, longest, device, dtype):
        shape = (config.layers, slots, longest, config.kv_heads, config.head_dim)
        self.k, self.v = torch.zeros(2, *shape, device=device, dtype=dtype)
        self.cos, self.sin = (t.float() for t in rotary_tables(config, longest, device, dtype))
        self.held = torch.zeros(slots, dtype=torch.int32, device=device)
        self.slots, self.rows = torch.arange(slots, device=device), torch.arange(longest, device=device)

    def admit(self, slot, length):
        return True

    def release(self, slot):
        self.held[slot] = 0

    def prefill(self, slots, lengths):
        def attend(layer, q, k, v):
            outs = []
            for slot, *qkv in zip(slots, *(t.split(lengths) for t in (q, k, v)), strict=True):
                q, k, v = self._rotate(qkv[0], self.rows), self._rotate(qkv[1], self.rows), qkv[2]
                self.k[layer, slot, : len(k)], self.v[layer, slot, : len(v)] = k, v
                heads_first = (t.transpose(0, 1)[None] for t in (q, k, v))
                out = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
                outs.append(out[0].transpose(0, 1))
            return torch.cat(outs)

        return attend

    def decode(self, layer, q, k, v):
        position = self.held.long()
        self.k[layer, self.slots, position] = self._rotate(k[:, 0], position)
        self.v[layer, self.slots, position] = v[:, 0]
        seen = self.rows <= self.held[:, None]  # (slots, longest)
        heads_first = (
            t.transpose(1, 2) for t in (self._rotate(q[:, 0], position)[:, None], self.k[layer], self.v[layer])
        )
        out = F.scaled_dot_product_attention(*heads_first, attn_mask=seen[:, None, None], enable_gqa=True)
        return out.transpose(1, 2)

    def _rotate(self, x, positions):
        """(T, H, D), each row turned as its position asks."""
        positions = positions[: len(x)]
        cos, sin = self.cos[positions, None], self.sin[positions, None]  # (T, 1, D / 2)
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)


@dataclasses.dataclass
class Request:
    prompt: list[int]
    count: int  # of tokens to generate
    tokens: list[int] = dataclasses.field(default_factory=list)
    logits: list[float] = dataclasses.field(default_factory=list)  # of these tokens, for the comparison

    @property
    def length(self):
        """Rows of the cache that it needs; the last token is never looked at."""
        return len(self.prompt) + self.count - 1

    @property
    def done(self):
        return len(self.tokens) == self.count


class Generator:
    def __init__(self, model, cache, slots, device):
        self.model, self.cache, self.slots, self.device = model, cache, slots, device
        self.tokens = torch.zeros(slots, dtype=torch.long, device=device)  # the newest of each slot
        self.logits = torch.zeros(slots, device=device)
        self.running = torch.zeros(slots, dtype=torch.int32, device=device)  # 1 where a slot has a request
        self.decode = self._captured_decode() if device.type == "cuda" else self._decode

    @torch.inference_mode()
    def __call__(self, requests):
        waiting, running = collections.deque(requests), {}  # slot → request
        while waiting or running:
            admitted = {}
            for slot in range(self.slots):
                if slot not in running and waiting and self.cache.admit(slot, waiting[0].length):
                    admitted[slot] = waiting.popleft()
            if admitted:
                self._prefill(admitted)
                running |= admitted
            elif not running:
                raise ValueError(f"a request of {waiting[0].length} rows does not fit into the cache; try --pages")
            else:
                self.decode()
            self._hand_out(admitted or running)
            for slot in [slot for slot, request in running.items() if request.done]:
                del running[slot]
                self.cache.release(slot)
                self.running[slot] = self.tokens[slot] = 0

    def _prefill(self, admitted):
        slots, lengths = list(admitted), [len(request.prompt) for request in admitted.values()]
        prompts = torch.tensor([token for request in admitted.values() for token in request.prompt], device=self.device)
        slots_there, ends = torch.tensor([slots, lengths], device=self.device)
        x = self.model(prompts, self.cache.prefill(slots, lengths))
        logits, tokens = self.model.to_logits(x[ends.cumsum(0) - 1]).max(dim=-1)
        self.logits[slots_there], self.tokens[slots_there] = logits.float(), tokens
        self.cache.held[slots_there] = ends.int()
        self.running[slots_there] = 1

    def _decode(self):
        x = self.model(self.tokens[:, None], self.cache.decode)
        logits, tokens = self.model.to_logits(x[:, 0]).max(dim=-1)
        self.logits.copy_(logits)
        self.tokens.copy_(tokens * self.running)
        self.cache.held += self.running

    @torch.inference_mode()
    def _captured_decode(self):
        """The decode step as a CUDA graph. Between replays all that it reads is changed in place: the newest tokens,
        the rows that are held, the table of pages."""
        self._decode()  # what a first call loads or makes cannot be captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._decode()
        return graph.replay

    def _hand_out(self, requests):
        """Greedy decoding: the token of the largest logit."""
        tokens, logits = self.tokens.tolist(), self.logits.tolist()
        for slot, request in requests.items():
            request.tokens.append(tokens[slot])
            request.logits.append(logits[slot])


def random_requests(options, vocabulary):
    """Requests of any lengths up to the longest, the same for the same seed."""
    source = random.Random(options.seed)
    lengths = [(source.randint(1, options.prompt), source.randint(1, options.output)) for _ in range(options.requests)]
    return [Request([source.randrange(vocabulary) for _ in range(prompt)], count) for prompt, count in lengths]


def timed(generate, requests, device):
    """Tokens per second of these requests, after a few have warmed up what there is to warm up."""
    generate([dataclasses.replace(request, tokens=[], logits=[]) for request in requests[:2]])
    start = time.perf_counter()
    generate(requests)  # which looks at every token, and so waits for the device
    return sum(request.count for request in requests) / (time.perf_counter() - start)


def largest_difference(requests, others):
    """Of the logits of the tokens chosen, up to the first that differs: from there on the texts are different ones.

    Where the two chose differently over the same text, each had its own choice on top. If all logits are off by no more
    than some error, so are the largest two, whichever tokens they belong to: a tie may be broken either way.
    """
    largest = 0.0
    for request, other in zip(requests, others, strict=True):
        for step, (token, logit) in enumerate(zip(request.tokens, request.logits, strict=True)):
            largest = max(largest, abs(logit - other.logits[step]))
            if token != other.tokens[step]:
                break
    return largest


def megabytes(cache):
    return (cache.k.nbytes + cache.v.nbytes) / 1e6


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--pages", type=int, help="default: two thirds of what all slots could fill")
    parser.add_argument("--seed", type=int, default=0)
    for name, (small, large) in DEFAULTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(small), help=f"default: {small}, on CUDA {large}")
    options = parser.parse_args(arguments)
    for name, defaults in DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, defaults[options.device == "cuda"])
    return options


def main(arguments=None):
    options = parse(arguments)
    device = torch.device(options.device)
    dtype = getattr(torch, options.dtype)
    config = Config(options.vocabulary, options.layers, options.width, options.heads, options.kv_heads)
    torch.manual_seed(options.seed)
    model = Llama(config).to(device, dtype)

    longest = options.prompt + options.output
    pages = options.pages or options.slots * longest * 2 // 3 // options.page_size
    paged = PagedCache(config, options.slots, longest, pages, options.page_size, device, dtype)
    padded = PaddedCache(config, options.slots, longest, device, dtype)
    texts, speeds = [], []
    for name, cache in (("flashtile, paged cache", paged), ("SDPA, padded cache", padded)):
        requests = random_requests(options, config.vocabulary)
        speed = timed(Generator(model, cache, options.slots, device), requests, device)
        print(f"{name:22}  {speed:8.0f} tokens/s  {megabytes(cache):8.1f} MB of keys and values")
        texts.append(requests)
        speeds.append(speed)

    same = sum(request.tokens == other.tokens for request, other in zip(*texts, strict=True))
    difference = largest_difference(*texts)
    print(f"{speeds[0] / speeds[1]:.2f}× as fast; {same} of {options.requests} texts are the same")
    print(f"largest difference of a logit {difference:.1e}, allowed {TOLERANCE[dtype]:.1e}")
    if not difference <= TOLERANCE[dtype]:
        sys.exit("flashtile and SDPA do not agree")


if __name__ == "__main__":
    main()
