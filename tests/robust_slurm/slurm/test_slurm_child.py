"""The process that has pyslurm: deadlines, hostile answers, and that nothing of it is left."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from robust_slurm.slurm import child as module
from robust_slurm.slurm.child import ChildLate, ChildLost, PyslurmChild

# It greets, then does BODY for every line that it reads.
PROGRAM = """\
import json, os, sys
def say(text):
    os.write(1, text.encode() + b"\\n")
say({hello!r})
for line in sys.stdin.buffer:
    number = json.loads(line)["number"]
    {body}
"""
HELLO = '{"value": {"pyslurm": "24.11.0"}}'
ECHO = "say(json.dumps({'number': number, 'value': len(line)}))"
PATIENCE_S = 20.0  # for what is to succeed on a busy machine

Opener = Callable[..., PyslurmChild]


@pytest.fixture
def opened() -> Iterator[Opener]:
    children: list[PyslurmChild] = []

    def child(body: str = ECHO, hello: str = HELLO) -> PyslurmChild:
        code = PROGRAM.format(hello=hello, body=body)
        children.append(PyslurmChild([sys.executable, "-IS", "-c", code], {}))
        return children[-1]

    yield child
    for each in children:
        each.close()


def soon(seconds: float = PATIENCE_S) -> float:
    return time.monotonic() + seconds


def files() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def pid(child: PyslurmChild) -> int:
    assert child._process is not None
    return child._process.pid


def test_it_leaves_no_process_and_no_file(opened: Opener) -> None:
    before = files()
    child = opened()
    assert child.ask({}, soon()) > 0
    number = pid(child)
    child.close()
    assert not Path(f"/proc/{number}").exists()  # not even as a zombie
    assert len(files()) <= len(before)
    assert child.ask({}, soon()) > 0  # started again


def test_a_process_that_reads_nothing_costs_the_deadline(opened: Opener) -> None:
    child = opened()
    child.start(soon())
    number = pid(child)
    os.kill(number, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(ChildLate) as caught:
        child.ask({"nodes": "n" * (1 << 20)}, soon(0.5))  # more than a pipe holds
    assert time.monotonic() - began < 5 and caught.value.sent
    assert not Path(f"/proc/{number}").exists()


def test_a_long_request_arrives_whole(opened: Opener) -> None:
    assert opened().ask({"nodes": "n" * (1 << 20)}, soon()) > 1 << 20


def test_without_time_nothing_is_asked_and_nothing_killed(opened: Opener) -> None:
    child = opened()
    child.start(soon())
    number = pid(child)
    with pytest.raises(ChildLate) as caught:
        child.ask({}, time.monotonic())
    assert not caught.value.sent and pid(child) == number


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("say('[' * 100_000)", "not JSON"),
        ("say('7')", "not JSON"),
        ("say('\\x00')", "not JSON"),
        ("say('x' * 5000)", "larger than"),
        ("say(json.dumps({'number': number + 1, 'value': 1}))", "to another question"),
        ("say(json.dumps({'value': 1}))", "to another question"),
        ('os.write(1, b\'{"number": 1, "va\'); os._exit(0)', "ended with exit code 0"),
        ('os.write(1, b\'{"number": 1, "va\'); os.kill(os.getpid(), 9)', "ended with signal 9"),
        ("os.close(1); import time; time.sleep(60)", "closed its output"),
        ("os.write(2, b'fatal:\\tno\\x1b[1m\\n'); os._exit(1)", "exit code 1: fatal: no?[1m"),
        ("say(json.dumps({'number': number}))", "has no value"),
        ("say(json.dumps({'number': number, 'error': 'a\\nb'}))", "a b"),
    ],
)
def test_what_is_no_answer_is_a_loss_that_says_why(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, body: str, why: str
) -> None:
    monkeypatch.setattr(module, "_MOST", 4096 if "5000" in body else 1 << 20)
    child = opened(body)
    with pytest.raises(ChildLost) as caught:
        child.ask({}, soon())
    assert why in str(caught.value) and str(caught.value).isprintable()
    assert caught.value.sent


@pytest.mark.parametrize("hello", ["{}", '{"value": 3}', '{"value": {}}', "[]", "", '{"error": 1}'])
def test_a_greeting_of_another_kind_is_a_loss(opened: Opener, hello: str) -> None:
    child = opened(hello=hello)
    with pytest.raises(ChildLost) as caught:
        child.ask({}, soon())
    assert not caught.value.sent and not child.running


def test_a_second_answer_is_not_taken_for_the_next(opened: Opener) -> None:
    child = opened(f"{ECHO}; {ECHO}")
    child.ask({}, soon())
    with pytest.raises(ChildLost, match="another question"):
        child.ask({}, soon())


def test_an_interrupted_question_leaves_no_answer_to_the_next(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    child = opened()
    child.start(soon())
    with monkeypatch.context() as patch:
        patch.setattr(child, "_read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            child.ask({}, soon())
    assert not child.running
    assert child.ask({}, soon()) > 0


def test_its_noise_takes_no_memory_and_its_last_words_are_kept(opened: Opener) -> None:
    noise = "[os.write(2, b'x' * 4000) for _ in range(10)]"
    child = opened(f"{noise}; {ECHO} if number < 5 else (os.write(2, b'fatal: gone'), os._exit(1))")
    for _ in range(4):  # together more than is kept
        child.ask({}, soon())
        assert os.fstat(child._said).st_size == module._KEPT
    with pytest.raises(ChildLost, match="fatal: gone"):
        child.ask({}, soon())


def test_too_little_time_to_start_is_no_loss(opened: Opener) -> None:
    child = opened()
    with pytest.raises(ChildLate):
        child.start(soon(0.001))
    assert child.ask({}, soon()) > 0


def test_what_cannot_start_is_a_loss() -> None:
    child = PyslurmChild(["/nonexistent"], {})
    with pytest.raises(ChildLost, match="cannot be started"):
        child.start(soon())
