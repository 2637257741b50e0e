"""The job's own srun: started once, watched, ended."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Collection, Mapping, Sequence

from robust_slurm.text import how_ended
from srun_wrapper.command import steps
from srun_wrapper.job.model import Node
from srun_wrapper.job.state import JobState

END = 20.0  # s for shims and srun to end
LAST_OUTPUT = 1.0  # s for srun to pass on the last output after all shims have ended


class RealStep:
    """srun's process. ``state.changed`` is set when it ends."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[int] | None = None

    async def start(
        self, argv: Sequence[str], env: Mapping[str, str], *, own_session: bool
    ) -> None:
        self._process = await steps.start(argv, env, own_session=own_session)
        self._task = asyncio.create_task(self._process.wait())
        self._task.add_done_callback(lambda _task: self._state.changed.set())

    @property
    def ended(self) -> bool:
        return self._task is not None and self._task.done()

    @property
    def killed(self) -> int:
        """The signal that srun itself has died of; 0: none: Slurm may have ended the step."""
        code = self._process.returncode if self._process is not None else None
        return -code if code is not None and code < 0 else 0

    @property
    def code(self) -> int | None:
        """The exit code of srun as a shell gives it (128 + signal); None while it runs."""
        code = self._process.returncode if self._process is not None else None
        return code if code is None or code >= 0 else 128 - code

    @property
    def how_killed(self) -> str:
        """Words for the signal that killed srun; "" if none did."""
        process = self._process
        code = process.returncode if process is not None else None
        if process is None or code is None or code >= 0:
            return ""
        return f"srun (pid {process.pid}) {how_ended(code)}"

    def send_signal(self, signum: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signum)

    async def end(
        self, swapped: bool = False, patience: float = END, silent: Collection[Node] = ()
    ) -> None:
        """Wait for srun; one that does not end in ``patience`` seconds is terminated.

        After a swap srun waits for ever for the tasks of the node that left, although Slurm has
        completed the step, and so it does for the tasks of ``silent`` nodes; there is nothing more
        to hear from it once the other shims are gone.
        """
        if self._task is None:
            return
        state = self._state
        measures: tuple[tuple[int, float], ...] = (
            (0, patience),
            (signal.SIGTERM, 10.0),
            (signal.SIGKILL, 5.0),
        )
        if swapped or silent:
            await state.until(
                lambda: not any(n.connection and n not in silent for n in state.live()), END
            )
            measures = ((0, LAST_OUTPUT), (signal.SIGKILL, 5.0))
        for signum, seconds in measures:
            if self._task.done():
                return
            if signum:
                self.send_signal(signum)
            await asyncio.wait([self._task], timeout=seconds)
