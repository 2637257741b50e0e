"""One long training under random faults: ``python -m bench.faults --soak MINUTES``."""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.chaos.job import ChaosError, Job
from bench.chaos.site import epilog_of, install_epilog
from bench.chaos.verdict import Expected, Verdict, judge
from bench.common import Results, finish, results_for, summarise
from bench.faults import usage
from bench.faults.kind import NODES, PER_NODE, SOON, Kind, Pick
from bench.faults.kinds import KINDS
from bench.faults.lost import Course, record_lost
from bench.faults.usage import Usage
from bench.faults.wider import TORCH, torch_reference
from lab import Cluster, LabError
from lab.verbs.disruption import expand

# Faults that a job survives with no option but SOON. partition_3s may cost two healthy nodes.
SURVIVED = (
    *("exit_code", "sigkill", "sigsegv", "sigabrt", "sigbus", "sigstop", "oom_kill", "user_once"),
    *("loader_deadlock", "rank_deadlock", "ecc", "node_crash", "node_hang", "crash_and_kill"),
    *("crash_no_slurmctld", "crash_two", "crash_crash", "estale_all", "disk_full", "stall_all"),
    *("switch_3s", "partition_3s", "flap", "slow_link", "batch_host_2s", "suspend", "pause_all"),
)
AHEAD = 20  # steps from an order to the step that it is for
BEYOND = 40  # steps that a training makes after a fault before the next one
STUCK = 180.0  # s
PAUSE = 8.0  # s, at most, between two faults
LAST = 200  # steps from the order to end to the end
SETTLED = 50
MANY = 10**9
USED_PER_MINUTE = 1.6  # standby nodes, at most: a node that left a job does not come back to it


@dataclass(frozen=True, slots=True)
class Hit:
    """One fault of the soak."""

    kind: str
    at: float
    right: Expected
    gap: float  # the longest time without a step, in seconds
    until: float  # the end of the wait for the steps after it


@dataclass(slots=True)
class Steps:
    """The steps of rank 0, read as they are written."""

    path: Path
    made: list[tuple[float, int]] = field(default_factory=list)
    _offset: int = 0

    def read(self) -> None:
        """Read what is new."""
        if not self.path.exists():
            return
        with self.path.open() as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            wall, step = line.split()
            self.made.append((float(wall), int(step)))

    @property
    def best(self) -> int:
        """The furthest step."""
        return max((step for _, step in self.made[-500:]), default=0)


