"""The loader: hands the rows of a plan's steps to the training, and keeps some steps ready.

A thread prepares steps ahead. What it has prepared is no state: ``state_dict`` is that of the last
batch which was handed out.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import weakref
from collections import deque
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from robust_slurm.heartbeat import phase
from robust_slurm.layout import DATA_WAIT
from robust_slurm.resizing.world import repeats, this_world

from .batch_count import BatchCount
from .errors import DataError, EndOfData
from .plan import Plan
from .planning.mesh import RankMesh
from .say import say
from .service.ring import MEMORY
from .steps import LocalSteps

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from robust_slurm.resizing.world import TrainingWorld

    from .steps import Steps

SHORT = 0.05  # s: a shorter wait is not reported
OTHER_ROWS = (
    "the loader was saved in the middle of a step, whose rows are others now: go on with the "
    "batch, mesh, mix and cost of then, or save when a step's batches have all been used"
)
JOIN = 300.0  # s to wait for the thread, which may be reading a record


class Loader:
    """An iterator of batches: dicts of tensors, or of numpy arrays where there is no torch.

    ``shares``: the shares of a step's rows that are this rank's, which it gets one after the
    other. One, unless the job trains with fewer data-parallel ranks than the plan's mesh has:
    then ``for share in loader.shares: batch = next(loader)`` makes a step.

    Give it to ``Checkpointer(loader=loader)``. Its state is the same on all ranks.
    """

    shared_position = True
    """Any rank, also of a world of another size, can go on with this loader's state."""

    def __init__(
        self, plan: Plan | str, *, ahead: int = 2, memory: int = MEMORY, prefetched: int = 0
    ) -> None:
        """``plan``: a Plan, or the name "module:plan" of one, or of a function that makes one. A
        plan given by name is prepared by the node's data process under robust-srun, which holds
        about ``memory`` bytes of steps. ``ahead``: steps ready in advance here. ``prefetched``:
        batches that the training has already taken, and not used, whenever it saves: the state is
        that before them. DataError."""
        if type(ahead) is not int or ahead < 1:
            raise DataError(f"Loader: ahead is {ahead!r}; give a number of steps >= 1")
        if type(memory) is not int or memory < 1:
            raise DataError(f"Loader: memory is {memory!r}; give a number of bytes >= 1")
        if type(prefetched) is not int or prefetched < 0:
            raise DataError(f"Loader: prefetched is {prefetched!r}; give a number of batches >= 0")
        whole = this_world()
        self._steps, self.shares = open_steps(plan, whole, memory)
        self._named = (plan, f"{whole.size}/{whole.original}") if isinstance(plan, str) else None
        _alive.add(self)
        self.waited = 0.0
        """Seconds that the training has waited for data."""
        self._ahead = ahead
        self._change = threading.Condition()
        self._ready: deque[Any] = deque()  # steps, or the error after them
        self._thread: threading.Thread | None = None
        self._stop = False
        self._closed = False
        self._left = False  # the thread gives back what it reads from, at its end
        self._state: Any = None  # before the step that batches are handed out of
        self._after: Any = None  # after it
        self._rows: deque[Mapping[str, Any]] = deque()  # of it, not handed out yet
        self._last: Mapping[str, Any] | None = None  # handed out, in a world of fewer ranks
        self._keeps = this_world().resized
        self._skip = 0  # batches of the next step that were handed out before it was saved
        self._rest: Any = None  # the digest of the other batches of that step
        self._owner = 0  # the process that the thread is in
        self._asking = threading.RLock()  # one thread at a time gets a batch, or seeks
        self._giving = threading.RLock()  # the state fits the batches that were handed out
        self._whole_steps: int | None = None  # of the plan; -1: nobody knows
        self._ended = False
        self._prefetched = prefetched
        self._count = BatchCount(prefetched)
        self._past: deque[dict[str, Any]] = deque(maxlen=prefetched + 1)  # states, the last one now

    def __iter__(self) -> Loader:
        if self._ended and 0 in self.shares:
            say(
                "the plan's epochs are over, so a further pass over its loader has no batch: give "
                "Plan the number of all epochs, or make a new Loader"
            )
        return self

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        """Return the batches of a rank from the plan's beginning to its end, if that is known: with
        ``epochs``, without ``pack``, of sources that know their number of records (lists, Parquet,
        Arrow). It is smaller if ``decode`` leaves records out. Else raises TypeError."""
        with self._asking:
            if self._whole_steps is None:
                began = self._thread is not None and not isinstance(self._steps, LocalSteps)
                if began:
                    self._halt()  # only one thread may ask a data process
                try:
                    told = self._steps.identity()
                finally:
                    if began:
                        self._start()
                shares = RankMesh(told["mesh"] or {"dp": this_world().original}).data
                self._whole_steps = told["samples"] // (shares * told["batch"])
        if self._whole_steps < 0:
            raise TypeError(
                "this plan's number of steps is not known: it has one with epochs=, without pack, "
                "and of sources that know their number of records"
            )
        return self._whole_steps * len(self.shares)

    def __next__(self) -> dict[str, Any]:
        """Return the next batch; raise StopIteration after the plan's epochs, on all ranks at the
        same step. In a pass for other ranks (``accumulate``) it is the last one again. Several
        threads may ask; each gets a batch of its own. Raises DataError."""
        self._expect_own_process()
        with self._asking:
            if self._last is not None and repeats():
                return as_tensors(self._last)
            try:
                return as_tensors(self._take())
            except StopIteration:
                self._ended = True
                self._note_taken()  # those that were taken before are one less
                raise

    def _take(self) -> Mapping[str, Any]:
        while not self._rows:
            _, rows, after = self._next_step()
            rest = [rows[share] for share in self.shares[self._skip :]]
            if self._skip and digest_of(rest) != self._rest:
                self._ready.appendleft(DataError(OTHER_ROWS))
                continue
            with self._giving:
                self._after = after
                self._rows.extend(rest)
                self._skip = 0
        with self._giving:
            if not self._past:
                self._note_taken()
            batch = self._rows.popleft()
            self._count.took()
            if not self._rows:
                self._state = self._after
            self._note_taken()
        if self._keeps:
            self._last = batch
        return batch

    def _note_taken(self) -> None:
        if self._prefetched:
            self._past.append(self._state_now())

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch that was handed out: some KB of plain values."""
        with self._giving:
            return self._past[0] if self._past else self._state_now()

    def saved_at(self, step: int, began: int) -> str:
        """Note that the training has done ``step`` steps, the first ``began`` of them before it
        resumed. Return what is wrong with saving the state now; "" if nothing is."""
        return self._count.saved_at(step, began)

    def _state_now(self) -> dict[str, Any]:
        given = (len(self.shares) - len(self._rows)) if self._rows else self._skip
        state: dict[str, Any] = {"state": self._state, "given": given}
        if given:
            state["shares"] = list(self.shares)
            state["rest"] = digest_of(self._rows) if self._rows else self._rest
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after this state. Raises DataError if it is none of this plan."""
        if not hasattr(state, "keys") or "state" not in state or "given" not in state:
            raise DataError("the loader's saved state is none of robust_slurm.data.Loader")
        given = state["given"]
        if type(given) is not int or not 0 <= given < len(self.shares):
            given = -1
        if given and (given < 0 or state.get("shares") != list(self.shares)):
            raise DataError(
                "the loader was saved in the middle of a step, by a rank with other shares: save "
                "when a step's batches have all been used"
            )
        with self._asking, self._giving:
            if self._closed:
                raise DataError("the loader is closed")
            before = self._state_now()
            self._halt()
            self._ready.clear()
            self._rows.clear()
            self._skip, self._rest = before["given"], before.get("rest")  # if it is refused
            self._steps.seek(state["state"])
            self._state, self._skip, self._rest = state["state"], given, state.get("rest")
            self._past.clear()
            self._count = BatchCount(self._prefetched)
            self._ended = False
            self._start()

    def close(self) -> None:
        """Stop reading. There are no further batches."""
        self._expect_own_process()
        with self._change:
            closed, self._closed = self._closed, True
            self._change.notify_all()  # another thread may be waiting for a batch
        if not closed:
            with self._asking:
                self._halt()
                self._steps.close()

    def _next_step(self) -> tuple[int, Mapping[int, Mapping[str, Any]], Any]:
        if self._closed:
            raise DataError("the loader is closed")
        self._expect_own_process()
        if self._thread is None:
            if self._named is not None and self._state is None:
                from .agreement import agree

                agree(*self._named, self._steps.identity)
            self._steps.seek(self._state)
            self._start()
        elif self._left:
            self._halt()
            self._ready.clear()
            self._steps.seek(self._state)
            self._start()
        with self._change:
            if not self._is_ready() and not self._change.wait_for(self._is_ready, SHORT):
                begun = time.monotonic() - SHORT
                # A thread that fetches ahead waits all the time: that says nothing of the training.
                in_main = threading.current_thread() is threading.main_thread()
                with phase(DATA_WAIT) if in_main else nullcontext():
                    self._change.wait_for(self._is_ready)
                self.waited += time.monotonic() - begun
            if self._closed:
                raise DataError("the loader is closed")
            found = self._ready[0]
            if isinstance(found, EndOfData):
                raise StopIteration
            if isinstance(found, BaseException):
                raise found
            self._ready.popleft()
            self._change.notify_all()
        return found  # type: ignore[no-any-return]

    def _is_ready(self) -> bool:
        return bool(self._ready) or self._closed

    def _expect_own_process(self) -> None:
        """Raise DataError in a fork: the thread is not there, and the parent goes on with the same
        samples."""
        if self._thread is not None and self._owner != os.getpid():
            raise DataError(
                "the loader was begun by another process, of which this is a fork; make a Loader "
                "in the process that uses it"
            )

    def _start(self) -> None:
        self._stop = False
        self._owner = os.getpid()
        self._thread = threading.Thread(target=self._prepare, name="robust-data", daemon=True)
        self._thread.start()

    def _halt(self) -> None:
        """Have the thread end."""
        self._expect_own_process()
        with self._change:
            self._stop = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join(JOIN)
            if self._thread.is_alive():
                raise DataError(f"a source has not answered for {JOIN:.0f} s")
            self._thread = None
        self._left = False

    def _prepare(self) -> None:
        """Prepare step after step; the thread's function."""
        found: Any = None
        while not isinstance(found, BaseException):
            with self._change:
                self._change.wait_for(lambda: self._stop or len(self._ready) < self._ahead)
            if self._stop:
                if self._left:
                    self._steps.close()
                return
            try:
                found = self._steps.next()
            except BaseException as error:  # noqa: BLE001 - it is raised where batches are asked for
                found = error
            with self._change:
                self._ready.append(found)
                self._change.notify_all()


