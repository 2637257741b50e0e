"""Files put into place, and taken away again: what to change is decided purely, then done.

Runs on the machine that is changed, also where SSH brought it (health/admin/node.py): standard
library and filelock. Every file that was written stands in ``<etc>/manifest.json`` with its
checksum, so that a later run knows its own files from those that somebody edited. The manifest is
written before the files (with what is to be there, and what was) and after them: a run that was
cut off anywhere can be repeated, or taken back.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from health.settings_last import SUFFIX

ETC = "/etc/robust-slurm"
MANIFEST = "manifest.json"
VERSION = 1
READ_LIMIT = 1 << 20  # bytes; nothing that is put into place comes near it

Kind = Literal["none", "file", "dir", "other"]
Action = Literal["mkdir", "create", "replace", "mode", "remove", "rmdir"]


class InstallError(Exception):
    """What cannot be installed or removed; the text says where and what to do."""


class Wanted(NamedTuple):
    """A file to be put into place. ``settings``: its admin edits it, and the edits are kept."""

    path: str
    text: str
    mode: int
    settings: bool = False


class Directory(NamedTuple):
    path: str
    mode: int


class Present(NamedTuple):
    """What is at a path now."""

    kind: Kind
    text: str = ""
    mode: int = 0
    uid: int = 0


class Change(NamedTuple):
    """One thing to do; ``diff`` shows it to a person."""

    action: Action
    path: str
    mode: int = 0
    text: str = ""
    diff: str = ""


class Plan(NamedTuple):
    """What to do, in this order, and what is left as it is. ``intent``: the manifest to write
    before any file is touched."""

    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    intent: Change | None = None


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def identity(plan: Plan) -> str:
    """The same for the same changes: what was shown is what is done, or nothing is."""
    return digest(json.dumps([change[:4] for change in plan.changes]))


# ---- what to change (pure)


def plan_install(
    wanted: Sequence[Wanted],
    directories: Sequence[Directory],
    present: Mapping[str, Present],
    manifest: Mapping[str, Any],
    uid: int,
    etc: str,
    site: Mapping[str, Any],
) -> Plan:
    """From what is there to what is wanted. Raises InstallError for what is not ours to replace.

    ``present`` has every path of ``paths_to_look_at``; ``uid`` is the owner that all must have;
    ``site`` is recorded with the rest.
    """
    made = set(manifest.get("dirs", []))
    known: Mapping[str, Mapping[str, Any]] = manifest.get("files", {})
    changes: list[Change] = []
    notes: list[str] = []
    files: dict[str, dict[str, Any]] = {}
    for directory in directories:
        there = present[directory.path]
        if there.kind == "none":
            changes.append(Change("mkdir", directory.path, directory.mode))
            made.add(directory.path)
        elif there.kind != "dir":
            raise InstallError(f"{directory.path} is not a directory: move it away")
    for file in wanted:
        _plan_file(file, present, known, uid, changes, notes, files)
    for path in known:
        if path not in files:
            _plan_removal(path, present[path], known[path], changes, notes)
    new = {"v": VERSION, "site": dict(site), "files": files, "dirs": sorted(made)}
    if new == manifest:
        return Plan(tuple(changes), tuple(notes))
    last = _manifest_change(etc, new, "replace" if manifest else "create")
    if all(change.action == "mkdir" for change in changes):
        return Plan((*changes, last), tuple(notes))
    before = {path: _before(record, known.get(path, {})) for path, record in files.items()}
    gone = {path: known[path] for path in known if path not in files}
    intent = _manifest_change(etc, {**new, "files": {**gone, **before}}, last.action)
    return Plan((*changes, last), tuple(notes), intent)


def _manifest_change(etc: str, manifest: Mapping[str, Any], action: Action) -> Change:
    text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    return Change(action, f"{etc}/{MANIFEST}", 0o644, text)


def _before(record: Mapping[str, Any], was: Mapping[str, Any]) -> dict[str, Any]:
    """A file's record until it is known to be written."""
    found = {**record, "was": list(dict.fromkeys(_digests(was)))}
    return found | ({"offered": was.get("offered", "")} if "offered" in record else {})


def _digests(record: Mapping[str, Any]) -> list[str]:
    """Of all that robust-admin may have written there: several after a run that was cut off."""
    return [record["sha256"], *record.get("was", [])] if record else []


def _is_ours(there: Present, record: Mapping[str, Any]) -> bool:
    return digest(there.text) in _digests(record)


def _plan_file(
    file: Wanted,
    present: Mapping[str, Present],
    known: Mapping[str, Mapping[str, Any]],
    uid: int,
    changes: list[Change],
    notes: list[str],
    files: dict[str, dict[str, Any]],
) -> None:
    there, record = present[file.path], known.get(file.path, {})
    if there.kind not in ("none", "file"):
        raise InstallError(f"{file.path} is not a regular file: move it away")
    files[file.path] = {"sha256": digest(file.text)}
    if there.kind == "none":
        changes.append(_write("create", file, there))
    elif there.text == file.text:
        if there.mode != file.mode or there.uid != uid:
            changes.append(_mode_change(file.path, there, file.mode, uid))
    elif file.settings and not _is_ours(there, record):
        _plan_edited(file, present, known, changes, notes, files)
        return
    elif not file.settings and not record:
        raise InstallError(
            f"{file.path} is there and robust-admin did not write it: move it away first"
        )
    else:
        if not _is_ours(there, record):
            notes.append(f"{file.path} was changed by hand; the change is lost")
        changes.append(_write("replace", file, there))
    if file.settings:
        files[file.path]["offered"] = digest(file.text)


