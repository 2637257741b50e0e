"""The modes of modules, training or not, which no state_dict() has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

_first: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""The mode that this process's first resume() found, by module."""


def note_modes(models: Iterable[Any], *, rejoined: bool) -> None:
    """Note the modes that are not known yet; in a rank that ``rejoined``, put the known ones back.

    Such a rank may have been in the midst of an evaluation; a new process begins with training.
    """
    for model in models:
        for module in model.modules() if isinstance(model, nn.Module) else ():
            first = _first.setdefault(module, module.training)
            if rejoined:
                module.training = first
