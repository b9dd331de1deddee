"""Whether all ranks ask for the same thing: asked once for each configuration, as it takes a message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from ._exchange import Group


def rows_of_ranks(
    function: str, group: Group, rows: tuple[int, int], given: Mapping[str, Any], failure: Exception | None
) -> list[tuple[int, int]]:
    """How many query rows and keys each rank has, once all ranks have been found to agree in what is `given`.

    `failure` is what the caller found wrong with its own arguments. Raises on all ranks if any has one, or if `given`
    differs somewhere: ValueError, which names the rank and the argument.
    """
    agreed = group.known.agreed
    key = (function, rows, tuple(x for x in given.items() if x[0] != "seed"))  # which differs from call to call
    if failure is None and key in agreed:
        return agreed[key]
    told = {name: str(value) for name, value in given.items()}
    mine = {"rows": rows, "given": told, "failure": None if failure is None else str(failure)}
    theirs: list[Any] = [None] * group.size
    dist.all_gather_object(theirs, mine, group=group.group)
    if failure is not None:
        raise failure
    for rank, one in enumerate(theirs):
        if one["failure"] is not None:
            raise ValueError(f"{function}: rank {rank} refuses its arguments: {one['failure']}")
    for name in given:
        values = [one["given"].get(name) for one in theirs]
        usual, _ = Counter(values).most_common(1)[0]
        for rank, value in enumerate(values):
            if value != usual:
                expected = f"expected {usual:.200}, as on rank {values.index(usual)}"
                raise ValueError(f"{function}: {name} is {value:.200} on rank {rank}, {expected}")
    found = [one["rows"] for one in theirs]
    agreed[key] = found
    return found
