"""The pool as people and programs are shown it. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from health.admin.show_config import seconds, value_of
from health.gate.proof import Proof
from robust_slurm.slurm import SlurmNode
from robust_slurm.text import span
from standby.leases import held
from standby.pool.file import PoolRecord, taken
from standby.pool.lines import preemption, preempts
from standby.pool.members import HOUR, Choice, Sight, Use, Wish, choose, shared, uses
from standby.pool.objects import changes, gone_notes, known, targets
from standby.pool.stock import Pool, PoolStock, stock, told

JSON_VERSION = 1


class PoolRow(NamedTuple):
    """One node of the pool. Times in seconds ago; None: not known."""

    node: str
    state: str
    use: str
    admitted_s: float | None
    checked_s: float | None
    burned_s: float | None  # looked for only where the pool asks for burn-ins


class View(NamedTuple):
    """``differs``: changes that bring back what was applied; ``notes``: other shortcomings."""

    stock: PoolStock
    rows: Sequence[PoolRow]
    refused: Mapping[str, str]
    joining: Sequence[str]
    claims: Sequence[str]
    differs: Sequence[str]
    notes: Sequence[str]


def applied(record: PoolRecord, nodes: Container[str]) -> Choice:
    """Return the pool as apply left it, without nodes on their way that Slurm no longer knows."""
    return Choice(tuple(record.admitted), known(taken(record), nodes)[0], {})


def stock_of(record: PoolRecord, sight: Sight) -> PoolStock:
    wish = record.wish
    times = {n: p.passed for n, p in sight.proofs.items() if p.passed}
    pool = Pool(wish.partition, wish.backfill, wish.lease, wish.size, record.short_since, times)
    return stock(pool, sight.nodes, sight.jobs, sight.now)


def view(
    record: PoolRecord,
    sight: Sight,
    config: Mapping[str, str],
    owners: Mapping[int, int],
    told_elsewhere: Sequence[str] = (),
) -> View:
    """Return the pool as shown; ``owners``: job in the pool's partition → its training."""
    wish, left = record.wish, applied(record, sight.nodes)
    use = uses(wish, sight.jobs)
    on = preempts(config)
    wanted = targets(wish, left, sight.partitions, sight.nodes, record.done, on)
    gone = [note for name, target in wanted.items() for note in gone_notes(name, target.gone)]
    names = dict.fromkeys((*record.admitted, *sight.nodes_of(wish.partition)))
    rows = [
        PoolRow(
            name,
            "+".join(sorted(sight.nodes[name].state)) if name in sight.nodes else "gone",
            _use(sight.nodes.get(name), use.get(name, Use()), owners),
            sight.now - record.admitted[name].since if name in record.admitted else None,
            _age(sight.proofs.get(name, Proof()).passed, sight.now),
            _age(sight.proofs.get(name, Proof()).burned, sight.now),
        )
        for name in names
    ]
    now = choose(wish, sight, record.admitted, left.claims)
    return View(
        stock_of(record, sight),
        rows,
        now.refused,
        [name for name in now.members if name not in record.admitted],
        left.claims,
        [str(order) for order in changes(wanted, sight.partitions)],
        [*notes(wish, left.members, sight, config), *gone, *told_elsewhere],
    )


def _use(node: SlurmNode | None, use: Use, owners: Mapping[int, int]) -> str:
    parts = []
    for job in use.standby:
        of = owners.get(job, 0)
        parts.append(f"job {job}" + (f", standby of job {of}" if of else ""))
    parts += [f"lent to job {job}" for job in use.lent]
    parts += [f"leased by job {owners.get(job) or job}" for job in use.leased]
    parts += [f"job {job} of another partition" for job in use.other]
    if node is None or not node.usable:
        parts.append((node.reason if node else "") or "out of service")
    return "; ".join(parts) or "free"


def _age(then: float, now: float) -> float | None:
    return max(0.0, now - then) if then else None


def notes(
    wish: Wish, members: Sequence[str], sight: Sight, config: Mapping[str, str]
) -> Iterator[str]:
    """Yield the reasons why the pool cannot do its work, and what to do."""
    for name, nodes in shared(wish, members, sight.partitions).items():
        these = f"{len(nodes)} of its nodes" if len(nodes) > 1 else nodes[0]
        ends = preempts(config) and sight.partitions[name].raw.get("PreemptMode") != "OFF"
        also = ", and trainings that need a standby node end those jobs" if ends else ""
        yield (
            f"partition {name} also has {these}: its jobs can occupy them{also}; remove them from "
            f"it with --from {name}"
        )
    names = {wish.partition, wish.backfill, wish.lease, held(wish.lease)}
    for name in sorted(names & set(sight.partitions)):
        if sight.partitions[name].state != "UP":
            yield f"partition {name} is {sight.partitions[name].state}"
    if any(want.level == "fix" for want in preemption(wish, config)):
        lines = " and ".join(w.line() for w in preemption(wish, config) if w.level == "fix")
        for name in filter(None, (wish.backfill, wish.lease)):
            if name in sight.partitions:
                yield (
                    f"jobs in partition {name} are not preempted, so trainings wait for them: "
                    f"slurm.conf needs {lines}"
                )
            else:
                yield (
                    f"partition {name} is not created: write {lines} into slurm.conf, then apply "
                    "again"
                )
    every = seconds(value_of(config, "HealthCheckInterval"))
    if wish.proof_hours and (not value_of(config, "HealthCheckProgram") or not every):
        yield "no HealthCheckProgram runs, so idle nodes are not checked; see robust-admin doctor"
    elif wish.proof_hours and every and wish.proof_hours * HOUR < 2 * max(every, HOUR):
        yield (
            f"--proof-hours {wish.proof_hours:g} is too short: passed checks are recorded hourly"
        )
    if sight.unread:
        yield f"no node can join, since the records of checks cannot be read: {sight.unread}"


def as_text(found: View) -> str:
    lines = [told(found.stock)]
    if found.rows:
        columns = ["NODE", "STATE", "USE", "ADMITTED", "CHECKED", "BURN-IN"]
        cells = [columns]
        cells += [
            [
                row.node,
                row.state,
                row.use,
                *map(_ago, (row.admitted_s, row.checked_s, row.burned_s)),
            ]
            for row in found.rows
        ]
        if all(row.burned_s is None for row in found.rows):
            cells = [row[:-1] for row in cells]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines += ["", *("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)]
    lines += _section("may join at the next apply", dict.fromkeys(found.joining, ""))
    lines += _section("join when their jobs end", dict.fromkeys(found.claims, ""))
    lines += _section("not admitted", found.refused)
    if found.differs:
        lines += ["", "Slurm differs from what was applied; robust-standby apply would order:"]
        lines += [f"  {text}" for text in found.differs]
    lines += ["", *(f"note: {text}" for text in found.notes)] if found.notes else []
    return "\n".join(lines) + "\n"


def _section(title: str, names: Mapping[str, str]) -> list[str]:
    rows = [f"  {name}  {text}".rstrip() for name, text in names.items()]
    return ["", f"{title}:", *rows] if rows else []


def _ago(age: float | None) -> str:
    return "-" if age is None else f"{span(age)} ago"


def as_json(found: View) -> dict[str, Any]:
    rows = [row._asdict() for row in found.rows]
    return {"version": JSON_VERSION, **found._asdict(), "stock": asdict(found.stock), "rows": rows}
