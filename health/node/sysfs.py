"""Small files of /sys and /proc, of which any may be missing or refuse to be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from health.node.system import System


def text(system: System, path: str) -> str:
    """The file's text without blanks around it; "" where it cannot be read."""
    try:
        return system.read(path).strip()
    except OSError:
        return ""


def number(system: System, path: str) -> int | None:
    """The file's whole number; None where there is none."""
    try:
        return int(text(system, path))
    except ValueError:
        return None


def names(system: System, path: str) -> list[str]:
    """The directory's entries; none where it cannot be listed."""
    try:
        return system.names(path)
    except OSError:
        return []


def link(system: System, path: str) -> str:
    """The target of a link; "" where there is none: a virtual device, or one that has just gone."""
    try:
        return system.link(path)
    except OSError:
        return ""


def kind(system: System, path: str) -> str:
    """The kind of a path's entry ("file", "dir", "char", …); "" where it cannot be seen."""
    try:
        return system.entry(path).kind
    except OSError:
        return ""


def local_nvme(system: System) -> list[str]:
    """The NVMe controllers that are this node's own hardware, not reached over a network."""
    base = "/sys/class/nvme"
    here = names(system, base)
    return [name for name in here if text(system, f"{base}/{name}/transport") in ("pcie", "")]


def fleet(system: System) -> Mapping[str, Any]:
    """The fleet's record; empty where it cannot be used, which is not the node's fault."""
    try:
        return system.fleet()
    except OSError:
        return {}