@dataclass(slots=True)
class Soak:
    """A training, its faults and what was seen of it."""

    job: Job
    dice: random.Random
    steps: Steps
    hits: list[Hit] = field(default_factory=list)
    samples: list[Usage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def wait_step(self, step: int) -> None:
        """Wait for a step. ChaosError if the job ended, or does not make it."""
        deadline = time.monotonic() + STUCK
        look = time.monotonic() + 5
        while self.steps.best < step:
            time.sleep(0.1)
            self.steps.read()
            now = time.monotonic()
            if now > deadline:
                raise ChaosError(f"step {step} was not made within {STUCK:g} s")
            if now > look:
                look = now + 5
                state = self.job.record().get("JobState", "RUNNING").split()[0]
                if state in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "PENDING"):
                    raise ChaosError(f"the job is {state}")

    def places(self) -> dict[int, str]:
        """Return the node of each rank, once robust-srun says that all run."""
        wanted, found = NODES * PER_NODE, dict[int, str]()
        since = time.time()

        def ready() -> bool:
            rosters = (self.job.dir / "state").glob("jobs/*/roster.*.json")
            newest = max(rosters, key=lambda path: path.stat().st_mtime)
            roster = json.loads(newest.read_text())
            found.clear()
            for node in roster["nodes"]:
                found.update({int(rank): str(node["name"]) for rank in node["ranks"]})
            return roster["state"] == "running" and float(roster["updated"]) > since

        self.job.wait(lambda: ready() and len(found) == wanted, "places of all ranks")
        return found

    def pick(self, name: str) -> Pick:
        """Choose where a fault is to hit."""
        places = self.places()
        nodes = list(dict.fromkeys(places[rank] for rank in sorted(places)))
        nodes.sort(key=lambda node: node != "n1")
        node, other = self.dice.sample(nodes[1:], 2)
        rank = self.dice.randrange(1, NODES * PER_NODE)
        on_other = min(rank for rank, where in places.items() if where == other)
        self.steps.read()
        return Pick(rank, node, other, self.steps.best + AHEAD, 0.0, on_other, tuple(nodes))

    def order(self, kind: Kind, pick: Pick) -> None:
        """Have the program fail."""
        where = kind.where.split()[0]
        node = pick.node if where == "node" else "-"
        for rank in [pick.rank] if where == "rank" else range(NODES * PER_NODE):
            fresh = self.job.dir / "order.tmp"
            fresh.write_text(f"{pick.step} {node} {kind.error}")
            fresh.chmod(0o666)
            fresh.replace(self.job.dir / f"order.{rank}")

    def hit(self, name: str) -> None:
        """Make one fault, wait until the training has got over it, and mend what is broken."""
        kind, pick = KINDS[name], self.pick(name)
        made = kind.make(pick)
        self.job.fault_at = at = time.time()
        expected: Expected = made.get("expected", Expected())
        if kind.error:
            self.order(kind, pick)
        else:
            made["fault"](self.job)
            self.steps.read()
        self.wait_step(max(pick.step, self.steps.best) + BEYOND)
        for order in self.job.dir.glob("order.*"):  # of ranks on other nodes
            order.unlink(missing_ok=True)
        times = [wall for wall, _ in self.steps.made if wall > at - 5]
        gap = max((b - a for a, b in pairwise(times)), default=0.0)
        self.hits.append(Hit(name, at, expected, gap, times[-1]))
        self.mend()
        if one := usage.sample(self.job):
            self.samples.append(one)

    def mend(self) -> None:
        """Boot the nodes that crashed and let those that hang go on: Slurm has them again.

        A lab node boots in no time. A real one takes minutes, so it waits until no job has it:
        Slurm's srun aborts a step when one of its nodes comes back without it.
        """
        for node, fault in self.job.lab.faults().items():
            try:
                if fault == "crashed":
                    self.job.wait(partial(self.released, node), f"release of {node}")
                    self.job.lab.heal(node)
                elif fault != "up":
                    self.job.lab.ask("heal", node=node)
            except LabError as error:
                self.notes.append(f"{node}: {error}"[:300])

    def released(self, node: str) -> bool:
        """Report that no job has the node."""
        argv = ["squeue", "-h", "-t", "R,S,CF", "-o", "%N"]  # a dead node completes for minutes
        done = self.job.lab.exec("head", argv)
        lines = done.stdout.splitlines()
        return not any(node in expand(line) for line in lines if line)

    def end(self) -> None:
        """Let the training come to its end."""
        self.steps.read()
        last = self.job.dir / "last.tmp"
        self.job.steps = self.steps.best + LAST
        last.write_text(str(self.job.steps))
        last.chmod(0o644)
        last.replace(self.job.dir / "last")

    def idle_allocations(self) -> int:
        """Count the standby allocations without a rank, some seconds after the last fault."""
        places = set(self.places().values())
        argv = ["squeue", "-h", "-t", "R", "-o", "%i %N"]
        running = self.job.lab.exec("head", argv).stdout.splitlines()
        others = [line.split()[-1] for line in running if line.split()[0] != str(self.job.id)]
        return sum(node not in places for node in others)


def draws(dice: random.Random, names: Sequence[str]) -> Iterator[str]:
    """Yield names at random, each once before any comes again."""
    while True:
        yield from dice.sample(names, len(names))


