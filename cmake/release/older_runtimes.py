"""Makes the C and C++ runtimes of this machine look, to a linker, like those of an older one.

    python older_runtimes.py COMPILER FOLDER LIMIT...    a LIMIT is GLIBC_2.28, GLIBCXX_3.4.24 and so on

A linker takes the newest version of each symbol, and so a module needs runtimes as new as this machine's. FOLDER gets a
library without code for each of them, with its name and its symbols, each in the newest version that the limits allow.
What is linked with these runs where the limits are met, and on all that is newer, as runtimes keep what they once had.
What C++'s runtime has got since then comes from its static library, into the module, as with the compilers of
manylinux's own images. Of C's runtime there is no such part: what is newer stays undefined, without a version, which
`tests/cpp/linkage.py` refuses.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

OF_C = ["libc.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "ld-linux-x86-64.so.2"]
# What a compiler asks for, the shared libraries that it means by it, and the static one that completes them.
RUNTIMES = [
    ("libc.so", OF_C, ["libc_nonshared.a"]),
    ("libpthread.so", ["libpthread.so.0"], []),
    ("libdl.so", ["libdl.so.2"], []),
    ("librt.so", ["librt.so.1"], []),
    ("libm.so", ["libm.so.6"], []),
    ("libgcc_s.so", ["libgcc_s.so.1"], ["libgcc.a"]),
    ("libstdc++.so", ["libstdc++.so.6"], ["libstdc++.a"]),
]
# glibc 2.34 and the versions before it took these into libc.so.6, under new versions. A loader looks for an old version
# in the library that a module names beside it, so they have to go back to where they were.
OLD_HOMES = {
    "libpthread.so.0": r"_*(pthread|sem|thrd|mtx|cnd|tss)_\w+|call_once",
    "libdl.so.2": r"dl\w+",
    "librt.so.1": r"_*(aio|lio|mq|shm|timer)_\w+",
}
LISTED = re.compile(r"(\d+) (\w+) +(?:GLOBAL|WEAK|UNIQUE) +DEFAULT +\w+ ([\w.]+)(@@?)([A-Z]+)_([\d.]+)$", re.MULTILINE)
TYPES = {"FUNC": "function", "IFUNC": "function", "OBJECT": "object", "TLS": "tls_object", "NOTYPE": "notype"}


class Symbol(NamedTuple):
    family: str
    version: list[int]
    type: str
    size: str


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def symbols(library: str, limits: dict[str, list[int]]) -> tuple[dict[str, Symbol], set[str]]:
    """The newest version of each symbol that the limits allow, by name, and the names that have newer ones.

    What has no version for linkers today (`@@`), such as libgcc's __cpu_model, is there for old programs, and left out.
    """
    found, for_linkers, newer = {}, set(), set()
    for size, kind, name, at, family, version in LISTED.findall(output("readelf", "--dyn-syms", "--wide", library)):
        symbol = Symbol(family, numbers(version), TYPES[kind], size)
        if at == "@@":
            for_linkers.add(name)
        if symbol.version > limits.get(family, []):
            newer.add(name)
        elif name not in found or found[name].version < symbol.version:
            found[name] = symbol
    return {name: symbol for name, symbol in found.items() if name in for_linkers}, newer


def write_library(compiler: str, file: Path, found: dict[str, Symbol]) -> None:
    sections = {False: ".text\n", True: '.section .tbss,"awT",@nobits\n'}  # by whether each thread has its own
    versions: dict[str, list[str]] = {}
    for name, (family, version, kind, size) in found.items():
        sections[kind == "tls_object"] += f".globl {name}\n.type {name}, @{kind}\n.size {name}, {size}\n{name}:\n"
        versions.setdefault(f"{family}_{'.'.join(map(str, version))}", []).append(name)
    source, script = file.with_suffix(".s"), file.with_suffix(".map")
    source.write_text("".join(f"{section}.zero 1\n" for section in sections.values()))
    script.write_text("".join(f"{version} {{ {'; '.join(names)}; }};\n" for version, names in versions.items()))
    options = ("-shared", "-nostdlib", f"-Wl,-soname,{file.name},--version-script,{script}", "-x", "assembler")
    output(compiler, *options, str(source), "-o", str(file))


def main() -> None:
    compiler, folder = sys.argv[1], Path(sys.argv[2]).resolve()
    limits = {family: numbers(version) for family, version in (limit.split("_") for limit in sys.argv[3:])}
    folder.mkdir(parents=True, exist_ok=True)

    def path(name: str) -> str:
        return output(compiler, f"-print-file-name={name}")

    found = {}
    for name in {name for _, names, _ in RUNTIMES for name in names}:
        found[name], newer = symbols(path(name), limits)
        if name == "libc.so.6":
            moved = {x: found[name].pop(x) for x in newer & found[name].keys()}
    for name, pattern in OLD_HOMES.items():
        found[name] |= {x: symbol for x, symbol in moved.items() if re.fullmatch(pattern, x)}
    for name in found:
        write_library(compiler, folder / name, found[name])
    for asked_for, names, static in RUNTIMES:
        files = [str(folder / name) for name in names] + [path(name) for name in static]
        (folder / asked_for).write_text(f"INPUT({' '.join(files)})\n")


if __name__ == "__main__":
    main()
