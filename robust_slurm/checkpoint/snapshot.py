"""The background copy: live tensors into a slot, at native speed and without the GIL.

One thread of the process does it, with one thread of its own (memory is the limit, not cores, and
training needs the others). ``torch._foreach_copy_`` copies the whole list in one call that holds
no GIL. CUDA tensors go on a stream of their own into registered memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from queue import SimpleQueue
from typing import Any

import torch

from .one_thread import use_one_thread
from .slots import Form, Slot, cuda


class TornError(Exception):
    """Tensors changed while they were being copied; ``indices`` of ``Copy.late``."""

    def __init__(self, indices: list[int]) -> None:
        super().__init__(f"{len(indices)} tensors changed while they were copied")
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
        at_once: bool = False,
    ) -> None:
        """Call it in the training thread: ``early`` is copied before it returns (into the slot if
        that fits already), and with ``at_once`` all else too. ``values`` gives the JSON for the
        header, later, in the copy thread, and ``same`` the checksum for it, before anything may
        change."""
        self.step, self.slot, self.form = step, slot, form
        self.late = late
        self.at_once = at_once
        self.seconds = 0.0
        self.same = -1
        self.error: BaseException | None = None
        """Why there is no snapshot; TornError, OSError or whatever went wrong. Set with done."""
        self._values, self._same = values, same
        self._early: list[torch.Tensor] | None = None
        self._copied = threading.Event()
        self._on_device: list[tuple[torch.device, Any]] = []  # and the event of its copies
        self._versions = [t._version for t in late]
        self._torn: list[int] | None = None
        self._sources = late
        on_gpu = cuda.is_initialized()
        if not slot.fits(form):
            if late and not on_gpu and not at_once:
                self._early = [t.clone() for t in early]  # the copy thread makes the file
                return
            slot.fit(form)
        _copy(slot.early, early, non_blocking=slot.pinned and not at_once)
        if at_once:
            _copy(slot.late, late)
            self.late = self._sources = []
            self._versions = []
        elif slot.pinned:
            self._begin_on_device({t.device for t in early} | {t.device for t in late})
        elif on_gpu:  # it would not be registered
            _copy(slot.late, late)
            self._sources = []

    @property
    def copied(self) -> bool:
        return self._copied.is_set()

    def wait(self, timeout: float) -> bool:
        """True when all is copied (or has failed): the tensors may change."""
        return self._copied.wait(timeout)

    def before_change(self, timeout: float) -> bool:
        """Wait as ``wait`` does; where a device copies, let its current stream wait instead."""
        if self._copied.is_set():
            return True
        if not self._on_device or any(t.device.type != "cuda" for t in self.late):
            return self._copied.wait(timeout)
        self._check()  # the change comes before the copy is seen to be over
        for device, event in self._on_device:
            cuda.current_stream(device).wait_event(event)
        return True

    def moved(self, late: list[torch.Tensor]) -> set[int]:
        """Which of ``late`` were written to since the copy began, as far as torch counts it."""
        return {i for i, v in enumerate(self._versions) if late[i]._version != v}

    def run(self) -> None:
        """In the copy thread: everything up to a complete file."""
        start = time.perf_counter()
        try:
            values, self.same = self._values(), self._same()
            self._fit(values)
            if self._on_device:
                self._end_on_device()
                pairs = zip(self.slot.late, self.late, strict=True)
                rest = [(to, of) for to, of in pairs if of.device.type != "cuda"]
                _copy([to for to, _ in rest], [of for _, of in rest])
            elif self._sources:
                _copy(self.slot.late, self._sources)
            self._check()
            if self._torn:
                raise TornError(self._torn)
            self.seconds = time.perf_counter() - start
            self._copied.set()
            self.slot.complete(self.form.header(self.step, values, self.same), self.step)
        except Exception as error:  # noqa: BLE001 - said by who waits; nothing may end the thread
            self.error = error
        self.late = self._sources = []
        self._copied.set()

    def _fit(self, values: str) -> None:
        header = self.form.header(self.step, values)
        if len(header) > self.form.plan.header_size:
            if self._early is None:  # move what is in the old file already
                self._early = self.slot.early
            if self._on_device or not self._sources:
                self._end_on_device()
                self._sources, self._on_device = self.slot.late, []
            self.form.reserve(len(header))
        if not self.slot.fits(self.form):
            self.slot.fit(self.form)
        if self._early is not None:
            _copy(self.slot.early, self._early)

    def _check(self) -> None:
        if self._torn is None:
            now = [t._version for t in self.late]
            self._torn = [i for i, v in enumerate(now) if v != self._versions[i]]

    def _begin_on_device(self, devices: Collection[torch.device]) -> None:
        """Start the copies of each device behind what its current stream has been given."""
        for device in devices:
            if device.type != "cuda":
                continue
            pairs = zip(self.slot.late, self.late, strict=True)
            of_device = [(to, of) for to, of in pairs if of.device == device]
            own = _stream(device)
            own.wait_stream(cuda.current_stream(device))
            with cuda.stream(own):
                _copy([to for to, _ in of_device], [of for _, of in of_device], non_blocking=True)
                for _, of in of_device:
                    of.record_stream(own)  # its memory is not given to others before
                event = cuda.Event()
                event.record(own)
            self._on_device.append((device, event))

    def _end_on_device(self) -> None:
        for _, event in self._on_device:
            event.synchronize()


def _copy(to: list[torch.Tensor], of: list[torch.Tensor], *, non_blocking: bool = False) -> None:
    if not to:
        return
    with torch.no_grad():
        torch._foreach_copy_(to, of, non_blocking=non_blocking)


_streams: dict[torch.device, Any] = {}


def _stream(device: torch.device) -> Any:
    if device not in _streams:
        _streams[device] = cuda.Stream(device)
    return _streams[device]


class Copier:
    """The copy thread. A daemon: who must not lose a copy waits for it."""

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
