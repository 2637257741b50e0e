"""Ranks that wait in save() until a larger world begins; the rank's side of the line."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpointed_training import LONG, Training, fake_store
from fake_checkpoint_store import FakeStore
from waiting import until

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
