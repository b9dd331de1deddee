"""The count that chooses a method: what docs/distributed.md says of it, and what two GPUs took."""

import json
from pathlib import Path

import pytest

from flashtile.bench import ranks
from flashtile.distributed import Layout
from flashtile.distributed._choose import _NETWORK, _NVLINK, METHODS, Shape, choices
from flashtile.distributed._pairs import Band, Places

ROOT = Path(__file__).parents[2]
STORED = json.loads((ROOT / "benchmarks" / "results" / "h200x2-distributed-2026-11-28.json").read_text())
TIMES = {cell["name"]: cell["seconds"] for cell in STORED["cells"]}


def counted(case, size, differentiable=True, bandwidth=_NVLINK):
    """Seconds of each method, of the degree that takes least."""
    layout = Layout.zigzag(size * case.rows_of_rank(size), size)
    options = dict(case.options)
    band = Band.of(options.get("causal", False), options.get("window"))
    documents = case.begins(size) if case.documents > 1 else None
    heads = case.heads_q, case.heads_k, case.head_dim, case.head_dim
    shape = Shape(layout, layout, band, documents, Places.ANY, 1, *heads, 2, differentiable)
    return {x.name: x.seconds for x in reversed(choices(shape, bandwidth)) if not x.refused}


def test_the_page_has_what_is_counted():
    page = (ROOT / "docs" / "distributed.md").read_text()
    table = page[page.index("| ranks | NVLink: ring |") :].split("\n\n")[0].splitlines()[2:]
    assert len(table) == 6
    for line in table:
        size, *said = (text.strip() for text in line.strip("|").split("|"))
        found = []
        for bandwidth, names in ((_NVLINK, METHODS[1:4]), (_NETWORK, METHODS[1:])):
            shown = bandwidth == _NETWORK or int(size) <= 8
            seconds = counted(ranks.Case(16384, 32, 8, 128), int(size), bandwidth=bandwidth) if shown else {}
            texts = {name: f"{1e3 * x:,.1f}" if x < 0.1 else f"{1e3 * x:,.0f}" for name, x in seconds.items()}
            quickest = min(seconds, key=seconds.__getitem__, default=None)
            found += [f"**{texts[name]}**" if name == quickest else texts.get(name, "") for name in names]
        assert said == found


@pytest.mark.parametrize("case", ranks.CASES, ids=lambda case: case.name(2))
def test_two_gpus_took_what_is_counted(case):
    is_short = 2 * case.rows_of_rank(2) < 65536
    for work in ranks.WORKS:
        expected = counted(case, 2, differentiable=work != "forward")
        for method in ("ring", "all_gather", "ulysses"):
            off = expected[method] / TIMES[case.name(2)][method][work] - 1
            most = (0.225 if is_short else 0.095) if case.documents > 1 else 0.12 if is_short else 0.042
            assert abs(off) <= most, f"{method}, {work}: {off:+.3f}"
