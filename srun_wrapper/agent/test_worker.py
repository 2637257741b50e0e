"""The slot's part in stop-time tests: a worker process, started while the ranks are down.

The supervisor decides what is tested and when (``stop_tests.py``); here the worker is only started,
and its end reported. The slot ends it, like all processes below it, before it starts a rank.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
from collections.abc import Callable
from typing import IO

from robust_slurm import commands
from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.place import Place
from srun_wrapper.agent.processes.starting import Starting
from srun_wrapper.protocol.messages import RunTests, WorkerEnded

WORKER = "health.active.worker.main"
TAIL = 2000  # bytes of its output that are reported


def session_key(step_key: bytes, token: int) -> bytes:
    """Return the key of one session of tests, which does not authenticate for the step."""
    return hashlib.blake2b(b"tests %d" % token, key=step_key[:64], digest_size=32).digest()


class SlotTests:
    """At most one worker of this slot; orders in, ``WorkerEnded`` out."""

    def __init__(
        self,
        loop: Loop,
        place: Place,
        key: bytes,
        emit: Callable[[WorkerEnded], None],
    ) -> None:
        self._loop = loop
        self._place = place
        self._key = key
        self._emit = emit
        self._starting: Starting[int] | None = None
        self._worker = 0
        """The pid of the worker."""
        self._said: IO[bytes] | None = None
        self._token = 0

    def run(self, order: RunTests) -> None:
        """Start the worker, if this slot is to have one; one that is left over is ended."""
        if self._place.local and not order.every_slot:
            return
        self.cancel()
        if self._worker and self._said is not None:
            os.killpg(self._worker, signal.SIGKILL)  # not reaped yet, so the number is its own
            self._said.close()
            self._worker, self._said = 0, None
        self._token = order.token
        server = self._place.server
        host = f"[{server}]" if ":" in server else server
        env = {
            **os.environ,
            "ROBUST_TEST_SERVER": f"{host}:{order.port}",
            "ROBUST_TEST_KEY": session_key(self._key, order.token).hex(),
            "ROBUST_TEST_NODE": self._place.node,
            "ROBUST_TEST_LOCAL": str(self._place.local),
            "ROBUST_TEST_LIFE": f"{order.life:g}",
        }
        said = os.fdopen(os.memfd_create("robust-tests"), "w+b")
        python = [order.python] if order.python else commands.own_python()
        module = commands.words(WORKER) if len(python) == 1 else commands.own_words(WORKER)

        def make(start: Starting[int]) -> int:
            # Not -I: torch may be where the user's PYTHONPATH says.
            words = [*python, "-P", *module]
            return start.popen(
                words,
                env,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            ).pid

        def started(pid: int, status: int | None) -> None:
            self._starting, self._worker, self._said = None, pid, said
            if status is not None:
                self.reaped({pid: status})

        def failed(error: Exception) -> None:
            self._starting = None
            said.close()
            text = f"cannot be started: {error}"
            self._emit(WorkerEnded(0, order.token, self._place.local, 127, text))

        self._starting = Starting(self._loop, make, started, failed)

    def cancel(self) -> None:
        """Cancel the start of a worker: ranks are to run here."""
        if self._starting is not None:
            self._starting.cancel()
            self._starting = None

    def reaped(self, ended: dict[int, int]) -> None:
        """Children of the shim have ended: pid -> raw wait status."""
        worker, said = self._worker, self._said
        if said is None or worker not in ended:
            return
        self._worker, self._said = 0, None
        code = os.waitstatus_to_exitcode(ended[worker])
        with said:
            size = said.seek(0, os.SEEK_END)
            said.seek(max(0, size - TAIL))
            tail = said.read().decode(errors="replace")
        self._emit(WorkerEnded(0, self._token, self._place.local, code, tail))
