"""Peers that run wherever they are found: PyTorch's math kernels where memory allows, other packages where they can be
imported. A new one is a row of PACKAGES or, in 8 bits, PACKAGES_OF_FP8."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from flashtile.bench import decode, fp8, options, ragged, serving
from flashtile.bench.cases import Case, Work
from flashtile.bench.masked import Renamed, as_documents
from flashtile.bench.oracle import Attention, attention_sdpa
from flashtile.bench.peers import MATH, RECORDED, Peer, Rounding, math_setting, output_of

SUITES = ("forward", "backward", "varlen", "masks", *decode.SUITES, "serving", fp8.SUITE, "memory", "random")
MATH_SUITES = ("forward", "backward", "memory")


@dataclasses.dataclass(frozen=True)
class Package:
    """An attention of another project: the name of its column, the module that has it, the distribution that the module
    came in, and what makes an attention of the module. With a rounding it is one of e4m3 numbers, and is called with
    what that makes and the case."""

    name: str
    module: str
    distribution: str
    adapter: Callable[[ModuleType], Callable[..., Any]]
    rounding: Rounding | None = None


def found_peers(suite: str, device_type: str) -> tuple[list[Peer], dict[str, str]]:
    """The peers of this suite, and for each package that is there its version or why it cannot be imported."""
    if suite not in SUITES or device_type != "cuda":
        return [], {}
    peers = [Peer(MATH, attention_math, math_setting)] if suite in MATH_SUITES else []
    versions: dict[str, str] = {}
    for package in PACKAGES_OF_FP8 if suite == fp8.SUITE else PACKAGES:
        try:
            module = importlib.import_module(package.module)
        except Exception as error:  # what a module does as it is imported may fail in any way
            if not _is_absent(error, package.module):
                versions[package.name] = f"cannot be imported: {_first_line(error)}"
            continue
        if module.__file__ is None or module.__name__.startswith("flashtile.compat"):
            continue  # a folder that other packages share, or what flashtile.compat.install() has put there
        versions[package.name] = _version(package, module)
        adapted = package.adapter(module)
        if package.rounding is not None:
            adapted = fp8.Rounded(package.rounding, adapted)
        attention: Attention = Adapted(package.name, adapted)
        if suite == "masks":
            attention = Renamed(attention, as_documents)
        peers.append(Peer(package.name, attention, rounding=package.rounding))
    return peers, versions


def attention_math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> torch.Tensor:
    """PyTorch's attention that stores all scores, in float32, several times over; refused where they would not fit."""
    copies = 8 if case.work in RECORDED else 4
    needed = copies * 4 * case.batch * case.heads_q * case.seqlen_q * case.seqlen_k
    if needed > (most := _free_bytes(q.device) // 2):
        raise NotImplementedError(
            f"its scores would take {needed / 2**30:.3g} GiB, expected at most {most / 2**30:.3g}"
        )
    return attention_sdpa(q, k, v, case)


class Adapted:
    """An adapter's attention: options that it is not asked for are refused, and its output is looked at."""

    def __init__(self, name: str, attention: Attention) -> None:
        self._name = name
        self._attention = attention

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> torch.Tensor:
        if refused := options.words(case):
            raise NotImplementedError(f"{self._name} is not asked for {refused} here")
        if case.work is Work.MIXED and not isinstance(self._attention, FlashAttention):
            raise NotImplementedError(f"{self._name} is not asked for mixed batches here")
        return output_of(self._attention(q, k, v, case), q, v)


class FlashAttention:
    """flash-attn 2, FlashAttention-3 and FlashAttention-4, whose functions have the same names and keywords, but for
    the table of pages."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._case: Case | None = None
        over_pages = getattr(module, "flash_attn_with_kvcache", None)
        self._names = inspect.signature(over_pages).parameters if over_pages else ()
        self._table = "page_table" if "page_table" in self._names else "block_table"

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> Any:
        if case.work is Work.MIXED:
            if "cu_seqlens_q" not in self._names:
                raise NotImplementedError("its function of pages takes no ragged queries")
            if case is not self._case:
                over_pages = functools.partial(self._over_pages, max_seqlen_q=max(case.lengths or ()), causal=True)
                self._mixed = serving.Mixed(over_pages, serving.PAGE_SIZE)
                self._case = case
            return self._mixed.together(q, k, v, case)
        if case.lengths is not None:
            lengths = ragged.arguments(case, q.device)
            del lengths["scale"]  # theirs is the same by default
            return self._module.flash_attn_varlen_func(q, k, v, **lengths)
        if not case.over_a_cache:
            return self._module.flash_attn_func(q, k, v, causal=case.causal)
        if hasattr(self._module, "flash_attn_with_kvcache"):
            if case.page_size:
                if case is not self._case:
                    self._paged, self._case = decode.Paged(self._over_pages, case.page_size), case
                return self._paged(q, k, v, case)
            return self._module.flash_attn_with_kvcache(q, k, v, **decode.arguments(case, q.device))
        # FlashAttention-4 has no function of a cache. The caches here are full, so attention is all that is missing; it
        # and the packages below find the rows of a cache in pages contiguous.
        # Where it has no kernel that divides keys among thread blocks, it refuses to be asked for one.
        splits = {"num_splits": 0} if _has_tensor_memory(q.device) else {}
        return self._module.flash_attn_func(q, k, v, causal=case.causal, **splits)

    def _over_pages(
        self, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, *, block_table: torch.Tensor, **given: Any
    ) -> Any:
        return self._module.flash_attn_with_kvcache(q, k_pages, v_pages, **{self._table: block_table}, **given)


class FlashInfer:
    """FlashInfer's wrappers: of ragged batches, which serve prefill and equal lengths too, and of decoding over pages.
    A case's first call, its check, plans; the timed calls run the plan, as a model's layers do."""

    WORKSPACE = 2**28  # bytes; its documentation asks for half of it

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._case: Case | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> torch.Tensor:
        if case.work in RECORDED:
            raise NotImplementedError("FlashInfer has no backward")
        if case != self._case:
            self._case = None  # where planning fails, nothing is planned
            self._wrapper = self._planned(case, q.device)
            self._case = case
        if case.work is Work.DECODE:
            pages = tuple(t.view(-1, _page_size(case), *t.shape[2:]) for t in (k, v))
            return self._wrapper.run(q.squeeze(1), pages).unsqueeze(1)
        return self._wrapper.run(*(t.view(-1, *t.shape[-2:]) for t in (q, k, v))).view(*q.shape[:-1], -1)

    def _planned(self, case: Case, device: torch.device) -> Any:
        workspace = torch.zeros(self.WORKSPACE, dtype=torch.uint8, device=device)
        types = {"q_data_type": case.torch_dtype, "kv_data_type": case.torch_dtype}
        if case.work is Work.DECODE:
            # Its tensor-core kernel is the one for several query heads to a KV head.
            wrapper = self._module.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=case.heads_q != case.heads_k
            )
            size = _page_size(case)
            if case.seqlen_k % size:
                raise NotImplementedError("FlashInfer is asked for whole pages alone here")
            of_each = case.seqlen_k // size
            pages = torch.arange(case.batch * of_each, dtype=torch.int32, device=device)
            last = torch.full((case.batch,), size, dtype=torch.int32, device=device)
            heads = case.heads_q, case.heads_k, case.head_dim
            wrapper.plan(_offsets(case.batch, of_each, device), pages, last, *heads, size, **types)
            return wrapper
        wrapper = self._module.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        if case.lengths is not None:
            offsets = [ragged.cu_seqlens(case.lengths, device)] * 2
        else:
            offsets = [_offsets(case.batch, length, device) for length in (case.seqlen_q, case.seqlen_k)]
        heads = case.heads_q, case.heads_k, case.head_dim
        wrapper.plan(*offsets, *heads, head_dim_vo=case.head_dim_v, causal=case.causal, **types)
        return wrapper


class XFormers:
    """xFormers' memory_efficient_attention, which takes the kernel that it finds best. Of grouped heads it wants each
    KV head once for every query head: in five dimensions an expanded view is enough, but these have no backward."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._case: Case | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> torch.Tensor:
        if case != self._case:
            self._bias = self._bias_of(case, q.device)
            self._case = case
        shape = (*q.shape[:-1], v.shape[-1])
        if case.lengths is not None:
            q, k, v = (t.unsqueeze(0) for t in (q, k, v))
        if case.heads_q != case.heads_k:
            group = case.heads_q // case.heads_k
            k, v = (t.unsqueeze(3).expand(-1, -1, -1, group, -1) for t in (k, v))
            if case.work in RECORDED:
                k, v = k.flatten(2, 3), v.flatten(2, 3)
            else:
                q = q.unflatten(2, (case.heads_k, group))
        return self._module.memory_efficient_attention(q, k, v, attn_bias=self._bias).reshape(shape)

    def _bias_of(self, case: Case, device: torch.device) -> Any:
        biases = self._module.fmha.attn_bias
        if case.lengths is not None:
            bias = biases.BlockDiagonalMask.from_seqlens(case.lengths, device=device)
            return bias.make_causal() if case.causal else bias
        return None if case.is_full else biases.LowerTriangularFromBottomRightMask()


PACKAGES: Sequence[Package] = (
    Package("FA2", "flash_attn", "flash-attn", FlashAttention),
    Package("FA3", "flash_attn_interface", "flash-attn-3", FlashAttention),
    Package("FA4", "flash_attn.cute", "flash-attn-4", FlashAttention),
    Package("FlashInfer", "flashinfer", "flashinfer-python", FlashInfer),
    Package("xFormers", "xformers.ops", "xformers", XFormers),
)
PACKAGES_OF_FP8: Sequence[Package] = (
    Package("FA3 fp8", "flash_attn_interface", "flash-attn-3", fp8.FlashAttention3, fp8.by_heads),
    Package("cuDNN fp8", "cudnn", "nvidia-cudnn-frontend", fp8.Cudnn, fp8.by_tensors),
)


def _free_bytes(device: torch.device) -> int:
    """Of a GPU's memory, what PyTorch keeps for later among it."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def _has_tensor_memory(device: torch.device) -> bool:
    """Whether the device is a data centre's Blackwell GPU."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (10, 11)


def _page_size(case: Case) -> int:
    return case.page_size or math.gcd(case.seqlen_k, max(decode.PAGE_SIZES))


def _offsets(batch: int, length: int, device: torch.device) -> torch.Tensor:
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * length


def _is_absent(error: Exception, module: str) -> bool:
    """Whether the module or a package around it is not there, rather than something that it needs."""
    return isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")


def _version(package: Package, module: ModuleType) -> str:
    try:
        return importlib.metadata.version(package.distribution)
    except importlib.metadata.PackageNotFoundError:
        return getattr(module, "__version__", "of an unknown version")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
