"""Carries a rank's output on to where srun would have put it, keeping the last of it.

Each stream has its own thread: a pager that does not read, or a file on a slow file system, may
block the stream but never the shim's loop, so detection goes on.
"""

from __future__ import annotations

import os
import re
import select
import threading
from collections.abc import Callable

from srun_wrapper.agent import task_log

_READ = 1 << 16
TAIL = 8 << 10  # bytes of stderr kept for the incident record


class Pump:
    """Copies one pipe to one file descriptor until the pipe ends.

    ``transform`` may rewrite the bytes (labels; called with b"" at the end of the stream),
    ``watch`` sees every line (ended by newline, carriage return or the stream's end). A sink
    that fails is dropped with a warning that names the stream, the pipe is read on: a rank must not
    die of SIGPIPE because a log directory is full.
    """

    def __init__(
        self,
        source: int,
        sink: int | None,
        *,
        transform: Callable[[bytes], bytes] | None = None,
        watch: Callable[[bytes], None] | None = None,
        name: str = "output",
    ) -> None:
        self._name = name
        self._source = source
        self._sink = sink
        self._transform = transform
        self._watch = watch
        self._tail = bytearray()
        self._line = bytearray()
        self.error = ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def tail(self) -> str:
        """The last bytes that came through, from the start of a line where possible."""
        data = bytes(self._tail[-TAIL:])
        if len(data) == TAIL:
            data = data.partition(b"\n")[2] or data
        return data.decode(errors="replace")

    def forget(self) -> None:
        """Forget the tail: the rank now belongs to another epoch."""
        self._tail.clear()

    def finish(self, seconds: float) -> bool:
        """Wait until everything has been carried; False if it has not by then."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            try:
                data = os.read(self._source, _READ)
            except OSError:
                data = b""
            if data:
                self._tail += data
                del self._tail[:-TAIL]
            if self._watch is not None:
                self._lines(data or b"\n")  # the last line may lack its end
            out = data if self._transform is None else self._transform(data)
            self._put(out)
            if not data:
                os.close(self._source)
                return

    def _lines(self, data: bytes) -> None:
        assert self._watch is not None
        self._line += data
        # A progress bar ends its lines with a carriage return.
        *lines, rest = bytes(self._line).replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            try:
                self._watch(line)
            except OSError as err:  # the record is gone; the stream must flow on
                self._failed("no steps are read from it any more", err)
                self._watch = None
                return
        self._line = bytearray(rest[-_READ:])

    def _put(self, data: bytes) -> None:
        while data and self._sink is not None:
            try:
                data = data[os.write(self._sink, data) :]
            except BlockingIOError:  # another process made our stdout non-blocking
                select.select([], [self._sink], [], 1.0)
            except OSError as err:
                self._failed("further output is lost, training goes on", err)
                self._sink = None

    def _failed(self, what: str, error: OSError) -> None:
        self.error = error.strerror or str(error)
        task_log.warn_counted(self._name, f"{what}: {self.error}")


class StepPattern:
    """Finds the step number in output lines (``--robust-progress-regex``).

    The group named ``step``, else the first group, is the number; without a group, or when it is
    no number, each match counts one step.
    """

    def __init__(self, regex: str, on_step: Callable[[int], object]) -> None:
        self._regex = re.compile(regex.encode())
        self._group: str | int = 0
        if "step" in self._regex.groupindex:
            self._group = "step"
        elif self._regex.groups:
            self._group = 1
        self._count = 0
        self._on_step = on_step

    def __call__(self, line: bytes) -> None:
        match = self._regex.search(line)
        if match is None:
            return
        self._count += 1
        step = self._count
        if self._group != 0:
            try:
                step = int(match.group(self._group).replace(b",", b"").replace(b"_", b""))
            except (ValueError, AttributeError):
                pass
        self._on_step(step)
