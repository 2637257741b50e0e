"""Takes back what apply did, and refuses while standbys are in use."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import IO

from msgspec.structs import replace

from health.accusations import companion_of
from robust_slurm.slurm import Job, Slurm, SlurmError
from standby import pool_file
from standby.lines import named_in
from standby.objects import Change, undo
from standby.pool_edge import Confirm, count, give, slurm_conf
from standby.pool_file import Record

_GONE_S = 90.0  # for cancelled jobs to leave their nodes: KillWait and the epilog
_POLL_S = 0.5


def revert(
    slurm: Slurm, state_dir: str, out: IO[str], confirm: Confirm, dry_run: bool, force: bool
) -> int:
    """Take back what apply did. Exit code 0 done, 1 standbys are in use, or the answer was no."""
    with pool_file.locked(state_dir) as directory:
        now = pool_file.load(state_dir)
        if now is None:
            out.write("nothing was applied\n")
            return 0
        if not slurm.ping():
            raise SlurmError("unreachable", ("scontrol", "ping"), "no slurmctld answers")
        orders, left = undo(now.done, slurm.partitions())
        for order in orders:
            out.write(f"{order}\n")
        for note in left:
            out.write(f"note: {note}\n")
        held = _in_the_way(slurm, now, orders)
        for job in held:
            out.write(f"in use: {_who(job)}\n")
        if held and not force:
            out.write("nothing was changed: wait for them, or say --force, which cancels them\n")
            return 1
        if dry_run:
            return 0
        if orders and not confirm(f"make {count(orders)}?"):
            out.write("nothing was changed\n")
            return 1
        for job in held:
            slurm.cancel(job.id)
        until = time.monotonic() + _GONE_S
        for order in orders:
            _take_back(slurm, order, until)
            done = {n: one for n, one in now.done.items() if n != order.partition}
            now = replace(now, done=done)
            pool_file.save(directory, now)
        pool_file.remove(directory)
        out.write("the pool is taken back\n")
        text = slurm_conf(slurm.config())
        for name in dict.fromkeys((now.wish.partition, now.wish.backfill)):
            if name and named_in(text, name):
                out.write(f"slurm.conf still has partition {name}: its line brings it back\n")
    return 0


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
