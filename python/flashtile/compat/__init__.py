"""The functions of the flash-attn packages, FlashMask's, ring-flash-attn's and xformers', computed by flashtile.

- :mod:`flashtile.compat.flash_attn`: ``flash_attn`` 2
- :mod:`flashtile.compat.flash_attn_interface`: ``flash_attn_interface``, FlashAttention-3
- :mod:`flashtile.compat.bert_padding`: ``flash_attn.bert_padding``
- :mod:`flashtile.compat.layers.rotary`: ``flash_attn.layers.rotary``
- :mod:`flashtile.compat.flashmask`: ``flashmask_attention`` of PaddlePaddle and its package ``flash_mask``
- :mod:`flashtile.compat.ring_flash_attn`: ``ring_flash_attn``, which is imported by itself, as it wants
  torch.distributed
- :mod:`flashtile.compat.xformers`: attention and biases of ``xformers.ops``

Names, order and defaults of parameters are theirs, so one import line changes; :func:`install` spares that one too.
docs/migration.md lists what is served, what has no effect, and what is refused.
"""

import sys

from . import bert_padding, flash_attn, flash_attn_interface, flashmask, layers, xformers

__all__ = [
    "bert_padding",
    "flash_attn",
    "flash_attn_interface",
    "flashmask",
    "install",
    "layers",
    "uninstall",
    "xformers",
]

_MODULES = {
    "flash_attn": flash_attn,
    "flash_attn.flash_attn_interface": flash_attn,
    "flash_attn.bert_padding": bert_padding,
    "flash_attn.layers": layers,
    "flash_attn.layers.rotary": layers.rotary,
    "flash_attn_interface": flash_attn_interface,
}


def install() -> None:
    """Makes ``import flash_attn`` and ``import flash_attn_interface`` mean flashtile in this process.

    Puts ``flash_attn``, its ``flash_attn_interface``, ``bert_padding``, ``layers`` and ``layers.rotary``, and
    ``flash_attn_interface`` into sys.modules, in front of packages of these names that may be installed. Call it before
    anything imports them.
    A second call changes nothing, and :func:`uninstall` takes them out again.

    Raises:
        RuntimeError: one of them is imported already, and is another package's. Nothing is changed then.

    Example:
        >>> import flashtile.compat
        >>> flashtile.compat.install()
        >>> from flash_attn import flash_attn_func
        >>> from flash_attn.bert_padding import unpad_input
        >>> flashtile.compat.uninstall()
    """
    for name, module in _MODULES.items():
        found = sys.modules.get(name, module)
        if found is not module:
            raise RuntimeError(
                f"install: {name} is already imported, from {getattr(found, '__file__', None)}, "
                "expected that nothing has imported it before this call"
            )
    sys.modules.update(_MODULES)


def uninstall() -> None:
    """Takes out of sys.modules what :func:`install` has put there. Functions that were imported go on working."""
    for name, module in _MODULES.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
