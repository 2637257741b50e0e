"""The door to Slurm by pyslurm: the questions and orders that its process answers sooner.

Everything else, and everything once that process is lost, goes by Slurm's commands. Submissions
always do: only sbatch runs a site's cli_filter, and reads every option. So do questions about few
nodes, and all that robust-slurm asks of one job: its text has fields that pyslurm does not have.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from robust_slurm.slurm import values
from robust_slurm.slurm.child import (
    COMMAND,
    ChildLate,
    ChildLost,
    PyslurmChild,
    PyslurmRefusal,
)
from robust_slurm.slurm.door import Slurm
from robust_slurm.slurm.errors import SlurmError, classify
from robust_slurm.slurm.model import Node
from robust_slurm.slurm.run import Runner, query_env, run_command

PAYS_FROM = 3000  # nodes: below, a process with pyslurm starts no sooner than scontrol is read
_HINT = "install the pyslurm of the cluster's release, or set slurm_backend = auto"


class PySlurm(Slurm):
    """Slurm as pyslurm reaches it. Safe to use from several threads, which wait for each other."""

    def __init__(
        self,
        runner: Runner = run_command,
        deadline_s: float = 10.0,
        environ: Mapping[str, str] | None = None,
        *,
        required: bool = False,
        ping_first: bool = True,
        argv: Sequence[str] = COMMAND,
    ) -> None:
        """``required``: raise SlurmError instead of going on by commands without pyslurm."""
        super().__init__(runner, deadline_s, environ, ping_first=ping_first)
        self._child = PyslurmChild(argv, query_env(self._environ))
        self._required = required
        self._fits = False  # its release does
        self._counting = threading.Lock()
        self._size = -1  # nodes of the largest partition; -1: not counted
        self._lost = ""  # why the commands are used from now on

    def backend(self) -> tuple[str, str]:
        until = self._until()
        pays = self._pays(until)
        try:
            self._ready(until)
        except ChildLost as error:
            return "commands", f"pyslurm cannot be used: {error}"
        which = f"pyslurm {self._child.version}"
        if not pays:
            self.close()
            count = f"Slurm's commands are faster below {PAYS_FROM} nodes"
            return "commands", f"{which} fits, but {count}"
        return "pyslurm", which

    def close(self) -> None:
        self._child.close()

    # ---- what pyslurm answers

    def _nodes(self, names: Iterable[str] | None, until: float) -> dict[str, Node]:
        if names is not None or not self._pays(until):
            return super()._nodes(names, until)
        rows = self._question({"do": "nodes"}, until)
        if rows is None:
            return super()._nodes(None, until)
        try:
            found = [_node(row) for row in rows]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            self._lose(("pyslurm", "nodes"), f"its nodes cannot be read: {error!r}")
            return super()._nodes(None, until)
        return {node.name: node for node in found}

    def _squeue(self, columns: str, until: float) -> dict[int, list[str]]:
        if not self._required:  # squeue's few columns are read as soon, and beside the nodes
            return super()._squeue(columns, until)
        order = {"%U": 1, "%u": 2, "%T": 3, "%P": 4, "%N": 5}
        wanted = [order[column] for column in columns.split("|")]
        rows = self._question({"do": "jobs"}, until)
        if rows is None:
            return super()._squeue(columns, until)
        return {row[0]: [str(row[index]) for index in wanted] for row in rows}

    def _set_nodes(self, names: Sequence[str], words: Mapping[str, str], until: float) -> None:
        argv = ("pyslurm", "update", *(f"{key}={value}" for key, value in words.items()))
        request = {
            "do": "set_node",
            "nodes": self._folded(argv, names),
            "state": words["State"],
            "reason": words.get("Reason"),
        }
        if not self._ready_now() or not self._order(argv, request, until, again=True):
            super()._set_nodes(names, words, until)

    def requeue(self, job_id: int | str) -> None:
        argv = ("pyslurm", "requeue", str(job_id))
        request = {"do": "requeue", "job": job_id}
        # "120_4" has a number of its own for pyslurm.
        by_it = isinstance(job_id, int) and self._ready_now()
        if not by_it or not self._order(argv, request, self._until(), again=False):
            super().requeue(job_id)

    # ---- inside

    def _ready_now(self) -> bool:
        """True if an order by pyslurm needs no new process, or must be by pyslurm."""
        return self._required or self._child.running

    def _pays(self, until: float) -> bool:
        """True if reading all nodes by pyslurm is worth its process."""
        if self._ready_now():
            return True
        if self._lost:
            return False
        with self._counting:
            if self._size < 0:
                argv = ("scontrol", "-a", "-o", "show", "partition")
                found = self._records(argv, self._run(argv, until=until).stdout, "partition")
                self._size = max((values.integer(r.get("TotalNodes")) for r in found), default=0)
        return self._size >= PAYS_FROM

    def _ready(self, until: float) -> None:
        """Start pyslurm's process, if it is the cluster's. Raises ChildLost."""
        if self._lost:
            raise ChildLost(self._lost)
        self._child.start(until)
        if self._fits:
            return
        theirs = release(self._child.version)
        try:
            ours = self.version()
        except SlurmError as error:
            raise ChildLost(f"the release of Slurm's commands is not known: {error}") from None
        if theirs > ours:  # a client newer than the server always fails
            self._child.close()
            self._lost = (
                f"pyslurm {self._child.version} is newer than the Slurm {ours[0]:02d}.{ours[1]:02d}"
                " of this machine"
            )
            raise ChildLost(self._lost)
        self._fits = True

    def _question(self, request: Mapping[str, Any], until: float) -> Any:
        """Return the answer, or None: ask the commands."""
        argv = ("pyslurm", str(request["do"]))
        self._sure(argv)
        try:
            self._ready(until)
            return self._child.ask(request, until)
        except ChildLate as error:
            raise SlurmError("timeout", argv, str(error)) from None
        except ChildLost as error:
            self._lose(argv, str(error))
        except PyslurmRefusal as error:
            told = _classified(argv, str(error))
            if told.kind != "version":
                raise told from None
            self._lose(argv, f"it does not fit this slurmctld: {error}")
        return None

    def _order(
        self, argv: Sequence[str], request: Mapping[str, Any], until: float, *, again: bool
    ) -> bool:
        """Give the order; False: give it by the commands. ``again``: it may be given twice."""
        self._sure(argv)
        try:
            self._ready(until)
        except ChildLate as error:
            raise SlurmError("timeout", argv, str(error)) from None
        except ChildLost as error:
            self._lose(argv, str(error))
            return False
        try:
            self._child.ask(request, until)
        except PyslurmRefusal as error:
            raise _classified(argv, str(error)) from None
        except ChildLost as error:
            late = isinstance(error, ChildLate)
            self._lost = "" if late else str(error)
            if late or not again:
                said = f"{error}; the order may have been carried out"
                raise SlurmError("timeout", argv, said) from None
            self._lose(argv, str(error))
            return False
        return True

    def _lose(self, argv: Sequence[str], why: str) -> None:
        self._lost = why
        if self._required:
            raise SlurmError("other", argv, f"pyslurm cannot be used: {why}", _HINT)


def release(version: str) -> tuple[int, int]:
    """Return (24, 11) of "24.11.0". Raises ChildLost for what is no version."""
    numbers = version.split(".")[:2]
    if len(numbers) < 2 or not all(number.isdecimal() for number in numbers):
        raise ChildLost(f"its version is {version[:40]!r}")
    return int(numbers[0]), int(numbers[1])


def _classified(argv: Sequence[str], words: str) -> SlurmError:
    error = classify(argv, 1, "", words)
    assert error is not None  # 1 is no success
    return error


def _node(row: Sequence[Any]) -> Node:
    name, hostname, port, state, partitions, kinds, cpus, comment, features, why = row
    reason, author, given = why or (None, None, None)
    gres = ",".join(f"{kind}:{int(count)}" for kind, count in (kinds or {}).items())
    return Node(
        name=str(name),
        hostname=str(hostname or name),
        port=port or None,
        state=values.state_flags(state),
        reason=values.optional(reason),
        reason_by=author,
        reason_time=float(given) if given else None,
        partitions=tuple(partitions or ()),
        gres=gres or None,
        cpus=int(cpus or 0),
        comment=values.optional(comment),
        raw={},
        features=tuple(features or ()),
    )
