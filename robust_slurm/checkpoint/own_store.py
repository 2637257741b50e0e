"""Outside robust-srun: a store inside the training process, for the sake of the durable tier."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from .durable_files import NEWER
from .events import Alarm, Committed, Event, Persisted
from .store import Store

_PREFIX = f"robust-ckpt-{os.getuid()}-"
_LOCK = "lock"


class OwnStore:
    """A Store with a directory of its own in shared memory, which goes when this one is closed."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """``say`` gets every trouble as text, in any thread. Raises OSError."""
        self._say = say
        self._newest = -1  # step that is committed
        base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
        _remove_stale(base)
        self.directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        self._lock = _lock(self.directory, os.O_CREAT | os.O_EXCL)
        try:
            self._store = Store(self.directory, name="own", key=None, emit=self._emit)
        except OSError:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise
        self.socket = str(self._store.socket_path)

    def close(self) -> None:
        self._store.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)

    def _emit(self, event: Event) -> None:
        if isinstance(event, Alarm):
            self._say(event.text)
        if not isinstance(event, (Persisted, Committed)):
            return
        if event.ok:
            if isinstance(event, Committed):
                self._newest = max(self._newest, event.step)
        elif event.why.startswith("passed over"):
            self._say(f"not all steps go to the checkpoint directory: {event.why}")  # once
        elif event.step > self._newest and event.why != NEWER:  # whose own word may come later
            self._say(f"step {event.step} is not in the checkpoint directory: {event.why}")


def _remove_stale(base: Path) -> None:
    """What processes left that were killed: nobody holds its lock any more."""
    for directory in base.glob(f"{_PREFIX}*"):
        held = _lock(directory, 0)
        if held is not None:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(held)


def _lock(directory: Path, create: int) -> int | None:
    try:
        if directory.lstat().st_uid != os.getuid():
            return None
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(directory / _LOCK, flags | create, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd
