"""The demo passes with flashtile, and each of its parts fails when attention is wrong."""

import io
import math

import pytest
import torch
from rich.console import Console

import flashtile
from flashtile import demo
from flashtile.bench.cases import Case
from flashtile.demo import exactness, picture, stages, training
from flashtile.demo.gpt import GPT, Config, rotate

CPU = torch.device("cpu")
SMALL = Config(context=32, layers=1, heads=2, head_dim=16)


def scaled_wrongly(q, k, v, **options):
    return flashtile.attention(q, k, v, scale=1.05 / math.sqrt(q.shape[-1]), **options)


def not_causal(q, k, v, **options):
    return flashtile.attention(q, k, v, **options | {"causal": False})


@pytest.fixture(autouse=True)
def one_thread():
    """Problems this small are quickest on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=160)


@pytest.fixture
def brief(monkeypatch):
    """A demo of few shapes, which trains for a few steps."""
    all_cases = exactness.cases
    monkeypatch.setattr(exactness, "cases", lambda device_type: all_cases(device_type)[:2])
    monkeypatch.setattr(training, "MIN_STEPS", 6)
    monkeypatch.setattr(training, "TIMED_STEPS", 1)
    monkeypatch.setattr(training, "BATCH", 2)
    monkeypatch.setattr(stages, "SAMPLE_BYTES", 4)


@pytest.mark.parametrize("case", exactness.cases("cpu"), ids=str)
def test_exactness(case):
    row = exactness.check(case, CPU, flashtile.attention)
    assert row.ok, row.verdicts
    assert [verdict.name for verdict in row.verdicts] == ["out", "dq", "dk", "dv"]


@pytest.mark.gpu
@pytest.mark.parametrize("case", exactness.cases("cuda"), ids=str)
def test_exactness_on_a_gpu(case):
    row = exactness.check(case, torch.device("cuda"), flashtile.attention)
    assert row.ok, row.verdicts


def test_exactness_covers_what_it_promises():
    cases = exactness.cases("cpu")
    assert len(cases) >= 12
    assert {case.dtype for case in cases} == {"float32", "float16", "bfloat16"}
    assert any(case.heads_q != case.heads_k for case in cases)
    assert any(case.seqlen_q % 2 for case in cases)
    assert any(case.head_dim != case.head_dim_v for case in cases)
    assert any(case.window for case in cases)
    assert all(case.dtype != "float32" for case in exactness.cases("cuda"))


def test_exactness_fails_a_wrong_attention(console, brief):
    assert not stages.show_exactness(console, CPU, scaled_wrongly)
    assert "FAIL" in console.file.getvalue()


def test_speed_fails_a_wrong_attention(console):
    assert not stages.show_speed(console, CPU, scaled_wrongly, [Case.square(1, 16, 1, 16, dtype="float32")])


def test_corpus_is_the_standard_librarys_text():
    corpus = training.standard_library_bytes(100_000)
    assert len(corpus) == 100_000
    assert b"import " in bytes(corpus.tolist())
    assert torch.equal(corpus, training.standard_library_bytes(100_000))


def test_rotation_keeps_lengths_and_depends_on_distance_alone():
    x = torch.randn(1, 1, 1, 8).expand(1, 10, 1, 8)
    y = torch.randn(1, 1, 1, 8).expand(1, 10, 1, 8)
    scores = (rotate(x)[0, :, 0] @ rotate(y)[0, :, 0].T).double()
    torch.testing.assert_close(rotate(x).norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1], atol=1e-5, rtol=1e-5)


def test_the_model_does_not_look_ahead():
    torch.manual_seed(0)
    model = GPT(SMALL, lambda q, k, v: flashtile.attention(q, k, v, causal=True))
    tokens = torch.randint(256, (2, 20))
    changed = tokens.clone()
    changed[:, 12:] = 0
    torch.testing.assert_close(model(tokens)[:, :12], model(changed)[:, :12])
    assert not torch.allclose(model(tokens)[:, 12:], model(changed)[:, 12:])


def test_training_with_either_attention_gives_the_same_losses():
    corpus = training.standard_library_bytes(50_000)
    steps, seen = 24, []
    ours = training.train(
        lambda q, k, v: flashtile.attention(q, k, v, causal=True), corpus, steps, CPU, SMALL, on_step=seen.append
    )
    theirs = training.train(stages._sdpa, corpus, steps, CPU, SMALL)
    assert seen == ours.losses and len(seen) == steps
    assert ours.losses[-1] < ours.losses[0] - 0.5
    assert ours.losses == pytest.approx(theirs.losses, abs=1e-4)


def test_generated_text_continues_the_prompt():
    model = GPT(SMALL, stages._sdpa)
    assert model.generate(b"def ", 40).startswith(b"def ")
    assert len(model.generate(b"def ", 40)) == 44


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_training_tells_a_right_attention_from_a_wrong_one(console, brief, tmp_path, device):
    for attention, agrees in ((flashtile.attention, True), (not_causal, False)):
        drawn = tmp_path / "demo.png"
        assert stages.show_training(console, torch.device(device), attention, 0.0, drawn, SMALL) == agrees
    assert "DISAGREE" in console.file.getvalue()


@pytest.mark.parametrize("gap, verdict", [(0.5, "The two runs agree"), (2.0, "The two runs DISAGREE")])
def test_the_picture_says_what_its_curves_are(tmp_path, gap, verdict):
    rc_context = pytest.importorskip("matplotlib").rc_context
    path = tmp_path / "demo.svg"
    with rc_context({"svg.fonttype": "none"}):
        picture.draw(path, [3.0, 2.0 + gap], [3.0, 2.0], [1.0, 1.0], "a title")
    text = path.read_text()
    said = [
        "a title",
        "training loss (nats per byte)",
        "difference (nats per byte)",
        "training step",
        "most that is allowed",
    ]
    said += ["moving mean, with flashtile", "moving mean, with PyTorch SDPA", verdict]
    assert [words for words in said if words not in text] == []


def test_demo(brief, tmp_path, capsys):
    drawn = tmp_path / "demo.png"
    cases = [Case.square(1, 64, 2, 16, dtype="bfloat16")]
    assert demo.run(0.0, drawn, speed_cases=cases, config=SMALL) == 0
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert "Everything agrees." in capsys.readouterr().out


def test_demo_fails_a_wrong_attention(brief, tmp_path, capsys):
    assert demo.run(0.0, tmp_path / "demo.png", attention=scaled_wrongly, speed_cases=[], config=SMALL) == 1
    assert "Something disagrees" in capsys.readouterr().out
