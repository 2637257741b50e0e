"""End the ranks of the running epoch on some nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from srun_wrapper.agent.processes.stop_stages import ABORTING, longest
from srun_wrapper.decide.incident import Incident
from srun_wrapper.decide.shared_cause import common
from srun_wrapper.detect.stalls import Stalls
from srun_wrapper.job.model import Node, Role
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import JobState
from srun_wrapper.protocol.messages import Stop


class Stopping:
    """Ends ranks; ``stalls`` stops the clock while a shared file system does not answer."""

    def __init__(self, state: JobState, stalls: Stalls) -> None:
        self._state = state
        self._stalls = stalls

    async def end_ranks(
        self, nodes: Sequence[Node], over: Callable[[], bool], rejoin: float = 0.0
    ) -> None:
        """Wait until all ranks are gone, or ``over()``. A node that cannot end them is lost.

        ``rejoin``: s for ranks in ``resilient()`` to say that they wait instead; 0: all end.
        """
        state = self._state
        epoch, grace = state.world.epoch, state.config.stop_grace
        most = grace + 2 * ABORTING + state.config.stop_work_limit + state.config.stop_margin
        for node in nodes:
            state.bus.send(node, Stop(epoch, grace, rejoin))
        done = await self._stalls.until(
            lambda: over() or all(n.stopped >= epoch or n.gone for n in nodes),
            most + rejoin,
        )
        stuck: list[tuple[Node, str]] = []
        for node in nodes:
            if node.gone:
                continue
            if node.stopped >= epoch:
                for text in node.cut:
                    say(f"{node.name}: {text}; raise stop_work_limit to give it more time")
            if node.stopped >= epoch and node.stuck:
                pids = ", ".join(map(str, node.stuck))
                stuck.append((node, f"processes survive SIGKILL (pids {pids})"))
            elif not done and not state.signalled and node.stopped < epoch:
                stuck.append((node, "its ranks could not be stopped"))
        shared = common(len(stuck), len(nodes))
        for node, why in stuck:
            state.lose(node, why, "stuck", shared=shared or node.silence is not None)

    async def end_world(self, incident: Incident, rejoin: float = 0.0) -> bool:
        """End all ranks of this epoch on the nodes that stay; False if another failure came.

        ``rejoin``: see ``end_ranks``.
        """
        state = self._state
        staying = [n for n in state.world.places if n.role is Role.ACTIVE]
        cut_short = lambda: bool(state.failures) or state.signalled > 0  # noqa: E731
        await self.end_ranks(staying, cut_short, rejoin)
        incident.mark("stop")
        incident.stages = longest(node.stages for node in staying)
        progress = state.progress  # the last reports are in now
        incident.step_before = progress.best if progress.numbered else progress.saved
        return not state.failures
