"""Removes old snapshots of code that no job needs any more; robust-srun does so beside its start.

The store of a job's snapshots goes when three things agree: its time of change is old (robust-srun
renews it while it runs, see ``Follower``), Slurm answers and does not know the job, and it is this
user's. In the own job's store, snapshots go that are old and not in the job's book: those of
requests that were never made. A snapshot gets another name first; if it was renewed at that very
moment, it gets its name back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path

from robust_slurm.settings import Config
from robust_slurm.slurm.door import Slurm
from robust_slurm.slurm.errors import SlurmError
from robust_slurm.state_dir import job_dirs
from srun_wrapper.code.deployment import BOOK, read_book
from srun_wrapper.code.snapshot import remove_tree

SECONDS = 30.0  # until nothing more is looked at or removed, this time
DAY = 24 * 3600.0
_OLD = ".old-"  # begins the name of what is being removed
_log = logging.getLogger("robust-srun.code")


def prune(
    config: Config,
    own: Path,
    records: Path,
    known: Callable[[], Container[int]] | None = None,
    seconds: float = SECONDS,
) -> list[str]:
    """Remove what is old, and return its places. ``own``, ``records``: of this job.

    ``known``: the ids of all jobs that Slurm knows; raises SlurmError.
    """
    until = time.monotonic() + seconds
    before = time.time() - config.code_keep * DAY
    removed = list(_unlisted(own, records, before, until))
    old = [s for s in _stores(config, until) if s != own and _is_old(s, before)]
    if not old:
        return removed
    try:
        alive = (known or Slurm().job_states)()
    except SlurmError:
        return removed
    removed += [str(s) for s in old if _job(s) not in alive and _remove(s, before, until)]
    return removed


def begin(config: Config, own: Path, records: Path) -> None:
    """Prune in a thread of its own, which ends with the process: the file system may be slow."""

    def work() -> None:
        try:
            if removed := prune(config, own, records):
                _log.info("removed old snapshots of code: %s", ", ".join(removed))
        except Exception:  # noqa: BLE001 - nothing depends on it
            _log.exception("old snapshots of code")

    threading.Thread(target=work, name="prune", daemon=True).start()


def _stores(config: Config, until: float) -> Iterator[Path]:
    """Yield the directories that may be stores, of ended jobs as well, in no order.

    There may be more than can be looked at in the time: then each start looks at others.
    """
    jobs = Path(config.state_dir).expanduser() / "jobs"
    for record in _job_dirs(jobs, until):
        yield from (record / "code", record / f"{_OLD}code")
    if config.code_store:
        yield from _job_dirs(Path(config.code_store).expanduser().absolute(), until)


def _job_dirs(place: Path, until: float) -> Iterator[Path]:
    try:
        names = os.listdir(place)  # noqa: PTH208
    except OSError:
        return
    random.shuffle(names)
    for name in names:
        if time.monotonic() > until:
            return
        parsed = job_dirs.parse(name.removeprefix(_OLD))
        if parsed is not None and parsed[1] in (None, os.getuid()):
            yield place / name


def _job(store: Path) -> int:
    """Return the job of a store: of its own name, or of the record directory that it is in."""
    for name in (store.name, store.parent.name):
        if (parsed := job_dirs.parse(name.removeprefix(_OLD))) is not None:
            return parsed[0]
    return 0


def _unlisted(own: Path, records: Path, before: float, until: float) -> Iterator[str]:
    book = read_book(records / BOOK)
    if book is None or book.store != str(own):
        return
    try:
        names = os.listdir(own)  # noqa: PTH208
    except OSError:
        return
    listed = {version.id for version in book.versions}
    for name in names:
        unknown = name.startswith(_OLD) or (not name.startswith(".") and name not in listed)
        if unknown and _is_old(own / name, before) and _remove(own / name, before, until):
            (own / f"{name.removeprefix(_OLD)}.json").unlink(missing_ok=True)
            yield str(own / name)


def _is_old(path: Path, before: float) -> bool:
    """True for a directory of this user that has not been renewed since; a link is none."""
    try:
        info = path.lstat()
        return job_dirs.owner(str(path)) == os.getuid() and info.st_mtime < before
    except OSError:
        return False


def _remove(path: Path, before: float, until: float) -> bool:
    if time.monotonic() > until:
        return False
    away = path if path.name.startswith(_OLD) else path.with_name(f"{_OLD}{path.name}")
    try:
        if away != path:
            if os.path.lexists(away):  # an earlier removal was cut short
                _clear(away, until)
            path.rename(away)
            if not _is_old(away, before):
                away.rename(path)
                return False
        _clear(away, until)
    except OSError:
        return False  # another robust-srun is quicker, or the file system does not let us
    return True


def _clear(away: Path, until: float) -> None:
    """Remove it piece by piece; what is left when the time is over goes another time."""
    away.chmod(0o700)
    for entry in sorted(away.iterdir()):
        if time.monotonic() > until:
            os.utime(away, (0, 0))  # to remove a part has made it young
            return
        if entry.is_dir() and not entry.is_symlink():
            remove_tree(entry)
        else:
            entry.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        away.rmdir()
