"""The command line runs, says what it should, and reports failure through its exit status."""

import json
import os
import subprocess
import sys

import pytest
import torch

import flashtile
from flashtile import cli
from flashtile.cli import main
from flashtile.masks import ColumnMask


def test_info(capsys):
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    assert flashtile.__version__ in shown
    assert all(kernel in shown for kernel in flashtile.info()["forward_kernels"])


def test_explain(capsys):
    assert (
        main(["explain", "2", "100", "120", "8", "2", "64", "--dtype", "float32", "--device", "cpu", "--causal"]) == 0
    )
    assert "cpu_f32" in capsys.readouterr().out


@pytest.mark.parametrize(
    "option, shown", [(["--cache"], "contiguous, 120 rows"), (["--page-size", "16"], "8 of 16 pages of 16 rows")]
)
def test_explain_of_a_cache(option, shown, capsys):
    assert main(["explain", "2", "1", "120", "8", "2", "64", "--dtype", "float32", "--device", "cpu", *option]) == 0
    assert shown in capsys.readouterr().out


SMALL = ["explain", "2", "100", "120", "8", "2", "64", "--dtype", "float16"]


@pytest.mark.parametrize(
    "options, shown",
    [
        ("--window 10 0", "window (10, 0)"),
        ("--window none 3", "window (None, 3)"),
        ("--window NONE none", "full"),
        ("--causal --window 5 7", "window (5, 0)"),
        ("--window 10 -5", "window (10, -5)"),
        ("--window -5 none", "window (-5, None)"),
        ("--window -3 2", "window that shows nothing"),
        ("--softcap 30", "softcap 30"),
        ("--scale -0.5", "scale -0.5"),
        ("--alibi", "ALiBi"),
        ("--sinks", "sinks"),
        ("--dropout 0.25", "dropout 0.25"),
        ("--deterministic", "deterministic"),
        ("--varlen", "B=2 ragged T_q=200 T_k=240"),
        ("--varlen --cache", "B=2 ragged T_q=200 T_k=120"),
        ("--D_v 32", "D=64 D_v=32"),
    ],
)
@pytest.mark.parametrize("where", ["--device cpu", "--gpu A100"])
def test_explain_takes_the_options_of_attention(options, shown, where, capsys):
    assert main([*SMALL, *options.split(), *where.split()]) == 0
    out = capsys.readouterr().out
    assert all(shown in line for line in out.splitlines() if line.startswith("  problem"))


@pytest.mark.parametrize(
    "options, shown", [("--splits 3", "3 of a tile's keys"), ("--batch-invariant", "batch-invariant, on Hopper")]
)
def test_explain_takes_the_options_of_a_cache(options, shown, capsys):
    assert main([*SMALL[:3], "5000", *SMALL[4:], "--page-size", "16", "--gpu", "H100", *options.split()]) == 0
    out = capsys.readouterr().out
    assert "B=2 S_q=100 S_k=5008" in out and "313 of 626 pages of 16 rows" in out and shown in out


def test_explain_needs_no_memory_for_the_problem(capsys):
    """Which has 2^60 elements."""
    sizes = ["1048576", "1048576", "1048576", "1024", "1", "128"]
    for where in (["--device", "cpu"], ["--gpu", "9.0"]):
        assert main(["explain", *sizes, *where]) in (0, 2)  # a GPU cannot count so many tiles
    assert "threads: " in capsys.readouterr().out


