"""Shared file systems that do not answer: which mounts processes use, and which are silent.

A stalled server makes every process that uses its mount wait in the kernel. The node is not at
fault, so this must not be taken for a hang, a dead node or a rank that survives SIGKILL.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from robust_slurm.linux.filesystem_types import is_served
from srun_wrapper.agent.processes import process_tree

MOST = 512  # processes of a node that are looked at
_PATH_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")


# ---------------------------------------------------------------- pure


@dataclass(frozen=True, slots=True)
class UsedMount:
    """One line of /proc/PID/mountinfo."""

    point: str
    kind: str

    @property
    def shared(self) -> bool:
        """True if another machine serves it. A stalled local disk is the node's fault."""
        return is_served(self.kind)


def parse_mounts(mountinfo: str) -> list[UsedMount]:
    """Read mountinfo's text; lines that make no sense are left out."""
    found = []
    for line in mountinfo.splitlines():
        first, _, last = line.partition(" - ")
        words, more = first.split(), last.split()
        if len(words) >= 5 and more:
            found.append(UsedMount(_unescaped(words[4]), more[0]))
    return found


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def mount_of(path: str, mounts: Sequence[UsedMount]) -> UsedMount | None:
    """Return the mount that an absolute path is on: the longest match, of equals the last."""
    best: UsedMount | None = None
    for mount in mounts:
        below = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        if below and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def shared_points(paths: Iterable[str], mounts: Sequence[UsedMount]) -> set[str]:
    """Return the mount points of the shared file systems that these paths are on."""
    found = (mount_of(path, mounts) for path in {*paths, "/"} if path.startswith("/"))
    return {mount.point for mount in found if mount is not None and mount.shared}


def command_paths(words: Sequence[str], env: Mapping[str, str], directory: str) -> set[str]:
    """Return the paths that starting a command touches, as far as its words show."""
    found = {directory}
    found |= {word if word.startswith("/") else f"{directory}/{word}" for word in words[:8]}
    for name in _PATH_VARIABLES:
        found |= set(filter(None, env.get(name, "").split(os.pathsep)))
    return found


# ---------------------------------------------------------------- the machine


def own_mounts() -> list[UsedMount]:
    """Return the mounts that this process sees. Raises OSError."""
    return parse_mounts(Path("/proc/self/mountinfo").read_text(errors="surrogateescape"))


def point_of(pid: int, path: str) -> str:
    """Return the mount point that a process's path is on; "" if that is not known."""
    try:
        text = Path(f"/proc/{pid}/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return ""
    mount = mount_of(path, parse_mounts(text))
    return mount.point if mount is not None else ""


def used_paths(pid: int) -> set[str]:
    """Return the paths that a process has as directory, program, open files and mappings."""
    base = Path(f"/proc/{pid}")
    links = [base / "cwd", base / "exe"]
    try:
        links += list((base / "fd").iterdir())
    except OSError:
        pass
    found = set()
    for link in links:
        try:
            found.add(str(link.readlink()))
        except OSError:
            continue
    try:
        with (base / "maps").open(errors="replace") as file:
            found |= {line[line.index("/") :].rstrip("\n") for line in file if "/" in line}
    except OSError:
        pass
    return found


NONE: tuple[str, ...] = ()  # of the file systems are silent


def silent_mounts(
    roots: Collection[int], paths: Collection[str], seconds: float, mountinfo: str = ""
) -> tuple[str, ...]:
    """Return the mount points that do not answer within ``seconds``.

    The mounts asked are those that the process trees below ``roots`` use, and those of ``paths``.
    Blocks for ``seconds`` if one is silent: call it in a thread. ``mountinfo``: default our own.
    """
    try:
        mounts = parse_mounts(mountinfo) if mountinfo else own_mounts()
    except OSError:
        return ()
    if not any(mount.shared for mount in mounts):
        return ()
    pids = [*roots, *(pid for root in roots for pid in process_tree.descendants(root))]
    found = set(paths)
    for pid in dict.fromkeys(pids[:MOST]):
        found |= used_paths(pid)
    return silent(shared_points(found, mounts), seconds)


_asked: set[str] = set()
_well: dict[str, float] = {}  # mount -> when the last question was asked that it answered
_answered = threading.Condition()


def silent(points: Collection[str], seconds: float) -> tuple[str, ...]:
    """Ask the mounts; return those that have not answered after ``seconds``.

    A mount with an open question is not asked again, so there is never more than one thread for it.
    """
    with _answered:
        fresh = set(points) - _asked
        _asked.update(fresh)
    for point in fresh:
        try:
            threading.Thread(target=_ask, args=(point,), daemon=True).start()
        except RuntimeError:  # no more threads: it could not be asked, so nothing is known
            with _answered:
                _asked.discard(point)
    until = time.monotonic() + seconds
    with _answered:
        while (waiting := _asked & set(points)) and (left := until - time.monotonic()) > 0:
            _answered.wait(left)
    return tuple(sorted(waiting))


def _ask(point: str) -> None:
    now, well = time.monotonic(), False
    try:
        os.statvfs(point)  # a question to the server: a stat may be answered from a cache
        well = True
    except OSError:
        pass  # an error is an answer, too, but no sign that the server is well
    with _answered:
        if well:
            _well[point] = now
        _asked.discard(point)
        _answered.notify_all()


def answering(since: float) -> tuple[str, ...]:
    """Return the mount points that were asked since then (monotonic seconds), and have answered."""
    with _answered:
        return tuple(sorted(point for point, asked in _well.items() if asked >= since))
