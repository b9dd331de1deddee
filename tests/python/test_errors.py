"""Bad input: the exact exception, a message that names function, argument, found and expected, and nothing written."""

import math

import pytest
import torch
from cases import DEVICE_PARAMS, DEVICES

import flashtile
from flashtile._options import attention_options


def tensors(device, dtype=torch.float16, b=2, sq=5, sk=7, hq=4, hk=2, d=64, dv=64):
    q = torch.randn(b, sq, hq, d, dtype=dtype, device=device)
    k = torch.randn(b, sk, hk, d, dtype=dtype, device=device)
    return q, k, torch.randn(b, sk, hk, dv, dtype=dtype, device=device)


def replaced(name, change):
    """Arguments in which one of q, k, v is `change` of itself."""

    def arguments(device):
        q, k, v = tensors(device)
        named = {"q": q, "k": k, "v": v}
        named[name] = change(named[name])
        return tuple(named.values()), {}

    return arguments


def sized(**sizes):
    return lambda device: (tensors(device, **sizes), {})


def with_options(**options):
    """Option values; a function stands for one that needs the device."""
    return lambda device: (tensors(device), {n: x(device) if callable(x) else x for n, x in options.items()})


def strided(x):
    return x.repeat_interleave(2, dim=3)[..., ::2]


def ones(*shape, dtype=torch.float32):
    return lambda device: torch.ones(shape, dtype=dtype, device=device)


