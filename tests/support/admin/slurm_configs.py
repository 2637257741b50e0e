"""Slurm's real configurations as they were recorded, and what the rules want of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from places import DATA

from health import settings
from health.admin.doctor import rules
from health.admin.want import SiteFacts, Want
from robust_slurm.slurm.parse import settings as parse_config

ETC = "/etc/robust-slurm"
GATE: Mapping[str, Any] = {name: setting.default for name, setting in settings.GATE.items()}


def recorded_text(name: str) -> str:
    folder = "slurm" if name == "22.05" else "admin"
    return (DATA / folder / f"{name}-config.txt").read_text()


def recorded(name: str) -> dict[str, str]:
    return parse_config(recorded_text(name))


def wants(config: Mapping[str, str], gate: Mapping[str, Any] = GATE) -> dict[str, Want]:
    """The settings by key; of two with the same key the one that is needed."""
    found = rules.wants(SiteFacts(config, gate, ETC))
    return {want.key: want for want in reversed(found)}
