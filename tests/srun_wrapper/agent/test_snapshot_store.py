"""The slot's store of snapshots, as the supervisor asks it."""

from __future__ import annotations

from pathlib import Path

import pytest

from robust_slurm.checkpoint.store.store import Store
from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.snapshot_store import ANSWERS, SnapshotStore, training_name
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
    store = SnapshotStore(loop, 0, tmp_path, b"k" * 32, emit, TaskOptions(), ())
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


def test_each_command_of_a_job_has_its_own_place_on_the_local_disk() -> None:
    """A second training of the same job resumed from the first one's copies."""
    first, second = (training_name("7", ["python", name]) for name in ("a.py", "b.py"))
    assert first != second and first == training_name("7", ["python", "a.py"])
    run = ["torchrun", "--rdzv_id", "1", "--rdzv-endpoint=n1:29500", "--nnodes=2", "a.py"]
    other = ["torchrun", "--rdzv_id", "2", "--rdzv-endpoint=n9:29500", "--nnodes=2", "a.py"]
    assert training_name("7", run) == training_name("7", other) != first
    assert first.startswith("7-") and training_name("7", ()) == "7"
