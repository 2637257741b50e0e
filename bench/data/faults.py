"""Exactly once: the same samples in the same order over random faults, beside no fault at all.

The undisturbed run is made in this process, without a data process. The disturbed one has real
ranks (forks, which read and do nothing else) and a real data process under robust-task's code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import select
import signal
import socket
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from bench.common import BenchError, Results
from bench.data import ours, sides
from bench.data.child import end
from bench.data.corpus import MARK, Corpus
from bench.data.process import Kept
from robust_slurm.data.service.either import steps_of
from robust_slurm.data.steps import LocalSteps
from robust_slurm.resizing.world import TrainingWorld

FAULTS = 100
SHARES, ROWS, PACK = 4, 2, 1024
WORLDS = (1, 2, 4)
KINDS = ("rank", "loader", "ranks")
MOST_BACK = 2  # steps between the newest checkpoint and the fault
DEADLINE = 60.0


class Seen(NamedTuple):
    """The contents of a step: a digest of each share's rows, and the documents that begin in it."""

    digests: dict[int, str]
    documents: list[int]


def seen(rows: Mapping[int, Mapping[str, Any]]) -> Seen:
    """Look into the rows of some shares."""
    digests, documents = {}, []
    for share, arrays in rows.items():
        found = hashlib.sha256()
        for name in sorted(arrays):
            found.update(f"{name} {arrays[name].dtype} {arrays[name].shape} ".encode())
            found.update(arrays[name].tobytes())
        digests[share] = found.hexdigest()
        tokens = arrays["tokens"]
        documents += [int(token) - MARK for token in tokens[tokens >= MARK]]
    return Seen(digests, documents)


class Log:
    """The contents of a training, by step. A step that is done again counts once."""

    def __init__(self) -> None:
        self.steps: dict[int, Seen] = {}

    def add(self, step: int, parts: list[Seen]) -> None:
        """Note a step, of which each rank has a part."""
        digests = {share: text for part in parts for share, text in part.digests.items()}
        self.steps[step] = Seen(digests, [doc for part in parts for doc in part.documents])

    def resume(self, steps: int) -> None:
        """Forget what came after ``steps`` steps: a resumed training does it again."""
        self.steps = {step: had for step, had in self.steps.items() if step < steps}

    def order(self) -> str:
        """Return a digest of all rows of all shares, in their order."""
        text = json.dumps([[step, sorted(had.digests.items())] for step, had in self._sorted()])
        return hashlib.sha256(text.encode()).hexdigest()

    def documents(self) -> Counter[int]:
        """Count how often each document began."""
        return Counter(doc for _, had in self._sorted() for doc in had.documents)

    def _sorted(self) -> list[tuple[int, Seen]]:
        return sorted(self.steps.items())


def compare(disturbed: Log, undisturbed: Log) -> dict[str, int]:
    """Return how many documents were lost and repeated, and steps that differ."""
    had, should = disturbed.documents(), undisturbed.documents()
    steps = undisturbed.steps.keys() | disturbed.steps.keys()
    rows = [
        {step: each.digests for step, each in log.steps.items()} for log in (disturbed, undisturbed)
    ]
    return {
        "lost": (should - had).total(),
        "repeated": (had - should).total(),
        "other_steps": sum(rows[0].get(step) != rows[1].get(step) for step in steps),
    }


class Ranks:
    """The ranks of one world, in lockstep. They share nothing with each other."""

    def __init__(self, spec: Mapping[str, Any], world: int, state: Any, kept: Kept) -> None:
        self._processes: list[tuple[int, socket.socket]] = []
        for rank in range(world):
            here, there = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                for _, other in self._processes:
                    other.close()
                here.close()
                told = {**spec, "rank": rank, "world": world, "mesh": SHARES}
                os.environ.update({**ours.environ(told), **kept.environ})
                _serve(there, rank, world, state)
            there.close()
            self._processes.append((pid, here))

    def order(self) -> None:
        """Let each take a step."""
        for _, sock in self._processes:
            with contextlib.suppress(OSError):  # it was killed
                sock.sendall(b"\n")

    def answers(self) -> tuple[int, list[Seen], Any]:
        """Return the step's number, what each rank has had, and the state after it."""
        found = [_line(sock) for _, sock in self._processes]
        if len({(each["step"], json.dumps(each["state"])) for each in found}) != 1:
            raise BenchError("the ranks are in different steps")
        parts = [
            Seen({int(share): text for share, text in each["digests"].items()}, each["documents"])
            for each in found
        ]
        return found[0]["step"], parts, found[0]["state"]

    def kill(self, rank: int) -> None:
        """Kill one, as a fault would."""
        os.kill(self._processes[rank][0], signal.SIGKILL)

    def close(self) -> None:
        """End all."""
        for pid, sock in self._processes:
            end(pid)
            sock.close()


