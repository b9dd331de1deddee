"""Tries a wheel with the Pythons of this machine, and with PyTorches for CPUs that pip finds for each of them.

    python try_versions.py WHEEL              with the oldest PyTorch that flashtile takes and pip finds
    python try_versions.py WHEEL 2.7 2.13     with these
    python try_versions.py WHEEL all          with every minor version

Each gets an environment of its own, in which `attend.py` compares attention and its gradients with PyTorch's. A build
for CPUs is one whose version ends in `+cpu` (docs/development.md says where pip has it from); others bring gigabytes.
With a Python that has none the module is loaded until it asks for PyTorch.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
MINORS = range(10, 15)  # of Python 3
OLDEST = (2, 6)  # PyTorch
ALONE = """
import importlib.util, platform
(folder,) = importlib.util.find_spec("flashtile").submodule_search_locations
spec = importlib.util.spec_from_file_location("_C", f"{folder}/_C.abi3.so")
try:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
except ImportError as error:
    if getattr(error.__cause__, "name", None) != "torch":
        raise
print(f"flashtile alone, Python {platform.python_version()}: the module loads and asks for PyTorch")
"""


def pythons() -> list[Path]:
    """An interpreter for each minor version: of PATH, else of pyenv."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = []
    for name in (f"3.{minor}" for minor in MINORS):
        candidates = [shutil.which(f"python{name}"), *sorted(versions.glob(f"{name}.*/bin/python"))]
        found += [Path(path) for path in candidates if path and can_make_environments(path)][:1]
    return found


def can_make_environments(python: str | Path) -> bool:
    return subprocess.run([python, "-c", "import venv"], capture_output=True).returncode == 0


def pip(python: Path) -> list[str | Path]:
    """This interpreter's pip, for another one, which may have none."""
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]


def torches(python: Path, asked_for: list[str]) -> list[str]:
    """The versions for CPUs that pip finds, one for each minor version, and of those the ones that are asked for."""
    listed = subprocess.run([*pip(python), "index", "versions", "torch"], capture_output=True, text=True).stdout
    newest: dict[tuple[int, int], str] = {}
    for version in reversed(re.findall(r"[\d.]+\+cpu", listed.partition("Available versions:")[2])):
        major, minor = map(int, version.split(".")[:2])
        if (major, minor) >= OLDEST:
            newest[major, minor] = version
    if asked_for == ["all"]:
        return list(newest.values())
    if not asked_for:
        return list(newest.values())[:1]
    return [version for (major, minor), version in newest.items() if f"{major}.{minor}" in asked_for]


def attempt(python: Path, wheel: str, torch: str | None) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
        inside = Path(folder, "bin/python")
        packages = [f"torch=={torch}"] if torch else ["--no-deps", "nanobind-backend>=1.0,<2"]
        subprocess.run([*pip(inside), "install", "--quiet", wheel, *packages], check=True)
        run = [inside, HERE / "attend.py"] if torch else [inside, "-c", ALONE]
        return subprocess.run(run, cwd=folder).returncode == 0


def main() -> int:
    wheel, asked_for = sys.argv[1], sys.argv[2:]
    results = [attempt(python, wheel, torch) for python in pythons() for torch in torches(python, asked_for) or [None]]
    return 0 if results and all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
