"""Signals to robust-srun: it passes them on to the ranks, as srun does."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable

from srun_wrapper.job.state import JobState
from srun_wrapper.protocol.messages import Signal
from srun_wrapper.supervisor.step.real_step import RealStep

FORWARDED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGQUIT)
TERMINATING = (signal.SIGINT, signal.SIGTERM)


class StepSignals:
    """Handles the signals to this process."""

    def __init__(self, state: JobState, step: RealStep) -> None:
        self._state = state
        self._bus = state.bus
        self._step = step
        self._interrupts: list[float] = []

    def catch(self, continued: Callable[[], None]) -> None:
        """Handle signals from now on; ``continued``: called on SIGCONT."""
        loop = asyncio.get_running_loop()
        for signum in FORWARDED:
            loop.add_signal_handler(signum, self._forward, signum)
        for signum in TERMINATING:
            loop.add_signal_handler(signum, self._terminate, signum)
        loop.add_signal_handler(signal.SIGCONT, continued)

    def _forward(self, signum: int) -> None:
        self._state.pass_on(signum)
        self._bus.broadcast(Signal(signum))

    def _terminate(self, signum: int) -> None:
        """Pass the signal on as srun does; a second Ctrl-C within a second ends the step."""
        now = time.monotonic()
        self._interrupts = [t for t in self._interrupts if now - t < 1.0] + [now]
        self._state.signalled = signum
        if not self._state.nodes:
            self._step.send_signal(signum)
        self._bus.broadcast(Signal(signum))
        if signum == signal.SIGINT and len(self._interrupts) > 1:
            self._bus.broadcast(Signal(signal.SIGKILL))
        self._state.changed.set()