def _plan_edited(
    file: Wanted,
    present: Mapping[str, Present],
    known: Mapping[str, Mapping[str, Any]],
    changes: list[Change],
    notes: list[str],
    files: dict[str, dict[str, Any]],
) -> None:
    """An edited settings file stays; what is new is put beside it, once."""
    record = {k: v for k, v in known.get(file.path, {}).items() if k != "was"}
    record.setdefault("sha256", "")  # never ours: uninstall leaves it
    beside = file._replace(path=file.path + ".new")
    there = present[beside.path]
    if there.kind not in ("none", "file"):
        raise InstallError(f"{beside.path} is not a regular file: move it away")
    if record.get("offered") != digest(file.text) and there.text != file.text:
        changes.append(_write("create" if there.kind == "none" else "replace", beside, there))
        notes.append(f"{file.path} was edited and stays; what is new is in {beside.path}")
    else:
        notes.append(f"{file.path} was edited and stays")
    if there.kind == "file" or (changes and changes[-1].path == beside.path):
        files[beside.path] = {"sha256": digest(file.text)}
    files[file.path] = {**record, "offered": digest(file.text)}


def plan_uninstall(manifest: Mapping[str, Any], present: Mapping[str, Present], etc: str) -> Plan:
    """Remove what the manifest lists and nobody changed; directories go when they are empty."""
    if not manifest:
        return Plan((), (f"nothing is installed under {etc}",))
    changes: list[Change] = []
    notes: list[str] = []
    for path, record in manifest.get("files", {}).items():
        _plan_removal(path, present[path], record, changes, notes)
        last = path + SUFFIX
        if "offered" in record and present[last].kind == "file":  # the gate's own copy
            changes.append(Change("remove", last))
    changes.append(Change("remove", f"{etc}/{MANIFEST}"))
    for path in sorted(manifest.get("dirs", []), key=len, reverse=True):
        if present[path].kind == "dir":
            changes.append(Change("rmdir", path))
    return Plan(tuple(changes), tuple(notes))


def _plan_removal(
    path: str,
    there: Present,
    record: Mapping[str, Any],
    changes: list[Change],
    notes: list[str],
) -> None:
    if there.kind == "none":
        return
    if there.kind == "file" and _is_ours(there, record):
        changes.append(Change("remove", path, diff=_diff(path, there.text, "")))
    else:
        notes.append(f"left: {path} (changed since it was installed)")


def paths_to_look_at(
    wanted: Iterable[Wanted], directories: Iterable[Directory], manifest: Mapping[str, Any]
) -> list[str]:
    found = [directory.path for directory in directories]
    for file in wanted:
        found += [file.path, file.path + ".new"] if file.settings else [file.path]
    for path, record in manifest.get("files", {}).items():
        found += [path, path + SUFFIX] if "offered" in record else [path]
    return list(dict.fromkeys([*found, *manifest.get("dirs", [])]))


def _write(action: Action, file: Wanted, there: Present) -> Change:
    shown = _diff(file.path, there.text, file.text)
    return Change(action, file.path, file.mode, file.text, shown)


def _mode_change(path: str, there: Present, mode: int, uid: int) -> Change:
    owner = f", owner {there.uid} -> {uid}" if there.uid != uid else ""
    return Change("mode", path, mode, diff=f"{path}: mode {there.mode:04o} -> {mode:04o}{owner}\n")


def _diff(path: str, before: str, after: str) -> str:
    old, new = before.splitlines(), after.splitlines()
    names = (path if before else "/dev/null", path if after else "/dev/null")
    lines = difflib.unified_diff(old, new, *names, lineterm="")
    return "".join(f"{line}\n" for line in lines)


# ---- looking and doing


def look(path: str) -> Present:
    """What is at a path; links are not followed. Raises InstallError when it cannot be read."""
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
    """What robust-admin wrote here earlier; empty when it never did."""
    path = f"{etc}/{MANIFEST}"
    there = look(path)
    if there.kind == "none":
        return {}
    hint = "it says which files are robust-admin's: repair it, or move it and those files away"
    if there.kind != "file" or there.uid not in (0, os.geteuid()) or there.mode & 0o022:
        raise InstallError(f"{path} can be written by others or is no file; {hint}")
    try:
        found = json.loads(there.text)
        good = found["v"] == VERSION and all(
            isinstance(record, dict) for record in found["files"].values()
        )
        good = good and all(isinstance(entry, str) for entry in found["dirs"])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InstallError(f"{path} cannot be read ({error}); {hint}") from error
    if not good:
        raise InstallError(f"{path} is of another version; {hint}")
    return dict(found)


def apply(plan: Plan) -> list[str]:
    """Do it; directories that are not empty stay and come back as notes."""
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
    """Remove what a run that was cut off had begun to write. Only under the lock."""
    for path in (*manifest.get("files", {}), f"{etc}/{MANIFEST}"):
        _draft(Path(path)).unlink(missing_ok=True)


def _do(change: Change) -> None:
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
