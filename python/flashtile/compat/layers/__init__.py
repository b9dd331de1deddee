"""``flash_attn.layers``, of which :mod:`flashtile.compat.layers.rotary` is here."""

from . import rotary

__all__ = ["rotary"]
