"""Find tensors that something other than an optimizer step changes after save().

The first snapshots are copied inside save(), and their tensors are then watched. A tensor that
changes before the next optimizer step is copied inside save() from then on; all others are copied
in the background.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch

from .snapshot import Copy
from .watch import Watch, differing

CAREFUL = 3
"""Snapshots of an incarnation that are copied inside save() and watched."""
CHECK_SHARE = 0.005
"""Share of the time since save() that a later comparison may take: tensors are compared after an
evaluation, but not after a single step of a large model."""


class Fate(NamedTuple):
    """Fate of a snapshot's state until the next optimizer step or save()."""

    names: Collection[str] = ()
    """Tensors that changed meanwhile."""
    spoilt: bool = False
    """The snapshot may hold a mixture of states."""
    unseen: bool = False
    """True if they changed though no optimizer has stepped."""


class Guard:
    """Judges snapshots, in the training thread. Call ``took`` for every snapshot, then one of
    ``before_change``, ``before_save``, ``before_end`` and ``drop``."""

    def __init__(self, *, always: bool) -> None:
        """``always``: every snapshot is copied inside save() and watched."""
        self._always = always
        self._left = CAREFUL
        self._skipped = False
        self.skips = False
        """True once no optimizer was seen to step between two save()."""
        self._copy: Copy | None = None
        self._late: list[torch.Tensor] = []
        self._watch: Watch | None = None
        self._taken = self._seconds = 0.0

    @property
    def careful(self) -> bool:
        """True if the next snapshot is copied inside save() and watched.

        This is also True if no optimizer was seen to step since the last snapshot, even if nothing
        changed: a GradScaler may have skipped the step, or a step that nobody sees (a CUDA graph's)
        may have come before the copy. It then stays True for one more snapshot, which with gradient
        accumulation may be the end of a step.
        """
        return self._always or self._left > 0 or self._skipped

    def suspect(self) -> None:
        """Watch as closely as at first, because an unannounced write was found."""
        self._left = CAREFUL

    def took(self, copy: Copy, late: list[torch.Tensor]) -> Watch | None:
        """Note a new snapshot. Return the Watch, if any, that the copy thread runs afterwards."""
        self._copy, self._late, self._taken = copy, late, time.monotonic()
        self._watch = Watch(late) if self.careful and late else None
        self._left = max(0, self._left - 1)
        return self._watch

    def before_change(self, deadline: float) -> Fate:
        """Judge the newest snapshot before an optimizer steps. ``deadline``: s for the copy."""
        copy, late, watch = self._forget()
        self._skipped = False
        if copy is None:
            return Fate()
        if watch is not None:
            found, _ = watch.end(deadline)
            self._seconds = watch.seconds
            return Fate(_names(copy, found))
        moved = copy.moved(late)
        due = (time.monotonic() - self._taken) * CHECK_SHARE >= self._seconds
        if not (moved or due):
            return Fate()
        changed = self._compare(copy, late, range(len(late)) if due else moved, deadline)
        return Fate(_names(copy, changed), spoilt=bool(changed) and not copy.at_once)

    def before_save(self, deadline: float) -> Fate:
        """Judge the newest snapshot if no optimizer has stepped between it and this save()."""
        copy, late, watch = self._forget()
        if copy is None:
            return Fate()
        self._skipped = self.skips = True
        self._left = max(self._left, 2)  # this one, and the next one
        if watch is not None:
            found, changed = watch.end(deadline)
            return Fate(_names(copy, found | changed), unseen=bool(changed))
        return self._unseen(copy, late, deadline)

    def before_end(self, deadline: float) -> Fate:
        """Judge the newest snapshot, the last one of the training, before it is written."""
        copy, late, watch = self._forget()
        if watch is not None:
            watch.stop()
        return Fate() if copy is None else self._unseen(copy, late, deadline)

    def drop(self) -> None:
        """Forget the newest snapshot without judging it."""
        _, _, watch = self._forget()
        if watch is not None:
            watch.stop()

    def _unseen(self, copy: Copy, late: list[torch.Tensor], deadline: float) -> Fate:
        if copy.at_once:
            return Fate()
        changed = self._compare(copy, late, range(len(late)), deadline)
        return Fate(_names(copy, changed), spoilt=bool(changed), unseen=bool(changed))

    def _forget(self) -> tuple[Copy | None, list[torch.Tensor], Watch | None]:
        """Return the newest snapshot and forget it: each is judged once."""
        held = self._copy, self._late, self._watch
        self._copy, self._late, self._watch = None, [], None
        return held

    def _compare(
        self, copy: Copy, late: list[torch.Tensor], which: Iterable[int], deadline: float
    ) -> set[int]:
        if not copy.wait(deadline) or copy.error is not None:
            return set()  # reported elsewhere
        began = time.monotonic()
        chosen, saved = list(which), copy.slot.late
        found = differing([saved[i] for i in chosen], [late[i] for i in chosen])
        if len(chosen) == len(late):
            self._seconds = time.monotonic() - began
        return {chosen[i] for i in found}


def _names(copy: Copy, late: Collection[int]) -> list[str]:
    return [copy.form.entries[copy.form.late[i]].name for i in sorted(late)]
