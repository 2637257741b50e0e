"""The background copy: live tensors into a slot, at native speed and without the GIL.

One thread of the process makes all copies, and torch starts no others for it: memory is the limit,
and training needs the other cores. ``torch._foreach_copy_`` copies the whole list in one call that
holds no GIL. Tensors on a CUDA device are copied in a stream of their own, behind an event of the
training's stream.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import compress
from operator import attrgetter
from queue import SimpleQueue
from typing import Any

import torch

from robust_slurm.text import counted

from . import gpu
from .expected import Expected
from .form import Form
from .one_thread import use_one_thread
from .slots import Slot

halted = threading.Event()
"""Set after collectives were aborted, while a device may compute wrong values: a copy that ends in
that time is discarded."""
CHUNK = 64 << 20
"""Bytes copied at a time of a tensor that is not contiguous: a device makes them contiguous first,
and may lack the memory to do so with the whole tensor."""
_VERSION = attrgetter("_version")  # for map(): a third less time than a loop in Python
_NBYTES = attrgetter("nbytes")


class TornError(Exception):
    """Tensors changed while they were being copied; ``indices`` of ``Copy.late``."""

    def __init__(self, indices: list[int]) -> None:
        super().__init__(f"{counted(len(indices), 'tensor')} changed while they were copied")
        self.indices = indices


class Copy:
    """One snapshot on its way into a slot."""

    def __init__(
        self,
        step: int,
        slot: Slot,
        form: Form,
        late: list[torch.Tensor],
        early: list[torch.Tensor],
        values: Callable[[], str],
        same: Callable[[], int] = lambda: -1,
        *,
        expected: Expected | None = None,
        at_once: bool = False,
    ) -> None:
        """Begin a copy, in the training thread. ``early`` is copied before this returns (into the
        slot if that fits already); with ``at_once`` everything is. The copy thread calls ``values``
        for the header's JSON and ``same`` for its checksum, before anything may change.
        ``expected``: what the slot must hold of ``late`` when all is copied."""
        self.step, self.slot, self.form = step, slot, form
        self.late = late
        self.at_once = at_once
        self.seconds = 0.0
        """Seconds that the copy took, from when its device could begin it."""
        self.same = -1
        self.error: BaseException | None = None
        """Reason why there is no snapshot: TornError, OSError or another error. Set with done."""
        self._values, self._same = values, same
        self._early: list[torch.Tensor] | None = None
        self._copied = threading.Event()
        self._device = gpu.current()
        self._ready: dict[torch.device, Any] = {}
        """Device → the event behind which it may be copied."""
        self._done: dict[torch.device, Any] = {}
        """Device → the event of its copies; all are there when ``_issued`` is set."""
        self._begun: list[tuple[Any, Any]] = []
        """Two events of each device: the copy was requested, and the device could begin it."""
        self._issued = threading.Event()
        self._checking = threading.Lock()
        self._versions = list(map(_VERSION, late))
        self._torn: list[int] | None = None
        self._sources = late
        self._expected = expected
        if not slot.fits(form):
            if late and self._device is None and not at_once:
                self._early = [t.clone() for t in early]  # the copy thread makes the file
                return
            slot.fit(form)
        devices = gpu.devices_of(early, late)
        _copy(slot.early, early, non_blocking=bool(devices))
        if at_once:
            _copy(slot.late, late, non_blocking=bool(devices))
            gpu.drain(devices)
            self.late = self._sources = []
            return
        # No tensor's memory is given to others meanwhile: ``late`` holds it until all is copied.
        self._ready = {device: gpu.event(gpu.cuda.current_stream(device)) for device in devices}

    @property
    def copied(self) -> bool:
        return self._copied.is_set()

    def wait(self, timeout: float) -> bool:
        """True when all is copied (or has failed): the tensors may change."""
        return self._copied.wait(timeout)

    def before_change(self, timeout: float) -> bool:
        """Wait as ``wait`` does, but let each device's current stream wait for its own copies."""
        if self._copied.is_set():
            return True
        if not self._ready:
            return self._copied.wait(timeout)
        if not self._issued.wait(timeout):
            return False
        self._check()  # now: the change may come before the copy thread sees the end of the copy
        for device, event in self._done.items():
            gpu.cuda.current_stream(device).wait_event(event)
        return True

    def early(self) -> dict[str, torch.Tensor]:
        """Return the tensors that save() itself has copied, by name; none of a copy that failed."""
        if self.error is not None:
            return {}
        names = (self.form.entries[i].name for i in self.form.early)
        return dict(zip(names, self.slot.early, strict=False))

    def moved(self, late: list[torch.Tensor]) -> set[int]:
        """Indices of ``late`` tensors written to since the copy began, as far as torch counts."""
        return set(_written(late, self._versions))

    def run(self) -> None:
        """In the copy thread: everything up to a complete file."""
        start = time.perf_counter()
        try:
            gpu.enter(self._device)
            if self._ready:
                self._issue()
            values, self.same = self._values(), self._same()
            self._fit(values)
            if self._ready:
                self._drain()
            elif self._sources:
                _copy(self.slot.late, self._sources)
            self._check()
            torn = self._torn
            if not torn and self._expected is not None:
                # torch counts no writes through ``.data`` and the like, undone by now or not
                torn = self._expected.unlike(self.slot)
            if torn:
                raise TornError(torn)
            if halted.is_set():
                raise InterruptedError("collectives were aborted")
            self.seconds = time.perf_counter() - start - self._queued()
            self._copied.set()
            self.slot.complete(self.form.header(self.step, values, self.same), self.step)
        except Exception as error:  # noqa: BLE001 - said by who waits; nothing may end the thread
            self.error = error
            with suppress(Exception):
                self._drain()  # the slot's memory and the tensors' are still in use
        self.late = self._sources = []
        self._expected = None
        self._issued.set()
        self._copied.set()

    def _fit(self, values: str) -> None:
        header = self.form.header(self.step, values)
        if len(header) > self.form.plan.header_size:
            if self._early is None:  # move what is in the old file already
                self._early = self.slot.early
            if self._ready or not self._sources:
                self._drain()
                self._sources, self._ready = self.slot.late, {}
            self.form.reserve(len(header))
        if not self.slot.fits(self.form):
            self.slot.fit(self.form)
        if self._early is not None:
            _copy(self.slot.early, self._early)

    def _check(self) -> None:
        # Only the first check counts: after the one in before_change the optimizer changes them.
        with self._checking:
            if self._torn is None:
                self._torn = _written(self.late, self._versions)

    def _issue(self) -> None:
        """Have each device copy what it holds, and copy all else here."""
        to, of = self.slot.late, self.late
        devices = gpu.each_device(of)
        for device, ready in self._ready.items():
            own = gpu.stream(device)
            asked = gpu.event(own, timed=True)
            own.wait_event(ready)
            self._begun.append((asked, gpu.event(own, timed=True)))
            with gpu.cuda.stream(own):
                try:
                    here = [each == device for each in devices]
                    _copy([*compress(to, here)], [*compress(of, here)], non_blocking=True)
                finally:
                    self._done[device] = gpu.event(own)
        here = [each is None for each in devices]
        _copy([*compress(to, here)], [*compress(of, here)])
        self._issued.set()

    def _queued(self) -> float:
        """Seconds that the copies waited for what the training had queued before save()."""
        return min((one.elapsed_time(other) for one, other in self._begun), default=0.0) / 1000

    def _drain(self) -> None:
        for event in self._done.values():
            event.synchronize()


