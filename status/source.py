"""The places that a report is read from: the state directory and Slurm, or the sample cluster."""

from __future__ import annotations

import getpass
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from robust_slurm.config import Config
from robust_slurm.slurm import Slurm, SlurmError
from robust_slurm.slurm.choose import connect
from robust_slurm.state_dir.records import clean
from status.accounts.gather import UserOf, user_of
from status.model import NO_RECORDS, SlurmView

DEADLINE_S = 8.0
DEMO_USER = "ada"  # the reader, in the sample cluster


@dataclass(frozen=True)
class RecordSource:
    """The sources of a report. ``user``: finds the name of an owner; ``own``: the reader's name."""

    state_dir: Path
    standby_partition: str
    door: Slurm
    own: str = ""
    user: UserOf = user_of
    at: float | None = None  # the fixed moment of the report; None: now

    @property
    def now(self) -> float:
        return time.time() if self.at is None else self.at

    @property
    def wrong(self) -> bool:
        """True if there is no such state directory, or it cannot be read."""
        try:
            if not self.state_dir.is_dir():
                return True
            os.scandir(self.state_dir / "jobs").close()
        except FileNotFoundError:  # no job has run yet
            return False
        except OSError:
            return True
        return False

    def missing(self) -> str:
        """Return why the state directory holds no records; "" if it may hold some."""
        jobs = self.state_dir / "jobs"
        try:
            if jobs.is_dir():
                return ""
            os.stat(self.state_dir)  # noqa: PTH116 - its error says why
        except PermissionError:  # reading the records reports this
            return ""
        except OSError as error:
            why = clean(error.strerror or str(error))
            return f"{NO_RECORDS}: {clean(str(self.state_dir))}: {why}; {_CURE}"
        return f"{NO_RECORDS}: {clean(str(jobs))} does not exist; {_CURE}"


_CURE = (
    "no job of robust-srun has run with this state_dir (set it in robust.toml, ROBUST_STATE_DIR or "
    "--state-dir)"
)


@contextmanager
def real(config: Config, slurm: Slurm | None) -> Iterator[RecordSource]:
    """The state directory and Slurm of the settings. Raises SlurmError."""
    door = slurm if slurm is not None else connect(config.slurm_backend, DEADLINE_S)
    try:
        yield RecordSource(config.state_dir, config.standby_partition, door, _own())
    finally:
        door.close()


@contextmanager
def demo(at: float | None = None) -> Iterator[RecordSource]:
    """Yield the sample cluster as of now, or as of the fixed moment ``at``."""
    from status import recorded

    with TemporaryDirectory(prefix="robust-status-demo-") as directory:
        door = recorded.write(Path(directory), at)
        yield RecordSource(Path(directory), "standby", door, DEMO_USER, _claimed, at)


def _claimed(uid: int, claimed: str) -> str:
    return claimed


def _own() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def ask_slurm(slurm: Slurm, with_nodes: bool = True, with_places: bool = False) -> SlurmView:
    """Ask for nodes, partitions and two job lists at once; ``with_places``: also the jobs' nodes.

    ``ping`` goes first because it answers at once when slurmctld is down; the others block 9 s.
    """
    if not slurm.ping():
        try:
            slurm.version()  # which needs no slurmctld, but Slurm's commands
        except SlurmError as error:
            if error.no_command:
                return SlurmView(error=clean(str(error)))
        return SlurmView(error="no slurmctld answers `scontrol ping`; is SLURM_CONF right?")
    try:
        with ThreadPoolExecutor(4) as pool:
            states = pool.submit(slurm.job_states)
            owners = pool.submit(slurm.job_owners)
            if not with_nodes:
                return SlurmView(job_states=states.result(), owners=owners.result())
            nodes = pool.submit(slurm.nodes)
            partitions = pool.submit(slurm.partitions)
            names = tuple(partitions.result())
            places = slurm.placements() if with_places else None
            return SlurmView(nodes.result(), names, states.result(), owners.result(), places)
    except SlurmError as error:
        return SlurmView(error=clean(str(error)))
