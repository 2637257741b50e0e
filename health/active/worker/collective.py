"""All-reduce and all-to-all, between nodes or a node's own devices: speed and results.

Imports torch. A rank is a device, in a thread of its own, with a process group made for this test
only: so a group that hangs takes no other test with it, and "local" needs no other process.
Bandwidth is as nccl-tests define it (doc/PERFORMANCE.md there): algbw = bytes / seconds, busbw =
algbw * 2(n-1)/n for an all-reduce of n ranks.
"""

from __future__ import annotations

import json
import queue
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    HashStore,
    Store,
    TCPStore,
)

from health.active.worker.allreduce import AllreduceProgress, GroupMember, Timed, Work, take_part
from health.active.worker.device import MOST_WRONG, WorkerDevice, failed
from health.active.worker.sealed import Sealed
from health.active_tests import Measured

# A coordinator waits at least 2 * seconds + 10 for an answer (meeting.patience): ours comes before.
SPARE_S = 8.0
EARLIER_S = 2.0
LAST_S = 2.0  # for the other ranks when one has failed
BYTES = {"nccl": 64 << 20, "gloo": 4 << 20}  # of a message between a node's own devices


class Failed(Exception):
    """The test could not be run to its end; the text says what was waited for, and how long."""


def backend(devices: Sequence[WorkerDevice]) -> str:
    """The torch.distributed backend for these devices."""
    return "nccl" if devices[0].cuda else "gloo"


def limit(seconds: float, wait: float = 0.0) -> float:
    """Return the seconds that a test of ``seconds`` may take in all.

    ``wait``: seconds that the coordinator waits for the answer.
    """
    return max(2 * seconds + SPARE_S, wait - EARLIER_S)


