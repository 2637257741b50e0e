"""Looks at Slurm and the ledger, changes Slurm's partitions, and writes down what it did."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import IO, NamedTuple

from msgspec.structs import replace

from health.accusations import companion_of
from health.admin.render import fill
from health.admin.want import SLURM_CONF, Want
from robust_slurm.slurm import Slurm, SlurmError
from standby import pool_file
from standby.lines import has_accounting, named_in, partition_lines, preemption, preempts
from standby.objects import Change, changes, record, takes, targets
from standby.pool import Choice, Member, Sight, Wish, choose, demote, uses
from standby.pool_file import PoolError, Record, taken
from standby.pool_show import notes, stock_of
from status.pool import told

SLURM_S = 20.0
_MOST_COMPANIONS = 64  # that are asked one by one whose they are
_CONF_LIMIT = 8 << 20  # bytes
Confirm = Callable[[str], bool]


class BadInput(ValueError):
    """What was asked for cannot be; the text says what can."""


class Seen(NamedTuple):
    sight: Sight
    config: Mapping[str, str]


def look(slurm: Slurm, wish: Wish, state_dir: str) -> Seen:
    """All that decides, as it is now. Raises SlurmError."""
    if not slurm.ping():
        raise SlurmError("unreachable", ("scontrol", "ping"), "no slurmctld answers")
    config, nodes = slurm.config(), slurm.nodes()
    partitions, jobs = slurm.partitions(), slurm.placements()
    names = dict.fromkeys(wish.nodes)
    if wish.partition in partitions:
        names |= dict.fromkeys(partitions[wish.partition].nodes)
    if wish.refill == "pool" and wish.source in partitions:
        names |= dict.fromkeys(partitions[wish.source].nodes)
    proofs, unread = pool_file.proofs(state_dir, [name for name in names if name in nodes])
    return Seen(Sight(nodes, partitions, jobs, proofs, time.time(), unread), config)


def check(wish: Wish, seen: Seen) -> None:
    """Raises BadInput for a wish that this Slurm cannot grant."""
    if wish.source and wish.source not in seen.sight.partitions:
        there = ", ".join(seen.sight.partitions)
        raise BadInput(f"--from {wish.source}: Slurm has no such partition; it has {there}")
    if wish.qos and not has_accounting(seen.config):
        raise BadInput(
            f"--qos {wish.qos}: a QOS needs slurmdbd, and AccountingStorageType is "
            f"{seen.config.get('AccountingStorageType', 'not set')}; without --qos all else applies"
        )


def apply(
    slurm: Slurm,
    state_dir: str,
    wanted: Callable[[Wish | None], Wish],
    out: IO[str],
    confirm: Confirm,
    dry_run: bool,
) -> int:
    """Make the pool as wished; ``wanted`` makes the wish out of the recorded one.

    Exit code 0 done or nothing to do, 1 the answer was no. Raises SlurmError, PoolError, BadInput.
    """
    with pool_file.locked(state_dir) as directory:
        old = pool_file.load(state_dir)
        wish = wanted(old.wish if old else None)
        _same_objects(old, wish)
        seen = look(slurm, wish, state_dir)
        check(wish, seen)
        sight = seen.sight
        before = old or Record(wish)
        choice = choose(wish, sight, before.admitted, taken(before))
        on = preempts(seen.config)
        goal = targets(wish, choice, sight.partitions, before.done, on)
        orders = changes(goal, sight.partitions)
        for order in orders:
            out.write(f"{order}\n")
        for name, why in choice.refused.items():
            out.write(f"not admitted: {name}: {why}\n")
        for name in choice.claims:
            out.write(f"on its way: {name}, when its jobs are over\n")
        if dry_run:
            return 0
        if orders and not confirm(f"make {count(orders)}?"):
            out.write("nothing was changed\n")
            return 1
        now = replace(before, wish=wish)
        try:
            first = [order for order in orders if takes(order, wish, sight.partitions)]
            for order in first:
                now = _do(slurm, directory, now, order)
            if first:  # from here on nothing new starts on these nodes; what has, has to end first
                sight = _again(slurm, sight)
                choice = demote(choice, wish, sight, now.admitted)
                goal = targets(wish, choice, sight.partitions, now.done, on)
            for order in changes(goal, sight.partitions):
                now = _do(slurm, directory, now, order)
        except SlurmError:
            left = pool_file.load(state_dir)
            if old is None and left is not None and not left.done:
                pool_file.remove(directory)  # nothing was done at all
            raise
        if orders:
            sight = _again(slurm, sight)
        now = _finished(now, choice, sight)
        pool_file.save(directory, now)
        wants = [w for w in preemption(wish, seen.config) if w.level == "fix"]
        wants += partition_lines(goal, now.done)
        pool_file.save_lines(directory, fill("standby.conf.j2", wants=wants))
        out.write("" if orders else "nothing to change\n")
        out.write(f"{told(stock_of(now, sight))}\n")
        for note in notes(wish, choice.members, sight, seen.config):
            out.write(f"note: {note}\n")
        _tell_lines(wants, slurm_conf(seen.config), bool(orders), state_dir, out)
    return 0


def _again(slurm: Slurm, sight: Sight) -> Sight:
    """What may have changed since."""
    partitions, nodes = slurm.partitions(), slurm.nodes()
    return sight._replace(partitions=partitions, nodes=nodes, jobs=slurm.placements())


def _same_objects(old: Record | None, wish: Wish) -> None:
    """The names of partitions are not changed under way: what was done is kept by them."""
    if old is None or not old.done:
        return
    for key in ("partition", "source", "backfill"):
        was, wanted = getattr(old.wish, key), getattr(wish, key)
        if was and was != wanted:
            flag = {"source": "from"}.get(key, key)
            raise BadInput(f"--{flag} {wanted or 'none'}: it is {was} now; revert first")


def _do(slurm: Slurm, directory: int, now: Record, order: Change) -> Record:
    """One order, written down before it is given, so that no kill can lose it."""
    present = slurm.partitions().get(order.partition)
    planned = replace(now, done=record(now.done, order, present))
    pool_file.save(directory, planned)
    try:
        give(slurm, order)
    except SlurmError as error:
        if error.kind != "timeout":  # after a time-out the deed may be done
            pool_file.save(directory, now)
        raise
    return planned


def give(slurm: Slurm, order: Change) -> None:
    """Raises SlurmError."""
    if order.action == "create":
        slurm.create_partition(order.partition, order.words())
    elif order.action == "update":
        slurm.update_partition(order.partition, order.words())
    else:
        slurm.delete_partition(order.partition)


def _finished(now: Record, choice: Choice, sight: Sight) -> Record:
    """The record after all orders: who was admitted when, and since when nodes are missing."""
    admitted = {
        name: now.admitted.get(name, Member(sight.now, name not in now.wish.nodes))
        for name in choice.members
    }
    checked = {n: sight.proofs[n].passed for n in choice.members if n in sight.proofs}
    found = replace(now, admitted=admitted, checked=checked, applied=sight.now)
    short = stock_of(found, sight).short
    since = (now.short_since or sight.now) if short else 0.0
    return replace(found, short_since=since)


def _tell_lines(wants: list[Want], text: str, moved: bool, state_dir: str, out: IO[str]) -> None:
    """What slurm.conf lacks; of lines that are there only after a change: they may be right."""
    own = [w for w in wants if w.key == "PartitionName" and w.where == SLURM_CONF]
    there = [w for w in own if named_in(text, w.value)]
    lacking = [w for w in wants if w not in there and w.where == SLURM_CONF]
    shown = lacking if text or moved else []
    shown += [w for w in wants if w not in lacking] if moved else []
    if not shown:
        return
    file = f"{state_dir}/{pool_file.DIRECTORY}/{pool_file.LINES}"
    out.write(f"\nTo outlive a reconfigure, in slurm.conf (reasons in {file}):\n")
    for want in shown:
        where = "" if want.where == SLURM_CONF else f"{want.where}: "
        also = "   (in place of the line that is there)" if want in there else ""
        out.write(f"  {where}{want.line()}{also}\n")


def slurm_conf(config: Mapping[str, str]) -> str:
    """The text of the cluster's slurm.conf, if this machine has it; else ""."""
    try:
        with open(config.get("SLURM_CONF", ""), "rb") as file:
            return file.read(_CONF_LIMIT).decode("utf-8", "replace")
    except OSError:
        return ""


