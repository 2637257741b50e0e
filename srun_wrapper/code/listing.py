"""The files of a user's directory that belong to a snapshot, and what stays live.

Where git is, its rules decide: tracked files, and untracked files that no .gitignore names. What
git ignores stays live: the snapshot has a link to it. ``.git`` is never part of a snapshot.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

GIT_LIMIT = 120.0  # s for one git command
_SKIPPED = ("__pycache__", ".git")


class CodeError(Exception):
    """A directory that cannot be a version; the text says why, and what to do."""


@dataclass
class CodeListing:
    """Paths relative to the directory."""

    files: set[str] = field(default_factory=set)  # and symbolic links
    live: set[str] = field(default_factory=set)  # stay outside the snapshot, linked to
    commit: str = ""  # that HEAD names; "" without git
    note: str = ""  # why git's rules are not used, in words


def list_code(source: str, exclude: Sequence[str]) -> CodeListing:
    """List the directory. ``exclude``: relative paths that stay live. Raises CodeError."""
    why = _git_refuses(source)
    if why:
        found = CodeListing(set(_walk(source, "")), note=why)
    else:
        found = _git_listing(source)
        found.commit = _git(source, "rev-parse", "-q", "--verify", "HEAD", fails="").strip()
    for name in exclude:
        path = os.path.normpath(name)
        if path.startswith(("..", "/")) or path == ".":
            raise CodeError(f"code_exclude: {name!r} is not a path inside {source}")
        found.files = {f for f in found.files if not _below(f, path)}
        found.live = {f for f in found.live if not _below(f, path)}
        if os.path.lexists(f"{source}/{path}"):
            found.live.add(path)
    _check_names(source, found)
    return found


def _check_names(source: str, found: CodeListing) -> None:
    """Raise CodeError for names that no record can hold, and for a directory without code."""
    for name in sorted(found.files | found.live):
        try:
            name.encode()
        except UnicodeEncodeError:
            raise CodeError(f"the name of {name!a} in {source} is not UTF-8: rename it") from None
    if not found.files:
        why = "no files" if found.note else "no files that git does not ignore"
        raise CodeError(f"{source} has {why}: give the directory of the program")


def clean(source: str) -> bool:
    """Return True if every file below is as committed, and none is untracked."""
    said = _git(
        source,
        *("status", "--porcelain", "-z", "--untracked-files=all", "--ignore-submodules=none"),
        *("--", "."),
        fails="?",
    )
    return said == ""


def _below(path: str, top: str) -> bool:
    return path == top or path.startswith(top + "/")


# -- git


def _git_refuses(source: str) -> str:
    """Return why git cannot list the directory; "" if it can."""
    try:
        done = _run(source, "rev-parse", "--is-inside-work-tree")
    except OSError:
        return "git is not installed"
    if done.returncode == 0:
        return "" if done.stdout.strip() == b"true" else "not in git's work tree"
    said = done.stderr.decode(errors="replace").strip().splitlines()
    if said and "not a git repository" in said[0]:
        return "not a git repository"
    return said[0] if said else "git refuses"


def _git_listing(source: str) -> CodeListing:
    found = CodeListing()
    listed = _git(source, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for path in filter(None, listed.split("\0")):
        name = path.rstrip("/")
        full = f"{source}/{name}"
        if os.path.isdir(full) and not os.path.islink(full):  # noqa: PTH112, PTH114 - plain strings
            inner = CodeListing(set(_walk(full, ""))) if _git_refuses(full) else _git_listing(full)
            found.files |= {f"{name}/{f}" for f in inner.files}
            found.live |= {f"{name}/{f}" for f in inner.live}
        else:
            found.files.add(name)
    ignored = ("--others", "--ignored", "--exclude-standard", "--directory")
    for path in filter(None, _git(source, "ls-files", "-z", *ignored).split("\0")):
        name = path.rstrip("/")
        if name.rpartition("/")[2] not in _SKIPPED and not name.endswith(".pyc"):
            found.live.add(name)
    return found


def _git(source: str, *words: str, fails: str | None = None) -> str:
    """Return what git prints; ``fails``: returned if it fails (None: raise CodeError)."""
    done = _run(source, *words)
    if done.returncode:
        if fails is not None:
            return fails
        said = done.stderr.decode(errors="replace").strip()
        raise CodeError(f"git {words[0]} fails in {source}: {said}")
    return os.fsdecode(done.stdout)


def _run(source: str, *words: str) -> subprocess.CompletedProcess[bytes]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    head = ["git", "-c", "core.fsmonitor=false", "-C", source]
    try:
        return subprocess.run(
            [*head, *words], env=env, capture_output=True, timeout=GIT_LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        raise CodeError(
            f"git {words[0]} did not answer for {source} in {GIT_LIMIT:g} s: is its file system "
            "stalled?"
        ) from None


# -- without git


def _walk(top: str, inside: str) -> Iterator[str]:
    """Yield all files and links. Raises CodeError."""
    try:
        entries = sorted(os.scandir(Path(top, inside)), key=lambda e: e.name)
    except OSError as err:
        raise CodeError(f"cannot read {Path(top, inside)}: {err.strerror}") from None
    for entry in entries:
        path = f"{inside}/{entry.name}" if inside else entry.name
        if entry.name in _SKIPPED or entry.name.endswith(".pyc"):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(top, path)
        else:
            yield path
