"""What is linked for a release needs no newer runtime than it promises, and works; the places that name a version."""

import ctypes
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import flashtile

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "cmake" / "release" / "older_runtimes.py"
LINKAGE = ROOT / "tests" / "cpp" / "linkage.py"
VERSION = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
INFO = f"flashtile-{VERSION}.dist-info"
WHEEL = f"flashtile-{VERSION}-cp310-abi3-manylinux_2_28_x86_64.whl"
COMPONENTS = {"nanobind": "BSD-3-Clause", "GCC runtime": "GPL-3.0-or-later WITH GCC-exception-3.1"}
needs_a_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
# It calls what newer runtimes have elsewhere (threads, dlsym) and what is new in them (the count in an exception_ptr).
SOURCE = """
#include <dlfcn.h>
#include <exception>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>
extern "C" __attribute__((visibility("default"))) int PyInit__C(int number) {
  auto shared = std::make_shared<std::vector<int>>(number, 1);
  std::exception_ptr thrown;
  std::thread([shared, &thrown] {
    try {
      throw std::runtime_error("thrown in a thread");
    } catch (...) {
      thrown = std::current_exception();
    }
  }).join();
  try {
    std::rethrow_exception(thrown);
  } catch (const std::runtime_error&) {
    return dlsym(RTLD_DEFAULT, "malloc") ? static_cast<int>(shared->size()) : -1;
  }
}
"""


def versions(library, family):
    """The newest version of a family of symbols that a library needs."""
    needed = subprocess.run(["readelf", "--version-info", library], check=True, capture_output=True, text=True).stdout
    return max(tuple(map(int, version.split("."))) for version in re.findall(rf"\b{family}_([\d.]+)", needed))


@needs_a_compiler
class TestOlderRuntimes:
    @pytest.fixture
    def link(self, tmp_path):
        """Links source, and what a release adds to the module, with runtimes up to these limits."""

        def link(source, *limits):
            (tmp_path / "source.cpp").write_text(source)
            subprocess.run([sys.executable, TOOL, "g++", tmp_path / "runtimes", *limits], check=True)
            options = ["-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,--exclude-libs,ALL"]
            sources = [tmp_path / "source.cpp", TOOL.with_name("single_threaded.cpp")]
            library = tmp_path / "library.so"
            runtimes = ["-L", tmp_path / "runtimes", "-Wl,--no-as-needed"]
            subprocess.run(["g++", *options, *runtimes, *sources, "-o", library], check=True)
            return library

        return link

    @pytest.mark.parametrize(
        ("glibc", "glibcxx", "cxxabi"), [("2.28", "3.4.24", "1.3.11"), ("2.17", "3.4.22", "1.3.9")]
    )
    def test_what_is_linked_needs_no_newer_ones_and_works(self, link, glibc, glibcxx, cxxabi):
        library = link(SOURCE, f"GLIBC_{glibc}", f"GLIBCXX_{glibcxx}", f"CXXABI_{cxxabi}", "GCC_4.8.0")
        for family, limit in (("GLIBC", glibc), ("GLIBCXX", glibcxx), ("CXXABI", cxxabi)):
            assert versions(library, family) <= tuple(map(int, limit.split(".")))
        subprocess.run([sys.executable, LINKAGE, library], check=True)
        assert ctypes.CDLL(str(library)).PyInit__C(7) == 7

    def test_a_function_that_an_older_glibc_lacks_is_found_out(self, link):
        source = '#include <sys/random.h>\nextern "C" long PyInit__C() { return getrandom(nullptr, 0, 0); }'
        library = link(source, "GLIBC_2.24", "GLIBCXX_3.4.24", "CXXABI_1.3.11", "GCC_7.0.0")
        refused = subprocess.run([sys.executable, LINKAGE, library], capture_output=True, text=True)
        assert refused.returncode == 1 and "needs getrandom, which no library has" in refused.stdout


def bill(version, components):
    listed = [{"name": name, "licenses": [{"expression": licence}]} for name, licence in components.items()]
    return json.dumps({"metadata": {"component": {"version": version}}, "components": listed})


@needs_a_compiler
class TestCheckOfAWheel:
    @pytest.fixture
    def checked(self, tmp_path):
        """What is said of a wheel that differs from a good one in its name or in files, None being one that lacks."""
        package = ROOT / "python" / "flashtile"
        sources = [path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"]
        files = {f"flashtile/{path.relative_to(package)}": b"" for path in sources}
        source, module = tmp_path / "module.cpp", tmp_path / "module.so"
        source.write_text('#include <cstdlib>\nextern "C" void PyInit__C(void* p) { std::free(p); }\n')
        subprocess.run(["g++", "-shared", "-fPIC", source, "-o", module], check=True)
        files["flashtile/_C.abi3.so"] = module.read_bytes()
        files[f"{INFO}/METADATA"] = f"Name: flashtile\nVersion: {VERSION}\n"
        files |= {f"{INFO}/licenses/LICENSE": b"", f"{INFO}/licenses/nanobind.txt": b""}
        files[f"{INFO}/sboms/flashtile.cdx.json"] = bill(VERSION, COMPONENTS)

        def checked(changed, name=WHEEL):
            with zipfile.ZipFile(tmp_path / name, "w") as wheel:
                for file, text in (files | changed).items():
                    if text is not None:
                        wheel.writestr(file, text)
            command = [sys.executable, ROOT / "tests" / "release" / "check_wheel.py", tmp_path / name]
            result = subprocess.run(command, capture_output=True, text=True)
            return result.returncode, result.stdout + result.stderr

        return checked

    def test_a_good_one(self, checked):
        status, said = checked({})
        assert status == 0, said

    def test_a_name(self, checked):
        status, said = checked({}, WHEEL.replace("manylinux_2_28", "linux"))
        assert status == 1 and f"expected {WHEEL}" in said

    @pytest.mark.parametrize(
        ("changed", "said"),
        [
            ({"flashtile/py.typed": None}, "lacks flashtile/py.typed"),
            ({"flashtile/other.py": b""}, "has flashtile/other.py too"),
            ({f"{INFO}/licenses/nanobind.txt": None}, "lacks licenses/nanobind.txt"),
            ({f"{INFO}/sboms/flashtile.cdx.json": bill("0", COMPONENTS)}, f"expected {VERSION}"),
            ({f"{INFO}/sboms/flashtile.cdx.json": bill(VERSION, {})}, "lists [] as contained"),
            ({"flashtile/_C.abi3.so": b"CUDA driver version is insufficient for CUDA runtime version"}, "CUTLASS"),
            ({"flashtile/_C.abi3.so": b""}, "has a module that"),
            ({"flashtile/py.typed": bytes(40_000_001)}, "expected at most 40000000"),
        ],
    )
    def test_a_bad_one(self, checked, changed, said):
        status, found = checked(changed)
        assert status == 1 and said in found


def test_one_version_everywhere():
    assert flashtile.__version__ == VERSION
    assert re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1] == VERSION
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == VERSION
