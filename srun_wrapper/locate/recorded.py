"""The newest collectives of each rank, as torch's flight recorders have them."""

from __future__ import annotations

import msgspec


class RecordedCall(msgspec.Struct, array_like=True, gc=False):
    """One collective as a rank has recorded it."""

    number: int  # of the process group's collectives
    name: str  # such as "nccl:all_reduce"
    items: int  # elements of its inputs
    sizes: str  # of its inputs, to be shown
    kind: str  # data type of its first input
    waited: float  # s since it began; -1: it is done


class RecordedGroup(msgspec.Struct, array_like=True, gc=False):
    """The newest collectives of one backend of a process group in one rank.

    A group may have two, such as gloo and NCCL, and each counts for itself.
    """

    name: str  # the same in all ranks of the group
    backend: str
    description: str
    last: int  # number of the newest collective that was begun
    calls: tuple[RecordedCall, ...]  # the unfinished ones and some before them, by number
    members: int = 0  # number made of its ranks, as torch may reuse a group's name; 0: not known


class Recorded(msgspec.Struct, array_like=True, gc=False):
    """The newest collectives of one rank."""

    rank: int
    groups: tuple[RecordedGroup, ...] = ()