def _written(tensors: list[torch.Tensor], versions: list[int]) -> list[int]:
    """Indices of the tensors that no longer have these versions, ascending."""
    now = list(map(_VERSION, tensors[: len(versions)]))
    if now == versions:
        return []
    return [i for i, (one, was) in enumerate(zip(now, versions, strict=False)) if one != was]


def _copy(to: list[torch.Tensor], of: list[torch.Tensor], *, non_blocking: bool = False) -> None:
    """Copy each tensor; ``non_blocking``: only queue the copies of tensors on a device."""
    if non_blocking and max(map(_NBYTES, of), default=0) > CHUNK:
        pairs = [each for pair in zip(to, of, strict=True) for each in pieces(*pair)]
        to, of = [one for one, _ in pairs], [other for _, other in pairs]
    if not to:
        return
    with torch.no_grad():
        torch._foreach_copy_(to, of, non_blocking=non_blocking)


def pieces(to: torch.Tensor, of: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield both in pieces that need no temporary memory over CHUNK; ``to`` is contiguous. Pure."""
    if of.nbytes <= CHUNK or of.is_contiguous():
        yield to, of
        return
    rows = CHUNK * len(of) // of.nbytes
    if rows:
        yield from zip(torch.split(to, rows), torch.split(of, rows), strict=True)
        return
    for pair in zip(to, of, strict=True):
        yield from pieces(*pair)


class Copier:
    """The copy thread, a daemon: a caller that must not lose a copy waits for it."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="robust-copy", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """``job`` must not raise."""
        self._jobs.put(job)

    def close(self, timeout: float) -> None:
        self._jobs.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        use_one_thread()
        while (job := self._jobs.get()) is not None:
            job()
            del job  # or the tensors of the last step live until the next