def _serve(sock: socket.socket, rank: int, world: int, state: Any) -> None:
    """Be a rank. Never returns."""
    try:
        whole = TrainingWorld(rank, world, SHARES)
        steps, _ = steps_of(ours.NAME, whole, _no_own)
        steps.seek(state)
        with sock.makefile("rw") as file:
            for _ in file:
                step, rows, state = steps.next()
                had = seen(rows)
                file.write(json.dumps({**had._asdict(), "step": step, "state": state}) + "\n")
                file.flush()
    finally:
        os._exit(1)


def _no_own() -> Any:
    raise BenchError("a rank was to prepare its data itself")


def _line(sock: socket.socket) -> dict[str, Any]:
    data = b""
    until = time.monotonic() + DEADLINE
    while not data.endswith(b"\n"):
        ready, _, _ = select.select([sock], [], [], max(0.0, until - time.monotonic()))
        got = sock.recv(1 << 20) if ready else b""
        if not got:
            raise BenchError("a rank does not answer; its messages are above")
        data += got
    return dict(json.loads(data))


def undisturbed(corpus: Corpus, steps: int) -> Log:
    """Make the steps here."""
    plan = ours.make_plan(corpus, world=SHARES, rows=ROWS, pack=PACK)
    local = LocalSteps(plan, range(SHARES), SHARES)
    local.seek(None)
    log = Log()
    for _ in range(steps):
        step, rows, _ = local.next()
        log.add(step, [seen(rows)])
    local.close()
    return log


def disturbed(corpus: Corpus, faults: int, kept: Kept, chance: random.Random) -> tuple[Log, Any]:
    """Train through random faults; also returns how often each came."""
    spec = {**sides.spec(corpus, sides.OURS, rows=ROWS), "pack": PACK}
    log = Log()
    saved: list[Any] = [None]  # the states after 0, 1, 2, … steps
    world = SHARES
    ranks = Ranks(spec, world, None, kept)
    came: Counter[str] = Counter()

    def step() -> None:
        number, parts, state = ranks.answers()
        log.add(number, parts)
        saved.append(state)

    try:
        for _ in range(faults):
            for _ in range(chance.randint(1, 3)):
                ranks.order()
                step()
            kind = chance.choice(KINDS)
            came[kind] += 1
            ranks.order()
            time.sleep(chance.uniform(0.0, 0.02))
            if kind == "loader":
                kept.kill()
                step()  # nobody restarts: the training is not affected
                continue
            if kind == "ranks":
                world = chance.choice([size for size in WORLDS if size != world])
            else:
                ranks.kill(chance.randrange(world))
            ranks.close()
            done = max(0, len(saved) - 1 - chance.randint(0, MOST_BACK))
            del saved[done + 1 :]
            log.resume(done)
            ranks = Ranks(spec, world, saved[-1], kept)
        ranks.order()
        step()
    finally:
        ranks.close()
    return log, came


def random_faults(results: Results) -> None:
    """Compare the two runs."""
    faults = results.runs or (6 if results.quick else FAULTS)
    with sides.corpus(4, 4, 40 if results.quick else 400) as corpus:
        began = time.perf_counter()
        with Kept(corpus.root.parent / "run") as kept:
            log, came = disturbed(corpus, faults, kept, random.Random(24))
        results.once("exact.s", time.perf_counter() - began, "s")
        should = undisturbed(corpus, len(log.steps))
    for what, number in compare(log, should).items():
        results.count(f"exact.{what}", number)
    results.count("exact.faults", faults)
    results.count("exact.steps", len(log.steps))
    results.count("exact.documents", should.documents().total())
    results.settings["exact.order"] = f"{log.order()[:16]}, undisturbed {should.order()[:16]}"
    results.settings["exact.faults"] = ", ".join(f"{n} {kind}" for kind, n in sorted(came.items()))
