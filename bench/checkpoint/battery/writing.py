"""The durable tier's writer as a thread of the rank: as a process it imports torch for 2.5 s.

The battery starts hundreds of ranks. It tests what is written, not where: a rank is killed only
when the step is committed.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import threading
from typing import Any

from robust_slurm.checkpoint.durable import writer

MODULE = "robust_slurm.checkpoint.durable.writer"
_numbers = itertools.count(1 << 24)  # no process has such an id


class WriterThread:
    """Has of subprocess.Popen what the store uses."""

    def __init__(self) -> None:
        self.pid, self.returncode = next(_numbers), None
        asked, ask = os.pipe()
        answer, answers = os.pipe()
        self.stdin: Any = os.fdopen(ask, "wb")
        self.stdout: Any = os.fdopen(answer, "rb", buffering=0)
        requests, replies = os.fdopen(asked, "rb"), os.fdopen(answers, "wb")
        self._thread = threading.Thread(target=_serve, args=(requests, replies), daemon=True)
        self._thread.start()

    def poll(self) -> int | None:
        """None while it runs."""
        return None if self._thread.is_alive() else 0

    def kill(self) -> None:
        """End it: it ends when nobody asks."""
        self.stdin.close()

    terminate = kill

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end."""
        self._thread.join(timeout)
        return 0


def _serve(requests: io.BufferedReader, replies: io.BufferedWriter) -> None:
    lock = threading.Lock()

    def reply(message: dict[str, Any]) -> None:
        with lock:
            replies.write(json.dumps(message).encode() + b"\n")
            replies.flush()

    served = writer.Writer(reply)
    with replies:
        for line in requests:
            served.handle(line)
        served.close()


def write_in_thread() -> None:
    """Have this process's stores write in a thread."""
    start: Any = subprocess.Popen

    class Popen(start):  # type: ignore[misc]
        """Starts processes, except writers."""

        def __new__(cls, command: Any, *args: Any, **kwargs: Any) -> Any:
            return WriterThread() if MODULE in command else start(command, *args, **kwargs)

    subprocess.Popen = Popen  # type: ignore[assignment,misc]
