"""The life of the job: its first world, the loop until it is over, and its end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterable

from robust_slurm.slurm import Slurm, SlurmError
from robust_slurm.slurm.values import fold
from robust_slurm.text import counted
from srun_wrapper.checkpoints import flushing
from srun_wrapper.checkpoints.flushing import Flushing
from srun_wrapper.checkpoints.verify.rules import ONE_NODE
from srun_wrapper.checkpoints.verify.verifying import Verify
from srun_wrapper.command.steps import Launch
from srun_wrapper.command.torchrun import restarts_itself
from srun_wrapper.decide import ladder
from srun_wrapper.job.model import Node, Role, first_places
from srun_wrapper.job.reporting.phase import Phase
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import JobState
from srun_wrapper.job.topology import Topology
from srun_wrapper.orders.starting import finish_order
from srun_wrapper.recover.on_signal import SignalledRequeue
from srun_wrapper.recover.recovery import Recovery, RecoveryEnd
from srun_wrapper.recover.replace import Replacement
from srun_wrapper.run_in_thread import run_in_thread
from srun_wrapper.supervisor.step.ending import Ending
from srun_wrapper.supervisor.step.real_step import RealStep

BAD_SIZE = 2  # exit code, as for other bad input


class Finishing:
    """Ends the step, or follows its end."""

    def __init__(
        self,
        state: JobState,
        step: RealStep,
        last_flush: Flushing,
        ending: Ending,
        slurm: Slurm,
        phase: Phase,
    ) -> None:
        self.step = step
        self._state = state
        self._flushing = last_flush
        self._ending = ending
        self._slurm = slurm
        self._phase = phase

    async def step_ended(self) -> int:
        """Follow the end of a step whose ranks should be running: it was cancelled."""
        self._phase.name = "cancelled"
        for node in self._state.world.places:
            if node.role is Role.DEAD and node.refused:  # its shim went with the step
                self._state.members.move(node, Role.RELEASED)
        self.dismiss()  # standby nodes, whose steps are others
        await self.step.end(self._swapped())
        code = self.step.code or 128 + signal.SIGKILL
        if self.step.code == 0:
            say(f"srun ended with 0 although ranks were still running; exit code {code}")
        else:
            say(f"Slurm ended the step (exit code {code})")
        return code

    async def finish(self) -> int:
        """Let every shim end like its rank; returns the step's exit code as srun computes it."""
        state = self._state
        await self._flushing.flush(await self._time_to_flush())
        silent = self._ending.silent if state.signalled else []
        if silent:
            self.dismiss([n for n in state.live() if self._ending.answers(n)])
            silent = await self._ending.wait_for_silent(lambda: self.step.ended)
        self.dismiss()
        code = state.world.exit_code()
        swapped = self._swapped()
        await self.step.end(swapped, silent=silent)
        if not swapped and self.step.code is not None:
            return self.step.code
        return code or (128 + state.signalled if state.signalled else 0)

    async def _time_to_flush(self) -> float:
        """Seconds for the last durable checkpoint: of a job that is ended, part of KillWait."""
        if not self._state.signalled or not self._flushing.needed:
            return flushing.END
        try:
            config = await run_in_thread(self._slurm.config, flushing.ASK)
            wait = float(config["KillWait"].split()[0])
        except (SlurmError, TimeoutError, LookupError, ValueError):
            return flushing.SIGNALLED
        return min(flushing.SIGNALLED, flushing.OF_KILL_WAIT * wait)

    def dismiss(self, nodes: Iterable[Node] | None = None) -> None:
        """Order the shims of these nodes (None: all, later ones included) to end."""
        self._state.ending = True
        for node in self._state.nodes.values() if nodes is None else nodes:
            self._state.bus.send(node, finish_order(self._state.world, node))

    def _swapped(self) -> bool:
        """Return whether the step lost a node, or ranks run outside it; a lease has none."""
        own = [n for n in self._state.nodes.values() if not n.standby_request]
        return any(n.gone for n in own) or any(n.standby_request for n in self._state.world.places)


