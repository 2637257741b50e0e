"""Where the tests of ``robust-health test`` run: on this machine, or on the nodes of our job."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import IO, NamedTuple

from health.active import dcgm, gpu_state, nccl_tests, start
from health.active.fleet import Baselines
from health.active.model import BY_NAME, Measured
from health.active.procedure import Outcome, Wanted, measure
from health.active.session import About, Session
from health.finding import Finding

TOOLS = frozenset({"dcgm", "nccl-tests"})  # of NVIDIA; what is not installed is left out
START_S = 120.0  # for workers to come and to import torch, from a slow file system


class Plan(NamedTuple):
    """``tools``: which of TOOLS are wanted. ``log`` gets what the workers print.

    ``dcgm_level``: of dcgmi diag, other than the level's own.
    """

    nodes: tuple[str, ...]
    wanted: Wanted
    tools: frozenset[str]
    python: str
    known: Baselines
    said: Callable[[str], None]
    log: IO[bytes] | None = None
    dcgm_level: int | None = None


class Done(NamedTuple):
    """``more``: what the tests are not, but found: of NVIDIA's tools, and states that changed.

    ``disturbed``: who used the GPUs when the tests ended, and had not when they began.
    """

    outcome: Outcome
    more: dict[str, tuple[Finding, ...]]
    disturbed: tuple[str, ...] = ()


def on_job(plan: Plan) -> Done:
    """The nodes of the job we are in, by one step. Raises OSError."""
    wanted = plan.wanted._replace(leaf_of=_leaves())
    outcome, _ = asyncio.run(_tested(plan, wanted, on_step=True))
    return Done(outcome, {})


def on_this_machine(plan: Plan) -> Done:
    """One worker here, NVIDIA's tools, and the GPUs' state as it was before. Raises OSError."""
    ends = time.monotonic() + plan.wanted.limit
    node, wanted = plan.nodes[0], plan.wanted
    before = gpu_state.take()
    held = gpu_state.busy(before)
    found: list[Finding] = []
    disturbed: tuple[str, ...] = ()
    if held:
        wanted, tools, finding = _without_exclusive(wanted, plan.tools, held)
        plan = plan._replace(tools=tools)
        found += finding
    try:
        wanted = wanted._replace(limit=max(1.0, ends - time.monotonic()))
        outcome, about = asyncio.run(_tested(plan, wanted, on_step=False))
        if "nccl-tests" in plan.tools:
            outcome = _nccl_tests(plan, outcome, about.get(node), ends)
        if "dcgm" in plan.tools:
            outcome, said = _dcgm(plan, outcome, before, ends)
            found += said
    finally:
        if before.gpus or before.error:
            after = gpu_state.take()
            disturbed = () if held else gpu_state.busy(after)
            found += gpu_state.restore(before, after)
    seconds = plan.wanted.limit - (ends - time.monotonic())
    return Done(outcome._replace(seconds=seconds), {node: tuple(found)}, disturbed)


def _without_exclusive(
    wanted: Wanted, tools: frozenset[str], held: Sequence[str]
) -> tuple[Wanted, frozenset[str], list[Finding]]:
    """What may run beside others' work, and an ERROR for what may not: nobody knows of that."""
    kept = tuple(name for name in wanted.tests if "exclusive" not in BY_NAME[name].needs)
    dropped = [name for name in (*wanted.tests, *sorted(tools)) if name not in kept]
    if not dropped:
        return wanted, tools, []
    text = f"{', '.join(dropped)} not run: {'; '.join(held)}; free the GPUs and test again"
    finding = Finding("ERROR", "tool", "active-error", "", text, "none")
    return wanted._replace(tests=kept), frozenset(), [finding]


async def _tested(plan: Plan, wanted: Wanted, *, on_step: bool) -> tuple[Outcome, dict[str, About]]:
    clock = asyncio.get_running_loop().time
    ends = clock() + wanted.limit
    if not wanted.tests:
        return Outcome((), None, {}, 0.0, ()), {}
    session = Session(dict.fromkeys(plan.nodes, 1))
    started = None
    try:
        await session.open("0.0.0.0" if on_step else "127.0.0.1")
        if on_step:
            started = start.step(session, plan.nodes, plan.python, plan.log)
        else:
            started = start.here(session, plan.nodes[0], plan.python, plan.log)
        await session.gather(min(START_S, wanted.limit))
        wanted = wanted._replace(limit=max(0.0, ends - clock()))
        outcome = await measure(
            session,
            plan.nodes,
            wanted,
            reference=plan.known.digests,
            baselines=plan.known,
            said=plan.said,
        )
        about = {node: session.about(node) for node in plan.nodes if session.ready(node)}
        return outcome, about
    finally:
        await session.close()
        if started is not None:
            await started.stop()


def _nccl_tests(plan: Plan, outcome: Outcome, about: About | None, ends: float) -> Outcome:
    """Their results beside our own test of the same, "local"."""
    node, gpus = plan.nodes[0], len(about.devices) if about and about.backend == "nccl" else 0
    plan.said("nccl-tests, where they are installed")
    found, left_out = nccl_tests.run(
        max(0.0, ends - time.monotonic()),
        gpus=gpus,
        level=plan.wanted.level,
        node=node,
        model=about.models[0] if about and about.models else "",
    )
    if left_out:
        outcome = outcome._replace(left_out=(*outcome.left_out, *left_out))
    if not found and left_out:
        return outcome
    if not found:
        why = "not installed" if gpus > 1 else "fewer than two GPUs that torch can use"
        return outcome._replace(left_out=(*outcome.left_out, f"nccl-tests: {why}"))
    asked = {**outcome.asked, node: outcome.asked.get(node, frozenset()) | {"local"}}
    return outcome._replace(measured=(*outcome.measured, *found), asked=asked)


def _dcgm(
    plan: Plan, outcome: Outcome, before: gpu_state.State, ends: float
) -> tuple[Outcome, list[Finding]]:
    node, begun = plan.nodes[0], time.monotonic()
    plan.said("dcgmi diag, where it is installed")
    left = max(0.0, ends - begun)
    found, left_out = dcgm.run(plan.wanted.level, left, state=before, run_level=plan.dcgm_level)
    if left_out:
        return outcome._replace(left_out=(*outcome.left_out, *left_out)), found
    ran = Measured("dcgm", node, seconds=round(time.monotonic() - begun, 3))
    asked = {**outcome.asked, node: outcome.asked.get(node, frozenset()) | {"dcgm"}}
    return outcome._replace(measured=(*outcome.measured, ran), asked=asked), found


def _leaves() -> dict[str, str]:
    """Node -> leaf switch, as far as Slurm knows one: pairs are then made within it first."""
    from robust_slurm.checkpoint.topology import leaves
    from robust_slurm.slurm import Slurm, SlurmError

    try:
        return leaves(Slurm().topology())
    except (SlurmError, OSError):
        return {}
