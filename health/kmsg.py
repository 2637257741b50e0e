"""The kernel's log as /dev/kmsg gives it, and as a plain file of the same lines."""

from __future__ import annotations

import os
import stat

from health.system import LogRecord

DEVICE = "/dev/kmsg"
_RECORD_LIMIT = 16384  # bytes; the kernel's longest record with its dictionary is 8 KiB
_LIMIT = 64 << 20  # bytes in all: more than the largest buffer of a kernel in use


def parse_line(line: str) -> LogRecord | None:
    """One record, "prio,seq,usec,flags[,...];text"; None for anything else.

    ``prio`` is facility * 8 + severity. Only the kernel's own records (facility 0) count: what a
    program writes into /dev/kmsg gets another facility from the kernel.
    """
    head, mark, text = line.partition(";")
    fields = head.split(",", 3)
    if not mark or len(fields) < 4:
        return None
    try:
        prio, seq, usec = int(fields[0]), int(fields[1]), int(fields[2])
    except ValueError:
        return None
    if not 0 <= prio < 8 or seq < 0 or usec < 0:
        return None
    return LogRecord(seq, usec / 1e6, prio, text)


def parse(text: str) -> list[LogRecord]:
    """All records of a text; lines that begin with a blank continue a record and are left out."""
    out = []
    for line in text.split("\n"):
        if line and line[0] not in " \t":
            record = parse_line(line)
            if record:
                out.append(record)
    return out


def format_record(record: LogRecord) -> str:
    """The line that ``parse_line`` reads back as this record."""
    return f"{record.level},{record.seq},{round(record.time * 1e6)},-;{record.text}"


def read(path: str = DEVICE) -> list[LogRecord]:
    """All that the kernel still has, oldest first. Never waits. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        device = stat.S_ISCHR(os.fstat(fd).st_mode)
        data = _records(fd) if device else _chunks(fd)
    finally:
        os.close(fd)
    return parse(data.decode("utf-8", "replace"))


def _records(fd: int) -> bytes:
    """One record per read until EAGAIN."""
    out: list[bytes] = []
    size = 0
    while size < _LIMIT:
        try:
            record = os.read(fd, _RECORD_LIMIT)
        except BlockingIOError:
            break
        except BrokenPipeError:
            continue  # overwritten before it was read: the next read gives the oldest there is
        if not record:
            break
        out.append(record)
        size += len(record)
    return b"".join(out)


def _chunks(fd: int) -> bytes:
    out: list[bytes] = []
    size = 0
    while size < _LIMIT and (chunk := os.read(fd, 1 << 20)):
        out.append(chunk)
        size += len(chunk)
    return b"".join(out)
