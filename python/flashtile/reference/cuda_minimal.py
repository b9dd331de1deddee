"""Rung 6: FlashAttention-1 as a CUDA kernel of less than a hundred lines, `minimal.cu`.

The method is rung 2's (Dao et al. 2022, arXiv:2205.14135, Algorithm 1) with Br = Bc = 32, in float32: a thread block is
one warp and computes a head, a thread a row of Q. K and V lie in shared memory while all tiles of Q pass by; O, l and m
go to HBM and back. It is for reading: no tensor cores, no asynchronous copies, and few heads leave most of a GPU idle,
which is what rung 3's order of loops mends.

The kernel is compiled when it is first called, by NVRTC, the compiler that comes with PyTorch; no nvcc is needed.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from flashtile.bench.cases import Case
from flashtile.reference._tiles import LOWEST, STATE_BYTES, row_tiles_seeing, score_scale, tiles

SOURCE = Path(__file__).with_name("minimal.cu")
BLOCK = 32  # rows of Q, and of K and V, in a tile
MAX_HEAD_DIM = 128


@torch.no_grad()
def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """Arguments and result as :func:`flashtile.reference.standard.attention`, on CUDA; forward only.

    D is at most 128, and D_v = D. What is not float32 is converted on the way in and out.

    Raises:
        NotImplementedError: D or D_v is another, or :func:`available` has a reason.

    >>> import torch
    >>> from flashtile.reference import cuda_minimal
    >>> q = torch.randn(1, 100, 2, 64, device="cuda")  # doctest: +SKIP
    >>> cuda_minimal.attention(q, q, q, causal=True).shape  # doctest: +SKIP
    torch.Size([1, 100, 2, 64])
    """
    if reason := available(q.device):
        raise NotImplementedError(f"cuda_minimal: {reason}")
    if q.shape[3] > MAX_HEAD_DIM or v.shape[3] != q.shape[3]:
        found = f"D = {q.shape[3]} and D_v = {v.shape[3]}"
        raise NotImplementedError(f"cuda_minimal: has {found}, expected D = D_v of at most {MAX_HEAD_DIM}")
    dtype = q.dtype
    q, k, v = (x.to(torch.float32).contiguous() for x in (q, k, v))
    with torch.cuda.device(q.device):
        out = torch.zeros_like(q)
        sums = q.new_zeros(q.shape[0], q.shape[2], q.shape[1])
        tops = torch.full_like(sums, LOWEST)
        if out.numel():
            arguments = kernel_arguments(q, k, v, out, sums, tops, score_scale(q, scale), causal)
            _launch(_kernel(q.shape[3], q.device.index), q.shape[0] * q.shape[2], arguments)
    return out.to(dtype)


def kernel_arguments(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, tops: Tensor, scale: float, causal: bool
) -> list[ctypes._SimpleCData]:
    """The arguments of `flash1` in minimal.cu, in its order and types."""
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (q, k, v, out, sums, tops)]
    sizes = q.shape[1], k.shape[1], q.shape[2], k.shape[2], int(causal)
    return [*pointers, ctypes.c_float(scale), *map(ctypes.c_int, sizes)]


def bytes_moved(case: Case) -> int:
    """As rung 2's with tiles of 32, all in float32, every query head reading its own K and V."""
    heads, state = case.batch * case.heads_q, case.head_dim + 2
    seen = sum(
        rows.stop - rows.start
        for columns in tiles(0, case.seqlen_k, BLOCK)
        for rows in row_tiles_seeing(case, columns, BLOCK)
    )
    numbers = case.seqlen_q * state + seen * (case.head_dim + 2 * state) + case.seqlen_k * 2 * case.head_dim
    return heads * numbers * STATE_BYTES


def available(device: torch.device) -> str | None:
    """Why this rung does not run on `device`, or None where it does."""
    if device.type != "cuda":
        return "needs an NVIDIA GPU"
    if torch.version.hip:
        return "needs CUDA, and this PyTorch is built for ROCm"
    try:
        _nvrtc()
    except OSError as error:
        return f"needs NVRTC, which should have come with PyTorch ({error})"
    return None


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """NVRTC of PyTorch's CUDA: in the packages that pip put beside PyTorch, else wherever the system has it."""
    name = f"libnvrtc.so.{(torch.version.cuda or '').split('.')[0]}"
    beside = sorted(Path(torch.__file__).parents[1].glob(f"nvidia/*/lib/{name}"))
    return ctypes.CDLL(str(beside[-1]) if beside else name)


def compile_source(head_dim: int, architecture: str) -> bytes:
    """minimal.cu for one head dimension as a cubin for `architecture`, such as "sm_90". Needs NVRTC, but no GPU."""
    nvrtc, program = _nvrtc(), ctypes.c_void_p()

    def check(status: int) -> None:
        if status:
            nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(f"cuda_minimal: NVRTC says {nvrtc.nvrtcGetErrorString(status).decode()}\n{log()}")

    def log() -> str:
        return fetch("ProgramLog").rstrip(b"\0").decode() if program else ""

    def fetch(what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{what}")(program, text)
        return text.raw

    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), SOURCE.read_bytes(), b"minimal.cu", 0, None, None))
    try:
        options = [f"--gpu-architecture={architecture}".encode(), f"-DHEAD_DIM={head_dim}".encode()]
        check(nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)))
        return fetch("CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def _kernel(head_dim: int, device_index: int) -> ctypes.c_void_p:
    """The kernel, loaded into the device's context, which must be the current one."""
    major, minor = torch.cuda.get_device_capability(device_index)
    cubin = compile_source(head_dim, f"sm_{major}{minor}")
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    _check(_driver().cuModuleLoadData(ctypes.byref(module), cubin))
    _check(_driver().cuModuleGetFunction(ctypes.byref(kernel), module, b"flash1"))
    return kernel


def _launch(kernel: ctypes.c_void_p, blocks: int, arguments: list[ctypes._SimpleCData]) -> None:
    addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    _check(_driver().cuLaunchKernel(kernel, blocks, 1, 1, BLOCK, 1, 1, 0, stream, addresses, None))


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"cuda_minimal: CUDA says {(text.value or b'error').decode()}")
