"""Packs a build of flashtile as Hugging Face's `kernels` loads it from a repository.

    python pack.py BUILD REPOSITORY    BUILD is a build tree with FLASHTILE_HUB and FLASHTILE_RELEASE

REPOSITORY/build gets folders, which are printed, instead of those of an earlier build. They are named after what they
run with: any PyTorch from 2.6 on, without CUDA, and where BUILD has CUDA with every version of it too. In each is
flashtile without what no program asks for, such as the benchmark. Several may be loaded into one process, so operators,
and the module in `sys.modules`, have names that no other has.
"""

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

HUB = Path(__file__).parent
PACKAGE = HUB.parent / "python" / "flashtile"
LEFT_OUT = ["bench", "cli.py", "demo", "integrations", "reference", "*.so", "__pycache__"]
ARCHS = ["8.0+PTX", "9.0", "9.0a"]  # as `kernels` writes cmake/variants.cmake's FLASHTILE_CUDA_ARCHITECTURES
# `kernels` takes a folder where PyTorch's CUDA is of its major version, and of its minor version or a later one. The
# module has a CUDA runtime of its own and shares only the driver with PyTorch, so one build serves all of these. CUDA
# 11.8 is the oldest that there is a PyTorch 2.6 for.
CUDA = ["cu118", "cu120", "cu130"]


def pack(module: Path, bill: Path, licences: Path, repository: Path) -> list[Path]:
    for folder in (repository / "build").glob("torch-stable-abi*"):  # of another build
        shutil.rmtree(folder)
    with_cuda = any(x["name"] == "CUDA runtime" for x in json.loads(bill.read_text())["components"])
    backends = ["cpu", *CUDA] if with_cuda else ["cpu"]
    folders = [pack_for(backend, module, bill, licences, repository / "build") for backend in backends]
    shutil.copy(HUB / "README.md", repository)
    return folders


def pack_for(backend: str, module: Path, bill: Path, licences: Path, build: Path) -> Path:
    target = build / f"torch-stable-abi26-{backend}-x86_64-linux"
    shutil.copytree(PACKAGE, target, ignore=shutil.ignore_patterns(*LEFT_OUT))
    shutil.copy(HUB / "__init__.py", target)
    shutil.copy(module, target)
    shutil.copytree(licences, target / "licenses")
    shutil.copy(HUB.parent / "LICENSE", target / "licenses")
    shutil.copy(bill, target)

    version = re.search(r'^version = "(.+)"', (HUB.parent / "pyproject.toml").read_text(), re.MULTILINE)[1]
    name = f"flashtile_{backend}_{digest(target)[:12]}"
    names = re.sub(r"^VERSION = .*", f'VERSION = "{version}"', (PACKAGE / "_build.py").read_text(), flags=re.MULTILINE)
    names = re.sub(r"^NAMESPACE = \S+", f'NAMESPACE = "{name}"', names, flags=re.MULTILINE)
    (target / "_build.py").write_text(names.replace("from importlib.metadata import version\n\n", ""))
    metadata = {
        "id": f"_{name}",
        "name": "flashtile",
        "version": 1,  # of the repository's branch: it changes when a caller has to
        "license": "BSD-3-Clause",
        "python-depends": [],
        "backend": {"type": "cuda", "archs": ARCHS} if backend in CUDA else {"type": "cpu"},
    }
    (target / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return target


def digest(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        found.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def main() -> None:
    tree, repository = Path(sys.argv[1]), Path(sys.argv[2])
    (module,) = tree.glob("_C.*.so")
    print(*pack(module, tree / "flashtile.cdx.json", tree / "licenses", repository), sep="\n")


if __name__ == "__main__":
    main()
