"""The node's history: what is written is read, whatever disks, links and other nodes do."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import until

from health.history import events as history
from health.node import rootfiles, silent
from health.node.system import Event

pytestmark = pytest.mark.slow

ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not ROOT, reason="gives files to other users")


def event(number: int, kind: str = "run", **data: object) -> Event:
    return Event(1000.0 + number, kind, "boot-1", {"number": number, **data})


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    return tmp_path / "spool"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / "state" / "nodes").mkdir(parents=True)
    return tmp_path / "state"


def numbers(events: list[Event]) -> list[object]:
    return [e.data.get("number") for e in events]


def shared(state: Path, node: str = "n1") -> list[Event]:
    return history.parse((state / "nodes" / f"{node}.jsonl").read_bytes())


def record(spool: Path, state: Path | None, *events: Event, deadline: float = 10.0) -> str:
    return str(history.record(str(spool), str(state or ""), "n1", events, deadline))


# -- writing and reading ----------------------------------------------------------------------


def test_what_is_written_is_read(spool: Path, state: Path) -> None:
    written = [event(1, "drain", reason="robust:node:x:-:reboot:job7"), event(2, "strike")]
    assert record(spool, state, *written) == ""
    assert history.load(str(spool)) == written == shared(state)
    assert (spool / "history.jsonl").stat().st_mode & 0o777 == 0o644


def test_no_history_is_an_empty_one(spool: Path) -> None:
    assert history.load(str(spool)) == []


def test_oldest_first_and_within_a_boot_as_written(spool: Path) -> None:
    """A clock that is set does not change what came first; other nodes' words have no boot."""
    boots = ((3, "b"), (1, "a"), (4, "b"), (2, ""), (5, ""))
    history.append(str(spool), [event(number)._replace(boot=boot) for number, boot in boots])
    assert numbers(history.load(str(spool))) == [1, 2, 3, 4, 5]
    back = [event(9)._replace(boot="c"), event(7)._replace(boot="c"), event(8)._replace(boot="")]
    history.append(str(spool), back)
    assert numbers(history.load(str(spool))) == [1, 2, 3, 4, 5, 8, 9, 7]


@pytest.mark.parametrize(
    "junk",
    [
        b'{"time":1,"kind":"run","boot":"b","da',
        b"\xff\x00\xfe",
        b"[]",
        b'{"time":"1","kind":"run","boot":"b","data":{}}',
        b'{"time":NaN,"kind":"run","boot":"b","data":{}}',
        b'{"time":true,"kind":"run","boot":"b","data":{}}',
        b'{"time":1' + b"0" * 400 + b',"kind":"run","boot":"b","data":{}}',
        b'{"time":9e99,"kind":"run","boot":"b","data":{}}',
        b'{"time":1,"kind":5,"boot":"b","data":{}}',
        b'{"time":1,"kind":"run","boot":"b","data":7}',
        b"[" * 30000,
        b'{"time":' + b"9" * 5000 + b"}",
        b"x" * (rootfiles.LINE_LIMIT + 1),
    ],
)
def test_torn_and_foreign_lines_are_left_out(spool: Path, junk: bytes) -> None:
    history.append(str(spool), [event(1)])
    with (spool / "history.jsonl").open("ab") as file:
        file.write(junk)  # torn: no newline
    history.append(str(spool), [event(2)])
    assert numbers(history.load(str(spool))) == [1, 2]


@given(st.binary(max_size=200))
def test_any_bytes_can_be_read(raw: bytes) -> None:
    history.parse(raw + b"\n" + history.line(event(5)))


def test_an_overlong_event_loses_its_data_only(spool: Path) -> None:
    history.append(str(spool), [event(1, evidence="x" * rootfiles.LINE_LIMIT)])
    assert [(e.time, list(e.data)) for e in history.load(str(spool))] == [(1001.0, ["cut"])]


def test_a_large_file_keeps_what_decides(
    spool: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "SIZE_LIMIT", 40_000)
    monkeypatch.setattr(history, "_KEPT_OF_RUNS", 10_000)
    record(spool, state, event(0, "repaired"))
    for number in range(1, 26):
        record(spool, state, event(number, text="x" * 4000))
    for found in (history.load(str(spool)), shared(state)):
        assert found[0].kind == "repaired"
        assert numbers(found)[-1] == 25
        assert len(numbers(found)) == len(set(numbers(found)))
    assert (spool / "history.jsonl").stat().st_size < 50_000
    assert (state / "nodes" / "n1.jsonl").stat().st_size < 50_000


