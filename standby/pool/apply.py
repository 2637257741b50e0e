"""Make the pool: plan the changes, ask for confirmation, order the changes and record them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import IO, NamedTuple

from msgspec.structs import replace

from health.admin.want import SLURM_CONF, Want
from robust_slurm.slurm import Slurm, SlurmError
from robust_slurm.text import counted
from standby.pool import file as pool_file
from standby.pool.edge import Confirm, PoolView, WishError, check, give, observe, slurm_conf
from standby.pool.file import PoolRecord, taken
from standby.pool.lines import named_in, partition_lines, preemption, preempts
from standby.pool.members import Admission, Choice, Sight, Wish, choose, demote
from standby.pool.objects import (
    PartitionChange,
    PoolTarget,
    changes,
    gone_notes,
    record,
    takes,
    targets,
)
from standby.pool.show import notes, stock_of
from standby.pool.stock import told

# Errors after which an order was not carried out; after any other error it may have been.
_NOT_DONE = ("denied", "invalid", "not_found", "conflict")


class PoolPlan(NamedTuple):
    """The changes to be made, as of ``seen``."""

    seen: PoolView
    choice: Choice
    goal: Mapping[str, PoolTarget]
    orders: list[PartitionChange]


def plan(slurm: Slurm, state_dir: str, wish: Wish, old: PoolRecord | None) -> PoolPlan:
    """Plan the changes from the current state. Raises SlurmError, WishError."""
    seen = observe(slurm, wish, state_dir)
    check(wish, seen, old)
    before, sight = old or PoolRecord(wish), seen.sight
    choice = choose(wish, sight, before.admitted, taken(before))
    goal = targets(wish, choice, sight.partitions, sight.nodes, before.done, preempts(seen.config))
    return PoolPlan(seen, choice, goal, changes(goal, sight.partitions))


class ApplyReport(NamedTuple):
    """The result of an apply, for JSON. ``slurm_conf``: the lines that slurm.conf should have."""

    changes: Sequence[str]
    notes: Sequence[str]
    not_admitted: Mapping[str, str]
    joins_later: Sequence[str]
    slurm_conf: Sequence[str] = ()
    done: bool = False
    pool: str = ""


def _report(found: PoolPlan) -> ApplyReport:
    gone = [n for name, target in found.goal.items() for n in gone_notes(name, target.gone)]
    choice = found.choice
    return ApplyReport(
        list(map(str, found.orders)), gone, dict(choice.refused), list(choice.claims)
    )


def _show(found: PoolPlan, out: IO[str]) -> None:
    report = _report(found)
    lines = [*report.changes, *(f"note: {note}" for note in report.notes)]
    lines += [f"not admitted: {name}: {why}" for name, why in report.not_admitted.items()]
    lines += [f"joins when its jobs end: {name}" for name in report.joins_later]
    out.write("".join(f"{line}\n" for line in lines))


def apply(
    slurm: Slurm,
    state_dir: str,
    wanted: Callable[[Wish | None], Wish],
    out: IO[str],
    confirm: Confirm,
    dry_run: bool,
    told_to: Callable[[ApplyReport], None] = lambda report: None,
) -> int:
    """Make the pool as wished; ``wanted`` makes the wish out of the recorded one.

    ``told_to`` gets the result.

    Exit code 0 done or nothing to do, 1 the answer was no. Raises SlurmError, PoolError, WishError.
    """
    pool_file.demand(state_dir)
    old = pool_file.load(state_dir)
    wish = _wished(wanted, old)  # a wrong wish leaves no lock behind
    if dry_run:
        found = plan(slurm, state_dir, wish, old)
        _show(found, out)
        told_to(_report(found))
        return 0
    with pool_file.locked(state_dir) as directory:
        old = pool_file.load(state_dir)
        wish = _wished(wanted, old)
        found = plan(slurm, state_dir, wish, old)
        _show(found, out)
        while found.orders and confirm is not None:
            if not confirm(f"make {counted(len(found.orders), 'change')}?"):
                out.write("nothing was changed\n")
                return 1
            asked, found = found, plan(slurm, state_dir, wish, old)
            if found.orders == asked.orders:
                break
            out.write("Slurm has changed meanwhile; the changes would now be:\n")
            _show(found, out)
        now, found = _carry_out(slurm, directory, old, wish, found)
        sight, config = found.seen
        now = _finished(now, found.choice, sight)
        pool_file.save(directory, now)
        wants = [w for w in preemption(wish, config) if w.level == "fix"]
        wants += partition_lines(found.goal, now.done)
        out.write("" if found.orders else "nothing to change\n")
        out.write(f"{told(stock_of(now, sight))}\n")
        more = notes(wish, found.choice.members, sight, config)
        for note in more:
            out.write(f"note: {note}\n")
        lines = _tell_lines(wants, slurm_conf(config), bool(found.orders), out)
        result = _report(found)
        told_to(
            result._replace(
                notes=[*result.notes, *more],
                slurm_conf=lines,
                done=True,
                pool=told(stock_of(now, sight)),
            )
        )
    return 0


def _wished(wanted: Callable[[Wish | None], Wish], old: PoolRecord | None) -> Wish:
    wish = wanted(old.wish if old else None)
    _same_objects(old, wish)
    return wish


def _carry_out(
    slurm: Slurm, directory: int, old: PoolRecord | None, wish: Wish, found: PoolPlan
) -> tuple[PoolRecord, PoolPlan]:
    """Give all orders; return the new record, and the plan as carried out. Raises SlurmError.

    If Slurm refused the first order, the old record is restored.
    """
    start = now = replace(old or PoolRecord(wish), wish=wish)
    sight, choice, goal = found.seen.sight, found.choice, found.goal
    try:
        first = [order for order in found.orders if takes(order, wish, sight.partitions)]
        for order in first:
            now = _do(slurm, directory, now, order)
        if first:  # no new job can start on these nodes now; one that has started must end first
            sight = _again(slurm, sight)
            choice = demote(choice, wish, sight, now.admitted)
            on = preempts(found.seen.config)
            goal = targets(wish, choice, sight.partitions, sight.nodes, now.done, on)
        for order in changes(goal, sight.partitions):
            now = _do(slurm, directory, now, order)
    except SlurmError as error:
        if now is start and error.kind in _NOT_DONE:
            if old is None:
                pool_file.remove(directory)
            else:
                pool_file.save(directory, old)
        raise
    if found.orders:
        sight = _again(slurm, sight)
    seen = found.seen._replace(sight=sight)
    return now, PoolPlan(seen, choice, goal, found.orders)


def _again(slurm: Slurm, sight: Sight) -> Sight:
    """Read again what may have changed since."""
    partitions, nodes = slurm.partitions(), slurm.nodes()
    return sight._replace(partitions=partitions, nodes=nodes, jobs=slurm.placements())


def _same_objects(old: PoolRecord | None, wish: Wish) -> None:
    """Raise WishError if the name of a partition changes: the record has changes by its name."""
    if old is None or not old.done:
        return
    for key in ("partition", "source", "backfill", "lease"):
        was, wanted = getattr(old.wish, key), getattr(wish, key)
        if was and was != wanted:
            flag = {"source": "from"}.get(key, key)
            raise WishError(
                f"--{flag} {wanted or 'none'}: it is {was} now; give the nodes back first "
                f"(apply --size 0), then delete {pool_file.DIRECTORY}/{pool_file.FILE} in the "
                "state directory"
            )


def _do(slurm: Slurm, directory: int, now: PoolRecord, order: PartitionChange) -> PoolRecord:
    """Give one order, recorded before, so that it is not lost if this process is killed."""
    present = slurm.partitions().get(order.partition)
    planned = replace(now, done=record(now.done, order, present))
    pool_file.save(directory, planned)
    try:
        give(slurm, order)
    except SlurmError as error:
        if error.kind in _NOT_DONE:
            pool_file.save(directory, now)
        raise
    return planned


def _finished(now: PoolRecord, choice: Choice, sight: Sight) -> PoolRecord:
    """Return the record after all orders: times of admission, and since when nodes are missing."""
    admitted = {
        name: now.admitted.get(name, Admission(sight.now, name not in now.wish.nodes))
        for name in choice.members
    }
    checked = {n: sight.proofs[n].passed for n in choice.members if n in sight.proofs}
    found = replace(now, admitted=admitted, checked=checked, applied=sight.now)
    short = stock_of(found, sight).short
    since = (now.short_since or sight.now) if short else 0.0
    return replace(found, short_since=since)


def _tell_lines(wants: list[Want], text: str, moved: bool, out: IO[str]) -> list[str]:
    """Print and return the lines that slurm.conf lacks; after a change, also those to replace."""
    own = [w for w in wants if w.key == "PartitionName" and w.where == SLURM_CONF]
    there = [w for w in own if named_in(text, w.value)]
    lacking = [w for w in wants if w not in there and w.where == SLURM_CONF]
    shown = lacking if text or moved else []
    shown += [w for w in wants if w not in lacking] if moved else []
    if not shown:
        return []
    out.write("\nTo keep the pool over a reconfigure, write into slurm.conf:\n")
    for want in shown:
        out.write(f"  # {want.why}\n")
        where = "" if want.where == SLURM_CONF else f"{want.where}: "
        also = "   # replaces the line that is there" if want in there else ""
        out.write(f"  {where}{want.line()}{also}\n")
    return [want.line() for want in shown]