# name: (arguments, exception, what the message holds after "function: ")
BAD = {
    "q of rank 3": (replaced("q", lambda x: x[0]), ValueError, r"q has shape \(5, 4, 64\), expected 4 dimensions"),
    "k of rank 3": (replaced("k", lambda x: x[0]), ValueError, r"k has shape \(7, 2, 64\), expected 4 dimensions"),
    "v of rank 3": (replaced("v", lambda x: x[0]), ValueError, r"v has shape \(7, 2, 64\), expected 4 dimensions"),
    "q of rank 0": (replaced("q", lambda x: x[0, 0, 0, 0]), ValueError, r"q has shape \(\), expected 4 dimensions"),
    "v of rank 5": (replaced("v", lambda x: x[None]), ValueError, r"v has shape \(1, 2, 7, 2, 64\), expected .* 4 dim"),
    "q of float64": (
        replaced("q", torch.Tensor.double),
        TypeError,
        "q has dtype torch.float64, expected float32, float16 or",
    ),
    "q of int64": (
        replaced("q", torch.Tensor.long),
        TypeError,
        "q has dtype torch.int64, expected float32, float16 or",
    ),
    "q of int32": (replaced("q", torch.Tensor.int), TypeError, "q has dtype int32, expected float32, float16 or"),
    "k of another dtype": (
        replaced("k", torch.Tensor.bfloat16),
        TypeError,
        "k has dtype bfloat16, expected float16, as q",
    ),
    "v of another dtype": (replaced("v", torch.Tensor.float), TypeError, "v has dtype float32, expected float16, as q"),
    "q is a list": (replaced("q", torch.Tensor.tolist), TypeError, "q is of type list, expected a torch.Tensor"),
    "k is None": (replaced("k", lambda x: None), TypeError, "k is of type NoneType, expected a torch.Tensor"),
    "v is an array": (
        replaced("v", lambda x: x.cpu().numpy()),
        TypeError,
        "v is of type .*ndarray, expected a torch.Tensor",
    ),
    "q is sparse": (replaced("q", lambda x: x.to_sparse()), TypeError, "q is not a dense strided tensor"),
    "k of another batch": (
        replaced("k", lambda x: x[:1]),
        ValueError,
        r"k has shape \(1, 7, 2, 64\), expected \(2, 7, 2, 64\) = \(B, S_k, H_k, D\)",
    ),
    "k of smaller D": (
        replaced("k", lambda x: x[..., :32]),
        ValueError,
        r"k has shape \(2, 7, 2, 32\), expected \(2, 7, 2, 64\) = \(B, S_k, H_k, D\)",
    ),
    "v of another length": (
        replaced("v", lambda x: x[:, :6]),
        ValueError,
        r"v has shape \(2, 6, 2, 64\), expected \(2, 7, 2, 64\) = \(B, S_k, H_k, D_v\)",
    ),
    "v of other heads": (
        replaced("v", lambda x: x[:, :, :1]),
        ValueError,
        r"v has shape \(2, 7, 1, 64\), expected \(2, 7, 2, 64\) = \(B, S_k, H_k, D_v\)",
    ),
    "H_q no multiple of H_k": (sized(hq=4, hk=3), ValueError, "q has H_q = 4 heads, expected a multiple of H_k = 3"),
    "no KV heads": (sized(hk=0), ValueError, r"k has shape \(2, 7, 0, 64\), expected at least one head"),
    "D no multiple of 8": (sized(d=60), ValueError, r"q has shape \(2, 5, 4, 60\), expected D to be a multiple of 8"),
    "D above 256": (sized(d=264), ValueError, r"q has shape \(2, 5, 4, 264\), expected D to be .* from 8 to 256"),
    "D of 0": (sized(d=0), ValueError, r"q has shape \(2, 5, 4, 0\), expected D to be a multiple of 8 from 8 to 256"),
    "D_v no multiple of 8": (
        sized(dv=4),
        ValueError,
        r"v has shape \(2, 7, 2, 4\), expected D_v to be a multiple of 8",
    ),
    "D_v above 256": (sized(dv=512), ValueError, r"v has shape \(2, 7, 2, 512\), expected D_v to be .* from 8 to 256"),
    "q strided in D": (replaced("q", strided), ValueError, "q has stride 2 in its last dimension, expected 1"),
    "k strided in D": (replaced("k", strided), ValueError, "k has stride 2 in its last dimension, expected 1"),
    "v expanded in D": (
        replaced("v", lambda x: x[..., :1].expand_as(x)),
        ValueError,
        "v has stride 0 in its last dimension, expected 1",
    ),
    "window is an int": (with_options(window=7), TypeError, "window is 7, expected None or a tuple"),
    "window of three": (with_options(window=(1, 2, 3)), TypeError, r"window is \(1, 2, 3\), expected None or a tuple"),
    "window of floats": (with_options(window=(1.5, 0)), TypeError, r"window\[0\] is 1.5, expected an int or None"),
    "causal is an int": (with_options(causal=1), TypeError, "causal is 1, expected True or False"),
    "NaN scale": (with_options(scale=math.nan), ValueError, "scale is nan, expected a finite float32 number"),
    "infinite scale": (with_options(scale=math.inf), ValueError, "scale is inf, expected a finite float32 number"),
    "scale beyond float32": (with_options(scale=1e39), ValueError, "scale is 1.*, expected a finite float32 number"),
    "scale is text": (with_options(scale="big"), TypeError, "scale is 'big', expected a number or None"),
    "negative softcap": (with_options(softcap=-1.0), ValueError, "softcap is -1, expected a number of at least 0"),
    "NaN softcap": (with_options(softcap=math.nan), ValueError, "softcap is nan, expected a finite float32 number"),
    "softcap is None": (with_options(softcap=None), TypeError, "softcap is None, expected a number"),
    "slopes of one head": (
        with_options(alibi_slopes=ones(3)),
        ValueError,
        r"alibi_slopes has shape \(3\,?\), expected \(4\,?\) = \(H_q\)",
    ),
    "slopes of another batch": (
        with_options(alibi_slopes=ones(1, 4)),
        ValueError,
        r"alibi_slopes has shape \(1, 4\), expected \(2, 4\) = \(B, H_q\)",
    ),
    "slopes of rank 3": (
        with_options(alibi_slopes=ones(1, 2, 4)),
        ValueError,
        r"alibi_slopes has shape \(1, 2, 4\), expected",
    ),
    "slopes of float16": (
        with_options(alibi_slopes=ones(4, dtype=torch.float16)),
        TypeError,
        "alibi_slopes has dtype float16, expected float32",
    ),
    "slopes of float64": (
        with_options(alibi_slopes=ones(4, dtype=torch.float64)),
        TypeError,
        r"alibi_slopes has dtype torch\.float64, expected float32(?!,)",
    ),
    "slopes are a list": (
        with_options(alibi_slopes=[1.0] * 4),
        TypeError,
        "alibi_slopes is of type list, expected a torch.Tensor",
    ),
    "sinks of other heads": (
        with_options(sinks=ones(3)),
        ValueError,
        r"sinks has shape \(3,\), expected \(4,\) = \(H_q\)",
    ),
    "sinks of KV heads": (
        with_options(sinks=ones(2)),
        ValueError,
        r"sinks has shape \(2,\), expected \(4,\) = \(H_q\)",
    ),
    "sinks of rank 2": (
        with_options(sinks=ones(2, 4)),
        ValueError,
        r"sinks has shape \(2, 4\), expected 1 dimensions = \(H_q\)",
    ),
    "sinks of int32": (
        with_options(sinks=ones(4, dtype=torch.int32)),
        TypeError,
        "sinks has dtype int32, expected float32",
    ),
    "sinks are a list": (with_options(sinks=[1.0] * 4), TypeError, "sinks is of type list, expected a torch.Tensor"),
    "sinks are a number": (with_options(sinks=0.0), TypeError, "sinks is of type float, expected a torch.Tensor"),
    "return_lse is text": (with_options(return_lse="no"), TypeError, "return_lse is 'no', expected True or False"),
    "return_lse is an int": (with_options(return_lse=1), TypeError, "return_lse is 1, expected True or False"),
    "return_lse is None": (with_options(return_lse=None), TypeError, "return_lse is None, expected True or False"),
    "causal is a large tensor": (
        with_options(causal=ones(300, 70)),
        TypeError,
        r"causal is a tensor of shape \(300, 70\), expected True or False",
    ),
    "window is a long list": (
        with_options(window=list(range(9999))),
        TypeError,
        r"window is \[0, 1, 2, .*\.\.\., expected None or a tuple",
    ),
    "q is nested": (
        replaced("q", lambda x: torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged)),
        NotImplementedError,
        r"q is a nested tensor, expected a dense one; nearest supported: attention_varlen of values\(\), with offsets",
    ),
    "v is nested, with strides": (
        replaced("v", lambda x: torch.nested.nested_tensor([x[0], x[1, :2]])),
        NotImplementedError,
        "v is a nested tensor, expected a dense one",
    ),
    "negative dropout": (
        with_options(dropout_p=-0.1),
        ValueError,
        "dropout_p is -0.1, expected a probability of at least 0 and below 1",
    ),
    "dropout of all": (
        with_options(dropout_p=1.0, seed=1),
        ValueError,
        "dropout_p is 1, expected a probability of at least 0 and below 1",
    ),
    "NaN dropout": (with_options(dropout_p=math.nan), ValueError, "dropout_p is nan, expected a probability"),
    "dropout is None": (with_options(dropout_p=None), TypeError, "dropout_p is None, expected a number"),
    "dropout of several": (
        with_options(dropout_p=lambda device: torch.ones(2, device=device)),
        TypeError,
        r"dropout_p is a tensor of shape \(2,\), expected a number",
    ),
    "dropout is text": (with_options(dropout_p="half"), TypeError, "dropout_p is 'half', expected a number"),
    "negative seed": (
        with_options(dropout_p=0.1, seed=-1),
        TypeError,
        r"seed is -1, expected an int from 0 to 2\^64 - 1 or None",
    ),
    "seed beyond 64 bits": (
        with_options(seed=2**64),
        TypeError,
        r"seed is 18446744073709551616, expected an int from 0 to 2\^64 - 1 or None",
    ),
    "seed is a float": (with_options(dropout_p=0.1, seed=1.0), TypeError, "seed is 1.0, expected an int from 0"),
    "deterministic is an int": (
        with_options(deterministic=1),
        TypeError,
        "deterministic is 1, expected True, False or None",
    ),
    "deterministic is text": (
        with_options(deterministic="yes"),
        TypeError,
        "deterministic is 'yes', expected True, False or None",
    ),
}
each_bad = pytest.mark.parametrize("name", BAD)


