"""The command line runs, says what it should, and reports failure through its exit status."""

import json
import sys

import pytest
import torch

import flashtile
from flashtile.cli import main


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


def test_explain_refuses_what_attention_refuses(capsys):
    assert main(["explain", "2", "100", "120", "8", "3", "64", "--device", "cpu"]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("flashtile: attention: ") and not shown.out


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


def test_bench_refuses_a_peer_that_is_not_there(capsys):
    assert main(["bench", "--suite", "forward", "--peer", "Mine=no_such_module:f"]) == 2
    assert "has module 'no_such_module', expected one that can be imported" in capsys.readouterr().out


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
        ("demo --output .", "Is a directory: '.'"),
        ("explain 1 8 8 2 2 64 --device gpu", "explain: --device is gpu, expected cpu or cuda"),
        ("explain 1 8 8 2 2 64 --device cuda", "explain: --device is cuda, and torch sees no CUDA device"),
        ("explain 1 8 8 2 2 64 --device cpu --D_v 0", "attention: v has shape (1, 8, 2, 0), expected"),
        ("explain 999999 999999999 8 2 2 64 --device cpu", "allocate"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_measured(capsys, monkeypatch, tmp_path, arguments, reason):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("flashtile.bench.command.measure", None)
    file = tmp_path / "file"
    file.write_text("no record")
    assert main(arguments.format(file=file).split()) == 2
    assert reason.format(file=file) in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [file]


def test_a_record_of_something_else_is_refused(tmp_path, capsys):
    path = tmp_path / "list.json"
    path.write_text("[]")
    assert main(["bench", "--markdown", str(path)]) == 2
    assert f"{path} has format None, expected 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["dance"],
        ["bench", "--suite", "speed"],
        ["explain", "1"],
        ["explain", "1", "-8", "8", "2", "2", "64"],
        ["explain", "1", "8", "8", "2", "2", "64", "--page-size", "0"],
        ["ladder", "--batch", "0"],
        ["demo", "--seconds", "nan"],
    ],
)
def test_a_misspelt_command_line_is_refused(arguments):
    with pytest.raises(SystemExit) as refusal:
        main(arguments)
    assert refusal.value.code == 2
