"""Test the machines while the ranks are down and no machine is to blame (stop-time tests).

``due`` decides whether to test (pure). The tests, and the judgement of what they measure, are in
``health.active``. The workers run in the slots that the job has (``agent/test_worker.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from health.active.coordinator.procedure import WantedTests, run
from health.active.coordinator.session import GOODBYE_S, TestSession
from health.active_tests import BY_NAME, Judged
from robust_slurm.text import counted
from srun_wrapper.agent.test_worker import session_key
from srun_wrapper.decide.diagnosis import Diagnosis
from srun_wrapper.decide.failure import Symptom, last_error
from srun_wrapper.job.facts import JobFacts
from srun_wrapper.job.model import Node, Role
from srun_wrapper.job.reporting.journal import Journal
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import JobState
from srun_wrapper.job.topology import Topology
from srun_wrapper.protocol.messages import RunTests, WorkerEnded

START = 30.0  # s at most for the workers to start and import torch; part of the limit
MARGIN = 30.0  # s over the limit after which a worker ends by itself, even without robust-srun
SHOWN = 4  # lines of evidence of each node
SHARED = re.compile(r"(^|[:/,])(shard|mps)[:=]")  # Slurm's generic resources that share a GPU
ALONGSIDE = ("bitwise",)  # the tests that may run beside another job
SLOW = re.compile(r"active-[a-z]+-slow\b")

# Exceptions that come from a mistake in a program, never from a machine that computes wrongly.
PROGRAM_ERRORS = re.compile(
    r"^(\[rank\d+\]:?\s*)?(SyntaxError|IndentationError|NameError|ImportError|ModuleNotFoundError"
    r"|AttributeError|TypeError|FileNotFoundError|NotImplementedError|argparse\.\w+"
    r"|UnboundLocalError|PermissionError|IsADirectoryError|NotADirectoryError)\b"
)


class MachineResults(NamedTuple):
    """Results of the tests; ``named``: bad nodes with the evidence."""

    named: Mapping[str, tuple[str, ...]]
    lines: tuple[str, ...]
    cleared: frozenset[str] = frozenset()
    idle: tuple[str, ...] = ()
    """Bad nodes without ranks: they did not cause the failure, but must not take a place."""


def due(diagnosis: Diagnosis, failures: int, tested: bool) -> bool:
    """True if machines must be tested before the next rung (ByteRobust 4.1: "stop-time").

    ``failures``: number in a row without progress, this one included; ``tested``: True if machines
    were tested since the last progress. They are tested at once after a loss that is not finite,
    or if the rule says so; after a crash or hang without proof against a node only the second
    time: the first is mostly transient, and a restart is quicker than a test.
    """
    if tested or diagnosis.cause in ("node", "shared") or not diagnosis.root.launched:
        return False
    if diagnosis.tests == "never":
        return False
    if diagnosis.symptom in ("nan", "sdc") or diagnosis.tests != "later":
        return True
    if PROGRAM_ERRORS.match(last_error(diagnosis.root.tail)):
        return False
    return failures >= 2


def with_bad_machines(diagnosis: Diagnosis, found: MachineResults, rule: str) -> Diagnosis:
    """Return the diagnosis with the results of the tests; ``rule``: the id of this rule."""
    evidence = (*diagnosis.evidence, *found.lines)
    if not found.named:
        return replace(diagnosis, evidence=evidence, cleared=found.cleared)
    bad = tuple(found.named)
    unreported = diagnosis.unreported.difference(bad)  # no longer suspects together with others
    diagnosis = replace(diagnosis, cause="node", suspects=bad, proven=bad, unreported=unreported)
    return replace(diagnosis, evidence=evidence, rule=rule)


def read(judged: Judged, active: Sequence[str], symptom: Symptom) -> MachineResults:
    """Find the nodes to blame for the symptom, and describe in words what else was seen.

    ``active``: nodes that had ranks. A node that is only slow can make a job hang, but causes no
    NaN and no crash: after these it is mentioned, and stays.
    """
    guilty = {
        name: tuple(line for line in why if symptom == "hang" or not SLOW.match(line))
        for name, why in judged.named.items()
    }
    bad = {name: why for name, why in guilty.items() if why}
    named = {name: why for name, why in bad.items() if name in active}
    idle = tuple(name for name in bad if name not in named)
    lines = [f"{name}: {line}" for name, why in named.items() for line in why[:SHOWN]]
    lines += [
        f"{name} is slow, which does not explain the failure: {why[0]}"
        for name, why in judged.named.items()
        if name not in bad
    ]
    lines += [f"{name} had no ranks and is no longer used: {bad[name][0]}" for name in idle]
    took = f"in {judged.seconds:.1f} s"
    if named:
        lines.insert(0, f"stop-time tests name {','.join(named)} {took}")
    elif judged.cleared:
        passed = len(judged.cleared.intersection(active))
        lines.append(f"{passed} of {len(active)} nodes passed stop-time tests {took}")
    else:
        lines.append(f"stop-time tests could not be run ({took})")
    errors = dict.fromkeys(line for why in judged.errors.values() for line in why[:1])
    lines += [f"could not be tested: {line}" for line in list(errors)[:SHOWN]]
    undecided = [
        f"{name}: undecided: {finding.evidence}"
        for name, findings in judged.findings.items()
        for finding in findings
        if finding.check == "active-undecided"
    ]
    lines += [*undecided[:SHOWN], *(f"skipped: {line}" for line in judged.left_out[:SHOWN])]
    return MachineResults(named, tuple(lines), judged.cleared, idle)


def conclusive(found: MachineResults, active: Sequence[str]) -> bool:
    """True if another test would bring nothing new."""
    return bool(found.named) or found.cleared.issuperset(active)


class StopTests:
    """Runs one session of tests on the nodes that the job has."""

    def __init__(
        self,
        state: JobState,
        facts: JobFacts,
        topology: Topology,
        journal: Journal,
        over: Callable[[], bool],
    ) -> None:
        """``over``: True if another failure or the end came in between."""
        self._state = state
        self._facts = facts
        self._topology = topology
        self._journal = journal
        self._interrupted = over
        self._tokens = itertools.count(1)
        self._session: TestSession | None = None
        self._token = 0
        state.on_tests = self._over

    async def ask(self, suspects: Sequence[str], symptom: Symptom) -> MachineResults | None:
        """Test, suspects first. None when another failure or the end came in between."""
        state = self._state
        task = asyncio.create_task(self._ask(suspects, symptom))
        task.add_done_callback(lambda _done: state.changed.set())
        await state.until(lambda: task.done() or self._interrupted(), None)
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            return None
        try:
            return task.result()
        except Exception as err:  # noqa: BLE001 - a slip here must not end the job
            return MachineResults(
                {}, (f"stop-time tests: internal error: {type(err).__name__}: {err}",)
            )

    async def _ask(self, suspects: Sequence[str], symptom: Symptom) -> MachineResults:
        state, config = self._state, self._state.config
        nodes = self._nodes()
        every = self._gpu_each()
        self._token = next(self._tokens)
        session = TestSession(
            {name: node.slots if every else 1 for name, node in nodes.items()},
            session_key(self._facts.key, self._token),
        )
        limit, active = config.stop_tests, [node.name for node in state.world.places]
        began = time.monotonic()
        say(
            f"testing {counted(len(nodes), 'node')} for up to {limit:g} s: no node is proven "
            "faulty so far"
        )
        try:
            port = await session.open()
            self._session = session
            order = RunTests(self._token, port, limit + MARGIN, config.test_python, every)
            for node in nodes.values():
                self._state.bus.send(node, order)
            await session.gather(min(START, limit / 2))
            left = limit - (time.monotonic() - began)
            wanted = WantedTests(
                tuple(BY_NAME) if not self._shared() else ALONGSIDE,
                "quick",
                max(1.0, left),
                tuple(name for name in suspects if name in nodes),
                self._topology.leaf_of,
            )
            judged = await run(session, list(nodes), wanted)
        except OSError as err:
            return MachineResults({}, (f"stop-time tests could not be run: {err}",))
        finally:
            self._session = None
            await session.close(0.0 if self._interrupted() else GOODBYE_S)
        judged = judged._replace(seconds=time.monotonic() - began)
        found = read(judged, active, symptom)
        self._journal.event(
            "tests",
            named=list(judged.named),
            cleared=sorted(judged.cleared),
            errors={name: list(why) for name, why in judged.errors.items()},
            left_out=list(judged.left_out),
            seconds=round(judged.seconds, 3),
            measured=[m.as_dict() for m in judged.measured],
        )
        for line in found.lines:
            say(line)
        return found

    def _nodes(self) -> dict[str, Node]:
        """Return all connected nodes: idle ones serve as a comparison."""
        state = self._state
        active = [node for node in state.world.places if node.role is Role.ACTIVE]
        return {node.name: node for node in (*active, *state.spares()) if node.connection}

    def _gpu_each(self) -> bool:
        """True if each slot sees only GPUs of its own, so that all slots must test."""
        command, env = self._facts.launch.command, self._facts.env
        names = ("gpus-per-task", "gpu-bind", "tres-per-task", "ntasks-per-gpu")
        return any(command.get(name) is not None for name in names) or any(
            env.get("SLURM_" + name.upper().replace("-", "_")) for name in names
        )

    def _shared(self) -> bool:
        """True if other jobs may be using these GPUs as well."""
        words = [o.value or "" for o in self._facts.launch.command.srun]
        words += [value for name, value in self._facts.env.items() if name.startswith("SLURM_")]
        return any(SHARED.search(word) for word in words)

    def _over(self, node: Node, message: WorkerEnded) -> None:
        if self._session is not None and message.token == self._token:
            tail = message.tail.strip().splitlines()
            why = tail[-1] if tail else f"exit code {message.code}"
            self._session.lost(node.name, why, message.local)
