"""The interface to the node: all that a check may read, so that a recorded tree can replace it.

Paths are absolute ("/sys/class/net"). What cannot be read raises OSError with its errno, from the
live node and from a recorded tree alike.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from health.node.gpu_snapshot import GpuSnapshot

READ_LIMIT = 4 << 20  # bytes of one file; the rest is cut off
# Errors of a probe. The gate's own trouble and not the file system's: the probe could not start.
PROBE_NOT_STARTED = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})
# The server answered, and does not let root in (root_squash, Kerberos): alive.
PROBE_REFUSED = frozenset(
    {errno.EACCES, errno.EPERM, errno.ENOKEY, errno.EKEYEXPIRED, errno.ENOTDIR}
)


class LogRecord(NamedTuple):
    """One message of the kernel's log since boot; ``time`` is seconds since boot."""

    seq: int
    time: float
    level: int  # syslog severity, 0 emergency … 7 debug
    text: str
    lost: int = 0  # records before it that were overwritten while the log was read


class Disk(NamedTuple):
    """A file system's size as df shows it, in bytes and inodes (inodes 0: it has no such limit)."""

    total: int
    free: int  # for users, without root's reserve
    inodes: int
    inodes_free: int
    read_only: bool


class Usage(NamedTuple):
    """The files below some directories. ``owners``: rows of uid, bytes on disk, number of entries.

    ``whole``: false where not everything was seen; ``entries``: how many were.
    """

    owners: Sequence[Sequence[int]]
    entries: int
    whole: bool


class PathEntry(NamedTuple):
    """The result of lstat on one path."""

    kind: str  # "file", "dir", "link", "socket", "char", "block", "fifo"
    mode: int  # permission bits
    uid: int
    size: int
    mtime: float  # only kept: recordings of nodes have it


class CommandOutput(NamedTuple):
    """The result of a command. ``code`` is -N after signal N."""

    code: int
    out: str
    err: str


class Context(NamedTuple):
    """The place, node and job of the run: from Slurm's environment, empty outside a job."""

    where: str  # "prolog", "epilog", "sweep", "deep"
    node: str
    job: int  # 0: none
    uid: int  # the job's user; -1: none
    env: Mapping[str, str]  # SLURM_* only


class Event(NamedTuple):
    """One line of the node's own history (health/history/events.py); ``data`` depends on ``kind``.

    Kinds: "xid" and "sxid" (gpu, code), "lost" (gpu), "boot", "reset" (gpu, or "" for all),
    "driver" (the driver was loaded), "drain", "undrain", "lifted" (somebody else took a drain of
    ours back), "strike" (job, uid, check), "repaired", "withdrawn" (job, name: the report whose
    strike counts no more), "app-xid" (gpu, codes, job, uid: Xids of a program, as its job's epilog
    wrote them down).
    """

    time: float  # wall clock
    kind: str
    boot: str  # boot id during which it happened
    data: Mapping[str, Any]


class System(Protocol):
    """A node, live or recorded."""

    @property
    def context(self) -> Context: ...

    def options(self, family: str) -> Mapping[str, Any]:
        """The family's settings: its defaults, and what robust.toml says for this node."""
        ...

    def read(self, path: str) -> str:
        """A file's text, undecodable bytes replaced, at most READ_LIMIT bytes."""
        ...

    def names(self, path: str) -> list[str]:
        """A directory's entries, sorted."""
        ...

    def link(self, path: str) -> str:
        """The target of a symbolic link, as it is written."""
        ...

    def entry(self, path: str) -> PathEntry:
        """lstat of one path."""
        ...

    def usage(self, tops: Sequence[str], deadline_s: float) -> Usage:
        """The owners of files below these directories; what is not seen in time is left out."""
        ...

    def disk(self, path: str) -> Disk:
        """The file system below a path. May hang with the file system: the runner's deadline."""
        ...

    def probe(self, path: str, write: bool, deadline_s: float) -> None:
        """Prove that a directory answers (stat, listing; with ``write`` a file made and removed).

        Runs in a process of its own; raises TimeoutError (an OSError) at the deadline.
        """
        ...

    def command(self, argv: Sequence[str], deadline_s: float) -> CommandOutput:
        """Run a program (absolute path). TimeoutError at the deadline, OSError if not there.

        As root, PermissionError for a program that others could change.
        """
        ...

    def kernel_log(self) -> list[LogRecord]:
        """The kernel's messages since boot, as far back as its buffer reaches."""
        ...

    def nvml(self) -> GpuSnapshot:
        """The state of all GPUs by NVML: collected once, by a process of its own."""
        ...

    def history(self) -> list[Event]:
        """The node's own history, oldest first."""
        ...

    def fleet(self) -> Mapping[str, Any]:
        """The values that the site recorded as right for nodes of this kind; empty if none were."""
        ...

    def clock_offset(self) -> float | None:
        """Seconds by which the clock may be wrong (adjtimex); None: nobody synchronises it."""
        ...

    def now(self) -> float:
        """Wall clock, seconds since 1970."""
        ...

    def uptime(self) -> float:
        """Seconds since boot."""
        ...

    def boot_id(self) -> str:
        """The kernel's random id of this boot."""
        ...
