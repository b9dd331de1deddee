"""The benchmark of e4m3 numbers: its cases, what inputs are rounded to, its bar, its peers, its records. No test looks
at a time."""

import dataclasses
import importlib
import json
import math
import types

import pytest
import torch
from test_bench import EFFORT, timed_cell
from test_bench_found import named
from test_bench_peers import outside_bare

import flashtile
from flashtile.bench import command, fp8, further, plots, report, run, suites, timing
from flashtile.bench.cases import Case, Work, make_inputs
from flashtile.bench.found import Adapted, found_peers
from flashtile.bench.fp8 import E4M3, IN_16_BITS
from flashtile.bench.oracle import RoundedInputsOracle, RoundedOracle, attention_float64
from flashtile.bench.peers import OURS, Peer
from flashtile.cli import main

CPU = torch.device("cpu")
SIZES = (2, 200, 200, 4, 2, 64, 64)
CASES = [Case(*SIZES, causal=causal, work=Work.FP8) for causal in (False, True)]
ROUNDINGS = (fp8.in_blocks, fp8.by_heads, fp8.by_tensors)


def entries_with(peers, case=CASES[1], attention=flashtile.attention):
    (cell,) = run.run_cases([case], CPU, EFFORT, attention, peers)
    return {entry.name: entry for entry in cell.entries}


def by_flashtile(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None):
    """Of FlashAttention-3's signature and rules."""
    assert qv is None and q_descale.shape == k_descale.shape == v_descale.shape == (k.shape[0], k.shape[2])
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    return flashtile.attention(q, k, v, scale=softmax_scale, causal=causal, **descales)


def without_fp8(q, k, v, **options):
    raise RuntimeError("This flash attention build does not support FP8.\nAnd a trace")


def fa3(function):
    rounded = fp8.Rounded(fp8.by_heads, fp8.FlashAttention3(named("flash_attn_interface", flash_attn_func=function)))
    return Peer("FA3 fp8", Adapted("FA3 fp8", rounded), rounding=fp8.by_heads)


def test_the_suite():
    cases, whole = suites.cases("fp8"), suites.cases("fp8", full=True)
    assert len(cases) == len(set(cases)) == 28 and len(whole) == len(set(whole)) == 40 and set(cases) < set(whole)
    assert all(case.work is Work.FP8 and case.batch * case.seqlen_q == 16384 for case in whole)
    squares = [case for case in cases if case.heads_q == case.heads_k]
    assert {case.seqlen_q for case in squares} == {512, 2048, 8192, 16384}
    assert all(case.heads_q * case.head_dim == 2048 for case in squares)
    assert [str(case) for case in cases if case not in squares] == [
        "B8 S2048 H32/8 D128 causal bf16 fp8",
        "B8 S2048 H64/8 D128 causal bf16 fp8",
        "B2 S8192 H32/8 D128 causal bf16 fp8",
        "B2 S8192 H64/8 D128 causal bf16 fp8",
    ]
    of_forward = {dataclasses.replace(case, work=Work.FP8): case.flops for case in suites.cases("forward")}
    assert of_forward.items() <= {case: case.flops for case in cases}.items()


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers_stand_for_the_inputs(rounding, case):
    inputs = make_inputs(case, CPU)
    x = rounding(*inputs[:3])
    numbers = fp8.numbers_of(x, inputs.dout)
    assert x.q.dtype is x.k.dtype is x.v.dtype is E4M3 and numbers.dout is inputs.dout
    assert all(of.shape == given.shape for of, given in zip(numbers, inputs, strict=True))
    found, expected = (attention_float64(*of[:3], case) for of in (numbers, inputs))
    if rounding is fp8.by_tensors:  # it leaves out as large as e4m3 can hold
        assert found.abs().max() <= fp8.LARGEST
        found = found * inputs.v.abs().max() / fp8.LARGEST
    assert (found - expected).norm() < 0.06 * expected.norm()


def test_descales_are_of_blocks_of_heads_or_of_tensors():
    inputs = make_inputs(CASES[0], CPU)[:3]
    shapes = [[descale.shape for descale in rounding(*inputs)[3:]] for rounding in ROUNDINGS]
    assert shapes == [[(2, 4, 2), (2, 2, 2), (2, 2, 2)], [(2, 2)] * 3, [(1, 1)] * 3]
    for rounding in ROUNDINGS[1:]:
        assert all(numbers.float().abs().max() == fp8.LARGEST for numbers in rounding(*inputs)[:3])


