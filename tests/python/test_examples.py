"""Every example and every Python block of the documentation runs, and the README's do what they say."""

import doctest
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashtile.compat

ROOT = Path(__file__).parents[2]
# A block may say in a comment above it why it cannot run here; all others run.
BLOCK = re.compile(r"^(?:<!-- not run: (.+) -->\n)?```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LOOKS_LIKE_ONE = re.compile(r"^\s*(?:```|~~~)\W*py", re.MULTILINE)
INCLUDED = re.compile(r'^--8<-- "(.+):(.+)"$', re.MULTILINE)


def text_of(page):
    """A page, with the parts of others that it includes."""

    def part(match):
        begin, end = (f"<!-- --8<-- [{edge}:{match[2]}] -->" for edge in ("start", "end"))
        return (ROOT / match[1]).read_text().split(begin)[1].split(end)[0]

    return INCLUDED.sub(part, page.read_text())


PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if LOOKS_LIKE_ONE.search(text_of(page))]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_example(path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(path)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # where there is a GPU, an example may want minutes
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


def test_two_ranks_train_as_one(capsys, monkeypatch):
    """examples/long_context.py, as its docstring says."""
    command = [str(ROOT / "examples" / "long_context.py"), "--steps", "4", "--context", "70"]  # no multiple of 4 chunks
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = subprocess.run([*torchrun, *command], capture_output=True, text=True, timeout=300, env=environment)
    assert ranks.returncode == 0, ranks.stderr
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    runpy.run_path(command[0], run_name="__main__")
    losses = [
        [float(x) for x in re.findall(r"loss (\S+)$", said, re.MULTILINE)]
        for said in (ranks.stdout, capsys.readouterr().out)
    ]
    assert len(losses[0]) == 4 and losses[0][-1] < losses[0][0]
    assert losses[0] == pytest.approx(losses[1], abs=5e-5)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_of_a_page_runs(page):
    """One after another, with the names of those before; those with prompts print what they say."""
    text, names = text_of(page), {}
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
    torch.manual_seed(0)
    blocks = BLOCK.findall(text)
    assert len(blocks) == len(LOOKS_LIKE_ONE.findall(text)), "a block is not written as ```python at a line's begin"
    try:
        for reason, code in blocks:
            if code.startswith(">>> "):
                test = parser.get_doctest(code, names, page.name, str(page), 0)
                if not reason:
                    assert runner.run(test, clear_globs=False).failed == 0
                    names.update(test.globs)
                continue
            compiled = compile(code, str(page), "exec")
            if not reason:
                exec(compiled, names)
    except NotImplementedError as refusal:
        if re.search("PyTorch is .*, expected .* or newer$", str(refusal)) is None:
            raise
        pytest.skip(str(refusal))
    finally:
        flashtile.compat.uninstall()  # which docs/migration.md installs


def test_the_pages_with_blocks_are_found():
    assert {"README.md", "index.md", "migration.md"} <= {page.name for page in PAGES}


def test_readme():
    dense, masked, ragged, cached = (code for _, code in BLOCK.findall((ROOT / "README.md").read_text()))
    names = {}
    exec(dense, names)
    torch.testing.assert_close(names["out"], exact(*(names[name] for name in "qkv")))
    exec(masked, names)
    inputs, padding = [names[name] for name in ("query", "key", "value")], names["padding"]
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=padding)
    torch.testing.assert_close(names["out"], expected)
    exec(ragged, names)
    sequences = zip(*(names[name].split(names["lengths"].tolist()) for name in "qkv"), strict=True)
    expected = [exact(*(x[None] for x in rows))[0] for rows in sequences]
    torch.testing.assert_close(names["out"], torch.cat(expected))
    exec(cached, names)
    rows = names["block_table"].long()  # of 32 pages of 16 tokens, in order
    keys, values = (names[f"{x}_cache"][rows].flatten(1, 2)[:, :102] for x in "kv")
    torch.testing.assert_close(
        names["out"], exact(names["q"], keys, values, is_causal=False)
    )  # the last token sees all


def exact(q, k, v, is_causal=True):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    return out.transpose(1, 2)
