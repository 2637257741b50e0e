"""Families of metrics in Prometheus' text format (version 0.0.4). Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from status.metrics.families import Family


def exposition(families: Iterable[Family]) -> str:
    """The text that node_exporter's textfile collector reads: without timestamps."""
    lines: list[str] = []
    for family in families:
        lines.append(f"# HELP {family.name} {_escaped(family.help)}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        for values, value in family.samples.items():
            pairs = zip(family.labels, values, strict=True)
            labels = ",".join(f'{name}="{_quoted(text)}"' for name, text in pairs)
            lines.append(f"{family.name}{{{labels}}} {_number(value)}" if labels else
                         f"{family.name} {_number(value)}")  # fmt: skip
    return "".join(f"{line}\n" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', '\\"')


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
