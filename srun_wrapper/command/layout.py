"""Compute the size of the real step in nodes and tasks, and the slots that get a rank.

Without spares srun decides alone. With K spares the step runs on A + K nodes with the same
number of task slots on each, so that any node can take the place of any other; ranks fill the
first slots of the first A nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from robust_slurm.text import counted
from srun_wrapper.command.srun_options import SrunCommand, UsageError
from srun_wrapper.command.step_request import StepRequest

# Options that fix which node a task gets, or count tasks or GPUs over all nodes of the step.
_INCOMPATIBLE = {
    "nodelist": "it names the nodes, and a spare must be free to replace any of them",
    "nodefile": "it names the nodes, and a spare must be free to replace any of them",
    "relative": "it fixes the step's first node, and a spare must be free to replace it",
    "multi-prog": "its file gives programs to task numbers, which spare slots shift",
    "ntasks-per-gpu": "the number of ranks must not depend on the spares' GPUs; use -n",
    "ntasks-per-tres": "the number of ranks must not depend on the spares' GPUs; use -n",
    "ntasks-per-core": "the number of ranks per node must be fixed; use --ntasks-per-node",
    "ntasks-per-socket": "the number of ranks per node must be fixed; use --ntasks-per-node",
    "gpus": "it counts GPUs over all nodes, spares included; use --gpus-per-node or --gres",
}


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The real step. Without spares only ``spares`` (0) is set: srun decides, shims report.

    ``options``: srun options to set in place of the user's. ``slots_per_node``: tasks that
    srun launches on every node. ``ranks_per_active_node``: rank numbers of each active node,
    active nodes being the step's first; block order, or cyclic if asked. ``short``: of the active
    nodes, how many the allocation no longer has (see ``supervisor/step/remaining.py``).
    """

    spares: int = 0
    options: Mapping[str, str | None] = field(default_factory=dict)
    active_nodes: int | None = None
    world_size: int | None = None
    slots_per_node: int | None = None
    ranks_per_active_node: tuple[tuple[int, ...], ...] | None = None
    short: int = 0

    def apply(self, command: SrunCommand) -> SrunCommand:
        """The command with this plan's options."""
        for name, value in self.options.items():
            command = command.with_option(name, value)
        return command


def plan_step(
    request: StepRequest,
    allocation_nodes: int,
    spares: int,
    slurm_tasks_per_node: str | None = None,
) -> StepPlan:
    """Lay the step out on ``allocation_nodes`` nodes, ``spares`` of them idle.

    ``slurm_tasks_per_node`` (SLURM_TASKS_PER_NODE) is only shown in an error. Raises UsageError
    when the numbers do not fit, or for an option that spares cannot be combined with.
    """
    if spares < 0:
        raise UsageError(f"--robust-spares={spares}: must be 0 or more")
    if spares == 0:
        return StepPlan()
    if spares >= allocation_nodes:
        raise UsageError(
            f"--robust-spares={spares} leaves no node to run on: the allocation has "
            f"{_nodes(allocation_nodes)}; ask for {_nodes(spares + 1)} or more, "
            f"or for at most {allocation_nodes - 1} spares"
        )
    active = request.nodes_cli or allocation_nodes - spares
    if active + spares > allocation_nodes:
        raise UsageError(
            f"--nodes={active} and --robust-spares={spares} need {_nodes(active + spares)}, the "
            f"allocation has {_nodes(allocation_nodes)}: ask sbatch or salloc for "
            f"-N{active + spares}, or give --nodes={allocation_nodes - spares}"
        )
    return lay_out(request, allocation_nodes, active, spares, slurm_tasks_per_node)


