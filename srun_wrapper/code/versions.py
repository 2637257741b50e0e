"""Versions of a job's code, the changes between them, and what is due when (pure).

A ``Book`` is one job's record (``code.json`` in its directory). Times are wall-clock seconds,
because another host requests a change and a requeued job goes on with the book.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

LAZY_MOST = 24 * 3600.0
"""s that a lazy change waits for a recovery (ByteRobust's window)."""
KEPT = 200  # changes in the book
Kind = Literal["start", "now", "lazy", "rollback", "automatic"]
State = Literal["waiting", "in force", "replaced", "cancelled", "refused", "rolled back"]


class Version(msgspec.Struct, frozen=True):
    """One immutable snapshot. ``commit`` is empty unless all files are as committed."""

    id: str
    digest: str  # of all names, modes and contents
    commit: str
    files: int
    bytes: int
    taken: float
    seconds: float = 0.0


class Change(msgspec.Struct):
    """One change of the code: requested by a person, or made by robust-srun itself."""

    id: str
    kind: Kind
    version: str
    who: str
    host: str
    why: str
    requested: float
    state: State = "waiting"
    outcome: str = ""  # in words
    applied: float = 0.0
    seconds: float = 0.0  # from the request to the first step of all ranks; 0: not known


class Book(msgspec.Struct):
    """All versions and changes of one job, oldest first."""

    source: str  # the user's directory
    store: str  # where the snapshots are
    exclude: tuple[str, ...] = ()
    limit: float = 0.0  # bytes of one snapshot
    running: bool = True  # robust-srun runs and takes requests
    restarts: bool = True  # False: independent tasks, nothing is ever restarted
    versions: list[Version] = []
    changes: list[Change] = []
    progressed: list[str] = []  # ids of versions that made progress, the newest last
    read: int = 0  # bytes of the file of requests that were taken in
    cluster: str = ""  # whose job it is; "": not known
    v: int = 1

    # -- views

    def version(self, name: str) -> Version | None:
        return next((v for v in self.versions if v.id == name), None)

    def in_force(self) -> Change | None:
        return next((c for c in reversed(self.changes) if c.state == "in force"), None)

    @property
    def current(self) -> str:
        """Id of the version in force; "" before the first."""
        change = self.in_force()
        return change.version if change is not None else ""

    def waiting(self) -> Change | None:
        """Return the change that the next start of the ranks applies."""
        return next((c for c in reversed(self.changes) if c.state == "waiting"), None)

    def due(self, now: float) -> Change | None:
        """Return the change for which the ranks are to be restarted now."""
        change = self.waiting()
        if change is None or (change.kind == "lazy" and now < change.requested + LAZY_MOST):
            return None
        return change

    def back(self) -> str:
        """Return the last version that made progress and is not in force; "" if there is none."""
        return next((v for v in reversed(self.progressed) if v != self.current), "")

    # -- changes

    def add(self, version: Version) -> None:
        """Add a version unless the book has it."""
        if self.version(version.id) is None:
            self.versions.append(version)

    def request(self, change: Change, why: str = "") -> str:
        """Take a request in. Return why it is refused; "" if it waits now.

        A newer request replaces one that still waits. ``why``: the ranks cannot run its version.
        """
        if not self.restarts:
            why = "independent tasks (--robust-no-rank-env) are not restarted"
        elif not why and self.version(change.version) is None:
            why = f"version {change.version} is not known"
        elif not why and change.version == self.current and self.waiting() is None:
            why = f"version {change.version} is in force already"
        if not why and (older := self.waiting()) is not None:
            older.state, older.outcome = "replaced", f"replaced by request {change.id}"
        change.state, change.outcome = ("refused", why) if why else ("waiting", "")
        self.changes.append(change)
        live = [c for c in self.changes[:-KEPT] if c.state in ("waiting", "in force")]
        self.changes[:-KEPT] = live
        return why

    def cancel(self, who: str) -> Change | None:
        """Cancel the change that waits; None if none does."""
        change = self.waiting()
        if change is not None:
            change.state, change.outcome = "cancelled", f"cancelled by {who}"
        return change

    def apply(self, change: Change, now: float) -> None:
        """Note that the ranks start with this change's version."""
        before = self.in_force()
        if before is not None:
            before.state = "replaced"
            before.outcome = before.outcome or "no step was seen"
        change.state, change.applied, change.outcome = "in force", now, ""

    def roll_back(self, change: Change, why: str, now: float) -> None:
        """Replace the version in force, which failed, by ``change``'s."""
        failed = self.in_force()
        self.changes.append(change)
        self.apply(change, now)
        if failed is not None:
            failed.state, failed.outcome = "rolled back", why
            self.progressed = [v for v in self.progressed if v != failed.version]

    def progress(self) -> bool:
        """Note that the version in force has made progress; False if the book knows it already."""
        current = self.current
        if not current or self.progressed[-1:] == [current]:
            return False
        self.progressed = [v for v in self.progressed if v != current] + [current]
        return True

    def rollback_target(self, now: float, trial: float) -> str:
        """Return the version to go back to if the program fails now; "": none.

        Only an update is on trial, for ``trial`` seconds and until it has made progress. What a
        rollback has brought back is not on trial, so a job goes back by itself once per update.
        """
        change = self.in_force()
        if change is None or change.kind not in ("now", "lazy"):
            return ""
        over = now >= change.applied + trial and change.version in self.progressed
        return "" if over else self.back()


def name_of(commit: str, digest: str, of: Callable[[str], str]) -> str:
    """Return the id of a snapshot with this content.

    ``commit``: all files are as in it, "" if not; ``of``: the digest of the snapshot that has this
    id already, "" if none has. A commit whose id has another content, because files are hidden
    from git, gets the content's name.
    """
    name = commit[:12]
    return name if name and of(name) in ("", digest) else f"c-{digest[:12]}"
