"""Choose the steps of the durable tier that may go, and remove them. Standard library only.

Only files that bear our names are removed; a directory that holds anything else stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from . import tier
from .files import remove, sync_directory

_OURS = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*(-\d+_\d+\.distcp|-rank-\d+\.json|-(commit|mark)\.json)(\.tmp)?"
)
_FOREIGN = re.compile(r"__.*")  # what torch.distributed.checkpoint calls its own files


def prune(directory: str | Path, keep: int, protect: int) -> list[str]:
    """Remove the steps that are not kept, and return the names of their directories.

    ``protect``: the step that has just been committed. Kept are this step, the ``keep`` (at least
    1) newest committed steps, the ``keep`` newest committed steps up to ``protect`` (training that
    resumed before a damaged step writes steps older than that one), and the newest certified step.
    A doubted step newer than the newest committed one stays, as it may be all that is left. An
    uncommitted step newer than ``protect`` stays, as it may still be written. A step whose manifest
    cannot be read stays, as a newer version may have written it. Neither doubted steps nor
    unreadable ones count among the ``keep``. What cannot be removed is left for the next call.
    Raises DurableError if the directory cannot be read.
    """
    dirs = tier.step_dirs(directory)
    found, unreadable = tier.list_steps(directory)
    marks = {each.step: each.mark for each in found}
    done = [step for step, mark in marks.items() if not mark.doubt]
    if not done:
        return []
    certified = [step for step in done if marks[step].certified]
    newest = -max(1, keep)
    reached = [step for step in done if step <= protect]
    stay = {*done[newest:], *reached[newest:], *certified[-1:], *unreadable, protect}
    gone = []
    for step, path in dirs:
        under_way = step not in marks and step > protect
        if step in stay or step > done[-1] or under_way:
            continue
        if _remove_step(path):
            gone.append(path.name)
    return gone


def _remove_step(path: Path) -> bool:
    names = _names(path)
    ours = [name for name in names if _OURS.fullmatch(name)]
    if any(_FOREIGN.fullmatch(name) for name in names) or (names and not ours):
        return False  # somebody else's checkpoint
    # The manifest goes first: without it the step is not committed. A failing file system may
    # refuse this, or lose it in a crash, and a manifest without its data would be a damaged step.
    remove(path / tier.MANIFEST)
    if tier.is_committed(path) or not _synced(path):
        return False
    for name in (tier.METADATA, *ours):
        remove(path / name)
    for name in names:
        if name.startswith(".metadata-"):
            remove(path / name / tier.METADATA)
            remove(path / name / (tier.METADATA + ".tmp"))
            _rmdir(path / name)
    return _rmdir(path)


def _synced(path: Path) -> bool:
    try:
        sync_directory(path)
    except OSError:
        return False
    return True


def _rmdir(path: Path) -> bool:
    try:
        path.rmdir()
    except OSError:
        return False
    return True


def _names(path: Path) -> Iterable[str]:
    try:
        return sorted(entry.name for entry in path.iterdir())
    except OSError:
        return []
