"""The files that a program saves its state in, told from others by name and size. Pure.

Used only to estimate what a restart cost where the program's steps are not known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

LARGE = 1 << 20  # bytes; a smaller file counts only if its name says that it is a checkpoint
_NAMED = re.compile(
    r"ckpt|checkpoint|snapshot|\.(pt|pth|safetensors|distcp|npz|pkl|h5)$", re.IGNORECASE
)
_NEVER = re.compile(
    r"^\.|^core(\.|$)|~$|\.(tmp|part|log|out|err|lock|py[co]?|so|prof|trace)(\.|$)|tfevents",
    re.IGNORECASE,
)
_DATA = re.compile(
    r"\.(txt|csv|tsv|jsonl?|ya?ml|toml|html?|arrow|parquet|nsys-rep|wandb)$|flight.?rec",
    re.IGNORECASE,
)


class SavedFile(NamedTuple):
    """A file, and when it was last written (s since 1970)."""

    path: str
    time: float


def saves_state(path: str, size: int) -> bool:
    """Return whether a file is taken for a checkpoint; logs, code and data are not."""
    directory, _, name = path.rpartition("/")
    if _NEVER.search(name):
        return False
    if _NAMED.search(name) or _NAMED.search(directory.rpartition("/")[2]):
        return size > 0
    return size >= LARGE and not _DATA.search(name)


def newest(files: Iterable[SavedFile], since: float, until: float) -> SavedFile | None:
    """Return the file that was written last between two times."""
    mine = (one for one in files if since <= one.time <= until)
    return max(mine, key=lambda one: one.time, default=None)
