"""The contents of a recorded tree's meta.json, as this version understands them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from health.check import Check
from health.finding import STATUSES, Finding
from health.settings import Settings, defaults
from health.settings_merge import fit


def settings(kept: Mapping[str, Any], checks: Sequence[Check]) -> Settings:
    """The recorded settings over the defaults of the checks as they are now.

    What another version recorded and this one does not know becomes a problem, which is told.
    """
    base = defaults(checks)
    problems = list(kept.get("problems", ()))
    tables = {
        name: _over(getattr(base, name), kept.get(name, {}), f"[{name}]", problems)
        for name in ("gate", "breaker", "lemon", "epilog", "accusations", "active")
    }
    recorded = kept.get("families", {})
    families = {
        family: _over(options, recorded.get(family, {}), f"[health.{family}]", problems)
        for family, options in base.families.items()
    }
    problems += [
        f"recorded family {family} is not known to this version"
        for family in recorded
        if family not in base.families
    ]
    xid, state_dir = dict(kept.get("xid", {})), str(kept.get("state_dir", ""))
    return Settings(
        **tables,
        xid=xid,
        families=families,
        state_dir=state_dir,
        problems=tuple(problems),
        notes=(),
    )


def _over(
    known: Mapping[str, Any], kept: Mapping[str, Any], table: str, problems: list[str]
) -> dict[str, Any]:
    out = dict(known)
    for key, value in kept.items():
        if key not in known:
            problems.append(f"recorded setting {table} {key} is not known to this version")
            continue
        out[key], wrong = fit(value, known[key])
        if wrong:
            out[key] = known[key]
            problems.append(f"recorded setting {table} {key} = {value!r}: {wrong}")
    return out


def findings(kept: Iterable[Mapping[str, Any]]) -> list[Finding]:
    out = []
    for fields in kept:
        if fields["status"] not in STATUSES:
            raise ValueError(f"unknown status {fields['status']!r}")
        named = {**fields, "cls": fields["class"]}
        out.append(Finding(*(named.get(name, -1) for name in Finding._fields)))
    return out
