"""Ways to answer faults: ours, ByteRobust's, plain Slurm's and those of libraries. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from bench.simulate import assumed as a
from bench.simulate.events import CODE, MACHINE, WISH, Approach, Kind, Time
from standby.size.count import LossSource, losses, pool

STEP_S = a.STEP.median
_ONCE = {MACHINE: 1, CODE: 1}


def seen(step_s: float) -> dict[str, Time]:
    """Return when robust-srun detects a fault, by how it shows."""
    return {
        "exit": a.EXIT, "gpu": a.EXIT, "node": a.NODE, "nic": a.LINK, "mount": a.MOUNT,
        "hang": a.hang(step_s), "slow": a.SLOW, "nan": a.nan(step_s), WISH: a.NONE,
    }  # fmt: skip


def at(table: Mapping[int, float], nodes: int) -> float:
    """Interpolate a table by nodes linearly, past its ends too, never below its smallest value."""
    sizes = sorted(table)
    low = max((n for n in sizes[:-1] if n <= nodes), default=sizes[0])
    high = sizes[sizes.index(low) + 1]
    slope = (table[high] - table[low]) / (high - low)
    return max(min(table.values()), table[low] + slope * (nodes - low))


def hot_update(nodes: int) -> Time:
    """The restart of all ranks in place."""
    source = f"{a.BYTEROBUST}, table 7: hot update, at {nodes} nodes"
    return a.published(source, at(a.HOT_UPDATE, nodes))


def ours(nodes: int, step_s: float = STEP_S) -> Approach:
    """robust-srun with its defaults, and a standby partition."""
    start = hot_update(nodes)
    queue = Time(
        a.GIVE_UP.median + a.HELPER.median + a.COLD.median,
        a.GIVE_UP.p95 + a.HELPER.p95 + a.COLD.p95,
        "assumed",
        "standby_wait 30 s, requeue 2.8 s (controller-2026-11-26), cold start 200 s (FT-HSDP)",
    )
    return Approach(
        name="ours",
        what="robust-srun: restart in place, standby nodes, every step in memory",
        detect=seen(step_s),
        decide=a.DECIDE,
        stop=a.STOP.times(nodes / 100, f" x {nodes} / 100"),
        test={"again": a.TESTS, "nan": a.REPLAY},
        replace=a.STANDBY,
        short=queue,
        restore=a.FETCH_GB.times(a.STATE_GB, f" x {a.STATE_GB:g} GB"),
        start=start,
        save=a.SAVE,
        interval=0.0,
        durable=a.DURABLE.median,
        tries=_ONCE,
        wrong=a.WRONG,
    )


def byterobust(nodes: int, step_s: float = STEP_S, most: bool = False) -> Approach:
    """ByteRobust, fed with its own tables; ``most``: with the largest of each."""
    which = int(most)
    test = {
        name: a.published(f"{a.BYTEROBUST}, table 6: {name}", pair[which])
        for name, pair in a.RESTART.items()
    }
    usual = a.RESTART["CUDA error"][which]
    for shows in ("exit", "gpu", "nic", "node", "mount", "hang", "slow"):
        test[shows] = a.assumed(f"as a CUDA error in table 6 of {a.BYTEROBUST}", usual)
    detect = a.INSPECT | {"nan": a.nan(step_s)}
    if most:
        detect["hang"] = a.published(f"{a.BYTEROBUST}: longest unproductive time", a.UNPRODUCTIVE)
        test["hang"] = a.NONE
    again = at(a.HOT_UPDATE, nodes)
    extra = (a.RESCHEDULE_RATIO - 1.0) * again
    return Approach(
        name="byterobust",
        what="ByteRobust by its tables 3, 6, 7, 8: a pool for single machines, groups of 8 evicted",
        detect=detect,
        decide=a.NONE,
        stop=a.NONE,
        test=test,
        replace=a.NONE,
        short=a.published(f"{a.BYTEROBUST}: reschedule, from its WAS ratios", extra),
        restore=a.NONE,
        start=a.NONE,  # in table 6
        save=a.SAVE_MFU if most else a.SAVE_PAPER,
        interval=0.0,
        durable=a.HALF_HOUR,
        evicts={"hang": 7, "slow": 7},
        tries={CODE: 1},  # a reattempt, then the rollback
    )


def reschedule(nodes: int, step_s: float = STEP_S) -> Approach:
    """ByteRobust without standby nodes: replacements are allocated and installed anew."""
    own = byterobust(nodes, step_s)
    return own._replace(
        name="reschedule",
        what="ByteRobust without standby nodes: those that leave are rescheduled",
        replace=own.short,
        pooled=False,
    )


def requeue(nodes: int, step_s: float = STEP_S) -> Approach:
    """Plain Slurm: sbatch --requeue, checkpoints on files."""
    exit_, watch = a.KILL_WAIT, a.WATCHDOG
    return Approach(
        name="requeue",
        what="plain Slurm: sbatch --requeue, a checkpoint on files every 30 min",
        detect=seen(step_s) | {"exit": exit_, "gpu": exit_, "node": a.SILENT, "nic": watch,
                           "mount": watch, "hang": watch, "nan": a.PERSON},
        decide=a.NONE,
        stop=a.NONE,
        test={"again": a.PERSON, CODE: a.PERSON},
        replace=a.NONE,
        short=a.NONE,
        restore=a.NONE,
        start=Time(a.BEGIN_WAIT.median + a.COLD.median, a.BEGIN_WAIT.p95 + a.COLD.p95, "assumed",
                   "Slurm's wait 121 s (controller-2026-11-26), cold start 200 s (FT-HSDP)"),
        save=a.SAVE_FILES,
        interval=a.HALF_HOUR,
        durable=a.HALF_HOUR,
        tries={MACHINE: 2, CODE: 2},
        pooled=False,
    )  # fmt: skip


def nvrx(nodes: int, step_s: float = STEP_S) -> Approach:
    """A launcher inside the job with spares, and local checkpoints."""
    plain = requeue(nodes, step_s)
    start = hot_update(nodes)
    cold = start.times(1.0, " + recovery-2026-11-22 nvrx_kill.total_s")
    return plain._replace(
        name="nvrx-like",
        what="restart inside the job with spares, local checkpoints every 5 min",
        detect=seen(step_s) | {"hang": a.WATCHDOG, "nic": a.WATCHDOG, "mount": a.WATCHDOG,
                           "nan": a.PERSON},
        test={"again": a.TESTS, CODE: a.PERSON},
        short=plain.start,
        start=cold._replace(median=start.median + a.NVRX_COLD.median,
                            p95=start.p95 + a.NVRX_COLD.p95),
        save=a.SAVE_LOCAL,
        interval=a.LOCAL_INTERVAL,
        durable=a.HALF_HOUR,
        tries=_ONCE,
        pooled=True,
    )  # fmt: skip


def torchft(nodes: int, step_s: float = STEP_S) -> Approach:
    """Replicas go on without the one that failed; all wait for a new quorum."""
    plain = requeue(nodes, step_s)
    part = min(1.0, a.REPLICA / nodes)
    return plain._replace(
        name="torchft-like",
        what="the other replicas go on after 3 min; one that failed comes back cold",
        detect=seen(step_s) | {"hang": a.WATCHDOG, "nan": a.PERSON},
        test={"again": a.TESTS, CODE: a.PERSON},
        short=a.PERSON.times(part, f" x {part:.3g} of the job"),
        start=a.TORCHFT,
        replace=a.COLD.times(part, f" x {part:.3g} of the job"),
        save=a.NONE,
        interval=0.0,
        durable=a.HALF_HOUR,
        tries=_ONCE,
        pooled=True,
    )


APPROACHES: Mapping[str, Callable[[int, float], Approach]] = {
    "ours": ours,
    "byterobust": byterobust,
    "torchft-like": torchft,
    "nvrx-like": nvrx,
    "reschedule": reschedule,
    "requeue": requeue,
}


def p99_pool(mix: Sequence[Kind], nodes: int, refill_h: float) -> int:
    """Return the P99 pool of single nodes, as `robust-standby size` does. Raises SizeError."""
    rate = sum(kind.per_1000 / 1000.0 * kind.machine for kind in mix if kind.nodes == 1)
    return pool(losses(nodes, [LossSource(1, rate)], refill_h / 24.0))