def oracle_of(case):
    inputs = make_inputs(case, CPU).one_kv_head()
    numbers = fp8.numbers_of(fp8.in_blocks(*inputs[:3]), inputs.dout)
    return RoundedOracle(numbers, dataclasses.replace(case, batch=1), gradients=False)


def test_the_bar_is_that_of_weights_of_e4m3_and_of_out():
    oracle = oracle_of(Case(2, 3000, 300, 4, 2, 16, 16, work=Work.FP8))
    exact = oracle.exact

    def judged(out):
        verdicts = oracle.judge({"out": out})
        assert [verdict.name for verdict in verdicts] == ["out", "a tile of 128 rows of out"]
        return [verdict.ok for verdict in verdicts]

    assert judged(exact) == judged(exact * 1.03) == [True, True]
    assert judged(exact * 1.05) == [False, True] and judged(exact * 1.07) == [False, False]
    assert judged((exact * 64).to(E4M3)) == [False, False]  # times 64
    tile, row, end = exact.clone(), exact.clone(), exact.clone()
    tile[:, 1280:1408, 1] *= 1.1
    end[:, -20:] *= -1
    row[:, 7, 0, 3] = math.nan
    assert judged(tile) == [True, False] and judged(end)[1] is False and judged(row) == [False, False]
    in_16_bits, in_8_bits = (oracle.judge({"out": exact.to(dtype)})[0] for dtype in (torch.bfloat16, E4M3))
    assert in_16_bits.allowed == 0.04 and in_8_bits.allowed == pytest.approx(0.04 * math.sqrt(2))
    assert in_16_bits.error < 0.01 < in_8_bits.error


def test_tiles_that_see_nothing_are_right():
    oracle = oracle_of(Case(2, 300, 60, 4, 2, 16, 16, causal=True, work=Work.FP8))
    assert all(verdict.ok for verdict in oracle.judge({"out": oracle.exact}))
    wrong = oracle.exact.clone()
    wrong[:, 5] += 1e-6
    assert [verdict.ok for verdict in oracle.judge({"out": wrong})] == [True, False]
    wrong[:, 5] = math.nan
    assert not any(verdict.ok for verdict in oracle.judge({"out": wrong}))


def test_the_bar_by_the_inputs_is_that_of_rounding_them():
    case = Case(1, 200, 300, 2, 1, 16, 16, work=Work.FP8)
    given = make_inputs(case, CPU)
    numbers = fp8.numbers_of(fp8.in_blocks(*given[:3]), given.dout)
    oracle = RoundedInputsOracle(numbers, case, gradients=False, given=given)
    of_given = attention_float64(*given[:3], case)
    by_rounding = (oracle.exact - of_given).abs().max().item()
    out, of_tile = oracle.judge({"out": oracle.exact})
    assert (out.name, of_tile.name) == ("out", "a tile of 128 rows of out")
    assert out.error == out.torch_error == by_rounding and out.ok and of_tile.error == 0
    assert out.allowed == pytest.approx(2 * by_rounding + of_given.abs().max().item() / 16)
    # Who does not round is right by the inputs, and not by the numbers.
    out, of_tile = oracle.judge({"out": of_given})
    assert out.error == 0 and out.ok and of_tile.error > 0.02


@pytest.mark.parametrize("case", [*CASES, dataclasses.replace(CASES[0], dtype="float16")], ids=str)
def test_all_are_checked_and_timed(case):
    mine = further.outside_peer("Mine=test_bench_peers:outside_bare")
    found = entries_with([mine, fa3(by_flashtile)], case)
    assert list(found) == [OURS, IN_16_BITS, "SDPA", "Mine", "FA3 fp8"]
    for name, entry in found.items():
        assert not entry.wrong and entry.timing.rounds == EFFORT.min_rounds, entry
        assert len(entry.verdicts) == (2 if name in (OURS, "FA3 fp8") else 1)
        assert entry.verdicts[0].name == "out"


def test_on_a_gpu_the_fastest_backend_of_16_bits_runs_beside():
    names = [peer.name for peer in fp8.fp8_peers_of("cuda", outside_bare, CASES[0])]
    assert names == [OURS, IN_16_BITS, "SDPA cuDNN"]
    for taken in names:
        with pytest.raises(ValueError, match="expected a name that is not taken"):
            further.further_peers("fp8", [f"{taken}=math:sqrt"])


def test_inputs_are_rounded_once_for_a_case():
    rounded, seen = [], []
    attention = fp8.Rounded(lambda *tensors: rounded.append(tensors) or "numbers", lambda *given: seen.append(given))
    for case in (CASES[0], CASES[0], CASES[1]):
        attention(1, 2, 3, case)
    assert rounded == [(1, 2, 3)] * 2 and seen == [("numbers", case) for case in (CASES[0], CASES[0], CASES[1])]


