"""The two ways to Slurm side by side: ``python -m bench.door``.

A slurmctld with 1, 1,200, 3,000 and 10,000 nodes (no slurmd: ``lab/slurm/controller.py``), asked by
Slurm's commands and by pyslurm, in turn. ``first``: pyslurm's process is started for it, as in a
program that makes one call. Cases: ``nodes`` all nodes as typed values; ``orders`` drain (read and
order) and requeue; ``down`` the time to the error when slurmctld has gone. Without a pyslurm of
this Slurm release only the commands are measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from bench.common import MIN_SAMPLES, BenchError, Results, main
from lab.slurm.controller import Controller
from robust_slurm.slurm import Slurm, SlurmError
from robust_slurm.slurm.by_pyslurm import PySlurm

SIZES = (1, 1200, 3000, 10_000)
DEADLINE_S = 60.0
SCRIPT = "#!/bin/sh\nsleep 60\n"


class Door:
    """The clients of one slurmctld, by the names that the metrics have."""

    def __init__(self, controller: Controller, results: Results) -> None:
        self._environ = {**os.environ, **controller.env}
        # No ping: it would be measured with each call that comes a second after the last.
        self.commands = Slurm(deadline_s=DEADLINE_S, environ=self._environ)
        self.running = self._pyslurm()
        which, why = self.running.backend()
        self.has_pyslurm = which == "pyslurm"
        results.settings["slurm"] = self.commands.config().get("SLURM_VERSION", "?")
        results.settings["pyslurm"] = why

    def clients(self) -> Iterator[tuple[str, Slurm]]:
        """Each way in turn; a new process of pyslurm for ``pyslurm_first``."""
        yield "commands", self.commands
        if self.has_pyslurm:
            yield "pyslurm", self.running
            first = self._pyslurm()
            yield "pyslurm_first", first
            first.close()

    def close(self) -> None:
        self.running.close()

    def _pyslurm(self) -> PySlurm:
        return PySlurm(
            deadline_s=DEADLINE_S, environ=self._environ, required=True, ping_first=False
        )


@contextmanager
def opened(nodes: int, results: Results) -> Iterator[tuple[Door, Controller]]:
    with Controller(nodes) as controller:
        door = Door(controller, results)
        try:
            yield door, controller
        finally:
            door.close()


def nodes(results: Results) -> None:
    """Milliseconds until all nodes are typed values."""
    for size in SIZES:
        with opened(size, results) as (door, _):
            found = _measure(door, results, partial(_all, size))
        _record(results, f"nodes_{size}", found)


def orders(results: Results) -> None:
    """Milliseconds of a drain and of a requeue."""
    with opened(1200, results) as (door, _):
        turn = iter(range(1, 1200))
        found = _measure(door, results, lambda slurm: slurm.drain(f"c{next(turn)}", "bench"))
        _record(results, "drain", found)
        jobs = iter(_running(door.commands, 3 * (_runs(results) + 1)))
        found = _measure(door, results, lambda slurm: slurm.requeue(next(jobs)))
        _record(results, "requeue", found)


def down(results: Results) -> None:
    """Milliseconds until a call says that no slurmctld answers."""
    with opened(1, results) as (door, controller):
        controller.stop()
        door.commands._ping_first = door.running._ping_first = True

        def refused(slurm: Slurm) -> None:
            slurm._heard, slurm._ping_first = 0.0, True
            try:
                slurm.nodes()
            except SlurmError as error:
                if error.kind == "unreachable":
                    return
                raise
            raise BenchError("a slurmctld that is down has answered")

        _record(results, "down", _measure(door, results, refused))


def _all(size: int, slurm: Slurm) -> None:
    if len(slurm.nodes()) != size:
        raise BenchError(f"not {size} nodes were found")


def _running(slurm: Slurm, count: int) -> list[int]:
    jobs = [slurm.submit(SCRIPT, args=["-N1"], cwd=None) for _ in range(count)]
    until = time.monotonic() + DEADLINE_S
    while any(slurm.job_states().get(job) == "PENDING" for job in jobs):
        if time.monotonic() > until:
            raise BenchError("jobs were not given nodes; look at the slurmctld's log")
        time.sleep(0.2)
    return jobs


def _runs(results: Results) -> int:
    return results.runs or (3 if results.quick else MIN_SAMPLES)


def _measure(
    door: Door, results: Results, call: Callable[[Slurm], object]
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for run in range(_runs(results) + 1):
        for name, slurm in door.clients():
            began = time.perf_counter()
            call(slurm)
            took = (time.perf_counter() - began) * 1000
            if run:  # the first warms caches
                found.setdefault(name, []).append(took)
    return found


def _record(results: Results, case: str, found: dict[str, list[float]]) -> None:
    for name, samples in found.items():
        results.add(f"{case}.{name}_ms", samples, "ms")
        if name != "commands":
            results.ratio(f"{case}: {name}/commands", f"{case}.{name}_ms", f"{case}.commands_ms")


if __name__ == "__main__":
    raise SystemExit(main("door", {"nodes": nodes, "orders": orders, "down": down}))
