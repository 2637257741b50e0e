"""Slot files: where a rank's snapshots lie, each one a whole file mapped into memory.

A slot is invalid (first eight bytes zero) from before its first byte is overwritten until it is
complete. Three slots take turns; a slot that is held (being written to the durable tier) is left
alone, and a fourth is made for that time.
"""

from __future__ import annotations

import mmap
import os
import stat
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from ..format import dtypes
from ..format.advice import populate
from ..format.layout import SUFFIX, FileLayout
from ..format.sizes import megabytes
from . import gpu
from .form import Form
from .sample import TensorSample

SPARE = 2 << 20
"""Bytes that may be cut off a reserved file, besides an eighth of its final size."""
OWN = 3  # ranks are up to a step apart and copies take time: 2 could leave no common step


class Slot:
    """One slot file."""

    def __init__(self, path: Path, index: int) -> None:
        self.path, self.index = path, index
        self.step: int | None = None
        """Step of the complete snapshot in it; None while it is invalid."""
        self.plan: FileLayout | None = None
        self.late: list[torch.Tensor] = []
        self.early: list[torch.Tensor] = []
        """Views of the file, in the order of Form.late and Form.early."""
        self.sample: TensorSample | None = None
        """Sample of ``late``, made when the last copy into the slot needed it."""
        self.unpinned = ""
        """Reason why CUDA could not register its memory, and the cost of that."""
        self._form: Form | None = None
        self._map: mmap.mmap | None = None
        self._size = 0  # of the file
        self._ahead = False  # made before a form was known
        self._on_unmap: Callable[[], None] | None = None

    def invalidate(self) -> None:
        self.step = None
        if self._map is not None:
            self._map[:8] = bytes(8)

    def fits(self, form: Form) -> bool:
        return self._form is form and self.plan is form.plan

    def reserve(self, size: int) -> None:
        """Make and map a file of about ``size`` bytes before the form is known; an existing file
        keeps its size. The slot is invalid afterwards. Raises OSError: no room."""
        self.step = None
        if self._map is None:
            found = 0
            with suppress(FileNotFoundError):
                found = self.path.lstat().st_size
            self._open(found or size)
            self._ahead = not found  # an earlier process's file may have readers: never cut it

    def fit(self, form: Form) -> None:
        """Make the file fit ``form``; the slot is invalid afterwards. Raises OSError: no room."""
        self.step = None
        size = form.plan.size
        if self._map is None or (self._size != size and not self._shorten(size)):
            self._open(size)
        assert self._map is not None
        self.invalidate()
        views = [
            dtypes.view(self._map, at, entry)
            for at, entry in zip(form.offsets, form.entries, strict=True)
        ]
        self.late = [views[i] for i in form.late]
        self.early = [views[i] for i in form.early]
        self.sample = None
        self._form, self.plan = form, form.plan

    def complete(self, header: bytes, step: int) -> None:
        """Write the header, its length last: from here on the file is a snapshot."""
        assert self._map is not None and self.plan is not None
        room = self.plan.header_size
        self._map[8 : 8 + room] = header.ljust(room)
        self._map[:8] = room.to_bytes(8, "little")
        self.step = step

    def release(self) -> None:
        """Unmap; the file stays."""
        if self._on_unmap is not None:
            self._on_unmap()
        self.late, self.early, self.plan, self._form = [], [], None, None
        self.sample = None
        self._map, self._on_unmap, self.unpinned = None, None, ""  # unmapped with its last view
        self._size, self._ahead = 0, False

    def remove(self) -> None:
        self.release()
        self.step = None
        self.path.unlink(missing_ok=True)

    def _shorten(self, size: int) -> bool:
        """Cut a file that was reserved to ``size`` bytes; False if it is too short or far too long.

        Nobody has read the file. The mapping stays, with unused memory after the new end: a new
        mapping would have to be registered with CUDA again."""
        ahead, self._ahead = self._ahead, False
        if not ahead or not size <= self._size <= size * 9 // 8 + SPARE:
            return False
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False  # the store removed it
        try:
            os.ftruncate(fd, size)
        finally:
            os.close(fd)
        self._size = size
        return True

    def _open(self, size: int) -> None:
        """Map a file of ``size`` bytes, all of them there, so that no write can end in SIGBUS."""
        self.release()
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = -1
        try:
            fd = os.open(self.path, flags)
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
                raise PermissionError(f"{self.path} is not this user's file")
            if about.st_size == size and about.st_nlink == 1:
                os.pwrite(fd, bytes(8), 0)
            else:
                # A new file, not a new size: a process that reads the old file keeps it.
                os.close(fd)
                fd = -1
                self.path.unlink()
        except FileNotFoundError:
            pass
        try:
            if fd < 0:
                fd = os.open(self.path, flags | os.O_CREAT | os.O_EXCL, 0o600)
            with gpu.nearby():
                os.posix_fallocate(fd, 0, size)
            mapped = mmap.mmap(fd, size)
        except OSError:
            self.path.unlink(missing_ok=True)
            raise
        finally:
            if fd >= 0:
                os.close(fd)
        mapped.madvise(mmap.MADV_DONTFORK)  # data loader workers do not need it
        populate(mapped, 0, size)
        self._map, self._size = mapped, size
        if gpu.current() is not None:
            self._pin(torch.frombuffer(mapped, dtype=torch.uint8).data_ptr(), size)

    def _pin(self, address: int, size: int) -> None:
        self._on_unmap, why = gpu.register(address, size)
        if why:
            self.unpinned = (
                f"CUDA cannot register {megabytes(size)} of {self.path.parent} ({why}): copies from"
                " the GPU are several times slower, and optimizer steps wait for them. Snapshots "
                "are complete nevertheless"
            )


