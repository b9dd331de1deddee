"""What `make hub` packs loads without flashtile's own package, beside it, and beside another build.

The module is the installed one, which needs nanobind's library; `tests/release/try_hub.py` loads what is packed as
Hugging Face's `kernels` does.
"""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flashtile

ROOT = Path(__file__).parents[2]
# What `kernels` does with a folder.
LOAD = """
import importlib.util, json, sys
import torch

def load(folder):
    name = json.load(open(f"{folder}/metadata.json"))["id"]
    spec = importlib.util.spec_from_file_location(name, f"{folder}/__init__.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

first, second = sys.argv[1:]
kernel = load(first)
assert not {"flashtile", "rich"} & set(sys.modules)
names = {name.partition("::")[0] for name in torch._C._dispatch_get_all_op_names()}
assert "flashtile" not in names and kernel.__name__.strip("_") in names
q, k, v = torch.randn(3, 2, 60, 4, 32)
results = [kernel.attention(q, k, v, causal=True), kernel.flash_attn_func(q, k, v, causal=True)]
results += [torch.compile(kernel.attention, backend="eager", fullgraph=True)(q, k, v, causal=True)]
import flashtile
for other in (load(second), flashtile):
    assert other.attention is not kernel.attention and other.__version__ == kernel.__version__
    results += [other.attention(q, k, v, causal=True)]
assert all(torch.equal(results[0], x) for x in results)
"""


@pytest.fixture
def packed(tmp_path):
    """Packs a repository of this name, whose module has these components in it."""
    spec = importlib.util.spec_from_file_location("pack", ROOT / "hub" / "pack.py")
    pack = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pack)

    def packed(name="hub", **components):
        bill, licences = tmp_path / "flashtile.cdx.json", tmp_path / "licenses"
        licences.mkdir(exist_ok=True)
        listed = [{"name": key.replace("_", " "), "version": version} for key, version in components.items()]
        bill.write_text(json.dumps({"components": listed}))
        return pack.pack(Path(flashtile._C.__file__), bill, licences, tmp_path / name)

    return packed


def test_builds_load_alone_and_together(packed):
    folders = [packed("first"), packed("second", another="1")]
    subprocess.run([sys.executable, "-c", LOAD, *folders], check=True)


def test_it_is_named_after_what_it_is(packed):
    """The same build has the same name again, another one has another."""
    names = [packed(), packed(), packed(CUDA_runtime="13.0")]
    assert [path.name for path in names] == [
        "torch-stable-abi26-cpu-x86_64-linux",
        "torch-stable-abi26-cpu-x86_64-linux",
        "torch-stable-abi26-cu130-x86_64-linux",
    ]
    first, again, other = (json.loads((path / "metadata.json").read_text()) for path in names)
    assert first == again and first["id"] != other["id"]
    assert re.fullmatch(r"_flashtile_cu130_[0-9a-f]{12}", other["id"])
    assert first["backend"] == {"type": "cpu"} and "9.0a" in other["backend"]["archs"]
