"""The benchmark of ragged batches: its cases, its oracle, its peers, its records. No test looks at a time."""

import itertools
import json
import math
import sys
import types

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import flashtile
from flashtile._refusal import Refusal
from flashtile.bench import command, further, ragged, report, run, suites, timing
from flashtile.bench.cases import Case, Work, make_inputs, visible
from flashtile.bench.oracle import results
from flashtile.bench.peers import OURS, Peer

CPU = torch.device("cpu")
EFFORT = timing.Effort(seconds=0, min_rounds=2, max_rounds=2)
WORKS = (Work.FORWARD, Work.BACKWARD)
EQUAL, UNEQUAL = (
    [Case.ragged(lengths, 4, 2, 16, dtype="float32", causal=True, work=work) for work in WORKS]
    for lengths in ((9, 9, 9), (5, 40, 2))
)


def outside_bare(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, scale):
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == cu_seqlens_k.diff().max()
    outs = []
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(cu_seqlens_q), itertools.pairwise(cu_seqlens_k), strict=True):
        heads_first = (t.transpose(0, 1) for t in (q[q0:q1], k[k0:k1], v[k0:k1]))
        out = scaled_dot_product_attention(*heads_first, is_causal=causal, scale=scale, enable_gqa=True)
        outs.append(out.transpose(0, 1))
    return torch.cat(outs)


def outside_tuple(q, k, v, **options):
    return outside_bare(q, k, v, **options), "lse"


def outside_unmasked(q, k, v, **options):
    return outside_bare(q, k, v, **options | {"causal": False})


def outside_dense(q, k, v, **options):
    return outside_bare(q, k, v, **options).unsqueeze(0)


def scaled_wrongly(q, k, v, *, scale, **options):
    return flashtile.attention_varlen(q, k, v, scale=1.05 * scale, **options)


def entries_with(peers, case):
    (cell,) = run.run_cases([case], CPU, EFFORT, flashtile.attention_varlen, peers)
    return {entry.name: entry for entry in cell.entries}


def timed_cell(case, **medians):
    return run.Cell(case, [run.Entry(name, timing.Timing(t, t, t, 1)) for name, t in medians.items()])


def test_a_ragged_case_counts_the_pairs_that_see_each_other():
    full = Case.ragged((3, 1, 5), 4, 2, 8)
    assert (full.batch, full.seqlen_q, full.seqlen_k) == (3, 9, 9)
    assert full.flops == 4 * 4 * 8 * (9 + 1 + 25)
    for case in (EQUAL[0], UNEQUAL[0]):
        pairs = sum(int(visible(sequence, CPU).sum()) for sequence, _, _ in case.sequences())
        assert case.flops == 4 * 4 * 16 * pairs
    assert UNEQUAL[1].flops == 2.5 * UNEQUAL[0].flops


def test_a_ragged_case_names_its_lengths():
    cases = [Case.ragged(lengths, 4, 2, 8) for lengths in ((512,) * 32, (100, 7, 100), (3, 1, 5))]
    assert [case.shape_name for case in cases] == ["32×512 H4/2 D8", "2×100+1×7 H4/2 D8", "3×(1…5) H4/2 D8"]


def test_sequences_lie_one_behind_the_other():
    case = UNEQUAL[0]
    assert ragged.cu_seqlens(case.lengths, CPU).tolist() == [0, 5, 45, 47]
    assert make_inputs(case, CPU).k.shape == (47, 2, 16)
    for (sequence, rows, keys), length in zip(case.sequences(), case.lengths, strict=True):
        assert sequence == Case(1, length, length, 4, 2, 16, 16, dtype="float32", causal=True)
        assert rows == keys and rows.stop - rows.start == length


def test_the_suite():
    cases = suites.cases("varlen")
    assert len(cases) == len(set(cases)) == 2 * (18 + 4)
    assert len(suites.cases("varlen", full=True)) == 2 * (36 + 4)
    equal = [case for case in cases if len(set(case.lengths)) == 1]
    assert {(case.heads_q * case.head_dim, case.seqlen_q) for case in equal} == {(2048, 16384)}
    assert {case.lengths[0] for case in equal} == {512, 2048, 16384}
    assert [str(case) for case in cases[18:22]] == [
        "1×16384+64×100 H16 D128 causal bf16 forward",
        "1×16384+64×100 H32/8 D128 causal bf16 forward",
        f"32×({min(suites.mixed())}…{max(suites.mixed())}) H16 D128 causal bf16 forward",
        f"32×({min(suites.mixed())}…{max(suites.mixed())}) H32/8 D128 causal bf16 forward",
    ]


