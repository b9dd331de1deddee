"""Holds a wheel to what a release promises.

    python check_wheel.py WHEEL    fails where a name, a size, a file or a licence is not what it has to be

auditwheel has seen to the versions of symbols; `tests/cpp/linkage.py` looks at the module here too.
"""

import email
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
TAG = "cp310-abi3-manylinux_2_28_x86_64"
LARGEST = 40_000_000  # bytes
MODULE = "flashtile/_C.abi3.so"
OF_CUDA = b"CUDA driver version is insufficient for CUDA runtime version"  # a text of the static CUDA runtime


def problems(wheel: Path) -> list[str]:
    found = []
    archive = zipfile.ZipFile(wheel)
    files = {name for name in archive.namelist() if not name.endswith("/")}
    (info,) = {name.split("/")[0] for name in files if name.split("/")[0].endswith(".dist-info")}
    metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    name = f"flashtile-{metadata['Version']}-{TAG}.whl"
    if wheel.name != name:
        found.append(f"is called {wheel.name}, expected {name}")
    if wheel.stat().st_size > LARGEST:
        found.append(f"has {wheel.stat().st_size} bytes, expected at most {LARGEST}")

    sources = {f"flashtile/{path.relative_to(ROOT / 'python/flashtile')}" for path in sources_of_package()}
    packed = {name for name in files if not name.startswith(f"{info}/")}
    found += [f"lacks {name}" for name in sorted((sources | {MODULE}) - packed)]
    found += [f"has {name} too" for name in sorted(packed - sources - {MODULE})]

    module = archive.read(MODULE)
    expected = {"nanobind", "GCC runtime"} | ({"CUTLASS", "CCCL", "CUDA runtime"} if OF_CUDA in module else set())
    bill = json.loads(archive.read(f"{info}/sboms/flashtile.cdx.json"))
    root, components = bill["metadata"]["component"], bill["components"]
    if root["version"] != metadata["Version"]:
        found.append(f"has a bill of materials of {root['version']}, expected {metadata['Version']}")
    if {x["name"] for x in components} != expected:
        found.append(f"lists {sorted(x['name'] for x in components)} as contained, expected {sorted(expected)}")
    # An exception to a licence says that object code needs no copy of it.
    licensed = [x["name"] for x in components if " WITH " not in x["licenses"][0]["expression"]]
    texts = ["LICENSE", *(f"{name.replace(' ', '-')}.txt" for name in licensed)]
    found += [f"lacks licenses/{text}" for text in texts if f"{info}/licenses/{text}" not in files]

    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(module)
        file.flush()
        command = [sys.executable, ROOT / "tests/cpp/linkage.py", file.name]
        linkage = subprocess.run(command, capture_output=True, text=True)
    if linkage.returncode:
        found.append(f"has a module that {linkage.stdout.strip() or linkage.stderr.strip()}")
    return found


def sources_of_package() -> list[Path]:
    listed = (ROOT / "python/flashtile").rglob("*")
    return [path for path in listed if path.is_file() and path.suffix != ".pyc"]


def main() -> int:
    wheel = Path(sys.argv[1])
    found = problems(wheel)
    print("\n".join(f"{wheel.name} {problem}" for problem in found) or f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
