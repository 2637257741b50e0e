"""Takes back what apply did, and refuses while standbys are in use."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import IO, NamedTuple

from msgspec.structs import replace

from health.history.accusations import companion_of
from robust_slurm.slurm import Job, Slurm, SlurmError
from standby.pool import file
from standby.pool.edge import Confirm, alive, count, give, slurm_conf
from standby.pool.file import Record
from standby.pool.lines import named_in
from standby.pool.objects import Change, undo

_GONE_S = 90.0  # for cancelled jobs to leave their nodes: KillWait and the epilog
_POLL_S = 0.5


class Undo(NamedTuple):
    """The changes that take the pool back, as of now; ``held``: jobs that are in the way."""

    orders: list[Change]
    notes: list[str]
    held: list[Job]


def revert(
    slurm: Slurm, state_dir: str, out: IO[str], confirm: Confirm, dry_run: bool, force: bool
) -> int:
    """Take back what apply did. Exit code 0 done, 1 standbys are in use, or the answer was no."""
    if dry_run:
        file.demand(state_dir)
        now = file.load(state_dir)
        if now is not None:
            return _show(_look(slurm, now), force, out)
        out.write("nothing was applied\n")
        return 0
    with file.locked(state_dir) as directory:
        now = file.load(state_dir)
        if now is None:
            out.write("nothing was applied\n")
            return 0
        found = _look(slurm, now)
        if _show(found, force, out):
            return 1
        while found.orders and confirm is not None:
            if not confirm(f"make {count(found.orders)}?"):
                out.write("nothing was changed\n")
                return 1
            asked, found = found, _look(slurm, now)
            if found.orders == asked.orders and _ids(found) == _ids(asked):
                break
            out.write("Slurm is not as it was; now it would be:\n")
            if _show(found, force, out):
                return 1
        _carry_out(slurm, directory, now, found)
        out.write("the pool is taken back\n")
        _tell_lines(now, found.orders, slurm_conf(slurm.config()), out)
    return 0


def _look(slurm: Slurm, now: Record) -> Undo:
    alive(slurm)
    orders, left = undo(now.done, slurm.partitions(), slurm.nodes())
    return Undo(orders, left, _in_the_way(slurm, now, orders))


def _ids(found: Undo) -> set[int]:
    return {job.id for job in found.held}


def _show(found: Undo, force: bool, out: IO[str]) -> int:
    """Exit code 1 if it cannot be done without --force."""
    for order in found.orders:
        out.write(f"{order}\n")
    for note in found.notes:
        out.write(f"note: {note}\n")
    for job in found.held:
        out.write(f"in use: {_who(job)}\n")
    if found.held and not force:
        out.write("nothing was changed: wait for them, or say --force, which cancels them\n")
        return 1
    return 0


def _carry_out(slurm: Slurm, directory: int, now: Record, found: Undo) -> None:
    """A partition that is taken back is no longer recorded. Raises SlurmError, PoolError."""
    for job in found.held:
        slurm.cancel(job.id)
    until = time.monotonic() + _GONE_S
    for order in found.orders:
        _take_back(slurm, order, until)
        done = {name: one for name, one in now.done.items() if name != order.partition}
        now = replace(now, done=done)
        file.save(directory, now)
    file.remove(directory)


def _tell_lines(now: Record, orders: Iterable[Change], text: str, out: IO[str]) -> None:
    """Print what slurm.conf (``text``; "" if unreadable here) may still say, as apply told."""
    for name, one in now.done.items():
        if one.created and named_in(text, name):
            out.write(f"slurm.conf still has partition {name}: its line brings it back\n")
    for order in orders:
        name = order.partition
        if order.action == "update" and (named_in(text, name) is not False or not text):
            words = " ".join(f"{k}={v or '(none)'}" for k, v in order.words().items())
            out.write(
                f"slurm.conf: if its line of partition {name} was changed for the pool, "
                f"write there again: {words}\n"
            )


def _take_back(slurm: Slurm, order: Change, until: float) -> None:
    """Again while jobs are just leaving the partition."""
    while True:
        try:
            give(slurm, order)
            return
        except SlurmError as error:
            if error.kind != "conflict" or time.monotonic() > until:
                raise
        time.sleep(_POLL_S)


def _in_the_way(slurm: Slurm, now: Record, orders: Iterable[Change]) -> list[Job]:
    """Jobs that run or wait in partitions that are about to go or lose nodes."""
    ours = {now.wish.partition, now.wish.backfill} & {order.partition for order in orders}
    jobs = [job for job in slurm.jobs() if not job.finished]
    return [job for job in jobs if ours & set(job.partition.split(","))]


def _who(job: Job) -> str:
    of = companion_of(job.comment or "")
    text = f"job {job.id} of {job.user} in partition {job.partition}, {job.state}"
    return f"{text}, standby of job {of}" if of else text
