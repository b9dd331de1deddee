"""Calls as CUDA graphs, whose replay takes no host's time: how much of a small call is its kernels'."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from flashtile.bench.cases import Case, Work
from flashtile.bench.peers import OURS, PLAIN, Contestant


class OwnStream:
    """A stream to run contestants on, so that their calls can be captured there: a backward runs on the stream of its
    forward, which a capture must find to be its own. Without a GPU it is no more than a block."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()


def captured(contestants: Sequence[Contestant], case: Case) -> tuple[list[Contestant], dict[str, str]]:
    """Those that can be captured, as their graphs' replay, and why the others cannot. All have been called before on
    the current stream, which is not the default one."""
    found, refusals = [], {}
    for contestant in contestants:
        if case.dropout_p and case.work is Work.BACKWARD and contestant.name not in (OURS, PLAIN):
            # In a graph PyTorch's backward takes the seed that an eager forward left in the host's memory for one in
            # the GPU's: an illegal access, after which nothing runs any more.
            refusals[contestant.name] = "in a graph its dropout wants a forward of the same graph"
            continue
        graph = torch.cuda.CUDAGraph()
        try:
            with contestant.setting(), torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                contestant.call()
        except Exception as error:  # whatever a capture forbids fails in ways of its own
            first = error.__context__ or error  # where a call has failed, the capture's end does too
            refusals[contestant.name] = f"{type(first).__name__}: {first}".splitlines()[0]
        else:
            found.append(Contestant(contestant.name, graph.replay))
    return found, refusals