def test_explain_says_what_its_numbers_are(capsys):
    with pytest.raises(SystemExit):
        main(["explain", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for text in ("B sequences, the batch", "S_q queries of each sequence", "H_k heads of the keys", "D head dimension"):
        assert text in shown


def test_explain_refuses_what_attention_refuses(capsys):
    assert main(["explain", "2", "100", "120", "8", "3", "64", "--device", "cpu"]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("flashtile: attention: ") and not shown.out


def test_mask_draws(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "new" / "x.png"
    assert main(["mask", "causal_document", "3", "5", "--png", str(picture)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("causal_document: ColumnMask(B=1, H=1, S_q=8, S_k=8, device=cpu), 67.2% hidden\n#.......\n")
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(
    "arguments, mask",
    [
        ("full 2 4", ColumnMask.full(2, 4)),
        ("causal 4 6", ColumnMask.causal(4, 6)),
        ("document 3 1 2", ColumnMask.document([3, 1, 2])),
        ("causal_document 3 1 2", ColumnMask.causal_document([3, 1, 2])),
        ("share_question 2 2 1", ColumnMask.share_question([(2, [2, 1])])),
        ("sliding_window 6 3", ColumnMask.sliding_window(6, 3)),
        ("global_sliding_window 7 1 2 0", ColumnMask.global_sliding_window(7, 1, (2, 0))),
        ("prefix_lm 6 3", ColumnMask.prefix_lm(6, 3)),
        ("prefix_document 2 4 1 2", ColumnMask.prefix_document([(2, 4), (1, 2)])),
        ("causal_blockwise 2 2 2", ColumnMask.causal_blockwise([2, 2, 2])),
        ("qk_sparse 6 2 4", ColumnMask.qk_sparse(6, [(2, 4)])),
        ("chunked 5 2", ColumnMask.chunked(5, 2)),
        ("image_blocks 6 1 4", ColumnMask.image_blocks([(1, 4)], 6)),
    ],
)
def test_mask_makes_every_kind(arguments, mask, capsys):
    assert main(["mask", *arguments.split()]) == 0
    assert capsys.readouterr().out.partition("\n")[2] == f"{mask.picture()}\n"


def test_mask_is_drawn_at_most_32_characters_wide_and_says_what_its_numbers_are(capsys):
    assert main(["mask", "causal_document", "3000", "1096"]) == 0
    first, *rows = capsys.readouterr().out.splitlines()
    assert first.endswith("S_k=4096, device=cpu), 69.6% hidden") and {len(row) for row in rows} == {32}
    with pytest.raises(SystemExit):
        main(["mask", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for kind, (sizes, _) in cli.MASKS.items():
        assert f"{kind} {sizes}" in shown


def test_bench_quick_then_markdown(tmp_path, capsys):
    stored, page = tmp_path / "quick.json", tmp_path / "page.md"
    assert main(["bench", "--suite", "cpu", "--quick", "--json", str(stored)]) == 0
    assert json.loads(stored.read_text())["suite"] == "cpu"
    page.write_text("<!-- results:begin --><!-- results:end -->")
    assert main(["bench", "--markdown", str(stored), "--into", str(page)]) == 0
    capsys.readouterr()
    assert main(["bench", "--markdown", str(stored)]) == 0
    printed = capsys.readouterr().out
    assert "| B1 S256 H2 D64 | full |" in printed
    assert printed.strip() in page.read_text()


def test_bench_refuses_a_file_that_is_not_there(capsys):
    assert main(["bench", "--markdown", "/nonexistent.json"]) == 2
    assert "/nonexistent.json" in capsys.readouterr().err


def test_bench_passes_further_peers_on(monkeypatch):
    from flashtile.bench import command

    seen = {}
    monkeypatch.setattr(command, "measure", lambda suite, **options: seen.update(options, suite=suite) or 0)
    assert main(["bench", "--peer", "A=a:f", "--peer", "B C=b.c:g", "--flex"]) == 0
    assert seen["peers"] == ["A=a:f", "B C=b.c:g"] and seen["flex"] is True
    assert main(["bench"]) == 0
    assert seen["peers"] == [] and seen["flex"] is False


def test_bench_passes_a_seed_on(monkeypatch, capsys):
    from flashtile.bench import command

    seen = {}
    with monkeypatch.context() as patched:
        patched.setattr(command, "measure", lambda suite, **options: seen.update(options, suite=suite) or 0)
        assert main(["bench", "--suite", "random", "--seed", "12"]) == 0
        assert seen["suite"] == "random" and seen["seed"] == 12
        assert main(["bench", "--suite", "random"]) == 0
        assert seen["seed"] is None
    assert main(["bench", "--suite", "cpu", "--seed", "0"]) == 2
    assert "bench: --seed is given with suite 'cpu', expected suite 'random'" in capsys.readouterr().err


def test_bench_refuses_a_peer_that_is_not_there(capsys):
    assert main(["bench", "--suite", "forward", "--peer", "Mine=no_such_module:f"]) == 2
    shown = capsys.readouterr()
    assert "has module 'no_such_module', expected one that can be imported" in shown.err and not shown.out


@pytest.mark.parametrize("unused", [["--profile"], ["--seed", "0"], ["--flex"], ["--full"], ["--peer", "x"]])
@pytest.mark.parametrize("where", [["--suite", "distributed"], ["--markdown", "stored.json"]])
def test_bench_refuses_what_would_have_no_effect(where, unused, capsys):
    assert main(["bench", *where, *unused]) == 2
    assert f"{unused[0]} is given with " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "cpu", "cuda:0"])
def test_explain_wants_a_gpu_by_its_name(name, capsys):
    assert main(["explain", "2", "4", "4", "4", "4", "64", "--gpu", name]) == 2
    assert f"--gpu is {name!r}, expected a GPU's name" in capsys.readouterr().err


SMALL_LADDER = ["ladder", "--device", "cpu", "--seqlen", "40", "--heads", "2", "--kv-heads", "1", "--head-dim", "16"]


def test_ladder(capsys):
    assert main([*SMALL_LADDER, "--seqlen-q", "3", "--causal", "--quick"]) == 0
    shown = capsys.readouterr().out
    assert "B1 S3/40 H2/1 D16 causal f32" in shown
    assert "FlashAttention-1, PyTorch" in shown and "needs an NVIDIA GPU" in shown and "WRONG" not in shown


def test_ladder_stored_then_markdown(tmp_path, capsys):
    stored, page = tmp_path / "ladder.json", tmp_path / "page.md"
    page.write_text("<!-- results:begin --><!-- results:end -->")
    assert main([*SMALL_LADDER, "--quick", "--json", str(stored)]) == 0
    assert main(["ladder", "--markdown", str(stored), "--into", str(page)]) == 0
    capsys.readouterr()
    assert main(["ladder", "--markdown", str(stored)]) == 0
    printed = capsys.readouterr().out
    assert "| 3 | FlashAttention-2, PyTorch | " in printed
    assert printed.strip() in page.read_text()


def test_ladder_once(capsys):
    assert main([*SMALL_LADDER, "--once", "standard"]) == 0
    # Q and O, K and V, and four times the scores of two heads.
    assert f"{2 * 4 * 40 * 16 * (2 + 1) + 4 * 4 * 2 * 40 * 40} bytes by formula" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["--once", "flash9"], "ladder: rung is 'flash9', expected one of standard, "),
        (["--once", "sm90"], "ladder: --once leaves out 'sm90': sm90: needs an NVIDIA GPU"),
        (["--device", "cuda"], "ladder: --device is cuda, and torch sees no CUDA device"),
        (["--kv-heads", "3"], "ladder: --heads is 2, expected a multiple of --kv-heads, 3"),
        (["--once", "standard", "--json", "f"], "ladder: --once times nothing, expected no --json"),
        (["--markdown", "/nonexistent.json"], "/nonexistent.json"),
        (["--device", "gpu"], "ladder: --device is gpu, expected cpu or cuda"),
        (["--into", "page.md"], "ladder: --into is given, expected --markdown with it"),
        (["--json", "."], "Is a directory: '.'"),
        (["--markdown", "run.json", "--json", "f"], "ladder: --markdown measures nothing, expected no --json"),
        (["--measure"], "ladder: --measure needs an NVIDIA GPU"),
        (["--batch", "1073741823"], "ladder: B1073741823 S40 H2/1 D16 full f32 forward takes at least "),
        (["--once", "standard", "--batch", "1073741823"], "expected at most the "),
    ],
)
def test_ladder_refuses(capsys, monkeypatch, arguments, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([*SMALL_LADDER, *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_demo_says_what_it_lacks(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["demo"]) == 2
    assert "flashtile[demo]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, reason",
    [
        ("bench --json .", "Is a directory: '.'"),
        ("bench --plots {file}", "File exists: '{file}'"),
        ("bench --into page.md", "bench: --into or --brief is given, expected --markdown with it"),
        ("bench --markdown {file}", "{file} is no JSON, expected a stored run"),
        ("bench --markdown {file} --into {file}", "{file} has no <!-- results:begin -->"),
        ("bench --markdown {file} --json x.json", "bench: --markdown measures nothing, expected no --json"),
        ("bench --markdown {folder}", "Is a directory: '{folder}'"),
        ("ladder --markdown {folder}", "Is a directory: '{folder}'"),
        ("demo --output .", "Is a directory: '.'"),
        (
            "demo --output {folder}/x.nonsense",
            "demo: --output is {folder}/x.nonsense, expected a name that ends in .png",
        ),
        ("demo --output {folder}/x", "demo: --output is {folder}/x, expected a name that ends in .png, .svg or .pdf"),
        ("demo --output {file}/x.png", "File exists: '{file}'"),
        ("mask chunked 8", "mask: chunked is given 1 number, expected S CHUNK"),
        ("mask document", "mask: document is given 0 numbers, expected LENGTH ..."),
        ("mask prefix_lm 8 9", "ColumnMask.prefix_lm: prefix is 9, expected an int from 0 to 8"),
        ("mask prefix_document 1 8 2", "mask: 1 8 2 is an odd count of numbers, expected pairs"),
        ("mask chunked 8 2 --png {folder}/x.svg", "mask: --png is {folder}/x.svg, expected a name that ends in .png"),
        ("mask chunked 8 2 --png {file}/x.png", "File exists: '{file}'"),
        ("explain 1 8 8 2 2 64 --device gpu", "explain: --device is gpu, expected cpu or cuda"),
        ("explain 1 8 8 2 2 64 --device cuda", "explain: --device is cuda, and torch sees no CUDA device"),
        ("explain 1 8 8 2 2 64 --device cuda:x", "explain: --device is cuda:x, and torch sees no CUDA device"),
        ("explain 1 8 8 2 2 64 --device cpu:x", "explain: --device is cpu:x, expected one such as cuda:0"),
        ("explain 1 8 8 2 2 64 --gpu X1", "explain: device is X1, expected cpu, cuda, A100, "),
        ("explain 1 8 8 2 2 64 --gpu V100", "(V100, compute capability 7.0), expected compute capability 8.0"),
        (
            "explain 1 8 8 2 2 64 --gpu H100 --dtype float32",
            "q has dtype float32 on cuda:0, expected float16 or bfloat16",
        ),
        ("explain 1 8 8 2 2 64 --device cpu --D_v 0", "attention: v has shape (1, 8, 2, 0), expected"),
        ("explain 1 8 8 2 2 64 --device cpu --softcap nan", "attention: softcap is nan, expected a finite"),
        ("explain 1 8 8 2 2 64 --device cpu --dropout 1", "attention: dropout_p is 1, expected a probability"),
        ("explain 1 8 8 2 2 64 --device cpu --splits 1", "explain: --splits is given, expected it with a cache"),
        (
            "explain 1 8 8 2 2 64 --cache --sinks --dropout 0.1",
            "explain: --dropout is given, expected it without a cache",
        ),
        ("explain 1073741823 1073741823 1073741823 8 2 64", "explain: Storage size calculation overflowed"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_measured(capsys, monkeypatch, tmp_path, arguments, reason):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("flashtile.bench.command.measure", None)
    file = tmp_path / "file"
    file.write_text("no record")
    names = {"file": file, "folder": tmp_path}
    assert main(arguments.format(**names).split()) == 2
    said = capsys.readouterr().err
    assert reason.format(**names) in said and said.count("\n") == 1
    assert list(tmp_path.iterdir()) == [file]


CELL = {"name": "a", "shape": "b", "mask": "full", "results": {}, "ratios": {}}


@pytest.mark.parametrize(
    "record, reason",
    [
        ([], "has format None, expected 1"),
        ({"format": 1}, "is no stored run: it has no 'suite'"),
        ({"format": 1, "suite": "forward"}, "is no stored run: it has no 'cells'"),
        ({"format": 1, "suite": ["forward"]}, "has suite ['forward'], expected one of forward, "),
        ({"format": 1, "suite": "forward", "cells": [1]}, "is no stored run: TypeError: 'int' object"),
        ({"format": 1, "suite": "forward", "cells": [CELL]}, "is no stored run: it has no 'case'"),
        ({"format": 1, "suite": "forward", "cells": [], "machine": []}, "is no stored run: AttributeError: 'list'"),
        ({"format": 1, "suite": "forward", "cells": [], "machine": {}}, "is no stored run: it has no "),
    ],
    ids=repr,
)
@pytest.mark.parametrize("options", ["", "--brief", "--plots {folder}/plots"])
def test_a_record_of_something_else_is_refused(record, reason, options, tmp_path, capsys):
    path, page = tmp_path / "run.json", tmp_path / "page.md"
    path.write_text(json.dumps(record))
    page.write_text("<!-- results:begin -->before<!-- results:end -->")
    options = options.format(folder=tmp_path).split()
    status = main(["bench", "--markdown", str(path), "--into", str(page), *options])
    if options == ["--brief"] and record and record.get("cells", [1]) in ([], [CELL]):
        return  # of a cell in which nothing was timed it asks no more
    said = capsys.readouterr().err
    assert status == 2 and f"{path} {reason}" in said and said.count("\n") == 1
    assert "before" in page.read_text() and not any(tmp_path.glob("plots/*"))


@pytest.mark.parametrize(
    "record, reason",
    [
        ({"format": 1, "suite": "ladder"}, "is no stored run: it has no 'cells'"),
        ({"format": 1, "suite": "ladder", "cells": []}, "is no stored run: ValueError: not enough values"),
        ({"format": 1, "suite": "ladder", "cells": [CELL]}, "is no stored run: it has no 'bytes'"),
        ({"format": 1, "suite": "cpu"}, "has suite 'cpu', expected 'ladder'"),
    ],
    ids=repr,
)
def test_a_record_that_is_no_ladder_is_refused(record, reason, tmp_path, capsys):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(record))
    assert main(["ladder", "--markdown", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"{path} {reason}" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "command", ["info", "explain 1 8 8 2 2 64 --gpu H100", "ladder --seqlen 8 --device cpu --quick"]
)
@pytest.mark.parametrize(
    "output, status, said", [("closed", 1, ""), ("/dev/full", 2, "flashtile: [Errno 28] No space")]
)
def test_an_output_that_takes_nothing_ends_a_command(command, output, status, said):
    program = f"import sys; from flashtile.cli import main; sys.exit(main({command.split()}))"
    if output == "closed":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open(output, os.O_WRONLY)
    try:
        ran = subprocess.run([sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writer)
    assert ran.returncode == status
    assert ran.stderr.startswith(said) and ran.stderr.count("\n") == bool(said)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["dance"],
        ["bench", "--suite", "speed"],
        ["bench", "--suite", "random", "--seed", "-1"],
        ["mask"],
        ["mask", "tree", "3"],
        ["mask", "chunked", "8", "-2"],
        ["explain", "1"],
        ["explain", "1", "-8", "8", "2", "2", "64"],
        ["explain", "9223372036854775808", "1", "1", "1", "1", "64"],
        ["explain", "1", "8", "8", "2", "2", "64", "--page-size", "0"],
        ["explain", "1", "8", "8", "2", "2", "64", "--page-size", "9" * 5000],
        ["explain", "1", "8", "8", "2", "2", "64", "--window", "3"],
        ["explain", "1", "8", "8", "2", "2", "64", "--window", "--1", "0"],
        ["explain", "1", "8", "8", "2", "2", "64", "--window", "0", "-1073741824"],
        ["explain", "1", "8", "8", "2", "2", "64", "--softcap", "much"],
        ["explain", "1", "8", "8", "2", "2", "64", "--gpu", "H100", "--device", "cpu"],
        ["ladder", "--batch", "0"],
        ["ladder", "--batch", "1099511627776"],
        ["demo", "--seconds", "nan"],
    ],
)
def test_a_misspelt_command_line_is_refused(arguments):
    with pytest.raises(SystemExit) as refusal:
        main(arguments)
    assert refusal.value.code == 2
