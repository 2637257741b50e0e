"""The data process's side of the program that makes readers (``main.py``)."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robust_slurm.data.service.wire import LineSocket
from robust_slurm.text import how_ended

if TYPE_CHECKING:
    from robust_slurm.data.service.readers.places import SharedPlaces

_PROGRAM = str(Path(__file__).with_name("main.py"))


class ReaderSpawner:
    """The running program. It ends, and all readers with it, when the thread that uses this ends.

    It imports the plan in an interpreter of its own, since this process has threads, and a fork of
    it could wait for a lock for ever. Raises OSError.
    """

    def __init__(self, name: str, code: str, places: SharedPlaces) -> None:
        self.living: set[int] = set()
        """The serial numbers of readers that have been started and have not ended."""
        self.plan = ""
        """The digest of its plan, once it is ready."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, _PROGRAM, str(theirs.fileno()), *sys.path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._line = LineSocket(ours)
        self._cpus: set[int] = set()
        self._line.send({"op": "order", "name": name, "code": code}, [places.fd])

    def start(self, serial: int, number: int) -> socket.socket:
        """Start a reader; return this end of its line. ``number``: its place among all."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._line.send({"op": "start", "serial": serial, "number": number}, [theirs.fileno()])
        self.living.add(serial)
        return ours

    def kill(self, serial: int) -> None:
        """Kill a reader."""
        self._line.send({"op": "kill", "serial": serial})

    def use(self, cpus: set[int]) -> None:
        """Have all run on these processors."""
        if cpus != self._cpus:
            self._cpus = cpus
            self._line.send({"op": "cpus", "cpus": sorted(cpus)})

    def news(self, seconds: float) -> tuple[int, str] | None:
        """Wait for news: return a reader's serial number and how it has ended; None: it has not."""
        message: dict[str, Any]
        message, _ = self._line.receive(seconds) or ({"op": ""}, [])
        if message["op"] == "ready":
            self.plan = message["plan"]
        if message["op"] != "ended":
            return None
        self.living.discard(message["serial"])
        return message["serial"], how_ended(message["code"])

    def close(self) -> None:
        """Kill it, and its readers with it."""
        self._line.close()
        self._process.kill()
        self._process.wait()
