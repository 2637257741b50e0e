"""Ending the ranks of the running epoch on some nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from srun_wrapper.messages import Stop
from srun_wrapper.roster import Node

if TYPE_CHECKING:
    from srun_wrapper.supervisor import Supervisor

STOP_MARGIN = 12.0  # s over the grace for a node to end its ranks


async def stop_ranks(boss: Supervisor, nodes: Sequence[Node], over: Callable[[], bool]) -> None:
    """Until all are gone, or ``over()``. A node that cannot end them is lost."""
    state = boss.state
    epoch, grace = state.world.epoch, boss.config.stop_grace
    for node in nodes:
        boss.send(node, Stop(epoch, grace))
    done = await boss.stalls.until(
        lambda: over() or all(n.stopped >= epoch or n.gone for n in nodes),
        grace + STOP_MARGIN,
    )
    for node in nodes:
        if node.gone:
            continue
        if node.stopped >= epoch and node.stuck:
            pids = ", ".join(map(str, node.stuck))
            state.lose(node, f"processes survive SIGKILL (pids {pids})", "stuck")
        elif not done and not state.signalled and node.stopped < epoch:
            state.lose(node, "its ranks could not be stopped", "stuck")
