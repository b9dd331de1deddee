"""flashtile: exact attention for PyTorch that never stores the score matrix."""

from importlib.metadata import version as _version

__version__ = _version("flashtile")

from .attention import attention, explain
from .info import info
from .varlen import attention_varlen

__all__ = ["__version__", "attention", "attention_varlen", "explain", "info"]
