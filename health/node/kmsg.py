"""The kernel's log as /dev/kmsg gives it, and as a plain file of the same lines."""

from __future__ import annotations

import os
import stat

from health.node.rootfiles import closing
from health.node.system import LogRecord

DEVICE = "/dev/kmsg"
_RECORD_LIMIT = 16384  # bytes; the kernel's longest record with its dictionary is 8 KiB
_LIMIT = 64 << 20  # bytes in all: more than the largest buffer of a kernel in use


def parse_line(line: str) -> LogRecord | None:
    """One record, "prio,seq,usec,flags[,...];text"; None for anything else.

    ``prio`` is facility * 8 + severity. Only the kernel's own records (facility 0) count: what a
    program writes into /dev/kmsg gets another facility from the kernel. "lost=N" among the flags is
    written by ``format_record`` only.
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
    lost = fields[3].rpartition(",lost=")[2]
    known = len(lost) < 16 and lost.isascii() and lost.isdigit() and ",lost=" in fields[3]
    return LogRecord(seq, usec / 1e6, prio, text, int(lost) if known else 0)


def parse(text: str, *, gaps: bool = False) -> list[LogRecord]:
    """All records of a text; lines that begin with a blank continue a record and are left out.

    ``gaps``: the text has every record that was read, so that a gap in their numbers is a loss. A
    recorded log has the kernel's own ones only.
    """
    out: list[LogRecord] = []
    before, lost = -1, 0
    for line in text.split("\n"):
        if not line or line[0] in " \t":
            continue
        if gaps:
            seq = _number(line)
            if 0 <= before < seq - 1:
                lost += seq - 1 - before
            before = max(before, seq)
        record = parse_line(line)
        if record:
            out.append(record._replace(lost=lost) if lost else record)
            lost = 0
    return out


def _number(line: str) -> int:
    """The sequence number of any record, -1: none."""
    digits = line.split(",", 2)[1:2]
    return int(digits[0]) if digits and digits[0].isascii() and digits[0].isdigit() else -1


def format_record(record: LogRecord) -> str:
    """The line that ``parse_line`` reads back as this record."""
    flags = f"-,lost={record.lost}" if record.lost else "-"
    return f"{record.level},{record.seq},{round(record.time * 1e6)},{flags};{record.text}"


def read(path: str = DEVICE) -> list[LogRecord]:
    """Return all records in the kernel's buffer, oldest first. Never waits. Raises OSError."""
    with closing(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as fd:
        device = stat.S_ISCHR(os.fstat(fd).st_mode)
        data = _records(fd) if device else _chunks(fd)
    return parse(data.decode("utf-8", "replace"), gaps=device)


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
            continue  # overwritten before it was read: the next has a number that is too high
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
