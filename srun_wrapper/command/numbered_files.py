"""Files whose name is a number: srun takes ``--output=99`` for a task's number or a file's name.

It is a task's number where the step has such a task. The real step may have more of them, for its
spares, so a file gets a path, which is no number.
"""

from __future__ import annotations

import re
from dataclasses import replace

from srun_wrapper.command.layout import StepPlan
from srun_wrapper.command.srun_options import SrunCommand
from srun_wrapper.command.step_request import StepRequest


def task_count(request: StepRequest, plan: StepPlan, allocation_nodes: int) -> int | None:
    """Tasks of the user's step; None where only srun can tell."""
    if plan.world_size is not None:
        return plan.world_size
    if request.ntasks_cli is not None:
        return request.ntasks_cli
    if any(name.startswith("ntasks-per-") and name != "ntasks-per-node" for name in request.given):
        return None
    nodes = request.nodes_cli or allocation_nodes
    if request.tasks_per_node is not None:
        return nodes * request.tasks_per_node
    if not request.ntasks_env:
        return nodes
    return request.ntasks_env if nodes == allocation_nodes else None


def as_paths(
    command: SrunCommand, request: StepRequest, ntasks: int | None
) -> tuple[SrunCommand, StepRequest]:
    """Turn each number that is no task of the step into a path; none if ``ntasks`` is None."""
    streams = {"output": request.output, "error": request.error, "input": request.input}
    for name, value in streams.items():
        if ntasks is None or value is None or not re.fullmatch(r"\d+", value, re.ASCII):
            continue
        if int(value) >= ntasks:
            command = command.with_option(name, f"./{value}")
            request = replace(request, **{name: f"./{value}"})  # type: ignore[arg-type]
    return command, request
