"""Takes a snapshot of a user's directory: an immutable tree on a file system that nodes see."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from robust_slurm.state_dir import job_dirs
from robust_slurm.text import counted
from srun_wrapper.code.copying import FileCopier, SnapshotManifest, digest_of
from srun_wrapper.code.listing import CodeError, CodeListing, clean, list_code
from srun_wrapper.code.versions import Version, name_of

MOST_FILES = 100_000
MOST_LINKS = 100_000  # to what stays live
ROUNDS = 4  # looks for edits that came while files were copied
OLD = 24 * 3600.0  # s after which what an interrupted snapshot left is removed


@dataclass(frozen=True)
class Asked:
    """A snapshot to take. ``earlier``: the version to share unchanged files with; "": none."""

    source: str
    store: str
    exclude: tuple[str, ...]
    limit: float  # bytes
    earlier: str = ""


def take(asked: Asked) -> tuple[Version, str]:
    """Return the version of the directory's present content, and one line about it.

    The files of the result were all in the directory at one moment. Raises CodeError.
    """
    began = time.monotonic()
    store = Path(asked.store)
    tree = store / f".tmp-{secrets.token_hex(6)}"
    try:
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
        if job_dirs.owner(str(store)) != os.getuid():
            raise CodeError(f"{store} is a link or another user's; set another code_store")
        _sweep(store)
        tree.mkdir(0o700)
    except OSError as err:
        raise CodeError(f"cannot write {store}: {err.strerror or err}; set code_store") from None
    try:
        copier = FileCopier(asked.source, str(tree), earlier(store, asked.earlier))
        listing = _copy(copier, asked)
        commit = listing.commit if listing.commit and clean(asked.source) else ""
        if commit and copier.changed(list_code(asked.source, asked.exclude).files):
            commit = ""  # an edit came since; the copies are of one moment all the same
        digest = digest_of(copier.entries)
        name = name_of(commit, digest, lambda known: _digest(store, known))
        live, unlinked = _link_live(listing, asked.source, tree)
        _seal(tree, copier)
        manifest = msgspec.json.encode(SnapshotManifest(copier.entries, live))
        size = sum(entry.size for entry in copier.entries.values())
        _publish(tree, store / name, manifest)
    except OSError as err:
        raise CodeError(f"cannot write {store}: {err.strerror or err}") from None
    finally:
        remove_tree(tree)
    seconds = time.monotonic() - began
    files = len(copier.entries)
    what = f"git commit {commit[:12]}" if commit else "content-addressed"
    new = f", {files - copier.linked} of them copied" if copier.linked else ""
    line = f"code {name} ({what}): {files} files{new}, {size / 1e6:.1f} MB in {seconds:.2f} s"
    if listing.note:
        line += f"; all files are taken, what .gitignore names as well ({listing.note})"
    if copier.skipped:
        line += f"; left out: {len(copier.skipped)} sockets, pipes or devices"
    if unlinked:
        line += (
            f"; {counted(unlinked, 'ignored path')} more than {MOST_LINKS} not linked to, so that "
            f"the ranks do not find {'it' if unlinked == 1 else 'them'}: have .gitignore or "
            "code_exclude name whole folders, each of which is one link"
        )
    return Version(name, digest, commit, files, size, time.time(), seconds), line


def earlier(store: Path, name: str) -> tuple[str, SnapshotManifest] | None:
    """Return an earlier version's tree and manifest; None if there is none."""
    manifest = read_manifest(store, name) if name else None
    return (str(store / name), manifest) if manifest is not None else None


def read_manifest(store: Path, name: str) -> SnapshotManifest | None:
    try:
        return msgspec.json.decode((store / f"{name}.json").read_bytes(), type=SnapshotManifest)
    except (OSError, ValueError, RecursionError):  # no UTF-8, or nested too deep
        return None


def _digest(store: Path, name: str) -> str:
    """Return the digest of a version in the store; "" if it has none of that name."""
    if not (store / name).is_dir():
        return ""
    manifest = read_manifest(store, name)
    return digest_of(manifest.entries) if manifest is not None else "unknown"


