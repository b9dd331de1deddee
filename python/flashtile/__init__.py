"""flashtile: exact attention for PyTorch that never stores the score matrix."""

from importlib.metadata import version as _version

__version__ = _version("flashtile")

from .attention import attention, explain
from .info import info

__all__ = ["__version__", "attention", "explain", "info"]
