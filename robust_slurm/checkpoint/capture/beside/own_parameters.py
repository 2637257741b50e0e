"""Parameters that only an optimizer has: no model given to the Checkpointer holds them.

A learned temperature beside the model, or 32-bit master copies of a 16-bit model. Without their
values a restart would go on with those of its start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from ..assembly import Assembly, StateError, Step
from ..leaves import Leaf, Leaves, local_part
from ..values import Encoded, ref_of


class OwnParameters:
    """The values of an optimizer's parameters that no object but the optimizer would save."""

    def __init__(self, key: str, *, trained: bool) -> None:
        """``key``: the optimizer's."""
        self.key = key
        self._leaves = Leaves(f"{key}.parameters", late=trained, shareable=trained)
        self.encoded: Encoded = None
        """None if there are none."""

    @property
    def found(self) -> list[Leaf]:
        return self._leaves.found

    def collect(
        self, parameters: Iterable[tuple[str | int, torch.Tensor]], elsewhere: Collection[int]
    ) -> None:
        """``parameters``: of all groups, by name, or by number if no model has them.
        ``elsewhere``: addresses of what another object saves."""
        self._leaves.begin()
        pairs = [
            [name, self._leaves.add(str(name), parameter)]
            for name, parameter in parameters
            if type(name) is int and local_part(parameter).data_ptr() not in elsewhere
        ]
        self._leaves.end()
        self.encoded = {"m": pairs} if pairs else None

    def plan(
        self, saved: Assembly, encoded: Encoded, owners: Mapping[Any, torch.Tensor]
    ) -> list[Step]:
        """Return the steps that restore the values. Raises StateError."""
        try:
            found = [
                (name, owners.get(name), ref_of(body))
                for name, body in (encoded["m"] if encoded is not None else ())
            ]
        except (KeyError, TypeError, ValueError) as err:
            raise StateError(f"{self.key}: saved from something that is no optimizer") from err
        steps: list[Step] = []
        for name, owner, ref in found:
            if owner is None or ref is None:
                raise StateError(f"{self.key}: parameter {name} was saved, it has none here")
            steps.append(saved.into(owner, ref))
        return steps
