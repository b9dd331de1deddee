"""attention and attention_varlen of e4m3 numbers, beside float64 attention of the numbers times their descales."""

import math

import pytest
import reference
import torch
from cases import BF16, DEVICE_PARAMS, F16, F32

import flashtile
from flashtile import _capability, fp8
from flashtile.masks import ColumnMask

GPU = pytest.mark.gpu
E4M3 = torch.float8_e4m3fn
# Weights are rounded to four bits, so that each may be off by 1/16, and they average.
TOLERANCE = 0.04


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_outliers(*shape, seed=0):
    """Those of FlashAttention-3's table: N(0, 1), and N(0, 100) with probability 0.001."""
    outliers = normal(*shape, seed=seed + 100) * 10
    return normal(*shape, seed=seed) + outliers * (normal(*shape, seed=seed + 200) > 3.09)


def operands(device="cpu", batch=2, rows=(300, 420), heads=(4, 2), widths=(64, 64), of=normal):
    (m, n), (heads_q, heads_k), (d, d_v) = rows, heads, widths
    shapes = (batch, m, heads_q, d), (batch, n, heads_k, d), (batch, n, heads_k, d_v)
    return [of(*shape, seed=seed).to(device) for seed, shape in enumerate(shapes)]


def quantized(device="cpu", block=128, rotate=True, **sizes):
    dtype = F32 if device == "cpu" else BF16
    return fp8.quantize(*(x.to(dtype) for x in operands(device, **sizes)), block=block, rotate=rotate)


def descales(x):
    return dict(q_descale=x.q_descale, k_descale=x.k_descale, v_descale=x.v_descale)


def whole(x, descale):
    """Numbers times their descales, float64."""
    rows = x.shape[1]
    if descale.dim() == 3:
        block = 128 if descale.shape[2] == -(-rows // 128) else 64
        descale = descale.repeat_interleave(block, 2)[:, :, :rows].transpose(1, 2)
    else:
        descale = descale[:, None]
    return x.double() * descale.repeat_interleave(x.shape[2] // descale.shape[2], 2)[..., None].double()


def exact(x, **options):
    q, k, v = (whole(*pair) for pair in ((x.q, x.q_descale), (x.k, x.k_descale), (x.v, x.v_descale)))
    return reference.attention(q, k, v, **options)


def distance(found, expected):
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-30))  # 0 where no row sees a key


