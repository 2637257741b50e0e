"""Messages by which robust-srun learns if a node has the files that starting a rank needs."""

from __future__ import annotations

import msgspec

from srun_wrapper.protocol.base import Message, Reply


class FindFiles(Message):
    """Order to an agent whose Hello has a ``directory``: look for files.

    ``words``: the ranks' command, of which the files that are needed are to be found; ``paths``:
    files to look for, where they are relative below the ranks' directory.
    """

    token: int
    words: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    seconds: float = 1.0  # for the file systems to answer


class FoundFile(msgspec.Struct, array_like=True, frozen=True):
    path: str  # absolute
    there: bool
    mount: str  # the mount point that it is on, or would be
    served: bool  # by another machine


class FoundFiles(Reply):
    """``silent``: mount points that did not answer, whose files are left out of ``files``."""

    files: tuple[FoundFile, ...] = ()
    silent: tuple[str, ...] = ()
