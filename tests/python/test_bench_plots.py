"""Pictures of stored runs: every number has its place, files repeat, colours can be told from a page's."""

import dataclasses
import itertools
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from test_bench import timed_cell

from flashtile.bench import command, plots, report
from flashtile.bench.cases import Case, Work
from flashtile.bench.decode import OURS_ALL
from flashtile.bench.fp8 import IN_16_BITS
from flashtile.bench.masked import BAND, VARLEN
from flashtile.bench.memory import FORMULA
from flashtile.bench.peers import OURS
from flashtile.bench.ragged import DENSE
from flashtile.cli import main

MACHINE = {"device": "a GPU", "date": "2026-01-02", "flashtile": "0", "commit": "", "torch": "0"}
STORED = Path(__file__).parents[2] / "benchmarks" / "results"
SVG = "{http://www.w3.org/2000/svg}"


def record_of(suite, *cells, **machine):
    return report.to_record(suite, MACHINE | machine, cells)


def forward(seqlen, *, causal=False, **medians):
    return timed_cell(Case.square(1, seqlen, 2, 64, causal=causal), **medians)


def linear(colour):
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def luminance(colour):
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))


@pytest.mark.parametrize("path", sorted(STORED.glob("*.json")), ids=lambda path: path.stem)
def test_every_number_of_a_stored_run_has_its_place(path):
    record = report.read(path)
    if record["suite"] in (*plots.UNDRAWN, "distributed"):
        pytest.skip("has no picture, or one of some of its cells")
    figure = plots.figure_of(record)
    drawn = [number for panel in figure.panels.values() for line in panel.lines.values() for number in line.values()]
    measure, _ = report.measure_of(record)
    numbers = [measure(result) for cell in record["cells"] for result in cell["results"].values()]
    assert sorted(drawn) == sorted(number for number in numbers if number is not None)
    assert figure.most >= max(drawn)
    assert len({plots.style_of(name, figure.names) for name in figure.names}) == len(figure.names)
    assert all((row, column) in figure.panels for row in figure.rows for column in figure.columns)
    for panel in figure.panels.values():
        assert len(set(panel.places)) == len(panel.places)
        assert any(panel.lines.values())
    assert figure.unit and (figure.axis != "case" or record["suite"] == "ladder")  # which no command draws
    assert ("lower is better" in figure.title) == (record["suite"] in ("host", "memory"))
    peers = [name for name in figure.names if name not in (*OURS_ALL, DENSE, BAND, VARLEN, IN_16_BITS, FORMULA)]
    colours = {plots.style_of(name, figure.names).colour for name in peers}
    assert len(colours) == min(len(peers), len(plots.COLOURS))


def test_a_run_of_ranks_is_drawn_where_it_has_several_lengths():
    ideal, ring = {"forward": 1.0}, {"forward": 2.0}
    cells = [
        {"name": name, "seconds": {"ideal": ideal, "ring": ring}}
        for name in ("S256 H1/1 D8 causal", "S64 H1/1 D8 causal", "S64 H1/1 D8 full")
    ]
    figure = plots.figure_of({"suite": "distributed", "ranks": 2, "machine": MACHINE, "cells": cells})
    (panel,) = figure.panels.values()
    assert panel.places == ["S64", "S256"] and panel.lines == {"ring": {"S64": 0.5, "S256": 0.5}}
    assert figure.panels.keys() == {("forward", "H1/1 D8 causal")} and figure.roof[1] == 1.0


def test_panels_are_by_head_dimension_and_mask_and_grouped_heads_are_on_no_curve():
    grouped = Case(2, 8192, 8192, 32, 8, 64, 64, causal=True)
    cells = [forward(512, flashtile=1.0, a=2.0), forward(2048, flashtile=1.0), forward(512, causal=True, flashtile=1.0)]
    figure = plots.figure_of(record_of("forward", *cells, timed_cell(grouped, flashtile=1.0), matmul_tflops=700.0))
    assert (figure.rows, figure.columns) == (["full", "causal"], ["D 64"])
    assert figure.panels["full", "D 64"].places == ["512", "2048"]
    assert set(figure.panels["full", "D 64"].lines["a"]) == {"512"}
    assert figure.panels["causal", "D 64"].places == ["512", "8192\nH 32/8"]
    assert figure.panels["causal", "D 64"].curve == {"512"}


def test_the_roof_is_what_the_run_measured_in_the_same_unit():
    fast, slow = forward(512, flashtile=1e-6), forward(512, flashtile=1.0)
    assert plots.figure_of(record_of("forward", fast, matmul_tflops=700.0)).roof[1] == 700.0
    assert plots.figure_of(record_of("forward", slow, matmul_tflops=700.0)).roof is None  # GFLOP/s
    assert plots.figure_of(record_of("forward", fast)).roof is None
    decode = timed_cell(Case.decode(1, 64, 2, 2, 64), flashtile=1.0)
    assert plots.figure_of(record_of("decode", decode, matmul_tflops=700.0, read_gb_s=4000.0)).roof[1] == 4000.0


def test_decoding_is_drawn_by_the_size_of_the_cache():
    cells = [
        timed_cell(Case.decode(batch, seqlen, 2, 2, 64), flashtile=1.0)
        for batch, seqlen in ((4, 64), (1, 512), (1, 64))
    ]
    (panel,) = plots.figure_of(record_of("decode", *cells)).panels.values()
    assert panel.places == ["B1\n64", "B4\n64", "B1\n512"]


