"""The work of ``Checkpointer.save``: capture, copy beside the training, report to the store.

The rules that keep a step on every rank (see docs/checkpoints.md): a step is copied before the
optimizer changes what it holds, and it is digested and replicated before the next one is taken.
Every wait has a deadline; nothing here raises into training.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event

from torch import Tensor

from ..capture.state import State
from ..copying import gpu
from ..copying.guard import Guard
from ..copying.slots import OWN
from ..copying.snapshot import Copier, Copy, TornError
from ..copying.watch import Watch
from ..format.layout import Snapshot
from ..planning.interval import Cost
from .by_time import ByTime
from .chosen import Chosen
from .client import Client
from .moment import HeldMoment, Moment, Moments, is_brief
from .options import Options
from .order import Order, some
from .patience import Patience
from .room import RoomRung, SnapshotRoom, is_full
from .spoilt import Spoilt
from .stats import Meter, Stats

EXPOSED = 20  # with one slot, memory holds no snapshot for at most 1/EXPOSED of the time
COPY_DEADLINE = 600.0  # s; a copy does not take so long unless a device hangs


class Saver:
    """One rank's snapshots, step after step."""

    def __init__(
        self,
        state: State,
        client: Client,
        about: Snapshot,
        options: Options,
        *,
        patient: bool,
        steady: bool,
        stats: Stats,
        say: Callable[[str], None],
        expected: int,
        room: Callable[[int, RoomRung | None], tuple[RoomRung | None, str]],
        by_time: ByTime | None = None,
    ) -> None:
        """``patient``: the optimizer waits for the replica too. ``steady``: the optimizers tell
        before they change anything, so it can be copied in the background. ``expected``: bytes of
        a snapshot by estimate; ``room``: returns the rung for snapshots of a size, below a rung for
        which there was no room after all, and what to tell the user. ``by_time``: see Chosen."""
        self._state, self._client, self._about, self._options = state, client, about, options
        self._patient, self._stats, self._say = patient, stats, say
        self.durable = Chosen(client, options.every, asked=patient, say=say, by_time=by_time)
        self.room = SnapshotRoom(
            client, about, options, patient=patient, say=say, expected=expected, choose=room
        )
        self._copier = Copier()
        self._copy: Copy | None = None
        self._over = Event()  # of that copy: the file is complete and the store knows, or it failed
        self._waited = False  # for its replica
        self._no_room: OSError | None = None
        self._moments = Moments(state, about, steady=steady)
        self._meter = Meter(stats)
        self._patience = Patience(client, stats, say, replica_wait=options.replica_wait)
        self.last = -1
        """The newest step that was taken."""
        self._taken = -1
        self._persisted = -1
        self._held: HeldMoment | None = None
        """State that the last save() found but did not copy, while it can still be saved."""
        self._guard = Guard(always=options.debug)
        self._order = Order(state)
        self._newest: Copy | None = None
        self._spoilt = Spoilt(
            client, self._moments, self._guard, self.room, stats, say, self._order.switched
        )

    def follow(self, line: int) -> None:
        """Put the next snapshots on this timeline (see ``Snapshot.line``)."""
        self._about = self._about._replace(line=line)
        self._moments.follow(self._about)

    def abandon(self, step: int, *, at_once: bool = False) -> None:
        """Give up the steps after ``step``, from which this training goes on.

        ``at_once``: the next one goes to the durable tier, as only memory has ``step``.
        """
        self.last = self._persisted = self._taken = step
        self.durable.at_once = at_once
        self._order.resumed()
        if self.room.ring is not None:
            self.room.ring.abandon(step)
        self._client.everywhere = step

    def leave_out(self) -> None:
        """Note that a step is not saved: nothing later is compared with an older one."""
        self._order.forget()

    def save(self, step: int) -> None:
        """Save the step. May raise anything; the training is none the worse for it."""
        if gpu.capturing():
            self.leave_out()
            self._say(
                f"step {step} is not saved: save() was called while a CUDA graph is captured, and "
                "nothing can be copied meanwhile. Call it outside of the capture"
            )
            return
        self._meter.begin(step)
        with self._meter.standing():
            self._save(step)

    def _save(self, step: int) -> None:
        self._spoilt.act_on(self._guard.before_save(COPY_DEADLINE), self._newest)
        self._order.forget()
        self.settle()
        persist = self.durable.takes(step)
        if self._client.dead:
            raise RuntimeError(f"the checkpoint store is gone ({self._client.dead})")
        self.last, self._held = step, None
        self._order.found(step)
        ring = self.room.ring
        # Outside robust-srun nobody reads what does not go to disk.
        in_memory = self._patient and not self.room.on_disk
        asked = self._client.is_due(step) or self._client.stands_at(step)
        due = persist or (in_memory and asked)
        if ring is not None and not (due and self._stats.snapshots):
            self._hold()  # it may be the last one; the first may find no room in memory
        if ring is not None and due:
            self._patience.end()
            careful = self._guard.careful
            for text in self._order.saving(step) if careful else ():
                self._say(text)
            moment = self._moments.collect()
            for text in self._state.remarks():
                self._say(text)
            self._take(step, persist, moment)
            if careful and self._guard.skips:
                self._order.saved(self._computing)

    def _hold(self) -> None:
        """Keep what changes before the next optimizer step: generators, loaders, running averages.

        The rest stays live; where nothing can tell whether it is still the same, there is nothing
        to keep."""
        # Saving less often does not make this cheaper, so the interval does not count it.
        with self._meter.uncounted():
            self._held = self._moments.to_hold()

    def _take_held(self, *, persist: bool) -> None:
        """Begin the snapshot of the last step, if it has not changed since."""
        held, self._held = self._held, None
        if held is None or not (self._state.still_there() and held.unchanged()):
            return
        room = self.room
        if not room.on_disk and room.ring is not None and room.ring.own < OWN:
            self._client.wait_free(1, self._options.replica_wait)
        self._take(self.last, persist, held.moment)
        self.settle()

    def _take(self, step: int, persist: bool, moment: Moment) -> None:
        """Begin the snapshot of this state."""
        form, values, late, early = moment
        # A step may be on disk before anybody sees that its copy was spoilt.
        at_once = self._guard.careful or persist or is_brief(late)
        self.room.fit(form.plan.size)
        ring = self.room.ring
        if ring is None or (self.room.on_disk and not persist):
            return
        slot = ring.take(self._client.held(), self._client.everywhere)
        if slot is None and ring.own == OWN:
            self._client.wait_free(2, self._patience.left)
            slot = ring.take(self._client.held(), self._client.everywhere)
        if slot is None:
            self._client.skipped(step)
            raise RuntimeError(f"step {step} is skipped: all slots are still being written")
        same, expected = self._moments.read(late, step, whole=persist, copied=at_once)
        try:
            copy = Copy(
                step, slot, form, late, early, lambda: self._moments.encode(values), same,
                expected=expected, at_once=at_once,
            )  # fmt: skip
        except OSError as error:
            if not is_full(error):
                raise
            self.room.use_less(error, self._moments.size)
            self._take(step, persist, moment)
            return
        self.room.found()
        if slot.unpinned:
            self._say(slot.unpinned)
        self._over = over = Event()
        self._copy, self._taken = copy, step
        # Where not every step is saved, the replica has until the next one that is.
        self._waited = not self._patient or self._client.every > 1
        self._persisted = step if persist else self._persisted
        self._newest = copy
        replica_s = self._client.safe_s + self._stats.last_copy_s
        cost = self._meter.cost(replica_s * (EXPOSED if ring.own == 1 else 1))
        watch = self._guard.took(copy, late)
        self._copier.submit(lambda: self._finish(copy, persist, over, cost, watch))

    def before_change(self) -> None:
        """Wait, before an optimizer steps, for the copy of what it changes. Raises nothing."""
        if gpu.capturing():
            return  # it changes nothing yet, and a wait would become part of the graph
        before = self._stats.blocked_s
        with self._meter.standing():
            self._wait_for_copy()
            self._spoilt.act_on(self._guard.before_change(COPY_DEADLINE), self._newest)
            for text in self._order.stepping():
                self._say(text)
            newest, self._newest = self._newest, None
            if newest is not None:
                for text in self._order.changing(newest.early()):
                    self._say(text)
        self._stats.waited_s += self._stats.blocked_s - before

    def _computing(self) -> None:
        """Compare extra as a backward pass begins; no optimizer was seen. Raises nothing."""
        if gpu.capturing():
            return
        try:
            for text in self._order.computing(self._copied_early):
                self._say(text)
        except Exception as error:  # noqa: BLE001 - it must not end a backward pass
            self._say(f"looking at extra failed: {type(error).__name__}: {error}")

    def _copied_early(self, step: int) -> dict[str, Tensor]:
        copy = self._newest
        there = copy is not None and copy.step == step and copy.wait(COPY_DEADLINE)
        return copy.early() if copy is not None and there else {}

    def after_change(self) -> None:
        """An optimizer has stepped."""
        if self._guard.careful and not gpu.capturing():
            self._order.stepped()

    def _wait_for_copy(self) -> None:
        self._held = None
        copy = self._copy
        if copy is None or (copy.copied and self._waited):
            return
        if not copy.before_change(COPY_DEADLINE):
            self._say(f"the copy of step {copy.step} hangs and is discarded; training continues")
        elif not self._waited:
            self._waited = True
            if self._over.wait(COPY_DEADLINE) and copy.error is None:
                self._patience.wait(copy.step)

    def settle(self) -> None:
        """Wait for the copy under way, and act on its failure."""
        copy = self._copy
        if copy is None:
            return
        if not self._over.wait(COPY_DEADLINE):
            raise RuntimeError(f"the copy of step {copy.step} hangs")
        self._copy = None
        if self._no_room is not None:
            self.room.use_less(self._no_room, self._moments.size)
            self._no_room = None
        if copy.error is None:
            self._stats.copied(copy.seconds, copy.form.plan.size)
            self._patience.begin(copy.step)
        elif isinstance(copy.error, TornError):
            self._spoilt.torn(copy, copy.error)
        elif isinstance(copy.error, OSError) and is_full(copy.error):
            self.room.use_less(copy.error, self._moments.size)
        else:
            self._say(f"step {copy.step} was not saved: {type(copy.error).__name__}: {copy.error}")

    def took(self, step: int) -> bool:
        """True if this step was copied into memory; waits for the copy."""
        copy = self._copy
        self.settle()
        good = copy is not None and copy.step == step and copy.error is None
        return good and not self.room.on_disk

    def flush(self, timeout: float) -> str:
        """Have the newest step written to the durable tier: "" or why it was not."""
        verdict = self._guard.before_end(COPY_DEADLINE)
        self.settle()
        self._patience.end()
        if verdict.spoilt and self._newest is not None:
            step = self._newest.step
            self._spoilt.withdraw(self._newest)
            return f"step {step} was discarded: {some(verdict.names)} changed after save({step})"
        if not self.room.on_disk and self._taken != self.last:
            self._take_held(persist=False)  # not every step is saved
        if self.room.on_disk and self.room.ring is not None:
            if not self._client.wait_free(1, timeout):  # the store takes one at a time
                return f"an older step was not written in {timeout:.0f} s"
            if self._persisted != self.last:
                self._take_held(persist=True)
            if self._persisted != self.last:
                return f"step {self.last} is no longer in memory"
            return "" if self._client.wait_free(1, timeout) else f"not written in {timeout:.0f} s"
        why = self._client.flush(self._taken, timeout) if self._stats.snapshots else ""
        return why or ("" if self._taken == self.last else f"step {self.last} was not saved")

    def close(self) -> None:
        """The copy under way is finished first; the files stay for the store."""
        self._guard.drop()
        self._order.release()
        if self._copy is not None:
            self._over.wait(COPY_DEADLINE)
        self._copier.close(10.0)
        self._copy, self._newest, self._held = None, None, None
        self._moments.release()
        self.room.close()

    def _finish(
        self,
        copy: Copy,
        persist: bool,
        over: Event,
        cost: Callable[[], Cost],
        watch: Watch | None,
    ) -> None:
        """In the copy thread."""
        try:
            copy.run()
            if copy.error is None:
                path = copy.slot.path
                self._client.saved(
                    copy.step, copy.slot.index, file=str(path) if self.room.on_disk else path.name,
                    same=copy.same, persist=persist, copy_s=round(copy.seconds, 6),
                    **{name: round(value, 6) for name, value in cost()._asdict().items()},
                )  # fmt: skip
                ring = self.room.ring
                if ring is not None and not self.room.on_disk:
                    ring.prepare(copy.form, self._client.held())
            else:
                self._client.skipped(copy.step)
        except OSError as error:
            self._no_room = error
        finally:
            over.set()
            if watch is not None:
                watch.run(copy.slot.late if copy.error is None else None)
