"""The questions of the door: what Slurm knows, read in one command each."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from robust_slurm.slurm import parse, values
from robust_slurm.slurm.errors import AMBIGUOUS, SlurmError, classify
from robust_slurm.slurm.model import (
    FINISHED,
    Allotted,
    Job,
    Node,
    Partition,
    Placement,
    Step,
    job_from,
    node_from,
    partition_from,
)
from robust_slurm.slurm.run import Completed, Runner, query_env, run_command
from robust_slurm.slurm.values import ParseError
from robust_slurm.text import one_line

_JOB_ID = re.compile(r"[0-9]{1,10}(_[0-9]{1,10}|\+[0-9]{1,5})?", re.ASCII)
_RETRY_PAUSE_S = 0.2
_PING_S = 0.8
_VERSION = ("scontrol", "version")  # which needs no slurmctld
_HEARD_S = 1.0  # as long slurmctld is taken to be up, after it answered
_STEP = re.compile(
    r"^ *StepId=(\d+\.\d+) .*\bState=RUNNING\b.* NodeList=(\S+) .*\bSrunHost:Pid=(\S+):(\d+)"
)


class Questions:
    """Reads Slurm. Use it as ``Slurm``, which adds the orders."""

    def __init__(
        self,
        runner: Runner = run_command,
        deadline_s: float = 10.0,
        environ: Mapping[str, str] | None = None,
        *,
        ping_first: bool = False,
        why: str = "",
    ) -> None:
        """``ping_first``: raise ``unreachable`` at once where no slurmctld answers, instead of
        waiting for it until the deadline. ``why``: the reason for this backend, for people."""
        self._runner = runner
        self._deadline_s = deadline_s
        self._ping_first = ping_first
        self._heard = -_HEARD_S  # when a slurmctld answered last, in monotonic seconds
        self._why = why
        self._environ = dict(os.environ if environ is None else environ)
        self._query_env = query_env(self._environ)

    def ping(self) -> bool:
        """True if a slurmctld, primary or backup, answers."""
        try:
            return self._ping(self._deadline_s)
        except SlurmError:
            return False

    def _ping(self, deadline_s: float) -> bool:
        done = self._runner(("scontrol", "ping"), deadline_s, None, self._query_env, None)
        up = " is UP" in done.stdout
        if up:
            self._heard = time.monotonic()
        return up

    def backend(self) -> tuple[str, str]:
        """Name the way that is used, "commands" or "pyslurm", and why."""
        return "commands", self._why

    def close(self) -> None:
        """End what was started to reach Slurm."""

    def version(self) -> tuple[int, int]:
        """Release of the commands on this machine, e.g. (22, 5). The server's is in config()."""
        argv = _VERSION
        match = re.search(r"(\d+)\.(\d+)", self._run(argv, retry=True).stdout)
        if match is None:
            raise SlurmError("other", argv, "it printed no version")
        return int(match[1]), int(match[2])

    def config(self) -> dict[str, str]:
        """slurmctld's configuration as ``scontrol show config`` prints it."""
        return parse.settings(self._run(("scontrol", "show", "config"), retry=True).stdout)

    def job(self, job_id: int | str) -> Job:
        """One job: an id, or "120_4" for an array task. SlurmError ``not_found`` if forgotten."""
        return self._job(job_id, self._until())

    def _job(self, job_id: int | str, until: float) -> Job:
        wanted = job_argument(job_id)
        argv = ("scontrol", "-a", "-o", "show", "job", wanted)
        text = self._run(argv, until=until, retry=True).stdout
        # The number of an array or a heterogeneous job prints all of its members.
        for record in self._records(argv, text, "job"):
            if wanted in (
                record.get("JobId"),
                f"{record.get('ArrayJobId')}_{record.get('ArrayTaskId')}",
                f"{record.get('HetJobId')}+{record.get('HetJobOffset')}",
            ):
                return self._typed(argv, record)
        raise SlurmError("not_found", argv, f"Slurm printed no record of job {wanted}")

    def batch_script(self, job_id: int | str) -> str:
        """The script of a batch job, as submitted. Only its owner (or an operator) may ask."""
        argv = ("scontrol", "write", "batch_script", job_argument(job_id), "-")
        return self._run(argv, retry=True).stdout

    def jobs(self, user: str | None = None, states: Collection[str] | None = None) -> list[Job]:
        """All jobs that slurmctld still knows, finished ones too, filtered by owner and state.

        A name or comment may hold a newline and behind it a whole invented record, so each record
        must agree in id and owner with squeue's list, which has no free text; a job told twice is
        asked for alone. A job that still cannot be read in one way only is left out.
        """
        until = self._until()
        argv = ("scontrol", "-a", "-o", "show", "job")
        text = self._run(argv, until=until, retry=True).stdout
        owners = {number: row[0] for number, row in self._squeue("%U", until).items()}
        found: dict[int, list[Job]] = {}
        for line in parse.split_records(text, "job"):
            try:
                job = job_from(parse.fields(line, "job"))
            except ParseError:
                continue
            if owners.get(job.id) == str(job.uid):
                found.setdefault(job.id, []).append(job)
        out: list[Job] = []
        for number, told in found.items():
            try:
                job = told[0] if len(told) == 1 else self._job(number, until)
            except SlurmError as error:
                if error.transient:
                    raise
                continue
            if (user is None or job.user == user) and (states is None or job.state in states):
                out.append(job)
        return out

    def job_states(self) -> dict[int, str]:
        """Job id → base state of every job that slurmctld still knows: short, no free text."""
        return {number: row[0] for number, row in self._squeue("%T", self._until()).items()}

    def job_owners(self) -> dict[int, int]:
        """Job id → uid of the owner of every job that slurmctld still knows."""
        rows = self._squeue("%U", self._until())
        return {number: int(row[0]) for number, row in rows.items() if row[0].isdecimal()}

    def waiting_reasons(self, name: str) -> set[str]:
        """Reasons why our own jobs of that name wait, in the scheduler's words ("Resources", …)."""
        argv = ("squeue", "-h", "-a", "-t", "PD", "-u", str(os.getuid()), "-n", name, "-o", "%r")
        return set(self._run(argv, retry=True).stdout.split())

    def allotted(self, name: str) -> list[Allotted]:
        """The own jobs of that name, finished ones too, in the order of their ids."""
        columns = ("JobID:.20|", "AllocSID:.20|", "State:.30|", "Reason:.60|", "NodeList:.4000|")
        whose = ("-u", str(os.getuid()), "-n", name)
        argv = ("squeue", "-h", "-a", "-t", "all", *whose, "-O", ",".join(columns))
        found: list[Allotted] = []
        for line in self._run(argv, retry=True).stdout.splitlines():
            row = [word.strip() for word in line.split("|")]
            if len(row) >= 5 and row[0].isdecimal() and row[1].isdecimal():
                nodes = values.expand(row[4])
                found.append(Allotted(int(row[0]), int(row[1]), row[2], row[3], nodes))
        return sorted(found, key=lambda job: job.id)

    def placements(self) -> dict[int, Placement]:
        """Return the places of all jobs that hold nodes now, by id: short, no free text."""
        argv = ("squeue", "-o", "%N")
        found: dict[int, Placement] = {}
        for number, row in self._squeue("%T|%P|%u|%N", self._until()).items():
            if len(row) != 4 or row[0] in FINISHED or row[0] == "PENDING":
                continue
            try:
                nodes = values.expand(row[3])
            except ParseError as error:
                raise SlurmError("other", argv, str(error)) from error
            if nodes:
                found[number] = Placement(row[0], row[1], row[2], nodes)
        return found

    def _squeue(self, columns: str, until: float) -> dict[int, list[str]]:
        """Job id → the columns asked for ("%U|%T"); ask for no column that holds free text."""
        argv = ("squeue", "-h", "-a", "-t", "all", "-o", f"%A|{columns}")
        out: dict[int, list[str]] = {}
        for line in self._run(argv, until=until, retry=True).stdout.splitlines():
            number, *row = line.strip().split("|")
            if row and number.isascii() and number.isdigit():
                out[int(number)] = row
        return out

    def nodes(self, names: Iterable[str] | None = None) -> dict[str, Node]:
        """Nodes by name; those that Slurm does not know are missing from the answer."""
        return self._nodes(names, self._until())

    def _nodes(self, names: Iterable[str] | None, until: float) -> dict[str, Node]:
        argv: tuple[str, ...] = ("scontrol", "-a", "-o", "show", "node")
        if names is not None:
            folded = self._folded(argv, names)
            if not folded:
                return {}
            argv = (*argv, folded)
        done = self._run(argv, until=until, retry=True, allow=("not_found",))
        out: dict[str, Node] = {}
        for record in self._records(argv, done.stdout, "node"):
            try:
                node = node_from(record)
            except ParseError as error:
                raise SlurmError("other", argv, str(error)) from error
            out[node.name] = node
        return out

    def partitions(self) -> dict[str, Partition]:
        """All partitions by name, hidden ones too."""
        argv = ("scontrol", "-a", "-o", "show", "partition")
        text = self._run(argv, retry=True).stdout
        try:
            found = [partition_from(r) for r in self._records(argv, text, "partition")]
        except ParseError as error:
            raise SlurmError("other", argv, str(error)) from error
        return {partition.name: partition for partition in found}

    def steps(self, job_id: int | str) -> list[Step]:
        """The running steps of a job that an srun has started."""
        argv = ("scontrol", "-a", "-o", "show", "step", job_argument(job_id))
        text = self._run(argv, retry=True).stdout
        return [
            Step(found[1], values.expand(found[2]), found[3], int(found[4]))
            for found in map(_STEP.search, text.splitlines())
            if found is not None
        ]

    def topology(self) -> str:
        """Return the output of ``scontrol show topology``; "" where the plugin has none."""
        return self._run(("scontrol", "-a", "show", "topology"), retry=True).stdout

    # ---- inside

    def _until(self) -> float:
        return time.monotonic() + self._deadline_s

    def _run(
        self,
        argv: Sequence[str],
        *,
        until: float | None = None,
        input: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        retry: bool = False,
        allow: Collection[str] = (),
    ) -> Completed:
        """Run to the end or the deadline; with ``retry`` once more if time is left for it.

        ``until`` (monotonic seconds) is the deadline of a call that makes several commands.
        """
        until = self._until() if until is None else until
        asks = tuple(argv) != _VERSION
        if asks:
            self._sure(argv)
        while True:
            left = until - time.monotonic()
            if left <= 0:
                raise SlurmError("timeout", argv, f"not asked: {self._deadline_s:g} s have passed")
            done = self._runner(argv, left, input, self._query_env if env is None else env, cwd)
            error = classify(argv, done.returncode, done.stdout, done.stderr)
            if error is None or error.kind in allow:
                self._heard = time.monotonic() if asks else self._heard
                return done
            if error.kind == "version":
                raise self._skewed(error)
            if AMBIGUOUS in error.message.lower() and not self.ping():
                raise SlurmError("unreachable", argv, "no slurmctld answers")
            left = until - time.monotonic()
            if not retry or error.kind != "timeout" or left < 2 * _RETRY_PAUSE_S:
                raise error
            retry = False
            time.sleep(_RETRY_PAUSE_S)

    def _sure(self, argv: Sequence[str]) -> None:
        """Raise ``unreachable`` if all slurmctlds are known to be down.

        A slurmctld that is only slow, or whose host is silent, is left to the deadline.
        """
        if not self._ping_first or time.monotonic() - self._heard < _HEARD_S:
            return
        try:
            up = self._ping(min(_PING_S, self._deadline_s))
        except SlurmError as error:
            if error.kind == "timeout":
                return
            raise
        if not up:
            raise SlurmError("unreachable", argv, "no slurmctld answers")

    def _skewed(self, error: SlurmError) -> SlurmError:
        """Name our own release: neither side of a protocol error does."""
        try:
            done = self._runner(_VERSION, _PING_S, None, self._query_env, None)
        except SlurmError:
            return error
        ours = one_line(done.stdout, 40)
        return SlurmError("version", error.command, f"{error.message} (commands: {ours})")

    def _records(self, argv: Sequence[str], text: str, kind: parse.Record) -> list[dict[str, str]]:
        try:
            return [parse.fields(line, kind) for line in parse.split_records(text, kind)]
        except ParseError as error:
            raise SlurmError("other", argv, str(error)) from error

    def _typed(self, argv: Sequence[str], record: Mapping[str, str]) -> Job:
        try:
            return job_from(record)
        except ParseError as error:
            raise SlurmError("other", argv, str(error)) from error

    def _folded(self, argv: Sequence[str], names: Iterable[str]) -> str:
        try:
            return values.fold(names)
        except ParseError as error:
            raise SlurmError("invalid", argv, str(error)) from error

    def _one_node(self, node: str, until: float) -> Node:
        argv = ("scontrol", "show", "node", node)
        found = self._nodes([node], until)
        if node not in found:
            raise SlurmError("not_found", argv, f"Slurm has no node {node}")
        return found[node]


def job_argument(job_id: int | str) -> str:
    text = str(job_id)
    if _JOB_ID.fullmatch(text) is None:
        raise SlurmError("invalid", ("job", text[:40]), f"not a job id: {text[:40]!r}")
    return text
