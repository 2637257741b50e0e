"""The rank's line to its store: who answers, who does not, and that nothing waits for ever."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_checkpoint_store import FakeStore

from robust_slurm.checkpoint.training.client import Client, StoreGoneError

ENROL = {"rank": 0, "world": 1, "epoch": 0}
LONG = 30.0  # s; a bound that no passing test comes near


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FakeStore]:
    made = FakeStore(tmp_path / "s")
    yield made
    made.die()


def saved(client: Client, step: int, slot: int, persist: bool = False) -> None:
    client.saved(step, slot, persist=persist, file=f"own-0-{slot}.safetensors")


def test_it_enrols_and_is_welcomed(store: FakeStore) -> None:
    client = Client(str(store.path), ENROL)
    assert store.wait("enrol")[0] == {"op": "enrol", **ENROL}
    assert client.welcome["restore"] is None
    client.close()


def test_it_waits_as_long_as_the_store_asks_for_it(store: FakeStore) -> None:
    store.waits = 3
    client = Client(str(store.path), ENROL)
    assert client.welcome["op"] == "welcome"
    client.close()


def test_what_comes_before_the_welcome_counts(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that tells all its ranks something meanwhile: a second start within an epoch."""
    answer = FakeStore._answer

    def early(store: FakeStore, message: dict[str, Any]) -> None:
        store.tell("persist_at", step=7)
        store.tell("held", slots=[2])
        answer(store, message)

    monkeypatch.setattr(FakeStore, "_answer", early)
    client = Client(str(store.path), ENROL)
    assert client.welcome["op"] == "welcome"
    assert client.wants(7) and client.held() == {2}
    client.close()


def test_a_step_is_safe_when_kept_and_answered(store: FakeStore) -> None:
    store.replicates = False
    client = Client(str(store.path), ENROL)
    saved(client, 4, 0)
    store.wait("saved")
    assert not client.wait_safe(4, 0.0)
    store.tell("replicated", step=5)  # passed over: a newer one was answered
    assert client.wait_safe(4, LONG)
    assert not client.wait_safe(5, 0.0)
    client.close()


def test_with_two_slots_a_step_is_safe_when_no_rank_is_behind_it(store: FakeStore) -> None:
    client = Client(str(store.path), ENROL)
    client.waits_for_all = True
    saved(client, 4, 0)
    store.tell("complete", step=3, passed=9)  # of before this rank began anew
    store.tell("complete", step=2, passed=3)
    assert not client.wait_safe(4, 0.2)
    assert client.everywhere == 2
    store.tell("complete", step=-1, passed=4)  # another rank left step 4 out
    assert client.wait_safe(4, LONG)
    assert client.everywhere == 2
    assert client.safe_s >= 0.2
    client.close()


def test_a_snapshot_that_is_not_usable_is_not_waited_for(store: FakeStore) -> None:
    store.keeps = store.replicates = False
    client = Client(str(store.path), ENROL)
    saved(client, 4, 0)
    store.wait("saved")
    store.tell("unkept", step=4, why="too short")
    assert client.wait_safe(4, LONG)
    client.close()


def test_a_persisted_slot_is_held_until_the_store_says_otherwise(store: FakeStore) -> None:
    store.keeps = False
    client = Client(str(store.path), ENROL)
    saved(client, 10, 2, persist=True)
    assert client.held() == {2}
    store.wait("saved")
    store.tell("held", slots=[])  # of an earlier one, sent before it read ours
    store.tell("flushed", ok=True)
    client._wait(lambda: client._flushed is not None, LONG)
    assert client.held() == {2}
    store.tell("kept", step=10, held=[2])
    assert client.wait_safe(10, LONG)
    assert client.held() == {2}
    store.tell("held", slots=[])
    assert client.wait_free(1, LONG)
    client.close()


def test_a_store_that_dies_ends_all_waiting(store: FakeStore) -> None:
    store.keeps = False
    client = Client(str(store.path), ENROL)
    saved(client, 1, 0, persist=True)
    done = threading.Event()
    threading.Thread(target=lambda: (client.wait_safe(1, LONG), done.set())).start()
    store.die()
    assert done.wait(LONG / 2)
    assert client.dead
    assert client.held() == frozenset()
    assert client.flush(1, LONG)
    client.say("alarm", text="nobody hears it")


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(StoreGoneError, match="no checkpoint store at"):
        Client(str(tmp_path / "none.sock"), ENROL)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"", "ended the connection"),
        (b"garbage\n", "Expecting value"),
        (b"[]\n", "not a message"),
        (b'{"op":"refused","why":"another epoch"}\n', "another epoch"),
    ],
)
def test_no_welcome(tmp_path: Path, answer: bytes, says: str) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen()

    def serve() -> None:
        connection, _ = listener.accept()
        connection.makefile("rb").readline()
        connection.sendall(answer)
        connection.close()

    threading.Thread(target=serve, daemon=True).start()
    with pytest.raises(StoreGoneError, match=f"no checkpoint store at .*: .*{says}"):
        Client(str(tmp_path / "s"), ENROL, deadline=LONG)
    listener.close()


def test_a_store_that_never_answers_is_given_up(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen()
    with pytest.raises(StoreGoneError):
        Client(str(tmp_path / "s"), ENROL, deadline=0.2)
    listener.close()


@pytest.mark.parametrize(
    "line", [b"{\n", b"[1]\n", b'{"op":"kept"}\n', b'{"op":"kept","step":[]}\n']
)
def test_nonsense_from_the_store_ends_the_connection(store: FakeStore, line: bytes) -> None:
    client = Client(str(store.path), ENROL)
    connection: Any = store._connection
    connection.sendall(line)
    assert client.wait_safe(1, LONG)
    assert client.dead


def test_a_forked_child_lets_go_without_ending_the_parents_line(store: FakeStore) -> None:
    client = Client(str(store.path), ENROL)
    pid = os.fork()
    if pid == 0:
        client.abandon()
        client.say("alarm", text="from the child")
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    saved(client, 1, 0)
    assert client.wait_safe(1, LONG)
    assert not store.said("alarm")
    client.close()


def test_a_store_that_does_not_read_is_given_up(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("robust_slurm.checkpoint.training.client.SEND_DEADLINE", 0.1)
    ours, theirs = socket.socketpair()
    client = Client(str(store.path), ENROL)
    client._socket = ours
    end = time.monotonic() + LONG
    while not client.dead and time.monotonic() < end:
        client.say("alarm", text="x" * 100_000)
    assert "does not read" in client.dead
    theirs.close()