def test_what_was_not_timed_is_not_drawn():
    figure = plots.figure_of(record_of("forward", forward(512, flashtile=1.0, a=None)))
    assert figure.names == [OURS]


def test_a_picture_repeats_and_holds_its_words(tmp_path):
    cells = [forward(length, flashtile=1e-6, Mine=2e-6) for length in (512, 2048)]
    record = record_of("forward", *cells, matmul_tflops=700.0)
    for name in ("a.svg", "b.svg"):
        plots.draw(record, tmp_path / "new" / name)
    first, second = ((tmp_path / "new" / name).read_text() for name in ("a.svg", "b.svg"))
    assert first == second
    words = {element.text for element in ElementTree.fromstring(first).iter(f"{SVG}text")}
    assert {
        "512",
        "2048",
        "D 64, full",
        "TFLOP/s",
        "sequence length (tokens)",
        OURS,
        "Mine",
        "an 8192³ matmul in this run: 700",
    } <= words
    assert not re.search(r"dc:date|matplotlib\.org", first)


def test_every_colour_is_legible_on_white_and_on_a_dark_page():
    for colour in {plots.INK, plots.VERMILION, *plots.COLOURS, *(style.colour for style in plots.STYLES.values())}:
        for background in ("#ffffff", "#0d1117"):
            darker, lighter = sorted((luminance(colour), luminance(background)))
            assert (lighter + 0.05) / (darker + 0.05) >= 3, (colour, background)


# What a colour-blind reader has of linear red, green and blue (Machado, Oliveira and Fernandes 2009).
SIGHT = {
    "all three": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
TO_XYZ = ((0.4339, 0.3762, 0.1899), (0.2126, 0.7152, 0.0722), (0.0177, 0.1095, 0.8729))  # 1 each for white


def in_lab(colour, sight):
    """The colour in CIE L*a*b*, in which a difference of about 2 is just seen."""

    def times(matrix, vector):
        return [min(max(sum(m * v for m, v in zip(row, vector, strict=True)), 0), 1) for row in matrix]

    x, y, z = (
        t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116
        for t in times(TO_XYZ, times(SIGHT[sight], linear(colour)))
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("sight", SIGHT)
def test_every_two_colours_are_told_apart(sight):
    colours = {plots.VERMILION, *plots.COLOURS, *(style.colour for style in plots.STYLES.values())}
    seen = [in_lab(colour, sight) for colour in colours]
    assert len(seen) == 8
    assert min(math.dist(one, other) for one, other in itertools.combinations(seen, 2)) > 18


def test_contestants_of_one_picture_look_different():
    names = [OURS, "SDPA FA2", "SDPA cuDNN", "SDPA efficient", "Flex", "FA3", *"abcdefgh"]
    looks = [plots.style_of(name, names) for name in names]
    assert len(set(looks)) == len(looks)
    assert [name for name in names if plots.style_of(name, names).colour == plots.VERMILION] == [OURS]


def test_stored_runs_are_drawn_beside_their_tables(tmp_path, capsys):
    stored, page, folder = tmp_path / "run.json", tmp_path / "docs" / "page.md", tmp_path / "docs" / "plots"
    page.parent.mkdir()
    page.write_text(f"{report.BEGIN}{report.END}")
    report.write(stored, record_of("forward", forward(512, flashtile=1.0, a=2.0)))
    assert main(["bench", "--markdown", str(stored), "--plots", str(folder), "--into", str(page)]) == 0
    assert "](plots/forward.svg)" in page.read_text() and (folder / "forward.svg").is_file()
    assert main(["bench", "--markdown", str(stored), str(stored), "--plots", str(folder)]) == 2
    assert "expected one run of each" in capsys.readouterr().err


def test_what_is_measured_is_drawn_too(tmp_path, capsys):
    cases = [Case.square(1, 16, 2, 16, dtype="float32", work=work) for work in (Work.FORWARD, Work.BACKWARD)]
    assert command.measure("cpu", quick=True, cases=cases, plots_folder=tmp_path) == 0
    assert f"drawn in {tmp_path}" in capsys.readouterr().out.replace("\n", "")
    assert ElementTree.parse(tmp_path / "cpu.svg").getroot().tag == f"{SVG}svg"


def test_brief_counts_each_cell_against_its_fastest_peer(tmp_path, capsys):
    cells = [forward(512, flashtile=1.0, a=2.0, b=8.0), forward(2048, flashtile=1.0, a=4.0, b=0.5)]
    ours = dataclasses.replace(cells[0], entries=cells[0].entries[:1])
    for name, of in (("some", cells), ("none", [ours])):
        report.write(tmp_path / name, record_of("forward", *of))
    assert main(["bench", "--brief", "--markdown", str(tmp_path / "some"), str(tmp_path / "none")]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == ["| forward | a GPU | a, b | 1.00× | 0.50× | 2 |"]


def test_refusals_of_one_reason_are_one_note():
    record = json.loads(
        json.dumps(record_of("forward", forward(512, flashtile=1.0, a=None), forward(2048, flashtile=1.0, a=None)))
    )
    for cell in record["cells"]:
        cell["results"]["a"]["refusal"] = "no kernel"
    assert report.remarks(record) == [f"a did not run {record['cells'][0]['name']} and 1 more: no kernel"]