@pytest.mark.parametrize("part", [1, 8])
def test_random_lengths_repeat_and_leave_out_none_that_has_no_gradient(part):
    lengths = suites.mixed(part)
    assert lengths == suites.mixed(part) and len(lengths) == 32
    # One key alone takes all the weight, so its gradients are 0, and no rounding would be allowed.
    assert 1 < min(lengths) < max(lengths) <= 2048 // part


def test_on_a_cpu_the_suite_is_an_eighth():
    for case, whole in zip(suites.cases("varlen", device_type="cpu"), suites.cases("varlen"), strict=True):
        assert len(case.lengths) == len(whole.lengths) and case.heads_q == whole.heads_q // 8
        assert max(case.lengths) <= 2048 and case.heads_q % case.heads_k == 0


@pytest.mark.parametrize("case", [*EQUAL, *UNEQUAL], ids=str)
def test_all_are_checked_and_timed(case):
    found = entries_with([further.outside_peer(f"Mine={__name__}:outside_bare")], case)
    assert list(found) == [OURS, *(["dense"] if case in EQUAL else []), "Mine"]
    for entry in found.values():
        assert not entry.wrong and entry.timing.rounds == EFFORT.min_rounds
        names = ["out"] if case.work is Work.FORWARD else ["out", "dq", "dk", "dv"]
        assert [verdict.name for verdict in entry.verdicts] == names


def test_a_peer_that_is_wrong_is_not_timed():
    found = entries_with([further.outside_peer(f"Mine={__name__}:outside_unmasked")], UNEQUAL[0])
    assert found["Mine"].wrong and found["Mine"].timing is None
    assert found[OURS].timing


def test_every_sequence_is_judged_by_itself():
    """In bfloat16 short sequences have large results and large errors, among which a long one's would be lost."""
    case = Case.ragged((2, 2000), 1, 1, 16, causal=False)
    judge, inputs = run._Judge(make_inputs(case, CPU), case), make_inputs(case, CPU)
    found = results(ragged.ragged_peers_of("cpu", outside_bare, case)[0].attention, inputs, case, gradients=False)
    assert [verdict.ok for verdict in judge(found)] == [True]
    error = 0.01  # of values around 1 in the first sequence, around 1 / √2000 in the second
    for row, ok in ((0, True), (-1, False)):
        wrong = found["out"].clone()
        wrong[row, 0, wrong[row, 0].abs().argmin()] += error
        assert [verdict.ok for verdict in judge({"out": wrong})] == [ok], row
    found["out"][0, 0, 0] = math.nan
    assert [verdict.ok for verdict in judge(found)] == [False]


def test_an_outside_peer_may_return_a_tuple_and_must_return_the_right_shape():
    peers = [further.outside_peer(f"{name}={__name__}:outside_{name}") for name in ("tuple", "dense")]
    found = entries_with([Peer("tuple", peers[0].attention), Peer("4D", peers[1].attention)], UNEQUAL[0])
    assert found["tuple"].timing
    assert found["4D"].refusal == "its function returned shape (1, 47, 4, 16), expected (47, 4, 16)"


def test_only_peers_may_be_asked_for():
    assert [peer.name for peer in further.further_peers("varlen", ["Mine=math:sqrt"])] == ["Mine"]
    for taken in ("dense", "torch varlen", "best varlen"):
        with pytest.raises(ValueError, match="expected a name that is not taken"):
            further.further_peers("varlen", [f"{taken}=math:sqrt"])
    with pytest.raises(Refusal, match="--flex is given with suite 'varlen', expected suite 'forward' or 'backward'"):
        command.measure("varlen", flex=True)


def first_varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    lengths = {"cu_seqlens_q": cu_seq_q, "cu_seqlens_k": cu_seq_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
    return outside_bare(query, key, value, **lengths, causal=is_causal, scale=None)


def newer_varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    assert enable_gqa
    return first_varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, {(-1, -1): False, (-1, 0): True}[window_size])