OPTIONS = {
    "full": {},
    "causal": dict(causal=True),
    "window": dict(window=(100, 20)),
    "window behind": dict(window=(200, -60), sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "softcap": dict(softcap=5.0),
    "scale": dict(scale=0.3),
    "sinks": dict(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "alibi": dict(alibi_slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625])),
    "causal softcap sinks": dict(causal=True, softcap=3.0, sinks=torch.zeros(4)),
}


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (256, 256), (40, 24), (48, 80), (192, 128)], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_close_to_float64(options, widths, device):
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    for rows in ((300, 420), (70, 515), (1, 1), (129, 64)):
        x = quantized(device, rows=rows, widths=widths)
        out, lse = flashtile.attention(x.q, x.k, x.v, **descales(x), return_lse=True, **options)
        expected, expected_lse = exact(x, **options)
        assert out.dtype is BF16 and out.shape == expected.shape
        assert distance(out, expected) < TOLERANCE, rows
        assert torch.allclose(lse.double(), expected_lse, rtol=1e-5, atol=0.1 if device == "cuda" else 1e-5), rows


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("out_dtype", [BF16, F16, F32])
def test_blocks_and_dtypes_of_out(out_dtype, block, device):
    x = quantized(device, block=block, of=with_outliers)
    if (out_dtype, device) == (F32, "cuda"):
        with pytest.raises(TypeError, match=r"^attention: out_dtype is float32, expected bfloat16 or"):
            flashtile.attention(x.q, x.k, x.v, out_dtype=out_dtype, **descales(x))
        return
    out = flashtile.attention(x.q, x.k, x.v, out_dtype=out_dtype, causal=True, **descales(x))
    assert out.dtype is out_dtype
    assert distance(out, exact(x, causal=True)[0]) < TOLERANCE


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_shapes_of_descales_say_the_same(width, device):
    """A descale for all rows, one for each block, and one of q for each KV head or query head; none is 1."""
    x = quantized(device, widths=(width, width))
    of_heads = {name: 0.01 + 0.01 * torch.rand(2, 2, device=device) for name in ("q_descale", "k_descale", "v_descale")}
    found = flashtile.attention(x.q, x.k, x.v, **of_heads)
    rows = dict(q_descale=300, k_descale=420, v_descale=420)
    for block in (64, 128):
        blocks = {name: d[..., None].expand(-1, -1, -(-rows[name] // block)) for name, d in of_heads.items()}
        assert torch.equal(flashtile.attention(x.q, x.k, x.v, **blocks), found)
    of_query_heads = {**of_heads, "q_descale": of_heads["q_descale"].repeat_interleave(2, 1)}
    assert torch.equal(flashtile.attention(x.q, x.k, x.v, **of_query_heads), found)
    ones = dict.fromkeys(of_heads, torch.ones(2, 2, device=device))
    q = (x.q.float() / 64).to(E4M3)
    assert torch.equal(flashtile.attention(q, x.k, x.v, **ones), flashtile.attention(q, x.k, x.v))


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_weights_are_rounded_to_e4m3(device):
    """One key has weight 1, another less; the values pick each. What the weights of e4m3 are, PyTorch says."""
    if device == "cuda" and _capability.of_device() != 90:
        pytest.skip("other GPUs than Hopper compute in 16 bits")
    gaps = torch.linspace(0.0, 6.0, 200)
    descale = gaps[None, None, :1].expand(1, 200, 1)[:, :, 0].contiguous()  # (1, H): each head has a gap of its own
    descale[0] = gaps
    q = torch.ones(1, 1, 200, 64).to(E4M3)
    k = torch.zeros(1, 2, 200, 64)
    k[:, 1, :, 0] = -1
    v = torch.zeros(1, 2, 200, 64)
    v[0, 0, :, 0] = v[0, 1, :, 1] = 1
    given = dict(q_descale=descale.to(device), scale=1.0, out_dtype=F32 if device == "cpu" else F16)
    out = flashtile.attention(*(x.to(device, E4M3) for x in (q, k, v)), **given)[0, 0].double().cpu()
    small = torch.exp(-gaps.double())
    rounded = (2 * small.float()).to(E4M3).double() / 2
    first, second = out[:, 0] * (1 + small), out[:, 1] * (1 + small)
    assert torch.allclose(first, torch.ones(200).double(), atol=1e-3)
    # A weight next to the middle between two numbers may go either way.
    ways = torch.stack([(2 * small.float() * by).to(E4M3).double() / 2 for by in (1 - 1e-5, 1 + 1e-5)])
    assert torch.allclose(rounded, ways, rtol=0.14)
    near = (second[None] - ways).abs().min(0).values
    assert near.max() < 1e-3


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("power", [-30, -12, -4, 3, 12, 30])
def test_descales_of_v_that_are_far_apart(power, device):
    """A block is computed no worse, however its descale of V differs from those of others."""
    x = quantized(device, rows=(200, 600), rotate=False)
    v_descale = x.v_descale.clone()
    v_descale[:, :, 1::2] *= 2.0**power
    # Half of the queries see next to nothing but the blocks that were not changed, and half the others.
    k, q = x.k.clone().float(), x.q.clone().float()
    k[..., 0], q[..., 0] = 0, 448
    for block in range(5):
        k[:, 128 * block : 128 * block + 128, :, 0] = 20 if block % 2 else -20
    q[:, 100:, :, 0] = -448
    x = x._replace(q=q.to(E4M3), k=k.to(E4M3), v_descale=v_descale)
    out = flashtile.attention(x.q, x.k, x.v, **descales(x))
    expected, _ = exact(x)
    for half in (slice(0, 100), slice(100, 200)):
        assert distance(out[:, half], expected[:, half]) < TOLERANCE


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_unusual_descales(device):
    """0 makes zeros, NaN and negative descales NaN of the rows that see such a block; a GPU may make NaN of further
    rows of their tile."""
    x = quantized(device, rows=(420, 420))
    zero = x._replace(v_descale=torch.where(torch.arange(4, device=device) == 1, 0.0, x.v_descale))
    assert distance(flashtile.attention(zero.q, zero.k, zero.v, **descales(zero)), exact(zero)[0]) < TOLERANCE
    zero = x._replace(k_descale=torch.zeros_like(x.k_descale))
    assert distance(flashtile.attention(zero.q, zero.k, zero.v, **descales(zero)), exact(zero)[0]) < TOLERANCE
    for value in (math.nan, -1.0):
        for name in ("k_descale", "v_descale"):
            wrong = getattr(x, name).clone()
            wrong[:, 1, 2] = value
            out = flashtile.attention(x.q, x.k, x.v, **{**descales(x), name: wrong}, causal=True)
            assert out[:, 256:, 2:].isnan().all() and not out[:, :192].isnan().any() and not out[:, :, :2].isnan().any()
        wrong = x.q_descale.clone()
        wrong[:, 1, 0] = value
        out = flashtile.attention(x.q, x.k, x.v, **{**descales(x), "q_descale": wrong})
        assert out[:, :128, 1].isnan().all() and not out[:, 128:].isnan().any()


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_nan_numbers_and_rows_that_see_nothing(device):
    x = quantized(device, rows=(300, 200))
    out, lse = flashtile.attention(x.q, x.k, x.v, **descales(x), causal=True, return_lse=True)
    assert (out[:, :100] == 0).all() and (lse[:, :, :100] == -math.inf).all()
    assert distance(out, exact(x, causal=True)[0]) < TOLERANCE
    v = x.v.float()
    v[:, 150, 0, 3] = math.nan  # rows that share a tile of up to 192 with one that sees it may become NaN, too
    out = flashtile.attention(x.q, x.k, v.to(E4M3), **descales(x), causal=True)
    assert out[:, 250:, :2, 3].isnan().all() and not out[:, :128].isnan().any() and not out[:, :, 2:].isnan().any()


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_ragged_sequences_are_those_alone(width, device):
    lengths = [0, 130, 1, 257, 64]
    begins = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    x = quantized(device, batch=1, rows=(sum(lengths),) * 2, widths=(width, width))
    q, k, v = (y[0] for y in (x.q, x.k, x.v))
    of = [0.005 + 0.01 * torch.rand(5, heads, device=device) for heads in (4, 2, 2)]
    given = dict(q_descale=of[0], k_descale=of[1], v_descale=of[2])
    sequences = dict(cu_seqlens_q=begins, cu_seqlens_k=begins)
    out, lse = flashtile.attention_varlen(q, k, v, causal=True, return_lse=True, **sequences, **given)
    for i, (begin, length) in enumerate(zip(begins.tolist(), lengths, strict=False)):
        rows = slice(begin, begin + length)
        alone = {name: d[i : i + 1] for name, d in given.items()}
        expected = flashtile.attention(
            q[None, rows], k[None, rows], v[None, rows], causal=True, return_lse=True, **alone
        )
        assert torch.equal(out[rows], expected[0][0]) and torch.equal(lse[:, rows], expected[1][0])


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_an_entry_does_not_depend_on_others(device):
    x = quantized(device, batch=3, of=with_outliers)
    out = flashtile.attention(x.q, x.k, x.v, **descales(x), causal=True)
    one = type(x)(*(y[1:2] for y in x))
    assert torch.equal(flashtile.attention(one.q, one.k, one.v, **descales(one), causal=True), out[1:2])


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_column_masks_and_dropout(device):
    x = quantized(device, rows=(300, 300))
    mask = ColumnMask.causal_document([100, 200]).to(device)
    out = flashtile.attention(x.q, x.k, x.v, **descales(x), mask=mask)
    assert distance(out, exact(x, mask=mask.to_dense())[0]) < TOLERANCE
    options = dict(dropout_p=0.5, seed=7)
    out = flashtile.attention(x.q, x.k, x.v, **descales(x), **options)
    assert distance(out, exact(x, **options)[0]) < TOLERANCE


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("layout", ["transposed", "gaps", "misaligned"])
def test_any_strides(layout, device):
    x = quantized(device)
    expected = flashtile.attention(x.q, x.k, x.v, **descales(x))

    def laid_out(y):
        bits = y.view(torch.uint8)
        if layout == "transposed":
            bits = bits.transpose(1, 2).contiguous().transpose(1, 2)
        elif layout == "gaps":
            bits = torch.stack((bits, bits), -1)[..., 0]
        else:
            bits = torch.nn.functional.pad(bits, (1, 0))[..., 1:]
        return bits.view(E4M3)

    assert torch.equal(flashtile.attention(*map(laid_out, (x.q, x.k, x.v)), **descales(x)), expected)
    spread = {name: torch.stack((d, d), -1)[..., 0] for name, d in descales(x).items()}
    assert torch.equal(flashtile.attention(x.q, x.k, x.v, **spread), expected)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("width, bars", [(128, (2.2e-2, 5e-2)), (256, (2e-2, 5e-2))])
def test_accuracy_on_outliers(width, bars, device):
    """FlashAttention-3's distribution, against attention of the numbers before they were rounded."""
    q, k, v = operands(device, batch=1, rows=(1024, 1024), heads=(2, 2), widths=(width, width), of=with_outliers)
    expected, _ = reference.attention(q.double(), k.double(), v.double())
    x = fp8.quantize(*(y.to(F16) for y in (q, k, v)))
    out = flashtile.attention(x.q, x.k, x.v, **descales(x), out_dtype=F16)
    of_all = [y.abs().amax().reshape(1, 1) / 448 for y in (q, k, v)]
    plain = [(y / d).to(E4M3) for y, d in zip((q, k, v), of_all, strict=True)]
    names = ("q_descale", "k_descale", "v_descale")
    rough = flashtile.attention(
        *plain, out_dtype=F16, **{n: d.expand(1, 2) for n, d in zip(names, of_all, strict=True)}
    )
    errors = [float((y.double() - expected).square().mean().sqrt()) for y in (out, rough)]
    # At 4,096 rows weights average over four times as many: these bars are twice those of docs/fp8.md's table.
    assert errors[0] < bars[0] and errors[1] < bars[1] and errors[0] < errors[1], errors


@GPU
@pytest.mark.parametrize("width", [64, 128, 256])
def test_long_sums(width):
    """Values of one sign over many keys: tensor cores alone would lose most of the sum."""
    keys = 65536
    x = quantized("cuda", batch=1, rows=(64, keys), heads=(1, 1), widths=(width, width))
    v = (x.v.float() + 300).clamp(max=448).to(E4M3)
    out = flashtile.attention(x.q, x.k, v, **descales(x))
    expected, _ = exact(x._replace(v=v))
    assert abs(float((out.double() / expected).mean()) - 1) < 0.03


@GPU
def test_a_graph_and_a_host_that_does_not_wait():
    from waiting import host_never_waits

    x = quantized("cuda")
    with host_never_waits():
        expected = flashtile.attention(x.q, x.k, x.v, **descales(x), causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashtile.attention(x.q, x.k, x.v, **descales(x), causal=True)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("ragged", [False, True])
def test_compiled(ragged, device):
    x = quantized(device, batch=1, rows=(128, 128))
    begins = torch.tensor([0, 60, 128], dtype=torch.int32, device=device)

    def call(q, k, v, q_descale, k_descale, v_descale):
        given = dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, causal=True, return_lse=True)
        if ragged:
            return flashtile.attention_varlen(q, k, v, cu_seqlens_q=begins, cu_seqlens_k=begins, **given)
        return flashtile.attention(q, k, v, **given)

    given = (x.q, x.k, x.v, *descales(x).values())
    if ragged:
        given = (*(y[0] for y in given[:3]), *(d[:, :, 0].expand(2, -1) for d in given[3:]))
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(*given)
    for a, b in zip(found, call(*given), strict=True):
        assert torch.equal(a, b)


def test_a_plan_names_the_kernel():
    tall = (((64, 64), "m192_n128"), ((128, 96), "m192_n64"), ((256, 16), "m128_n64"))
    short = (((64, 64), "m128_n128"), ((128, 96), "m128_n128"))  # tiles of 192 rows would be idle in part
    for length, (widths, rows) in [*((2304, each) for each in tall), *((100, each) for each in short)]:
        x = quantized(rows=(length, length), widths=widths)
        plan = flashtile.explain(*(y.to("meta") for y in (x.q, x.k, x.v)), device="H100")
        assert "float8_e4m3fn" in plan and f"sm90_e4m3_d{widths[0]}" in plan and rows in plan


def test_autocast_casts_no_e4m3_numbers():
    x = quantized(rows=(300, 300))
    expected = flashtile.attention(x.q, x.k, x.v, **descales(x))
    with torch.autocast("cpu"):
        assert torch.equal(flashtile.attention(x.q, x.k, x.v, **descales(x)), expected)
        for q, k in ((x.q, x.k.float()), (x.q.float(), x.k)):
            with pytest.raises(TypeError, match=r"^attention: [qk] has dtype float32, expected float8_e4m3fn, as q"):
                flashtile.attention(q, k, x.v, **descales(x))


def test_a_descale_that_is_negated_lazily():
    x = quantized(rows=(300, 300))
    negated = {name: torch._neg_view(-d) for name, d in descales(x).items()}
    expected = flashtile.attention(x.q, x.k, x.v, **descales(x))
    assert torch.equal(flashtile.attention(x.q, x.k, x.v, **negated), expected)


def test_descales_carry_no_tangents():
    x = quantized(rows=(300, 300))
    with torch.autograd.forward_ad.dual_level():
        k_descale = torch.autograd.forward_ad.make_dual(x.k_descale, torch.ones_like(x.k_descale))
        with pytest.raises(NotImplementedError, match=r"^attention: k_descale carries a forward-mode tangent"):
            flashtile.attention(x.q, x.k, x.v, k_descale=k_descale)


def test_a_compiled_call_says_what_is_wrong():
    x = quantized(rows=(300, 300))
    compiled = torch.compile(flashtile.attention, backend="aot_eager")
    with pytest.raises(ValueError, match=r"^attention: k_descale has shape \(1, 2, 3\), expected \(B, H\) or"):
        compiled(x.q, x.k, x.v, k_descale=x.k_descale[:1])
    with pytest.raises(TypeError, match=r"^attention: q has dtype float32, expected float8_e4m3fn, as q_descale"):
        compiled(x.q.float(), x.k, x.v, **descales(x))


def test_wrong_calls():
    x = quantized(rows=(300, 300))
    for wrong, error, message in (
        (dict(q=x.q.float()), TypeError, "q has dtype float32, expected float8_e4m3fn, as q_descale is"),
        (dict(k=x.k.float()), TypeError, "k has dtype float32, expected float8_e4m3fn, as q"),
        (dict(q_descale=x.q_descale.double()), TypeError, "q_descale has dtype torch.float64, expected float32"),
        (dict(k_descale=x.k_descale[:, :1]), ValueError, r"k_descale has shape \(2, 1, 3\), expected \(B, H\) or"),
        (dict(v_descale=x.v_descale[:1]), ValueError, r"v_descale has shape \(1, 2, 3\), expected \(B, H\) or"),
        (dict(v_descale=x.v_descale[:, :, :2]), ValueError, r"v_descale has shape \(2, 2, 2\), expected \(B, H\) or"),
        (dict(k=x.k.double()), TypeError, "k has dtype torch.float64, expected float8_e4m3fn"),
        (dict(v=x.v.view(torch.float8_e5m2)), TypeError, "v has dtype float8_e5m2, expected float8_e4m3fn, as q"),
        (dict(k_descale=x.k_descale[None, None]), ValueError, "k_descale has shape .*, expected at most 4 dimensions"),
        (dict(v_descale=x.v_descale.to("meta")), TypeError, "v_descale is not a dense strided tensor"),
        (dict(q_descale=3.0), TypeError, "q_descale is of type float, expected a torch.Tensor"),
        (
            dict(out_dtype=torch.float64),
            TypeError,
            "out_dtype is torch.float64, expected bfloat16, float16, or float32 on a CPU",
        ),
        (dict(out_dtype=torch.int32), TypeError, "out_dtype is int32, expected bfloat16, float16 or float32"),
        (dict(out_dtype=3), TypeError, "out_dtype is 3, expected bfloat16"),
        (dict(q=x.q.clone().requires_grad_()), NotImplementedError, "a gradient is asked for"),
        (dict(q_descale=x.q_descale.clone().requires_grad_()), NotImplementedError, "a gradient is asked for"),
        (dict(sinks=torch.zeros(4, requires_grad=True)), NotImplementedError, "a gradient is asked for"),
        (dict(return_lse=1), TypeError, "return_lse is 1, expected True or False"),
        (dict(scale=math.inf), ValueError, "scale is inf, expected a finite"),
        (dict(v=x.v[:, :, :1]), ValueError, r"v_descale has shape|v has shape"),
    ):
        given = {**dict(q=x.q, k=x.k, v=x.v, **descales(x)), **wrong}
        with pytest.raises(error, match=f"^attention: {message}"):
            flashtile.attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)
    of_heads = {name: d[..., 0] for name, d in descales(x).items()}
    for rank in (x.q[0], x.q[0, 0], x.q[None]):
        with pytest.raises(ValueError, match=r"^attention: q has shape .*, expected (4|at most 4) dimensions"):
            flashtile.attention(rank, x.k, x.v, **of_heads)
    begins = torch.tensor([0, 100, 200, 300], dtype=torch.int32)
    sequences = dict(cu_seqlens_q=begins, cu_seqlens_k=begins)
    with pytest.raises(
        ValueError, match=r"^attention_varlen: q_descale has shape \(2, 4\), expected \(B, H\), where B is 3"
    ):
        flashtile.attention_varlen(x.q[0], x.k[0], x.v[0], **sequences, **of_heads)
    with pytest.raises(TypeError, match=r"^attention_varlen: cu_seqlens_q is of type list, expected a torch.Tensor"):
        flashtile.attention_varlen(x.q[0], x.k[0], x.v[0], cu_seqlens_q=[0, 300], cu_seqlens_k=begins)
    q = torch.randn(1, 4, 2, 64)
    with pytest.raises(TypeError, match=r"^attention: q has dtype float32, expected .*, as out_dtype is given"):
        flashtile.attention(q, q, q, out_dtype=BF16)