def _publish(tree: Path, place: Path, manifest: bytes) -> None:
    """Give the tree its name, unless the same version is there already: that is renewed."""
    if place.is_dir():
        with contextlib.suppress(FileNotFoundError):  # it is being removed (``prune``)
            os.utime(place)
            return
    written = place.with_name(f".{tree.name}.json")
    written.write_bytes(manifest)
    written.replace(place.with_name(f"{place.name}.json"))
    try:
        tree.rename(place)
    except OSError:
        if not place.is_dir():  # else another process was quicker with the same content
            raise


def remove_tree(tree: Path) -> None:
    """Remove a read-only tree; what cannot be removed stays."""
    if not tree.is_dir():
        return
    for folder, _, _ in os.walk(tree):
        try:
            os.chmod(folder, 0o700)  # noqa: PTH101
        except OSError:
            pass
    shutil.rmtree(tree, ignore_errors=True)


def _copy(copier: FileCopier, asked: Asked) -> CodeListing:
    """Copy all files, and again those that were edited meanwhile. Raises CodeError."""
    stale: set[str] = set()
    for turn in range(ROUNDS):
        listing = list_code(asked.source, asked.exclude)
        _check_size(asked, listing)
        if turn:
            stale = copier.changed(listing.files)
            if not stale:
                return listing
        copier.forget(stale)
        copier.copy(stale & listing.files if turn else listing.files)
    some = ", ".join(sorted(stale)[:3])
    raise CodeError(
        f"files in {asked.source} change all the time ({some}): stop what writes them, or add "
        "them to .gitignore or to code_exclude"
    )


def _check_size(asked: Asked, listing: CodeListing) -> None:
    """Raise CodeError naming the largest entries if this is more than code."""
    sizes: dict[str, int] = {}
    for name in listing.files:
        try:
            info = os.lstat(f"{asked.source}/{name}")
        except OSError:
            continue
        sizes[name] = info.st_size if stat.S_ISREG(info.st_mode) else 0
    total = sum(sizes.values())
    if len(sizes) <= MOST_FILES and total <= asked.limit:
        return
    by_bytes = total > asked.limit
    what = f"{total / 1e6:.0f} MB" if by_bytes else counted(len(sizes), "file")
    most = f"{asked.limit / 1e6:.0f} MB (code_limit)" if by_bytes else f"{MOST_FILES} files"
    raise CodeError(
        f"{asked.source} has {what}, more than {most}; largest: {largest(sizes, by_bytes)}; add "
        "what is no code to .gitignore or to code_exclude"
    )


def largest(sizes: Mapping[str, int], by_bytes: bool) -> str:
    """Return the five largest entries of the directory, in words. Pure."""
    tops: Counter[str] = Counter()
    for name, size in sizes.items():
        tops[name.partition("/")[0]] += size if by_bytes else 1
    shown = (
        (n, f"{c / 1e6:.0f} MB" if by_bytes else counted(c, "file")) for n, c in tops.most_common(5)
    )
    return ", ".join(f"{name} ({count})" for name, count in shown)


def _link_live(listing: CodeListing, source: str, tree: Path) -> tuple[list[str], int]:
    """Link what stays live into the snapshot, where its folder is part of it. Return the links, and
    the number of those that would be too many."""
    done: list[str] = []
    unlinked = 0
    for name in sorted(listing.live):
        place = tree / name
        if place.parent.is_dir() and not os.path.lexists(place):
            if len(done) < MOST_LINKS:
                place.symlink_to(f"{source}/{name}")
                done.append(name)
            else:
                unlinked += 1
    return done, unlinked


def _seal(tree: Path, copier: FileCopier) -> None:
    """Make all folders read-only, but for a place for the byte code of each folder's modules."""
    with_modules = {n.rpartition("/")[0] for n in copier.entries if n.endswith(".py")}
    for name in with_modules:
        (tree / name / "__pycache__").mkdir(mode=0o700, exist_ok=True)
    for folder, _, _ in os.walk(tree, topdown=False):
        if not folder.endswith("/__pycache__"):
            os.chmod(folder, 0o500)  # noqa: PTH101


def _sweep(store: Path) -> None:
    for left in store.glob(".tmp-*"):
        with contextlib.suppress(FileNotFoundError):  # another snapshot that is complete now
            if time.time() - left.stat().st_mtime > OLD:
                remove_tree(left)
