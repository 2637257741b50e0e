"""Tests of the answer of a rank with real process groups, told apart by their members."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from robust_slurm.auto import flights
from srun_wrapper.agent.looking.recorders import read_all

torch = pytest.importorskip("torch")


def test_a_rank_answers_with_its_groups(tmp_path: Path) -> None:
    import torch.distributed as dist

    path = tmp_path / "3-0.calls"
    flights.offer(str(path))
    assert not path.exists()  # no process groups yet
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        dist.new_group([0])
        dist.all_reduce(torch.ones(4))
        flights.offer(str(path))
        (one,) = read_all(tmp_path, 3, [os.getpid()], 10.0)
        assert read_all(tmp_path, 3, [1]) == ()  # another job's rank
    finally:
        dist.destroy_process_group()
    (group,) = one.groups
    assert (one.rank, group.name, group.last, group.calls[0].sizes) == (0, "0", 1, "4")
    assert group.members != 0
