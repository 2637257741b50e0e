"""The last settings file that could be used, kept beside it: what a broken one leaves in force.

Without it a slip of the pen in the week of the dry run would make the gate drain. The sweep and
``robust-admin install`` keep the copy; ``settings.load`` reads it only when the file is broken. A
file that is missing or empty where there is a copy was lost, and is broken too: whoever wants the
defaults leaves a comment in it, or removes both.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping
from typing import Any

from health.node import rootfiles
from health.settings_file import parse, read

SUFFIX = ".last"
# Where /etc cannot be written there is no copy, and nobody who could change that at each sweep.
_QUIET = (errno.EROFS, errno.EACCES, errno.EPERM)


def instead(path: str, error: Exception) -> tuple[Mapping[str, Any], str]:
    """The tables in force while the file at ``path`` cannot be used, and what to tell of it."""
    name = os.path.basename(path) + SUFFIX  # noqa: PTH119
    try:
        text, info = read(path + SUFFIX)
        if not text.strip():  # a power failure left this
            raise ValueError("is empty")
        found = parse(text)
    except FileNotFoundError:
        return {}, f"{path}: {_why(error)}; the defaults apply (there is no {name})"
    except (OSError, ValueError, RecursionError) as worse:
        return {}, f"{path}: {_why(error)}; the defaults apply ({name}: {_why(worse)})"
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(info.st_mtime))
    return found, f"{path}: {_why(error)}; the settings of {when} are in force ({name})"


def lost(path: str, error: Exception) -> tuple[Mapping[str, Any], str] | None:
    """Return ``instead`` for a file that is missing or empty; None: there was never a good one."""
    return instead(path, error) if os.path.lexists(path + SUFFIX) else None


def _why(error: Exception) -> str:
    if not isinstance(error, OSError):
        return str(error)
    return "is a link" if error.errno == errno.ELOOP else error.strerror or str(error)


def keep(path: str) -> str:
    """Copy the file at ``path`` if it can be used and is another than the copy; never wider than
    it is. What went wrong; "" if nothing did."""
    try:
        text, info = read(path)
        parse(text)
    except (OSError, ValueError, RecursionError):
        return ""  # every report says so
    if not text.strip():
        return ""  # likewise, where there is a copy
    try:
        _copy(path, text.encode(), info.st_mode & 0o644)
    except OSError as error:
        if error.errno not in _QUIET:
            return f"{path}{SUFFIX}: no copy kept: {error.strerror}"
    return ""


def _copy(path: str, content: bytes, mode: int) -> None:
    try:
        text, info = read(path + SUFFIX)
        same = text.encode() == content and not info.st_mode & 0o777 & ~mode
    except (OSError, ValueError):  # none yet, or nothing that could be used
        same = False
    if same:
        return
    above, name = os.path.split(path)
    directory = rootfiles.open_dir(above or ".")
    try:
        rootfiles.replace(directory, name + SUFFIX, content, mode)
    finally:
        os.close(directory)
