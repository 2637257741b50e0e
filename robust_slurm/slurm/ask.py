"""The questions of the door: what Slurm knows, read in one command each."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

from robust_slurm.slurm import parse, values
from robust_slurm.slurm.command import SlurmCommands
from robust_slurm.slurm.errors import SlurmError
from robust_slurm.slurm.model import (
    FINISHED,
    Allotted,
    Job,
    JobPlacement,
    Partition,
    SlurmNode,
    StandbyClaim,
    Step,
    job_from,
    node_from,
    partition_from,
)
from robust_slurm.slurm.values import ParseError

_JOB_ID = re.compile(r"[0-9]{1,10}(_[0-9]{1,10}|\+[0-9]{1,5})?", re.ASCII)
_NODE_LIST = 4000  # characters of a node list that squeue is asked for
STANDBY = "robust-standby-"  # and the training's id: the name of a job that holds a node for it
MOST_CLAIMS = 64  # jobs of one user that wait for standby nodes, or hold them
_CLAIM = re.compile(rf"{STANDBY}(\d{{1,10}})", re.ASCII)
_STEP = re.compile(
    r"^ *StepId=(\d+\.\d+) .*\bState=RUNNING\b.* NodeList=(\S+) .*\bSrunHost:Pid=(\S+):(\d+)"
)


class Questions(SlurmCommands):
    """Reads Slurm. Use it as ``Slurm``, which adds the orders.

    A list of many jobs is asked for without names, comments or other text of users: any of it may
    hold a newline, and behind it a line of another job. What counts is read by the job's id.
    """

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
                with _readable(argv):
                    return job_from(record)
        raise SlurmError("not_found", argv, f"Slurm printed no record of job {wanted}")

    def batch_script(self, job_id: int | str) -> str:
        """The script of a batch job, as submitted. Only its owner (or an operator) may ask."""
        argv = ("scontrol", "write", "batch_script", job_argument(job_id), "-")
        return self._run(argv, retry=True).stdout

    def jobs(self, user: str, after: int = 0, name: str = "") -> list[Job]:
        """A user's jobs that have not finished, with ids above ``after``; each is read alone.

        ``name``: only those of this name, so that few are read; one with a comma is no filter.

        A name or comment may hold a newline and behind it a whole invented record, so a list of
        many jobs has no free text. A job that cannot be read in one way only is left out.
        """
        until = self._until()
        out: list[Job] = []
        named = (f"--name={name}",) if name and "," not in name else ()
        for number, row in sorted(self._squeue("%u|%T", until, *named).items()):
            if number <= after or len(row) != 2 or row[0] != user or row[1] in FINISHED:
                continue
            try:
                job = self._job(number, until)
            except SlurmError as error:
                if error.transient:
                    raise
                continue
            if job.user == user:
                out.append(job)
        return out

    def reserved(self, reservation: str) -> list[int]:
        """Ids of the jobs in a reservation that have not finished."""
        argv = ("squeue", "-h", "-a", "-R", reservation, "-o", "%A|%T")
        rows = [line.split("|") for line in self._run(argv, retry=True).stdout.splitlines()]
        return [int(r[0]) for r in rows if len(r) == 2 and r[0].isdecimal()]

    def job_states(self) -> dict[int, str]:
        """Job id → base state of every job that slurmctld still knows: short, no free text."""
        return {number: row[0] for number, row in self._squeue("%T", self._until()).items()}

    def job_owners(self) -> dict[int, int]:
        """Job id → uid of the owner of every job that slurmctld still knows."""
        rows = self._squeue("%U", self._until())
        return {number: int(row[0]) for number, row in rows.items() if row[0].isdecimal()}

    def accounted(self, ids: Collection[int]) -> dict[int, list[tuple[float, float | None]]]:
        """Start and end of every time that each of these jobs ran, as slurmdbd has it.

        None: it runs. Raises SlurmError, also where Slurm keeps no accounts.
        """
        words = ("-a", "-D", "-X", "-n", "-P", "--format=jobidraw,start,end")
        argv = ("sacct", *words, "-j", ",".join(map(str, sorted(ids))))
        out: dict[int, list[tuple[float, float | None]]] = {}
        for line in self._run(argv).stdout.splitlines() if ids else ():
            number, start, end = (*line.strip().split("|"), "", "", "")[:3]
            if number.isdecimal() and start.isdecimal():
                until = float(end) if end.isdecimal() else None
                out.setdefault(int(number), []).append((float(start), until))
        return out

    def waiting_reasons(self, name: str) -> set[str]:
        """Reasons why our own jobs of that name wait, in the scheduler's words: "Resources", or
        "Nodes required for job are DOWN, DRAINED or reserved for …"."""
        argv = ("squeue", "-h", "-a", "-t", "PD", "-u", str(os.getuid()), "-n", name, "-o", "%r")
        lines = self._run(argv, retry=True).stdout.splitlines()
        return {line.strip() for line in lines if line.strip()}

    def allotted(self, name: str) -> list[Allotted]:
        """Our own user's jobs of that name, finished ones too, in the order of their ids."""
        nodes = f"NodeList:.{_NODE_LIST}|"
        columns = ("JobID:.20|", "AllocSID:.20|", "State:.30|", "Reason:.60|", nodes)
        whose = ("-u", str(os.getuid()), "-n", name)
        argv = ("squeue", "-h", "-a", "-t", "all", *whose, "-O", ",".join(columns))
        found: list[Allotted] = []
        for line in self._run(argv, retry=True).stdout.splitlines():
            row = [word.strip() for word in line.split("|")]
            if len(row) < 5 or not (row[0].isdecimal() and row[1].isdecimal()):
                continue
            if len(row[4]) >= _NODE_LIST:  # a name may be cut to another node's
                raise SlurmError("other", argv, f"the node list of job {row[0]} is cut off")
            with _readable(argv):
                names = values.expand(row[4])
            found.append(Allotted(int(row[0]), int(row[1]), row[2], row[3], names))
        return sorted(found, key=lambda job: job.id)

    def standby_claims(self, partition: str) -> list[StandbyClaim]:
        """Return all users' jobs of a partition that hold or await a standby node, by their names.

        Any user can give a job such a name, for anybody's training, but only a job of his own: a
        name may hold a newline and behind it an invented job, so each is read alone, and once. Of
        a user, no more than MOST_CLAIMS jobs are looked at, the oldest first.
        """
        until = self._until()
        argv = ("squeue", "-h", "-a", "-p", partition, "-o", "%A|%T|%u|%N")
        text = self._run(argv, until=until, retry=True).stdout
        rows = [line.split("|") for line in text.splitlines()]
        listed = sorted((int(r[0]), r[1:]) for r in rows if len(r) == 4 and r[0].isdecimal())
        seen = Counter[str]()
        found: list[StandbyClaim] = []
        for number, (state, user, nodes) in listed:
            seen[user] += 1
            if seen[user] > MOST_CLAIMS:
                continue
            of = _CLAIM.fullmatch(self._name(number, until))
            if of is not None:
                with _readable(argv):
                    names = values.expand(nodes)
                found.append(StandbyClaim(number, int(of[1]), state, user, names))
        self._names = {number: self._names[number] for number, _ in listed if number in self._names}
        return found

    def _name(self, number: int, until: float) -> str:
        """Return the name of a job as it was when it was read first; "" for one that is gone."""
        if number not in self._names:
            argv = ("squeue", "-h", "-a", "-j", str(number), "-o", "%j")
            done = self._run(argv, until=until, retry=True, allow=("not_found", "invalid"))
            self._names[number] = done.stdout.removesuffix("\n")
        return self._names[number]

    def placements(self) -> dict[int, JobPlacement]:
        """Return the places of all jobs that hold nodes now, by id: short, no free text."""
        argv = ("squeue", "-o", "%N")
        found: dict[int, JobPlacement] = {}
        for number, row in self._squeue("%T|%P|%u|%N", self._until()).items():
            if len(row) != 4 or row[0] in FINISHED or row[0] == "PENDING":
                continue
            with _readable(argv):
                nodes = values.expand(row[3])
            if nodes:
                found[number] = JobPlacement(row[0], row[1], row[2], nodes)
        return found

    def _squeue(self, columns: str, until: float, *more: str) -> dict[int, list[str]]:
        """Job id → the columns asked for ("%U|%T"); ask for no column that holds free text."""
        argv = ("squeue", "-h", "-a", "-t", "all", *more, "-o", f"%A|{columns}")
        out: dict[int, list[str]] = {}
        for line in self._run(argv, until=until, retry=True).stdout.splitlines():
            number, *row = line.strip().split("|")
            if row and number.isascii() and number.isdigit():
                out[int(number)] = row
        return out

    def nodes(self, names: Iterable[str] | None = None) -> dict[str, SlurmNode]:
        """Nodes by name; those that Slurm does not know are missing from the answer."""
        return self._nodes(names, self._until())

    def _nodes(self, names: Iterable[str] | None, until: float) -> dict[str, SlurmNode]:
        argv: tuple[str, ...] = ("scontrol", "-a", "-o", "show", "node")
        if names is not None:
            folded = self._folded(argv, names)
            if not folded:
                return {}
            argv = (*argv, folded)
        done = self._run(argv, until=until, retry=True, allow=("not_found",))
        with _readable(argv):
            found = [node_from(record) for record in self._records(argv, done.stdout, "node")]
        return {node.name: node for node in found}

    def partitions(self) -> dict[str, Partition]:
        """All partitions by name, hidden ones too."""
        argv = ("scontrol", "-a", "-o", "show", "partition")
        text = self._run(argv, retry=True).stdout
        with _readable(argv):
            found = [partition_from(r) for r in self._records(argv, text, "partition")]
        return {partition.name: partition for partition in found}

    def steps(self, job_id: int | str) -> list[Step]:
        """The running steps of a job that an srun has started."""
        argv = ("scontrol", "-a", "-o", "show", "step", job_argument(job_id))
        text = self._run(argv, retry=True).stdout
        with _readable(argv):
            return [
                Step(found[1], values.expand(found[2]), found[3], int(found[4]))
                for found in map(_STEP.search, text.splitlines())
                if found is not None
            ]

    def topology(self) -> str:
        """Return the output of ``scontrol show topology``; "" where the plugin has none."""
        return self._run(("scontrol", "-a", "show", "topology"), retry=True).stdout

    # ---- inside

    def _records(self, argv: Sequence[str], text: str, kind: parse.Record) -> list[dict[str, str]]:
        with _readable(argv):
            return [parse.fields(line, kind) for line in parse.split_records(text, kind)]

    def _folded(self, argv: Sequence[str], names: Iterable[str]) -> str:
        try:
            return values.fold(names)
        except ParseError as error:
            raise SlurmError("invalid", argv, str(error)) from error

    def _one_node(self, node: str, until: float) -> SlurmNode:
        argv = ("scontrol", "show", "node", node)
        found = self._nodes([node], until)
        if node not in found:
            raise SlurmError("not_found", argv, f"Slurm has no node {node}")
        return found[node]


@contextmanager
def _readable(argv: Sequence[str]) -> Iterator[None]:
    """Raise SlurmError where the answer to a command cannot be read."""
    try:
        yield
    except ParseError as error:
        raise SlurmError("other", argv, str(error)) from error


def job_argument(job_id: int | str) -> str:
    text = str(job_id)
    if _JOB_ID.fullmatch(text) is None:
        raise SlurmError("invalid", ("job", text[:40]), f"not a job id: {text[:40]!r}")
    return text
