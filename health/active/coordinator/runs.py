"""The two places where ``robust-health test`` runs: this machine, or the nodes of the job."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, NamedTuple

from health.active.coordinator import start
from health.active.coordinator.procedure import Measurements, Procedure, WantedTests
from health.active.coordinator.session import About, TestSession
from health.active.judging.fleet import Baselines
from health.active.nvidia import gpu_use, job_tools
from health.active_tests import BY_NAME
from health.finding import Finding
from robust_slurm.text import counted

LOST = ("NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_RESET_REQUIRED")
"""NVML's own word that a GPU is gone."""
START_S = 120.0  # for workers to connect and to import torch from a slow file system


class RunPlan(NamedTuple):
    """``tools``: the wanted ones of ``job_tools.TOOLS``. ``log`` gets what the workers print.

    ``dcgm_level``: the level of dcgmi diag, if not the usual one of the test level. ``user``: the
    account of the workers that root starts.
    """

    nodes: tuple[str, ...]
    wanted: WantedTests
    tools: tuple[str, ...]
    python: str
    known: Baselines
    said: Callable[[str], None]
    log: IO[bytes] | None = None
    dcgm_level: int | None = None
    user: str = ""


class RunResult(NamedTuple):
    """``disturbed``: processes that used the GPUs at the end of the tests, but not at the start."""

    outcome: Measurements
    disturbed: tuple[str, ...] = ()


def on_job(plan: RunPlan) -> RunResult:
    """Run the tests on the nodes of the current job, in one step. Raises OSError."""
    ends = time.monotonic() + plan.wanted.limit
    wanted = plan.wanted._replace(leaf_of=_leaves())
    outcome, about = asyncio.run(_tested(plan, wanted, on_step=True))
    if not plan.tools:
        return RunResult(outcome)
    known = any(_gpus(one) for one in about.values()) or not about
    if not known and not os.environ.get("SLURM_GPUS_ON_NODE"):
        line = f"{', '.join(plan.tools)}: no node has a GPU"
        return RunResult(outcome._replace(left_out=(*outcome.left_out, line)))
    found = tools_on_step(plan, about, ends - time.monotonic(), start.step_argv, os.environ)
    seconds = plan.wanted.limit - (ends - time.monotonic())
    return RunResult(with_tools(outcome, found)._replace(seconds=seconds))


def tools_on_step(
    plan: RunPlan,
    about: Mapping[str, About],
    seconds: float,
    step_argv: Callable[[Sequence[str], Sequence[str]], list[str]],
    env: Mapping[str, str],
) -> dict[str, job_tools.ToolResults]:
    """Run NVIDIA's tools on the plan's nodes; ``step_argv`` makes the srun command from nodes and
    words."""
    if seconds < job_tools.START_S:
        line = (
            f"{', '.join(plan.tools)}: {max(0.0, seconds):.0f} s left, but starting the step may "
            f"take 30 s"
        )
        return {node: job_tools.ToolResults(left_out=(line,)) for node in plan.nodes}
    plan.said(
        f"{', '.join(plan.tools)} on {counted(len(plan.nodes), 'node')}, where they are installed"
    )
    words = job_tools.argv(
        [plan.python, start.flag()], plan.wanted.level, seconds - job_tools.START_S,
        plan.dcgm_level, plan.tools,
    )  # fmt: skip
    found = job_tools.step(step_argv(plan.nodes, words), env, plan.nodes, seconds)
    return {node: one.of_model(_model(about.get(node))) for node, one in found.items()}


