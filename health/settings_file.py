"""A settings file that root trusts: its text, and the tables in it."""

from __future__ import annotations

import os
from typing import Any

from health.node import rootfiles

FILE_LIMIT = 1 << 20  # bytes
END = "# end of robust.toml"
"""The last line of a whole file: most files that are written in part are valid TOML too."""


def whole(text: str) -> bool:
    """Return whether the last line is END, blank lines aside."""
    return text.rstrip().rpartition("\n")[2].strip() == END


def parse(text: str) -> dict[str, Any]:
    """The tables of a file. ValueError, or RecursionError for brackets without end."""
    if not text.strip():
        return {}
    import tomllib

    return tomllib.loads(text)


def read(path: str) -> tuple[str, os.stat_result]:
    """A file's text and what it is. OSError and ValueError say why it must not be used."""
    above, name = os.path.split(path)
    fd = rootfiles.open_in(above or ".", name)
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        data = file.read(FILE_LIMIT + 1)
    if len(data) > FILE_LIMIT:
        raise ValueError(f"is larger than {FILE_LIMIT} bytes")
    return data.decode("utf-8"), info  # UnicodeDecodeError is a ValueError
