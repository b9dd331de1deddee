"""What an installation brings and says, and what `make` chooses to build."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_no_package_that_is_missing_is_complained_of():
    """PyTorch complains of numpy's absence, which it does not require, whenever it is imported."""
    required = [name for name in importlib.metadata.requires("flashtile") if "extra ==" not in name]
    assert {re.match(r"[a-z-]+", name)[0] for name in required} == {"torch", "numpy", "nanobind-backend", "rich"}
    command = [sys.executable, "-c", "import flashtile; flashtile.info()"]
    assert "numpy" not in subprocess.run(command, check=True, capture_output=True, text=True).stderr.lower()


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
class TestMake:
    @pytest.fixture
    def planned(self, tmp_path, monkeypatch):
        """What `make build`, or another target, would run on a machine with GPUs and an nvcc, given these arguments."""
        for name in ("CUDA", "CONSTRAINTS", "MAKEFLAGS", "MAKELEVEL"):
            monkeypatch.delenv(name, raising=False)

        def tool(name, text, status=0):
            (tmp_path / name).write_text(f"#!/bin/sh\nprintf '{text}'\nexit {status}\n")
            (tmp_path / name).chmod(0o755)

        def planned(gpus, *arguments, target="build"):
            listed = "".join(f"GPU {i}: NVIDIA H100 (UUID: GPU-{i})\\n" for i in range(gpus))
            tool("nvidia-smi", listed or "No devices were found\\n", 0 if gpus else 6)
            tool("nvcc", "")
            environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
            command = ["make", "--dry-run", "--always-make", target, *arguments]
            return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=environment).stdout

        return planned

    def test_without_a_gpu_the_cpu_kernels_alone_and_says_so(self, planned):
        commands = planned(0)
        assert "FLASHTILE_CUDA=OFF" in commands and "-c constraints-cpu.txt" in commands
        assert "No GPU is found" in commands and "CUDA=ON" in commands

    @pytest.mark.parametrize("choice", ["ON", "PYPI", "AUTO", "OFF"])
    @pytest.mark.parametrize("gpus", [0, 1])
    def test_what_is_asked_for(self, planned, gpus, choice):
        commands = planned(gpus, f"CUDA={choice}")
        assert f"FLASHTILE_CUDA={choice}" in commands and "No GPU" not in commands

    def test_with_gpus_their_kernels(self, planned):
        commands = planned(2)
        assert "FLASHTILE_CUDA=ON" in commands
        assert "No GPU" not in commands and "constraints-cpu.txt" not in commands

    @pytest.mark.parametrize("target", ["wheel", "hub"])
    @pytest.mark.parametrize("gpus", [0, 1])
    def test_a_build_for_others_has_the_kernels_of_gpus(self, planned, gpus, target):
        commands = planned(gpus, target=target)
        assert "FLASHTILE_CUDA=ON" in commands and "FLASHTILE_RELEASE=ON" in commands
        assert "FLASHTILE_CUDA=OFF" in planned(gpus, "CUDA=OFF", target=target)

    def test_a_build_to_run_here_links_with_what_is_here(self, planned):
        assert "FLASHTILE_RELEASE=OFF" in planned(0) and "FLASHTILE_RELEASE=OFF" in planned(0, target="test")
