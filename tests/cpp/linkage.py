"""Holds what the Python module needs from, and shows to, the process that loads it.

    python linkage.py MODULE    fails where MODULE needs more than the C and C++ runtimes, or shows a name of its own

One wheel serves every PyTorch and every driver because it links neither; names that it kept visible could meet those of
another CUDA library in the process. A name that no library was found for has no version, and is Python's or missing.
"""

import re
import subprocess
import sys

RUNTIMES = r"lib(stdc\+\+|gcc_s|m|c|pthread|dl|rt)\.so\.\d+|ld-linux.*"
# Names of the C++ runtime and of nanobind's exceptions are the same in every module, and are meant to meet.
VISIBLE = r"PyInit__C|PyModExport__C|_Z+T?[ISV]?N?(St|8nanobind).*"


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> int:
    module = sys.argv[1]
    dynamic = output("readelf", "--dynamic", "--wide", module)
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    exported = [line.split()[-1] for line in output("nm", "--dynamic", "--defined-only", module).splitlines()]
    undefined = [line.split() for line in output("nm", "--dynamic", "--undefined-only", module).splitlines()]
    nowhere = [name for kind, name in undefined if kind == "U" and not re.fullmatch(r"_?Py\w+|.+@.+", name)]
    problems = [f"needs {name}" for name in needed if not re.fullmatch(RUNTIMES, name)]
    problems += [f"looks for libraries in {path}" for path in re.findall(r"\(R(?:UN)?PATH\).*\[(.+)\]", dynamic)]
    problems += [f"exports {name}" for name in exported if not re.fullmatch(VISIBLE, name)]
    problems += [f"needs {name}, which no library has" for name in nowhere]
    if not needed or not exported:
        problems.append("could not be read")
    print("\n".join(problems) or f"needs {', '.join(needed)}; exports {len(exported)} names")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
