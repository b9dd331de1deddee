"""flashtile.compat.layers.rotary against float64: values, gradients, what is written in place, and errors."""

import functools

import pytest
import torch
from cases import BF16, F16, F32
from compare import assert_bitwise
from theirs import assert_refuses

from flashtile.compat.layers import rotary

EPS32 = torch.finfo(F32).eps
OFFSETS = {"0": 0, "int": 7, "int32": torch.tensor([5, 0, 12], dtype=torch.int32), "int64": torch.tensor([5, 0, 12])}


def tables(dim=32, positions=40, dtype=F32):
    angles = torch.outer(torch.arange(positions), 100.0 ** -torch.linspace(0, 1, dim // 2))
    return angles.cos().to(dtype), angles.sin().to(dtype)


def normal(*shape, dtype=F32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(8)).to(dtype)


def exactly(x, cos, sin, interleaved, positions):
    """Each pair as a complex number, turned; `positions` (B, S) or (T)."""
    half = cos.shape[1]
    turn = torch.complex(cos.double(), sin.double())[positions][..., None, :]
    a, rest = x[..., : 2 * half].double(), x[..., 2 * half :].double()
    x, y = (a[..., ::2], a[..., 1::2]) if interleaved else (a[..., :half], a[..., half:])
    z = torch.complex(x, y) * turn
    parts = (z.real, z.imag)
    turned = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([turned, rest], -1)


def positions_of(offsets, batch, seqlen):
    return torch.as_tensor(offsets).long().reshape(-1, 1).expand(batch, 1) + torch.arange(seqlen)


def assert_rounded_once(found, exact):
    bar = torch.finfo(found.dtype).eps / 2 * exact.abs() + 8 * EPS32 + torch.finfo(found.dtype).smallest_normal
    assert found.shape == exact.shape and ((found.double() - exact).abs() <= bar).all()


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dim", [32, 64])
def test_rotation_and_its_gradient(dtype, offsets, interleaved, inplace, dim):
    cos, sin = tables(dim, dtype=dtype)
    x = normal(3, 20, 2, 64, dtype=dtype).requires_grad_()
    before = x.detach().clone()
    place = positions_of(OFFSETS[offsets], 3, 20)
    out = rotary.apply_rotary_emb(x, cos, sin, interleaved, inplace, OFFSETS[offsets])
    assert_rounded_once(out.detach(), exactly(before, cos, sin, interleaved, place))
    assert_bitwise(x.detach(), out.detach() if inplace else before)
    assert (out.data_ptr() == x.data_ptr()) == inplace
    dout = normal(*out.shape, dtype=dtype)
    (dx,) = torch.autograd.grad(out, x, dout)
    assert_rounded_once(dx, exactly(dout, cos, -sin, interleaved, place))


@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("inplace", [False, True])
def test_ragged_rows(offsets, inplace):
    cos, sin = tables()
    begins = torch.tensor([0, 9, 9, 20], dtype=torch.int32)
    x = normal(22, 2, 64).requires_grad_()
    before = x.detach().clone()
    out = rotary.apply_rotary_emb(x, cos, sin, False, inplace, OFFSETS[offsets], begins, 11)
    first = torch.as_tensor(OFFSETS[offsets]).expand(3).tolist()
    place = torch.tensor([*range(first[0], first[0] + 9), *range(first[2], first[2] + 11), 0, 0])
    assert_rounded_once(out.detach(), exactly(before, cos, sin, False, place))
    dout = normal(*out.shape)
    assert_rounded_once(torch.autograd.grad(out, x, dout)[0], exactly(dout, cos, -sin, False, place))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("own", [False, True], ids=["one table", "two tables"])
def test_packed_in_place(interleaved, grouped, own):
    cos, sin = tables()
    more = [x * 1.5 for x in tables()] if own else []
    qkv = normal(3, 20, 8, 64) if grouped else normal(3, 20, 3, 4, 64)
    split = (
        functools.partial(torch.split, split_size_or_sections=[4, 2, 2], dim=2) if grouped else lambda x: x.unbind(2)
    )
    join = functools.partial(torch.cat, dim=2) if grouped else functools.partial(torch.stack, dim=2)
    leaf = qkv.clone().requires_grad_()
    given = dict(interleaved=interleaved, seqlen_offsets=OFFSETS["int32"], num_heads_q=4 if grouped else None)
    out = rotary.apply_rotary_emb_qkv_(leaf, cos, sin, *more, **given)
    place = positions_of(OFFSETS["int32"], 3, 20)

    def exact(x, sign):
        q, k, v = split(x)
        of_k = more or (cos, sin)
        q = exactly(q, cos, sign * sin, interleaved, place)
        return join([q, exactly(k, of_k[0], sign * of_k[1], interleaved, place), v.double()])

    assert_rounded_once(out.detach(), exact(qkv, 1))
    assert_bitwise(leaf.detach(), out.detach())
    dout = normal(*out.shape)
    assert_rounded_once(torch.autograd.grad(out, leaf, dout)[0], exact(dout, -1))
    if not grouped:
        kv = qkv[:, :, 1:].clone().requires_grad_()
        out = rotary.apply_rotary_emb_kv_(kv, cos, sin, interleaved, OFFSETS["int32"])
        k, v = qkv[:, :, 1:].unbind(2)
        assert_rounded_once(out.detach(), join([exactly(k, cos, sin, interleaved, place), v.double()]))
        assert_bitwise(kv.detach(), out.detach())


def test_in_place_where_autograd_would_not_let_us():
    """Parts that unbind has made, as models write it; a tensor without a gradient is itself returned."""
    cos, sin = tables()
    qkv = normal(3, 20, 3, 2, 64).requires_grad_()
    q, k, v = (qkv * 1).unbind(2)
    turned = [rotary.apply_rotary_emb(x, cos, sin, inplace=True) for x in (q, k)]
    for x, out in zip((q, k), turned, strict=True):
        assert_bitwise(x.detach(), out.detach())
    douts = normal(3, 3, 20, 2, 64).unbind(0)
    (dqkv,) = torch.autograd.grad([*turned, v], qkv, douts)
    place = positions_of(0, 3, 20)
    for part in (0, 1):
        assert_rounded_once(dqkv[:, :, part], exactly(douts[part], cos, -sin, False, place))
    assert torch.equal(dqkv[:, :, 2], douts[2])
    plain = normal(3, 20, 2, 64)
    assert rotary.apply_rotary_emb(plain, cos, sin, inplace=True) is plain
    with torch.no_grad():
        assert rotary.apply_rotary_emb_qkv_(qkv, cos, sin) is qkv


def test_autograd_notices_what_is_written():
    x = normal(3, 20, 2, 64).requires_grad_()
    y = x * 1
    kept = y * y  # whose backward wants y as it was
    rotary.apply_rotary_emb(y, *tables(), inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_module(interleaved, dtype):
    module = rotary.RotaryEmbedding(32, base=500.0, interleaved=interleaved).to(dtype)
    angles = torch.outer(torch.arange(60.0).double(), 500.0 ** (-torch.arange(0, 32, 2).double() / 32))
    cos, sin = (f(angles).to(dtype) for f in (torch.cos, torch.sin))
    place = positions_of(7, 3, 20)
    qkv = normal(3, 20, 3, 2, 64, dtype=dtype)
    largest = qkv.abs().max().item()
    q, k, v = qkv.clone().unbind(2)
    exact = [exactly(q, cos, sin, interleaved, place), exactly(k, cos, sin, interleaved, place), v.double()]
    # Angles up to 60 are float32, and tables may be rounded to the other side.
    tolerance = dict(rtol=0, atol=(4 * torch.finfo(dtype).eps + 60 * EPS32) * largest)
    assert module(qkv, seqlen_offset=7) is qkv
    torch.testing.assert_close(qkv.double(), torch.stack(exact, 2), **tolerance)
    found_q, found_kv = module(q.clone(), torch.stack((k, v), 2), seqlen_offset=7)
    torch.testing.assert_close(found_q.double(), exact[0], **tolerance)
    torch.testing.assert_close(found_kv.double(), torch.stack(exact[1:], 2), **tolerance)
    offsets = OFFSETS["int32"]
    found = module(torch.stack((q, k, v), 2), seqlen_offset=offsets, max_seqlen=60)
    exact = exactly(q, cos, sin, interleaved, positions_of(offsets, 3, 20))
    torch.testing.assert_close(found[:, :, 0].double(), exact, **tolerance)
    assert not module.state_dict()


def test_module_learns_after_inference():
    """What PyTorch makes in inference mode cannot be saved for a backward."""
    module = rotary.RotaryEmbedding(32)
    with torch.inference_mode():
        module(normal(3, 20, 3, 2, 64))
    leaf = normal(3, 20, 3, 2, 64).requires_grad_()
    out = module(leaf)
    dout = normal(*out.shape)
    (dqkv,) = torch.autograd.grad(out, leaf, dout)
    torch.testing.assert_close(dqkv.norm(dim=-1), dout.norm(dim=-1))
    assert torch.equal(dqkv[:, :, 2], dout[:, :, 2])


def test_scaled_module():
    """XPos: scores depend on distances, and decay with them."""
    module = rotary.RotaryEmbedding(64, scale_base=20.0)
    qkv = torch.ones(1, 30, 3, 1, 64)
    q, k, _ = module(qkv)[0].unbind(1)
    scores = (q[:, 0].double() @ k[:, 0].double().T) / 64  # (30, 30)
    for distance in (0, 1, 9):
        along = scores.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-5, atol=1e-5)
    i = torch.arange(0, 64, 2).double()
    zeta = (i + 0.4 * 64) / (1.4 * 64)
    distance = torch.arange(30.0).double()[:, None]
    exact = (zeta ** (distance / 20.0) * torch.cos(distance * 10000.0 ** (-i / 64))).mean(1)
    torch.testing.assert_close(scores[:, 0], exact, rtol=1e-5, atol=1e-5)


def test_bad_arguments_are_named():
    cos, sin = tables()
    x, qkv = normal(3, 20, 2, 64), normal(3, 20, 3, 2, 64)
    refuses = functools.partial(assert_refuses, rotary.apply_rotary_emb)
    refuses(TypeError, "x is of type list", [x], cos, sin)
    refuses(TypeError, "sin is of type NoneType", x, cos, None)
    refuses(TypeError, "cos has dtype torch.int64, expected a floating dtype", x, cos.long(), sin)
    refuses(ValueError, r"x has shape \(3, 20, 3, 2, 64\), expected \(B, S, H, D\)", qkv, cos, sin)
    refuses(ValueError, r"x has shape \(3, 20, 2, 64\), expected \(T, H, D\)", x, cos, sin, cu_seqlens=OFFSETS["int32"])
    refuses(ValueError, r"cos has shape \(40,\), expected \(positions, R / 2\)", x, cos[:, 0], sin)
    refuses(ValueError, r"sin has shape \(40, 15\), expected \(40, 16\)", x, cos, sin[:, 1:])
    refuses(ValueError, r"cos has shape .* with R from 2 to D = 16", x[..., :16], cos, sin)
    refuses(ValueError, "a position of x is 40, expected a row of cos, which has 40", x, cos, sin, seqlen_offsets=21)
    refuses(ValueError, "a position of x is -3", x, cos, sin, seqlen_offsets=torch.tensor([0, -3, 0]))
    refuses(ValueError, "seqlen_offsets is -1, expected an int of at least 0", x, cos, sin, seqlen_offsets=-1)
    refuses(TypeError, "seqlen_offsets is 'x', expected an int", x, cos, sin, seqlen_offsets="x")
    for wrong in (torch.tensor([0, 0]), torch.tensor(3), torch.zeros(3)):
        refuses(
            ValueError,
            r"seqlen_offsets is of .* expected \(3,\) = \(B\), int32 or int64",
            x,
            cos,
            sin,
            seqlen_offsets=wrong,
        )
    refuses(TypeError, "cu_seqlens has dtype", x[0], cos, sin, cu_seqlens=torch.tensor([0, 20]))
    refuses = functools.partial(assert_refuses, rotary.apply_rotary_emb_qkv_)
    refuses(ValueError, r"qkv has shape \(3, 20, 2, 64\), expected \(B, S, 3, H, D\)", x, cos, sin)
    refuses(
        ValueError, "a position of k is 19, expected a row of cos_k, which has 19", qkv, cos, sin, cos[:19], sin[:19]
    )
    assert_refuses(
        rotary.apply_rotary_emb_kv_, ValueError, r"kv has shape .*, expected \(B, S, 2, H, D\)", qkv, cos, sin
    )
    module = rotary.RotaryEmbedding(32)
    refuses = functools.partial(assert_refuses, module, name="RotaryEmbedding")
    refuses(ValueError, "max_seqlen is None, expected an int", qkv, seqlen_offset=OFFSETS["int32"])
    refuses(TypeError, "seqlen_offset is None, expected an int", qkv, seqlen_offset=None)
    refuses(TypeError, "qkv is of type NoneType", None)