def lay_out(
    request: StepRequest,
    allocation_nodes: int,
    active: int,
    spares: int,
    slurm_tasks_per_node: str | None,
    what: str = "--robust-spares",
) -> StepPlan:
    """The same slots on each of ``active`` + ``spares`` nodes.

    UsageError for options that ``what`` cannot be combined with.
    """
    cyclic = _check_compatible(request, what)
    world = _world_size(request, active, allocation_nodes, slurm_tasks_per_node)
    active = min(active, world)  # srun too uses no more nodes than tasks
    slots = -(-world // active)
    ranks = _cyclic(world, active) if cyclic else _block(world, active)
    nodes = active + spares
    options = {
        "nodes": str(nodes),
        "ntasks": str(nodes * slots),
        "ntasks-per-node": str(slots),
    }
    return StepPlan(spares, options, active, world, slots, ranks)


def _world_size(
    request: StepRequest, active: int, allocation_nodes: int, slurm_tasks_per_node: str | None
) -> int:
    if request.ntasks_cli is not None:
        # srun, too, lets -n win over --ntasks-per-node, with a warning
        if request.ntasks_cli < 1:
            raise UsageError(f"--ntasks={request.ntasks_cli}: must be 1 or more")
        return request.ntasks_cli
    if request.tasks_per_node is not None:
        if request.tasks_per_node < 1:
            raise UsageError(f"--ntasks-per-node={request.tasks_per_node}: must be 1 or more")
        return active * request.tasks_per_node
    if not request.ntasks_env:
        return active
    if active == allocation_nodes:
        return request.ntasks_env
    nodes = request.nodes_env or allocation_nodes
    per_node, rest = divmod(request.ntasks_env, nodes)
    if rest:
        detail = f" ({slurm_tasks_per_node} per node)" if slurm_tasks_per_node else ""
        raise UsageError(
            f"the allocation's {request.ntasks_env} tasks{detail} do not divide evenly over its "
            f"{_nodes(nodes)}, so the number of ranks without the spares is not clear: "
            "give --ntasks or --ntasks-per-node to robust-srun"
        )
    return active * per_node


def _check_compatible(request: StepRequest, what: str) -> bool:
    """Raise UsageError for an option that spares cannot be combined with; True if cyclic."""
    given = request.given | ({"multi-prog"} if request.multi_prog else set())
    for name, why in _INCOMPATIBLE.items():
        if name in given:
            raise UsageError(f"--{name} cannot be combined with {what}: {why}")
    distribution = (request.distribution or "block").lower()
    first, *flags = distribution.split(",")
    kind = first.split(":")[0]
    why = ""
    if kind in ("pack", "nopack"):
        flags, kind = [kind, *flags], "block"
    if kind not in ("block", "cyclic", "*"):
        why = f"{kind} placement depends on the step's size, which the spares change"
    elif "pack" in flags:
        why = "pack fills nodes unevenly, and a spare must be able to replace any node"
    if why:
        raise UsageError(
            f"--distribution={request.distribution} cannot be combined with {what}: {why}; "
            "use block or cyclic"
        )
    return kind == "cyclic"


def _block(world: int, nodes: int) -> tuple[tuple[int, ...], ...]:
    low, more = divmod(world, nodes)
    starts = [i * low + min(i, more) for i in range(nodes + 1)]
    return tuple(tuple(range(starts[i], starts[i + 1])) for i in range(nodes))


def _cyclic(world: int, nodes: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(i, world, nodes)) for i in range(nodes))


def _nodes(count: int) -> str:
    return counted(count, "node")


def allocation(env: Mapping[str, str]) -> int:
    """Number of nodes of the allocation that we run in. UsageError outside one."""
    job = env.get("SLURM_JOB_ID", "")
    nodes = env.get("SLURM_JOB_NUM_NODES") or env.get("SLURM_NNODES") or ""
    if not job:
        raise UsageError(
            "no allocation: robust-srun runs inside a job (SLURM_JOB_ID is not set); "
            "use it in an sbatch script or after salloc"
        )
    if not job.isdigit():
        raise UsageError(f"SLURM_JOB_ID={job!r} is not a job id; unset it or start a new job")
    if not nodes.isdigit():
        what = (
            f"SLURM_JOB_NUM_NODES={nodes!r} is not a number"
            if nodes
            else ("SLURM_JOB_NUM_NODES is not set, though SLURM_JOB_ID is")
        )
        raise UsageError(
            f"{what}: the job's environment is incomplete (sudo, env -i, a container?); run "
            "robust-srun with all SLURM_* variables of the job"
        )
    return int(nodes)
