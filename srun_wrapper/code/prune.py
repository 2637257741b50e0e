"""Removes old snapshots of code that no job needs any more; robust-srun does so beside its start.

The store of another job's snapshots is removed if all of this holds: its modification time is old
(robust-srun renews it while it runs, see ``Follower``), Slurm knows the own job but not that one,
its book names no other cluster, this user owns it, and it holds nothing but snapshots. In the own
job's store, old snapshots are removed that no book and no request names. What is removed is renamed
first; if it was renewed at that very moment, it gets its name back.

Others may write where the stores are: a directory is looked at and emptied through a descriptor
of it, and no link is followed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path

from robust_slurm.settings import Config
from robust_slurm.slurm.door import Slurm
from robust_slurm.slurm.errors import SlurmError
from robust_slurm.state_dir import job_dirs
from srun_wrapper.code.deployment import BOOK, REQUESTS, read_book
from srun_wrapper.code.requests import read_from
from srun_wrapper.code.snapshot import remove_tree
from srun_wrapper.code.versions import Book

SECONDS = 30.0  # until nothing more is looked at or removed, this time
DAY = 24 * 3600.0
_OLD = ".old-"  # begins the name of what is being removed
_SNAPSHOT = re.compile(r"(\.old-)?(c-)?[0-9a-f]{12}")
_UNFINISHED = re.compile(r"\.{1,2}tmp-[0-9a-f]{12}")
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
    try:
        before = min(time.time(), _its_now(own)) - config.code_keep * DAY
        removed = list(_unlisted(own, records, before, until))
    except OSError:
        return []
    old = [s for s in _stores(config, until) if s != own and _is_old(s, before)]
    if not old:
        return removed
    try:
        alive = (known or Slurm().job_states)()
    except SlurmError:
        return removed
    if _job(own) not in alive:  # a Slurm that has forgotten jobs, or another cluster's
        return removed
    book = read_book(records / BOOK)
    unknown = [s for s in old if _job(s) not in alive and _is_ours(config, s, book)]
    return [*removed, *(str(s) for s in unknown if _remove(s, before, until, store=True))]


def _its_now(own: Path) -> float:
    """Return the time of the file system that has the stores: this node's may be wrong."""
    os.utime(own, follow_symlinks=False)
    return own.lstat().st_mtime


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
    jobs = Path(os.path.realpath(Path(config.state_dir).expanduser() / "jobs"))
    for record in _job_dirs(jobs, until):
        if _time(record) is not None:  # others make directories and links there
            yield from (record / "code", record / f"{_OLD}code")
    if config.code_store:
        yield from _job_dirs(Path(os.path.realpath(Path(config.code_store).expanduser())), until)


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


def _is_ours(config: Config, store: Path, own: Book | None) -> bool:
    """False if the store's book names another cluster: only that cluster's Slurm knows the job."""
    name = store.parent.name if store.name.removeprefix(_OLD) == "code" else store.name
    jobs = Path(config.state_dir).expanduser() / "jobs"
    book = read_book(jobs / name.removeprefix(_OLD) / BOOK)
    return book is None or own is None or book.cluster in ("", own.cluster)


def _unlisted(own: Path, records: Path, before: float, until: float) -> Iterator[str]:
    book = read_book(records / BOOK)
    if book is None or book.store != str(own):
        return
    try:
        names = os.listdir(own)  # noqa: PTH208
    except OSError:
        return
    listed = {version.id for version in book.versions} | _requested(records / REQUESTS)
    for name in names:
        version = name.removeprefix(_OLD)
        ours = _SNAPSHOT.fullmatch(name) and f"{version}.json" in names
        unknown = name.startswith(_OLD) or name not in listed
        if not (ours and unknown and _is_old(own / name, before)):
            continue
        if _remove(own / name, before, until):
            if not os.path.lexists(own / version):  # it was not taken again meanwhile
                (own / f"{version}.json").unlink(missing_ok=True)
            yield str(own / name)


def _requested(path: Path) -> set[str]:
    """Return the versions of all requests: a job that waits in a queue has not read them yet."""
    found: set[str] = set()
    offset, after = -1, 0
    while after != offset and path.exists():
        offset = after
        some, after = read_from(path, offset)
        found.update(request.change.version for request, _ in some)
    return found


def _is_old(path: Path, before: float) -> bool:
    """True for a directory of this user that has not been renewed since."""
    changed = _time(path)
    return changed is not None and changed < before


def _time(path: Path) -> float | None:
    """Return the time of change of a directory of this user; None for all else, and for a link."""
    try:
        mine = job_dirs.owner(str(path)) == os.getuid()
        return path.lstat().st_mtime if mine else None
    except OSError:
        return None


def _is_store(place: Path) -> bool:
    """True if all in it is what ``take`` makes: a user's results may be beside it, by job id."""
    names = [name.removesuffix(".json") for name in os.listdir(place)]  # noqa: PTH208
    return all(_SNAPSHOT.fullmatch(name) or _UNFINISHED.fullmatch(name) for name in names)


def _remove(path: Path, before: float, until: float, store: bool = False) -> bool:
    if time.monotonic() > until:
        return False
    away = path if path.name.startswith(_OLD) else path.with_name(f"{_OLD}{path.name}")
    try:
        with _held(path) as (_, place):
            empty = away != path and not any(place.iterdir())  # it may be anybody's
            if store and (empty or not _is_store(place)):
                return False
        if away != path:
            if os.path.lexists(away):  # of an earlier removal, which goes on by itself
                return False
            path.rename(away)
        with _held(away) as (info, place):
            young = info.st_mtime >= before
            if not young and info.st_uid == os.getuid() and (not store or _is_store(place)):
                _clear(place, until)
            else:
                if away != path:
                    away.rename(path)
                return False
        with contextlib.suppress(OSError):  # the time was over
            away.rmdir()
    except OSError:
        return False  # another robust-srun is quicker, or the file system does not let us
    return True


@contextlib.contextmanager
def _held(path: Path) -> Iterator[tuple[os.stat_result, Path]]:
    """Give a directory, and a path that is it whatever becomes of its name. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield os.fstat(fd), Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _clear(place: Path, until: float) -> None:
    """Remove what is in it; what is left when the time is over goes another time."""
    place.chmod(0o700)
    for entry in sorted(place.iterdir()):
        if time.monotonic() > until:
            os.utime(place, (0, 0))  # removing a part has renewed it; the rest must stay old
            return
        if entry.is_dir() and not entry.is_symlink():
            remove_tree(entry)
        else:
            entry.unlink(missing_ok=True)
