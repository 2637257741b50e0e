"""State that an integration reads and sets itself, as a Checkpointer wants it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from robust_slurm.checkpoint import held


class Held(held.HeldValue):
    """An object with a state that is made of two functions.

    Frameworks count a step before its optimizer steps. So ``state_dict`` returns the state of the
    newest ``keep``: else the count would seem to change after save().
    """

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        super().__init__(get, put)
        self._kept: Any = None

    def keep(self) -> None:
        """Have ``state_dict`` return the present state from now on."""
        self._kept = self._get()

    def state_dict(self) -> Any:
        """Return the state of the newest ``keep``."""
        return self._get() if self._kept is None else self._kept


def version_error(package: str, version: str, lacking: str, known: str) -> RuntimeError:
    """An error for a release of a framework that the integration does not know."""
    return RuntimeError(
        f"robust_slurm.integrations.{package}: {package} {version} has no {lacking}; the "
        f"integration is tested with {known}. Use that release, or call "
        "robust_slurm.Checkpointer in a training loop of your own"
    )
