"""The command line: info, explain, mask, demo, bench, ladder."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._refusal import Refusal

if TYPE_CHECKING:
    import torch

    from flashtile.masks import ColumnMask

PICTURES = (".png", ".svg", ".pdf")  # what matplotlib draws without a further package
DTYPES = ("float32", "float16", "bfloat16")
SIZE_LIMIT = 2**30  # of every size, see docs/contract.md


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        status = options.command(options)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130  # as a shell has it of SIGINT
    except BrokenPipeError:
        _drop_output()  # whoever read it has seen enough
        return 1
    except (Refusal, OSError) as error:
        _drop_output()
        print(f"flashtile: {error}", file=sys.stderr)
        return 2


def _drop_output() -> None:
    """What is still to be written may go nowhere: the interpreter would try again at its end."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flashtile", description="Exact attention for PyTorch.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("info", help="what this build holds and what it runs on").set_defaults(command=_info)
    _add_explain(commands)
    _add_mask(commands)
    _add_demo(commands)
    _add_bench(commands)
    _add_ladder(commands)
    return parser


def _add_explain(commands: Any) -> None:
    explain = commands.add_parser("explain", help="which kernel serves a problem, and why")
    for name, what in (
        ("B", "sequences, the batch"),
        ("S_q", "queries of each sequence"),
        ("S_k", "keys of each sequence; of a cache, its room for them"),
        ("H_q", "heads of the queries"),
        ("H_k", "heads of the keys and values, of which H_q is a multiple"),
        ("D", "head dimension of Q and K"),
    ):
        explain.add_argument(name, type=_whole(0), help=what)
    explain.add_argument("--D_v", type=_whole(0), metavar="D_v", help="head dimension of V (default: D)")
    explain.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="(default: bfloat16)")
    where = explain.add_mutually_exclusive_group()
    where.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    where.add_argument(
        "--gpu",
        metavar="NAME",
        help="a GPU that need not be in this machine, by its name or compute capability: A100, H100, 'RTX 4090', 9.0",
    )
    explain.add_argument("--causal", action="store_true", help="hide the keys that come after a query's own")
    explain.add_argument(
        "--window",
        nargs=2,
        type=_distance,
        metavar=("LEFT", "RIGHT"),
        help="how far keys that each query sees reach on either side of its own; none: all of them; negative: not as "
        "far as its own",
    )
    explain.add_argument("--scale", type=float, help="factor of the scores (default: 1/sqrt(D))")
    explain.add_argument("--softcap", type=float, default=0.0, metavar="BOUND", help="bound of the scores")
    explain.add_argument("--alibi", action="store_true", help="with ALiBi's slopes")
    explain.add_argument("--sinks", action="store_true", help="with a learnable logit for each head")
    explain.add_argument("--dropout", type=float, default=0.0, metavar="P", help="probability that a weight is dropped")
    explain.add_argument("--deterministic", action="store_true", help="with gradients that repeat to the bit")
    explain.add_argument(
        "--varlen", action="store_true", help="a ragged batch: sequences stand one behind the other, without padding"
    )
    explain.add_argument("--cache", action="store_true", help="keys stand in a cache with room for S_k rows each")
    explain.add_argument("--page-size", type=_whole(1), metavar="ROWS", help="of a cache in pages, in rows")
    explain.add_argument(
        "--splits", type=_whole(0), metavar="N", help="of a cache: parts that keys are divided into (default: 0, any)"
    )
    explain.add_argument("--batch-invariant", action="store_true", help="results that depend on no neighbour")
    explain.set_defaults(command=_explain)


# What the numbers behind a kind are, and its mask.
MASKS: dict[str, tuple[str, Callable[[type[ColumnMask], list[int]], ColumnMask]]] = {
    "full": ("S_q S_k", lambda mask, n: mask.full(*n)),
    "causal": ("S_q S_k", lambda mask, n: mask.causal(*n)),
    "document": ("LENGTH ...", lambda mask, n: mask.document(n)),
    "causal_document": ("LENGTH ...", lambda mask, n: mask.causal_document(n)),
    "share_question": ("QUESTION ANSWER ...", lambda mask, n: mask.share_question([(n[0], n[1:])])),
    "sliding_window": ("S WINDOW", lambda mask, n: mask.sliding_window(*n)),
    "global_sliding_window": (
        "S GLOBAL LEFT RIGHT",
        lambda mask, n: mask.global_sliding_window(n[0], n[1], (n[2], n[3])),
    ),
    "prefix_lm": ("S PREFIX", lambda mask, n: mask.prefix_lm(*n)),
    "prefix_document": ("PREFIX LENGTH ...", lambda mask, n: mask.prefix_document(_pairs(n))),
    "causal_blockwise": ("LENGTH ...", lambda mask, n: mask.causal_blockwise(n)),
    "qk_sparse": ("S BEGIN END ...", lambda mask, n: mask.qk_sparse(n[0], _pairs(n[1:]))),
    "chunked": ("S CHUNK", lambda mask, n: mask.chunked(*n)),
    "image_blocks": ("S BEGIN END ...", lambda mask, n: mask.image_blocks(_pairs(n[1:]), n[0])),
}


