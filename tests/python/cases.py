"""The matrix of cases. Every case runs on the CPU and, where a kernel serves its dtype, on CUDA."""

import dataclasses
import math

import pytest
import torch

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (F32, F16, BF16)
DEVICES = ("cpu", "cuda")
DEVICE_PARAMS = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
SEED = 0xFEDCBA9876543210  # of dropout: every bit of it counts
# Values that break a rule of their option. Every number has to be a finite float32 as well.
ILLEGAL = {"softcap": (-1.0,), "dropout_p": (1.0, -0.1, math.nan)}
HEAD_DIMS = (8, 40, 64, 72, 80, 96, 104, 128, 136, 192, 256)


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    dtype: torch.dtype = BF16
    batch: int = 2
    seqlen_q: int = 65
    seqlen_k: int = 97
    heads_q: int = 2
    heads_k: int = 1
    head_dim: int = 64
    head_dim_v: int | None = None  # None: head_dim
    causal: bool = False
    window: tuple | None = None
    scale: float | None = None
    softcap: float = 0.0
    alibi: str | None = None  # "per head" or "per batch and head"
    sinks: float | None = None  # added to every head's own; None: no sinks
    dropout_p: float = 0.0
    layout: str = "contiguous"
    magnitude: float = 1.0  # of q's elements

    def __str__(self):
        return f"{self.name}-{str(self.dtype).removeprefix('torch.')}"

    @property
    def entries(self):
        """Of the batch."""
        return self.batch

    def tensors(self, device="cpu", requires_grad=False):
        """q, k, v with seeded values in the case's layout."""
        generator = torch.Generator().manual_seed(17)
        head_dim_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        shapes = (
            (self.batch, self.seqlen_q, self.heads_q, self.head_dim),
            (self.batch, self.seqlen_k, self.heads_k, self.head_dim),
            (self.batch, self.seqlen_k, self.heads_k, head_dim_v),
        )
        values = [torch.randn(shape, generator=generator) for shape in shapes]
        values[0] *= self.magnitude
        views = [lay_out(x.to(self.dtype).to(device), self.layout) for x in values]
        return [x.requires_grad_() for x in views] if requires_grad else views

    def options(self, device="cpu"):
        """The keyword arguments of flashtile.attention and of the reference."""
        options = dict(causal=self.causal, window=self.window, scale=self.scale, softcap=self.softcap)
        if self.alibi is not None:
            slopes = 0.5 ** torch.linspace(1, 8, self.heads_q)
            if self.alibi == "per batch and head":
                slopes = slopes * torch.linspace(1, 2, self.entries)[:, None]
            options["alibi_slopes"] = slopes.float().to(device)
        if self.sinks is not None:  # 4, 1.5, -1, -3.5, 2, ...: the first takes about as much as 65 columns
            options["sinks"] = (4 - torch.arange(self.heads_q) * 2.5 % 8 + self.sinks).to(device)
        if self.dropout_p > 0:
            options |= dict(dropout_p=self.dropout_p, seed=SEED)
        return options

    def incoming(self, out, lse):
        """Seeded gradients of out and lse."""
        generator = torch.Generator().manual_seed(5)
        return [torch.randn(x.shape, generator=generator).to(x.device, x.dtype) for x in (out, lse)]


def lay_out(x, layout):
    """The values of `x` in other strides. Memory around the view is NaN."""
    if layout == "contiguous":
        return x
    batch, seqlen, heads, dim = x.shape
    nan = {"fill_value": math.nan, "dtype": x.dtype, "device": x.device}
    if layout == "heads first":  # (B, H, S, D), as many models keep it
        view = torch.full((batch, heads, seqlen, dim), **nan).transpose(1, 2)
    elif layout == "sequence first":
        view = torch.full((seqlen, batch, heads, dim), **nan).transpose(0, 1)
    elif layout == "gaps":  # in every dimension, 16-byte aligned
        buffer = torch.full((batch + 2, seqlen + 3, heads + 2, dim + 16), **nan)
        view = buffer[1 : batch + 1, 2 : seqlen + 2, 1 : heads + 1, 8 : dim + 8]
    elif layout == "misaligned":  # neither the address nor a stride is a multiple of 16 bytes
        view = torch.full((batch, seqlen, heads, dim + 3), **nan)[..., 1 : dim + 1]
    elif layout == "packed":  # one of three slices, as a fused projection of q, k and v leaves it
        view = torch.full((batch, seqlen, 3, heads, dim), **nan)[:, :, 1]
    elif layout == "reversed batch":  # strides that grow and shrink: (H, B, S, D)
        view = torch.full((heads, batch, seqlen, dim), **nan).permute(1, 2, 0, 3)
    else:
        raise ValueError(layout)
    return view.copy_(x)


