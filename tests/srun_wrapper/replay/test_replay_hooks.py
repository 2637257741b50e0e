"""Differences on a node in a replay: checkpoints stay, torchrun starts a small world."""

from __future__ import annotations

from pathlib import Path

import pytest

from robust_slurm.checkpoint.store.events import Restore
from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.snapshot_store import SnapshotStore
from srun_wrapper.command.torchrun import torchrun_overrides
from srun_wrapper.protocol.messages import Start
from srun_wrapper.protocol.task_options import TaskOptions


class Store:
    """Notes when it is told that an epoch begins, by which it forgets what is newer."""

    def __init__(self) -> None:
        self.begun: list[int] = []

    def begin(self, epoch: int, _restore: Restore | None) -> None:
        self.begun.append(epoch)


def test_a_replay_is_no_epoch_for_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store()
    monkeypatch.setattr("srun_wrapper.agent.snapshot_store.Store", lambda *_a, **_more: store)
    snapshots = SnapshotStore(Loop(), 0, tmp_path, b"k" * 32, lambda _message: None, TaskOptions())
    for epoch, env in ((1, {}), (2, {"ROBUST_REPLAY": "1"}), (3, {})):
        snapshots.begin(Start(epoch, env, (), 0.0, 0, False, 8, "n0", 7000))
    assert store.begun == [1, 3]


@pytest.mark.parametrize(
    ("line", "words", "more"),
    [
        ("torchrun --nnodes=8 t.py", "torchrun --nnodes=2 t.py", {"PET_NODE_RANK": "1"}),
        ("torchrun t.py", "torchrun t.py", {"PET_NNODES": "2", "PET_NODE_RANK": "1"}),
    ],
)
def test_torchruns_small_world(line: str, words: str, more: dict[str, str]) -> None:
    command, env = torchrun_overrides(line.split(), 2, 1, "10.0.0.7", 4242, False, resized=True)
    assert command == words.split()
    assert env | more == env


def test_a_checkpointer_in_a_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Checkpointer saves nothing, in memory or on disk, and starts anew."""
    pytest.importorskip("torch")
    from checkpointed_training import Training, fake_store

    with fake_store(tmp_path / "s", monkeypatch) as store:
        monkeypatch.setenv("ROBUST_REPLAY", "1")
        training = Training(directory=tmp_path / "durable", every=1)
        assert training.ckpt.resume() == 0
        training.run(1, 3)
        training.ckpt.close()
        assert store.messages == [] and not (tmp_path / "durable").exists()
