"""The copy of the last usable settings file, beside it: in force while the file is broken.

Without it, a typing error would replace a site's dry run by the defaults, which drain. The sweep
and ``robust-admin install`` keep the copy; ``settings.load`` reads it only if the file is broken. A
file that is missing or empty beside a copy was lost, and counts as broken. So does one without its
last line (``settings_file.END``), which may be written in part. A site that wants the defaults
leaves that line alone in it, or removes both.
"""

from __future__ import annotations

import errno
import os
import shlex
import time
from collections.abc import Mapping
from typing import Any

from health.node import rootfiles
from health.settings_file import END, parse, read, whole

SUFFIX = ".last"
# Where /etc cannot be written there is no copy, and a message at each sweep would not change that.
_QUIET = (errno.EROFS, errno.EACCES, errno.EPERM)


def instead(path: str, error: Exception) -> tuple[Mapping[str, Any], str]:
    """The tables in force while the file at ``path`` cannot be used, and the problem to report."""
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


def unmarked(path: str, text: str) -> tuple[Mapping[str, Any], str, str]:
    """Return the tables in force for a file without its last line, a problem or "", a note or "".

    The file itself, with a note, if no copy can be used or the copy is the same. Raises ValueError
    and RecursionError for a file that no text makes usable.
    """
    why = f"its last line is not `{END}`, so it may be written in part"
    cure = f"if it is whole: echo '{END}' >>{shlex.quote(path)}"
    tables, name = parse(text), os.path.basename(path) + SUFFIX  # noqa: PTH119
    kept = _kept(path)
    if not kept:
        return tables, "", f"{path}: {why}; it is used, as there is no {name} to use; {cure}"
    if kept == text:
        return tables, "", f"{path}: {why}; it is used, as {name} is the same; {cure}"
    found, told = instead(path, ValueError(why))
    return found, f"{told}; {cure}", ""


def _kept(path: str) -> str:
    """Return the text of the copy; "" if it cannot be used."""
    try:
        text, _ = read(path + SUFFIX)
        parse(text)
    except (OSError, ValueError, RecursionError):
        return ""
    return text if text.strip() else ""


def _why(error: Exception) -> str:
    if not isinstance(error, OSError):
        return str(error)
    return "is a link" if error.errno == errno.ELOOP else error.strerror or str(error)


def keep(path: str) -> str:
    """Copy the file at ``path`` if it is usable and differs from the copy, whose mode is never
    wider than the file's. Return the error, or "".

    A file without its last line is copied only where no copy can be used."""
    try:
        text, info = read(path)
        parse(text)
    except (OSError, ValueError, RecursionError):
        return ""  # every report says so
    if not text.strip() or (not whole(text) and _kept(path)):
        return ""  # likewise
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
    with rootfiles.closing(rootfiles.open_dir(above or ".")) as directory:
        rootfiles.replace(directory, name + SUFFIX, content, mode)
