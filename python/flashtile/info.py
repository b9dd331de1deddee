"""What this build holds and what it runs on."""

import torch

from . import _C
from ._build import VERSION


class Info(dict):
    """A dict that prints as lines for people."""

    def __str__(self) -> str:
        width = max(map(len, self))
        return "\n".join(f"{name.replace('_', ' '):{width}}  {self._text(name)}" for name in self)

    def _text(self, name: str) -> str:
        value = self[name]
        if name == "built_with_cuda" and not value:
            return f"no; {_C.CUDA_REMEDY}"
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, list):
            return ", ".join(map(str, value)) or "none"
        return str(value) or "none"


def info() -> Info:
    """Returns versions, what was compiled, and the devices found, as a dict that prints readably.

    Keys: flashtile, torch (versions), built_with_cuda (bool), cuda_architectures (str), cpu (str), cpu_threads (int),
    cpu_instruction_set (str, the one that runs, such as avx512_bf16), gpus (list of names), forward_kernels and
    backward_kernels (lists of variant names that this build can run).

    >>> import flashtile
    >>> print(flashtile.info())  # doctest: +SKIP
    """
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Info(flashtile=VERSION, torch=torch.__version__, gpus=gpus, **_C.info())
