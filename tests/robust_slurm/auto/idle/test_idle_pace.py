"""Imports pause while they slow the rank's steps, and only then."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from robust_slurm import layout
from robust_slurm.auto.idle import pace
from robust_slurm.auto.idle.pace import ImportPace, pause_of

STEP = 0.007


class Training:
    """Steps on a clock of its own; imports beside it make them longer by a factor."""

    def __init__(self, path: Path, slower: float, step: float = STEP) -> None:
        self.now, self.next, self.steps = 1000.0, 1000.0, 0
        self.slower, self.step, self.ends = slower, step, 1e9
        self.path = path
        self.fd = layout.create_file(str(path), 1, 0, 0)
        self.sleep(3 * step)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self._pass(seconds, 1.0)

    def compute(self, seconds: float) -> None:
        """Import for so long."""
        self._pass(seconds, self.slower)

    def _pass(self, seconds: float, factor: float) -> None:
        self.now += seconds
        while self.next + self.step * factor <= min(self.now, self.ends):
            self.next += self.step * factor
            self.steps += 1
            beat = layout.BEAT.pack(self.steps, self.steps, self.next, 0.0, 0.0, 1, self.steps)
            os.pwrite(self.fd, beat, layout.BEAT_AT)

    def imports(self, seconds: float, each: float = 0.01) -> float:
        """Return how long an import takes that needs so many seconds of work."""
        began, paced = self.now, ImportPace(str(self.path))
        with paced:
            assert sys.meta_path[0] is paced or not self.path.exists()
            while seconds > 0:
                assert paced.find_spec("any") is None
                self.compute(each)
                seconds -= each
        assert paced not in sys.meta_path
        return self.now - began


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Training]]:
    made: list[Training] = []

    class One(Training):
        def __init__(self, slower: float, step: float = STEP) -> None:
            super().__init__(tmp_path / f"1-{len(made)}.beat", slower, step)
            made.append(self)
            clock = SimpleNamespace(monotonic=self.monotonic, sleep=self.sleep)
            monkeypatch.setattr(pace, "time", clock)

    yield One  # type: ignore[misc]
    for one in made:
        os.close(one.fd)


@pytest.mark.parametrize(
    ("busy", "ran", "pause"),
    [(1.0, 0.1, 0.0), (1.02, 0.1, 0.0), (1.04, 0.1, 0.1), (1.1, 0.1, 0.4), (9.0, 0.1, 1.5),
     (0.5, 0.1, 0.0), (9.0, 5.0, 2.0)],
)  # fmt: skip
def test_the_pause_makes_up_for_what_was_felt(busy: float, ran: float, pause: float) -> None:
    assert pause_of(1.0, busy, ran) == pytest.approx(pause)


@pytest.mark.parametrize(
    ("slower", "most_felt", "longest"),
    [(1.0, 1.0, 1.7), (1.015, 1.015, 1.7), (1.06, 1.025, 5.0), (1.36, 1.09, 8.5)],
)
def test_steps_are_slower_by_little(
    training: type[Training], slower: float, most_felt: float, longest: float
) -> None:
    one = training(slower)  # type: ignore[arg-type, call-arg]
    before = one.steps
    took = one.imports(1.5)
    assert took < longest
    assert took / (one.steps - before) / STEP < most_felt + STEP / took


def test_it_waits_for_nobody_who_makes_no_steps(training: type[Training]) -> None:
    slow = training(1.5, step=3.0)  # type: ignore[arg-type, call-arg]
    assert slow.imports(1.5) < 1.5 + pace.PATIENCE + 0.1
    ended = training(1.5)  # type: ignore[arg-type, call-arg]
    ended.ends = ended.now + 0.4  # in the first pause
    assert ended.imports(1.5) < 2.3


def test_modules_do_what_they_like_with_the_finders(
    training: type[Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = training(9.0)  # type: ignore[arg-type, call-arg]
    paced, finders = ImportPace(str(one.path)), list(sys.meta_path)
    with paced:
        monkeypatch.setattr(sys, "meta_path", finders)
    now = one.now
    one.compute(1.0)
    assert paced.find_spec("any") is None and one.now == now + 1.0


def test_without_a_record_it_does_not_pause(training: type[Training]) -> None:
    one = training(1.5)  # type: ignore[arg-type, call-arg]
    one.path.unlink()
    assert one.imports(0.5) == pytest.approx(0.5)
