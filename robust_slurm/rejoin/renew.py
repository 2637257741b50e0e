"""Makes a rank of one epoch a rank of the next: environment, heartbeat, checkpoints.

What a module of ours keeps about the epoch in this process is reset here, and nowhere else.
"""

from __future__ import annotations

import os
import sys
import time

from robust_slurm import heartbeat, layout
from robust_slurm.auto import flights, listen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_CHECKPOINTER = "robust_slurm.checkpoint.training.checkpointer"
_LOADER = "robust_slurm.data.loader"
_SNAPSHOT = "robust_slurm.checkpoint.copying.snapshot"


def checkpointers() -> list[Any]:
    """The Checkpointers of this process that are not closed."""
    module: Any = sys.modules.get(_CHECKPOINTER)
    alive = list(module._alive) if module is not None else []
    return [each for each in alive if not each._closed and not each._closing]


def close_checkpointers() -> None:
    """Close them: finish the copies under way, flush nothing, as when a rank is ended.

    Raises RuntimeError if the objects will not be restored, as the script does not call resume().
    """
    for each in checkpointers():
        if each._session is not None and not each._resumed:
            raise RuntimeError("its Checkpointer saves, but resume() was not called")
        each._close(0.0)


def let_go_loaders() -> None:
    """End the loaders of the epoch that is over; the function makes new ones."""
    loader: Any = sys.modules.get(_LOADER)
    if loader is not None:
        loader.let_go()


def begin(order: Mapping[str, Any]) -> None:
    """Become a rank of the next epoch. KeyError, TypeError, ValueError: the order is malformed."""
    for name in order["unset"]:
        os.environ.pop(str(name), None)
    for name, value in order["set"].items():
        os.environ[str(name)] = str(value)
    snapshot: Any = sys.modules.get(_SNAPSHOT)
    if snapshot is not None:
        snapshot.halted.clear()
    listen.end()
    flights.since = time.time_ns()  # ignore collectives that still wait in the epoch before
    _begin_heartbeat()


def _begin_heartbeat() -> None:
    heartbeat._detach()
    heartbeat._beats = heartbeat._auto_steps = heartbeat._phases = 0
    heartbeat._explicit = heartbeat._saves = heartbeat._nan = False
    heartbeat._saves_first = None
    heartbeat._saved_last = heartbeat._used = layout.NO_STEP
    heartbeat._proven = heartbeat._assumed = layout.NO_STEP
    heartbeat._stack.clear()
    heartbeat._off = heartbeat._ended = False
    heartbeat.rejoined = True
