"""The values that ``scontrol show config`` prints, read. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from robust_slurm.slurm.values import optional

_UNLIMITED = {"UNLIMITED", "INFINITE", "65534", "65535"}  # the numbers are NO_VAL16, INFINITE16


def release(config: Mapping[str, str]) -> tuple[int, int] | None:
    """(22, 5) of ``SLURM_VERSION = 22.05.8``; None if it is not told."""
    match = re.match(r"(\d+)\.(\d+)", config.get("SLURM_VERSION", ""))
    return (int(match[1]), int(match[2])) if match else None


def value_of(config: Mapping[str, str], key: str) -> str:
    """A setting's value, "" when it is not set."""
    return optional(config.get(key)) or ""


def scripts_of(config: Mapping[str, str], key: str) -> list[str]:
    """The values of ``Prolog`` or ``Epilog``: from 24.05 on ``Prolog[0]``, ``Prolog[1]``, …"""
    pattern = re.compile(rf"{key}(\[\d+\])?")
    found = [value_of(config, name) for name in config if pattern.fullmatch(name)]
    return [script for script in found if script]


def seconds(text: str) -> float | None:
    """``60 sec``, ``65534`` (no limit): seconds; None when there is no number."""
    word = text.split()[0] if text.split() else ""
    if word.upper() in _UNLIMITED:
        return math.inf
    return float(word) if re.fullmatch(r"\d+", word) else None


def words_of(text: str) -> list[str]:
    """The words between the commas."""
    return [word for word in text.split(",") if word]


def joined(first: Sequence[str], then: Sequence[str]) -> str:
    """Both lists as one, nothing twice (Slurm reads these words in any case)."""
    seen: dict[str, str] = {}
    for word in [*first, *then]:
        seen.setdefault(word.lower(), word)
    return ",".join(seen.values())


def same(one: str, other: str) -> bool:
    """True if both lists have the same words, in any order and case."""
    return {w.lower() for w in one.split(",")} == {w.lower() for w in other.split(",")}
