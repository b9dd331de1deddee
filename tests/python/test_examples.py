"""Every example runs, and the README's does what it says."""

import re
import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_example(path, capsys):
    runpy.run_path(str(path))
    assert capsys.readouterr().out


def test_readme():
    dense, ragged = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names = {}
    exec(dense, names)
    torch.testing.assert_close(names["out"], exact(*(names[name] for name in "qkv")))
    exec(ragged, names)
    sequences = zip(*(names[name].split(names["lengths"].tolist()) for name in "qkv"), strict=True)
    expected = [exact(*(x[None] for x in rows))[0] for rows in sequences]
    torch.testing.assert_close(names["out"], torch.cat(expected))


def exact(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