@pytest.mark.parametrize("varlen_attn", [first_varlen_attn, newer_varlen_attn])
def test_torchs_own_is_called_as_its_version_asks(varlen_attn, monkeypatch):
    module = types.SimpleNamespace(varlen_attn=varlen_attn)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    full = Case.ragged((5, 40, 2), 4, 2, 16, dtype="float32")
    for case in (full, UNEQUAL[0]):
        found = entries_with([Peer("torch varlen", ragged.torch_varlen())], case)
        assert not found["torch varlen"].wrong and found["torch varlen"].timing


def test_torchs_own_is_timed_on_a_gpu_alone_and_where_it_is_there(monkeypatch):
    def names(device_type):
        return [peer.name for peer in ragged.ragged_peers_of(device_type, outside_bare, EQUAL[0])]

    monkeypatch.setattr(ragged, "torch_varlen", lambda: outside_bare)
    assert names("cpu") == [OURS, "dense"]
    assert names("cuda") == [OURS, "dense", "torch varlen"]
    monkeypatch.setattr(ragged, "torch_varlen", lambda: None)
    assert names("cuda") == [OURS, "dense"]


def test_the_record_sums_up_forward_and_backward_by_themselves():
    cells = [
        timed_cell(EQUAL[0], flashtile=1.0, dense=0.5, a=2.0, b=8.0),
        timed_cell(UNEQUAL[0], flashtile=1.0, a=4.0, b=2.0),
        timed_cell(EQUAL[1], flashtile=1.0, dense=1.0, a=3.0),
    ]
    record = report.to_record("varlen", {}, cells)
    assert {name: (of["geomean"], of["cells"]) for name, of in record["summary"].items()} == {
        "dense, forward": (pytest.approx(0.5), 1),
        "a, forward": (pytest.approx(8**0.5), 2),
        "b, forward": (pytest.approx(4.0), 2),
        "best varlen, forward": (pytest.approx(2.0), 2),
        "dense, backward": (pytest.approx(1.0), 1),
        "a, backward": (pytest.approx(3.0), 1),
    }
    grid = report.Grid(record)
    assert grid.header[-4:] == ["/ dense", "/ a", "/ b", "/ best varlen"]
    assert [row[-4:] for row in grid.rows] == [
        ["0.50×", "2.00×", "8.00×", "2.00×"],
        ["—", "4.00×", "2.00×", "2.00×"],
        ["1.00×", "3.00×", "—", "3.00×"],
    ]
    assert report.Grid(report.to_record("varlen", {}, cells[2:])).header[-2:] == ["/ dense", "/ a"]


def test_measure_stores_what_it_shows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(timing, "QUICK_EFFORT", EFFORT)
    path = tmp_path / "varlen.json"
    assert command.measure("varlen", dtype="float16", quick=True, json_path=path) == 0
    shown, record = capsys.readouterr().out, json.loads(path.read_text())
    for case, cell in zip(suites.quick("varlen", dtype="float16"), record["cells"], strict=True):
        assert cell["name"] == str(case) and case.shape_name in shown
        assert cell["case"]["lengths"] == list(case.lengths) and cell["flops"] == case.flops
        assert "tflops" in cell["results"][OURS]
        assert ("dense" in cell["ratios"]) == (len(set(case.lengths)) == 1)
    assert {"dense, forward", "dense, backward"} <= set(record["summary"])


def test_what_is_wrong_fails_the_run(capsys, monkeypatch):
    monkeypatch.setattr(timing, "CPU_EFFORT", EFFORT)
    assert command.measure("varlen", cases=EQUAL, attention=scaled_wrongly) == 1
    assert "flashtile is WRONG on" in capsys.readouterr().out


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    path = tmp_path / "gpu.json"
    assert command.measure("varlen", quick=True, json_path=path, peers=[f"Mine={__name__}:outside_bare"]) == 0
    for cell in json.loads(path.read_text())["cells"]:
        timed = {name for name, result in cell["results"].items() if "median_us" in result}
        assert {OURS, "Mine"} <= timed, cell
