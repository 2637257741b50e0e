"""Slurm's ways of writing times, sizes, states and node lists, as Python values. Pure.

ClusterShell is imported only to fold lists: the node gate drains its own node without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from functools import lru_cache

from robust_slurm import hostlist

_NODE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,255}", re.ASCII)
_NOTHING = frozenset({"", "(null)", "none", "n/a", "unknown", "none assigned", "n/s", "invalid"})
_ENDLESS = frozenset({"UNLIMITED", "INFINITE", "PARTITION_LIMIT", "NONE", "INVALID", "NOT_SET"})


class ParseError(ValueError):
    """Text that Slurm is not known to print, or that cannot be read in one way only."""


def optional(value: str | None) -> str | None:
    """Return the value, or None for the many ways in which Slurm writes "nothing"."""
    if value is None or value.strip().lower() in _NOTHING:
        return None
    return value


def integer(value: str | None, default: int = 0) -> int:
    """The leading integer ("1-1" is 1, "4000M" is 4000), or the default."""
    match = re.match(r"\s*(-?\d{1,18})", value or "")
    return int(match[1]) if match else default


def epoch(value: str | None) -> float | None:
    """A time stamp as seconds since 1970: digits (SLURM_TIME_FORMAT=%s) or local ISO."""
    text = optional(value)
    if text is None:
        return None
    if text.isascii() and text.isdigit() and len(text) < 13:
        return float(text)
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def duration_s(value: str | None) -> int | None:
    """Seconds of "D-HH:MM:SS", "HH:MM:SS", "MM:SS", "D-HH" or plain minutes; None if endless."""
    text = (value or "").strip()
    if text.upper() in _ENDLESS or optional(text) is None:
        return None
    match = re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,2}))?(?::(\d{1,2}))?", text, re.ASCII)
    if match is None:
        return None
    days, first, second, third = (int(part) if part else 0 for part in match.groups())
    if match[1] is not None:
        return days * 86400 + first * 3600 + second * 60 + third
    if match[4] is not None:
        return first * 3600 + second * 60 + third
    if match[3] is not None:
        return first * 60 + second
    return first * 60


def megabytes(value: str | None) -> int | None:
    """MiB of "500M", "1.50G", "4000" (already MiB); None for nothing and for 0 (no limit)."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)([KMGTP]?)[Bc n]?", value or "", re.ASCII)
    if match is None:
        return None
    unit = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2, "P": 1024**3}[match[2]]
    return round(float(match[1]) * unit) or None


@lru_cache(maxsize=256)
def state_flags(value: str) -> frozenset[str]:
    """A node's state as a set: "IDLE+DRAIN" is {IDLE, DRAIN}. Other names and signs are sinfo's."""
    return frozenset(name for word in value.upper().split("+") if (name := word.strip()))


def gres_option(value: str | None) -> str | None:
    """TresPerNode as ``--gres`` takes it: "gres:gpu:h100:4" and "gres/gpu=4" lose their head."""
    text = optional(value)
    if text is None:
        return None
    wanted = [
        re.sub(r"^gres[:/]", "", item).replace("=", ":")
        for item in text.split(",")
        if item.startswith(("gres:", "gres/"))
    ]
    return ",".join(wanted) or None


def expand(value: str | None) -> tuple[str, ...]:
    """The node names of a folded list, in Slurm's order, each once."""
    text = optional(value)
    if text is None:
        return ()
    if _NODE_NAME.fullmatch(text):
        return (text,)
    try:
        return tuple(dict.fromkeys(hostlist.expand(text)))
    except ValueError as error:
        raise ParseError(f"not a node list: {error}") from error


def fold(names: Iterable[str]) -> str:
    """Node names as one list for a command line, e.g. "n[1-3],x5". One bracket per item.

    Only the last index is folded, which every release reads also for names like "r1-n2". Names
    with text behind it ("n1-ib") stay whole: "n[1-2]-ib" is no list to Slurm.
    """
    wanted = dict.fromkeys(names)
    for name in wanted:
        if _NODE_NAME.fullmatch(name) is None:
            raise ParseError(f"not a node name: {name[:80]!r}")
    if len(wanted) < 2:
        return "".join(wanted)
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

    nodes = NodeSet(resolver=RESOLVER_NOGROUP)
    nodes.fold_axis = (-1,)
    try:
        for name in wanted:
            if name[-1].isdigit():
                nodes.update(NodeSet(name, resolver=RESOLVER_NOGROUP))
    except NodeSetException as error:
        raise ParseError(f"not a node name: {error}") from error
    return ",".join([*filter(None, [str(nodes)]), *(n for n in wanted if not n[-1].isdigit())])


def folded(names: Iterable[str]) -> str:
    """Return names as ``fold`` does, for people: one that no node can have stays as it is."""
    wanted = list(dict.fromkeys(names))
    try:
        return fold(wanted)
    except ParseError:
        return ",".join(wanted)
