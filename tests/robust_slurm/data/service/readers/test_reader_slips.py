"""Slips beside the data end no lane, and leave nothing behind."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import read_plan
import reader_pools
from reader_pools import Begin, Wanted, feed_of, given
from waiting import until

from robust_slurm.data.errors import DataError
from robust_slurm.data.lanes.lane import SourceLane
from robust_slurm.data.lanes.tally import Tally
from robust_slurm.data.service.readers import channel, staff
from robust_slurm.data.service.readers.places import SharedPlaces
from robust_slurm.data.service.readers.reader import WindowReader
from robust_slurm.data.service.wire import LineSocket
from robust_slurm.data.sources import turn

begin, wanted = reader_pools.begin, reader_pools.wanted


def test_a_reader_that_ends_as_it_starts_is_replaced(
    begin: Begin, wanted: Wanted, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted[0] = 0
    pool = begin()
    refused: list[int] = []
    ended: list[bool] = []

    class EndsAtOnce(staff.ReaderChannel):
        def __init__(self, sock: socket.socket, serial: int, gone: Callable[..., None]) -> None:
            told = threading.Event()

            def gone_now(*what: Any) -> None:
                gone(*what)
                told.set()

            if not refused:
                refused.append(serial)
                raise RuntimeError("can't start new thread")
            if not ended:
                sock.shutdown(socket.SHUT_RDWR)
            super().__init__(sock, serial, gone_now)
            if not ended:
                ended.append(told.wait(0.5))

    monkeypatch.setattr(staff, "ReaderChannel", EndsAtOnce)
    wanted[0] = 1
    alive = lambda: bool(pool.staff._channels) and not getattr(pool.staff._channels[0], "_over", 1)  # noqa: E731
    until(lambda: ended and alive(), "another", 60)


def test_a_lane_that_is_left_while_it_is_read_is_not_kept_open(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = begin()
    ask, tell = staff.ReaderChannel.ask, staff.ReaderChannel.tell
    told: list[str] = []
    feed = feed_of(pool, ("web", 0))
    lane: Any = feed.lane.copy()

    def leave_first(channel: staff.ReaderChannel, *what: Any) -> Any:
        lane.close()
        return ask(channel, *what)

    monkeypatch.setattr(staff.ReaderChannel, "ask", leave_first)
    monkeypatch.setattr(
        staff.ReaderChannel, "tell", lambda self, what: (told.append(what["op"]), tell(self, what))
    )
    assert lane.next_window()
    assert told == ["window", "leave"] and not pool._used
    with pytest.raises(DataError, match="nobody reads on"):
        lane.next_window()


def test_a_reader_answers_whatever_goes_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("READ_PLAN", str(tmp_path))
    read_plan.write(tmp_path / "web", 4, 40)
    monkeypatch.setattr(turn, "_watchers", [])
    plan = read_plan.plan()
    ours, theirs = socket.socketpair()
    line, places = LineSocket(ours), SharedPlaces(2)
    reader = WindowReader(plan, LineSocket(theirs), places, 0)

    def serve() -> None:
        with contextlib.suppress(OSError):
            reader.serve()

    thread = threading.Thread(target=serve)
    thread.start()
    begun, wait, next_window = threading.Event(), threading.Event(), SourceLane.next_window

    def slow(lane: SourceLane) -> Any:
        begun.set()
        assert wait.wait(60)
        return next_window(lane)

    monkeypatch.setattr(SourceLane, "next_window", slow)
    window = {"op": "window", "source": "web", "lane": 0, "at": [0, 0, 0], "id": 1}
    window |= {"tally": Tally(plan.sources["web"].options).state()}

    def answer() -> str:
        message, fds = line.receive(60) or ({}, [])
        for fd in fds:
            os.close(fd)
        return str(message["op"])

    line.send({**window, "user": 1})
    assert begun.wait(60)
    line.send({"op": "leave", "user": 1})
    until(lambda: not reader._reading, "it is told")
    wait.set()
    assert answer() == "window"
    assert not reader._open, "the user left while it was read"
    line.send({**window, "user": 2})
    assert answer() == "window"
    assert list(reader._open) == [2]

    def none_left(*_: object) -> int:
        raise OSError(errno.EMFILE, "no descriptor is left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", none_left)
        line.send({**window, "user": 3})
        assert answer() == "cannot"
    line.close()
    thread.join(60)
    os.close(places.fd)


def test_a_slip_beside_the_data_ends_nothing(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = begin()
    lane: Any = feed_of(pool, ("web", 0)).lane
    before = lane.where
    pool.staff.places.reach(pool._lanes["web", 0], 511, 0)  # on the way from 255 to 256
    pool._see(lane)
    pool._blame(0, [pool._lanes["web", 0]])
    assert lane.where == before and not pool._dead

    pool._plan.mix = {0: {"web": 1.0}}.__getitem__
    pool.made(0)  # the training ends before the step that is looked ahead to

    content = channel._content
    failed: list[int] = []

    def no_memory(fd: int) -> bytes:
        if failed:
            return content(fd)
        failed.append(fd)
        os.close(fd)
        raise MemoryError

    monkeypatch.setattr(channel, "_content", no_memory)
    assert len(given(feed_of(pool, ("web", 0)), 20)) == 20
