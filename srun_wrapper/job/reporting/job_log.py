"""The job's log: stdlib logging into ``robust-srun.log`` in the job's record directory.

Every module logs through ``logging.getLogger("robust-srun.<area>")``. The directory is on a shared
file system that may be slow, full or dead: a bounded queue and a thread stand between the job and
the file, and nothing that watches the job waits for a line of its log.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import textwrap
import threading
from datetime import datetime
from pathlib import Path

import msgspec

from robust_slurm.command_line import version
from robust_slurm.config import FIELDS, Config
from robust_slurm.state_dir.job_dirs import LOG
from srun_wrapper.decide.incident import Incident
from srun_wrapper.job.reporting.on_incident import shown

OLDER = LOG + ".1"
MAX_BYTES = 16 << 20  # of the file; it is renamed to OLDER then, so both have at most twice that
MAX_WAITING = 4096  # lines
AT_ONCE = 512  # lines in one write
LONGEST = 4000  # characters of one message
LONGEST_FIELD = 200  # characters of one field of a message on the wire
_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {10: "\\n"}
_END = b""

_root = logging.getLogger("robust-srun")
_root.addHandler(logging.NullHandler())  # without a log file nothing may reach stderr by this way
_wire = logging.getLogger("robust-srun.wire")
_recovery = logging.getLogger("robust-srun.recovery")
_agents = logging.getLogger("robust-srun.agent")


class LogFile:
    """Appends lines to a file of bounded size, in a thread. ``put`` never waits."""

    def __init__(self, directory: Path, most: int = MAX_BYTES) -> None:
        self._path = directory / LOG
        self._older = directory / OLDER
        self._most = most
        self._queue: queue.Queue[bytes] = queue.Queue(MAX_WAITING)
        self._lock = threading.Lock()
        self._put = 0  # lines, in all
        self._written = 0
        self._dropped = 0
        self._noted = 0  # of them those that a line in the file mentions
        self._torn = False  # the file ends in the middle of a line
        self.error = ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        self._put += line.count(b"\n")
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            self._drop(line.count(b"\n"))

    def close(self, deadline: float) -> int:
        """Write what waits, for at most ``deadline`` seconds; return how many lines are missing."""
        try:
            self._queue.put_nowait(_END)
            self._thread.join(deadline)
        except queue.Full:
            pass  # the file system has not answered for thousands of lines
        if not self._thread.is_alive():
            return self._dropped
        self.error = self.error or "no answer from the file system"
        return self._put - self._written

    def _drop(self, lines: int) -> None:
        with self._lock:
            self._dropped += lines

    def _run(self) -> None:
        ended = False
        while not ended:
            lines = [self._queue.get()]
            while len(lines) < AT_ONCE and not self._queue.empty():
                lines.append(self._queue.get())
            ended = _END in lines
            data = b"".join(lines)
            try:
                if data:
                    self._append(data)
                    self._written += data.count(b"\n")
            except OSError as err:
                self.error = f"{self._path}: {err.strerror or err}"
                self._drop(data.count(b"\n"))

    def _append(self, data: bytes) -> None:
        """Open, append, close: another robust-srun of the job may have renamed the file."""
        if self._size() >= self._most:
            self._path.rename(self._older)
        missing = self._dropped - self._noted
        if missing:
            lines = "1 line is" if missing == 1 else f"{missing} lines are"
            data = f"... {lines} missing here: {self.error}\n".encode() + data
        if self._torn:
            data = b"\n" + data
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._path, flags, 0o644)
        try:
            written = os.write(fd, data)
        finally:
            os.close(fd)
        self._torn = not data[:written].endswith(b"\n")
        if written != len(data):
            raise OSError(f"only {written} of {len(data)} bytes were written")
        self._noted += missing

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0


class _Line(logging.Formatter):
    """One line per record: time, level, pid of robust-srun, area, text."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).astimezone()
        area = record.name.partition(".")[2] or "job"
        text = record.getMessage()
        if len(text) > LONGEST:
            text = f"{text[:LONGEST]}… ({len(text)} characters)"
        line = (
            f"{when.isoformat(timespec='milliseconds')} {record.levelname:7} [{record.process}] "
            f"{area}: {text.translate(_ESCAPED)}"
        )
        if record.exc_info:
            line += "\n" + textwrap.indent(self.formatException(record.exc_info), "    ")
        return line


