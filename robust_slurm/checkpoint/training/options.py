"""The arguments of a Checkpointer that are not state, checked; defaults from the environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

DEBUG = "ROBUST_DEBUG_CHECKPOINTS"
"""Environment variable; 1 for ``Options.debug``."""


class Options(NamedTuple):
    directory: str
    """Directory of the durable tier, absolute; "" for none."""
    every: int
    """Steps between durable checkpoints; 0: never by step."""
    keep: int
    """Durable checkpoints kept."""
    replica_wait: float
    """s that a step may wait for the replica of the one before."""
    debug: bool
    """Copy every snapshot inside save() and watch the live state until the next step."""


def options(
    directory: str | os.PathLike[str] | None,
    every: int | None,
    keep: int | None,
    replica_wait: float,
) -> Options:
    """Check the options. Raises TypeError, ValueError saying what to pass."""
    if isinstance(replica_wait, bool) or not isinstance(replica_wait, (int, float)):
        raise TypeError(f"replica_wait: seconds, not {replica_wait!r}")
    if not replica_wait >= 0:
        raise ValueError(f"replica_wait: 0 or more seconds, not {replica_wait}")
    found = Options(
        _path("directory", directory, "ROBUST_CHECKPOINT_DIR"),
        _count("every", every, "ROBUST_CHECKPOINT_EVERY", least=0, otherwise=0),
        _count("keep", keep, "ROBUST_CHECKPOINT_KEEP", least=1, otherwise=2),
        float(replica_wait),
        os.environ.get(DEBUG, "") == "1",
    )
    if every and not found.directory:
        raise ValueError(
            f"every={every} without a directory: pass directory=, or set ROBUST_CHECKPOINT_DIR"
        )
    return found


def _path(name: str, given: Any, variable: str) -> str:
    if given is None:
        given = os.environ.get(variable, "")
    try:
        text = os.fspath(given)
    except TypeError:
        raise TypeError(f"{name}: a path, not {given!r}") from None
    if not isinstance(text, str):
        raise TypeError(f"{name}: a path as text, not bytes")
    return str(Path(text).expanduser().absolute()) if text else ""


def _count(name: str, given: int | None, variable: str, *, least: int, otherwise: int) -> int:
    if given is None:
        text = os.environ.get(variable, "")
        try:
            given = int(text) if text else otherwise
        except ValueError:
            raise ValueError(f"{variable}: a whole number, not {text!r}") from None
        name = variable if text else name
    if isinstance(given, bool) or not isinstance(given, int):
        raise TypeError(f"{name}: a whole number, not {given!r}")
    if given < least:
        raise ValueError(f"{name}: {least} or more, not {given}")
    return given