def not_permanent(now: Record, config: Mapping[str, str]) -> list[str]:
    """The partitions that apply made and slurm.conf, where it can be read here, does not have."""
    text = slurm_conf(config)
    made = [name for name, one in now.done.items() if one.created]
    lacking = [name for name in made if text and named_in(text, name) is False]
    file = f"{pool_file.DIRECTORY}/{pool_file.LINES}"
    return [
        f"partition {name} is not in slurm.conf: the next reconfigure ends it ({file} in the "
        "state directory has its line)"
        for name in lacking
    ]


def companions(slurm: Slurm, wish: Wish, sight: Sight) -> dict[int, int]:
    """For the jobs in the pool's partition the training that each is a companion of."""
    found: dict[int, int] = {}
    numbers = sorted({job for use in uses(wish, sight.jobs).values() for job in use.standby})
    for number in numbers[:_MOST_COMPANIONS]:
        try:
            found[number] = companion_of(slurm.job(number).comment or "")
        except SlurmError as error:
            if error.transient:
                raise
    return found


def recorded(state_dir: str) -> Record:
    """What was applied. Raises PoolError if nothing was."""
    found = pool_file.load(state_dir)
    if found is None:
        raise PoolError(
            f"no pool is recorded below {state_dir or 'the state directory'}: "
            "robust-standby apply --nodes … makes one"
        )
    return found


def count(orders: list[Change]) -> str:
    return f"{len(orders)} change{'s' if len(orders) != 1 else ''}"