def test_writers_do_not_mix(spool: Path) -> None:
    history.append(str(spool), [])

    def write(base: int) -> None:
        for number in range(20):
            history.append(str(spool), [event(base + number)])

    threads = [threading.Thread(target=write, args=(100 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(history.load(str(spool))) == 80


# -- the shared ledger ------------------------------------------------------------------------


def test_what_could_not_be_shared_is_shared_later(spool: Path, state: Path) -> None:
    (state / "nodes").rename(state / "away")
    said = record(spool, state, event(1))
    assert "nodes" in said and "No such file" in said
    (state / "away").rename(state / "nodes")
    assert record(spool, state) == ""  # the sweep, with nothing new
    assert numbers(shared(state)) == [1]
    record(spool, state, event(2))
    record(spool, state)
    assert numbers(shared(state)) == [1, 2]
    assert len((state / "nodes" / "n1.jsonl").read_bytes().splitlines()) == 2


def test_a_node_installed_anew_gets_its_history_back(spool: Path, state: Path) -> None:
    record(spool, state, event(1, "drain"), event(2, "strike"))
    for path in spool.iterdir():
        path.unlink()
    record(spool, state, event(3))
    assert numbers(history.load(str(spool))) == [1, 2, 3]
    assert numbers(shared(state)) == [1, 2, 3]
    record(spool, state, event(4))
    assert len((state / "nodes" / "n1.jsonl").read_bytes().splitlines()) == 4


def test_a_long_history_comes_back_whole(spool: Path, state: Path) -> None:
    """A node installed anew got only the last MiB back, without the strikes before it."""
    record(spool, state, event(1, "strike"))
    for number in range(2, 30):
        record(spool, state, event(number, text="x" * 50_000))
    for path in spool.iterdir():
        path.unlink()
    record(spool, state, event(30))
    assert numbers(history.load(str(spool))) == list(range(1, 31))


def test_what_is_said_elsewhere_about_the_node_arrives(spool: Path, state: Path) -> None:
    record(spool, state, event(1, "drain"))
    with (state / "nodes" / "n1.jsonl").open("ab") as file:
        file.write(history.line(event(2, "repaired")))
    record(spool, state)
    assert numbers(history.load(str(spool))) == [1, 2]
    record(spool, state, event(3))
    assert numbers(shared(state)) == [1, 2, 3]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["local", "foreign", "share", "lose", "tear"]), max_size=14))