LAYOUTS = ("contiguous", "heads first", "sequence first", "gaps", "misaligned", "packed", "reversed batch")


def _cases():
    """Pairwise rather than the full product: each axis is walked while the others take turns."""
    cases = []

    def add(name, **fields):
        fields.setdefault("dtype", DTYPES[len(cases) % 3])
        cases.append(Case(name, **fields))

    for dim in HEAD_DIMS:
        for i, dtype in enumerate(DTYPES):
            add(f"D{dim}", head_dim=dim, dtype=dtype, causal=i % 2 == 0)
    for dim, dim_v in ((192, 128), (64, 128), (128, 64), (8, 256), (256, 8), (96, 40), (136, 72), (192, 136)):
        for dtype in DTYPES:
            add(f"D{dim}_Dv{dim_v}", head_dim=dim, head_dim_v=dim_v, dtype=dtype, causal=dim < dim_v)
            sizes = dict(seqlen_q=400, seqlen_k=500, head_dim=dim, head_dim_v=dim_v)
            add(f"D{dim}_Dv{dim_v}_long", causal=True, dtype=dtype, **sizes)

    lengths = [(1, 1), (1, 17), (1, 129), (17, 1), (63, 65), (64, 64), (65, 63), (127, 129), (128, 257), (200, 100)]
    lengths += [(100, 200), (333, 77), (513, 511), (1, 1000), (1025, 1025)]
    for seqlen_q, seqlen_k in lengths:
        for causal in (False, True):
            for dtype in (F32, F16) if causal else (F32, BF16):
                add(
                    f"S{seqlen_q}x{seqlen_k}{'_causal' * causal}",
                    seqlen_q=seqlen_q,
                    seqlen_k=seqlen_k,
                    causal=causal,
                    dtype=dtype,
                )

    for heads_q, heads_k in ((4, 4), (4, 2), (8, 2), (8, 1), (6, 3), (12, 1), (32, 1), (1, 1)):
        for dtype in (F32, BF16):
            add(f"H{heads_q}over{heads_k}", heads_q=heads_q, heads_k=heads_k, dtype=dtype, causal=heads_q > 4)

    for group in (3, 4, 8, 16):  # packed into the rows of a tile, which end within a query's
        for dtype in (F16, BF16):
            heads = dict(heads_q=2 * group, heads_k=2, dtype=dtype)
            add(f"group{group}_causal", causal=True, seqlen_q=301, seqlen_k=350, **heads)
            add(f"group{group}_window", window=(60, 9), softcap=9.0, seqlen_q=77, layout="gaps", **heads)
            add(f"group{group}_one_query", seqlen_q=1, seqlen_k=600, head_dim=128, **heads)

    for i, group in enumerate((3, 5, 6, 7, 9, 10, 11, 13, 14, 15)):  # packs that leave rows of a tile idle
        heads = dict(heads_q=2 * group, heads_k=2, dtype=(F16, BF16)[i % 2])
        sizes = dict(seqlen_q=37, seqlen_k=160, head_dim=(64, 88, 128, 192, 256)[i % 5])
        add(f"group{group}_few_queries", causal=i % 3 > 0, sinks=0.0 if i % 4 == 3 else None, **sizes, **heads)

    for i, group in enumerate((5, 7, 11, 17, 19, 37)):  # packs that share heads, where they leave fewer tiles
        heads = dict(heads_q=2 * group, heads_k=2, dtype=(F16, BF16)[i % 2])
        sizes = dict(seqlen_q=141, seqlen_k=160, head_dim=(64, 88, 128, 192, 256)[i % 5])
        add(f"group{group}_shared_packs", causal=i % 3 > 0, sinks=0.0 if i % 3 == 2 else None, **sizes, **heads)
        add(f"group{group}_shared_packs_split", seqlen_q=15, seqlen_k=3000, batch=1, **heads)

    windows = [(0, 0), (5, 0), (0, 5), (16, 16), (None, 3), (3, None), (100, None), (None, 0), (None, None), (40, 200)]
    for i, window in enumerate(windows):
        for j, (seqlen_q, seqlen_k) in enumerate(((130, 130), (70, 190), (190, 70))):
            add(
                f"window{window[0]}_{window[1]}_S{seqlen_q}x{seqlen_k}",
                window=window,
                seqlen_q=seqlen_q,
                seqlen_k=seqlen_k,
                causal=(i + j) % 4 == 0,
            )

    everything = dict(
        alibi="per batch and head",
        softcap=10.0,
        scale=0.3,
        layout="gaps",
        seqlen_q=150,
        seqlen_k=170,
        heads_q=6,
        heads_k=2,
        head_dim=72,
        head_dim_v=40,
    )
    for dtype in DTYPES:
        add("softcap", softcap=5.0, magnitude=4.0, dtype=dtype)
        add("softcap_causal", softcap=30.0, magnitude=20.0, causal=True, dtype=dtype)
        add("alibi", alibi="per head", heads_q=4, heads_k=2, dtype=dtype)
        add("alibi_causal", alibi="per batch and head", heads_q=4, heads_k=2, causal=True, dtype=dtype)
        add("everything", window=(50, 7), dtype=dtype, **everything)
        add("alibi_softcap_causal_window", alibi="per head", softcap=3.0, window=(30, None), causal=True, dtype=dtype)
        add("scale_zero", scale=0.0, dtype=dtype)
        add("scale_negative", scale=-0.2, causal=True, dtype=dtype)
        add("scale_large", scale=2.5, dtype=dtype)
        add("scale_negative_alibi", scale=-0.2, alibi="per head", softcap=4.0, dtype=dtype)
        add("large_scores", magnitude=100.0, dtype=dtype)
        add("large_scores_causal", magnitude=100.0, causal=True, head_dim=128, dtype=dtype)
        add("mostly_blind", seqlen_q=150, seqlen_k=20, causal=True, dtype=dtype)
        add("blind_window", seqlen_q=150, seqlen_k=20, window=(3, 2), alibi="per head", dtype=dtype)
        add("long", seqlen_q=1500, seqlen_k=1500, heads_q=1, batch=1, causal=True, dtype=dtype)
    for layout in LAYOUTS[1:]:
        for dtype in DTYPES:
            add(layout.replace(" ", "_"), layout=layout, heads_q=4, heads_k=2, head_dim=72, causal=True, dtype=dtype)

    both = dict(sinks=0.0, dropout_p=0.2)
    for dtype in DTYPES:
        add("sinks", sinks=0.0, dtype=dtype)
        add("sinks_causal", sinks=0.0, causal=True, seqlen_q=300, seqlen_k=280, dtype=dtype)
        add("sinks_above_all", sinks=60.0, dtype=dtype)
        add("sinks_below_all", sinks=-90.0, causal=True, dtype=dtype)
        add("sinks_and_large_scores", sinks=50.0, magnitude=20.0, dtype=dtype)
        add("sinks_scale_zero", sinks=0.0, scale=0.0, dtype=dtype)
        add("sinks_scale_negative", sinks=0.0, scale=-0.2, window=(30, 0), dtype=dtype)
        add("dropout", dropout_p=0.1, dtype=dtype)
        add("dropout_causal", dropout_p=0.1, causal=True, seqlen_q=300, seqlen_k=280, dtype=dtype)
        add("dropout_of_most", dropout_p=0.9, dtype=dtype)
        add("dropout_large_scores", dropout_p=0.3, magnitude=100.0, causal=True, dtype=dtype)
        for i, (dim, dim_v) in enumerate(((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))):
            sizes = dict(head_dim=dim, head_dim_v=dim_v, heads_q=4, heads_k=2, dtype=dtype)
            add(f"sinks_dropout_D{dim}_Dv{dim_v}", seqlen_q=400, seqlen_k=500, causal=i % 2 == 0, **sizes, **both)
            add(f"dropout_D{dim}_Dv{dim_v}", seqlen_q=333, seqlen_k=205, causal=i % 2 == 1, dropout_p=0.4, **sizes)
        for i, (seqlen_q, seqlen_k) in enumerate(((1, 1), (1, 129), (17, 1), (65, 63), (200, 100), (513, 511))):
            sizes = dict(seqlen_q=seqlen_q, seqlen_k=seqlen_k, dtype=dtype)
            add(f"sinks_dropout_S{seqlen_q}x{seqlen_k}", causal=i % 2 == 0, **sizes, **both)
        for window, seqlen_q, seqlen_k in (
            ((37, 5), 130, 130),
            ((101, None), 70, 190),
            ((13, 0), 70, 190),
            ((None, 27), 190, 70),
            ((3, 2), 190, 70),
            ((21, 150), 300, 333),
        ):
            sizes = dict(window=window, seqlen_q=seqlen_q, seqlen_k=seqlen_k, dtype=dtype)
            add(f"sinks_dropout_window{window[0]}_{window[1]}_S{seqlen_q}x{seqlen_k}", **sizes, **both)
        for group in (3, 4, 8, 16):
            heads = dict(heads_q=2 * group, heads_k=2, dtype=dtype)
            add(f"sinks_group{group}_causal", sinks=0.0, causal=True, seqlen_q=301, seqlen_k=350, **heads)
            add(f"sinks_group{group}_one_query", sinks=0.0, seqlen_q=1, seqlen_k=600, head_dim=128, **heads)
            add(f"sinks_dropout_group{group}", window=(60, 9), softcap=9.0, seqlen_q=77, layout="gaps", **heads, **both)
        add("sinks_dropout_softcap", softcap=5.0, magnitude=4.0, causal=True, dtype=dtype, **both)
        add("sinks_dropout_alibi", alibi="per batch and head", heads_q=4, heads_k=2, dtype=dtype, **both)
        add("sinks_dropout_mostly_blind", seqlen_q=150, seqlen_k=20, causal=True, dtype=dtype, **both)
        add("sinks_blind_window", seqlen_q=150, seqlen_k=20, window=(3, 2), sinks=0.0, dtype=dtype)
        add("sinks_dropout_misaligned", layout="misaligned", head_dim=72, dtype=dtype, **both)
        add("sinks_dropout_everything", window=(51, 7), dtype=dtype, **everything, **both)

    # Blocks of mapped scores whose keys all rows see, in few heads of rows that are long enough. With a magnitude of 1
    # no score is far from 0 in units of the softcap; with more, some are, or most.
    for i, (dim, dim_v) in enumerate(((64, 64), (80, 80), (128, 128), (192, 128), (192, 192), (256, 256))):
        sizes = dict(batch=1, seqlen_q=700, seqlen_k=900, heads_q=2, heads_k=1, head_dim=dim, head_dim_v=dim_v)
        for dtype in (F16, BF16):
            for softcap, magnitude in ((15.0, 1.0), (30.0, 1.0), (30.0, 4.0), (15.0, 9.0), (50.0, 40.0)):
                name = f"interior_softcap{softcap:g}_magnitude{magnitude:g}_D{dim}_Dv{dim_v}"
                add(name, softcap=softcap, magnitude=magnitude, causal=i % 2 == 0, dtype=dtype, **sizes)
            add(f"interior_alibi_D{dim}_Dv{dim_v}", alibi="per head", causal=i % 2 == 1, dtype=dtype, **sizes)
            add(f"interior_alibi_large_scores_D{dim}_Dv{dim_v}", alibi="per head", magnitude=90.0, dtype=dtype, **sizes)
            add(f"interior_both_D{dim}_Dv{dim_v}", alibi="per head", softcap=20.0, dtype=dtype, **sizes)
            add(f"interior_scale_negative_D{dim}_Dv{dim_v}", scale=-0.2, causal=i % 2 == 0, dtype=dtype, **sizes)

    # Few tiles of queries: thread blocks share the keys of each.
    few = dict(batch=1, seqlen_k=3001, heads_q=4, heads_k=2)
    for i, (dim, dim_v) in enumerate(((64, 64), (88, 88), (128, 128), (192, 128), (192, 192), (256, 256), (256, 40))):
        for dtype in (F16, BF16):
            sizes = dict(head_dim=dim, head_dim_v=dim_v, dtype=dtype, **few)
            add(f"few_rows_D{dim}_Dv{dim_v}", seqlen_q=40 + 200 * (i % 2), causal=i % 3 == 0, **sizes)
    for dtype in (F16, BF16):
        rows = dict(seqlen_q=190, dtype=dtype, **few)
        add("few_rows_window", window=(1500, 100), **rows)
        add("narrow_window_of_many_keys", window=(700, 0), causal=True, layout="gaps", **rows)
        add("few_rows_alibi_softcap", alibi="per batch and head", softcap=9.0, causal=True, **rows)
        add("few_rows_sinks", sinks=0.0, causal=True, **rows)
        add("few_rows_sinks_above_all", sinks=60.0, **rows)
        add("few_rows_large_scores", magnitude=100.0, causal=True, **rows)
        add("few_rows_scale_negative", scale=-0.2, causal=True, **rows)
        add("one_long_head", seqlen_q=5000, seqlen_k=5000, heads_q=1, batch=1, head_dim=128, dtype=dtype)
        add("some_rows_see_nothing", seqlen_q=1800, seqlen_k=1500, heads_q=1, batch=1, causal=True, dtype=dtype)

    # A GPU has too few blocks of keys: several thread blocks share the queries of each in a backward.
    for i, (dim, dim_v) in enumerate(
        ((64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (128, 64), (72, 40))
    ):
        few = dict(batch=1, heads_q=16, heads_k=1, head_dim=dim, head_dim_v=dim_v)
        for dtype in DTYPES:
            add(f"few_keys_D{dim}_Dv{dim_v}", seqlen_q=333, seqlen_k=(13, 200)[i % 2], dtype=dtype, **few)
            add(f"few_blocks_causal_D{dim}_Dv{dim_v}", seqlen_q=420, seqlen_k=450, causal=True, dtype=dtype, **few)
            add(f"few_blocks_window_D{dim}_Dv{dim_v}", seqlen_q=300, seqlen_k=333, window=(70, 9), dtype=dtype, **few)
            add(f"few_blocks_sinks_dropout_D{dim}_Dv{dim_v}", seqlen_q=210, seqlen_k=140, dtype=dtype, **few, **both)
            add(f"few_blocks_softcap_D{dim}_Dv{dim_v}", seqlen_q=222, seqlen_k=65, softcap=5.0, dtype=dtype, **few)
    # A wave of thread blocks takes many blocks of keys that meet few queries; whole heads do not fill it.
    for dim in (64, 96, 128):
        for dtype in (F16, BF16):
            short = dict(batch=1, seqlen_q=43, seqlen_k=2100, heads_q=30, heads_k=30, head_dim=dim, dtype=dtype)
            add(f"short_blocks_causal_D{dim}", causal=True, **short)
            add(f"short_blocks_window_D{dim}", window=(600, 30), dropout_p=0.1 if dim == 64 else 0.0, **short)
            short |= dict(seqlen_k=1500)  # 12 blocks, which divide a wave of 132
            add(f"short_blocks_dropout_D{dim}", causal=True, dropout_p=0.1, **short)
            add(f"short_blocks_softcap_D{dim}", causal=True, softcap=7.0, **short)
    for dtype in DTYPES:
        few = dict(batch=1, heads_q=2, heads_k=2, seqlen_k=13, dtype=dtype)
        add("few_keys_many_queries", seqlen_q=5584, **few)
        add("few_keys_many_queries_gaps", seqlen_q=2100, head_dim=128, alibi="per head", layout="gaps", **few)
        add("mostly_blind_many_queries", seqlen_q=2100, causal=True, **few)

    for name, sizes in {
        "no_queries": {"seqlen_q": 0},
        "no_keys": {"seqlen_k": 0},
        "no_tokens": {"seqlen_q": 0, "seqlen_k": 0},
        "no_batch": {"batch": 0},
        "no_heads": {"heads_q": 0},
    }.items():
        for dtype in DTYPES:
            add(name, dtype=dtype, causal=dtype is F16, **sizes)
            add(f"{name}_sinks_dropout", dtype=dtype, causal=dtype is F16, **sizes, **both)
    return cases


CASES = _cases()


def on_devices(cases, devices=DEVICES):
    """pytest parameters (case, device); CUDA has no float32 kernels."""
    return [
        pytest.param(case, device, id=f"{device}-{case}", marks=[pytest.mark.gpu] * (device == "cuda"))
        for device in devices
        for case in cases
        if not (device == "cuda" and case.dtype is F32)
    ]


def randn(*shape, dtype=BF16):
    """On the GPU, of no seed."""
    return torch.randn(shape, dtype=dtype, device="cuda")
