"""A maintenance reservation that keeps jobs off the nodes under test; removed in every case."""

from __future__ import annotations

import os
import pwd
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from health.commands import BadInput
from robust_slurm.slurm import Slurm, SlurmError
from robust_slurm.slurm.values import fold

END_S = 40.0  # for its jobs and their epilogs to end, and for Slurm to delete it
_TICK_S = 0.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def refuse_busy(slurm: Slurm, nodes: Sequence[str]) -> None:
    """Raise BadInput unless every node could take a job now; Slurm's refusal would name no job."""
    known, jobs = slurm.nodes(nodes), slurm.placements()
    wrong = []
    for name in nodes:
        node = known.get(name)
        held = [f"{number} of {job.user}" for number, job in jobs.items() if name in job.nodes]
        if node is None:
            wrong.append(f"{name}: no such node in Slurm")
        elif "DRAIN" in node.state:
            wrong.append(
                f"{name}: drained ({node.reason or 'no reason'}), and drained nodes run no jobs, "
                "not even in a reservation: run `robust-health test` on the node itself, or "
                "undrain it first"
            )
        elif held:
            wrong.append(f"{name}: busy with job {', '.join(held)}; wait until it ends")
        elif not node.idle:
            wrong.append(f"{name}: {'+'.join(sorted(node.state))}")
    if wrong:
        raise BadInput("nothing was started: " + "; ".join(wrong[:20]))


@contextmanager
def reserved(
    slurm: Slurm, nodes: Sequence[str], minutes: int, keep: bool, said: Callable[[str], None]
) -> Iterator[str]:
    """Reserve these nodes from now on for ``minutes``; yields the reservation's name.

    SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt inside. At the end the reservation's jobs
    are cancelled and, without ``keep``, it is deleted. Raises SlurmError, BadInput.
    """
    name = f"robust-burn-in-{time.strftime('%m%d-%H%M%S')}-{os.getpid()}"
    settings = {
        "StartTime": "now",
        "Duration": str(minutes),
        "Nodes": fold(nodes),
        "Users": _user(),
        "Flags": "MAINT",
    }
    before = {number: signal.signal(number, _interrupt) for number in _SIGNALS}
    try:
        try:
            slurm.create_reservation(name, settings)
            said(
                f"reservation {name}, {minutes} min at most; to remove it by hand: {_by_hand(name)}"
            )
            yield name
        finally:
            for number in _SIGNALS:
                signal.signal(number, _patience)
            _end(slurm, name, keep, said)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _patience(number: int, frame: object) -> None:
    with suppress(OSError):  # the terminal may be what has gone
        print("robust-health burn-in: the reservation is being removed", file=sys.stderr)


def _user() -> str:
    """Return the user that Slurm sees, which the environment may not name (sudo, cron)."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())  # Slurm takes a number too


def _end(slurm: Slurm, name: str, keep: bool, said: Callable[[str], None]) -> None:
    """Cancel the reservation's jobs and delete it; report a failure instead of raising."""
    until = time.monotonic() + END_S
    error: SlurmError | None = None
    while True:
        try:
            for job in slurm.reserved(name):
                slurm.cancel(job)
            if keep:
                said(f"reservation {name} is kept; to remove it: {_by_hand(name)}")
            else:
                slurm.delete_reservation(name)
            return
        except SlurmError as failed:
            error = failed
        if time.monotonic() > until or not (error.transient or error.kind == "conflict"):
            break
        time.sleep(_TICK_S)
    said(f"reservation {name} may still exist: {error}; to remove it: {_by_hand(name)}")


def _by_hand(name: str) -> str:
    return f"scontrol delete ReservationName={name}"
