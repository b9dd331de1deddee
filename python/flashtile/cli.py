"""The command line: info, explain, demo, bench, ladder."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    return options.command(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flashtile", description="Exact attention for PyTorch.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    info = commands.add_parser("info", help="what this build holds and what it runs on")
    info.set_defaults(command=_info)

    explain = commands.add_parser("explain", help="which kernel serves a problem, and why")
    for name in ("B", "S_q", "S_k", "H_q", "H_k", "D"):
        explain.add_argument(name, type=_whole(0))
    explain.add_argument("--D_v", type=_whole(0), help="head dimension of V (default: D)")
    explain.add_argument("--dtype", default="bfloat16", choices=("float32", "float16", "bfloat16"))
    explain.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    explain.add_argument("--causal", action="store_true")
    explain.add_argument("--cache", action="store_true", help="keys stand in a cache with room for S_k rows each")
    explain.add_argument("--page-size", type=_whole(1), help="of a cache in pages, in rows")
    explain.set_defaults(command=_explain)

    demo = commands.add_parser("demo", help="is it exact, is it fast, does a model train the same with it?")
    demo.add_argument("--seconds", type=_seconds, default=60, help="of training, both runs together (default: 60)")
    demo.add_argument("--output", type=Path, default=Path("demo.png"), help="where the loss curves are drawn")
    demo.set_defaults(command=_demo)

    bench = commands.add_parser("bench", help="time flashtile against PyTorch's attention")
    bench.add_argument(
        "--suite",
        choices=("forward", "backward", "varlen", "decode", "prefill", "memory", "host", "cpu"),
        help="varlen: ragged batches, forward and backward; decode: one new token over a cache; prefill: many; "
        "memory: bytes at the peak instead of time; host: until a call returns "
        "(default: forward, or cpu without CUDA)",
    )
    bench.add_argument("--dtype", default="bfloat16", choices=("float16", "bfloat16"), help="of the GPU suites")
    bench.add_argument("--full", action="store_true", help="also the lengths between 512, 2048 and 16384")
    bench.add_argument("--quick", action="store_true", help="a few small cases: does everything run?")
    bench.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=MODULE:FUNCTION",
        help="all suites but host and cpu: also time FUNCTION(q, k, v, causal), imported from "
        "MODULE; it takes tensors (B, S, H, D) and returns out, or a tuple with out first, which suite backward "
        "differentiates; suite varlen calls it with tensors (T, H, D) and the keywords cu_seqlens_q, cu_seqlens_k, "
        "max_seqlen_q, max_seqlen_k, causal and scale, suites decode and prefill with q (B, S_q, H, D), caches "
        "(B, S, H, D) and the keywords cache_seqlens and causal; may be given more than once",
    )
    bench.add_argument(
        "--flex",
        action="store_true",
        help="suites forward, backward and decode: also time FlexAttention; compiling it for each case takes long",
    )
    bench.add_argument(
        "--profile", action="store_true", help="time nothing; print what calls consist of, by PyTorch's profiler"
    )
    bench.add_argument("--json", type=Path, metavar="FILE", help="store the results")
    bench.add_argument(
        "--plots", type=Path, metavar="FOLDER", help="also draw the results, measured or stored, as FOLDER/SUITE.svg"
    )
    bench.add_argument("--markdown", type=Path, nargs="+", metavar="FILE", help="measure nothing; print stored results")
    bench.add_argument(
        "--brief", action="store_true", help="with --markdown: one row for each run instead of its table"
    )
    bench.add_argument(
        "--into", type=Path, metavar="PAGE", help="with --markdown: put them between the page's result marks"
    )
    bench.set_defaults(command=_bench)

    ladder = commands.add_parser("ladder", help="attention from the textbook to Hopper: each rung's time, bytes, error")
    for name, what in (
        ("--batch", "(default: 2, or 1 on a CPU)"),
        ("--seqlen", "of K and V (default: 4096, or 1024 on a CPU)"),
        ("--seqlen-q", "of Q (default: as --seqlen; 1 is decoding)"),
        ("--heads", "of Q (default: 16, or 4 on a CPU)"),
        ("--kv-heads", "(default: as --heads)"),
        ("--head-dim", "(default: 128, or 64 on a CPU)"),
    ):
        ladder.add_argument(name, type=_whole(1), help=what)
    ladder.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), help="(default: bfloat16, or float32 on a CPU)"
    )
    ladder.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    ladder.add_argument("--causal", action="store_true")
    ladder.add_argument("--quick", action="store_true", help="a few rounds each: does everything run?")
    ladder.add_argument(
        "--measure", action="store_true", help="also count bytes of DRAM and L2, by Nsight Compute's ncu"
    )
    ladder.add_argument(
        "--once", nargs="+", metavar="KEY", help="no table: run these rungs a single time each, for a profiler"
    )
    ladder.add_argument("--json", type=Path, metavar="FILE", help="store the results")
    ladder.add_argument("--markdown", type=Path, metavar="FILE", help="measure nothing; print stored results")
    ladder.add_argument(
        "--into", type=Path, metavar="PAGE", help="with --markdown: put them between the page's result marks"
    )
    ladder.set_defaults(command=_ladder)
    return parser


def _whole(least: int) -> Callable[[str], int]:
    """The type of an argument that is an int, `least` or above."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"is {text}, expected an int of at least {least}")
        return int(text)

    return number


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"is {text}, expected a number of at least 0")
    return seconds