def listen(host: str) -> TCPStore:
    """A store for the next pair, on a port that is free. RuntimeError where none is."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False)


def local(
    devices: Sequence[WorkerDevice], seconds: float, seed: int, wait: float = 0.0
) -> list[Measured]:
    """Test between all devices of this node; without a GPU, between two ranks on the CPU."""
    chosen = list(devices) if devices[0].cuda else [devices[0]] * 2
    answer = Measured("local", "", model=devices[0].model)
    work = Work(BYTES[backend(chosen)], seconds, seed, limit(seconds, wait))
    store = HashStore()
    begin = time.monotonic()
    ranks = Ranks(list(enumerate(chosen)), len(chosen), lambda: store)
    answer = _together(ranks, work, answer)
    return [answer._replace(seconds=round(time.monotonic() - begin, 3))]


def pair(
    devices: Sequence[WorkerDevice], task: Mapping[str, Any], own: TCPStore | None
) -> list[Measured]:
    """This node's side of an all-reduce over all devices of ``world`` nodes.

    ``task`` as in the protocol of the worker; ``own``: the store of rank 0, from ``listen``.
    """
    peers = tuple(str(name) for name in task["peers"])
    answer = Measured(str(task["test"]), "", model=devices[0].model, peers=peers)
    begin = time.monotonic()
    try:
        answer = _Side(devices, task, peers, own, begin).run(answer)
    except Exception as err:  # noqa: BLE001 - whatever it is, it is this test's answer
        answer = _with(answer, err)
    return [answer._replace(seconds=round(time.monotonic() - begin, 3))]


def _with(answer: Measured, err: Exception) -> Measured:
    wrong, error = failed(err)
    if isinstance(err, Failed):
        error = str(err)
    return answer._replace(wrong=(answer.wrong + wrong)[:MOST_WRONG], error=answer.error or error)


class Ranks(NamedTuple):
    """The ranks that are here, with their devices; ``meet`` gives each a store of its own."""

    here: Sequence[tuple[int, WorkerDevice]]
    world: int
    meet: Callable[[], Store]


class _Side:
    """One node of a pair: meets the others at the store, then takes part."""

    def __init__(
        self,
        devices: Sequence[WorkerDevice],
        task: Mapping[str, Any],
        peers: Sequence[str],
        own: TCPStore | None,
        begin: float,
    ) -> None:
        self._devices = devices
        self._peers = peers
        self._rank, self._world = int(task["rank"]), int(task["world"])
        seconds = float(task["seconds"])
        self._work = Work(int(task["bytes"]), seconds, int(task["seed"]), limit(seconds))
        self._host, self._port = str(task["host"]), int(task["port"])
        self._secret = bytes.fromhex(str(task["secret"]))
        self._wait = limit(seconds) / 2  # for the others to come
        self._until = begin + limit(seconds)
        if not 0 <= self._rank < self._world == len(peers):
            raise Failed(f"rank {self._rank} of {self._world} does not fit {len(peers)} nodes")
        if (self._rank == 0) != (own is not None):
            raise Failed("rank 0, and no other rank, must be asked to listen first")
        self._own = own  # kept: the server ends with it
        self._store = Sealed(own, self._secret) if own else self._connect()

    def _connect(self) -> Store:
        wait = timedelta(seconds=self._wait / 2)  # torch tries twice
        try:
            store = TCPStore(
                self._host, self._port, is_master=False, wait_for_workers=False, timeout=wait
            )
            return Sealed(store, self._secret)
        except DistError as err:
            raise Failed(
                f"peer {self._peers[0]}, which listens at {self._host} port {self._port}, could "
                f"not be reached within {self._wait:g} s: {str(err).splitlines()[0]}"
            ) from err

    def run(self, answer: Measured) -> Measured:
        here = self._gather()
        first = self._rank * here
        # A connection for each thread: one that waits lets no other thread through.
        ranks = Ranks(
            list(enumerate(self._devices[:here], first)), self._world * here, self._connect
        )
        work = self._work._replace(limit=self._until - time.monotonic())
        answer = _together(ranks, work, answer)
        self._leave()
        return answer

    def _gather(self) -> int:
        """Wait for all nodes; return the fewest devices of any: so many of each take part."""
        ours = {"backend": backend(self._devices), "devices": len(self._devices)}
        self._store.set(f"here/{self._rank}", json.dumps(ours))
        until = time.monotonic() + self._wait
        fewest = len(self._devices)
        for rank, peer in enumerate(self._peers):
            left = max(0.01, until - time.monotonic())
            try:
                self._store.wait([f"here/{rank}"], timedelta(seconds=left))
            except DistError as err:
                raise Failed(f"peer {peer} did not come within {self._wait:g} s") from err
            theirs = json.loads(self._store.get(f"here/{rank}"))
            if theirs["backend"] != ours["backend"]:
                raise Failed(
                    f"{peer} has {theirs['backend']} and {self._peers[self._rank]} "
                    f"{ours['backend']}: a node with GPUs and one without cannot be paired"
                )
            fewest = min(fewest, int(theirs["devices"]))
        return fewest

    def _leave(self) -> None:
        """Leave the group; rank 0, which holds the store, leaves last."""
        try:
            self._store.set(f"done/{self._rank}", "")
            if self._rank == 0:
                left = max(0.01, min(LAST_S, self._until - time.monotonic()))
                done = [f"done/{rank}" for rank in range(self._world)]
                self._store.wait(done, timedelta(seconds=left))
        except DistError:
            return  # the peer has ended; its own answer says why


def _together(ranks: Ranks, work: Work, answer: Measured) -> Measured:
    """Run all ranks of this node at once; add what each raised or found to the answer."""
    ended: queue.Queue[Timed | Exception] = queue.Queue()
    all_progress = [AllreduceProgress() for _ in ranks.here]
    until = time.monotonic() + work.limit
    work = work._replace(limit=work.limit - LAST_S / 2)  # torch's reason is better than ours

    def attempt(rank: int, device: WorkerDevice, progress: AllreduceProgress) -> None:
        try:
            device.use()
            member = GroupMember(rank, ranks.world, device, ranks.meet())
            ended.put(take_part(member, work, progress))
        except Exception as err:  # noqa: BLE001 - it is told in the answer
            ended.put(err)

    for (rank, device), progress in zip(ranks.here, all_progress, strict=True):
        # A daemon: a library that hangs must not keep the process from its end.
        args = (rank, device, progress)
        threading.Thread(target=attempt, args=args, daemon=True).start()
    timed: list[Timed] = []
    raised: list[Exception] = []
    while len(timed) + len(raised) < len(ranks.here):
        try:
            one = ended.get(timeout=max(0.01, until - time.monotonic()))
        except queue.Empty:
            waited = len(ranks.here) - len(timed) - len(raised)
            what = f"{waited} of {len(ranks.here)} ranks here had not finished at the time limit"
            raised.append(Failed(f"{what}: {work.limit:.1f} s"))
            for progress in all_progress:  # what aborts a hanging rank may hang itself
                threading.Thread(target=progress.abort, daemon=True).start()
            break
        if isinstance(one, Timed):
            timed.append(one)
        else:
            raised.append(one)
            until = min(until, time.monotonic() + LAST_S)
    wrong = [line for progress in all_progress for line in progress.wrong]
    answer = answer._replace(wrong=tuple(wrong[:MOST_WRONG]))
    for err in raised:
        answer = _with(answer, err)
    return answer if raised else answer._replace(values=_values(timed, ranks.world))


def _values(timed: Sequence[Timed], world: int) -> dict[str, float]:
    """Compute the bandwidths; an all-reduce takes as long as its slowest rank measured."""
    if world < 2:
        return {}
    took = statistics.median(map(max, zip(*(one.took for one in timed), strict=True)))
    algbw = timed[0].size / took / 1e9
    return {"busbw_gbps": algbw * 2 * (world - 1) / world, "algbw_gbps": algbw}
