"""The process that answers for a rank: orders of events that real ones have only now and then.

A stand-in for the warm interpreter, named so (``FAKE``), says and ends what the test wants.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import until

from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.processes import process_tree
from srun_wrapper.agent.warm import interpreter
from srun_wrapper.agent.warm.imports import Learnt
from srun_wrapper.agent.warm.interpreter import Warm

FAKE = """
import array, json, os, socket, subprocess, sys
link = socket.socket(fileno=int(os.environ["ROBUST_WARM_FD"]))
def child():
    return subprocess.Popen(["sleep", "60"])
def hear(link):
    head, control, _, _ = link.recvmsg(8, 100)
    fds = array.array("i", control[0][2] if control else b"")
    return json.loads(link.recv(int.from_bytes(head, "big"))), fds
def say(link, **words):
    link.sendall(json.dumps(words).encode() + b"\\n")
def wait(name):
    import time
    while not os.path.exists(name):
        time.sleep(0.005)
hear(link)
say(link, ready=1)
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Warm]]:
    """A ``Warm`` with an interpreter that goes on with this text."""
    monkeypatch.setattr(interpreter, "STAND_IN", 0.0)
    monkeypatch.setattr(interpreter, "ANSWER", 60.0)
    monkeypatch.chdir(tmp_path)
    warms: list[Warm] = []

    def make(text: str) -> Warm:
        script = tmp_path / "fake.py"
        script.write_text(FAKE + text)
        command = [sys.executable, str(script)]
        one = Warm(Loop(), tmp_path, (), lambda _learnt: None, lambda: None)
        warms.append(one)
        one.start(Learnt(1, tuple(command), {}, ()), command, {})
        return one

    yield make
    left = [pid for one in warms for pid in one.processes()]
    left += [below for pid in left for below in process_tree.descendants(pid)]
    for one in warms:
        one.stop()
    process_tree.end_all(left)


def turn(one: Warm, condition: Callable[[], object]) -> None:
    """Turn its loop until the condition holds."""

    def turned() -> object:
        one._loop.turn(0.01)
        return condition()

    until(turned, "what the loop is to do", every=0.0)


def ask(one: Warm, told: list[int]) -> None:
    """``told`` gets the answer."""
    with Path("out").open("wb") as out:
        streams = (out.fileno(), out.fileno())
        assert one.ask(one._command, {}, streams, told.append)


def test_a_stand_in_that_dies_answers_not_for_the_interpreter(
    made: Callable[[str], Warm],
) -> None:
    one = made(
        """
request, fds = hear(link)
wait("asked")
own = socket.socket(fileno=fds[0])
say(link, pid=child().pid, stand_in=request["stand_in"])
wait("made")
own.close()
hear(link)
wait("gone")
say(link, pid=child().pid)
hear(link)
"""
    )
    told: list[int] = []
    turn(one, lambda: bool(one._ordered))
    ask(one, told)
    Path("asked").touch()
    turn(one, lambda: one._ahead is not None)
    Path("made").touch()
    turn(one, lambda: one._ahead is None)
    assert told == []
    Path("gone").touch()
    turn(one, lambda: told)
    assert len(told) == 1 and told[0] > 0


def test_what_it_said_before_its_end_counts(made: Callable[[str], Warm]) -> None:
    """The end of the process is seen before its answer is read."""
    one = made(
        """
request, fds = hear(link)
own = socket.socket(fileno=fds[0])
process = child()
say(link, pid=process.pid, stand_in=request["stand_in"])
hear(own)
say(own, pid=process.pid)
own.close()
open("said", "w").close()
hear(link)
"""
    )
    told: list[int] = []
    turn(one, lambda: one._ahead is not None)
    assert one._ahead is not None
    pid = one._ahead.pid
    ask(one, told)
    until(Path("said").exists, "the fake's word")
    one.reaped([pid])
    turn(one, lambda: told)
    assert told == [pid]


def test_a_stand_in_that_has_gone_unnoticed_is_passed_over(made: Callable[[str], Warm]) -> None:
    one = made(
        """
request, fds = hear(link)
own = socket.socket(fileno=fds[0])
say(link, pid=child().pid, stand_in=request["stand_in"])
wait("made")
own.close()
open("closed", "w").close()
hear(link)
say(link, pid=child().pid)
hear(link)
"""
    )
    told: list[int] = []
    turn(one, lambda: one._ahead is not None)
    Path("made").touch()
    until(Path("closed").exists, "the fake's word")
    ask(one, told)
    turn(one, lambda: told)
    assert told[0] > 0


def test_a_rank_that_nobody_waits_for_is_ended(made: Callable[[str], Warm]) -> None:
    one = made(
        """
process = child()
say(link, pid=process.pid)
process.wait()
open("ended", "w").close()
hear(link); hear(link)
"""
    )
    turn(one, Path("ended").exists)
