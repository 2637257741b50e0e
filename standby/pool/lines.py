"""The lines of slurm.conf that keep the pool when slurmctld restarts. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from health.admin.show_config import value_of
from health.admin.want import SLURM_CONF, Level, Want
from robust_slurm.slurm.values import fold
from standby.pool.members import Wish
from standby.pool.objects import AppliedChanges, PoolTarget

PREEMPT_TYPE = "preempt/partition_prio"


def preempts(config: Mapping[str, str]) -> bool:
    """Return whether jobs of a higher tier take nodes from those of a lower one."""
    on = value_of(config, "PreemptMode").upper().split(",")[0] not in ("", "OFF")
    return value_of(config, "PreemptType") == PREEMPT_TYPE and on


def has_accounting(config: Mapping[str, str]) -> bool:
    """Return whether there is a slurmdbd, without which no QOS exists."""
    return value_of(config, "AccountingStorageType") == "accounting_storage/slurmdbd"


def preemption(wish: Wish, config: Mapping[str, str]) -> list[Want]:
    """Return the settings without which trainings would wait for low-priority jobs."""
    lower = [name for name in (wish.backfill, wish.lease) if name]
    if not lower:
        return []
    kind, mode = value_of(config, "PreemptType"), value_of(config, "PreemptMode")
    good: Level = "ok" if kind == PREEMPT_TYPE else "fix"
    why = (
        f"preempts jobs of partition {' and '.join(lower)} when a training needs their node. It "
        "holds for all partitions that share nodes: write PreemptMode=OFF where jobs must not end"
    )
    if kind not in ("", "preempt/none", PREEMPT_TYPE):
        why += f"; replaces {kind}, which is in force now"
    found = [Want("PreemptType", kind, PREEMPT_TYPE, good, why, True)]
    good = "ok" if mode.upper().split(",")[0] not in ("", "OFF") else "fix"
    why = "requeues preempted jobs, and cancels those that cannot be requeued"
    found.append(Want("PreemptMode", mode, mode if good == "ok" else "REQUEUE", good, why, True))
    return found


def partition_lines(
    wanted: Mapping[str, PoolTarget], done: Mapping[str, AppliedChanges]
) -> list[Want]:
    """Return the lines of partitions that apply created, and the settings of those it changed."""
    found = []
    for name, target in wanted.items():
        one = done.get(name)
        settings = {key: value for key, value in target.settings.items() if value}
        if one is None:
            continue
        words = {"Nodes": fold(target.nodes)}
        if one.created:
            words |= {**settings, **target.initial}
            why, where, head = (
                f"partition {name}, created by robust-standby apply",
                SLURM_CONF,
                [_head(name)],
            )
        else:
            words |= settings
            why = f"settings of partition {name} that robust-standby apply changed"
            where, head = f"in the line {_head(name)}", []
        line = " ".join([*head, *(f"{k}={v}" for k, v in words.items())])
        found.append(Want("PartitionName", "", name, "fix", why, True, line, where))
    return found


def _head(name: str) -> str:
    return f"PartitionName={name}"


def named_in(slurm_conf: str, partition: str) -> bool | None:
    """Return whether slurm.conf has a line of this partition; None: unknown, it includes files."""
    line = rf"(?im)^[ \t]*PartitionName[ \t]*=[ \t]*{re.escape(partition)}(?=\s|$)"
    if re.search(line, slurm_conf):
        return True
    return None if re.search(r"(?im)^[ \t]*Include\s", slurm_conf) else False
