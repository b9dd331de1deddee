"""Every example runs, and the README's does what it says."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_example(path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(path)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # where there is a GPU, an example may want minutes
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


def test_readme():
    dense, masked, ragged, cached = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
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
