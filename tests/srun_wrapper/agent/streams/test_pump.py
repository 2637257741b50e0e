"""Carrying a rank's output on."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_slurm.record import BeatReader, RecordWriter, create
from srun_wrapper.agent.streams.pump import TAIL, Pump, StepPattern
from srun_wrapper.command.output_rules import Labeler


def carry(
    data: bytes,
    sink: int | None = None,
    *,
    transform: Callable[[bytes], bytes] | None = None,
    watch: Callable[[bytes], None] | None = None,
    name: str = "output",
) -> Pump:
    """Run ``data`` through a pump."""
    source, end = os.pipe()
    pump = Pump(source, sink, transform=transform, watch=watch, name=name)
    with open(end, "wb") as pipe:
        pipe.write(data)
    assert pump.finish(10.0)
    return pump


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """The lines that a robust-task warns of."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("robust-task")
    log.addHandler(handler)
    yield found
    log.removeHandler(handler)


def test_everything_arrives(tmp_path: Path) -> None:
    data = os.urandom(1 << 20)
    with (tmp_path / "out").open("wb") as out:
        pump = carry(data, out.fileno())
    assert (tmp_path / "out").read_bytes() == data
    assert pump.error == ""


def test_labels(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out:
        carry(b"one\ntwo", out.fileno(), transform=Labeler(2, 3))
    assert (tmp_path / "out").read_bytes() == b" 3: one\n 3: two\n"


@pytest.mark.parametrize(
    ("data", "tail"),
    [
        (b"", ""),
        (b"short\nlines", "short\nlines"),
        (b"x" * (2 * TAIL), "x" * TAIL),  # one line only: better its end than nothing
        (b"".join(b"line %06d\n" % i for i in range(2000)), None),
        (b"caf\xe9\xff", "caf\ufffd\ufffd"),
    ],
)
def test_tail(data: bytes, tail: str | None) -> None:
    got = carry(data).tail()
    if tail is None:
        assert got.startswith("line ") and got.endswith("line 001999\n")
        assert TAIL - 20 < len(got) <= TAIL
    else:
        assert got == tail


def test_a_closed_sink_does_not_stop_the_rank() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    pump = carry(b"x" * (1 << 20) + b"last words", writer)
    os.close(writer)
    assert pump.error == "Broken pipe"
    assert pump.tail().endswith("last words")


def test_a_full_disk_does_not_stop_the_rank_and_is_said_once(warnings: list[str]) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        pump = carry(b"x" * (1 << 20), full.fileno(), name="stdout of rank 3")
    assert pump.error == "No space left on device"
    assert warnings == [
        "stdout of rank 3: further output is lost, training goes on: No space left on device"
    ]


def feed(end: int, data: bytes) -> threading.Thread:
    """Write from a thread, because a pipe holds only so much."""

    def write() -> None:
        with open(end, "wb") as pipe:
            pipe.write(data)

    thread = threading.Thread(target=write)
    thread.start()
    return thread


def test_a_sink_that_was_made_non_blocking_loses_nothing() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    data, got = os.urandom(1 << 20), bytearray()

    def read() -> None:
        while piece := os.read(reader, 1 << 14):
            got.extend(piece)

    thread = threading.Thread(target=read)
    source, end = os.pipe()
    pump = Pump(source, writer)
    feeder = feed(end, data)
    thread.start()
    assert pump.finish(20.0)
    os.close(writer)
    thread.join(10.0)
    feeder.join(10.0)
    os.close(reader)
    assert bytes(got) == data and pump.error == ""


def test_a_blocked_sink_holds_up_only_its_stream() -> None:
    reader, writer = os.pipe()
    source, end = os.pipe()
    pump = Pump(source, writer)
    feeder = feed(end, b"x" * (1 << 18))
    began = time.monotonic()
    assert not pump.finish(0.05)
    assert time.monotonic() - began < 5.0
    assert pump.tail()
    got = 0
    while got < 1 << 18:
        got += len(os.read(reader, 1 << 16))
    assert pump.finish(10.0)
    feeder.join(10.0)
    os.close(reader)
    os.close(writer)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text("abc", max_size=5), max_size=8), st.sampled_from(["\n", "\r\n", "\r"]))
def test_watch_sees_every_line(lines: list[str], end: str) -> None:
    """Watch sees the lines of progress bars, too, and the last line without an end."""
    seen: list[bytes] = []
    carry(end.join(lines).encode(), watch=seen.append)
    assert [line for line in seen if line] == [line.encode() for line in lines if line]


def test_a_watch_that_fails_does_not_stop_the_stream(tmp_path: Path, warnings: list[str]) -> None:
    def fail(_line: bytes) -> None:
        raise OSError(5, "Input/output error")

    with (tmp_path / "out").open("wb") as out:
        pump = carry(b"a\nb\n" * 50_000, out.fileno(), watch=fail)
    assert (tmp_path / "out").stat().st_size == 200_000
    assert pump.error == "Input/output error"
    assert warnings == ["output: no steps are read from it any more: Input/output error"]


@pytest.mark.parametrize(
    ("regex", "lines", "steps"),
    [
        (r"step (\d+)", [b"step 7", b"nothing", b"step 9 of 10"], [7, 9]),
        (r"(?P<what>\w+) (?P<step>\d+)/", [b"it 12/100"], [12]),
        (r"step", [b"a step", b"x", b"step step"], [1, 2]),
        (r"step ([\d,_]+)", [b"step 1,234", b"step 5_678"], [1234, 5678]),
        (r"step (\w+)", [b"step one", b"step 8"], [1, 8]),
        (r"step( \d+)?", [b"step", b"step 5"], [1, 5]),
        (r"Schritt-é (\d+)", ["Schritt-é 3".encode()], [3]),
        (r"step (\d+)", [b"\xff\xfe step 4 \x00"], [4]),
        (r"step (\d+)", [b"step " + b"9" * 5000], [1]),
    ],
)
def test_step_pattern(regex: str, lines: list[bytes], steps: list[int]) -> None:
    got: list[int] = []
    pattern = StepPattern(regex, got.append)
    for line in lines:
        pattern(line)
    assert got == steps


def test_steps_in_the_output_become_beats(tmp_path: Path) -> None:
    path = str(tmp_path / "1-0.beat")
    create(path, epoch=1, local_rank=0, rank=0)
    writer, reader = RecordWriter(path), BeatReader(path)
    carry(b"10%\rstep 41\rstep 42", watch=StepPattern(r"step (\d+)", writer.beat))
    beat = reader.read()
    assert beat is not None
    assert (beat.step, beat.beats, beat.source) == (42, 2, "regex")
    writer.close()
    reader.close()