def on_this_machine(plan: RunPlan) -> RunResult:
    """Run the tests here, NVIDIA's tools too. Raises OSError."""
    ends = time.monotonic() + plan.wanted.limit
    node, wanted = plan.nodes[0], plan.wanted
    use = gpu_use.take()
    held = gpu_use.busy(use)
    found: list[Finding] = []
    if held:
        wanted, tools, finding = _without_exclusive(wanted, plan.tools, held)
        plan = plan._replace(tools=tools)
        found += finding
    wanted = wanted._replace(limit=max(1.0, ends - time.monotonic()))
    outcome, about = asyncio.run(_tested(plan, wanted, on_step=False))
    if plan.tools:
        plan.said(f"{', '.join(plan.tools)}, where they are installed")
        here = about.get(node)
        ran = job_tools.on_machine(
            plan.tools, wanted.level, ends, node,
            use=use, gpus=_gpus(here) if here else len(use),
            model=_model(here), dcgm_level=plan.dcgm_level,
        )  # fmt: skip
        outcome = with_tools(outcome, {node: ran})
    after = gpu_use.take() if use else ()
    disturbed = () if held else gpu_use.busy(after)
    well = {gpu.number for gpu in use if not gpu.error}
    for number, error in ((gpu.number, gpu.error) for gpu in after):
        if number in well and error in LOST:  # a GPU that is only late or busy proves nothing
            text = f"answered before the tests but not after them: {error}"
            found.append(Finding("FAIL", "node", "active-gpu-lost", f"gpu{number}", text, "reboot"))
    seconds = plan.wanted.limit - (ends - time.monotonic())
    more = {node: (*outcome.more.get(node, ()), *found)}
    return RunResult(outcome._replace(seconds=seconds, more=more), disturbed)


def _without_exclusive(
    wanted: WantedTests, tools: tuple[str, ...], held: Sequence[str]
) -> tuple[WantedTests, tuple[str, ...], list[Finding]]:
    """Drop the tests that need the GPUs alone; one ERROR names them, since they prove nothing."""
    kept = tuple(name for name in wanted.tests if "exclusive" not in BY_NAME[name].needs)
    dropped = [name for name in (*wanted.tests, *tools) if name not in kept]
    if not dropped:
        return wanted, tools, []
    text = f"{', '.join(dropped)} not run: {'; '.join(held)}; free the GPUs and test again"
    finding = Finding("ERROR", "tool", "active-error", "", text, "none")
    return wanted._replace(tests=kept), (), [finding]


async def _tested(
    plan: RunPlan, wanted: WantedTests, *, on_step: bool
) -> tuple[Measurements, dict[str, About]]:
    clock = asyncio.get_running_loop().time
    ends = clock() + wanted.limit
    if not wanted.tests:
        return Measurements((), None, {}, 0.0, ()), {}
    session = TestSession(dict.fromkeys(plan.nodes, 1))
    started = None
    try:
        await session.open("0.0.0.0" if on_step else "127.0.0.1")
        if on_step:
            started = start.step(session, plan.nodes, plan.python, plan.log, plan.user)
        else:
            started = start.here(session, plan.nodes[0], plan.python, plan.log, plan.user)
        await session.gather(min(START_S, wanted.limit))
        wanted = wanted._replace(limit=max(0.0, ends - clock()))
        outcome = await Procedure(session, plan.nodes, wanted, plan.known, plan.said).measure()
        about = {node: session.about(node) for node in plan.nodes if session.ready(node)}
        return outcome, about
    finally:
        await session.close()
        if started is not None:
            await started.stop()


def with_tools(outcome: Measurements, found: Mapping[str, job_tools.ToolResults]) -> Measurements:
    """Add the results of the job's tools to our own tests'."""
    measured = tuple(row for one in found.values() for row in one.measured)
    asked = {
        **outcome.asked,
        **{n: outcome.asked.get(n, frozenset()) | one.ran for n, one in found.items() if one.ran},
    }
    more = {n: (*outcome.more.get(n, ()), *one.findings) for n, one in found.items()}
    return outcome._replace(
        measured=(*outcome.measured, *measured),
        asked=asked,
        more={**outcome.more, **more},
        left_out=(*outcome.left_out, *job_tools.left_out(found)),
        devices={n: one.gpus for n, one in found.items() if one.gpus} | {**outcome.devices},
    )


def _gpus(about: About) -> int:
    """The number of GPUs that torch can use."""
    return len(about.devices) if about.backend == "nccl" else 0


def _model(about: About | None) -> str:
    return about.models[0] if about is not None and about.models else ""


def _leaves() -> dict[str, str]:
    """The leaf switch of each node that Slurm knows one of: pairs are made within it first."""
    from robust_slurm.checkpoint.planning.topology import leaves
    from robust_slurm.slurm import Slurm, SlurmError

    try:
        return leaves(Slurm().topology())
    except (SlurmError, OSError):
        return {}
