"""The functions of the flash-attn packages, of the forms that serving engines gave them, FlashMask's, ring-flash-attn's
and xformers', computed by flashtile.

- :mod:`flashtile.compat.flash_attn`: ``flash_attn`` 2
- :mod:`flashtile.compat.flash_attn_interface`: ``flash_attn_interface``, FlashAttention-3
- :mod:`flashtile.compat.vllm_flash_attn`: ``vllm.vllm_flash_attn``
- :mod:`flashtile.compat.sgl_kernel`: ``sgl_kernel.flash_attn``, SGLang's
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

from . import bert_padding, flash_attn, flash_attn_interface, flashmask, layers, sgl_kernel, vllm_flash_attn, xformers

__all__ = [
    "bert_padding",
    "flash_attn",
    "flash_attn_interface",
    "flashmask",
    "install",
    "layers",
    "sgl_kernel",
    "uninstall",
    "vllm_flash_attn",
    "xformers",
]

_MODULES = {  # of each package
    "flash_attn": {
        "flash_attn": flash_attn,
        "flash_attn.flash_attn_interface": flash_attn,
        "flash_attn.bert_padding": bert_padding,
        "flash_attn.layers": layers,
        "flash_attn.layers.rotary": layers.rotary,
    },
    "flash_attn_interface": {
        name: flash_attn_interface
        for name in ("flash_attn_interface", "flash_attn_3", "flash_attn_3.flash_attn_interface")
    },
    "vllm_flash_attn": {
        f"{package}{module}": what
        for package in ("vllm_flash_attn", "vllm.vllm_flash_attn")
        for module, what in {
            "": vllm_flash_attn,
            ".flash_attn_interface": vllm_flash_attn,
            ".layers": layers,
            ".layers.rotary": layers.rotary,
        }.items()
    },
    "sgl_kernel": {"sgl_kernel.flash_attn": sgl_kernel},
}


def install(*packages: str) -> None:
    """Makes ``import flash_attn`` and ``import flash_attn_interface`` mean flashtile in this process, or the imports of
    other ``packages``.

    Puts modules into sys.modules, in front of packages of these names that may be installed. Call it before anything
    imports them. A second call changes nothing, and :func:`uninstall` takes them out again.

    Args:
        packages: by default "flash_attn", with its ``flash_attn_interface``, ``bert_padding``, ``layers`` and
            ``layers.rotary``, and "flash_attn_interface", also as ``flash_attn_3.flash_attn_interface``, as which its
            package is installed. "vllm_flash_attn" is vLLM's own, under this name and as
            ``vllm.vllm_flash_attn``, with its ``flash_attn_interface``, ``layers`` and ``layers.rotary``; "sgl_kernel"
            is ``sgl_kernel.flash_attn`` alone. The rest of vllm and sgl_kernel stays as it is.

    Raises:
        RuntimeError: a module is imported already, and is another package's. Nothing is changed then.
        ValueError: there is no such package.

    Example:
        >>> import flashtile.compat
        >>> flashtile.compat.install()
        >>> from flash_attn import flash_attn_func
        >>> from flash_attn.bert_padding import unpad_input
        >>> flashtile.compat.install("vllm_flash_attn")
        >>> from vllm.vllm_flash_attn import flash_attn_varlen_func
        >>> flashtile.compat.uninstall()
    """
    modules = {}
    for package in packages or ("flash_attn", "flash_attn_interface"):
        if package not in _MODULES:
            raise ValueError(f"install: packages has {package!r}, expected one of {', '.join(_MODULES)}")
        modules.update(_MODULES[package])
    for name, module in modules.items():
        found = sys.modules.get(name, module)
        if found is not module:
            raise RuntimeError(
                f"install: {name} is already imported, from {getattr(found, '__file__', None)}, "
                "expected that nothing has imported it before this call"
            )
    sys.modules.update(modules)


def uninstall() -> None:
    """Takes out of sys.modules what :func:`install` has put there. Functions that were imported go on working."""
    for modules in _MODULES.values():
        for name, module in modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
