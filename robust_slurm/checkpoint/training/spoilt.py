"""Act on snapshots whose tensors something other than an optimizer has changed."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ..copying.guard import Fate, Guard
from ..copying.snapshot import Copy, TornError
from .client import Client
from .moment import Moments
from .order import some
from .room import SnapshotRoom
from .stats import Stats


class Spoilt:
    """Withdraws them and names their tensors, which are copied inside save() from then on."""

    def __init__(
        self,
        client: Client,
        moments: Moments,
        guard: Guard,
        room: SnapshotRoom,
        stats: Stats,
        say: Callable[[str], None],
        switched: Callable[[Collection[str]], bool],
    ) -> None:
        """``switched``: see ``Order``."""
        self._switched = switched
        self._client, self._moments, self._guard = client, moments, guard
        self._room, self._stats, self._say = room, stats, say

    def torn(self, copy: Copy, error: TornError) -> None:
        """Report a copy that was not completed, because it differs from what save() found."""
        names = [copy.form.entries[copy.form.late[i]].name for i in error.indices]
        self._stats.torn += 1
        self._copy_at_once(names, f"step {copy.step} was discarded: ")

    def act_on(self, verdict: Fate, copy: Copy | None) -> None:
        """Act on the guard's verdict on the newest snapshot."""
        if not verdict.names or copy is None:
            return
        start = ""
        if verdict.spoilt:
            start = f"step {copy.step} was discarded: "
            self.withdraw(copy)
        if not verdict.unseen:
            self._copy_at_once(verdict.names, start)
            return
        self._moments.distrust()
        self._say(
            f"{start}{some(verdict.names)} changed after save({copy.step}), and no optimizer "
            "given to the Checkpointer was seen to step (a CUDA graph, or one that is not given?). "
            "From now on everything is copied inside save(), which takes longer; nothing can warn "
            "of changes to them that come after save()"
        )

    def withdraw(self, copy: Copy) -> None:
        """Withdraw a complete snapshot, so that no process uses it."""
        self._stats.torn += 1
        if self._room.ring is not None and not self._room.on_disk:
            self._room.ring.spoil(copy.slot)
            self._client.say(
                "unusable", step=copy.step, file=copy.slot.path.name,
                why="its tensors changed while they were copied", torn=True,
            )  # fmt: skip

    def _copy_at_once(self, names: Collection[str], start: str) -> None:
        self._moments.distrust(names)
        self._guard.suspect()
        if not start and self._moments.are_frozen(names):
            # A forward pass changes them, as codebooks, or the script does: a restart will tell.
            self._moments.note_changed(names)
            return
        if not start and self._switched(names):
            return  # the mode is saved, and tells after a restart whether that was done again
        self._say(
            f"{start}{some(names)} changed before the next optimizer step. From now on they are "
            "copied inside save(), which takes longer. If that was the end of a step, a restart "
            "would miss it: change them before save(), and call save() last"
        )