def test_a_build_without_fp8_is_said_and_not_timed():
    found = entries_with([fa3(without_fp8)])
    assert found["FA3 fp8"] == run.Entry("FA3 fp8", refusal="This flash attention build does not support FP8.")
    assert found[OURS].timing


class Symbol:
    """A tensor of a graph."""

    def __init__(self, dim=(), stride=(), data_type=None):
        self.dim, self.stride, self.data_type, self.output = dim, stride, data_type, False

    def set_output(self, output):
        self.output = output
        return self

    def set_dim(self, dim):
        self.dim = dim
        return self

    def set_stride(self, stride):
        self.stride = stride
        return self

    def set_data_type(self, data_type):
        self.data_type = data_type
        return self


class Graph:
    """cuDNN's graph of one sdpa_fp8, with its documented steps in their order."""

    STEPS = ("validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans")
    TYPES = types.MappingProxyType({E4M3: "e4m3", torch.float32: "f32"})

    def __init__(self, *, io_data_type, intermediate_data_type, compute_data_type, handle):
        assert (io_data_type, intermediate_data_type, compute_data_type) == ("e4m3", "f32", "f32")
        self.handle, self.done, self.tensors = handle, [], {}

    def __getattr__(self, name):
        assert name == self.STEPS[len(self.done)]
        return lambda *given: self.done.append(name)

    def tensor(self, *, dim, stride, data_type, name):
        self.tensors[name] = Symbol(dim, stride, data_type)
        return self.tensors[name]

    def sdpa_fp8(self, *, attn_scale, use_causal_mask, generate_stats, **tensors):
        assert tensors == self.tensors and generate_stats is False
        self.scale, self.causal = attn_scale, use_causal_mask
        self.out, *amax = self.written = [Symbol() for _ in range(3)]
        return self.out, None, *amax

    def get_workspace_size(self):
        assert self.done == list(self.STEPS)
        return 0

    def execute(self, buffers, workspace, handle):
        assert handle == self.handle == "handle" and workspace.dtype is torch.uint8 and workspace.numel()
        for symbol, buffer in buffers.items():
            described = list(buffer.shape), list(buffer.stride()), self.TYPES[buffer.dtype]
            assert described == (symbol.dim, symbol.stride, symbol.data_type)
        assert all(symbol.output for symbol in self.written)
        given = {name: buffers[symbol].float() for name, symbol in self.tensors.items()}
        q, k, v = (given[name] * given[f"descale_{name}"] for name in "qkv")
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = q @ k.mT * self.scale
        if self.causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        rounded = (weights * given["scale_s"]).to(E4M3).float() * given["descale_s"]
        buffers[self.out].copy_(rounded @ v / weights.sum(-1, keepdim=True) * given["scale_o"])


def cudnn(graph=Graph):
    return named(
        "cudnn",
        data_type=types.SimpleNamespace(FP8_E4M3="e4m3", FLOAT="f32"),
        heur_mode=types.SimpleNamespace(A="A", FALLBACK="fallback"),
        create_handle=lambda: "handle",
        set_stream=lambda *, handle, stream: None,
        pygraph=graph,
    )


def cudnn_peer(graph):
    attention = Adapted("cuDNN fp8", fp8.Rounded(fp8.by_tensors, fp8.Cudnn(cudnn(graph))))
    return Peer("cuDNN fp8", attention, rounding=fp8.by_tensors)


@pytest.fixture
def a_stream(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=7))


@pytest.mark.usefixtures("a_stream")
def test_cudnn_is_planned_once_for_a_case_and_writes_e4m3():
    graphs = []
    peer = cudnn_peer(lambda **given: graphs.append(Graph(**given)) or graphs[-1])
    for case in [*CASES, CASES[0]]:
        entry = entries_with([peer], case)["cuDNN fp8"]
        assert entry.timing and not entry.wrong, entry
        assert entry.verdicts[0].allowed == pytest.approx(0.04 * math.sqrt(2))
    assert len(graphs) == 3


@pytest.mark.usefixtures("a_stream")
def test_cudnn_serves_a_case_again_after_another_that_it_refused():
    class Refusing(Graph):
        def check_support(self):
            if self.causal:
                raise RuntimeError("No valid engine configs\nand a trace")
            self.done.append("check_support")

    peer = cudnn_peer(Refusing)
    for case in (*CASES, *CASES):
        entry = entries_with([peer], case)["cuDNN fp8"]
        assert entry.refusal == ("No valid engine configs" if case.causal else "")
        assert case.causal or (entry.timing and not entry.wrong)


