"""Ranks that wait in save() until robust-srun has compared their state; both sides of the line."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_stores import FakeRank, stores
from checkpointed_training import LONG, Training, fake_store
from fake_checkpoint_store import FakeStore
from waiting import until

from robust_slurm.checkpoint.store.events import Restore

pytestmark = pytest.mark.slow


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    with fake_store(tmp_path / "s", monkeypatch) as made:
        yield made


@pytest.mark.parametrize("end", ["word", "store"])
def test_a_rank_stands_until_it_is_told_to_go_on(store: FakeStore, end: str) -> None:
    """… or its store is gone. A step that is due for nothing else is saved for it."""
    store.welcome |= {"stand": 2, "every": 5, "first": 0}
    training = Training()
    training.ckpt.resume()
    training.run(1, 1)
    stands = threading.Thread(target=training.step, args=[2], daemon=True)
    stands.start()
    store.wait("saved")
    stands.join(0.2)
    assert stands.is_alive() and [m["step"] for m in store.said("saved")] == [2]
    if end == "word":
        store.tell("stand", step=-1)
    else:
        store.die()
    stands.join(LONG)
    assert not stands.is_alive()


def test_the_word_that_comes_while_it_trains(store: FakeStore) -> None:
    training = Training()
    training.ckpt.resume()
    training.run(1, 2)
    store.tell("stand", step=2)  # too late: it does not stand
    client = training.ckpt._session.client  # type: ignore[union-attr]
    assert client is not None
    until(lambda: client.stands_at(2), "the word")
    training.run(3, 4)


def test_a_rank_that_has_no_memory_does_not_stand(store: FakeStore) -> None:
    """No store would see it stand."""
    store.welcome["stand"] = 2
    training = Training()
    training.ckpt.resume()
    training.run(1, 1)
    saver = training.ckpt._session.saver  # type: ignore[union-attr]
    assert saver is not None
    saver.room.leave_memory("no room in a test")
    goes_on = threading.Thread(target=training.run, args=[2, 3], daemon=True)
    goes_on.start()
    goes_on.join(LONG)
    assert not goes_on.is_alive()


def test_what_a_store_says_of_a_step(tmp_path: Path) -> None:
    """The same of the same state in another epoch; only of what ranks here saved in this one."""
    with stores(tmp_path, 1) as [(store, _)]:
        rank = FakeRank(store, 0)
        for step in (1, 2, 3):
            rank.save(step)
            rank.wait("kept", step=step)
        (first,) = store.state_sums(3)
        (held,) = [h.file for h in store.stock() if h.step == 2]
        store.begin(1, Restore(2, "memory", {0: held}, stand=3))
        # No room for what is older than that, in a node whose ranks leave files behind.
        assert [h.step for h in store.stock()] == [2]
        again = FakeRank(store, 0, epoch=1)
        assert again.wait("welcome")["stand"] == 3
        assert store.state_sums(3) == store.state_sums(2) == []
        again.save(3)
        again.wait("kept", step=3)
        (second,) = store.state_sums(3)
        assert second == first._replace(epoch=1)
        store.orders.stand_at(-1)
        again.wait("stand", step=-1)
        (held,) = [h.file for h in store.stock() if h.step == 3]
        store.begin(2, Restore(3, "memory", {0: held}))
        assert FakeRank(store, 0, epoch=2).wait("welcome")["stand"] == -1