class Ring:
    """The slots of one rank in one directory."""

    def __init__(
        self,
        directory: Path,
        rank: int,
        complete: Mapping[int, int],
        *,
        own: int = OWN,
        extra: int = 1,
    ) -> None:
        """``complete``: slot → step, of snapshots that an earlier process left. ``own``: slots
        that take turns; ``extra``: more of them while some are held."""
        self.directory, self.rank, self.own, self._extra = directory, rank, own, extra
        self.slots: list[Slot] = []
        self._lock = threading.Lock()  # the copy thread prepares what the training thread takes
        for index in range(min(max(complete, default=-1), OWN) + 1):
            slot = self._add()
            slot.step = complete.get(index)

    def limit(self, own: int, extra: int) -> None:
        """Use no more slots than this from now on."""
        with self._lock:
            self.own, self._extra = own, extra

    def take(self, held: Collection[int], everywhere: int = -1) -> Slot | None:
        """Return the slot to overwrite next, already invalid; None if all candidates are held.

        Empty slots come first, then the one with the oldest step. Of three slots, two complete ones
        are left alone. Of two, the newest step that all ranks have is left alone: ``everywhere`` is
        the newest such step.
        """
        with self._lock:
            self._shed(held, everywhere)
            slot = self._next(held, everywhere)
            if slot is not None:
                slot.invalidate()
            return slot

    def prepare(self, form: Form, held: Collection[int]) -> None:
        """Make the file of the slot that ``take`` would return now fit ``form``, ahead of time."""
        with self._lock:
            slot = self._ahead(held)
            if slot is not None and not slot.fits(form):
                slot.fit(form)

    def reserve(self, size: int, held: Collection[int]) -> None:
        """Make and map the file of the slot that ``take`` would return now, for a snapshot of about
        ``size`` bytes. Raises OSError: no room."""
        with self._lock:
            slot = self._ahead(held)
            if slot is not None:
                slot.reserve(size)

    def _ahead(self, held: Collection[int]) -> Slot | None:
        if len(self.slots) >= self.own and self.own < OWN:
            return None  # its snapshot may be needed until take() is called
        return self._next(held, -1)

    def abandon(self, step: int) -> None:
        """Invalidate snapshots of steps after ``step``: their timeline was given up."""
        with self._lock:
            for slot in self.slots:
                if slot.step is not None and slot.step > step:
                    slot.step = None
                    try:
                        with slot.path.open("r+b") as file:
                            file.write(bytes(8))
                    except OSError:
                        pass  # the store removed it

    def spoil(self, slot: Slot) -> None:
        """Invalidate a slot whose contents turned out to be wrong."""
        with self._lock:
            slot.invalidate()

    def remove(self) -> None:
        with self._lock:
            for slot in self.slots:
                slot.remove()

    def release(self) -> None:
        with self._lock:
            for slot in self.slots:
                slot.release()

    def _shed(self, held: Collection[int], everywhere: int) -> None:
        """Remove the files of slots beyond the limit: the last ones, when nobody needs them."""
        while len(self.slots) > self.own + self._extra:
            last, newest = self.slots[-1], self._newest(everywhere)
            if last.index in held or last is newest:
                return
            self.slots.pop().remove()

    def _newest(self, everywhere: int) -> Slot | None:
        there = [s for s in self.slots if s.step is not None and s.step <= everywhere]
        return max(there, key=lambda s: s.step or 0, default=None)

    def _next(self, held: Collection[int], everywhere: int) -> Slot | None:
        free = [s for s in self.slots if s.index not in held]
        if sum(s.step is not None for s in self.slots) >= self.own + self._extra:
            free = [s for s in free if s.step is not None]  # no more files than there is room for
        if self.own == 2:
            kept = self._newest(everywhere)
            free = [s for s in free if s is not kept]
        oldest = min(free, key=lambda s: -1 if s.step is None else s.step, default=None)
        if oldest is not None and oldest.step is None:
            return oldest
        few = len(free) < (1 if self.own == 2 else self.own) or len(self.slots) < self.own
        if few and len(self.slots) < self.own + self._extra:
            return self._add()
        if self.own < OWN:
            return oldest
        # With fewer than two others, this would overwrite a step that other ranks may still need.
        return oldest if len(free) >= self.own - 1 else None

    def _add(self) -> Slot:
        index = len(self.slots)
        self.slots.append(Slot(self.directory / f"own-{self.rank}-{index}{SUFFIX}", index))
        return self.slots[-1]


def map_file(path: Path, plan: FileLayout) -> dict[str, torch.Tensor]:
    """Map a snapshot file. Return its tensors by name: views of the file, not to be written to.

    Raises OSError.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size != plan.size:
            raise OSError(f"{path} is no longer {plan.size} bytes long")
        mapped = mmap.mmap(fd, plan.size, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    # Not populated: each fault maps several pages around it, which is quicker than one call here.
    return {
        entry.name: dtypes.view(mapped, at, entry)
        for entry, at in zip(plan.entries, plan.offsets, strict=True)
    }
