"""The time at which a node last passed its checks, from its own history. Pure.

A healthy run of the gate records nothing. To tell a healthy node from one that no gate checks, the
sweep records a "pass", once an hour at most. A run in which a check failed itself (ERROR) may admit
its job, if that check tolerates it, but proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from health.node.system import Event

EVERY_S = 3600.0


class Proof(NamedTuple):
    """Wall-clock times, 0.0: never. ``failed``: of the newest failure, ``why`` its reason."""

    passed: float = 0.0
    failed: float = 0.0
    why: str = ""
    undrained: float = 0.0  # a drain was taken back, with the proof that it asked for
    burned: float = 0.0  # a burn-in was passed, and none was failed since


def proof_of(events: Iterable[Event]) -> Proof:
    """Collect the proof in a node's events: its last pass, failure, undrain and burn-in."""
    passed, failed, why, undrained = 0.0, 0.0, "", 0.0
    burned, broke = 0.0, 0.0
    for event in events:
        if event.kind == "burn-in" and event.data.get("ok") is True:
            burned = max(burned, event.time)
        elif event.kind == "burn-in" and event.data.get("result") == "failed":
            broke = max(broke, event.time)
        if _passes(event):
            passed = max(passed, event.time)
            if event.kind == "undrain":
                undrained = max(undrained, event.time)
        elif _fails(event) and event.time >= failed:
            failed, why = event.time, str(event.data.get("reason", ""))
    return Proof(passed, failed, why, undrained, burned if burned > broke else 0.0)


def due(events: Iterable[Event], now: float) -> bool:
    """True if a pass is to be written down: there is none in the last hour."""
    return not any(_passes(event) and now - EVERY_S < event.time <= now for event in events)


def _passes(event: Event) -> bool:
    if event.kind == "run":
        return event.data.get("closed") is False and not _unsure(event.data)
    return event.kind in ("pass", "undrain")


def _unsure(run: Mapping[str, Any]) -> bool:
    """True if a check could not tell; ``ran`` also has those beyond the findings kept."""
    found, ran = run.get("findings", []), run.get("ran", [])
    if not isinstance(found, list) or not isinstance(ran, list):
        return True
    said = [one.get("status") if isinstance(one, dict) else "ERROR" for one in found]
    said += [row[-1] if isinstance(row, list) and row else "ERROR" for row in ran]
    return "ERROR" in said


def _fails(event: Event) -> bool:
    return event.kind == "drain" or (event.kind == "run" and event.data.get("closed") is True)
