"""A job that has given nodes back in an earlier step: what is left, and how a step fits there.

Slurm does not change the environment of a batch script when its job shrinks: a second robust-srun
in the script, or one that a script starts again after it was killed, would ask for nodes that are
gone. srun refuses that (22.05: "conflicts with allocated node count"), or waits for ever.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from robust_slurm import process_stat
from robust_slurm.slurm import Slurm, SlurmError
from robust_slurm.slurm.values import fold
from srun_wrapper.command.layout import StepPlan, lay_out, plan_step
from srun_wrapper.command.srun_options import UsageError
from srun_wrapper.command.step_request import StepRequest
from srun_wrapper.job.reporting.report import say

ENDING = 20.0  # s for the srun of a robust-srun that was killed
OURS, SRUN = "robust-srun", "srun"
_PER_NODE = ("SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE")


class Left(NamedTuple):
    """The nodes left to a job. ``nodes``: all that Slurm counts; ``usable``: less the bad ones.

    ``options``: of srun, to keep the step off the others.
    """

    nodes: tuple[str, ...]
    usable: tuple[str, ...]
    options: Mapping[str, str | None] = {}


def remaining_allocation(
    slurm: Slurm,
    job_id: int,
    job_dir: Path | None,
    allocated: int,
    own: str,
    excluded: str | None = None,
    lost: Collection[str] = (),
) -> Left | None:
    """Return the job's remaining nodes; None if that is all ``allocated``, or Slurm is silent.

    Nodes that an earlier robust-srun could not give back any more are given back now. ``own``: the
    node we are on; ``excluded``: the user's own --exclude; ``lost``: nodes that do not start tasks.
    Takes up to ENDING seconds where an earlier step is still ending.
    """
    try:
        job = slurm.job(job_id)
    except SlurmError as err:
        say(f"cannot get the remaining nodes of the job from Slurm: {err}")
        return None
    bad = gone(job_dir, job.start_time or 0.0).union(lost).intersection(job.nodes)
    usable = tuple(name for name in job.nodes if name not in bad)
    nodes, options = job.nodes, dict[str, str | None]()
    if bad - {job.batch_host}:
        keep = tuple(name for name in nodes if name not in bad or name == job.batch_host)
        try:
            slurm.shrink(job_id, keep)
            nodes = keep
        except SlurmError as err:
            say(f"cannot release {fold(bad)} from the job, the step will not use them: {err}")
    if bad.intersection(nodes):
        options["exclude"] = ",".join([*([excluded] if excluded else []), *sorted(bad)])
    if len(usable) < allocated and _held(slurm, job_id, usable, own):
        options["overlap"] = None
    return Left(nodes, usable, options) if 0 < len(usable) < allocated else None


def _held(slurm: Slurm, job_id: int, usable: Sequence[str], own: str) -> bool:
    """True if a step that has ended still holds the nodes: Slurm starts no other beside it.

    A step that had a lost node runs on for Slurm (22.05) until the job ends, if its srun was killed
    or the node could not be released. A step of another robust-srun is really running.
    """
    until = time.monotonic() + ENDING
    while True:
        try:
            steps = [s for s in slurm.steps(job_id) if set(s.nodes).difference(usable)]
        except SlurmError as err:
            say(f"cannot get the steps of the job from Slurm: {err}")
            return False
        sruns = [_parent(step.pid) if step.host == own else OURS for step in steps]
        if not steps or any(OURS in srun for srun in sruns if srun is not None):
            return False
        if all(srun is None for srun in sruns):
            return True
        if time.monotonic() > until:
            return False  # somebody else's srun
        time.sleep(0.2)


def _parent(pid: int) -> str | None:
    """The command line of a running srun's parent; None if there is no such srun (any more)."""
    try:
        process = process_stat.read(pid)
        if process.name != SRUN:
            return None
        return Path(f"/proc/{process.parent}/cmdline").read_bytes().decode(errors="replace")
    except (OSError, ValueError):
        return None


def gone(job_dir: Path | None, since: float) -> set[str]:
    """Return the nodes swapped out or lost in this run of the job, which began at ``since``."""
    found = set[str]()
    for record in _records(job_dir):
        try:
            if float(record["time"]) < since:
                continue
            found.update(str(old) for old, _ in record.get("swaps", ()))
            if record["symptom"] == "node_lost" and "node" in record:
                found.add(str(record["node"]))
        except (KeyError, TypeError, ValueError):
            continue
    return found


def _records(job_dir: Path | None) -> Iterator[dict[str, Any]]:
    """Yield incidents, and reports of nodes (a report is written before its incident)."""
    if job_dir is None:
        return
    texts = []
    with contextlib.suppress(OSError):
        texts += (job_dir / "incidents.jsonl").read_text(errors="replace").splitlines()
    for path in (job_dir / "accusations").glob("*.json"):
        with contextlib.suppress(OSError):
            texts.append(path.read_text(errors="replace"))
    for text in texts:
        with contextlib.suppress(ValueError):
            record = json.loads(text)
            if isinstance(record, dict):
                yield record


def corrected(env: Mapping[str, str], nodes: Sequence[str]) -> dict[str, str]:
    """The environment as Slurm would have made it for these nodes."""
    made = dict(env)
    made |= dict.fromkeys(("SLURM_JOB_NUM_NODES", "SLURM_NNODES"), str(len(nodes)))
    made |= dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST"), fold(nodes))
    for name in _PER_NODE:
        each = re.fullmatch(r"(\d+)(\(x\d+\))?", env.get(name, ""))
        if each is None:
            made.pop(name, None)  # values differ, and it is not known which one is whose
        else:
            made[name] = each[1] if len(nodes) == 1 else f"{each[1]}(x{len(nodes)})"
    if made.pop("SLURM_GPUS", None) and env.get("SLURM_GPUS_ON_NODE", "").isdigit():
        made.setdefault("SLURM_GPUS_PER_NODE", env["SLURM_GPUS_ON_NODE"])
    return made


def fit(
    request: StepRequest,
    allocated: int,
    left: int,
    spares: int,
    slurm_tasks_per_node: str | None = None,
) -> StepPlan:
    """The plan for the whole job, on the ``left`` nodes of it: fewer spares, then places ``short``.

    UsageError as ``plan_step``, and for options that fix what must now be laid out anew.
    """
    full = plan_step(request, allocated, spares, slurm_tasks_per_node)
    try:
        if full.ranks_per_active_node is None:
            active = request.nodes_cli or allocated
            if min(active, request.ntasks_cli or active) <= left:
                return full
            what = "nodes of the standby partition"
            full = lay_out(request, allocated, active, 0, slurm_tasks_per_node, what)
    except UsageError as err:
        raise UsageError(f"this job has {left} of its {allocated} nodes left, and {err}") from None
    wanted, slots = full.active_nodes, full.slots_per_node
    assert wanted is not None and slots is not None
    if wanted + full.spares <= left:
        return full
    options = {"nodes": left, "ntasks": left * slots, "ntasks-per-node": slots}
    return replace(
        full,
        spares=max(0, left - wanted),
        short=max(0, wanted - left),
        options={name: str(value) for name, value in options.items()},
    )