@each_bad
@pytest.mark.parametrize("device", DEVICE_PARAMS)
@pytest.mark.parametrize("function", [flashtile.attention, flashtile.explain])
def test_bad_input(name, device, function):
    arguments, exception, message = BAD[name]
    args, options = arguments(device)
    with pytest.raises(exception, match=f"^attention: {message}") as raised:
        function(*args, **options)
    assert raised.type is exception
    assert len(str(raised.value)) < 250 and "\n" not in str(raised.value)


@each_bad
def test_bad_input_that_requires_grad(name):
    arguments, exception, message = BAD[name]
    args, options = arguments("cpu")
    for x in args:
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            x.requires_grad_()
    with pytest.raises(exception, match=f"^attention: {message}"):
        flashtile.attention(*args, **{"return_lse": True, **options})


@pytest.mark.parametrize("device", DEVICE_PARAMS)
def test_slopes_that_require_grad(device):
    q, k, v = tensors(device)
    trained = torch.ones(4, device=device, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"^attention: alibi_slopes requires grad, expected .*detach"):
        flashtile.attention(q, k, v, alibi_slopes=trained)
    with torch.no_grad():
        flashtile.attention(q, k, v, alibi_slopes=trained)
    number = torch.tensor(0.5, requires_grad=True)
    for name in ("scale", "softcap", "dropout_p"):
        with pytest.raises(NotImplementedError, match=rf"^attention: {name} requires grad, expected .*{name}.detach"):
            flashtile.attention(q, k, v, **{name: number})
        with torch.no_grad():
            flashtile.attention(q, k, v, **{name: number})


