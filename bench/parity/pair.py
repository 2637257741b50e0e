"""A way under srun and under robust-srun at the same time, on nodes beside each other."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Queue

from bench.chaos.job import ChaosError
from bench.parity.judge import Remains, leftovers, only_slower, void, worse
from bench.parity.trial import ROBUST, SRUN, ParityError, Trial, prepare
from bench.parity.way import ALONE, MOUNTS, WIDE, Way
from lab import Cluster, Lab, LabError

NODES = 3
"""Nodes of one run; both runs of a way have as many."""
AT_ONCE = {WIDE: 10, MOUNTS: 2, ALONE: 1}
"""Number of ways that a lab runs at a time."""
HEAVY = 2
"""Number of ways that compute at a time, in all labs."""
SHORT, SHORT_AT_ONCE = 15.0, 3
"""Ways of so many seconds are mostly start and end; so many of them run at a time."""
STANDBY = 2
STARTS = threading.Semaphore(2)
"""Ways that start at a time, in all labs: to start is what costs computing time."""
START = 60.0  # s until the first rank has begun


@dataclass(frozen=True)
class Outcome:
    """Both runs of a way, or why there are none."""

    way: Way
    error: str = ""
    srun: Remains = field(default_factory=Remains)
    robust: Remains = field(default_factory=Remains)

    @property
    def void(self) -> str:
        """The reason for which it proves nothing, or ""."""
        return self.error or void(self.srun, self.way.code, self.way.state)

    @property
    def worse(self) -> list[str]:
        """The points in which robust-srun is worse."""
        if self.void:
            return []
        way = self.way
        kept = {"out": way.out, "err": way.err, "restarts": way.restarts}
        return worse(self.srun, self.robust, refusal=way.refusal, **kept)

    @property
    def leftovers(self) -> list[str]:
        """The processes, files and jobs that only robust-srun left."""
        return leftovers(self.srun, self.robust)


def compare(way: Way, lab: Lab, nodes: Sequence[str]) -> Outcome:
    """Run a way by both; never raises for what is wrong with the run."""
    half = len(nodes) // 2
    try:
        places = ((SRUN, nodes[: way.nodes]), (ROBUST, nodes[half : half + way.nodes]))
        trials = [Trial.new(lab, way, launcher, list(own)) for launcher, own in places]
        with STARTS:
            for trial in trials:
                trial.submit()
            happening = _happening(way, trials)
            _await_starts(trials)
        plain = trials[0]
        with ThreadPoolExecutor(2) as pool:
            waits = [pool.submit(_wait, trial, plain) for trial in trials]
            for one in waits:
                one.result()
        happening.join()
        with ThreadPoolExecutor(2) as pool:
            left, right = pool.map(Trial.remains, trials)
    except (ParityError, ChaosError, LabError, OSError, subprocess.TimeoutExpired) as error:
        return Outcome(way, f"{type(error).__name__}: {error}")
    return Outcome(way, "; ".join(happening.errors), left, right)


def _await_starts(trials: Sequence[Trial]) -> None:
    """Wait until the ranks have begun, or will not begin soon."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not all(t.started() or t.over() for t in trials):
        time.sleep(0.1)


def _wait(trial: Trial, plain: Trial) -> None:
    """Wait for a run; robust-srun's gets longer than a run may take that counts as good."""
    trial.wait(lambda: trial.began + _limit(trial, plain))


def _limit(trial: Trial, plain: Trial) -> float:
    """Return the seconds after which a run is cancelled."""
    if trial is plain or not plain.ended:
        return 2 * trial.way.seconds + 120
    took = plain.ended - plain.began
    again = trial.text("ranks").count("\n") > plain.text("ranks").count("\n")
    if trial.way.restarts:
        return 1.5 * took + 180  # the machines are tested, and other ways run beside it
    return 1.1 * took + 20 if again else 1.5 * took + 45


