"""Scripts in a process of their own, for what would take the whole CUDA context with it: an access out of bounds."""

import subprocess
import sys


def assert_survives(script, *arguments):
    """`script` comes to its end, where it prints "alive"."""
    run = subprocess.run([sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "alive"
