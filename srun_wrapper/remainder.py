"""A job that has given nodes back in an earlier step: what is left, and how a step fits there.

Slurm does not change the environment of a batch script when its job shrinks: a second robust-srun
in the script, or one that a script starts again after it was killed, would ask for nodes that are
gone. srun refuses that (22.05: "conflicts with allocated node count"), or waits for ever.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from robust_slurm.slurm import Slurm, SlurmError
from robust_slurm.slurm.values import fold
from srun_wrapper.layout import StepPlan, lay_out, plan_step
from srun_wrapper.report import say
from srun_wrapper.srun_options import UsageError
from srun_wrapper.step_request import StepRequest

_PER_NODE = ("SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE")


def nodes_left(slurm: Slurm, job_id: int, allocated: int) -> tuple[str, ...]:
    """The job's nodes, if they are fewer than the ``allocated`` that its environment tells of."""
    try:
        nodes = slurm.job(job_id).nodes
    except SlurmError as err:
        say(f"cannot ask Slurm for the nodes that the job has left: {err}")
        return ()
    return nodes if 0 < len(nodes) < allocated else ()


def corrected(env: Mapping[str, str], nodes: Sequence[str]) -> dict[str, str]:
    """The environment as Slurm would have made it for these nodes."""
    made = dict(env)
    made |= dict.fromkeys(("SLURM_JOB_NUM_NODES", "SLURM_NNODES"), str(len(nodes)))
    made |= dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST"), fold(nodes))
    for name in _PER_NODE:
        each = re.fullmatch(r"(\d+)(\(x\d+\))?", env.get(name, ""))
        if each is None:
            made.pop(name, None)  # not the same everywhere, and nobody says of which node it was
        else:
            made[name] = each[1] if len(nodes) == 1 else f"{each[1]}(x{len(nodes)})"
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
            if active <= left:
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