def _pairs(numbers: list[int]) -> list[tuple[int, int]]:
    if len(numbers) % 2:
        raise Refusal(f"mask: {' '.join(map(str, numbers))} is an odd count of numbers, expected pairs")
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _add_mask(commands: Any) -> None:
    kinds = "; ".join(f"{kind} {sizes}" for kind, (sizes, _) in MASKS.items())
    mask = commands.add_parser("mask", help="what a kind of mask hides, and its picture", epilog=f"kinds: {kinds}")
    mask.add_argument(
        "kind", choices=MASKS, metavar="KIND", help="a constructor of flashtile.masks.ColumnMask, see below"
    )
    mask.add_argument("sizes", type=_whole(0), nargs="*", metavar="SIZE", help="what the kind is made of, see below")
    mask.add_argument("--png", type=Path, metavar="FILE", help="also draw it with matplotlib")
    mask.set_defaults(command=_mask)


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser("demo", help="is it exact, is it fast, does a model train the same with it?")
    demo.add_argument("--seconds", type=_seconds, default=60, help="of training, both runs together (default: 60)")
    demo.add_argument(
        "--output", type=Path, default=Path("demo.png"), help="where the loss curves are drawn (default: demo.png)"
    )
    demo.set_defaults(command=_demo)


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="time flashtile against PyTorch's attention")
    bench.add_argument(
        "--suite",
        choices=[
            *("forward", "backward", "varlen", "masks", "decode", "prefill", "serving", "fp8", "memory", "host", "cpu"),
            *("random", "invariant", "max-logits", "distributed"),
        ],
        help="varlen: ragged batches, forward and backward; masks: FlashMask's kinds of column masks, the same; "
        "decode: one new token over a cache; prefill: many; serving: tokens behind a shared prefix, and chunks of "
        "prompts beside single tokens; fp8: forward of e4m3 numbers, and beside it of 16 bits; memory: bytes "
        "at the peak instead of time; host: until a call returns; random: shapes and options of all kinds, drawn by "
        "--seed, of which the worst are shown; invariant: training, prefill and decoding with batch_invariant and "
        "without; max-logits: forwards, prefill and decoding with return_max_logits and without; distributed: a "
        "sequence on the ranks that torchrun has started, or without it the work of one rank of four (default: "
        "forward, or cpu without CUDA)",
    )
    bench.add_argument(
        "--dtype", default="bfloat16", choices=("float16", "bfloat16"), help="of the GPU suites but random"
    )
    bench.add_argument(
        "--full",
        action="store_true",
        help="also the lengths between 512, 2048 and 16384; of suite masks all kinds, heads and lengths; of suite "
        "random twice the cases",
    )
    bench.add_argument("--seed", type=_whole(0), metavar="N", help="of suite random: which cases (default: 0)")
    bench.add_argument("--quick", action="store_true", help="a few small cases: does everything run?")
    bench.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=MODULE:FUNCTION",
        help="all suites but serving, host, cpu, invariant and max-logits: also time FUNCTION(q, k, v, causal), "
        "imported from MODULE; it takes tensors (B, S, H, D) and returns out, or a tuple with out first, which suite "
        "backward differentiates; suite varlen, and of documents suite masks, call it with tensors (T, H, D) and "
        "the keywords cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal and scale, suites decode and "
        "prefill with q (B, S_q, H, D), caches (B, S, H, D) and the keywords cache_seqlens and causal; suite random "
        "calls it in all these ways, with the keywords window, softcap, alibi_slopes, sinks, dropout_p and "
        "block_table where a case has them and FUNCTION takes them; may be given more than once",
    )
    bench.add_argument(
        "--flex",
        action="store_true",
        help="suites forward, backward, masks, decode and random: also time FlexAttention; compiling it for each case "
        "takes long",
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


def _add_ladder(commands: Any) -> None:
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
    ladder.add_argument("--dtype", choices=DTYPES, help="(default: bfloat16, or float32 on a CPU)")
    ladder.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    ladder.add_argument("--causal", action="store_true")
    ladder.add_argument("--quick", action="store_true", help="a few rounds each: does everything run?")
    ladder.add_argument(
        "--measure", action="store_true", help="also count bytes of DRAM and L2, by Nsight Compute's ncu"
    )
    ladder.add_argument(
        "--once",
        nargs="+",
        metavar="KEY",
        help="no table: run these rungs (standard, flash2, sm90, ...) a single time each, for a profiler",
    )
    ladder.add_argument("--json", type=Path, metavar="FILE", help="store the results")
    ladder.add_argument("--markdown", type=Path, metavar="FILE", help="measure nothing; print stored results")
    ladder.add_argument(
        "--into", type=Path, metavar="PAGE", help="with --markdown: put them between the page's result marks"
    )
    ladder.set_defaults(command=_ladder)


def _whole(least: int) -> Callable[[str], int]:
    """The type of an argument that is a size, `least` or above."""

    def number(text: str) -> int:
        digits = text.lstrip("0") or text[-1:]
        if not text.isdecimal() or len(digits) > 10 or not least <= int(digits) < SIZE_LIMIT:
            raise argparse.ArgumentTypeError(f"is {text}, expected an int from {least} to 2^30 - 1")
        return int(digits)

    return number


def _distance(text: str) -> int | None:
    if text.lower() == "none":
        return None
    return -_whole(0)(text[1:]) if text.startswith("-") else _whole(0)(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"is {text}, expected a number of at least 0")
    return seconds


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _info(options: argparse.Namespace) -> int:
    import flashtile

    print(flashtile.info())
    return 0


def _explain(options: argparse.Namespace) -> int:
    import flashtile

    device = str(_device("explain", options.device)) if options.gpu is None else options.gpu
    if options.gpu is not None and device.split(":")[0] in ("", "cpu", "cuda"):
        raise Refusal(f"explain: --gpu is {device!r}, expected a GPU's name; --device says where tensors are")
    try:
        tensors, named = _problem(options, device)
    except RuntimeError as error:  # of sizes whose product is no int64, or a table that no memory holds
        raise Refusal(f"explain: {_first_line(error)}") from None
    try:
        print(flashtile.explain(*tensors, device=device, **named))
    except (ValueError, RuntimeError) as error:
        raise Refusal(_first_line(error)) from None
    return 0


def _problem(options: argparse.Namespace, device: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The tensors that the numbers stand for, and what goes with them by name. A plan reads the tables of a CPU alone:
    all others have no memory."""
    import torch

    head_dim_v = options.D if options.D_v is None else options.D_v
    cached = options.cache or options.page_size is not None
    for_caches = {"--splits": options.splits is not None}
    for_others = {"--dropout": options.dropout != 0, "--deterministic": options.deterministic}
    for name, given in (for_others if cached else for_caches).items():
        if given:
            raise Refusal(f"explain: {name} is given, expected it {'without' if cached else 'with'} a cache")

    dtype = getattr(torch, options.dtype)
    tables: Any = {"dtype": torch.int32, "device": "cpu" if device.startswith("cpu") else "meta"}
    batch: int = options.B
    queries: tuple[int, ...] = batch, options.S_q
    keys: tuple[int, ...] = batch, options.S_k
    named: dict[str, Any] = {
        "causal": options.causal,
        "window": None if options.window is None else tuple(options.window),
        "scale": options.scale,
        "softcap": options.softcap,
        "batch_invariant": options.batch_invariant or None,
    }
    if options.alibi:
        named["alibi_slopes"] = torch.empty(options.H_q, device="meta")
    if options.sinks:
        named["sinks"] = torch.empty(options.H_q, device="meta")
    if options.varlen:
        queries = (batch * options.S_q,)
        named["cu_seqlens_q"] = torch.arange(batch + 1, **tables) * options.S_q
    if cached:
        named["cache_seqlens"] = torch.full((batch,), options.S_k, **tables)
        named |= {"num_splits": options.splits or 0}
        if options.page_size is not None:
            pages = -(-options.S_k // options.page_size)
            keys = batch * pages, options.page_size
            named["block_table"] = torch.zeros(pages, **tables).expand(batch, pages)
    else:
        named |= {"dropout_p": options.dropout, "seed": 0, "deterministic": options.deterministic or None}
        if options.varlen:
            keys = (batch * options.S_k,)
            named["cu_seqlens_k"] = torch.arange(batch + 1, **tables) * options.S_k
    shapes = (*queries, options.H_q, options.D), (*keys, options.H_k, options.D), (*keys, options.H_k, head_dim_v)
    return [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes], named


def _device(command: str, name: str | None) -> torch.device:
    """By default a GPU, where there is one."""
    import torch

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise Refusal(f"{command}: --device is {name}, expected cpu or cuda")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise Refusal(f"{command}: --device is {name}, and torch sees no CUDA device")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise Refusal(f"{command}: --device is {name}, expected one such as cuda:0") from None
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        raise Refusal(f"{command}: --device is {name}, and torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def _mask(options: argparse.Namespace) -> int:
    if options.png:
        _need_matplotlib("mask --png", "plot")
        if options.png.suffix.lower() != ".png":
            raise Refusal(f"mask: --png is {options.png}, expected a name that ends in .png")
    sizes, make = MASKS[options.kind]
    # A kind takes as many numbers as it has names; with ... behind them any that begin with the first.
    names, given = sizes.split(), len(options.sizes)
    if given < 1 if names[-1] == "..." else given != len(names):
        raise Refusal(
            f"mask: {options.kind} is given {given} {'number' if given == 1 else 'numbers'}, expected {sizes}"
        )
    from flashtile.masks import ColumnMask

    try:
        mask = make(ColumnMask, options.sizes)
        hidden = mask.sparsity()
    except (ValueError, RuntimeError) as error:  # of places beyond the mask, or of a table that no memory holds
        raise Refusal(_first_line(error)) from None
    _need_writable(options.png)
    print(f"{options.kind}: {mask}, {hidden:.1%} hidden")
    print(mask.picture(size=32))
    if options.png:
        mask.plot(options.png)
    return 0


def _demo(options: argparse.Namespace) -> int:
    _need_matplotlib("demo", "demo")
    if options.output.suffix.lower() not in PICTURES and not options.output.is_dir():
        expected = f"a name that ends in {', '.join(PICTURES[:-1])} or {PICTURES[-1]}"
        raise Refusal(f"demo: --output is {options.output}, expected {expected}")
    _need_writable(options.output)
    from flashtile import demo

    return demo.run(options.seconds, options.output)


def _bench(options: argparse.Namespace) -> int:
    if options.profile and (options.json or options.plots or options.suite == "host"):
        raise Refusal("bench: --profile times nothing, expected no --json, no --plots and a suite other than host")
    if (options.into or options.brief) and not options.markdown:
        raise Refusal("bench: --into or --brief is given, expected --markdown with it")
    if options.markdown and options.json:
        raise Refusal("bench: --markdown measures nothing, expected no --json")
    if options.plots:
        _need_matplotlib("bench --plots", "plot")
    _need_writable(options.json, options.plots and options.plots / "suite.svg")
    from flashtile.bench import command, ranks

    if options.markdown or options.suite == "distributed":
        given = dict(full=options.full, peer=options.peer, flex=options.flex, profile=options.profile)
        given |= dict(seed=options.seed is not None, plots=options.plots and not options.markdown)
        where = "--markdown, which measures nothing" if options.markdown else "suite 'distributed', which has none"
        for name in (name for name, is_given in given.items() if is_given):
            raise Refusal(f"bench: --{name} is given with {where}, expected it without")
    if options.suite == "distributed" and not options.markdown:
        return ranks.measure(quick=options.quick, json_path=options.json)
    if options.markdown:
        return command.show_stored(options.markdown, options.into, plots_folder=options.plots, brief=options.brief)
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
        seed=options.seed,
    )


def _need_writable(*paths: Path | None) -> None:
    """An OSError where a file cannot be written there, so that nobody measures in vain. Makes their folders."""
    for path in filter(None, paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        path.open("a").close()
        if new:
            path.unlink()


def _need_matplotlib(command: str, extra: str) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise Refusal(f"{command} draws with matplotlib: pip install 'flashtile[{extra}]'") from None


def _ladder(options: argparse.Namespace) -> int:
    from flashtile.bench.cases import Case
    from flashtile.reference import command

    if options.into and not options.markdown:
        raise Refusal("ladder: --into is given, expected --markdown with it")
    if options.markdown:
        if options.json:
            raise Refusal("ladder: --markdown measures nothing, expected no --json")
        return command.show_stored(options.markdown, options.into)
    if options.once and options.json:
        raise Refusal("ladder: --once times nothing, expected no --json")
    _need_writable(options.json)
    device = _device("ladder", options.device)
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
        raise Refusal(f"ladder: --heads is {case.heads_q}, expected a multiple of --kv-heads, {case.heads_k}")
    if options.once is None:
        return command.show(case, device, quick=options.quick, measure=options.measure, json_path=options.json)
    return command.once(options.once, case, device)
