"""Suite distributed: what it stores, of one process and of two that torchrun starts, and that it refuses to time a peer
that computes something else."""

import subprocess
import sys

import pytest
import torch

from flashtile.bench import ranks, report
from flashtile.bench.rank_peers import RankPeer

NAMES = [
    "S{} H4/2 D64 causal",
    "S{} H4/2 D64 causal 3 documents",
    "S{} H4/2 D64 causal window (16, None) contiguous",
]
WORKS = {"forward", "forward and backward"}


def stored(path, count, names):
    record = report.read(path)
    assert record["suite"] == "distributed" and record["ranks"] == count and record["machine"]
    assert [cell["name"] for cell in record["cells"]] == names
    for cell in record["cells"]:
        assert all(set(times) == WORKS and min(times.values()) > 0 for times in cell["seconds"].values())
    return [list(cell["seconds"]) for cell in record["cells"]]


def test_one_rank_of_four(tmp_path):
    path = tmp_path / "alone.json"
    assert ranks.measure(quick=True, json_path=path) == 0
    assert stored(path, 1, [name.format(256) for name in NAMES]) == [["ideal", "ring", "all_gather"]] * 3


def test_two_ranks(tmp_path):
    path = tmp_path / "two.json"
    program = "import sys; from flashtile.cli import main; sys.exit(main())"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", sys.executable]
    arguments = ["bench", "--suite", "distributed", "--quick", "--json", str(path)]
    subprocess.run([*command, "-c", program, *arguments], check=True, timeout=300)
    methods = ["ideal", "ring", "all_gather", "ulysses", "auto"]
    causal, *others = stored(path, 2, [name.format(128) for name in NAMES])
    assert others == [methods] * 2 and causal == [*methods, "ring-flash-attn, flashtile"]


def test_another_result_is_not_timed():
    run = ranks._Together(ranks.QUICK[0], 1, torch.device("cpu"))
    leaves, dout = run.tensors(16)
    wrong = RankPeer("wrong", lambda leaves: leaves[0] * 2 + sum(x.sum() for x in leaves[1:]), None)
    with pytest.raises(AssertionError, match="out of wrong is another than flashtile's by"):
        run._require_same(wrong, leaves, dout)
