"""What flashtile leaves to PyTorch, in a form that PyTorch's CUDA kernels read aright. Its choice among them looks at
less than they need: what is said here of kernels was found with PyTorch 2.11 and cuDNN 9.19 on an H200."""

import sys

import torch
from torch import Tensor

from ._core import is_compiling, under_functorch

PLAIN = (Tensor, torch.nn.Parameter)  # types of tensors that are no subclass with a way of its own
_ALIGNMENT = 16  # bytes


def is_fake(x):
    """Whether it stands for a tensor while PyTorch traces a graph without its compiler, as torch.export does."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    return fakes is not None and isinstance(x, fakes.FakeTensor)


def is_plain(x):
    """Whether it is a tensor without a way of its own, or stands for one."""
    return type(x) in PLAIN or is_fake(x)


def legible_mask(attn_mask, query, key):
    """The mask to hand to PyTorch. What is broadcast by a stride of 0 stays so."""
    if type(attn_mask) is not Tensor or type(key) is not Tensor or not isinstance(query, Tensor) or key.is_nested:
        return attn_mask
    if attn_mask.dtype is torch.float32 and query.dtype is torch.float64:
        return attn_mask.double()  # PyTorch 2.13 takes it on the CPU, whose kernel then reads pairs as one number
    if not attn_mask.is_cuda or attn_mask.dim() == 0 or attn_mask.layout is not torch.strided:
        return attn_mask
    if attn_mask.shape[-1] == 1 and key.dim() > 1:
        # cuDNN gets one of shape (S_q, 1) as it is, reads pairs at odd addresses, and no CUDA call works any more.
        attn_mask = attn_mask.expand(*attn_mask.shape[:-1], key.shape[-2]).contiguous()
    if attn_mask.dtype is torch.bool:
        return attn_mask  # PyTorch makes a bias of it, which lies as it should
    mask = attn_mask.resolve_conj().resolve_neg()
    if mask.dtype is torch.float32 and query.dtype in (torch.float16, torch.bfloat16):
        # cuDNN takes it as it is, and gives other results; other kernels refuse it. autocast rounds it likewise.
        limits = torch.finfo(query.dtype)
        mask = torch.where(mask.isinf(), mask, mask.clamp(limits.min, limits.max)).to(query.dtype)
    once = mask[tuple(slice(1) if stride == 0 else slice(None) for stride in mask.stride()[:-1])]
    return mask if _is_legible(once) else once.clone(memory_format=torch.contiguous_format).expand(mask.shape)


def legible_operand(x):
    """query, key or value to hand to PyTorch: where its rows do not lie as kernels read them, a copy. cuDNN and the
    memory-efficient kernel give wrong numbers otherwise, or end at a misaligned address; a query that is broadcast by
    a stride of 0 confuses the one, and a value the backward of the other."""
    if type(x) not in PLAIN or x.is_nested or not x.is_cuda or x.layout is not torch.strided or x.dim() < 2:
        return x
    x = x.resolve_conj().resolve_neg()
    return x if _is_legible(x) else x.clone(memory_format=torch.contiguous_format)


def _is_legible(x):
    """Whether rows are contiguous and begin at multiples of _ALIGNMENT bytes, or follow each other without a gap, in
    which case PyTorch pads them if their length asks for it."""
    size = x.element_size()
    if _first_byte(x) % _ALIGNMENT:
        return False
    *of_rows, of_columns = (stride if n > 1 else None for n, stride in zip(x.shape, x.stride(), strict=True))
    aligned = all(stride is None or (stride > 0 and stride * size % _ALIGNMENT == 0) for stride in of_rows)
    return x.is_contiguous() or (aligned and of_columns in (1, None))


def _first_byte(x):
    """The address, or as much of it as is known."""
    if is_compiling():
        return 0  # a graph cannot ask; PyTorch's compiler copies inputs that are not aligned
    return x.storage_offset() * x.element_size() if under_functorch() else x.data_ptr()
