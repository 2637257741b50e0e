"""A store that is starved in the middle of a digest, and a rank that goes on meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from store_process import CHUNK, StoreProcess
from waiting import until

from robust_slurm import Checkpointer
from robust_slurm.checkpoint.copying.slots import map_file
from robust_slurm.checkpoint.format.layout import LayoutError, read_snapshot
from robust_slurm.checkpoint.training.client import Client

VALUES = CHUNK // 4 * 4  # of one float32 tensor: 4 chunks of a store


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[tuple[StoreProcess, StoreProcess]]:
    stalling = StoreProcess(tmp_path / "a", stall_at=2)
    other = StoreProcess(tmp_path / "b")
    yield stalling, other
    stalling.close()
    other.close()


class Rank:
    """A training whose state after step s is s, in every element."""

    def __init__(self, store: StoreProcess, patch: pytest.MonkeyPatch, **options: Any) -> None:
        patch.setenv("ROBUST_CKPT_SOCKET", str(store.socket))
        patch.setenv("ROBUST_EPOCH", "0")
        self.value = torch.nn.Parameter(torch.zeros(VALUES))
        self.optimizer = torch.optim.SGD([self.value], lr=1.0)
        self.model = torch.nn.ParameterDict({"value": self.value})
        self.ckpt = Checkpointer(model=self.model, optimizer=self.optimizer, **options)

    def run(self, begin: int, end: int) -> None:
        for step in range(begin, end + 1):
            self.value.grad = torch.full_like(self.value, -1.0)
            self.optimizer.step()
            self.ckpt.save(step)


def mixed(path: Path) -> bool:
    """Return whether a complete file holds more than its one step."""
    try:
        snapshot, plan = read_snapshot(str(path))
        values = map_file(path, plan)["model.value"]
        one = bool((values == snapshot.step).all())
        same = read_snapshot(str(path))[0].step == snapshot.step
    except (LayoutError, OSError):  # being overwritten, or replaced: nobody takes it for complete
        return False
    return same and not one


def newest(store: StoreProcess) -> int:
    return max((held["step"] for held in store.stock() if held["tier"] == "replica"), default=-1)


def unmixed(*stores: StoreProcess) -> None:
    for store in stores:
        files = [store.directory / held["file"] for held in store.stock() if held["ok"]]
        assert [path for path in files if mixed(path)] == []


@pytest.mark.parametrize("looks", [True, False])
def test_a_rank_that_comes_round_to_the_slot_under_digest_leaves_no_mixture(
    peers: tuple[StoreProcess, StoreProcess], monkeypatch: pytest.MonkeyPatch, looks: bool
) -> None:
    """The rank leaves that slot alone; the store sees through a rank that does not look at it."""
    if not looks:
        monkeypatch.setattr(Client, "held", lambda _self: frozenset())
    a, b = peers
    rank = Rank(a, monkeypatch, replica_wait=0.05)
    rank.ckpt.resume()
    a.place(0, b)
    rank.run(1, 1)
    until(a.stalled.exists, "the digest of step 1 stalls")
    rank.run(2, 4)
    a.go()
    until(lambda: newest(b) >= 1, "a replica")
    unmixed(*peers)
    later = iter(range(5, 10_000))

    def caught_up() -> bool:
        rank.run(step := next(later), step)
        return newest(b) > 4

    until(caught_up, "replicas of later steps")
    unmixed(*peers)
    assert not any("digest" in text for text in [*a.alarms(), *b.alarms()])
    rank.ckpt.close()
