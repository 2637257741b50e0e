"""The plan of a burn-in: nodes, partition, duration, and the command line of its Slurm jobs."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from health.active.burn_in.reservation import refuse_busy
from health.active.coordinator.procedure import WantedTests
from health.active.coordinator.shares import OVERHEAD_S, rounds
from health.active.nvidia import job_tools
from health.active_tests import BY_NAME, TESTS, Level
from health.commands import BadInput
from health.gate.active_child import TRUST_S, distrusted
from health.node.slurmconf import parse_gres
from health.settings import Settings
from robust_slurm.checkpoint.planning.topology import leaves
from robust_slurm.hostlist import expand
from robust_slurm.slurm import Slurm, SlurmNode

START_S = 180.0  # prolog, start of the job, and torch from a slow file system
_SPARE_S = 60.0


class BurnInPlan(NamedTuple):
    """``gpus``: the nodes by their number of GPUs. ``minutes``: of job and reservation."""

    nodes: tuple[str, ...]
    gpus: dict[int, list[str]]
    partition: str
    python: str
    wanted: WantedTests
    minutes: int
    user: str  # the account of the workers


def planned(
    options: argparse.Namespace, settings: Settings, level: Level, slurm: Slurm
) -> BurnInPlan:
    try:
        nodes = tuple(dict.fromkeys(expand(options.nodes)))
    except ValueError as err:
        raise BadInput(f"{options.nodes}: {err}") from None
    of_nodes = slurm.nodes(nodes)
    gpus = by_gpus(of_nodes.values())
    full = full_s(level) + (job_tools.FULL_S[level] if any(gpus) else 0.0)
    limit = full if options.limit is None else options.limit
    if not nodes or not 0 < limit < 1e6:
        raise BadInput(f"{options.nodes} --limit {limit:g}: some nodes, and seconds above 0")
    least = math.ceil((START_S + limit + _SPARE_S) / 60)
    minutes = least if options.time_limit is None else options.time_limit
    if minutes * 60 < limit:
        raise BadInput(
            f"--time-limit {minutes}: the tests may take {limit:g} s; set at least {least}"
        )
    refuse_busy(slurm, nodes)
    wanted = WantedTests(tuple(BY_NAME), level, limit, leaf_of=leaves(slurm.topology()))
    python = options.python or str(settings.active["python"]) or sys.executable
    if not python.startswith("/"):
        raise BadInput(
            f"--python {python}: must be the absolute path of the interpreter on the nodes"
        )
    wrong = distrusted(python, TRUST_S) if os.geteuid() == 0 else ""
    if wrong:
        raise BadInput(f"--python {python}: root runs it on the nodes, but {wrong}")
    partition = partition_of(slurm, nodes, options.partition)
    return BurnInPlan(nodes, gpus, partition, python, wanted, minutes, str(settings.active["user"]))


def full_s(level: Level) -> float:
    """Seconds for all our tests of a level, with a fifth to spare; NVIDIA's tools not included."""
    whole = sum(rounds(test.name) * (test.seconds[level] + OVERHEAD_S) for test in TESTS)
    return 10.0 + 1.2 * whole


def by_gpus(nodes: Iterable[SlurmNode]) -> dict[int, list[str]]:
    """Group the nodes by the number of GPUs that Slurm gives to an exclusive job. Pure."""
    found: dict[int, list[str]] = {}
    for node in nodes:
        count = sum(parse_gres(node.gres or "").values())
        found.setdefault(count, []).append(node.name)
    return found


def partition_of(slurm: Slurm, nodes: Sequence[str], asked: str | None = None) -> str:
    """A partition that is up and has all the nodes: ``asked``, or the default one. BadInput."""
    known = slurm.partitions()
    if asked is not None and asked not in known:
        raise BadInput(
            f"--partition {asked}: no such partition; Slurm has "
            f"{', '.join(sorted(known)) or 'none'}"
        )
    partitions = known.values() if asked is None else [known[asked]]
    fit = [p for p in partitions if p.state == "UP" and set(nodes) <= set(p.nodes)]
    if not fit:
        if asked is not None:
            raise BadInput(f"--partition {asked}: not UP, or does not contain all these nodes")
        raise BadInput("no UP partition contains all these nodes; test them in several runs")
    return max(fit, key=lambda p: p.default).name


def job_argv(
    plan: BurnInPlan, reservation: str, gpus: int, nodes: Sequence[str], words: Sequence[str]
) -> list[str]:
    """Return the srun command of a job on whole nodes that runs ``words`` once on each."""
    return [
        "srun",
        *(f"--reservation={reservation}", f"--partition={plan.partition}", "--exclusive"),
        *(f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"),
        *("--nodelist=" + ",".join(nodes), "--mem=0", "--cpu-bind=none", "--chdir=/"),
        *([f"--gres=gpu:{gpus}"] if gpus else []),
        *("--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--mpi=none", "--export=ALL"),
        *(f"--time={plan.minutes}", f"--job-name={reservation}"),
        *words,
    ]
