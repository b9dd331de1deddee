"""A small GPT trained on sequences that lie on several ranks, some of the rows of each on every rank.

    torchrun --nproc-per-node 2 examples/long_context.py

Everything but attention works row by row, so a rank needs its own tokens, their positions, and the sum of gradients.
`python examples/long_context.py` is one rank with all rows, and has the same losses up to rounding.
"""

import argparse
import functools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

from flashtile import distributed
from flashtile.demo.gpt import GPT, Config, rotate
from flashtile.demo.training import batches, standard_library_bytes


def attend(q, k, v):
    """Causal attention of the whole sequence, of which q, k and v are this rank's rows."""
    dtype = torch.bfloat16 if q.is_cuda else q.dtype
    return distributed.attention(q.to(dtype), k.to(dtype), v.to(dtype), causal=True).to(q.dtype)


def summed(x):  # over ranks, in place
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def train(steps, config, device):
    torch.manual_seed(0)  # ranks begin with the same weights
    positions = distributed.positions(config.context, device=device)
    model = GPT(config, attend, functools.partial(rotate, positions=positions)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for tokens in batches(standard_library_bytes(1_000_000), config, steps, device):
        rows, labels = (distributed.shard(x, 1) for x in (tokens[:, :-1], tokens[:, 1:]))
        # A share of the mean over all tokens, so that losses and gradients of ranks add up to the whole.
        share = F.cross_entropy(model(rows).flatten(0, 1), labels.flatten(), reduction="sum") / tokens[:, 1:].numel()
        optimizer.zero_grad()
        share.backward()
        for weight in model.parameters():
            summed(weight.grad)
        optimizer.step()
        yield summed(share.detach()).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--context", type=int, default=256, help="tokens of a sequence")
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:  # torchrun has started this
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    for step, loss in enumerate(train(options.steps, Config(context=options.context), device)):
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"step {step}  loss {loss:.5f}", flush=True)
    if dist.is_initialized():
        dist.barrier()  # gloo may abort a rank that still talks to one that has left
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
