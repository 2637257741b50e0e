"""The slot's store of snapshots, as the supervisor asks it."""

from __future__ import annotations

from pathlib import Path

import pytest

from robust_slurm.checkpoint.store.store import Store
from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.snapshot_store import ANSWERS, SnapshotStore
from srun_wrapper.protocol.base import Message
from srun_wrapper.protocol.checkpoint_messages import Stock, TakeStock
from srun_wrapper.protocol.task_options import TaskOptions


def test_a_request_that_comes_again_is_answered_again_and_not_carried_out_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, emitted, looks = Loop(), [], []

    def emit(message: Message) -> None:
        emitted.append(message)
        loop.stop()

    whole = Store.stock
    monkeypatch.setattr(
        Store, "stock", lambda self, *a, **more: (looks.append(1), whole(self, *a, **more))[1]
    )
    store = SnapshotStore(loop, 0, tmp_path, b"k" * 32, emit, TaskOptions())
    try:
        store.handle(TakeStock(7))
        store.handle(TakeStock(7))  # before the first is answered: there will be an answer
        loop.run()
        assert (emitted, len(looks)) == ([Stock(7, 0, ())], 1)
        store.handle(TakeStock(7))
        assert (emitted, len(looks)) == ([Stock(7, 0, ())] * 2, 1)
        for token in range(8, 8 + ANSWERS):
            store.handle(TakeStock(token))
            loop.run()
        assert len(store._answers) == ANSWERS
    finally:
        store.close()
