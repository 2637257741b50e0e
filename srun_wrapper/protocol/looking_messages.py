"""The processes below a slot as the node agent saw them: their roles, states and stacks; and the
machine that they run on.

All text comes from the user's programs. The node agent cleans and bounds it, see
``agent/looking/bounds.py``.
"""

from __future__ import annotations

import msgspec

RANK = "rank"
LAUNCHER = "launcher"  # such as torchrun, whose children are the ranks
LOADER = "loader"  # a worker of torch's DataLoader
OTHER = "other"
ROLES = (RANK, LAUNCHER, LOADER, OTHER)


class WorkCounters(msgspec.Struct, array_like=True, gc=False):
    """The sums of the counters of a slot's processes, which only grow."""

    cpu: float  # s, of all processes but ranks that have a GPU open
    io: int  # bytes read and written through system calls
    sockets: int  # bytes that their open TCP connections have carried; -1: not known
    faults: int  # page faults: memory that is mapped, as a mapped file that is written
    processes: int  # a number made of their pids


class ThreadStack(msgspec.Struct, array_like=True, gc=False):
    """The Python frames of one thread, the innermost first, each "function (file:line)"."""

    thread: str
    frames: tuple[str, ...]


class Look(msgspec.Struct, array_like=True, gc=False):
    """One process below a slot."""

    pid: int
    role: str
    state: str  # as in /proc/PID/stat
    rank: int = -1  # RANK of its environment
    local: int = -1  # LOCAL_RANK of its environment
    stacks: tuple[ThreadStack, ...] = ()  # the main thread first
    failed: str = ""  # why there are no stacks
    mount: str = ""  # the file system for which it waits in a system call; quick looks only
    device: str = ""  # the device of this node for which it waits in state D; not in quick looks
    kernel: str = ""  # the file for which it waits in state D, or its killed children; likewise

    def main(self) -> tuple[str, ...]:
        """Return the frames of the main thread; () if they are not known."""
        return self.stacks[0].frames if self.stacks else ()


THROTTLED = "CPU throttle events"
SWAPPED = "pages read from swap"
STOLEN = "CPU ticks taken by the hypervisor"


class Machine(msgspec.Struct, array_like=True):
    """A node's hardware and load, as far as every user may read it."""

    hot: tuple[str, ...] = ()  # sensors at their limit, in words
    below: tuple[str, ...] = ()  # PCIe links that have fallen below what the device can do
    links: dict[str, float] = msgspec.field(default_factory=dict)  # rates of network links, Gb/s
    counts: dict[str, int] = msgspec.field(default_factory=dict)  # that only grow
    load: dict[str, float] = msgspec.field(default_factory=dict)  # % of the last 10 s lost waiting
    first_links: dict[str, float] = msgspec.field(default_factory=dict)  # when the agent began
