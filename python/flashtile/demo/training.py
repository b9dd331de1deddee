"""Trains the same GPT twice, once per attention, on the same bytes: the losses must agree."""

from __future__ import annotations

import dataclasses
import os
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from flashtile.demo.gpt import GPT, CausalAttention, Config

SEED = 0
BATCH = 8
LEARNING_RATE = 3e-3
WARM_UP_SHARE = 0.1  # of the steps
MIN_STEPS, MAX_STEPS = 20, 1000  # no more than the tolerances below were measured over
TIMED_STEPS = 5
CORPUS_BYTES = 8_000_000
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far the losses of two correct attentions may be apart at a step, in nats: in the first steps, and after."""

    early_steps: int
    early: float
    late: float

    def limits(self, steps: int) -> list[float]:
        return [self.early if step < self.early_steps else self.late for step in range(steps)]


# They differ by rounding, on a GPU to bfloat16, and training amplifies that: docs/contract.md has the measurements.
TOLERANCES = {"cpu": Tolerance(100, 1e-4, 0.05), "cuda": Tolerance(50, 1e-4, 0.2)}


@dataclasses.dataclass(frozen=True)
class Run:
    """What training left: the loss of every step, in nats per byte, and the model."""

    losses: list[float]
    model: GPT
    seconds: float


def standard_library_bytes(limit: int = CORPUS_BYTES) -> torch.Tensor:
    """The first `limit` bytes of the standard library's Python sources, files in order of their path."""
    text = bytearray()
    for folder, subfolders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
        for name in sorted(names):
            if name.endswith(".py") and len(text) < limit:
                text += Path(folder, name).read_bytes()
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def batches(corpus: torch.Tensor, config: Config, steps: int, device: torch.device) -> Iterator[torch.Tensor]:
    """The same random windows of context + 1 bytes every time."""
    generator = torch.Generator().manual_seed(SEED)
    offsets = torch.arange(config.context + 1)
    for _ in range(steps):
        starts = torch.randint(len(corpus) - config.context, (BATCH, 1), generator=generator)
        yield corpus[starts + offsets].long().to(device)


def train(
    attention: CausalAttention,
    corpus: torch.Tensor,
    steps: int,
    device: torch.device,
    config: Config,
    on_step: Callable[[float], None] = lambda loss: None,
) -> Run:
    torch.manual_seed(SEED)
    model = GPT(config, attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=steps, pct_start=WARM_UP_SHARE, cycle_momentum=False
    )
    losses = []
    begin = time.perf_counter()
    for tokens in batches(corpus, config, steps, device):
        optimizer.zero_grad()
        loss = model.loss(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        on_step(losses[-1])
    return Run(losses, model, time.perf_counter() - begin)


def steps_for(
    seconds: float, attentions: list[CausalAttention], corpus: torch.Tensor, device: torch.device, config: Config
) -> int:
    """How many steps each attention can train so that all of them together take `seconds`."""
    seconds_per_step = 0.0
    for attention in attentions:
        train(attention, corpus, 2, device, config)  # first calls are slow
        seconds_per_step += train(attention, corpus, TIMED_STEPS, device, config).seconds / TIMED_STEPS
    return max(MIN_STEPS, min(int(seconds / seconds_per_step), MAX_STEPS))