def test_both_files_end_up_the_same(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str]
) -> None:
    """After two rounds both copies hold every event once, in any order of writes."""
    base = tmp_path_factory.mktemp("both")
    spool, state = base / "spool", base / "state"
    (state / "nodes").mkdir(parents=True)
    ledger = state / "nodes" / "n1.jsonl"
    history.append(str(spool), [])
    wanted: set[int] = set()
    pending: set[int] = set()  # not shared yet: lost with the spool
    for number, step in enumerate(steps, 1):
        if step == "local":
            history.append(str(spool), [event(number)])
            pending.add(number)
        elif step == "foreign":
            fd = os.open(ledger, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            rootfiles.append(fd, history.line(event(number)))
            os.close(fd)
        elif step == "tear" and ledger.exists():
            with ledger.open("ab") as file:
                file.write(b'{"time":1')
        elif step == "share":
            assert history.share(str(spool), str(state), "n1")
            pending.clear()
        elif step == "lose":
            for path in spool.iterdir():
                path.unlink()
            wanted -= pending
            pending.clear()
        if step in ("local", "foreign"):
            wanted.add(number)
    for _ in range(2):
        history.share(str(spool), str(state), "n1")
    local, both = numbers(history.load(str(spool))), numbers(shared(state))
    assert sorted(map(int, map(str, local))) == sorted(wanted)
    assert sorted(map(int, map(str, both))) == sorted(wanted)


def test_only_one_shares_at_a_time(spool: Path, state: Path) -> None:
    history.append(str(spool), [event(1)])
    directory = rootfiles.open_dir(str(spool))
    held = rootfiles.lock(directory, "share.lock")
    assert history.share(str(spool), str(state), "n1") is False
    os.close(held)
    assert history.share(str(spool), str(state), "n1") is True


# -- what may go wrong ------------------------------------------------------------------------


def test_a_state_directory_that_is_not_mounted_stays_empty(spool: Path, tmp_path: Path) -> None:
    empty = tmp_path / "mountpoint"
    empty.mkdir()
    assert record(spool, empty, event(1)) != ""
    assert list(empty.iterdir()) == []
    assert numbers(history.load(str(spool))) == [1]


@needs_root
@pytest.mark.parametrize("what", ["dir-owner", "dir-mode", "dir-link", "file-owner", "file-link"])
def test_what_others_had_a_hand_in_is_refused(spool: Path, state: Path, what: str) -> None:
    nodes = state / "nodes"
    target = nodes / "n1.jsonl"
    if what == "dir-owner":
        os.chown(nodes, 12345, 12345)
    elif what == "dir-mode":
        nodes.chmod(0o777)
    elif what == "dir-link":
        nodes.rmdir()
        other = state / "users"
        other.mkdir(mode=0o777)
        other.chmod(0o777)
        nodes.symlink_to(other)
    elif what == "file-owner":
        target.touch()
        os.chown(target, 12345, 12345)
    elif what == "file-link":
        (state / "victim").write_text("keep")
        target.symlink_to(state / "victim")
    assert record(spool, state, event(1)) != ""
    assert numbers(history.load(str(spool))) == [1]
    assert not target.exists() or target.read_bytes() in (b"", b"keep")


@needs_root
def test_a_directory_of_somebody_else_above_is_refused(spool: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "state" / "nodes").mkdir(parents=True)
    os.chown(home, 12345, 12345)
    said = record(spool, home / "state", event(1))
    assert f"{home}: belongs to uid 12345, not to root" in said


def test_a_fifo_does_not_hold_it(spool: Path, state: Path) -> None:
    os.mkfifo(state / "nodes" / "n1.jsonl")
    assert "not a regular file" in record(spool, state, event(1))


def test_a_dead_shared_file_system_costs_its_deadline_only(spool: Path, state: Path) -> None:
    """Another process holds the lock for ever, as a dead lock server does."""
    directory = rootfiles.open_dir(str(state / "nodes"))
    held = rootfiles.lock(directory, "n1.lock")
    assert "no answer in 0.5 s" in record(spool, state, event(1), deadline=1.0)
    os.close(held)
    assert numbers(history.load(str(spool))) == [1]

    def told() -> bool:
        silent._told.clear()  # another run of the gate
        assert record(spool, state) == ""
        return (state / "nodes" / "n1.jsonl").exists()

    # The process that was killed may hold the lock for moments.
    until(told, "an event for all to read", timeout=10.0)
    assert numbers(shared(state)) == [1]


def test_a_full_disk_is_said(spool: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history.append(str(spool), [event(1)])
    write = os.write
    monkeypatch.setattr(
        os, "write", lambda fd, raw: write(fd, raw[: len(raw) // 2] if b"kind" in raw else raw)
    )
    assert "only written in part" in record(spool, None, event(2))
    monkeypatch.undo()
    record(spool, None, event(3))
    assert numbers(history.load(str(spool))) == [1, 3]

    def full(fd: int, raw: bytes) -> int:
        if b"kind" in raw:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, raw)

    monkeypatch.setattr(os, "write", full)
    assert "No space left" in record(spool, None, event(4))


def test_records_are_one_json_object_a_line() -> None:
    assert json.loads(history.line(event(1)))["data"] == {"number": 1}
    assert history.line(event(1, text="a\nb")).count(b"\n") == 1


def test_nobody_else_can_hold_a_lock(spool: Path) -> None:
    """Anyone who may open a file for reading may lock it."""
    spool.mkdir()
    old = spool / "lock"
    old.touch(mode=0o644)
    history.append(str(spool), [event(1)])
    os.close(rootfiles.lock(rootfiles.open_dir(str(spool)), "fresh.lock"))
    assert [stat.S_IMODE((spool / name).stat().st_mode) for name in ("lock", "fresh.lock")] == [
        0o600,
        0o600,
    ]