class _ToFile(logging.Handler):
    def __init__(self, file: LogFile) -> None:
        super().__init__()
        self.file = file
        self.setFormatter(_Line())

    def emit(self, record: logging.LogRecord) -> None:
        self.file.put(self.format(record).encode(errors="backslashreplace") + b"\n")


_open: list[_ToFile] = []


def begin(directory: Path | None, config: Config) -> None:
    """Log to the job's directory from now on; without one nothing is logged."""
    if directory is None:
        return
    _open.append(_ToFile(LogFile(directory)))
    _root.addHandler(_open[0])
    _root.setLevel(config.log_level.upper())
    _root.propagate = False
    chosen = {name: getattr(config, name) for name in FIELDS}
    for name in ("on_incident", "site_on_incident"):
        chosen[name] = shown(chosen[name])
    other = [f"{n} = {v}" for n, v in chosen.items() if v != FIELDS[n].default]
    _root.info(
        "robust-srun %s begins on %s; settings other than the defaults: %s",
        version(),
        socket.gethostname(),
        ", ".join(other) or "none",
    )


def end(deadline: float = 2.0) -> str:
    """Write what waits. Return one sentence about lines that are missing; "" if none is."""
    if not _open:
        return ""
    handler = _open.pop()
    _root.removeHandler(handler)
    missing = handler.file.close(deadline)
    if not missing:
        return ""
    lines = "1 line" if missing == 1 else f"{missing} lines"
    return f"{lines} of {LOG} could not be written: {handler.file.error}"


def decided(incident: Incident) -> None:
    """Log an incident's diagnosis and plan."""
    diagnosis, plan = incident.diagnosis, incident.plan
    parts = [f"symptom {diagnosis.symptom}", f"cause {diagnosis.cause}", f"rule {diagnosis.rule}"]
    for name, nodes in (("suspects", diagnosis.suspects), ("proven bad", diagnosis.proven)):
        parts.append(f"{name} {','.join(nodes) or 'none'}")
    said = "; ".join(diagnosis.evidence)
    _recovery.info("incident %s: diagnosis: %s: %s", incident.id, ", ".join(parts), said)
    if plan is not None:
        out = ",".join(plan.replace) or "none"
        words = (incident.id, plan.action, plan.rung, out, plan.why)
        _recovery.info("incident %s: plan: %s by rung %s, nodes to replace: %s (%s)", *words)


def closed(incident: Incident) -> None:
    """Log how an incident ended, and its phases in seconds."""
    phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in incident.phases().items())
    words = (incident.id, incident.outcome, phases)
    _recovery.info("incident %s: %s; seconds: %s", *words)


def heard(node: str, message: msgspec.Struct) -> None:
    """Log a message of an agent, at debug."""
    if _wire.isEnabledFor(logging.DEBUG):
        _wire.debug("%s: %s", node, described(message))


def agent_said(node: str, level: int, text: str, dropped: int) -> None:
    """Log what a node's agent reports about itself."""
    more = f" ({dropped} more messages of this node were left out)" if dropped else ""
    _agents.log(level, "%s: %s%s", node, text, more)


def described(message: msgspec.Struct) -> str:
    """A message's name and its short fields, in words. Pure.

    Tables and bytes are left out: they are long, and hold the environment of the ranks.
    """
    shown = [
        f"{name}={str(value)[:LONGEST_FIELD]}"
        for name in message.__struct_fields__
        if isinstance(value := getattr(message, name), int | float | str | None)
        or (isinstance(value, tuple) and all(isinstance(v, int | str) for v in value))
    ]
    return f"{type(message).__name__} {' '.join(shown)}".rstrip()
