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
    program = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    names = {}
    exec(program, names)
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(names[name].transpose(1, 2) for name in "qkv"), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(names["out"], exact.transpose(1, 2))