def soak(args: argparse.Namespace, results: Results) -> int:
    """Run the soak and judge it. Returns the exit code."""
    minutes: float = args.soak
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    standby = 6 + round(USED_PER_MINUTE * minutes)
    named = Cluster(nodes=NODES)
    conf = {"Epilog": str(epilog_of(named.spec.dir))}
    name = named.spec.name
    with Cluster(
        name=name,
        nodes=NODES,
        standby=standby,
        scratch=True,
        slurm_conf=conf,
        accounting=True,  # without slurmdbd a job can give back a node only once (Slurm < 24.11)
    ) as lab:
        install_epilog(lab.spec.dir)
        job = Job.new(lab, NODES * PER_NODE, MANY)
        one = Soak(job, random.Random(args.seed), Steps(job.dir / "steps"))
        error, idle = "", 0
        script = TORCH if args.torch else f"{job.dir}/rank.py --data {lab.scratch}/data"
        if args.torch:
            job.reference = lambda: torch_reference(job.steps)
        began = time.monotonic()
        try:
            job.submit(
                f"{SOON} python {script} --dir {job.dir} --steps {MANY} --orders",
                [f"-N{NODES}", f"--ntasks-per-node={PER_NODE}"],
            )
            job.wait_steps(SETTLED)
            job.wait_warm()
            for kind in draws(one.dice, args.case or SURVIVED):
                over = stop.wait(one.dice.uniform(0.0, PAUSE))
                if over or time.monotonic() > began + 60 * minutes:
                    break
                print(f"{time.strftime('%H:%M:%S')} {kind}", file=sys.stderr, flush=True)
                one.hit(kind)
            time.sleep(PAUSE)
            idle = one.idle_allocations()
            one.end()
        except (ChaosError, LabError, OSError) as failure:
            print(error := f"{type(failure).__name__}: {failure}", file=sys.stderr, flush=True)
            lab.exec("head", ["scancel", str(job.id)])
            job.steps = one.steps.best  # nobody computes the reference of all that were allowed
        seen = job.observe(job.wait_end(STUCK))
        incidents = job.incidents()
        if args.keep:
            args.keep.mkdir(parents=True, exist_ok=True)
            (args.keep / "out.txt").write_text(job.out())
            lines = "".join(json.dumps(record) + "\n" for record in incidents)
            (args.keep / "incidents.jsonl").write_text(lines)
    bad = frozenset[str]().union(*(hit.right.bad for hit in one.hits))
    gone = frozenset[str]().union(*(hit.right.gone for hit in one.hits))
    verdict = judge(Expected(bad=bad, gone=gone), seen)
    one.steps.read()
    return report(results, one, verdict, incidents, idle, error)


def report(
    results: Results,
    one: Soak,
    verdict: Verdict,
    incidents: Sequence[dict[str, Any]],
    idle: int,
    error: str,
) -> int:
    """Add the metrics and print the table of kinds. Returns 1 if anything is wrong."""
    table = Table(title="bench.faults --soak: what each fault did")
    for title in ("kind", "times", "longest gap s"):
        table.add_column(title, no_wrap=title == "kind")
    times = [wall for wall, _ in one.steps.made]
    steady = [b - a for a, b in pairwise(times)] or [0.0]
    distinct, wall = one.steps.best, (times[-1] - times[0]) if times else 0.0
    step = statistics.median(steady)
    for name in KINDS:
        if hits := [hit for hit in one.hits if hit.kind == name]:
            gaps = [hit.gap for hit in hits]
            results.metrics[f"{name}.gap_s"] = summarise(gaps, "s")
            table.add_row(name, str(len(gaps)), f"{max(gaps):.1f}")
    Console(width=120).print(table)
    again = [int(record["lost_steps"] or 0) for record in incidents]
    grown = usage.grown(one.samples)
    counts = {
        "faults": len(one.hits),
        "kinds": len({hit.kind for hit in one.hits}),
        "incidents": len(incidents),
        "healthy_nodes_blamed": len(verdict.blamed),
        "healthy_jobs_lost": int(bool(verdict.lost or error)),
        "leftovers": len(verdict.leftovers),
        "idle_allocations": idle,
        "grown": len(grown),
        "steps": distinct,
        "steps_made_again": len(one.steps.made) - distinct,
        "lost_steps": sum(again),
        "nodes_replaced": sum(len(record["swaps"]) for record in incidents),
    }
    for name, count in counts.items():
        results.count(f"soak.{name}", count)
    if wall:
        results.metrics["soak.ettr"] = summarise([min(1.0, distinct * step / wall)], "share")
        results.metrics["soak.minutes"] = summarise([wall / 60], "min")
        windows = [(hit.kind, hit.at, hit.until) for hit in one.hits]
        record_lost(results, Course(one.steps.made, step), windows)
    usage.record(results, one.samples)
    wrong = [*grown, *(["job lost: " + verdict.lost] if verdict.lost else [])]
    wrong += [f"blamed: {node}" for node in verdict.blamed]
    wrong += [f"left over: {what}" for what in verdict.leftovers]
    wrong += [f"stopped early: {error}"] if error else []
    wrong += [f"{idle} standby allocations without a rank"] if idle else []
    results.settings |= {f"wrong {n}": text for n, text in enumerate(wrong, 1)}
    results.settings |= {f"note {n}": text for n, text in enumerate(one.notes, 1)}
    return int(bool(wrong))


def main(args: argparse.Namespace) -> int:
    """Run the soak with the options of bench.faults."""
    results = results_for("soak", args)
    results.quick = args.quick or args.soak < 60
    training = "torch" if args.torch else "toy"
    results.settings |= {"minutes": args.soak, "seed": args.seed, "training": training}
    wrong = soak(args, results)
    return finish(results, args) or wrong
