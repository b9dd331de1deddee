"""Further peers of the benchmark, a user's own and FlexAttention: they are checked and timed with the others, and what
they do not serve is said."""

import dataclasses
import functools
import itertools
import json

import pytest
import torch
from functorch.compile import make_boxed_func
from test_bench import CPU, EFFORT, TINY
from torch._dynamo.backends.common import aot_autograd

import flashtile
from flashtile._refusal import Refusal
from flashtile.bench import command, further, report, run
from flashtile.bench.cases import Case, Work, make_inputs, visible
from flashtile.bench.peers import OURS, Peer, contestant, peers_of


def outside_bare(q, k, v, causal):
    # TINY's mask is not the one that is_causal stands for, so it is written out.
    assert isinstance(causal, bool)
    keep = visible(Case(1, q.shape[1], k.shape[1], 1, 1, 8, 8, causal=causal), q.device)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep, enable_gqa=True).transpose(1, 2)


def outside_tuple(q, k, v, causal):
    return outside_bare(q, k, v, causal), "lse"


outside_compiled = torch.compile(
    outside_bare, backend=aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward))
)


def outside_unmasked(q, k, v, causal):
    return outside_bare(q, k, v, False)


def outside_heads_first(q, k, v, causal):
    return outside_bare(q, k, v, causal).transpose(1, 2)


def outside_nothing(q, k, v, causal):
    return None


def outside_silent_refusal(q, k, v, causal):
    raise NotImplementedError


NOT_CALLABLE = 3


def entries_with(peers, case=TINY[0]):
    import flashtile

    (cell,) = run.run_cases([case], CPU, EFFORT, flashtile.attention, peers)
    return {entry.name: entry for entry in cell.entries}


@pytest.mark.parametrize("function", ["outside_bare", "outside_tuple"])
def test_an_outside_peer_is_checked_and_timed_with_the_others(function):
    (peer,) = further.further_peers("forward", [f"Mine={__name__}:{function}"])
    found = entries_with([peer])
    assert list(found) == [OURS, "SDPA", "Mine"]
    assert [verdict.name for verdict in found["Mine"].verdicts] == ["out"]
    assert {entry.timing.rounds for entry in found.values()} == {EFFORT.min_rounds}


def test_an_outside_peer_that_is_wrong_is_not_timed():
    found = entries_with([further.outside_peer(f"Mine={__name__}:outside_unmasked")])
    assert found["Mine"].wrong and found["Mine"].timing is None
    assert found["SDPA"].timing


@pytest.mark.parametrize(
    "function, refusal",
    [
        ("outside_silent_refusal", "NotImplementedError"),
        ("outside_heads_first", r"its function returned shape (2, 4, 9, 8), expected (2, 9, 4, 8)"),
        ("outside_nothing", "its function returned NoneType, expected a tensor"),
    ],
)
def test_an_outside_peer_that_does_not_serve_a_case_is_said_and_not_timed(function, refusal):
    found = entries_with([further.outside_peer(f"Mine={__name__}:{function}")])
    assert found["Mine"] == run.Entry("Mine", refusal=refusal)
    assert found["SDPA"].timing


def test_an_outside_peer_is_not_asked_for_a_window():
    case = Case.square(1, 16, 2, 16, dtype="float32", window=(2, 0))
    found = entries_with([further.outside_peer(f"Mine={__name__}:outside_bare")], case)
    assert "its function has no argument window" in found["Mine"].refusal


@pytest.mark.parametrize(
    "text, message",
    [
        ("Mine", "--peer is 'Mine', expected NAME=MODULE:FUNCTION"),
        ("Mine=math", "--peer is 'Mine=math', expected NAME=MODULE:FUNCTION"),
        ("=math:sqrt", "--peer is '=math:sqrt', expected NAME=MODULE:FUNCTION"),
        ("Mine=no_such:f", "has module 'no_such', expected one that can be imported (ModuleNotFoundError: No module"),
        ("Mine=..math:f", "has module '..math', expected one that can be imported (TypeError: "),
        ("Mine=math:nothing", "finds nothing in 'math', expected a function"),
        (f"Mine={__name__}:NOT_CALLABLE", f"finds 3 in {__name__!r}, expected a function"),
        ("SDPA FA2=math:sqrt", "is named 'SDPA FA2', expected a name that is not taken"),
        ("best peer=math:sqrt", "is named 'best peer', expected a name that is not taken"),
    ],
)
def test_a_wrong_peer_is_refused_before_anything_runs(text, message):
    with pytest.raises(Refusal, match=r"^bench: --peer ") as refusal:
        command.measure("forward", peers=[text])
    assert message in str(refusal.value)


def test_two_peers_of_one_name_are_refused():
    with pytest.raises(ValueError, match="is named 'Mine', expected a name that is not taken"):
        further.further_peers("forward", ["Mine=math:sqrt", "Mine=math:exp"])


@pytest.mark.parametrize(
    "suite, argument, options",
    [
        ("host", "--flex", {"flex": True}),
        ("cpu", "--flex", {"flex": True}),
        ("host", "--peer", {"peers": ["Mine=math:sqrt"]}),
        ("cpu", "--peer", {"peers": ["Mine=math:sqrt"]}),
    ],
)
def test_suites_that_take_no_further_peers(suite, argument, options):
    with pytest.raises(Refusal, match=f"{argument} is given with suite '{suite}', expected suite 'forward' or"):
        command.measure(suite, **options)


def test_a_compiled_peer_is_differentiated_again_and_again():
    """Compiled by a backward that frees its graph, it would refuse the timed ones, which keep theirs."""
    found = entries_with([further.outside_peer(f"Mine={__name__}:outside_compiled")], TINY[1])
    assert not found["Mine"].wrong and found["Mine"].timing


