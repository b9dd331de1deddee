"""``flash_attn.layers.rotary`` in plain PyTorch: rotary embedding of queries and keys, on any device.

Elements x and y of a head make a pair, 2i and 2i + 1 where ``interleaved``, else i and i + R / 2, and become
x · cos - y · sin and x · sin + y · cos, in float32, rounded once. Elements behind the first R stay as they are.

Tables cos and sin, (positions, R / 2), have a row for each position. The first row of a sequence has the position
``seqlen_offsets``, an int or, one for each sequence, (B) int32 or int64; by default 0. A position that the tables do
not have raises ValueError on the CPU; on a GPU, where the host does not look at it, the nearest one is taken.

What is done in place is so for the memory of the argument; autograd, as in the original, knows the returned tensor
alone. All functions are differentiable.

>>> import torch
>>> from flashtile.compat.layers.rotary import RotaryEmbedding, apply_rotary_emb
>>> angles = torch.outer(torch.arange(100), 10000 ** -torch.linspace(0, 1, 32))
>>> q = torch.randn(2, 20, 8, 64)
>>> turned = apply_rotary_emb(q, angles.cos(), angles.sin(), seqlen_offsets=torch.tensor([0, 50]))
>>> torch.allclose(turned.norm(dim=-1), q.norm(dim=-1))
True
>>> qkv = torch.randn(2, 20, 3, 8, 64)
>>> RotaryEmbedding(64)(qkv, seqlen_offset=5) is qkv
True

Source: RoFormer (Su et al. 2021, arXiv:2104.09864); ``scale_base``: XPos (Sun et al. 2022, arXiv:2212.10554).
"""

import torch
from torch import Tensor

from ..._core import is_compiling, require_own_elements
from .._common import flag, integer, require_rank, require_table, require_tensors, unpacked, unpacked_heads
from .._rotation import angles_at, check_angles, positions_of, rotated

__all__ = [
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
]


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """`x`, (B, S, H, D), rotated; with ``cu_seqlens`` (B + 1), int32, ragged: (T, H, D).

    Args:
        x: any floating dtype.
        cos: (positions, R / 2), any floating dtype. R is at most D.
        sin: (positions, R / 2).
        interleaved: which elements make a pair, see above.
        inplace: write the result into x.
        seqlen_offsets: the position of each sequence's first row.
        cu_seqlens: where each sequence begins, and where the last one ends. Rows behind it are rotated by position 0.
        max_seqlen: nothing depends on it.

    Returns:
        Of x's shape and dtype; with ``inplace`` x.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices or positions break the rules above, or elements of an x that is written are one in
            memory.
    """
    function = "apply_rotary_emb"
    require_tensors(function, x=x)
    if cu_seqlens is None:
        require_rank(function, 4, "(B, S, H, D)", x=x)
    else:
        require_rank(function, 3, "(T, H, D), since cu_seqlens is given", x=x)
    result = _rotated(function, "x", x, interleaved, seqlen_offsets, cu_seqlens, cos=cos, sin=sin)
    return _written(function, "x", x, result) if flag(function, "inplace", inplace) else result


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """`x`, (B, S, H, D), rotated by the tables' rows as they stand: cos and sin are (S, R / 2) or (B, S, R / 2)."""
    function = "apply_rotary_emb_torch"
    require_rank(function, 4, "(B, S, H, D)", x=x)
    require_tensors(function, cos=cos, sin=sin)
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape[:-1] not in (x.shape[:2], x.shape[1:2]) or table.shape != cos.shape:
            found = f"{name} has shape {tuple(table.shape)}"
            raise ValueError(f"{function}: {found}, expected (S, R / 2) or (B, S, R / 2), of x {tuple(x.shape)}")
    check_angles(function, x, cos=cos.flatten(0, -2), sin=sin.flatten(0, -2))
    return rotated(x, cos, sin, flag(function, "interleaved", interleaved))


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotates q and k of qkv, (B, S, 3, H, D), in place; with ``num_heads_q`` = H_q, (B, S, H_q + 2 · H_k, D). k has
    the tables ``cos_k`` and ``sin_k``, if they are given."""
    function = "apply_rotary_emb_qkv_"
    q, k, v = unpacked_heads(function, qkv, num_heads_q)
    tables_k = dict(cos_k=cos if cos_k is None else cos_k, sin_k=sin if sin_k is None else sin_k)
    q = _rotated(function, "q", q, interleaved, seqlen_offsets, cos=cos, sin=sin)
    k = _rotated(function, "k", k, interleaved, seqlen_offsets, **tables_k)
    join = torch.stack if qkv.dim() == 5 else torch.cat
    return _written(function, "qkv", qkv, join((q, k, v), 2))


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotates k of kv, (B, S, 2, H, D), in place."""
    function = "apply_rotary_emb_kv_"
    k, v = unpacked(function, "kv", kv, "(B, S, 2, H, D)")
    k = _rotated(function, "k", k, interleaved, seqlen_offsets, cos=cos, sin=sin)
    return _written(function, "kv", kv, torch.stack((k, v), 2))


