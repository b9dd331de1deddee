"""The benchmark of options, layouts and pages: what a case says of them, the oracle, who is asked for what."""

import dataclasses
import itertools
import types

import pytest
import torch
from test_bench import CPU, EFFORT

import flashtile
from flashtile.bench import decode, further, options, rivals, run
from flashtile.bench.cases import TRAINING, Case, Work, count_visible, make_inputs, visible
from flashtile.bench.oracle import attention_float64, attention_sdpa, results
from flashtile.bench.peers import OURS, PLAIN, Peer, contestant

WINDOW = {"causal": True, "window": (6, 0)}
GIVEN = ({"softcap": 2.0}, {"alibi": True}, {"sinks": True}, WINDOW, {"softcap": 2.0, "alibi": True, "sinks": True})
DENSE = [Case(2, 21, 33, 4, 2, 16, 8, dtype="float32", causal=True, **given) for given in map(dict.copy, GIVEN[:3])]
DENSE += [dataclasses.replace(DENSE[0], softcap=0.0, **WINDOW), dataclasses.replace(DENSE[0], alibi=True, sinks=True)]
RAGGED = [Case.ragged((5, 17, 2), 4, 2, 16, dtype="float32", **given) for given in GIVEN]
PAGED = [Case.prefill(2, 8, 37, 4, 2, 16, dtype="float32", page_size=16), Case.decode(3, 37, 4, 2, 16, page_size=16)]
PAGED[1] = dataclasses.replace(PAGED[1], dtype="float32")


def entries_with(peers, case, attention=rivals.attention_of_any):
    (cell,) = run.run_drawn_cases([case], CPU, EFFORT, attention, peers)
    return {entry.name: entry for entry in cell.entries}


def test_a_case_names_its_options():
    case = Case.square(1, 8, 2, 16, causal=True, window=(3, 0), softcap=30.0, alibi=True, sinks=True, dropout_p=0.1)
    assert case.mask_name == "causal + window 3,0 + softcap 30 + ALiBi + sinks + dropout 0.1"
    assert dataclasses.replace(case, causal=False, window=None).plain().mask_name == "full"
    assert Case.square(1, 8, 2, 16, sinks=True).mask_name == "full + sinks"
    assert case.plain() == Case.square(1, 8, 2, 16, causal=True, window=(3, 0))
    assert str(PAGED[0]) == "B2 S8/37 H4/2 D16 page 16 causal f32 prefill"


def test_a_case_is_asked_for_what_it_has_alone():
    case = Case.square(1, 8, 6, 16, causal=True)
    assert options.arguments(case, CPU) == {} and options.words(case) == ""
    options_of_all = {"softcap": 30.0, "alibi": True, "sinks": True, "dropout_p": 0.1}
    given = dataclasses.replace(case, window=(3, 0), columns="document", **options_of_all)
    found = options.arguments(given, CPU)
    assert list(found) == options.names(given) == list(options.WORDS)
    assert options.words(given, served=["window", "mask", "sinks"]) == "softcap and ALiBi and dropout"
    for name in ("alibi_slopes", "sinks"):
        assert found[name].shape == (6,) and found[name].dtype == torch.float32
        assert found[name] is options.arguments(given, CPU)[name]
    assert found["alibi_slopes"][-1] == 2**-8 and found["sinks"].max() == found["sinks"][-1] == 4


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(3, 3), (2, 5), (5, 2)])
def test_pairs_are_counted_as_the_mask_has_them(seqlen_q, seqlen_k):
    for causal, left, right in itertools.product((False, True), (None, 0, 1, 9), (None, 0, 2, 9)):
        case = Case(3, seqlen_q, seqlen_k, 1, 1, 8, 8, causal=causal, window=(left, right))
        assert count_visible(case) == int(visible(case, CPU).sum()), case


