"""Files looked at, put into place and taken away again, as plan.py decided.

Runs on the machine that is changed, also where SSH brought it (health/admin/node.py): standard
library and filelock. Every file that was written stands in ``<etc>/manifest.json`` with its
checksum, so that a later run knows its own files from those that somebody edited. The manifest is
written before the files (with what is to be there, and what was) and after them: a run that was
cut off anywhere can be repeated, or taken back.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

ETC = "/etc/robust-slurm"
MANIFEST = "manifest.json"
VERSION = 1
READ_LIMIT = 1 << 20  # bytes; nothing that is put into place comes near it

Kind = Literal["none", "file", "dir", "other"]
Action = Literal["mkdir", "create", "replace", "mode", "remove", "rmdir"]


class InstallError(Exception):
    """An install or removal that is not possible; the text says where and what to do."""


class WantedFile(NamedTuple):
    """A file to be put into place. ``settings``: its admin edits it, and the edits are kept."""

    path: str
    text: str
    mode: int
    settings: bool = False


class Directory(NamedTuple):
    path: str
    mode: int


class Present(NamedTuple):
    """The thing at a path now; kind "none": there is nothing."""

    kind: Kind
    text: str = ""
    mode: int = 0
    uid: int = 0


class FileChange(NamedTuple):
    """One thing to do; ``diff`` shows it to a person."""

    action: Action
    path: str
    mode: int = 0
    text: str = ""
    diff: str = ""


class InstallPlan(NamedTuple):
    """Changes in the order to make them, and notes on what stays. ``intent``: the manifest to write
    before any file is touched."""

    changes: tuple[FileChange, ...]
    notes: tuple[str, ...]
    intent: FileChange | None = None


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def read_path(path: str) -> Present:
    """Return what is at a path; links are not followed. Raises InstallError if unreadable."""
    try:
        info = os.lstat(path)
        kind: Kind = "other"
        text = ""
        if stat.S_ISDIR(info.st_mode):
            kind = "dir"
        elif stat.S_ISREG(info.st_mode):
            kind = "file"
            with open(path, "rb") as file:
                text = file.read(READ_LIMIT).decode("utf-8", "surrogateescape")
    except (FileNotFoundError, NotADirectoryError):
        return Present("none")
    except OSError as error:
        raise InstallError(f"{path}: {error.strerror}") from error
    return Present(kind, text, stat.S_IMODE(info.st_mode), info.st_uid)


def read_manifest(etc: str) -> dict[str, Any]:
    """Read robust-admin's record of earlier installs; empty when there was none."""
    path = f"{etc}/{MANIFEST}"
    there = read_path(path)
    if there.kind == "none":
        return {}
    hint = (
        "it lists the files that robust-admin installed: repair it, or move it and those files away"
    )
    if there.kind != "file" or there.uid not in (0, os.geteuid()) or there.mode & 0o022:
        raise InstallError(f"{path} can be written by others or is no file; {hint}")
    try:
        found = json.loads(there.text)
        good = found["v"] == VERSION and all(
            isinstance(record, dict) for record in found["files"].values()
        )
        good = good and all(isinstance(entry, str) for entry in found["dirs"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InstallError(f"{path} cannot be read ({error}); {hint}") from error
    if not good:
        raise InstallError(f"{path} is of another version; {hint}")
    return dict(found)


def apply(plan: InstallPlan) -> list[str]:
    """Make the plan's changes; directories that are not empty stay and are returned as notes."""
    notes = []
    intent = plan.intent
    for change in plan.changes:
        try:
            if intent is not None and Path(intent.path).parent.exists():
                _do(intent)
                intent = None
            _do(change)
        except OSError as error:
            if change.action != "rmdir":
                raise InstallError(f"{change.path}: {error.strerror}") from error
            notes.append(f"left: {change.path} ({error.strerror})")
    return notes


def clear_drafts(etc: str, manifest: Mapping[str, Any]) -> None:
    """Remove the unfinished files of a run that was cut off. Only under the lock."""
    for path in (*manifest.get("files", {}), f"{etc}/{MANIFEST}"):
        _draft(Path(path)).unlink(missing_ok=True)


def _do(change: FileChange) -> None:
    path = Path(change.path)
    if change.action == "mkdir":
        path.mkdir(parents=True)
        path.chmod(change.mode)
    elif change.action == "mode":
        if path.lstat().st_uid != os.geteuid():
            os.chown(path, os.geteuid(), os.getegid(), follow_symlinks=False)
        path.chmod(change.mode)
    elif change.action == "remove":
        path.unlink(missing_ok=True)
    elif change.action == "rmdir":
        path.rmdir()
    else:
        write(change.path, change.text, change.mode)


def _draft(target: Path) -> Path:
    return target.with_name(f".{target.name}.robust-admin")


_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def write(path: str, text: str, mode: int) -> None:
    """Write a file so that it is there in full or not at all, also after a power failure."""
    target = Path(path)
    draft = _draft(target)
    fd = os.open(draft, _NEW, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(text.encode("utf-8", "surrogateescape"))
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        draft.rename(target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    above = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(above)
    finally:
        os.close(above)
