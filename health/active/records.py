"""What is known of the fleet before a run of active tests, and what is written down after it.

Only root writes: the ledger must not be anybody's who has a job. Nothing here decides anything.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

from health import history
from health.active import fleet
from health.active.fleet import Baselines, Spread
from health.active.model import Judged, Level
from health.aside import aside
from health.settings import Settings
from health.system import Event

READ_S = 20.0  # all nodes' files, on a file system that may not answer
WRITE_S = 20.0  # for each node


def baselines(settings: Settings) -> tuple[Baselines, str]:
    """The fleet's record, and why there is none although the site keeps one ("" otherwise)."""
    if not settings.state_dir:
        return fleet.NO_BASELINES, ""
    found, error = aside(lambda: _rows(fleet.baselines(fleet.recorded(settings.state_dir))), READ_S)
    if error or found is None:
        return fleet.NO_BASELINES, f"the fleet's record in {settings.state_dir}: {error}"
    spreads = {(model, test, name): Spread(*rest) for model, test, name, *rest in found["spreads"]}
    return Baselines(spreads, found["digests"]), ""


def _rows(known: Baselines) -> dict[str, Any]:
    """As JSON can have it."""
    return {
        "spreads": [[*key, *spread] for key, spread in known.spreads.items()],
        "digests": dict(known.digests),
    }


def write(settings: Settings, judged: Judged, level: Level, here: str, boot: str) -> str:
    """Each node's results into its history; why that failed, or "". Nothing if we are not root.

    ``here`` and ``boot``: this node's name and boot id. What is of other nodes goes to their
    shared files only, from where their next sweep takes it over.
    """
    if os.geteuid() != 0:
        return ""
    now, spool = time.time(), str(settings.gate["spool"])
    failed = []
    for node in sorted({one.node for one in judged.measured if one.test != "worker"}):
        mine = node == here
        if not mine and not settings.state_dir:
            continue
        events = [
            Event(
                now,
                fleet.KIND,
                boot if mine else "",
                fleet.event_data(one, level, named=node in judged.named),
            )
            for one in judged.measured
            if one.node == node
        ]
        if mine:
            why = history.record(spool, settings.state_dir, node, events, WRITE_S)
        else:
            why = _elsewhere(spool, settings.state_dir, node, events)
        if why:
            failed.append(f"{node}: {why}")
    return "; ".join(failed[:4]) + (f"; and {len(failed) - 4} more" if len(failed) > 4 else "")


def _elsewhere(spool: str, state_dir: str, node: str, events: list[Event]) -> str:
    """Another node's events, through a spool that is gone afterwards."""
    try:
        with tempfile.TemporaryDirectory(prefix="active-", dir=spool) as passing:
            return history.record(passing, state_dir, node, events, WRITE_S)
    except OSError as err:
        return f"{err.filename or spool}: {err.strerror or err}"
