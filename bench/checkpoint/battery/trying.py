"""The battery of training loops: ``python -m bench.checkpoint --case battery``.

Each loop runs three times: without a Checkpointer and undisturbed (the reference), with one until
it is killed, and once more from what the real Store or the disk kept. On the same number of ranks
the last states must be the same to the bit; on another one the whole state right after resume()
must be the one that was saved. ``battery.silent`` counts the loops that differ though no message
named what they are about; ``judging`` has all outcomes. ``bench.checkpoint.loops`` draws loops of
one kind at random; here each kind is written as its users write it (``kinds``).
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.checkpoint.battery.case import Kind, Variant, decode_kind, encode, variants
from bench.checkpoint.battery.judging import (
    BAD,
    OUTCOMES,
    SAID,
    Ended,
    Verdict,
    as_record,
    judge,
)
from bench.common import REPOSITORY, BenchError, Results
from robust_slurm.checkpoint.planning.alike import Comparison
from robust_slurm.checkpoint.planning.held import Holder
from robust_slurm.checkpoint.planning.plan import Seat, plan
from robust_slurm.checkpoint.store.events import (
    AlarmEvent,
    EnrolledEvent,
    Restore,
    SavedEvent,
    StoreEvent,
)
from robust_slurm.checkpoint.store.store import Store
from robust_slurm.memory_dir import remove_stale

RUN_DEADLINE = 60
KEY = b"bench.checkpoint bench.checkpoint"[:32]
DOCS = REPOSITORY / "docs" / "checkpoints.md"
ALIKE = "do not hold the same"
"""In the plan's lines: ranks that share a state differ, so a step of theirs is of no use."""