_alive: weakref.WeakSet[Loader] = weakref.WeakSet()


def let_go() -> None:
    """Have all loaders end their threads and release connections and buffers, without waiting for
    it: else a loader that nobody uses any more would keep them. A loader that is used after all
    goes on where it was."""
    for loader in list(_alive):
        with loader._change:
            loader._stop = loader._left = True
            loader._change.notify_all()


def open_steps(
    plan: Plan | str, whole: TrainingWorld, memory: int = MEMORY
) -> tuple[Steps, tuple[int, ...]]:
    """Return the steps of a plan for a rank of this world, and the rank's shares."""
    if isinstance(plan, str):
        from .service.either import steps_of

        name = plan
        return steps_of(name, whole, lambda: open_steps(_named(name), whole), memory)
    if not isinstance(plan, Plan):
        raise DataError(f"Loader: {plan!r} is no Plan")
    shares = plan.shares(whole.rank, whole.size, whole.original)
    dp, alone = plan.ranks(whole.original).data, whole.size == 1
    return LocalSteps(plan, shares, dp, alone=alone), shares


def _named(name: str) -> Plan:
    from .named import plan_named  # not needed where a data process has it

    return plan_named(name)


def digest_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a digest of the arrays of these rows."""
    made = hashlib.sha256()
    for arrays in rows:
        for name in sorted(arrays):
            array = arrays[name]
            made.update(f"{name} {array.dtype} {array.shape} ".encode())
            made.update(array.tobytes())
    return made.hexdigest()[:32]


def as_tensors(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return arrays as tensors of the same memory, if torch is installed. uint16 and uint32, of
    which torch can do little, become int32 and int64."""
    try:
        import torch
    except ImportError:
        return dict(batch)
    made: dict[str, Any] = {}
    for name, array in batch.items():
        kind = getattr(array, "dtype", None)
        if kind is not None and kind.kind == "u" and kind.itemsize in (2, 4):
            array = array.astype(f"int{16 * kind.itemsize}")
        numeric = kind is not None and kind.kind in "biufc"
        made[name] = torch.from_numpy(array) if numeric else array
    return made
