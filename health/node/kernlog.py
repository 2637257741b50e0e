"""Common parts of the checks of the kernel's log: windows of time and evidence. Pure.

The patterns of these checks must not match a message that a user can make the kernel write. Some
messages begin with the name of a process, 15 characters that its user chooses ("x invoked
oom-killer", "x: page allocation failure"): every pattern is anchored at the beginning and longer
than such a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from health.node.system import LogRecord, System
from robust_slurm.text import ago, one_line

WARNING = 4  # syslog severity; more than that is not trouble
_OOM_S = 1800.0  # from a kill for memory to the last look that finds the service down by it
QUOTE = 240  # characters of a message in the evidence


def loud(records: Iterable[LogRecord]) -> list[LogRecord]:
    """The records of severity "warning" and worse."""
    return [record for record in records if record.level <= WARNING]


def within(records: Iterable[LogRecord], uptime: float, window: float) -> list[LogRecord]:
    """The records of the last ``window`` seconds."""
    return [record for record in records if record.time > uptime - window]


def killed_for_memory(system: System, name: str, pid: str = "") -> bool:
    """True if the kernel killed this process because memory ran out: a user's doing.

    Where its ``pid`` is not known, one of this name that was killed not long ago.
    """
    try:
        records = system.kernel_log()
    except OSError:
        return False
    if not pid:
        records = within(records, system.uptime(), _OOM_S)
    pattern = rf"Out of memory: Killed process {pid or r'[0-9]+'} \({re.escape(name[:15])}\) "
    return any(re.match(pattern, record.text) for record in records)


def quoted(text: str) -> str:
    """A message in quotes, on one line, printable, not too long."""
    return f'"{one_line(text, QUOTE)}"'


def evidence(found: Sequence[LogRecord], uptime: float, times: int = 0) -> str:
    """The evidence in words: the count, the age of the last message, and its text."""
    last = found[-1]
    return f"{times or len(found)} x, last {ago(last.time, uptime)}: {quoted(last.text)}"
