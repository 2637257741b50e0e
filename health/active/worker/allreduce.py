"""One rank's part in a group that tests all-reduce and all-to-all. Imports torch.

Numbers are whole, so that a sum is exact in any order: every result is compared bit by bit with
what it must be.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from health.active.worker.device import MOST_WRONG, WorkerDevice, integers, raw
from health.active.worker.sealed import Sealed

PROBE = 1 << 20  # bytes of the first all-reduces, by which the others are planned
PROBES = 2
LEAST, MOST = 3, 1000  # timed all-reduces
BLOCK = 65521  # numbers, then the same again: prime, so that pieces of a message are not equal
LARGEST = 1000  # of the numbers
MOST_ALL_TO_ALL = 4 << 20  # bytes
_NUMBER = 4  # bytes: fp32


class GroupMember(NamedTuple):
    """A rank, and where it meets the others; ``store`` is used by no other thread."""

    rank: int
    world: int
    device: WorkerDevice
    store: Store


class Work(NamedTuple):
    """Messages of ``size`` bytes (fewer where ``seconds`` would not do); ``limit``: of a wait."""

    size: int
    seconds: float
    seed: int
    limit: float


class Timed(NamedTuple):
    """Bytes of a message, and the seconds of each all-reduce."""

    size: int
    took: tuple[float, ...]


@dataclass(slots=True)
class AllreduceProgress:
    """The parts of a hanging rank that another thread needs. ``wrong``: a line for each result."""

    wrong: list[str] = field(default_factory=list)
    group: Any = None

    def abort(self) -> None:
        """Abort NCCL's group so that the GPU becomes free (torch 2.6; before, it stays busy)."""
        if abort := getattr(self.group, "abort", None):
            abort()


def take_part(member: GroupMember, work: Work, progress: AllreduceProgress) -> Timed:
    """Join, warm up, measure. Raises what torch does if the group cannot be formed or breaks."""
    group = progress.group = _group(member, work.limit)
    try:
        return _Rank(member, work, group, progress.wrong).run()
    finally:
        # The name of it changed in torch 2.6; gloo had none before.
        if end := getattr(group, "shutdown", None) or getattr(group, "_shutdown", None):
            end()


def _group(member: GroupMember, limit: float) -> Any:
    """Make a backend as torch.distributed does, but not the process's default one."""
    wait = timedelta(seconds=limit)
    inner = member.store
    if member.device.cuda and isinstance(inner, Sealed):
        inner = inner.hidden()
    store = PrefixStore("group", inner)
    if not member.device.cuda:
        return dist.ProcessGroupGloo(store, member.rank, member.world, wait)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = wait
    return dist.ProcessGroupNCCL(store, member.rank, member.world, options)


class _Rank:
    def __init__(self, member: GroupMember, work: Work, group: Any, wrong: list[str]) -> None:
        self._member = member
        self._work = work
        self._group = group
        self._wrong = wrong

    def run(self) -> Timed:
        probe = self._reduce("probe", PROBE // _NUMBER, PROBES)
        count, times = self._plan(probe[-1])
        took = self._reduce("all-reduce", count, times)
        self._all_to_all(min(count, MOST_ALL_TO_ALL // _NUMBER))
        return Timed(count * _NUMBER, tuple(took))

    def _plan(self, probe: float) -> tuple[int, int]:
        """Numbers in a message and how often, by what rank 0 saw: all must do the same."""
        rank, store, work = self._member.rank, self._member.store, self._work
        if rank == 0:
            # At least LEAST messages have to fit, however slow the way is.
            fits = int(PROBE * work.seconds / (LEAST * probe))
            size = max(PROBE, min(work.size, fits))
            times = int(work.seconds / (probe * size / PROBE))
            plan = [size // _NUMBER, max(LEAST, min(MOST, times))]
            store.set("plan", json.dumps(plan))
            return plan[0], plan[1]
        store.wait(["plan"], timedelta(seconds=work.limit))
        count, times = json.loads(store.get("plan"))
        return int(count), int(times)

    def _reduce(self, what: str, count: int, times: int) -> list[float]:
        """Seconds of each all-reduce; all of them are checked."""
        device = self._member.device
        own = self._numbers(self._member.rank, count)
        must = own.clone()
        for rank in range(self._member.world):
            if rank != self._member.rank:
                must += self._numbers(rank, count)
        got = torch.empty_like(own)
        took: list[float] = []
        for number in range(times):
            got.copy_(own)
            self._barrier()
            took.append(device.timed(lambda: self._group.allreduce([got]).wait()))
            self._check(f"{what} {number + 1}", got, must)
        return took

    def _barrier(self) -> None:
        self._group.allreduce([torch.zeros(1, device=self._member.device.torch)]).wait()
        self._member.device.synchronize()

    def _all_to_all(self, count: int) -> None:
        """Exchange a piece between each two ranks, once; Gloo, which cannot, gathers them all."""
        world, rank = self._member.world, self._member.rank
        piece = max(1, count // world)
        if self._member.device.cuda:
            own = self._numbers(rank, piece * world)
            got = torch.empty_like(own)
            self._group.alltoall_base(got, own, [], []).wait()
            self._member.device.synchronize()
            mine = slice(rank * piece, (rank + 1) * piece)
            must = [self._numbers(each, piece * world)[mine].clone() for each in range(world)]
            self._check("all-to-all", got, torch.cat(must))
        else:
            given = [self._numbers(each, piece) for each in range(world)]
            parts = [torch.empty_like(one) for one in given]
            self._group.allgather([parts], [given[rank]]).wait()
            self._check("all-gather", torch.cat(parts), torch.cat(given))

    def _numbers(self, rank: int, count: int) -> torch.Tensor:
        """The numbers that a rank contributes; every rank can compute them for every other."""
        at = self._member.device.torch
        block = integers(self._work.seed * 1009 + rank, min(count, BLOCK), LARGEST, at)
        return block.to(torch.float32).repeat(-(-count // len(block)))[:count].contiguous()

    def _check(self, what: str, got: torch.Tensor, must: torch.Tensor) -> None:
        if torch.equal(raw(got), raw(must)) or len(self._wrong) >= MOST_WRONG:
            return
        places = (raw(got) != raw(must)).nonzero().flatten()
        at = int(places[0])
        self._wrong.append(
            f"{what}: rank {self._member.rank} of {self._member.world} "
            f"({self._member.device.name}) got {got[at].item()!r} at {at} where the sum or part is "
            f"{must[at].item()!r}; {len(places)} of {len(got)} numbers are wrong"
        )