def _info(options: argparse.Namespace) -> int:
    import flashtile

    print(flashtile.info())
    return 0


def _explain(options: argparse.Namespace) -> int:
    import torch

    import flashtile

    head_dim_v = options.D if options.D_v is None else options.D_v
    rows, cache = (options.B, options.S_k), {}
    try:
        settings = {"dtype": getattr(torch, options.dtype), "device": _device("explain", options.device)}
        if options.cache or options.page_size:
            cache["cache_seqlens"] = options.S_k
        if options.page_size:
            pages = -(-options.S_k // options.page_size)
            rows = options.B * pages, options.page_size
            cache["block_table"] = torch.zeros(options.B, pages, dtype=torch.int32, device=settings["device"])
        q = torch.empty(options.B, options.S_q, options.H_q, options.D, **settings)
        k = torch.empty(*rows, options.H_k, options.D, **settings)
        v = torch.empty(*rows, options.H_k, head_dim_v, **settings)
        print(flashtile.explain(q, k, v, causal=options.causal, **cache))
    except (ValueError, RuntimeError) as error:  # such as of a tensor that no memory holds
        return _refuse(str(error).partition("\n")[0])
    return 0


def _device(command: str, name: str | None) -> torch.device:
    """By default a GPU, where there is one."""
    import torch

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"{command}: --device is {name}, expected cpu or cuda")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"{command}: --device is {name}, and torch sees no CUDA device")
    return torch.device(name)


def _demo(options: argparse.Namespace) -> int:
    if missing := _without_matplotlib("demo", "demo") or _unwritable(options.output):
        return missing
    from flashtile import demo

    return demo.run(options.seconds, options.output)


def _bench(options: argparse.Namespace) -> int:
    if options.profile and (options.json or options.plots or options.suite == "host"):
        return _refuse("bench: --profile times nothing, expected no --json, no --plots and a suite other than host")
    if (options.into or options.brief) and not options.markdown:
        return _refuse("bench: --into or --brief is given, expected --markdown with it")
    if options.plots and (missing := _without_matplotlib("bench --plots", "plot")):
        return missing
    if refused := _unwritable(options.json, options.plots and options.plots / "suite.svg"):
        return refused
    from flashtile.bench import command

    if options.markdown:
        try:
            return command.show_stored(options.markdown, options.into, plots_folder=options.plots, brief=options.brief)
        except (OSError, ValueError) as error:
            return _refuse(error)
    return command.measure(
        options.suite,
        dtype=options.dtype,
        full=options.full,
        quick=options.quick,
        json_path=options.json,
        plots_folder=options.plots,
        peers=options.peer,
        flex=options.flex,
        profile=options.profile,
    )


def _unwritable(*paths: Path | None) -> int:
    """0 where files can be written there, so that nobody measures in vain. Makes their folders."""
    for path in filter(None, paths):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new = not path.exists()
            path.open("a").close()
            if new:
                path.unlink()
        except OSError as error:
            return _refuse(error)
    return 0


def _without_matplotlib(command: str, extra: str) -> int:
    """0 where there is one."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return _refuse(f"{command} draws with matplotlib: pip install 'flashtile[{extra}]'")
    return 0


def _ladder(options: argparse.Namespace) -> int:
    from flashtile.bench.cases import Case
    from flashtile.reference import command

    if options.into and not options.markdown:
        return _refuse("ladder: --into is given, expected --markdown with it")
    if options.markdown:
        try:
            return command.show_stored(options.markdown, options.into)
        except (OSError, ValueError) as error:
            return _refuse(error)
    if options.once and options.json:
        return _refuse("ladder: --once times nothing, expected no --json")
    if refused := _unwritable(options.json):
        return refused
    try:
        device = _device("ladder", options.device)
    except (ValueError, RuntimeError) as error:
        return _refuse(error)
    gpu = device.type == "cuda"
    seqlen = options.seqlen or (4096 if gpu else 1024)
    heads = options.heads or (16 if gpu else 4)
    head_dim = options.head_dim or (128 if gpu else 64)
    case = Case(
        batch=options.batch or (2 if gpu else 1),
        seqlen_q=options.seqlen_q or seqlen,
        seqlen_k=seqlen,
        heads_q=heads,
        heads_k=options.kv_heads or heads,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype=options.dtype or ("bfloat16" if gpu else "float32"),
        causal=options.causal,
    )
    if case.heads_q % case.heads_k:
        return _refuse(f"ladder: --heads is {case.heads_q}, expected a multiple of --kv-heads, {case.heads_k}")
    if options.once is None:
        return command.show(case, device, quick=options.quick, measure=options.measure, json_path=options.json)
    try:
        return command.once(options.once, case, device)
    except ValueError as error:
        return _refuse(error)


def _refuse(reason: object) -> int:
    print(f"flashtile: {reason}", file=sys.stderr)
    return 2
