"""The slot's part in stop-time tests: a worker process, started while the ranks are down.

What it tests and when is the supervisor's (``stop_tests.py``); here it is only started, and its
end reported. The slot ends it like everything below itself when a rank is to be started.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import IO

from srun_wrapper.messages import RunTests, WorkerEnded

WORKER = "health.active.worker"
TAIL = 2000  # bytes of what it said


def session_key(step_key: bytes, token: int) -> bytes:
    """The key of one session of tests; whoever learns it cannot speak for the step."""
    return hashlib.blake2b(b"tests %d" % token, key=step_key[:64], digest_size=32).digest()


class SlotTests:
    """At most one worker of this slot; orders in, ``WorkerEnded`` out."""

    def __init__(
        self, local: int, node: str, server: str, key: bytes, emit: Callable[[WorkerEnded], None]
    ) -> None:
        self._local = local
        self._node = node
        self._server = server
        self._key = key
        self._emit = emit
        self._worker: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None
        self._token = 0

    def run(self, order: RunTests) -> None:
        """Start the worker, if this slot is to have one; one that is left over is ended."""
        if self._local and not order.every_slot:
            return
        if self._worker is not None and self._said is not None:
            os.killpg(self._worker.pid, signal.SIGKILL)  # not reaped yet, so the number is its own
            self._worker.returncode = -signal.SIGKILL  # the slot reaps it, not subprocess
            self._said.close()
            self._worker = self._said = None
        self._token = order.token
        host = f"[{self._server}]" if ":" in self._server else self._server
        env = {
            **os.environ,
            "ROBUST_TEST_SERVER": f"{host}:{order.port}",
            "ROBUST_TEST_KEY": session_key(self._key, order.token).hex(),
            "ROBUST_TEST_NODE": self._node,
            "ROBUST_TEST_LOCAL": str(self._local),
            "ROBUST_TEST_LIFE": f"{order.life:g}",
        }
        said = os.fdopen(os.memfd_create("robust-tests"), "w+b")
        try:
            # Not -I: torch may be where the user's PYTHONPATH says.
            self._worker = subprocess.Popen(
                [order.python or sys.executable, "-P", "-m", WORKER],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        except OSError as err:
            said.close()
            self._emit(WorkerEnded(0, order.token, self._local, 127, f"cannot be started: {err}"))
            return
        self._said = said

    def reaped(self, ended: dict[int, int]) -> None:
        """Children of the shim have ended: pid -> raw wait status."""
        worker, said = self._worker, self._said
        if worker is None or said is None or worker.pid not in ended:
            return
        self._worker = self._said = None
        code = worker.returncode = os.waitstatus_to_exitcode(ended[worker.pid])
        with said:
            size = said.seek(0, os.SEEK_END)
            said.seek(max(0, size - TAIL))
            tail = said.read().decode(errors="replace")
        self._emit(WorkerEnded(0, self._token, self._local, code, tail))
