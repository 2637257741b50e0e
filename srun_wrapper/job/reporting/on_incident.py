"""The commands that are run at the end of each incident, in a thread of their own.

They run as the job's user, get one line of JSON on stdin, and have a deadline. No recovery waits
for them, and none of their failures changes anything.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

DEADLINE = 30.0  # s for one command
LAST = 4.0  # s that robust-srun's end waits for commands that still run
KILL = 1.0  # s more for them to be killed
LOOK = 0.2  # s between two checks of whether the command must be killed
MAX_WAITING = 64
_SAID = 300  # characters of stderr that are logged
# Ignores SIGTERM: Slurm sends it to all processes of a job that it ends, and the incident for which
# a job is requeued must be reported, too. This shell does not interpret the command's words.
_DEAF = ("/bin/sh", "-c", "trap '' TERM; exec \"$@\"", "sh")
_END: dict[str, Any] = {}
_log = logging.getLogger("robust-srun.on_incident")


class IncidentCommands:
    """Runs the commands, one after the other, for each record that is put."""

    def __init__(self, commands: Sequence[str], deadline: float = DEADLINE) -> None:
        self._commands = [command for command in commands if command.strip()]
        self._deadline = deadline
        self._queue: queue.Queue[dict[str, Any]] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    def put(self, record: Mapping[str, Any]) -> None:
        """Have the commands run with this record; return at once."""
        if not self._commands:
            return
        try:
            if self._thread is None:
                thread = threading.Thread(target=self._run, daemon=True)
                thread.start()
                self._thread = thread
            self._queue.put_nowait(dict(record))
        except queue.Full:
            _log.warning("on_incident: %d incidents wait already; one is left out", MAX_WAITING)
        except RuntimeError as error:  # no more threads for this user
            _log.warning("on_incident: one incident is left out: %s", error)

    def close(self, patience: float = LAST) -> None:
        """Wait ``patience`` seconds at most for the commands that are left, then kill what runs."""
        if self._thread is not None:
            with suppress(queue.Full):
                self._queue.put_nowait(_END)
            self._thread.join(patience)
            self._over.set()
            self._thread.join(KILL)

    def _run(self) -> None:
        while (record := self._queue.get()) is not _END:
            text = json.dumps(record, default=str) + "\n"
            for command in self._commands:
                if self._over.is_set():
                    _log.warning("on_incident: %s: not run: robust-srun has ended", shown(command))
                    return
                if why := run(command, text, self._deadline, self._over.is_set):
                    _log.warning("on_incident: %s: %s", shown(command), why)


def shown(command: str) -> str:
    """Return the command without its arguments (addresses, tokens), as all users read the log."""
    program, _, arguments = command.strip().partition(" ")
    return f"{program} …" if arguments else program


def run(command: str, text: str, deadline: float, over: Callable[[], bool] = lambda: False) -> str:
    """Run a command with ``text`` on its stdin; return what went wrong, "" for nothing.

    Once ``over()`` it is killed.
    """
    until = time.monotonic() + deadline
    given = -1  # a file in memory: nothing waits for a command that does not read
    try:
        given = os.memfd_create("incident")
        os.write(given, text.encode())
        os.lseek(given, 0, os.SEEK_SET)
        words = shlex.split(command)
        if shutil.which(words[0]) is None:
            return f"cannot be started: {words[0]} is no program"
        process = subprocess.Popen(
            [*_DEAF, *words],
            stdin=given,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            encoding="utf-8",
            errors="replace",
        )
    except (OSError, ValueError) as error:
        return f"cannot be started: {error}"
    finally:
        if given >= 0:
            os.close(given)
    try:
        while True:
            try:
                _, said = process.communicate(timeout=min(LOOK, until - time.monotonic()))
                break
            except subprocess.TimeoutExpired:
                if time.monotonic() >= until or over():
                    _kill(process)
                    end = "when robust-srun ended" if over() else f"in {deadline:g} s"
                    return f"not done {end}, killed"
    except OSError as error:
        _kill(process)
        return str(error)
    if process.returncode:
        return f"exit code {process.returncode}: {said.strip()[:_SAID]}"
    return ""


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill the command's process group; a process that has left it may keep the pipe open."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    if process.stderr is not None:
        process.stderr.close()
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        pass
