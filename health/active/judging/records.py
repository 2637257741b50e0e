"""The fleet's record: read before a run of active tests, and extended with its results after it.

Only root writes: no job's user may change the ledger. Nothing here decides anything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from health.active.judging import fleet
from health.active.judging.fleet import Baselines, FleetSpread
from health.active_tests import Judged, Level
from health.history import events as history
from health.node.silent import call_on
from health.node.system import Event
from health.settings import Settings

READ_S = 20.0  # all nodes' files, on a file system that may not answer
WRITE_S = 30.0  # all nodes' files
PART = 8  # reading and writing may each take this fraction (1/8) of the whole time


def baselines(settings: Settings, deadline_s: float = READ_S) -> tuple[Baselines, str]:
    """Read the fleet's record; the text says why it could not be read ("": it could)."""
    deadline_s = min(READ_S, deadline_s)
    if not settings.state_dir:
        return fleet.NO_BASELINES, ""
    found, error = call_on(
        settings.state_dir,
        lambda: _rows(fleet.baselines(fleet.recorded(settings.state_dir))),
        deadline_s,
    )
    if error or found is None:
        return fleet.NO_BASELINES, f"the fleet's record in {settings.state_dir}: {error}"
    spreads = {
        (model, test, name): FleetSpread(*rest) for model, test, name, *rest in found["spreads"]
    }
    return Baselines(spreads, found["digests"]), ""


def _rows(known: Baselines) -> dict[str, Any]:
    """Return the baselines in the types of JSON."""
    return {
        "spreads": [[*key, *spread] for key, spread in known.spreads.items()],
        "digests": dict(known.digests),
    }


def write(
    settings: Settings,
    judged: Judged,
    level: Level,
    here: str,
    deadline_s: float = WRITE_S,
) -> str:
    """Write each node's results into its history; return why that failed, or "". Root only.

    ``here``: this node's name. Results of other nodes go to their shared files, from which their
    next sweep fetches them. ``deadline_s``: for all.
    """
    if os.geteuid() != 0:
        return ""
    until = time.monotonic() + min(WRITE_S, deadline_s)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    now, spool = time.time(), str(settings.gate["spool"])
    failed, others = "", dict[str, list[Event]]()
    devices = fleet.devices_of(judged.measured, judged.devices)
    for node in sorted({one.node for one in judged.measured if one.test != "worker"}):
        mine = node == here
        if not mine and not settings.state_dir:
            continue
        events = [
            Event(
                now,
                fleet.KIND,
                boot if mine else "",
                fleet.event_data(one, level, named=node in judged.named, devices=devices[node]),
            )
            for one in judged.measured
            if one.node == node
        ]
        if mine:
            left = max(0.1, round(until - time.monotonic(), 1))
            failed = str(history.record(spool, settings.state_dir, node, events, left))
        else:
            others[node] = events
    if others:
        told = tell(settings.state_dir, others, round(until - time.monotonic(), 1))
        failed = "; ".join(text for text in (failed, told) if text)
    return failed


def tell(state_dir: str, events: Mapping[str, Sequence[Event]], deadline_s: float) -> str:
    """Write other nodes' events into their shared files; return why that failed, or "".

    One process and one deadline for all: a file system that hangs does so for each of them.
    """
    if deadline_s <= 0:
        return f"{state_dir}: no time was left"
    failed, error = call_on(state_dir, lambda: _told(state_dir, events), deadline_s)
    if error:
        return f"{state_dir}: {error}"
    more = f"; and {len(failed) - 4} more" if len(failed) > 4 else ""
    return "; ".join(failed[:4]) + more


def _told(state_dir: str, events: Mapping[str, Sequence[Event]]) -> list[str]:
    failed = []
    for node, happened in events.items():
        try:
            history.tell(state_dir, node, happened)
        except OSError as err:
            failed.append(f"{node}: {err.filename or state_dir}: {err.strerror or err}")
    return failed
