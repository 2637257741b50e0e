"""Warns of calls in an order that saves a state which never was the end of a step.

save() must be the last call of a step: what the script changes after it is not in the snapshot.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from typing import Any

import torch

from ..capture.state import Glimpse, State
from ..copying.watch import same_bits

LAST = "Call save() last in a step, after optimizer.step(), scheduler.step() and EMA updates"


class Order:
    """Looks at the first steps. Belongs to the training thread; raises nothing that matters."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._used: dict[str, tuple[Any, int]] | None = None
        self._step = -1
        self._extra: dict[str, Glimpse] = {}

    def resumed(self) -> None:
        """All optimizer steps are seen from now on."""
        self._used = {}

    def stepped(self) -> None:
        """An optimizer has stepped: the gradients that are there now are used."""
        if self._used is not None:
            for name, gradient in self._state.gradients():
                self._used[name] = (weakref.ref(gradient), gradient._version)

    def saving(self, step: int) -> list[str]:
        """save() begins; what is wrong."""
        self._step, self._extra = step, self._state.look_at_extra()
        found = [*self._pending()]
        if missing := self._state.schedulers_missing():
            found.append(
                f"{', '.join(missing)}: a learning-rate scheduler steps with it and is not in "
                "extra: after a restart it would start from the beginning. Pass "
                'extra={"scheduler": scheduler}, unless the script computes it from the step'
            )
        return found

    def _pending(self) -> list[str]:
        if self._used is None:
            return []
        names = []
        for name, gradient in self._state.gradients():
            last, version = self._used.get(name, (None, 0))
            if last is not None and last() is gradient and version == gradient._version:
                return []  # used: of several optimizers the others may have their turn later
            there = gradient.detach()
            if not bool(torch.isfinite(there).all()):
                return []  # a GradScaler leaves this step out
            if bool(there.any()):
                names.append(name)
        if not names:
            return []
        return [
            f"save({self._step}) comes before an optimizer step has used the gradients of "
            f"{some(names)}: gradients are not saved, so a restart would lose them. {LAST}; "
            "with gradient accumulation, once for each optimizer step"
        ]

    def changing(self, saved: Mapping[str, torch.Tensor]) -> list[str]:
        """An optimizer is about to step. ``saved``: the tensors of extra by name, as save() copied
        them; what is wrong."""
        before, self._extra = self._extra, {}
        if not before:
            return []
        now = self._state.look_at_extra()
        names = [key for key, was in before.items() if _changed(was, now.get(key), saved)]
        if not names:
            return []
        return [
            f"{some(names)} changed between save({self._step}) and the next optimizer step. If "
            f"that was the end of a step, a restart would miss it. {LAST}"
        ]


def _changed(was: Glimpse, now: Glimpse | None, saved: Mapping[str, torch.Tensor]) -> bool:
    if now is None or was.values != now.values or was.tensors.keys() != now.tensors.keys():
        return True
    return any(
        name in saved and not same_bits(saved[name], tensor) for name, tensor in now.tensors.items()
    )


def some(names: Collection[str]) -> str:
    """The first of these names, for a message."""
    return ", ".join([*names][:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
