"""Ranks that break the rules: refused with a reason, and nothing else happens."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_stores import Events, FakeRank, stores, write_snapshot
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from robust_slurm.checkpoint.store import door, shelf
from robust_slurm.checkpoint.store.door import RefusedError
from robust_slurm.checkpoint.store.events import AlarmEvent
from robust_slurm.checkpoint.store.ranks import read_enrolment, snapshot_path
from robust_slurm.checkpoint.store.store import Store


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[tuple[Store, Events]]:
    with stores(tmp_path, 1, key=None) as made:
        yield made[0]


def _still_serves(store: Store) -> None:
    rank = FakeRank(store, 1)
    rank.save(1)
    rank.wait("kept", step=1)


@pytest.mark.parametrize(
    "line",
    [
        b"not json\n",
        b"[]\n",
        b'{"op":1}\n',
        b'{"op":"dance"}\n',
        b'{"op":"saved","step":-1,"slot":0,"file":"own-0-0.safetensors"}\n',
        b'{"op":"saved","step":true,"slot":0,"file":"own-0-0.safetensors"}\n',
        b'{"op":"saved","step":1,"slot":0,"file":"own-1-0.safetensors"}\n',
        b'{"op":"saved","step":1,"slot":0,"file":"replica-0-0.safetensors"}\n',
        b'{"op":"saved","step":1,"slot":0,"file":"../own-0-0.safetensors"}\n',
        b'{"op":"saved","step":1,"slot":0,"file":"/etc/own-0-0.safetensors"}\n',
        b'{"op":"saved","step":1,"slot":0,"file":"own-0-100.safetensors"}\n',
        b'{"op":"saved","step":1,"slot":0,"file":"own-0-00.safetensors"}\n',
        b'{"op":"saved","step":1,"slot":0}\n',
        b'{"op":"enrol","rank":1,"world":4,"epoch":0}\n',
        b'{"op":"resumed"}\n',
        b"[" * 100_000 + b"\n",
    ],
)
def test_what_breaks_the_rules_is_refused(alone: tuple[Store, Events], line: bytes) -> None:
    store, _ = alone
    rank = FakeRank(store, 0)
    rank.wait("welcome")
    rank.raw(line)
    assert rank.wait("refused")["why"]
    assert rank.ended.wait(10)
    assert store.stock() == []
    _still_serves(store)


@pytest.mark.parametrize(
    "fields",
    [
        {"rank": 4},
        {"rank": -1},
        {"rank": 1.0},
        {"world": 0},
        {"epoch": "0"},
        {"mesh": {"dp": 0}},
        {"mesh": []},
        {"needs": [4]},
        {"needs": "0"},
        {"lengths": [0]},
        {"lengths": [1 << 62]},
        {"lengths": [*range(1, 66)]},
        {"directory": "relative"},
        {"directory": "/a\0b"},
        {"python": "python"},
        {"keep": -1},
    ],
)
def test_odd_enrolments_are_refused(alone: tuple[Store, Events], fields: dict[str, Any]) -> None:
    store, events = alone
    rank = FakeRank(store, **{"rank": 0, **fields})
    assert rank.wait("refused")["why"]
    assert rank.ended.wait(10)
    assert events == []


def test_saving_before_enrolling_is_refused(alone: tuple[Store, Events]) -> None:
    store, _ = alone
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(store.socket_path))
        sock.sendall(b'{"op":"saved","step":1,"slot":0,"file":"own-0-0.safetensors"}\n')
        assert b"enrol comes first" in sock.recv(1000)


def test_a_line_without_an_end_is_cut_off(
    alone: tuple[Store, Events], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = alone
    monkeypatch.setattr(door, "MAX_LINE", 1 << 16)
    rank = FakeRank(store, 0)
    rank.wait("welcome")
    rank.raw(b"x" * 200_000)
    assert rank.wait("refused")
    _still_serves(store)


@pytest.mark.parametrize(
    "what", ["missing", "link", "directory", "fifo", "empty", "torn", "others"]
)
def test_files_that_are_no_snapshots_are_not_kept(
    alone: tuple[Store, Events], tmp_path: Path, what: str
) -> None:
    store, _ = alone
    path = store.socket_path.parent / "own-0-1.safetensors"
    elsewhere = tmp_path / "own-0-1.safetensors"
    write_snapshot(elsewhere, 0, 1)
    if what == "link":
        path.symlink_to(elsewhere)
    elif what == "directory":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path)
    elif what == "empty":
        path.touch()
    elif what == "torn":
        path.write_bytes(bytes(1000))
    elif what == "others":
        if os.geteuid() != 0:
            pytest.skip("only root can give files away")
        path.write_bytes(elsewhere.read_bytes())
        os.chown(path, 12345, 12345)
    rank = FakeRank(store, 0)
    rank.say(op="saved", step=1, slot=1, file=path.name)
    assert rank.wait("unkept", step=1)["why"]
    assert store.stock() == []
    rank.save(2)
    rank.wait("kept", step=2)
    if path.is_dir():
        path.rmdir()


def test_a_file_of_another_step_is_not_kept(alone: tuple[Store, Events]) -> None:
    store, _ = alone
    rank = FakeRank(store, 0)
    write_snapshot(store.socket_path.parent / "own-0-1.safetensors", 0, 1)
    rank.say(op="saved", step=9, slot=1, file="own-0-1.safetensors")
    assert "overwritten by step 1" in rank.wait("unkept", step=9)["why"]
    assert [h.step for h in store.stock()] == [1]


def test_many_alarms_are_not_all_passed_on(alone: tuple[Store, Events]) -> None:
    store, events = alone
    rank = FakeRank(store, 0)
    for number in range(500):
        rank.say(op="alarm", text=f"{number}")
    rank.save(1)
    rank.wait("kept")
    assert len([e for e in events if isinstance(e, AlarmEvent)]) == 100


@pytest.mark.slow
def test_a_rank_that_does_not_read_does_not_stop_the_others(
    alone: tuple[Store, Events], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = alone
    monkeypatch.setattr(door, "SEND_TIMEOUT", 1)
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(str(store.socket_path))
        deaf.sendall(b'{"op":"enrol","rank":0,"world":4,"epoch":0}\n')
        deaf.setblocking(False)
        line = b'{"op":"flush","step":1}\n' * 200
        sent = 0

        def push() -> bool:
            nonlocal sent
            try:
                sent += deaf.send(line)
            except BlockingIOError:
                return False
            except OSError:
                return True  # left
            return sent > 20_000_000

        _still_serves(store)
        until(push, "the deaf rank is left, or nothing is kept for it", 30, 0.001)
        rank = FakeRank(store, 2)
        rank.save(1)
        rank.wait("kept", step=1)


_ENROLMENT = read_enrolment(
    {"op": "enrol", "rank": 3, "world": 8, "epoch": 0, "directory": "/ckpt", "python": "/py"}
)


@given(st.text(max_size=40) | st.sampled_from(
    ["own-3-0.safetensors", "/ckpt/.staging/own-3-1.safetensors", "/ckpt/own-3-1.safetensors",
     "/ckpt/.staging/../own-3-1.safetensors", "/ckpt/.stagingx/own-3-1.safetensors"]))  # fmt: skip
def test_a_rank_can_only_name_its_own_files(name: str) -> None:
    try:
        path, slot, inside = snapshot_path(
            {"op": "saved", "file": name}, _ENROLMENT, Path("/run/ckpt")
        )
    except RefusedError:
        return
    assert shelf.parse_name(path.name) == ("own", 3, slot)
    assert path.parent == (Path("/run/ckpt") if inside else Path("/ckpt/.staging"))


@given(st.binary(max_size=100))
def test_any_line_is_a_message_or_refused(line: bytes) -> None:
    try:
        message = door.parse(line)
    except RefusedError:
        return
    assert isinstance(message["op"], str)
