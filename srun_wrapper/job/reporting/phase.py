"""The phase that the job is in, as robust-status shows it."""

from __future__ import annotations

import logging

_log = logging.getLogger("robust-srun.supervisor")


class Phase:
    """Holds the phase's name, and logs each change."""

    def __init__(self) -> None:
        self._name = "starting"

    @property
    def name(self) -> str:
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        if name != self._name:
            _log.info("the job is %s (was %s)", name, self._name)
        self._name = name
