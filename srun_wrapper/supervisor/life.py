"""The life of the job: the loop until it is over, and its end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterable

from robust_slurm.slurm import Slurm, SlurmError
from robust_slurm.text import signal_name
from srun_wrapper.checkpoints import flushing
from srun_wrapper.checkpoints.flushing import Flushing
from srun_wrapper.decide import ladder
from srun_wrapper.job.model import Node, Role
from srun_wrapper.job.reporting.phase import Phase
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import JobState
from srun_wrapper.orders.starting import finish_order
from srun_wrapper.protocol.task_options import TaskOptions
from srun_wrapper.recover.on_signal import SignalledRequeue
from srun_wrapper.recover.recovery import Recovery, RecoveryEnd
from srun_wrapper.run_in_thread import run_in_thread
from srun_wrapper.supervisor.step import again
from srun_wrapper.supervisor.step.ending import Ending
from srun_wrapper.supervisor.step.real_step import END, RealStep


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
        options: TaskOptions = TaskOptions(),  # noqa: B008 - frozen
    ) -> None:
        self._options = options
        self.step = step
        self._state = state
        self._flushing = last_flush
        self._ending = ending
        self._slurm = slurm
        self._phase = phase

    async def step_ended(self) -> int:
        """Follow the end of a step whose ranks should be running: it was cancelled.

        If srun itself was killed, its step is ended, and the code is AGAIN.
        """
        if self._may_begin_again():
            return await self._begin_again()
        self._phase.name = "cancelled"
        for node in self._state.world.places:
            if node.role is Role.DEAD and node.refused:  # its shim went with the step
                self._state.members.move(node, Role.RELEASED)
        self.dismiss()  # standby nodes, whose steps are others
        killed = self.step.how_killed  # not by us
        await self.step.end(self._swapped())
        code = self.step.code or 128 + signal.SIGKILL
        if self.step.code == 0:
            say(f"srun ended with 0 although ranks were still running; exit code {code}")
        elif killed:
            say(f"{killed}, and the job's step ended with it; exit code {code}")
        else:
            say(f"Slurm ended the step (exit code {code})")
        return code

    def _may_begin_again(self) -> bool:
        """Return whether another step could go on: srun's input, if any, is gone with srun."""
        state, options = self._state, self._options
        asked = state.signalled or state.ending or options.alone or options.inherit
        had_input = any(n.stdin for n in state.nodes.values())
        return bool(self.step.killed) and not asked and not had_input and again.left() > 0

    async def _begin_again(self) -> int:
        """End the step whose srun was killed; what memory has goes to disk before."""
        state = self._state
        say(
            f"srun was killed by {signal_name(self.step.killed)}: its step is ended, and a new one "
            "starts in this allocation"
        )
        self._phase.name = "recovering"
        await self._flushing.flush(flushing.END)
        self.dismiss()
        await state.until(lambda: not any(n.connection for n in state.live()), END)
        return again.AGAIN

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


class Life:
    """Runs the job from its first epoch on until it is over."""

    def __init__(
        self,
        state: JobState,
        recovery: Recovery,
        finishing: Finishing,
        ending: Ending,
        on_signal: SignalledRequeue,
    ) -> None:
        self._state = state
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
        due = bool(state.failures) or state.stopped() or self._recovery.update_due
        return due or state.world.all_exited() or self._step.ended