@pytest.mark.parametrize("dropout_p", [-0.5, 1.0, 2, math.nan, torch.tensor([-0.5])], ids=str)
def test_a_refused_dropout_draws_no_seed(dropout_p):
    q, k, v = tensors("cpu")
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"^attention: dropout_p is .*, expected a probability"):
        flashtile.attention(q, k, v, dropout_p=dropout_p)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_meta_tensors_hold_no_data(name):
    args, _ = replaced(name, lambda x: x.to("meta"))("cpu")
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=f"^attention: {name} "):
        flashtile.attention(*args)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("device", DEVICES)
def test_devices_mixed(name, device):
    other = {"cpu": "cuda", "cuda": "cpu"}[device]
    args, _ = replaced(name, lambda x: x.to(other))(device)
    expected = {"cpu": "cpu", "cuda": "cuda:0"}
    with pytest.raises(ValueError, match=f"^attention: {name} is on {expected[other]}, expected {expected[device]}"):
        flashtile.attention(*args)


@pytest.mark.gpu
def test_slopes_on_another_device():
    with pytest.raises(ValueError, match=r"^attention: alibi_slopes is on cpu, expected cuda:0"):
        flashtile.attention(*tensors("cuda"), alibi_slopes=torch.ones(4))


@pytest.mark.gpu
def test_sinks_on_another_device():
    with pytest.raises(ValueError, match=r"^attention: sinks is on cpu, expected cuda:0"):
        flashtile.attention(*tensors("cuda"), sinks=torch.ones(4))


@pytest.mark.gpu
def test_float32_on_cuda():
    with pytest.raises(NotImplementedError, match=r"^attention: q has dtype float32 .*expected float16 or bfloat16"):
        flashtile.attention(*tensors("cuda", dtype=torch.float32))


@pytest.mark.skipif(flashtile.info()["built_with_cuda"], reason="this build holds CUDA kernels")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensor_in_a_build_without_cuda():
    with pytest.raises(NotImplementedError, match=r"^attention: q is on cuda:0, .*built without CUDA; .*CUDA=PYPI"):
        flashtile.attention(*tensors("cuda"))


def test_keyword_arguments_only():
    q, k, v = tensors("cpu")
    with pytest.raises(TypeError, match=r"^attention: attn_mask is given"):  # it is PyTorch's fourth
        flashtile.attention(q, k, v, True)
    with pytest.raises(TypeError, match="positional"):
        flashtile.attention(q, k, v, None, False, True)


OPTIONS = attention_options(deterministic=False)


# The compiled module is checked too: it must not write through what Python would never hand it.
@pytest.mark.parametrize("missing", ["dout", "out", "lse"])
def test_backward_needs_what_the_forward_wrote(missing):
    q, k, v = tensors("cpu")
    out, lse = flashtile.attention(q, k, v, return_lse=True)
    given = {"dout": out, "out": out, "lse": lse}
    given[missing] = given[missing][:1]
    gradients = [torch.full_like(x, 3) for x in (q, k, v)]
    with pytest.raises(ValueError, match=f"^attention backward: {missing} has shape"):
        flashtile._C.backward(given["dout"], None, q, k, v, given["out"], given["lse"], *gradients, None, OPTIONS)
    assert all((x == 3).all() for x in gradients), "something was written"


def test_backward_without_sinks_has_no_gradient_for_them():
    q, k, v = tensors("cpu")
    out, lse = flashtile.attention(q, k, v, return_lse=True)
    dsinks = torch.full((4,), 3.0)
    with pytest.raises(ValueError, match=r"^attention backward: dsinks is given, expected none where there are no"):
        flashtile._C.backward(out, None, q, k, v, out, lse, None, None, None, dsinks, OPTIONS)
    assert (dsinks == 3).all(), "something was written"


def test_the_module_wants_all_options():
    with pytest.raises(TypeError, match=f"^attention: expected {len(OPTIONS)} options"):
        flashtile._C.forward(*tensors("cpu"), OPTIONS[:-1])