@pytest.mark.parametrize("target", [f"{__name__}:outside_bare", "flashtile.bench.further:deterministic"])
def test_a_further_peer_is_differentiated_in_the_backward_suite(target):
    (peer,) = further.further_peers("backward", [f"Mine={target}"])
    case = Case.square(1, 32, 2, 16, dtype="float32", causal=True, work=Work.BACKWARD)
    inputs = make_inputs(case, CPU)
    expected = contestant(peers_of("cpu", flashtile.attention)[0], inputs, case).call()
    for found, exact in zip(contestant(peer, inputs, case).call(), expected, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("suite", ["forward", "backward"])
def test_flex_is_there_only_if_asked_for(suite):
    assert further.further_peers(suite) == []
    assert [peer.name for peer in further.further_peers(suite, ["Mine=math:sqrt"], flex=True)] == ["Flex", "Mine"]


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(5, 5), (3, 7), (7, 3)])
def test_flex_gets_the_contracts_mask(seqlen_q, seqlen_k):
    rows, columns = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)[None, :]
    for causal, left, right in itertools.product((False, True), (None, 0, 1), (None, 0, 2)):
        case = Case(1, seqlen_q, seqlen_k, 1, 1, 8, 8, causal=causal, window=(left, right))
        seen = further.mask_function(case)
        assert (seen is None) == ((causal, left, right) == (False, None, None))
        if seen:
            assert torch.equal(seen(None, None, rows, columns), visible(case, CPU)), case


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_is_compiled_once_for_a_case_and_gets_grouped_heads(monkeypatch):
    compiled = []
    compile_others = torch.compile  # FlexAttention that is not compiled calls it too

    def without_compiling(function, **options):
        if function is not further.flex_attention:
            return compile_others(function, **options)
        compiled.append(options)
        return function

    monkeypatch.setattr(torch, "compile", without_compiling)
    flex = Peer("Flex", further.FlexAttention())
    for case in (TINY[0], Case.square(1, 16, 2, 16, dtype="float32"), TINY[0]):
        found = entries_with([flex], case)
        assert not found["Flex"].wrong and found["Flex"].timing
    assert compiled == [{"dynamic": False, "fullgraph": True}] * 3


def flex_by_sdpa(q, k, v, block_mask, enable_gqa):
    """In FlexAttention's place where it is differentiated, for which it has no kernel on a CPU."""
    keep = None
    if block_mask is not None:
        rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
        keep = block_mask.mask_mod(None, None, rows, columns)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep, enable_gqa=enable_gqa)


def test_flex_compiles_forward_and_backward_once_for_a_case_and_is_timed_on_a_graph_that_is_kept(monkeypatch):
    graphs = []

    def compile_graph(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    # Really compiled, if only to the same operations: a compiled backward may refuse a graph that is kept.
    compiled_as = functools.partial(torch.compile, flex_by_sdpa, backend=aot_autograd(fw_compiler=compile_graph))
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled_as(**options))
    flex = Peer("Flex", further.FlexAttention())
    forward, backward = TINY
    full = dataclasses.replace(backward, causal=False)
    for case, compiled in ((backward, 2), (full, 2), (forward, 1), (backward, 2)):
        found = entries_with([flex], case)
        assert not found["Flex"].wrong and found["Flex"].timing
        assert len(graphs) == compiled, case
        graphs.clear()


def test_flex_that_has_no_backward_is_said_and_not_timed():
    found = entries_with([Peer("Flex", further.FlexAttention())], TINY[1])
    assert found["Flex"].refusal.startswith("FlexAttention: ") and found["Flex"].timing is None
    assert found["SDPA"].timing


class BrokenBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        return q.clone()

    @staticmethod
    def backward(ctx, dout):
        raise TypeError("no such tile\nand a long trace")


def broken_forward(q, k, v, **options):
    raise TypeError("no such tile\nand a long trace")


def broken_backward(q, k, v, **options):
    return BrokenBackward.apply(q, k, v)


@pytest.mark.parametrize("broken, case", [(broken_forward, TINY[0]), (broken_backward, TINY[1])])
def test_flex_that_does_not_compile_is_said_and_not_timed(broken, case, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: broken)
    found = entries_with([Peer("Flex", further.FlexAttention())], case)
    assert found["Flex"] == run.Entry("Flex", refusal="FlexAttention: TypeError: no such tile")
    assert found["SDPA"].timing


def test_flex_serves_a_case_again_after_another_that_it_refused(monkeypatch):
    compiled = iter((flex_by_sdpa, broken_backward, flex_by_sdpa))
    monkeypatch.setattr(torch, "compile", lambda function, **options: next(compiled))
    flex = Peer("Flex", further.FlexAttention())
    found = [entries_with([flex], case)["Flex"] for case in (TINY[0], TINY[1], TINY[0])]
    assert [bool(entry.timing) for entry in found] == [True, False, True]


@pytest.mark.gpu
@pytest.mark.parametrize("suite", ["forward", "backward"])
def test_further_peers_on_a_gpu(suite, tmp_path):
    path = tmp_path / "gpu.json"
    outside = f"Mine={__name__}:outside_bare"
    assert command.measure(suite, quick=True, json_path=path, peers=[outside], flex=True) == 0
    record = json.loads(path.read_text())
    for name in (report.BEST_PEER, report.OF_MATMUL):
        assert (name in record["summary"]) == (suite == "forward")
    for cell in record["cells"]:
        assert list(cell["results"])[-2:] == ["Flex", "Mine"]
        assert "median_us" in cell["results"]["Mine"]
        assert "median_us" in cell["results"]["Flex"] or "refusal" in cell["results"]["Flex"]
