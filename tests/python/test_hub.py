"""What `make hub` packs loads without flashtile's own package, beside it, and beside another build, for every PyTorch.

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
import torch

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

first, *others = sys.argv[1:]
kernel = load(first)
assert not {"flashtile", "rich"} & set(sys.modules)
names = {name.partition("::")[0] for name in torch._C._dispatch_get_all_op_names()}
assert "flashtile" not in names and kernel.__name__.strip("_") in names
q, k, v = torch.randn(3, 2, 60, 4, 32)
results = [kernel.attention(q, k, v, causal=True), kernel.flash_attn_func(q, k, v, causal=True)]
results += [torch.compile(kernel.attention, backend="eager", fullgraph=True)(q, k, v, causal=True)]
import flashtile
for other in (*map(load, others), flashtile):
    assert other.attention is not kernel.attention and other.__version__ == kernel.__version__
    results += [other.attention(q, k, v, causal=True)]
assert all(torch.equal(results[0], x) for x in results)
"""


@pytest.fixture
def packed(tmp_path):
    """Packs a repository of this name, whose module has these components in it; returns its folders by backend."""
    spec = importlib.util.spec_from_file_location("pack", ROOT / "hub" / "pack.py")
    pack = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pack)

    def packed(name="hub", **components):
        bill, licences = tmp_path / "flashtile.cdx.json", tmp_path / "licenses"
        licences.mkdir(exist_ok=True)
        listed = [{"name": key.replace("_", " "), "version": version} for key, version in components.items()]
        bill.write_text(json.dumps({"components": listed}))
        folders = pack.pack(Path(flashtile._C.__file__), bill, licences, tmp_path / name)
        assert sorted((tmp_path / name / "build").iterdir()) == sorted(folders)
        return {re.fullmatch(r"torch-stable-abi26-(\w+)-x86_64-linux", path.name)[1]: path for path in folders}

    return packed


def test_builds_load_alone_and_together(packed):
    folders = [*packed("first").values(), *packed("second", CUDA_runtime="13.0").values()]
    subprocess.run([sys.executable, "-c", LOAD, *folders], check=True)


def test_it_is_named_after_what_it_is(packed):
    """The same build has the same names again, another one has others, and so has each folder."""
    first, again, with_cuda = ids = [
        {backend: metadata(path)["id"] for backend, path in folders.items()}
        for folders in (packed("first"), packed("again"), packed("other", CUDA_runtime="13.0"))
    ]
    assert first == again and [list(x) for x in ids] == [["cpu"], ["cpu"], ["cpu", "cu118", "cu120", "cu130"]]
    assert len({*first.values(), *with_cuda.values()}) == 5
    for backend, name in with_cuda.items():
        assert re.fullmatch(rf"_flashtile_{backend}_[0-9a-f]{{12}}", name)


def test_folders_say_for_which_gpus_they_are(packed):
    """By this `kernels` refuses a GPU, so the folder for a CPU must name none."""
    folders = packed(CUDA_runtime="13.0")
    assert metadata(folders.pop("cpu"))["backend"] == {"type": "cpu"}
    for path in folders.values():
        assert metadata(path)["backend"]["type"] == "cuda" and "9.0a" in metadata(path)["backend"]["archs"]


def test_another_build_replaces_all_folders(packed):
    """Of several folders for CUDA 12 `kernels` takes that of the latest, which might be one of an older build."""
    assert len(packed(CUDA_runtime="13.0")) > 1
    assert list(packed()) == ["cpu"]


def metadata(folder):
    return json.loads((folder / "metadata.json").read_text())


@pytest.fixture
def take(monkeypatch):
    """Says which folder `kernels` takes of a repository, for a PyTorch of this version and CUDA."""
    kernels = pytest.importorskip("kernels", minversion="0.17", reason="needs Hugging Face's kernels 0.17 or newer")

    def take(folders, version, cuda, backend=None):
        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        for folder in folders.values():  # a choice is what is looked at here, not what flashtile does with that version
            (folder / "__init__.py").write_text("")
        kernel = kernels.get_local_kernel(folders["cpu"].parents[1], backend=backend)
        (taken,) = (name for name, folder in folders.items() if Path(kernel.__file__).parent == folder)
        return taken

    return take


PYTORCHS = [
    ("2.6.0+cpu", None, "cpu"),
    ("2.6.0+cu118", "11.8", "cu118"),
    ("2.6.0+cu124", "12.4", "cu120"),
    ("2.7.1+cu126", "12.6", "cu120"),
    ("2.8.0+cu128", "12.8", "cu120"),
    ("2.8.0+cu129", "12.9", "cu120"),
    ("2.11.0+cu130", "13.0", "cu130"),
    ("2.13.0", "13.2", "cu130"),
]


@pytest.mark.parametrize(("version", "cuda", "taken"), PYTORCHS)
def test_a_build_with_cuda_has_a_folder_for_every_pytorch(packed, take, version, cuda, taken):
    folders = packed(CUDA_runtime="13.0")
    assert take(folders, version, cuda) == taken
    assert take(folders, version, cuda, backend="cpu") == "cpu"


@pytest.mark.parametrize(("version", "cuda", "taken"), PYTORCHS)
def test_a_build_without_cuda_is_for_cpus(packed, take, version, cuda, taken):
    """A PyTorch with CUDA gets it when asked for, and not by itself: it could do nothing on a GPU."""
    folders = packed()
    assert take(folders, version, cuda, backend="cpu") == "cpu"
    if taken != "cpu":
        with pytest.raises(FileNotFoundError, match="does not match selected backend"):
            take(folders, version, cuda)


@pytest.mark.parametrize("cuda", [None, "12.4", "13.0"])
def test_an_older_pytorch_gets_none(packed, take, cuda):
    with pytest.raises(FileNotFoundError, match="too new"):
        take(packed(CUDA_runtime="13.0"), "2.5.1", cuda)
