"""What this copy of flashtile is called: as it is installed, or as `make hub` packs it, by other names in this file."""

from importlib.metadata import version

VERSION = version("flashtile")
NAMESPACE = "flashtile"  # of its operators in torch.ops