class _Happening(threading.Thread):
    """The event of a run, once its first rank has begun."""

    def __init__(self, trials: Sequence[Trial], errors: list[str]) -> None:
        super().__init__(daemon=True)
        self.trials, self.errors = trials, errors

    def run(self) -> None:
        """Wait for the ranks, and let it happen to the first of the runs."""
        happens, way = self.trials[0].way.happens, self.trials[0].way
        deadline = time.monotonic() + START
        while not all(trial.started() for trial in self.trials):
            if time.monotonic() > deadline:
                self.errors.append(f"no rank began within {START:g} s")
                return
            time.sleep(0.1)
        time.sleep(way.after)
        try:
            if happens:
                happens(self.trials[0])
        except (ParityError, LabError, OSError, subprocess.SubprocessError) as error:
            self.errors.append(f"{type(error).__name__}: {error}")


class _Happenings:
    """The events of both runs."""

    def __init__(self, threads: Sequence[_Happening], errors: list[str]) -> None:
        self.threads, self.errors = threads, errors

    def join(self) -> None:
        """Wait until all is over."""
        for thread in self.threads:
            thread.join()


def _happening(way: Way, trials: Sequence[Trial]) -> _Happenings:
    errors: list[str] = []
    groups = [trials] if way.once else [[trial] for trial in trials]
    threads = [_Happening(group, errors) for group in groups if way.happens]
    for thread in threads:
        thread.start()
    return _Happenings(threads, errors)


class Battery:
    """The ways of one lab, some at a time.

    Long ways wait nearly all the time, so many run at once; short ones are mostly start and end,
    so few do. Those that were worse in nothing but time run once more at the end, one by one.
    """

    def __init__(self, name: str, ways: Sequence[Way], heavy: threading.Semaphore) -> None:
        self.name, self.heavy = name, heavy
        self.ways = sorted(ways, key=lambda way: -way.seconds)
        self.slots: Queue[list[str]] = Queue()

    def run(self, done: Queue[Outcome]) -> None:
        """Bring the lab up, run all ways, and put each outcome into the queue."""
        at_once = min(AT_ONCE[self.name], len(self.ways))
        size = 2 * NODES
        scratch = self.name == MOUNTS
        try:
            with Cluster(nodes=at_once * size, standby=STANDBY, scratch=scratch) as lab:
                prepare(lab)
                names = lab.spec.train_names
                for slot in range(at_once):
                    self.slots.put(names[slot * size : (slot + 1) * size])
                for slow in self._all(lab, at_once, done):
                    done.put(self._one(slow, lab))
        except (LabError, OSError, subprocess.SubprocessError) as error:
            for way in self.ways:
                done.put(Outcome(way, f"{type(error).__name__}: {error}"))

    def _all(self, lab: Lab, at_once: int, done: Queue[Outcome]) -> list[Way]:
        """Run all ways; return those that must run once more."""
        slow: list[Way] = []
        short = min(SHORT_AT_ONCE, at_once)

        def one(way: Way) -> None:
            outcome = self._one(way, lab)
            if only_slower(outcome.worse):
                slow.append(way)
            else:
                done.put(outcome)

        with (
            ThreadPoolExecutor(max(1, at_once - short)) as waits,
            ThreadPoolExecutor(short) as sprints,
        ):
            for way in self.ways:
                (waits if way.seconds > SHORT or at_once == 1 else sprints).submit(one, way)
        return slow

    def _one(self, way: Way, lab: Lab) -> Outcome:
        nodes = self.slots.get()
        try:
            if way.heavy:
                with self.heavy:
                    return compare(way, lab, nodes)
            return compare(way, lab, nodes)
        finally:
            self.slots.put(nodes)


def run(ways: Sequence[Way], done: Queue[Outcome]) -> None:
    """Run all ways in their labs, at the same time."""
    heavy = threading.Semaphore(HEAVY)
    batteries = [
        Battery(name, mine, heavy)
        for name in AT_ONCE
        if (mine := [way for way in ways if way.lab == name])
    ]
    with ThreadPoolExecutor(len(batteries)) as pool:
        for one in [pool.submit(battery.run, done) for battery in batteries]:
            one.result()
