"""The count that chooses a method: what docs/distributed.md says of it, what two GPUs took, and one rank of four."""

import json
from pathlib import Path

import pytest

from flashtile.bench import ranks
from flashtile.distributed import Layout
from flashtile.distributed._choose import METHODS, choices
from flashtile.distributed._count import NETWORK, NVLINK, Shape
from flashtile.distributed._pairs import Band, Places

ROOT = Path(__file__).parents[2]


def stored(name):
    cells = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["cells"]
    return {cell["name"]: cell["seconds"] for cell in cells}


OF_TWO, OF_ONE_OF_FOUR = stored("h200x2-distributed-2026-11-28b"), stored("h200-distributed-2026-11-28b")
ZIGZAG = [case for case in ranks.CASES if case.layout == "zigzag"]  # two GPUs have timed no other layout
on_cases = pytest.mark.parametrize("case", ZIGZAG, ids=lambda case: case.name(2))


def counted(case, size, differentiable=True, bandwidth=NVLINK):
    """Each method, of the degree that takes least."""
    layout = Layout.zigzag(size * case.rows_of_rank(size), size)
    options = dict(case.options)
    band = Band.of(options.get("causal", False), options.get("window"))
    documents = case.begins(size) if case.documents > 1 else None
    heads = case.heads_q, case.heads_k, case.head_dim, case.head_dim
    shape = Shape(layout, layout, band, documents, Places.ANY, 1, *heads, 2, differentiable)
    return {x.name: x for x in reversed(choices(shape, bandwidth)) if not x.refused}


def test_a_batch_of_no_entries_is_counted():
    layout = Layout.zigzag(64, 4)
    shape = Shape(layout, layout, Band.of(True, None), None, Places.ANY, 0, 4, 2, 16, 16, 2, True)
    assert not any(x.sent for x in choices(shape, NVLINK))


def test_the_page_has_what_is_counted():
    page = (ROOT / "docs" / "distributed.md").read_text()
    table = page[page.index("| ranks | NVLink: ring |") :].split("\n\n")[0].splitlines()[2:]
    assert len(table) == 6
    for line in table:
        size, *said = (text.strip() for text in line.strip("|").split("|"))
        found = []
        for bandwidth, names in ((NVLINK, METHODS[1:4]), (NETWORK, METHODS[1:])):
            shown = bandwidth == NETWORK or int(size) <= 8
            methods = counted(ranks.Case(16384, 32, 8, 128), int(size), bandwidth=bandwidth) if shown else {}
            seconds = {name: x.seconds for name, x in methods.items()}
            texts = {name: f"{1e3 * x:,.1f}" if x < 0.1 else f"{1e3 * x:,.0f}" for name, x in seconds.items()}
            quickest = min(seconds, key=seconds.__getitem__, default=None)
            found += [f"**{texts[name]}**" if name == quickest else texts.get(name, "") for name in names]
        assert said == found


@on_cases
def test_two_gpus_took_what_is_counted(case):
    rows = 2 * case.rows_of_rank(2)
    for work in ranks.WORKS:
        expected = counted(case, 2, differentiable=work != "forward")
        for method in ("ring", "all_gather", "ulysses"):
            off = expected[method].seconds / OF_TWO[case.name(2)][method][work] - 1
            most = (0.125 if rows < 65536 else 0.05) if case.documents > 1 else 0.05 if rows < 65536 else 0.036
            assert abs(off) <= most, f"{method}, {work}: {off:+.3f}"


@on_cases
def test_auto_takes_what_two_gpus_did_quickest(case):
    """Or what took no more than 2 % longer."""
    for work in ranks.WORKS:
        expected = counted(case, 2, differentiable=work != "forward")
        took = {method: OF_TWO[case.name(2)][method][work] for method in expected}
        chosen = min(expected, key=lambda method: expected[method].seconds)
        assert took[chosen] <= 1.02 * min(took.values()), chosen


@pytest.mark.parametrize("case", [x for x in ranks.CASES if x.name(4) in OF_ONE_OF_FOUR], ids=lambda case: case.name(4))
def test_a_rank_of_four_computed_what_is_counted(case):
    for work in ranks.WORKS:
        expected = counted(case, 4, differentiable=work != "forward")
        for method in ("ring", "all_gather"):
            off = expected[method].computing / OF_ONE_OF_FOUR[case.name(4)][method][work] - 1
            assert abs(off) <= 0.066, f"{method}, {work}: {off:+.3f}"
