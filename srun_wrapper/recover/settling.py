"""Wait, before a recovery decides, for the failures that belong to those that were seen."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable

from srun_wrapper.decide.ends import EndKind, crashes, may_be_the_programs, read_end
from srun_wrapper.decide.failure import Failure, killed_by
from srun_wrapper.detect.node_watch import NodeWatch
from srun_wrapper.job.model import Role
from srun_wrapper.job.state import JobState

SETTLE = 0.3  # s to wait for the root of a failure that looks like a consequence
SETTLE_ALIKE = 1.0  # s for other nodes to show the error for which a node would be blamed
SETTLE_START = 2.0  # s after the last end for further ranks that fail before any step
START_MAX = 10.0  # s after the first of these ends
AT_WORK = 600.0  # s: a program that ran this long may have made steps that are not seen
SETTLE_MAX = 4.0
SETTLE_NODES = 1.5  # s for other silent nodes to be judged when one is lost
# Signals that people send. A rank that dies of one may be reported before the signal itself.
SENDABLE = {
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGTERM, signal.SIGALRM),
}
IN_DOUBT = 3.0  # s for a silent spare to answer before a standby node is taken
SRUN_END = 1.0  # s for srun to end when its tasks have


def at_start(state: JobState) -> bool:
    """Return True while no program can have made a step in this job: none is seen, and it is soon.

    Only the first epoch counts: one before a restart may have made steps that are not seen.
    """
    soon = time.monotonic() - state.pace.epoch_since < AT_WORK
    return soon and state.world.epoch <= 1 and not state.progress.stepped


class Settling:
    """Waits until the failures that are known are all that there will be for now."""

    def __init__(
        self,
        state: JobState,
        node_watch: NodeWatch,
        prerequest: Callable[[], None],
        ended: Callable[[], bool],
    ) -> None:
        """``prerequest``: request standby nodes for the vacant places; ``ended``: srun has."""
        self._state = state
        self._node_watch = node_watch
        self._prerequest = prerequest
        self._ended = ended

    async def settle(self) -> None:
        """Wait until the failures that belong together have been seen.

        While all failures seen look like consequences, their root is still to come. When a node is
        lost, others that are silent now (the same switch, the same power) may be lost with it. If
        one node cannot run the command, or shows an error, the others may do so a little later.
        """
        state = self._state
        await self._outlast()
        began = time.monotonic()
        await self._read_ends()
        while any(f.symptom == "node_lost" for f in state.failures) and (
            self._node_watch.doubtful() and time.monotonic() - began < SETTLE_NODES
        ):
            await asyncio.sleep(0.02)
        await self._outlast()  # one may have been seen only now
        while (  # an error that points to the machine: here only, or everywhere?
            any(self._points(f) for f in crashes(state.failures))
            and not state.signalled
            and not state.world.all_nodes_ended()
            and time.monotonic() - began < SETTLE_ALIKE
        ):
            await asyncio.sleep(0.02)
        while (  # a command that cannot be run: here only, or everywhere?
            any(not f.launched for f in state.failures)
            and not state.signalled
            and not state.world.all_tried()
            and time.monotonic() - began < SETTLE_MAX
        ):
            await asyncio.sleep(0.02)
        while self._at_start() and not state.signalled:  # here only, or everywhere?
            await asyncio.sleep(0.2)  # each look reads all ends
        while state.nonfinite_open() and not state.signalled:
            await asyncio.sleep(0.02)
        while self._all_follow() and not state.signalled:
            waited = time.monotonic() - began
            open_question = (
                waited < SETTLE or self._node_watch.doubtful() or self._being_signalled()
            )
            if waited >= SETTLE_MAX or not open_question:
                return
            await asyncio.sleep(0.02)
        while (
            not state.signalled
            and time.monotonic() - began < SETTLE
            and (
                self._being_signalled()
                or any(not f.launched or killed_by(f) in SENDABLE for f in state.failures)
            )
        ):
            await asyncio.sleep(0.02)

    def _at_start(self) -> bool:
        """Return True while the other ranks may still show the error that some show at the start.

        A program that cannot run ends on all nodes, sooner where the disk is quicker.
        """
        state = self._state
        if not at_start(state) or state.world.all_exited() or not state.failures:
            return False
        if any(f.symptom != "crash" for f in state.failures):
            return False
        now, times = time.monotonic(), [f.at for f in state.failures]
        if now - max(times) >= SETTLE_START or now - min(times) >= START_MAX:
            return False
        return all(may_be_the_programs(f, state.catalogue) for f in crashes(state.failures))

    def _all_follow(self) -> bool:
        """Return True if all that is known are ends of ranks that follow from something else."""
        failures = self._state.failures
        only_ends = bool(failures) and all(f.symptom == "crash" for f in failures)
        catalogue = self._state.catalogue
        return only_ends and all(
            read_end(f, catalogue).kind is EndKind.FOLLOWS for f in crashes(failures)
        )

    async def _read_ends(self) -> None:
        """Read how ranks ended, one by one: heartbeats are heard in between."""
        for failure in crashes(self._state.failures):
            read_end(failure, self._state.catalogue)
            await asyncio.sleep(0)

    def _points(self, failure: Failure) -> bool:
        """Return True for an end of a rank for which a node may be blamed."""
        end = read_end(failure, self._state.catalogue)
        return end.points or end.bus_error or end.left_over

    async def _outlast(self) -> None:
        """Wait while a shared cause makes nodes silent; request others for those that are lost."""
        state = self._state
        while self._node_watch.waiting() and not (state.signalled or self._ended()):
            if state.vacant():
                self._prerequest()
            await asyncio.sleep(0.02)

    async def settle_spares(self, wanted: int) -> None:
        """Wait until it is known which spares answer, where the others are fewer than wanted.

        What makes a node of the job silent often makes its spares silent as well, for a moment.
        """
        until = time.monotonic() + IN_DOUBT
        suspected = self._node_watch.suspected

        def settled() -> bool:
            now, state = time.monotonic(), self._state
            spares = [n for n in state.live() if n.role is Role.SPARE and not n.standby_request]
            doubtful = [n for n in spares if not n.connection or suspected(n, now)]
            enough = len(spares) - len(doubtful) >= wanted
            return enough or not doubtful or now >= until or state.signalled > 0

        while not settled():
            await asyncio.sleep(0.02)

    async def step_is_over(self) -> bool:
        """Return True if Slurm has ended the whole step: its shims are gone from nodes that live.

        To restart or requeue what a user has cancelled would be against his will. A node that
        crashed does not close its connection: then there is nothing to wait for. srun ends too, but
        after a swap only much later.
        """
        state = self._state
        own = [node for node in (*state.world.places, *state.spares()) if not node.standby_request]
        if not own or any(node.connection for node in own):
            return False

        # A shim behind a firewall cannot be asked; that its connection ended too must do.
        asked = [node for node in own if node.second_way is not False]

        def over() -> bool:
            return self._ended() or (bool(asked) and all(node.refused for node in asked))

        return await state.until(over, SRUN_END)

    def _being_signalled(self) -> bool:
        """True if Slurm has signalled some shims, and may be ending the whole step."""
        return not self._state.signalled and any(n.signalled for n in self._state.live())
