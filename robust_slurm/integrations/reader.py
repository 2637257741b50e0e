"""A train dataloader that reports each batch before it is read, and can begin within an epoch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from robust_slurm import CheckpointError
from robust_slurm.checkpoint.capture import rng
from robust_slurm.checkpoint.capture.loading.loader_state import LoaderState
from robust_slurm.checkpoint.capture.loading.worker_draws import watch

PERSISTENT = (
    "the train dataset or collate_fn draws random numbers in persistent workers: after a restart "
    "in a later epoch than the first it draws others. Use persistent_workers=False, or a generator "
    "that is seeded by the sample"
)


class Reader:
    """The passes over one dataloader, of which the last may begin where a snapshot left it.

    A loader with ``state_dict`` (torchdata's ``StatefulDataLoader``) is set to its position. Of any
    other, the batches that are done are read once more, with the generators as they were when the
    pass began: same order, same random numbers in worker processes.
    """

    def __init__(self, loader: Any, before: Callable[[Reader], None]) -> None:
        """``before`` is called with this object before each batch is read."""
        self.loader, self._before = loader, before
        self.fetched = 0
        self.taken = 0
        """Batches read in this epoch, in all passes over the loader."""
        self._read, self._passes, self._ended, self._begun = 0, 1, False, 0
        self._rng: dict[str, Any] = {}
        self._first_rng: dict[str, Any] = {}
        self._last: dict[str, Any] | None = None
        self._pending: dict[str, Any] | None = None
        self._cycling = ""
        self._iterator: Iterator[Any] = iter(())
        self._state = LoaderState("loader", loader) if _has_state(loader) else None
        self._draws = None
        if self._state is None and getattr(loader, "persistent_workers", False):
            self._draws = watch(loader)
        self.has_length = False
        with contextlib.suppress(TypeError, NotImplementedError):
            self.has_length = len(loader) >= 0

    def remarks(self) -> list[str]:
        """Return what the user should know of the data; mostly nothing."""
        found = self._state.remarks() if self._state is not None else []
        return [PERSISTENT, *found] if self._draws is not None and self._draws else found

    def position(self, ahead: int) -> dict[str, Any]:
        """Return where to resume, if ``ahead`` of the batches read (0 or 1) are not trained."""
        if not ahead:
            return self._mark()
        assert ahead == 1 and self._last is not None, f"{ahead} batches are read ahead"
        return self._last

    def resume(self, position: dict[str, Any]) -> None:
        """Have the next pass begin there."""
        self._pending = position

    def end_epoch(self) -> None:
        """Begin to count the passes of a new epoch."""
        self._ended = False

    def _mark(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "passes": self._passes, "read": self._read, "taken": self.taken, "begun": self._begun,
            "pass": self._rng, "first": self._first_rng, "rng": rng.states(),
        }  # fmt: skip
        return found if self._state is None else found | {"state": self._state.get()}

    def __iter__(self) -> Reader:
        if self._cycling == "begun":
            self._cycling = ""
        elif self._pending is None:
            if self._ended:  # it is shorter than the others of this epoch
                self._passes += 1
            else:
                self._passes, self.taken = 1, 0
            self._read, self._ended, self._rng = 0, False, rng.states()
            self._begun += 1
            self._iterator = iter(self.loader)
        return self

    def __next__(self) -> Any:
        self._before(self)
        self.go_to_position()
        if self._cycling == "due":
            self._cycling = "begun"
            raise StopIteration
        if not self.has_length:  # Lightning reads one batch ahead
            self._last = self._mark()
        if not self._read:
            self._first_rng = rng.states()
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._ended = True
            raise
        self._read += 1
        self.taken += 1
        self.fetched += 1
        return batch

    def go_to_position(self) -> None:
        """Bring the loader to where ``resume`` has been told to, once."""
        if self._pending is None:
            return
        at, self._pending = self._pending, None
        self._passes, self._rng, self._first_rng = at["passes"], at["pass"], at["first"]
        if self._state is not None:
            self._state.put(at["state"])
            self._iterator = iter(self.loader)
        else:
            if at["begun"] > 1 and getattr(self.loader, "persistent_workers", False):
                iter(self.loader)  # makes the workers, which draws; the pass began with old ones
            rng.restore(self._rng)
            self._iterator = iter(self.loader)
            if at["read"]:
                rng.restore(self._first_rng)
            for done in range(at["read"]):
                if next(self._iterator, self) is self:
                    raise CheckpointError(
                        f"the train dataloader ends after {done} batches, and {at['read']} of this "
                        "epoch were trained when the step was saved. Use the same data, or another "
                        "directory for a training with other data"
                    )
        self._read, self.taken, self._begun = at["read"], at["taken"], at["begun"]
        # The first pass has ended: report it, unless this one is at its end and reports that.
        at_end = self.has_length and self._read >= len(self.loader)
        self._cycling = "due" if self._passes > 1 and not at_end else ""
        rng.restore(at["rng"])


class ReaderOf:
    """Stands in place of a dataloader: all but its iterator is the loader's own."""

    _reader: Reader

    def __init__(self, reader: Reader) -> None:
        object.__setattr__(self, "_reader", reader)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # isinstance() finds the loader's type
        return type(self._reader.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._reader.loader, name, value)

    def __len__(self) -> int:
        return len(self._reader.loader)

    def __iter__(self) -> Reader:
        return iter(self._reader)


def _has_state(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