class Runner:
    """A process that has imported everything, and its forks."""

    def __init__(self, families: Sequence[str] = ()) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("ROBUST_", "SLURM_"))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.checkpoint.battery.process", *families],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**env, "OMP_NUM_THREADS": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        self._kinds: list[Kind] = []

    def kinds(self) -> list[Kind]:
        """Return all kinds, once it has imported them."""
        if not self._kinds:
            self._kinds = [decode_kind(each) for each in self._line()]
        return self._kinds

    def run(self, variant: Variant, mode: str, scratch: Path, **where: Any) -> Ended:
        """Run a loop once, on all its ranks."""
        self.kinds()
        world = variant.after if mode == "resume" else variant.before
        for old in scratch.glob("*-[0-9]"):
            old.unlink()
        order = {
            "variant": encode(variant), "mode": mode, "world": world, "scratch": str(scratch),
            "directory": str(scratch / "steps"), "deadline": RUN_DEADLINE, "socket": "", "epoch": 0,
        }  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order | where) + "\n")
        self._process.stdin.flush()
        return _ended(self._line(), variant, scratch)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(RUN_DEADLINE)

    def _line(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise BenchError(f"bench.checkpoint.battery.process ended: {self._process.wait(5)}")
        return json.loads(line)


def _ended(codes: list[int | None], variant: Variant, scratch: Path) -> Ended:
    state: dict[str, str] = {}
    ended = Ended(hung=None in codes)
    crash = -getattr(signal, variant.signal)
    ended.killed = any(code in (crash, 97) for code in codes)
    said: list[str] = []
    for rank, code in enumerate(codes):
        err = (scratch / f"err-{rank}").read_text(errors="replace")
        said += [line for line in err.splitlines() if SAID.match(line)]
        file = scratch / f"result-{rank}"
        found = json.loads(file.read_text()) if file.exists() else {}
        state |= {f"{rank}: {path}": value for path, value in found.get("state", {}).items()}
        if found.get("error") and not ended.killed and not ended.error:
            ended.error, ended.refused = found["error"], found["refused"]
            ended.trace = found["trace"]
        if rank == 0:
            ended.began, ended.kept = int(found.get("began", 0)), found.get("kept", {})
        if not found and code is not None and not ended.killed:
            ended.error, ended.trace = f"it ended with {code}", err[-2000:]
    ended.state, ended.said = state, tuple(said)
    kept = scratch / "steps" / "kept-0"
    if ended.killed and kept.exists():
        ended.kept = json.loads(kept.read_text())
    return ended


def try_variant(variant: Variant, run: Runner, docs: str) -> Verdict:
    """Run one loop three times. BenchError where the reference itself went wrong."""
    with tempfile.TemporaryDirectory(prefix="battery-", dir="/dev/shm") as directory:
        scratch = Path(directory)
        (scratch / "steps").mkdir()
        reference = Ended(state={"": ""})
        if not variant.reshaped:
            reference = run.run(variant, "reference", scratch)
            if reference.error or reference.hung or not reference.state:
                raise BenchError(f"{variant.name}: the reference: {reference.trace or 'it hung'}")
        if variant.disk:
            crashed = run.run(variant, "crash", scratch)
            again = run.run(variant, "resume", scratch) if crashed.killed else None
        else:
            crashed, again = _from_memory(variant, run, scratch)
        return judge(variant, reference, crashed, again, docs)


def _from_memory(variant: Variant, run: Runner, scratch: Path) -> tuple[Ended, Ended | None]:
    head = _Head()
    store = head.store = Store(scratch / "s", name="battery", key=KEY, emit=head.take)
    ranks = dict.fromkeys(range(variant.before))

    def ended(mode: str, epoch: int) -> Ended:
        found = run.run(variant, mode, scratch, socket=str(store.socket_path), epoch=epoch)
        found.said = tuple(dict.fromkeys((*found.said, *head.said)))
        head.said.clear()
        return found

    try:
        store.begin(0, None)
        store.place(ranks)  # no peers
        crashed = ended("crash", 0)
        if not crashed.killed:
            return crashed, None
        place = Holder("battery", "here", "", 0, store.stock())
        chosen = plan([place], dict.fromkeys(ranks, Seat("battery", "here")), variant.before)
        found = Restore(chosen.step, chosen.tier, chosen.shards("here")) if chosen.step else None
        head.said += [f"robust-slurm: {text}" for text in chosen.lines if ALIKE in text]
        store.begin(1, found)
        store.place(ranks)
        return crashed, ended("resume", 1)
    finally:
        store.close()


class _Head:
    """Does what robust-srun does with a store's events: it shows alarms, and compares replicas."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.store: Store | None = None
        self._needs: dict[int, tuple[int, ...]] = {}
        self._alike = Comparison()

    def take(self, event: StoreEvent) -> None:
        """Take an event, in any of the store's threads."""
        if isinstance(event, AlarmEvent):
            self.said.append(f"robust-slurm: rank {event.rank}: {event.text}")
        if isinstance(event, EnrolledEvent):
            self._needs[event.rank] = event.needs
        if isinstance(event, SavedEvent) and len(group := self._needs[event.rank]) > 1:
            outcomes = self._alike.add(min(group), group, event.rank, event.same)
            if self.store is not None and any(each.differ for each in outcomes):
                self.store.orders.unshare(group)


def battery(
    results: Results,
    tell: Callable[[str], None],
    seed: int = 0,
    only: Sequence[str] = (),
    processes: int = 0,
) -> list[Verdict]:
    """Try all kinds, or the kinds, families or variants whose names begin with one of ``only``."""
    docs = DOCS.read_text(encoding="utf-8")
    began = time.monotonic()
    runners = [Runner() for _ in range(processes or len(os.sched_getaffinity(0)))]
    todo: queue.SimpleQueue[Variant] = queue.SimpleQueue()
    found: list[Verdict] = []
    failed: list[BaseException] = []
    broken: list[BenchError] = []

    def work(run: Runner) -> None:
        while not failed:
            try:
                one = try_variant(todo.get_nowait(), run, docs)
            except queue.Empty:
                return
            except BenchError as error:
                broken.append(error)
                tell(str(error))
                continue
            except BaseException as error:  # noqa: BLE001 - raised in the main thread
                failed.append(error)
                return
            found.append(one)
            if one.outcome in BAD or one.unexpected:
                tell(line(one))

    try:
        kinds = [k for k in runners[0].kinds() if chosen(k, only)]
        if not kinds:
            raise BenchError(f"no kind is named {', '.join(only)}")
        for one in (v for k in kinds for v in variants(k, seed, results.quick)):
            todo.put(one)
        threads = [threading.Thread(target=work, args=(run,)) for run in runners]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for run in runners:
            run.close()
        remove_stale("/dev/shm")  # a rank that was killed leaves its own to the next that starts
    if failed or (broken and not found):
        raise (failed or broken)[0]
    record(results, found, seed)
    results.count("battery.broken", len(broken))
    results.settings |= {f"broken {n}": str(error) for n, error in enumerate(broken)}
    results.once("battery.wall_s", time.monotonic() - began, "s")
    return found


def chosen(kind: Kind, only: Sequence[str]) -> bool:
    """True if the kind or its family is among ``only``, or nothing is."""
    return not only or kind.name in only or kind.family in only


def line(one: Verdict) -> str:
    """A line for people: the kind, the variant, the outcome, what was said."""
    said = " | ".join(text.removeprefix("robust-slurm: ")[:160] for text in one.said) or "nothing"
    mark = " (unexpected)" if one.unexpected and one.outcome not in BAD else ""
    return f"{one.variant.name}: {one.outcome}{mark}: {one.why[:300]}; said: {said}"


def record(results: Results, found: Sequence[Verdict], seed: int = 0) -> None:
    """Count the outcomes, and list all loops that are not identical."""
    outcomes = Counter(one.outcome for one in found)
    for name in OUTCOMES:
        results.count(f"battery.{name}", outcomes[name])
    results.count("battery.unexpected", sum(one.unexpected for one in found))
    results.count("battery.loops", len(found))
    results.count("battery.kinds", len({one.variant.kind.name for one in found}))
    results.settings["battery"] = (
        f"seed {seed}; silent: differs, and no message named it; raw_errors: an error of ours or "
        "of torch's; needless_warnings: identical, but something was said; unseeable: listed in "
        "docs/checkpoints.md; unexpected: warned or refused where it must be identical"
    )
    ordered = sorted(found, key=lambda one: (OUTCOMES.index(one.outcome), one.variant.name))
    results.lists["battery"] = [as_record(one) for one in ordered if one.outcome != "identical"]