def test_flops_of_windows_and_chunks_are_those_of_pairs_that_see_each_other():
    chunk = Case(2, 24, 64, 4, 2, 16, 16, causal=True)
    assert chunk.flops == 4 * 2 * 4 * (24 * 40 + 24 * 25 // 2) * 16
    ragged = Case.ragged((5, 3), 4, 2, 16, causal=True, window=(1, 0))
    assert ragged.flops == 4 * 4 * (2 * 5 - 1 + 2 * 3 - 1) * 16


@pytest.mark.parametrize("case", [*DENSE, *RAGGED], ids=str)
def test_the_oracle_knows_every_option(case):
    """flashtile's float32 results are those of the formula in float64, for all heads of a problem and for its last."""
    case = dataclasses.replace(case, work=Work.BACKWARD)
    inputs = make_inputs(case, CPU)
    ours = next(peer for peer in rivals.rivals_of("cpu", rivals.attention_of_any, case) if peer.name == OURS)
    found = results(ours.attention, inputs, case, gradients=True)
    judge = run._Judge(inputs, case)
    assert [verdict.ok for verdict in judge(found)] == [True] * 4
    plain = results(ours.attention, inputs, case.plain(), gradients=True)
    assert all(verdict.ok for verdict in judge(plain)) == (case == case.plain())
    if case.lengths is None:
        exact = results(attention_float64, inputs, case, gradients=True)
        for name, tensor in found.items():
            torch.testing.assert_close(tensor.double(), exact[name].double(), atol=1e-5, rtol=1e-5)


def test_sdpa_serves_alibi_by_a_mask_and_refuses_what_none_can_say(monkeypatch):
    for case in (DENSE[1], dataclasses.replace(DENSE[3], alibi=True)):
        inputs = make_inputs(case, CPU)[:3]
        torch.testing.assert_close(
            attention_sdpa(*inputs, case).double(), attention_float64(*inputs, case), atol=1e-5, rtol=1e-5
        )
    for case, name in ((DENSE[0], "softcap"), (DENSE[2], "sinks")):
        with pytest.raises(NotImplementedError, match=f"SDPA has no argument for {name}"):
            attention_sdpa(*make_inputs(case, CPU)[:3], case)
    monkeypatch.setattr("flashtile.bench.oracle.MASK_LIMIT", 21 * 33)
    attention_sdpa(*make_inputs(DENSE[3], CPU)[:3], DENSE[3])
    with pytest.raises(NotImplementedError, match=r"its mask would take more than .* GiB"):
        attention_sdpa(*inputs, DENSE[1])


@pytest.mark.parametrize("case", [*DENSE, *RAGGED, *PAGED], ids=str)
def test_the_plain_kernel_is_timed_beside_options(case):
    found = entries_with([], case)
    assert (PLAIN in found) == (case != case.plain())
    for entry in (found[OURS], found.get(PLAIN, found[OURS])):
        assert entry.verdicts and not entry.wrong and entry.timing


@pytest.mark.parametrize("work", TRAINING)
def test_dropout_is_timed_and_judged_without_it(work):
    seen = []

    def watched(q, k, v, **arguments):
        seen.append(arguments.get("dropout_p", 0.0))
        return flashtile.attention(q, k, v, **arguments)

    case = Case.square(1, 40, 2, 16, dtype="float32", dropout_p=0.5, work=work)
    found = entries_with([], case, watched)
    assert list(found) == [OURS, PLAIN, "SDPA"]
    assert all(entry.timing and not entry.wrong for entry in found.values())
    assert seen[:2] == [0.0, 0.5] and {0.0, 0.5} == set(seen)


def test_what_serves_no_dropout_is_not_timed():
    def without(q, k, v, case):
        if case.dropout_p:
            raise NotImplementedError("no dropout")
        return attention_sdpa(q, k, v, case)

    found = entries_with([Peer("Mine", without)], Case.square(1, 40, 2, 16, dtype="float32", dropout_p=0.5))
    assert found["Mine"].refusal == "no dropout" and found["Mine"].timing is None


def test_an_option_that_is_forgotten_is_wrong():
    def forgetful(q, k, v, *, sinks=None, **arguments):
        return flashtile.attention(q, k, v, **arguments)

    found = entries_with([], DENSE[2], forgetful)
    assert found[OURS].wrong and found[PLAIN].timing


def test_memory_may_lie_with_its_heads_first():
    seen = []

    def spy(q, k, v, case):
        seen.append((q, k, v))
        return attention_sdpa(q, k, v, case)

    for work in TRAINING:
        case = Case(2, 5, 7, 4, 2, 16, 8, dtype="float32", work=work)
        inputs = make_inputs(case, CPU)
        peer = Peer("spy", spy, heads_first=True)
        contestant(peer, inputs, case).call()
        for found, given in zip(seen[-1], inputs[:3], strict=True):
            assert torch.equal(found, given) and found.transpose(1, 2).is_contiguous()
        assert peer.laid_out(inputs).dout.transpose(1, 2).is_contiguous()
        entry = entries_with([peer], case)["spy"]
        assert not entry.wrong and entry.timing


def test_who_runs_on_a_gpu():
    def names(case):
        return [peer.name for peer in rivals.rivals_of("cuda", rivals.attention_of_any, case)]

    sdpa = ["SDPA FA2", "SDPA cuDNN", "SDPA efficient", "SDPA cuDNN BHSD"]
    assert names(Case.square(1, 8, 2, 16)) == [OURS, *sdpa]
    assert names(DENSE[0]) == [OURS, PLAIN, *sdpa]
    assert names(RAGGED[1])[:2] == [OURS, PLAIN] and not {*names(RAGGED[1])} & {*sdpa}
    assert names(PAGED[0]) == [OURS, "SDPA FA2"]
    assert names(PAGED[1]) == [OURS, "SDPA FA2", "SDPA cuDNN"]
    chunk = Case(1, 8, 20, 2, 2, 16, 16, dtype="float32", causal=True)
    for case in (chunk, Case(1, 8, 8, 2, 2, 16, 16, causal=True)):
        fa2 = rivals.rivals_of("cuda", rivals.attention_of_any, case)[1]
        assert (fa2.attention is decode.attention_lower_right) == (case is chunk)


def test_plans_are_explained_for_every_kind():
    for case in (DENSE[0], RAGGED[2], *PAGED):
        said = rivals.explained(case, *make_inputs(case, CPU)[:3])
        assert "\n  kernel " in said and "\n  why " in said and "on cpu" in said


def takes_nothing(q, k, v, causal):
    return attention_sdpa(q, k, v, Case.square(1, q.shape[1], 1, q.shape[-1], causal=causal))


def takes_softcap(q, k, v, causal, *, softcap=0.0):
    return flashtile.attention(q, k, v, causal=causal, softcap=softcap)


def takes_all(q, k, v, causal=None, **arguments):
    if causal is not None:
        arguments["causal"] = causal
    return rivals.attention_of_any(q, k, v, **arguments)


def takes_caches(q, k_cache, v_cache, *, cache_seqlens, causal):
    raise AssertionError("not to be called with pages")


def takes_pages(q, k_pages, v_pages, *, cache_seqlens, causal, block_table):
    assert k_pages.shape[1] == 16 and block_table.shape == (q.shape[0], 3) and cache_seqlens.tolist()[0] == 37
    return flashtile.attention_kvcache(
        q, k_pages, v_pages, cache_seqlens=cache_seqlens, causal=causal, block_table=block_table
    )


def outside(function, case):
    return entries_with([further.outside_peer(f"Mine={__name__}:{function}")], case)["Mine"]


@pytest.mark.parametrize("case", [*DENSE, *RAGGED, *PAGED], ids=str)
def test_a_function_of_all_keywords_is_asked_for_everything(case):
    entry = outside("takes_all", case)
    assert entry.timing and not entry.wrong


@pytest.mark.parametrize(
    "function, case, missing",
    [
        ("takes_nothing", DENSE[0], "softcap"),
        ("takes_nothing", DENSE[4], "softcap and alibi_slopes and sinks"),
        ("takes_nothing", Case.square(1, 9, 2, 16, dtype="float32", dropout_p=0.1), "dropout_p"),
        ("takes_softcap", DENSE[4], "alibi_slopes and sinks"),
        ("takes_softcap", DENSE[3], "window"),
        ("takes_caches", PAGED[0], "block_table"),
        ("takes_nothing", PAGED[1], "block_table"),
    ],
)
def test_a_function_without_a_keyword_is_not_asked_for_it(function, case, missing):
    assert outside(function, case).refusal == f"--peer: its function has no argument {missing}"


def test_a_function_is_asked_for_the_keywords_that_it_has():
    for function, case in (
        ("takes_nothing", Case.square(1, 9, 2, 16, dtype="float32", causal=True)),
        ("takes_softcap", DENSE[0]),
        *(("takes_pages", case) for case in PAGED),
    ):
        entry = outside(function, case)
        assert entry.timing and not entry.wrong, entry
    says_nothing = types.SimpleNamespace(__call__=None, __signature__=3)
    assert further._takes(says_nothing, "window")


@pytest.mark.parametrize("case", PAGED, ids=str)
def test_pages_of_any_length_hold_every_row(case):
    inputs = make_inputs(case, CPU)
    k_pages, v_pages, table = decode.in_pages(inputs.k, inputs.v, 16)
    assert table.shape == (case.batch, 3) and sorted(table.flatten().tolist()) == list(range(len(k_pages)))
    for pages, rows in ((k_pages, inputs.k), (v_pages, inputs.v)):
        assert torch.equal(pages[table].flatten(1, 2)[:, : case.seqlen_k], rows)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("given", [{"softcap": 2.0}, {"alibi": True}, {"softcap": 2.0, "alibi": True}])
def test_flex_serves_softcap_and_alibi(given, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    flex = Peer("Flex", further.FlexAttention())
    for case in (Case(1, 16, 24, 4, 2, 16, 16, dtype="float32", causal=True, **given), DENSE[3]):
        found = entries_with([flex], dataclasses.replace(case, head_dim_v=16))
        assert not found["Flex"].wrong and found["Flex"].timing, found["Flex"]


@pytest.mark.parametrize(
    "case, reason",
    [
        (DENSE[2], "sinks"),
        (Case.square(1, 16, 2, 16, dtype="float32", dropout_p=0.1), "dropout"),
        (RAGGED[0], "ragged"),
    ],
)
def test_flex_is_not_asked_for_the_rest(case, reason):
    found = entries_with([Peer("Flex", further.FlexAttention())], case)
    assert reason in found["Flex"].refusal and "is not asked for" in found["Flex"].refusal
