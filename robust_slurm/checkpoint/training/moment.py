"""The state at the moment of a save(): tensors to copy now or later, and all else as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch

from ..capture.sharing import Fingerprint
from ..capture.state import Item, State
from ..copying import gpu
from ..copying.expected import Expected
from ..copying.form import Form
from ..copying.portions import CALL
from ..copying.sample import TensorSample
from ..format.layout import Snapshot

SMALL = 1 << 20  # bytes of a tensor that is cloned at each step that is not saved
WHOLE = 1 << 16  # bytes on the host that are summed up at such a step; of more, only a few items
BRIEF = 2 << 20
"""Bytes on the host that save() copies itself at each step: that takes 0.1 to 0.2 ms, no more than
to look at them, and no later write can spoil the copy."""


class Moment(NamedTuple):
    """The state as save() found it; ``late`` and ``early`` as in Form, most of them live."""

    form: Form
    values: dict[str, Any]
    late: list[torch.Tensor]
    early: list[torch.Tensor]

    def versions(self) -> list[int]:
        return [tensor._version for tensor in (*self.late, *self.early)]


class HeldMoment:
    """A moment that may be saved later, as long as its live tensors have not changed."""

    def __init__(self, moment: Moment, fingerprint: Fingerprint, *, whole: bool) -> None:
        self.moment = moment
        self._versions = moment.versions()
        self._fingerprint, self._whole = fingerprint, whole
        self._sum = fingerprint.take(whole=whole)

    def unchanged(self) -> bool:
        """False once something is known to have changed: torch counts no writes through ``.data``
        and the like, and those show in the checksum."""
        if self.moment.versions() != self._versions:
            return False
        return self._sum() == self._fingerprint.take(whole=self._whole)()


class Moments:
    """Finds what save() copies, step after step. For the training thread, except ``encode``."""

    def __init__(self, state: State, about: Snapshot, *, steady: bool) -> None:
        """``steady``: the optimizers tell before they change anything, so what they change can be
        copied in the background."""
        self._state, self._about, self._may_wait = state, about, steady
        self._form: Form | None = None
        self._items: Sequence[Item] = ()
        self._late: list[torch.Tensor] = []
        self._early: list[torch.Tensor] = []
        self._unsteady: set[str] = set()
        self._encoded: dict[str, tuple[Any, str]] = {}
        self._live: list[torch.Tensor] = []
        self._fingerprint = Fingerprint([])  # of those
        self._sample = TensorSample([])  # of ``late``

    @property
    def steady(self) -> bool:
        """True if nothing else than an optimizer is known to change what it changes."""
        return self._may_wait and not self._unsteady

    @property
    def size(self) -> int:
        """Bytes of a snapshot; 0 before the first."""
        return self._form.plan.size if self._form is not None else 0

    def collect(self, *, trusting: bool = False) -> Moment:
        """Find what there is to save now. ``trusting``: see ``State.capture``. Raises TypeError."""
        items, values = self._state.capture(trusting=trusting)
        known, form = self._form, self._form_of(items)
        if form is not known:  # if a file proves too short, it and the new one take up room
            form.reserve(len(form.header(0, self.encode(values))))
        return Moment(form, values, self._late, self._early)

    def to_hold(self) -> HeldMoment | None:
        """Look at a step that may be saved later, and copy all that changes before the next
        optimizer step. None where nothing could detect that the rest has changed."""
        now = self.collect(trusting=True)
        small = [t.nbytes <= SMALL or t.is_inference() for t in now.early]
        if not (all(small) or self.steady):
            return None
        form, early = now.form, list(zip(now.form.early, now.early, small, strict=True))
        live = [*zip(form.late, now.late, strict=True), *((i, t) for i, t, few in early if not few)]
        tensors = [tensor for _, tensor in live]
        if not _same(tensors, self._live):
            self._live = tensors
            self._fingerprint = Fingerprint([(form.entries[i], tensor) for i, tensor in live])
        whole = all(t.is_cpu for t in tensors) and sum(t.nbytes for t in tensors) <= WHOLE
        moment = now._replace(early=[t.clone() if few else t for _, t, few in early])
        return HeldMoment(moment, self._fingerprint, whole=whole)

    def read(
        self, late: list[torch.Tensor], step: int, *, whole: bool, copied: bool
    ) -> tuple[Callable[[], int], Expected | None]:
        """Read the state that was captured last. Return the function that computes the checksum of
        all that is shared (see ``Fingerprint``), and what the copy of ``late`` is compared with:
        None if ``late`` is ``copied`` inside save(). Only then may ``whole`` be true."""
        same = self._state.fingerprint(whole=whole, step=step)
        if copied:
            return same, None
        if not _same(late, self._sample.tensors):
            self._sample = TensorSample(late)
        return same, Expected(self._sample)

    def distrust(self, names: Collection[str] | None = None) -> None:
        """Copy these tensors inside save() from now on; None: all."""
        self._form = None
        if names is None:
            self._may_wait = False
        else:
            self._unsteady.update(names)

    def are_frozen(self, names: Collection[str]) -> bool:
        """True if these tensors are parameters that are not trained."""
        return {*names} <= {item.entry.name for item in self._items if item.frozen}

    def note_changed(self, names: Collection[str]) -> None:
        """Record in snapshots that these tensors change between save() and the next step."""
        self._state.between.names.update(names)

    def release(self) -> None:
        """Let go of all tensors."""
        self._items, self._late, self._early, self._live = (), [], [], []
        self._fingerprint = Fingerprint([])
        self._sample = TensorSample([])

    def _form_of(self, items: Sequence[Item]) -> Form:
        form = self._form
        if form is not None and items is self._items:
            return form
        if form is None or [i.entry for i in items] != form.entries:
            late = [
                k
                for k, item in enumerate(items)
                if item.late
                and self._may_wait
                and item.entry.name not in self._unsteady
                and not item.tensor.is_inference()  # they count no versions
            ]
            frozen = {item.entry.name for item in items if item.frozen}
            form = self._form = Form([i.entry for i in items], late, self._about, frozen)
        self._items = items
        self._late = [items[i].tensor for i in form.late]
        self._early = [items[i].tensor for i in form.early]
        if not {*map(id, self._live)} <= {*map(id, self._late), *map(id, self._early)}:
            self._live, self._fingerprint = [], Fingerprint([])  # nothing keeps their memory alive
        if not _same(self._late, self._sample.tensors):
            self._sample = TensorSample([])
        return form

    def follow(self, about: Snapshot) -> None:
        """Describe the next snapshots by ``about``."""
        self._about, self._form = about, None

    def encode(self, values: dict[str, Any]) -> str:
        """Return JSON within a JSON string. The same object is not encoded in a second call."""
        parts = []
        for key, value in values.items():
            known = self._encoded.get(key)
            if known is None or known[0] is not value:
                text = f"{json.dumps(key)}:{json.dumps(value, separators=(',', ':'))}"
                known = self._encoded[key] = (value, json.dumps(text)[1:-1])
            parts.append(known[1])
        return "{" + ",".join(parts) + "}"


def is_brief(late: Sequence[torch.Tensor]) -> bool:
    """True if save() copies these tensors in no more time than it would take to look at them."""
    few = len(late) * CALL <= BRIEF  # or to add up their sizes would take longer than all else
    return few and sum(t.nbytes + CALL for t in late) <= BRIEF and not gpu.devices_of(late)


def _same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """True if both hold the same objects in the same order."""
    return len(some) == len(others) and all(map(is_, some, others))
