"""Ending the ranks of the running epoch on some nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from srun_wrapper.agent.processes.stop_stages import ABORTING
from srun_wrapper.decide.shared_cause import common
from srun_wrapper.protocol.messages import Stop
from srun_wrapper.supervisor.report import say
from srun_wrapper.supervisor.roster import Node

if TYPE_CHECKING:
    from srun_wrapper.supervisor.supervisor import Supervisor

STOP_MARGIN = 12.0  # s over all stages for a node to end its ranks


async def stop_ranks(boss: Supervisor, nodes: Sequence[Node], over: Callable[[], bool]) -> None:
    """Until all are gone, or ``over()``. A node that cannot end them is lost."""
    state = boss.state
    epoch, grace = state.world.epoch, boss.config.stop_grace
    most = grace + 2 * ABORTING + boss.config.stop_work_limit + STOP_MARGIN
    for node in nodes:
        boss.bus.send(node, Stop(epoch, grace))
    done = await boss.stalls.until(
        lambda: over() or all(n.stopped >= epoch or n.gone for n in nodes),
        most,
    )
    stuck: list[tuple[Node, str]] = []
    for node in nodes:
        if node.gone:
            continue
        if node.stopped >= epoch:
            for text in node.cut:
                say(f"{node.name}: {text}; stop_work_limit sets how long it may")
        if node.stopped >= epoch and node.stuck:
            pids = ", ".join(map(str, node.stuck))
            stuck.append((node, f"processes survive SIGKILL (pids {pids})"))
        elif not done and not state.signalled and node.stopped < epoch:
            stuck.append((node, "its ranks could not be stopped"))
    shared = common(len(stuck), len(nodes))
    for node, why in stuck:
        state.lose(node, why, "stuck", shared=shared)
