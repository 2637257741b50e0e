"""Print each notice about checkpoints once."""

from __future__ import annotations

from srun_wrapper.supervisor.report import say


class Notices:
    def __init__(self) -> None:
        self._told: set[str] = set()

    def once(self, text: str, key: str = "") -> None:
        """Print ``text`` unless a notice with the same ``key`` (else the same text) was."""
        if (key or text) not in self._told:
            self._told.add(key or text)
            say(text)
