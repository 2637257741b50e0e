"""The arguments of a Checkpointer that are not state, checked; defaults from the environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

DEBUG = "ROBUST_DEBUG_CHECKPOINTS"
"""Environment variable; 1 for ``Options.debug``."""
MINUTES = 10.0
"""Minutes between durable checkpoints where neither steps nor minutes are given, as robust-srun's
``checkpoint_minutes``."""


class Options(NamedTuple):
    directory: str
    """Directory of the durable tier, absolute; "" for none."""
    every: int
    """Steps between durable checkpoints; 0: never by step."""
    minutes: float
    """Minutes between durable checkpoints outside robust-srun; 0: never by time."""
    minutes_by: str
    """The source of ``minutes``: "script", "environment", "default", or "every" (0)."""
    keep: int
    """Durable checkpoints kept."""
    replica_wait: float
    """s that a step may wait for the replica of the one before."""
    debug: bool
    """Copy every snapshot inside save() and watch the live state until the next step."""


def options(
    directory: str | os.PathLike[str] | None,
    every: int | None,
    minutes: float | None,
    keep: int | None,
    replica_wait: float,
) -> Options:
    """Check the options. Raises TypeError, ValueError saying what to pass."""
    _check_time("replica_wait", replica_wait, "seconds")
    steps = _count("every", every, "ROBUST_CHECKPOINT_EVERY", least=0, otherwise=0)
    by = "script"
    if minutes is None:
        minutes, by = _environment_minutes(), "environment"
    if minutes is None:
        minutes, by = (0.0, "every") if steps else (MINUTES, "default")
    _check_time("minutes", minutes, "minutes")
    found = Options(
        _path("directory", directory, "ROBUST_CHECKPOINT_DIR"),
        steps,
        float(minutes),
        by,
        _count("keep", keep, "ROBUST_CHECKPOINT_KEEP", least=1, otherwise=2),
        float(replica_wait),
        os.environ.get(DEBUG, "") == "1",
    )
    for name, interval in ("every", every), ("minutes", by == "script" and minutes):
        if interval and not found.directory:
            raise ValueError(
                f"{name}={interval} without a directory: pass directory=, or set "
                "ROBUST_CHECKPOINT_DIR"
            )
    return found


def _environment_minutes() -> float | None:
    text = os.environ.get("ROBUST_CHECKPOINT_MINUTES", "")
    try:
        return float(text) if text else None
    except ValueError:
        raise ValueError(f"ROBUST_CHECKPOINT_MINUTES: minutes, not {text!r}") from None


def _check_time(name: str, given: Any, unit: str) -> None:
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TypeError(f"{name}: {unit}, not {given!r}")
    if not given >= 0:
        raise ValueError(f"{name}: 0 or more {unit}, not {given}")


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
