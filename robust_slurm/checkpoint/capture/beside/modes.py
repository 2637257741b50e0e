"""The modes of modules, training or not, which no state_dict() has.

A script may put a layer into eval() in mid-run, and a rank that is put back to an older step may
have been in the midst of an evaluation.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from ..assembly import Assembly, Step
from ..leaves import Leaf
from ..module_state import ModuleState
from ..values import Encoded

KEY = "modes"
_TRAINING = attrgetter("module.training")


class Modes:
    """The modes of all modules of all models; a section of the state without tensors."""

    def __init__(self, models: Iterable[ModuleState]) -> None:
        """``models``: their sections, which are collected first."""
        self.key = KEY
        self.leaves: list[list[Leaf]] = []
        self._models = {model.key: model for model in models}

    def collect(self) -> Encoded:
        """Return the names of the modules that are not training, by model, encoded."""
        return {"d": {key: _idle(model) for key, model in self._models.items()}}

    def plan(self, saved: Assembly, encoded: Encoded) -> list[Step]:
        """Return the step that sets the modes."""
        found = encoded.get("d") if isinstance(encoded, dict) else None
        return [lambda: self._set(found if isinstance(found, dict) else {})]

    def _set(self, idle: dict[str, list[str]]) -> None:
        for key, model in self._models.items():
            names = set(idle.get(key, ()))
            for prefix, _, module in model.places() if key in idle else ():
                module.training = prefix not in names


def _idle(model: ModuleState) -> list[str]:
    places = model.places()
    if all(map(_TRAINING, places)):
        return []
    return [place.prefix for place in places if not place.module.training]
