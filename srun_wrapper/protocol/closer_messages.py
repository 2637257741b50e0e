"""A closer look at ranks that make no step: torch's flight recorders, native stacks, the kernel.

All text comes from the user's programs. robust-task cleans and bounds it.
"""

from __future__ import annotations

import msgspec

from srun_wrapper.locate.recorded import Recorded
from srun_wrapper.protocol.base import Message, Reply


class LookCloser(Message):
    """Order: read the flight recorders of all ranks, or look closer at these processes."""

    token: int
    pids: tuple[int, ...] = ()  # (): the recorders


class Closer(msgspec.Struct, array_like=True, gc=False):
    """One process, by the kernel and by its native stack."""

    pid: int
    name: str
    kernel: str  # such as "state D in nfs_wait_bit_killable, read of /data/x"
    native: tuple[str, ...] = ()  # frames of its main thread, the innermost first
    failed: str = ""  # why there is no native stack
    python: bool = True


class LookedCloser(Reply):
    """A slot's answer to LookCloser."""

    local: int
    recorded: tuple[Recorded, ...] = ()
    processes: tuple[Closer, ...] = ()