class FirstWorld:
    """Waits for the nodes and gives the places to them."""

    def __init__(
        self,
        state: JobState,
        launch: Launch,
        finishing: Finishing,
        topology: Topology,
        replacement: Replacement,
    ) -> None:
        self._state = state
        self._config = state.config
        self._launch = launch
        self._plan = launch.plan
        self._finishing = finishing
        self._step = finishing.step
        self._topology = topology
        self._replacement = replacement

    async def wait_for_shims(self) -> int | None:
        """Wait until every node of the step has reported; an exit code if it never will.

        Not when the step is to end: some may have died of the signal before they could report.
        """
        state = self._state
        await state.until(lambda: bool(state.nodes) or self._step.ended, None)

        def complete() -> bool:
            wanted = next(iter(state.nodes.values())).hello.step_nodes if state.nodes else 1
            return len(state.nodes) >= wanted or self._step.ended or state.signalled > 0

        await state.until(complete, self._config.task_start_limit)
        if self._step.ended:
            code = self._step.code or 1
            say(f"srun could not start the step (exit code {code}); its message is above")
            return code
        wanted = next(iter(state.nodes.values())).hello.step_nodes
        planned = self._plan.active_nodes
        needed = wanted if planned is None else planned - self._plan.short
        missing = wanted - len(state.nodes)
        if missing > 0 and not state.signalled:
            limit = self._config.task_start_limit
            came = fold(node.name for node in state.nodes.values())
            what = f"{missing} of {wanted} nodes did not start robust-task within {limit:g} s"
            look = f"look at slurmd's log on the nodes missing from: {came}"
            if len(state.nodes) < needed:
                say(
                    f"{what}, {needed} are needed; if they are only slow, raise task_start_limit, "
                    f"else {look}"
                )
                return ladder.NOTHING_LEFT
            say(f"{what}: going on without, {needed} are needed; {look}")
        return None

    async def form(self) -> int | None:
        """Give the places to nodes; an exit code if there are too few."""
        state = self._state
        if short := self._plan.short:
            came = await self._replacement.reinforce(short, self._plan.slots_per_node or 1)
            if state.signalled:
                return None
            if self._step.ended:
                return await self._finishing.step_ended()
            if len(came) < short:
                say(f"{short} of the nodes released by an earlier step could not be replaced")
                return ladder.NOTHING_LEFT
            names = ", ".join(node.name for node in came)
            say(f"{names} replaced nodes released in an earlier step of this job")
        nodes, planned = list(state.nodes.values()), self._plan.ranks_per_active_node
        try:
            places, ranks = first_places(nodes, planned)
        except LookupError as err:
            say(str(err.args[0]))
            return ladder.NOTHING_LEFT
        except ValueError as err:
            say(str(err))
            return BAD_SIZE
        if self._config.verify_every and len(places) + len(state.spares()) < 2:
            say(f"error: --robust-verify-every: {ONE_NODE}")
            return BAD_SIZE
        state.members.lay_out(places, ranks)
        await self._topology.arrange_first()
        for node in state.world.places:
            state.members.move(node, Role.ACTIVE)
        asked = restarts_itself(self._launch.command.command, self._launch.env)
        ours = self._config.rank_env and self._config.mode != "observe"
        if asked and ours and all(len(numbers) == 1 for numbers in ranks):
            say(f"torchrun's --max-restarts={asked} is set to 0: robust-srun restarts its ranks")
        if self._config.verbose or state.spares():
            spare = ", ".join(n.name for n in state.spares()) or "none"
            size = f"{counted(len(places), 'node')}, {counted(state.world.size, 'rank')}"
            say(f"{size}, spares: {spare}")
        return None


class Life:
    """Runs the job from its first epoch on until it is over."""

    def __init__(
        self,
        state: JobState,
        verify: Verify,
        recovery: Recovery,
        finishing: Finishing,
        ending: Ending,
        on_signal: SignalledRequeue,
    ) -> None:
        self._state = state
        self._verify = verify
        self._recovery = recovery
        self._on_signal = on_signal
        self._finishing = finishing
        self._step = finishing.step
        self._ending = ending

    async def run(self) -> int:
        state = self._state
        while True:
            await state.until(self._something_to_do, None)
            if self._on_signal.asked and not self._step.ended:
                if await self._on_signal.requeue(lambda: self._step.ended):
                    return await self._end(RecoveryEnd(ladder.REQUEUED))
                continue
            ended = state.world.all_exited() and not (state.failures or state.stopped())
            if state.signalled or ended:
                return await self._finishing.finish()
            if self._step.ended and not state.failures:
                await asyncio.sleep(1.0)
                if not state.failures:
                    return await self._finishing.step_ended()
            if self._verify.ready and not state.failures and not state.stopped():
                await self._verify.run()
                continue
            if self._recovery.update_due and not state.failures and not state.stopped():
                await self._recovery.update()
                continue
            end = await self._recovery.handle()
            if end is not None:
                return await self._end(end)

    def standing_still(self) -> bool:
        """Return False: a hang is recovered from."""
        return False

    async def _end(self, end: RecoveryEnd) -> int:
        """End the job as a recovery has decided; return the exit code."""
        if end.code is None:
            return await self._finishing.step_ended()
        await self._finishing.finish()
        return end.code

    def _something_to_do(self) -> bool:
        state = self._state
        if self._on_signal.asked:
            return True
        if state.signalled:
            stopped = state.stopped()
            done = state.world.all_exited() or self._ending.over
            return stopped or done or self._step.ended
        due = bool(state.failures) or state.stopped() or self._verify.ready
        due = due or self._recovery.update_due
        return due or state.world.all_exited() or self._step.ended
