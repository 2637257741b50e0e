"""A store inside the training process, which serves the durable tier outside robust-srun."""

from __future__ import annotations

import os
from collections.abc import Callable

from ...memory_dir import MemoryDir
from ..durable.files import NEWER
from .events import AlarmEvent, CommittedEvent, PersistedEvent, StoreEvent
from .store import Store


class OwnStore:
    """A Store with a directory of its own in shared memory, which goes when this one is closed."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """``say`` is called with every problem as text, in any thread. Raises OSError."""
        self._say = say
        self._newest = -1  # step that is committed
        self._memory = MemoryDir(f"ckpt-{os.getuid()}")
        self.directory = self._memory.path
        try:
            self._store = Store(self.directory, name="own", key=None, emit=self._emit)
        except OSError:
            self._memory.close()
            raise
        self.socket = str(self._store.socket_path)

    def close(self) -> None:
        self._store.close()
        self._memory.close()

    def _emit(self, event: StoreEvent) -> None:
        if isinstance(event, AlarmEvent):
            self._say(event.text)
        if not isinstance(event, (PersistedEvent, CommittedEvent)):
            return
        if event.ok:
            if isinstance(event, CommittedEvent):
                self._newest = max(self._newest, event.step)
        elif event.why.startswith("passed over"):
            self._say(f"not all steps go to the checkpoint directory: {event.why}")  # once
        elif event.step > self._newest and event.why != NEWER:  # its commit may come later
            self._say(f"step {event.step} is not in the checkpoint directory: {event.why}")
