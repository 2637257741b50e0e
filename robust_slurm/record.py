"""The shim's side of the heartbeat: make, read and (regex mode) write beat records.

Records are read with ``pread``, not mapped: a rank that truncates its record must not be able to
kill the shim with SIGBUS. A record is written by user code and is parsed as hostile: whatever it
holds, ``BeatReader.read`` returns a Beat or None.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Mapping
from math import isfinite
from struct import Struct
from struct import error as struct_error
from typing import NamedTuple

from robust_slurm.text import one_line

from . import layout
from .layout import record_path

__all__ = ["Beat", "BeatReader", "NotFinite", "RecordWriter", "create", "record_path", "scan"]

_SOURCES: Mapping[int, str | None] = {
    0: None,
    layout.EXPLICIT: "explicit",
    layout.AUTO: "auto",
    layout.REGEX: "regex",
    layout.ANEW: "anew",
}
_TRIES = 8
_LOCK = Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid
_MAX_LOCAL_RANKS = 1024


class NotFinite(NamedTuple):
    """The first loss that was not finite since the last finite one."""

    step: int | None
    """The step as the training numbers it."""
    loss: float
    proven: int | None
    """Newest step that a Checkpointer saved or resumed and that a finite loss was computed from;
    if there is none, the step before the resumed one. None: nothing is known of saved steps."""


class Beat(NamedTuple):
    """One consistent reading of a record. Times: seconds of CLOCK_MONOTONIC on that node."""

    pid: int
    """The process that owns the record; 0 while nobody has claimed it."""
    epoch: int
    local_rank: int
    rank: int
    """Global rank; -1 when the rank did not know it."""
    step: int | None
    """Last step reported; None before the first. With source "auto" or a regex without a group it
    counts from 1 in this process, whatever step the training resumed from."""
    beats: int
    """Number of steps reported since the record was claimed."""
    t_mono: float
    """Time of the last beat; 0.0 before the first."""
    loss: float | None
    """None when not given; may be NaN or infinite when training is."""
    grad_norm: float | None
    source: str | None
    """"explicit", "auto", "anew" (see ``layout.ANEW``) or "regex"; None before the first beat."""
    phase: str
    """Name of the innermost phase; "" outside all phases."""
    phase_since: float
    """Time since which ``phase`` is the innermost one; 0.0 if no phase was ever entered."""
    phases: int
    """Number of phase entries and exits: each is a sign of life."""
    nan: NotFinite | None = None
    proven: int | None = None
    """Newest step that a Checkpointer saved or resumed and that a finite loss was computed from, as
    of the last save. None: this rank reports no losses, or saves nothing."""
    sound: int | None = None
    """Step of the beat before the loss of ``nan``, if its own loss was finite; else None."""
    healed: bool = False
    """Losses were not finite once, and are again."""


def create(path: str, *, epoch: int, local_rank: int, rank: int = -1) -> None:
    """Make an unclaimed record. FileExistsError if there is one, OSError if it cannot be made."""
    os.close(layout.create_file(path, epoch, local_rank, rank))


def scan(directory: str, epoch: int) -> dict[int, str]:
    """Local rank → path of every record of ``epoch``, also of ranks the shim did not start itself.

    Empty when the directory cannot be read. At most 1024 ranks; other names are passed over.
    """
    found: dict[int, str] = {}
    prefix = f"{epoch}-"
    try:
        names = os.listdir(directory)  # noqa: PTH208 - names are what is wanted
    except OSError:
        return found
    for name in sorted(names):
        rank = name[len(prefix) : -len(".beat")]
        if name != f"{prefix}{rank}.beat" or not (rank.isascii() and rank.isdigit()):
            continue
        if len(rank) <= 4 and int(rank) < _MAX_LOCAL_RANKS:
            found[int(rank)] = record_path(directory, epoch, int(rank))
    return found


def parse(raw: bytes) -> Beat | None:
    """The Beat in ``raw``, or None if it is no record or was caught half-written."""
    try:
        (
            magic, version, size, epoch, local_rank, rank, pid,
            beats, step, t_mono, loss, grad_norm, source, beats_tail, sound,
            phases, since, _depth, length, name, phases_tail,
            nan, nan_step, nan_proven, nan_loss, nan_tail,
            proofs, proven, proofs_tail,
        ) = layout.RECORD.unpack(raw)  # fmt: skip
        if magic != layout.MAGIC or version != layout.VERSION or size != layout.SIZE:
            return None
        # A writer zeroes a section before it fills it: all times are positive in a whole one.
        if beats != beats_tail or phases != phases_tail or length > layout.NAME_BYTES:
            return None
        if nan != nan_tail or (nan and isfinite(nan_loss)) or proofs != proofs_tail:
            return None
        if (beats and not 0.0 < t_mono < 1e12) or (phases and not 0.0 < since < 1e12):
            return None
        phase = name[:length].decode("utf-8") if length else ""
        if not phase.isprintable():
            phase = one_line(phase)
        return Beat(
            pid,
            epoch,
            local_rank,
            rank,
            _number(step) if beats else None,
            beats,
            t_mono if beats else 0.0,
            None if not beats or (loss != loss and raw[88:96] == layout.ABSENT_BITS) else loss,
            None
            if not beats or (grad_norm != grad_norm and raw[96:104] == layout.ABSENT_BITS)
            else grad_norm,
            _SOURCES[source],
            phase,
            since if phases else 0.0,
            phases,
            NotFinite(_number(nan_step), nan_loss, _number(nan_proven)) if nan else None,
            _number(proven) if proofs else None,
            sound - 1 if nan and sound > 0 else None,
            not nan and sound == layout.HEALED,
        )
    except (struct_error, UnicodeDecodeError, KeyError):
        return None


def _number(step: int) -> int | None:
    return None if step == layout.NO_STEP else step


class BeatReader:
    """Reads one record again and again; opens it when it appears."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = -1
        self._raw = b""
        self._last: Beat | None = None

    def read(self) -> Beat | None:
        """The record as it is now; while it cannot be read whole, as it last was (None: never).

        A reading counts when two in a row are equal and its head and tail counts agree; after a
        bounded number of tries the last good one stands.
        """
        if self._fd < 0 and not self._open():
            return None
        fd = self._fd
        try:
            raw = os.pread(fd, layout.SIZE, 0)
            for _ in range(_TRIES):
                again = os.pread(fd, layout.SIZE, 0)
                if raw == again:
                    if raw == self._raw:
                        return self._last
                    beat = parse(raw)
                    if beat is not None:
                        self._raw, self._last = raw, beat
                        return beat
                raw = again
        except OSError:
            self.close()
        return self._last

    def ended(self) -> bool:
        """Return whether the process that claimed the record has ended.

        The claim is a lock that the kernel drops with the process, so a zombie, a reused pid or a
        container's own pids mislead nobody. False for a record that nobody has claimed.
        """
        if self._fd < 0 or self._last is None or not self._last.pid:
            return False
        asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        try:
            held = fcntl.fcntl(self._fd, fcntl.F_GETLK, asked)
        except OSError:
            return False
        return bool(_LOCK.unpack(held)[0] == fcntl.F_UNLCK)

    def close(self) -> None:
        """Give the descriptor back; a later read opens the record anew."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> bool:
        # O_NONBLOCK: a FIFO in the record's place must not stop the shim.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            fd = os.open(self.path, flags)
        except (OSError, ValueError):
            return False
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size != layout.SIZE:
            os.close(fd)
            return False
        self._fd = fd
        return True


class RecordWriter:
    """Writes steps that the shim saw in a rank's output into the record, on the rank's behalf."""

    def __init__(self, path: str) -> None:
        """``path``: a record made by ``create``. Raises OSError when it cannot be opened."""
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        self._fd = os.open(path, flags)
        if os.fstat(self._fd).st_size != layout.SIZE:
            self.close()
            raise OSError(f"{path} is not a beat record: remove it and start again")

    def beat(self, step: int | None = None) -> bool:
        """Report ``step`` (None: one more than the last). False if the script reports by itself."""
        old = parse(os.pread(self._fd, layout.SIZE, 0))
        if old is None or old.source == "explicit":
            return False
        n = old.beats + 1
        if step is None:
            step = (old.step or 0) + 1
        if not -(1 << 63) < step < 1 << 63:
            step = layout.NO_STEP
        absent = layout.ABSENT
        data = layout.BEAT.pack(n, step, time.monotonic(), absent, absent, layout.REGEX, n)
        os.pwrite(self._fd, data, layout.BEAT_AT)
        return True

    def close(self) -> None:
        """Give the descriptor back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