def test_packages_of_8_bits_are_looked_for_in_this_suite_alone(monkeypatch):
    modules = {"cudnn": cudnn(), "flash_attn_interface": named("flash_attn_interface", flash_attn_func=by_flashtile)}

    def import_module(name):
        if name not in modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])
        return modules[name]

    monkeypatch.setattr(importlib, "import_module", import_module)
    peers, versions = found_peers("fp8", "cuda")
    assert [peer.name for peer in peers] == list(versions) == ["FA3 fp8", "cuDNN fp8"]
    assert [peer.rounding for peer in peers] == [fp8.by_heads, fp8.by_tensors]
    assert not entries_with(peers[:1])["FA3 fp8"].wrong
    assert list(found_peers("decode", "cuda")[1]) == ["FA3"]
    del modules["cudnn"]
    assert list(found_peers("fp8", "cuda")[1]) == ["FA3 fp8"]


def test_measure_stores_what_it_shows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(timing, "QUICK_EFFORT", EFFORT)
    path = tmp_path / "fp8.json"
    assert command.measure("fp8", quick=True, json_path=path) == 0
    shown, record = capsys.readouterr().out, json.loads(path.read_text())
    assert f"/ {IN_16_BITS}" in shown
    for case, cell in zip(suites.quick("fp8"), record["cells"], strict=True):
        assert cell["name"] == str(case) and case.shape_name in shown and cell["flops"] == case.flops
        assert {OURS, IN_16_BITS} <= {name for name, of in cell["results"].items() if "tflops" in of}
    assert record["summary"][IN_16_BITS]["cells"] == len(record["cells"])


def test_what_is_wrong_in_8_bits_fails_the_run(capsys, monkeypatch):
    def wrong(q, k, v, **options):
        return flashtile.attention(q, k, v, **options) * (1.1 if q.dtype is E4M3 else 1)

    monkeypatch.setattr(timing, "CPU_EFFORT", EFFORT)
    monkeypatch.setattr(timing, "CUDA_EFFORT", EFFORT)
    assert command.measure("fp8", cases=CASES, attention=wrong) == 1
    shown = capsys.readouterr().out
    assert "flashtile is WRONG on" in shown and "a tile of 128 rows of out is off by" in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_the_whole_suite_without_a_gpu_is_refused():
    with pytest.raises(ValueError, match="suite fp8 needs a CUDA device, and torch sees none; try --quick"):
        command.measure("fp8")


def test_flashtile_in_16_bits_is_no_peer_of_the_summary(tmp_path, capsys):
    cells = [
        timed_cell(dataclasses.replace(CASES[0], seqlen_q=s, seqlen_k=s, heads_q=h), **of)
        for s, h, of in (
            (512, 2, {OURS: 1e-5, IN_16_BITS: 0.5e-5, "SDPA cuDNN": 2e-5, "cuDNN fp8": 1.5e-5}),
            (2048, 4, {OURS: 1e-5, IN_16_BITS: 2e-5, "SDPA cuDNN": 3e-5, "cuDNN fp8": None}),
        )
    ]
    machine = {"device": "a GPU", "date": "2026-01-02", "flashtile": "0", "commit": "", "torch": "0"}
    record = report.to_record("fp8", machine, cells)
    assert record["summary"]["best peer"]["min"] == pytest.approx(1.5) and IN_16_BITS in record["summary"]
    report.write(tmp_path / "fp8.json", record)
    assert main(["bench", "--brief", "--markdown", str(tmp_path / "fp8.json")]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == ["| fp8 | a GPU | SDPA cuDNN, cuDNN fp8 | 2.12× | 1.50× | 2 |"]
    figure = plots.figure_of(record)
    assert figure.rows == ["full"] and figure.columns == ["D 64"] and figure.axis == plots.LENGTH
    panel = figure.panels["full", "D 64"]
    assert panel.places == ["512", "2048\nH 4/2"] and panel.curve == {"512"}
    assert plots.figure_of(record | {"machine": machine | {"matmul_tflops": 700.0}}).roof == (
        "an 8192³ bf16 matmul in this run: 700",
        700.0,
    )
    assert len({plots.style_of(name, figure.names) for name in figure.names}) == 4


@pytest.mark.gpu
@pytest.mark.usefixtures("much_memory")
def test_on_a_gpu(tmp_path):
    path = tmp_path / "gpu.json"
    assert command.measure("fp8", quick=True, json_path=path) == 0
    for cell in json.loads(path.read_text())["cells"]:
        timed = {name for name, result in cell["results"].items() if "median_us" in result}
        assert {OURS, IN_16_BITS} <= timed, cell
