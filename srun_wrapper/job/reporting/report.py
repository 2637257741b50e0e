"""The job's reports to people: lines on stderr, and the roster file behind robust-status."""

from __future__ import annotations

import getpass
import logging
import os
import socket
import statistics
import threading
import time
from collections import deque
from typing import Any

from robust_slurm.command_line.plain_text import encoded
from srun_wrapper.decide.incident import RECOVERED, Incident, ettr
from srun_wrapper.job.model import Role
from srun_wrapper.job.state import JobState

PATIENCE = 0.2  # s to wait until a line is written, if no earlier line waits
MAX_LINES = 1000
UNSEEN = 600.0  # s after the ranks' start without a step: no step of the program is seen


_log = logging.getLogger("robust-srun.said")
_LEVELS = {"warning": logging.WARNING, "error": logging.ERROR}


def say(text: str) -> None:
    """Print one line to the user, by one write, so that it does not mix with ranks' output."""
    _log.log(_LEVELS.get(text.partition(":")[0], logging.INFO), text)
    put(encoded(f"robust-srun: {text}\n"))


def put(data: bytes) -> None:
    """Write to stderr; where that is a file on a file system that does not answer, do not wait."""
    _stderr.put(data)


def flush(seconds: float = 2.0) -> None:
    """Wait for what is still to be written."""
    _stderr.flush(seconds)


class _Stderr:
    """Writes lines in order, in a thread. The caller waits a moment, then goes on without it."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=MAX_LINES)
        self._changed = threading.Condition()
        self._writing = False

    def put(self, data: bytes) -> None:
        with self._changed:
            waiting = bool(self._lines)
            self._lines.append(data)
            if not self._writing:
                self._writing = True
                threading.Thread(target=self._run, daemon=True).start()
        if not waiting:
            self.flush(PATIENCE)

    def flush(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._lines, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._lines:
                    self._writing = False
                    return
                data = self._lines[0]
            try:
                os.write(2, data)
            except OSError:
                pass
            with self._changed:
                if self._lines and self._lines[0] is data:  # else too many came: it was dropped
                    self._lines.popleft()
                self._changed.notify_all()


_stderr = _Stderr()


class Account:
    """Account of how the job's time was spent. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.wall = time.time()
        self.launched: float | None = None  # when all ranks of the first epoch had been started
        self.first_step: float | None = None
        self.recovering = 0.0
        self.degraded = 0.0  # sum of: share of the ranks that were missing x s without them
        self._degrading: tuple[float, float] | None = None  # since when, and which share
        self.incidents = 0
        self._step_times: list[float] = []
        self._steps = 0  # that were lost, where the number is known or estimated
        self._redone = 0.0  # s that were lost, by estimates, where the number is not known
        self._uncounted = self._unknown = False  # some recovery lost no known steps; no known time
        self._guessed = False  # something lost is an estimate
        self._unseen = False  # no step is seen, and the job goes on

    def incident(self, incident: Incident, step_time: float | None) -> None:
        self.incidents += 1
        self.recovering += incident.phases()["total"]
        self._guessed |= bool(incident.estimate)
        if incident.lost_steps is not None:
            self._steps += incident.lost_steps
        elif incident.outcome == RECOVERED:
            self._uncounted = True
            self._unknown |= incident.lost_s is None
            self._redone += incident.lost_s or 0.0
        self._unseen |= incident.outcome == RECOVERED and not incident.steps_seen
        if step_time is not None:
            self._step_times.append(step_time)

    @property
    def lost_steps(self) -> int | None:
        """Number of steps that were done twice; None: for some recovery it is not known."""
        return None if self._uncounted else self._steps

    def unseen(self, now: float) -> bool:
        """True if the job is taken to train although no step of it is seen."""
        if self.first_step is not None or self.launched is None:
            return False
        return self._unseen or (not self.incidents and now - self.launched >= UNSEEN)

    def estimated(self, now: float) -> bool:
        """True if the time without new steps is an estimate."""
        return self._guessed or self.unseen(now)

    def trains(self, now: float, resized: tuple[int, int] | None) -> None:
        """Note that the job trains with ``resized[1]`` of ``resized[0]`` ranks from now on; None:
        with all of them, or it stands still."""
        if self._degrading is not None:
            since, share = self._degrading
            self.degraded += (now - since) * share
        missing = 1.0 - resized[1] / resized[0] if resized is not None else 0.0
        self._degrading = (now, missing) if missing > 0 else None

    def unproductive(self, now: float, step_time: float | None) -> float | None:
        """Seconds without new steps: start-up, recoveries, and steps done twice.

        None where that is not known: after an incident before the first step, or after a recovery
        of which neither steps nor time lost are known. Where no step is seen, the job is taken to
        train since its ranks were started.
        """
        begun = self.first_step
        if begun is None and self.unseen(now):
            begun = self.launched
        if self._unknown or (begun is None and self.incidents):
            return None
        start_up = (begun if begun is not None else now) - self.started
        known = [*self._step_times, *([step_time] if step_time is not None else [])]
        again = self._steps * statistics.median(known) if known else 0.0
        lost = self.recovering + self.degraded
        return start_up + lost + again + self._redone


def roster(
    state: JobState,
    account: Account,
    phase: str,
    job_name: str,
    checkpoint: dict[str, Any] | None,
) -> dict[str, Any]:
    """The content of roster.<step>.json."""
    now = time.monotonic()
    held = {
        id(node): ranks for node, ranks in zip(state.world.places, state.world.ranks, strict=True)
    }
    step_time = state.pace.step_time()
    lost = account.unproductive(now, step_time)
    best = state.progress.best
    if best is None:
        best = state.progress.beats or None
    return {
        "job_id": state.job_id,
        "step_id": state.step_id,
        "job_name": job_name,
        "user": _user(),
        "state": phase,
        "epoch": state.world.epoch,
        "updated": time.time(),
        "started": account.wall,
        "supervisor": {"host": socket.gethostname(), "pid": os.getpid()},
        "world_size": state.world.size,
        "ranks": state.world.size + len(state.world.inner),
        "step": best,
        "step_time_s": step_time,
        "nodes": [
            {
                "name": node.name,
                "job_id": node.job_id,
                "role": node.role.value,
                "ranks": list(held.get(id(node), ())) if node.role is Role.ACTIVE else [],
                "warm": sum(node.warm.values()),
                "silent_s": round(now - node.last_word, 2),
            }
            for node in state.nodes.values()
        ],
        "incidents": account.incidents,
        "lost_steps": account.lost_steps,
        "estimated": account.estimated(now),
        "unproductive_s": None if lost is None else round(lost, 3),
        "ettr": None if lost is None else ettr(now - account.started, lost),
        "note": _note(state, phase),
        "code": state.code.version if state.code is not None else "",
        "checkpoint": checkpoint,
        "data": state.data.record(state.world, state.phases.values(), now),
    }


def _note(state: JobState, phase: str) -> str:
    """Return what is unusual about the step now: its size, and a wait beyond the limit."""
    resized, (since, waits) = state.world.resized, state.waits
    notes = ["trains with {1} of its {0} ranks".format(*resized)] if resized else []
    if waits and since == state.pace.last and phase == "running":
        notes.append(waits)
    return "; ".join(notes)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
