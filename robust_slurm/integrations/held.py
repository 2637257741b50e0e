"""State that an integration reads and sets itself, as a Checkpointer wants it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Held:
    """An object with a state, of two functions."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        self.state_dict, self.load_state_dict = get, put


def version_error(package: str, version: str, lacking: str, known: str) -> RuntimeError:
    """An error for a release of a framework that the integration does not know."""
    return RuntimeError(
        f"robust_slurm.integrations.{package}: {package} {version} has no {lacking}; the "
        f"integration is tested with {known}. Use that release, or call "
        "robust_slurm.Checkpointer in a training loop of your own"
    )
