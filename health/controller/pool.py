"""The pool of standby nodes after a job's start or end: when ``robust-standby apply`` is due.

The timer does the same within minutes. Here only the record that apply has written is read.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from typing import Any

from health.node import rootfiles
from robust_slurm import commands

APPLY_S = 60.0
SETTLE_S = 5.0  # a standby node that was requested for a suspicion may be back at once
_LIMIT = 8 << 20  # bytes of the record


def read(state_dir: str) -> Mapping[str, Any]:
    """Return the record of the pool; empty: there is none. Raises OSError, ValueError."""
    try:
        file = rootfiles.open_in(f"{state_dir}/standby", "pool.json")
    except FileNotFoundError:
        return {}
    with os.fdopen(file, "rb") as stream:
        try:
            found = json.loads(stream.read(_LIMIT))
        except RecursionError:
            raise ValueError("brackets without end") from None
    return found if isinstance(found, dict) else {}


def due(record: Mapping[str, Any], partition: str) -> bool:
    """Return whether a job of this partition may have changed the pool. Pure.

    Jobs of the partition that supplies the nodes do so only while the pool waits for a node.
    Preemptable jobs on standby nodes never do: a node that is lent counts as free.
    """
    wish = record.get("wish", {})
    if not partition or not wish:
        return False
    if partition == wish.get("partition"):
        return True
    if partition != wish.get("source"):
        return False
    removed = record.get("done", {}).get(partition, {}).get("removed", ())
    return bool(record.get("short_since")) or bool(set(removed) - set(record.get("admitted", {})))


def apply(state_dir: str) -> str:
    """Run ``robust-standby apply`` as it was last run; returns what it printed to stderr."""
    argv = [*commands.again("standby.cli"), "apply", "--yes"]
    argv += ["--state-dir", state_dir]
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=APPLY_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stderr.strip()[-300:] if done.returncode else ""
