"""Whether all ranks ask for the same thing: asked once for each configuration, as it takes a message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.distributed as dist

from ._choose import bandwidth_of
from ._exchange import Group
from .layout import Layout

_MOST = 1024  # agreements that are remembered


class Agreement(NamedTuple):
    """What all ranks of a group were found to have given."""

    number: int  # which of the group's agreements it is, the same on all ranks
    rows: list[tuple[int, int]]  # how many query rows and keys each rank has
    bandwidth: float  # bytes a second between any two ranks


def agree(
    function: str,
    group: Group,
    rows: tuple[int, int],
    given: Mapping[str, Any],
    failure: Exception | None,
    *,
    on_cpu: bool,
    asks: bool = False,
) -> Agreement:
    """What all ranks have, once they have been found to agree in what is `given`.

    `failure` is what the caller found wrong with its own arguments, `on_cpu` says where its tensors are, and `asks`
    that all ranks know already that they have to ask. Raises on all ranks if any has a failure, or if `given` differs
    somewhere: ValueError, which names the rank and the argument.
    """
    known = group.known
    told = {name: value if isinstance(value, Layout) else str(value) for name, value in given.items()}
    key = (function, rows, tuple(x for x in told.items() if x[0] != "seed"))  # which differs from call to call
    before = None if failure is not None else known.agreed.get(key)
    if not asks and group.all_say(-1 if before is None else before.number, on_cpu):
        assert before is not None
        return before
    told = {name: str(value) for name, value in told.items()}
    refusal = None if failure is None else str(failure)
    mine = {"rows": rows, "given": told, "failure": refusal, "bandwidth": bandwidth_of(group.size)}
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
    known.agreements += 1
    if known.agreements % _MOST == 0:  # on all ranks in the same call, or some would ask where others do not
        known.agreed.clear()
        known.prepared.clear()
    slowest = min(one["bandwidth"] for one in theirs)
    agreement = known.agreed[key] = Agreement(known.agreements, [one["rows"] for one in theirs], slowest)
    return agreement