class RotaryEmbedding(torch.nn.Module):
    """Rotary embedding by the angles position · base^(-2i / dim), for i below dim / 2.

    Args:
        dim: R, even: as many elements of each head are rotated.
        base: of the angles.
        interleaved: which elements make a pair, see above.
        scale_base: with a number, XPos: queries are multiplied with a power of (2i + 0.4 · dim) / (1.4 · dim) that
            grows by 1 / scale_base with each position, from the middle of the table on, and keys are divided by it.
        device: of the buffers.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.dim = dim
        self.base = float(base)
        self.interleaved = interleaved
        self.scale_base = scale_base
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)
        scale = None if scale_base is None else (self._even(device) + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._tables = {}  # the arguments cos and sin, and with scale_base cos_k and sin_k, of apply_rotary_emb_qkv_

    def _even(self, device):
        return torch.arange(0, self.dim, 2, dtype=torch.float32, device=device)

    def _frequencies(self, device):
        return self.base ** (-self._even(device) / self.dim)

    def _reach(self, positions, like):
        """Makes tables of so many positions, of the device and dtype of `like`, unless there are such."""
        if self._tables:
            cos = self._tables["cos"]
            usable = torch.is_inference_mode_enabled() or not cos.is_inference()
            if usable and len(cos) >= positions and (cos.device, cos.dtype) == (like.device, like.dtype):
                return
        # Frequencies of a model that was cast to another dtype are rounded: angles would be off by whole turns.
        rounded = self.inv_freq.dtype != torch.float32
        frequencies = self._frequencies(like.device) if rounded else self.inv_freq.to(like.device)
        position = torch.arange(positions, dtype=torch.float32, device=like.device)[:, None]
        angles = position * frequencies
        tables = dict(cos=angles.cos(), sin=angles.sin())
        if self.scale is not None:
            scale = self.scale.to(like.device, torch.float32) ** ((position - positions // 2) / self.scale_base)
            of_keys = {f"{name}_k": x / scale for name, x in tables.items()}
            tables = {name: x * scale for name, x in tables.items()} | of_keys
        self._tables = {name: x.to(like.dtype) for name, x in tables.items()}

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotates qkv in place, as :func:`apply_rotary_emb_qkv_`; with ``kv`` q, (B, S, H_q, D), and the keys of kv,
        (B, S, 2, H_k, D), and returns both.

        Args:
            seqlen_offset: the position of each sequence's first row.
            max_seqlen: how many positions the tables need, where seqlen_offset is a tensor.
        """
        function = "RotaryEmbedding"
        require_tensors(function, qkv=qkv)
        if max_seqlen is not None:
            self._reach(integer(function, "max_seqlen", max_seqlen, 0), qkv)
        elif not isinstance(seqlen_offset, Tensor):
            offset = integer(function, "seqlen_offset", seqlen_offset, 0)
            self._reach(qkv.shape[1] + offset if qkv.dim() > 1 else 0, qkv)
        elif not self._tables:
            raise ValueError(f"{function}: max_seqlen is None, expected an int, since seqlen_offset is a tensor")
        options = dict(interleaved=self.interleaved, seqlen_offsets=seqlen_offset)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, **self._tables, **options, num_heads_q=num_heads_q)
        of_q = {name: self._tables[name] for name in ("cos", "sin")}
        of_k = {name: self._tables.get(f"{name}_k", x) for name, x in of_q.items()}
        return apply_rotary_emb(qkv, **of_q, **options, inplace=True), apply_rotary_emb_kv_(kv, **of_k, **options)


def _rotated(function, name, x, interleaved, offsets, cu_seqlens=None, **tables):
    check_angles(function, x, **tables)
    interleaved = flag(function, "interleaved", interleaved)
    batch = x.shape[0]
    if cu_seqlens is not None:
        require_table(function, "(B + 1)", cu_seqlens=cu_seqlens)
        batch = cu_seqlens.shape[0] - 1
    if not isinstance(offsets, Tensor):
        offsets = integer(function, "seqlen_offsets", offsets, at_least=0)
    elif offsets.shape != (batch,) or offsets.dtype not in (torch.int32, torch.int64):
        found = f"is of {offsets.dtype} and shape {tuple(offsets.shape)}"
        raise ValueError(f"{function}: seqlen_offsets {found}, expected {(batch,)} = (B), int32 or int64")
    position = positions_of(x, offsets, cu_seqlens)
    return rotated(x, *angles_at(function, name, position, **tables), interleaved)


def _written(function, name, x, result):
    """`x` with this result in its memory. Unlike for PyTorch's own operations in place, it may be a leaf, or one of the
    parts that unbind or split have made."""
    require_own_elements(function, name, x, "memory of its own for each row, as it is written in place")
    if not (torch.is_grad_enabled() and result.requires_grad):
        return x.copy_(result)
    # To autograd, what is written into a view changes all views beside it: the other parts that unbind has made could
    # be used no more. Unless `x` is one, autograd is to notice that it changes.
    view = not is_compiling() and x._is_view()
    return _Written.apply(x, x.data if view else x.detach(), result)


class _Written(torch.autograd.Function):
    """The gradient is that of `result`, which depends on what `x` held before."""

    @staticmethod
    def forward(ctx, x, memory, result):
        memory.copy_(result)
        return x

    @staticmethod
    def backward(ctx, dx):
        return None, None, dx
