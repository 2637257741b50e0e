"""Tests of the answer of a rank with real process groups, told apart by their members."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch_forks import TorchForks
from waiting import until

from srun_wrapper.agent.looking.recorders import read_all

pytest.importorskip("torch")


RANK = """
import sys
import torch, torch.distributed as dist
from pathlib import Path
from robust_slurm.auto import flights

path = Path(sys.argv[1])
flights.offer(str(path))
assert not path.exists()  # no process groups yet
store = path.with_name("store")
dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
dist.new_group([0])
dist.all_reduce(torch.ones(4))
flights.offer(str(path))
print("offered", flush=True)
sys.stdin.read()
dist.destroy_process_group()
"""


def test_a_rank_answers_with_its_groups(tmp_path: Path, torch_forks: TorchForks) -> None:
    """The rank is a process of its own: torch's recorder keeps what earlier tests did in ours."""
    path = tmp_path / "3-0.calls"
    stdin, go_on = os.pipe()
    rank = torch_forks.start(RANK, str(path), stdin=stdin)
    os.close(stdin)
    try:
        until(lambda: "offered" in rank.out(), "the rank's socket")
        (one,) = read_all(tmp_path, 3, [rank.pid], 10.0)
        assert read_all(tmp_path, 3, [1]) == ()  # another job's rank
    finally:
        os.close(go_on)
        code = rank.wait()
    assert code == 0, rank.err()
    (group,) = one.groups
    assert (one.rank, group.name, group.last, group.calls[0].sizes) == (0, "0", 1, "4")
    assert group.members != 0
