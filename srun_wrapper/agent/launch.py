"""The data of a rank's start: the launch of one rank, and its process."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from robust_slurm.record import create
from srun_wrapper.agent.processes.end_report import error_file
from srun_wrapper.agent.streams.pump import Pump
from srun_wrapper.agent.warm.preforked import Forked
from srun_wrapper.protocol.code import Code
from srun_wrapper.protocol.messages import RankStart, Start

MOUNT = 3.0  # s for a file system to be mounted; robust-srun waits SETTLE_MAX for failed starts
LOOK = 0.25  # s between two looks for it


@dataclass(slots=True)
class Running:
    """A rank's process."""

    epoch: int
    process: subprocess.Popen[bytes] | Forked
    pumps: list[Pump] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RankLaunch:
    """The order to run a rank, with its command, environment, heartbeat record and directory."""

    order: Start
    rank: RankStart
    command: list[str]
    env: dict[str, str]
    record: Path
    directory: str = ""  # working directory; "": the shim's own


def begin_record(record: Path, order: Start, rank: RankStart) -> None:
    """Create a rank's heartbeat record of an epoch; remove the files of the slot's last rank.

    Raises OSError, ValueError.
    """
    error_file(record.parent, rank.local).unlink(missing_ok=True)
    record.unlink(missing_ok=True)  # of a rank that was to go on in this epoch
    create(str(record), epoch=order.epoch, local_rank=rank.local, rank=rank.rank)


def world_fds(order: Start, env: Mapping[str, str]) -> tuple[int, ...]:
    """Return the descriptor that srun --mpi=pmi2 gives a task; an MPI world starts only once."""
    text = env.get("PMI_FD", "") if order.first else ""
    if not text.isdecimal():
        return ()
    try:
        os.fstat(int(text))
    except OSError:
        return ()
    return (int(text),)


def check_snapshot(code: Code | None) -> None:
    """Raise OSError if the code that the rank is to run is not on this node; call it in a thread.

    A rank would say only that it cannot open a file, which looks like the program's own error.
    An automounter may refuse at first, when all nodes ask their server at once.
    """
    until = time.monotonic() + MOUNT
    while code is not None:
        number, what = errno.ENOENT, ""
        try:
            if Path(code.tree).is_dir():
                return
        except OSError as err:
            number, what = err.errno or errno.EIO, f" ({err.strerror})"
        if time.monotonic() >= until:
            why = f"the snapshot of the code is not on this node{what}; is "
            raise OSError(number, f"{why}code_store (or state_dir) mounted?", code.tree)
        time.sleep(LOOK)
