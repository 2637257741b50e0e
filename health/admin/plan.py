"""The changes of an install or uninstall, and notes on files that it leaves as they are. Pure."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from health.admin.install import (
    MANIFEST,
    VERSION,
    Action,
    Directory,
    FileChange,
    InstallError,
    InstallPlan,
    Present,
    WantedFile,
    digest,
)
from health.settings_last import SUFFIX


def identity(plan: InstallPlan) -> str:
    """Return a digest of the changes: only the plan that was shown is carried out."""
    return digest(json.dumps([change[:4] for change in plan.changes]))


def paths_to_look_at(
    wanted: Iterable[WantedFile], directories: Iterable[Directory], manifest: Mapping[str, Any]
) -> list[str]:
    found = [directory.path for directory in directories]
    for file in wanted:
        found += [file.path, file.path + ".new"] if file.settings else [file.path]
    for path, record in manifest.get("files", {}).items():
        found += [path, path + SUFFIX] if "offered" in record else [path]
    return list(dict.fromkeys([*found, *manifest.get("dirs", [])]))


def plan_install(
    wanted: Sequence[WantedFile],
    directories: Sequence[Directory],
    present: Mapping[str, Present],
    manifest: Mapping[str, Any],
    uid: int,
    etc: str,
    site: Mapping[str, Any],
) -> InstallPlan:
    """Plan the way to what is wanted. Raises InstallError for what is not ours to replace.

    ``present`` has every path of ``paths_to_look_at``; ``uid`` is the owner that all must have;
    ``site`` is recorded with the rest.
    """
    made = set(manifest.get("dirs", []))
    steps = _Steps(present, manifest)
    for directory in directories:
        there = present[directory.path]
        if there.kind == "none":
            steps.changes.append(FileChange("mkdir", directory.path, directory.mode))
            made.add(directory.path)
        elif there.kind != "dir":
            raise InstallError(f"{directory.path} is not a directory: move it away")
    for file in wanted:
        steps.put(file, uid)
    known, files = steps.known, steps.files
    gone = {path: record for path, record in known.items() if path not in files}
    for path in gone:
        steps.remove(path)
    new = {"v": VERSION, "site": dict(site), "files": files, "dirs": sorted(made)}
    if new == manifest:
        return steps.plan()
    mkdirs_only = all(change.action == "mkdir" for change in steps.changes)
    last = _manifest_change(etc, new, "replace" if manifest else "create")
    steps.changes.append(last)
    if mkdirs_only:
        return steps.plan()
    before = {path: _before(record, known.get(path, {})) for path, record in files.items()}
    intent = _manifest_change(etc, {**new, "files": {**gone, **before}}, last.action)
    return steps.plan(intent)


def plan_uninstall(
    manifest: Mapping[str, Any], present: Mapping[str, Present], etc: str
) -> InstallPlan:
    """Remove what the manifest lists and nobody changed; directories go when they are empty."""
    if not manifest:
        return InstallPlan((), (f"nothing is installed under {etc}",))
    steps = _Steps(present, manifest)
    for path, record in steps.known.items():
        steps.remove(path)
        last = path + SUFFIX
        if "offered" in record and present[last].kind == "file":  # the gate's own copy
            steps.changes.append(FileChange("remove", last))
    steps.changes.append(FileChange("remove", f"{etc}/{MANIFEST}"))
    for path in sorted(manifest.get("dirs", []), key=len, reverse=True):
        if present[path].kind == "dir":
            steps.changes.append(FileChange("rmdir", path))
    return steps.plan()


class _Steps:
    """A plan in the making. ``known``: the manifest's records as they are, ``files``: as they
    will be."""

    def __init__(self, present: Mapping[str, Present], manifest: Mapping[str, Any]) -> None:
        self.present = present
        self.known: Mapping[str, Mapping[str, Any]] = manifest.get("files", {})
        self.files: dict[str, dict[str, Any]] = {}
        self.changes: list[FileChange] = []
        self.notes: list[str] = []

    def plan(self, intent: FileChange | None = None) -> InstallPlan:
        return InstallPlan(tuple(self.changes), tuple(self.notes), intent)

    def put(self, file: WantedFile, uid: int) -> None:
        there, record = self._file_at(file.path), self.known.get(file.path, {})
        self.files[file.path] = {"sha256": digest(file.text)}
        if there.kind == "none":
            self._write(file, there)
        elif there.text == file.text:
            if there.mode != file.mode or there.uid != uid:
                self.changes.append(_mode_change(file.path, there, file.mode, uid))
        elif file.settings and not _is_ours(there, record):
            self._put_beside(file)
            return
        elif not file.settings and not record:
            raise InstallError(
                f"{file.path} is there and robust-admin did not write it: move it away first"
            )
        else:
            if not _is_ours(there, record):
                self.notes.append(f"{file.path} was changed by hand; the change is lost")
            self._write(file, there)
        if file.settings:
            self.files[file.path]["offered"] = digest(file.text)

    def _put_beside(self, file: WantedFile) -> None:
        """An edited settings file stays; what is new is put beside it, once."""
        record = {k: v for k, v in self.known.get(file.path, {}).items() if k != "was"}
        record.setdefault("sha256", "")  # never ours: uninstall leaves it
        beside = file._replace(path=file.path + ".new")
        there = self._file_at(beside.path)
        offer = record.get("offered") != digest(file.text) and there.text != file.text
        if offer:
            self._write(beside, there)
            self.notes.append(
                f"{file.path} was edited and is kept; the new version is in {beside.path}"
            )
        else:
            self.notes.append(f"{file.path} was edited and is kept")
        if offer or there.kind == "file":
            self.files[beside.path] = {"sha256": digest(file.text)}
        self.files[file.path] = {**record, "offered": digest(file.text)}

    def remove(self, path: str) -> None:
        """Remove the file if nobody changed it since it was written; else note that it stays."""
        there = self.present[path]
        if there.kind == "none":
            return
        if there.kind == "file" and _is_ours(there, self.known[path]):
            self.changes.append(FileChange("remove", path, diff=_diff(path, there.text, "")))
        else:
            self.notes.append(f"left: {path} (changed since it was installed)")

    def _file_at(self, path: str) -> Present:
        there = self.present[path]
        if there.kind not in ("none", "file"):
            raise InstallError(f"{path} is not a regular file: move it away")
        return there

    def _write(self, file: WantedFile, there: Present) -> None:
        action: Action = "create" if there.kind == "none" else "replace"
        shown = _diff(file.path, there.text, file.text)
        self.changes.append(FileChange(action, file.path, file.mode, file.text, shown))


def _manifest_change(etc: str, manifest: Mapping[str, Any], action: Action) -> FileChange:
    text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    return FileChange(action, f"{etc}/{MANIFEST}", 0o644, text)


def _before(record: Mapping[str, Any], was: Mapping[str, Any]) -> dict[str, Any]:
    """A file's record until it is known to be written."""
    found = {**record, "was": list(dict.fromkeys(_digests(was)))}
    return found | ({"offered": was.get("offered", "")} if "offered" in record else {})


def _digests(record: Mapping[str, Any]) -> list[str]:
    """Return the digests of all that robust-admin may have written there.

    They are several after a run that was cut off."""
    return [record["sha256"], *record.get("was", [])] if record else []


def _is_ours(there: Present, record: Mapping[str, Any]) -> bool:
    return digest(there.text) in _digests(record)


def _mode_change(path: str, there: Present, mode: int, uid: int) -> FileChange:
    owner = f", owner {there.uid} -> {uid}" if there.uid != uid else ""
    return FileChange(
        "mode", path, mode, diff=f"{path}: mode {there.mode:04o} -> {mode:04o}{owner}\n"
    )


def _diff(path: str, before: str, after: str) -> str:
    if "\0" in before or "\0" in after:
        sizes = [f"{len(text)} bytes" if text else "nothing" for text in (before, after)]
        return f"binary file {path}: {sizes[0]} -> {sizes[1]}\n"
    old, new = before.splitlines(), after.splitlines()
    names = (path if before else "/dev/null", path if after else "/dev/null")
    lines = difflib.unified_diff(old, new, *names, lineterm="")
    return "".join(f"{line}\n" for line in lines)
