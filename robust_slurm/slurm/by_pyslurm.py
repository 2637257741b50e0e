"""The client of Slurm by pyslurm, for questions and orders that pyslurm's process answers faster.

Everything else, and everything once that process is lost, goes by Slurm's commands. Submissions
always do: only sbatch runs a site's cli_filter, and reads every option. So do questions about few
nodes, and all that robust-slurm asks of one job: its text has fields that pyslurm does not have.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from robust_slurm.slurm import values
from robust_slurm.slurm.ask import job_argument
from robust_slurm.slurm.child import (
    COMMAND,
    ChildLate,
    ChildLost,
    PyslurmChild,
    PyslurmRefusal,
)
from robust_slurm.slurm.door import Slurm
from robust_slurm.slurm.errors import Kind, SlurmError, classify
from robust_slurm.slurm.model import SlurmNode
from robust_slurm.slurm.run import Runner, query_env, run_command
from robust_slurm.text import one_line

T = TypeVar("T")
PAYS_FROM = 3000  # nodes; with fewer, scontrol has answered before a pyslurm process has started
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
        self._fits = ""  # the version of pyslurm that was found to fit the cluster
        self._counting = threading.Lock()
        self._size = -1  # nodes of the largest partition; -1: not counted
        self._lost = ""  # why the commands are used from now on
        self._skew = False  # True: lost because pyslurm's release does not fit slurmctld's

    def backend(self) -> tuple[str, str]:
        until = self._until()
        pays = self._pays(until)
        try:
            self._ready(until)
        except ChildLost as error:
            self.close()
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

    def _nodes(self, names: Iterable[str] | None, until: float) -> dict[str, SlurmNode]:
        if names is not None or not self._pays(until):
            return super()._nodes(names, until)
        found = self._question({"do": "nodes"}, until, lambda rows: [_node(row) for row in rows])
        if found is None:
            return super()._nodes(None, until)
        return {node.name: node for node in found}

    def _squeue(self, columns: str, until: float, *more: str) -> dict[int, list[str]]:
        # squeue is as fast for few columns, and runs while nodes are read.
        if more or not self._required:
            return super()._squeue(columns, until, *more)
        order = {"%U": 1, "%u": 2, "%T": 3, "%P": 4, "%N": 5}
        wanted = [order[column] for column in columns.split("|")]
        found = self._question({"do": "jobs"}, until, lambda rows: [_job(row) for row in rows])
        if found is None:
            return super()._squeue(columns, until)
        return {job[0]: [str(job[index]) for index in wanted] for job in found}

    def _set_node(self, node: str, words: Mapping[str, str], until: float) -> None:
        argv = ("pyslurm", "update", *(f"{key}={value}" for key, value in words.items()))
        request = {
            "do": "set_node",
            "nodes": self._folded(argv, [node]),
            "state": words["State"],
            "reason": words.get("Reason"),
        }
        if not self._ready_now() or not self._order(argv, request, until, again=True):
            super()._set_node(node, words, until)

    def requeue(self, job_id: int | str) -> None:
        argv = ("pyslurm", "requeue", str(job_id))
        job_argument(job_id)
        request = {"do": "requeue", "job": job_id}
        # pyslurm knows an array task ("120_4") only by its own job number.
        by_it = isinstance(job_id, int) and self._ready_now()
        if not by_it or not self._order(argv, request, self._until(), again=False):
            super().requeue(job_id)

    # ---- inside

    def _ready_now(self) -> bool:
        """True if an order by pyslurm needs no new process, or must be by pyslurm."""
        return self._required or self._child.running

    def _pays(self, until: float) -> bool:
        """True if reading all nodes by pyslurm is worth starting its process."""
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
        """Start pyslurm's process, and check that its release fits. Raises ChildLost."""
        if self._lost:
            raise ChildLost(self._lost)
        self._child.start(until)
        version = self._child.version
        if self._fits == version:
            return
        theirs = release(version)
        try:
            ours = self._version(until)
        except SlurmError as error:
            raise ChildLost(f"the release of Slurm's commands is not known: {error}") from None
        if theirs > ours:  # a client newer than the server always fails
            self._skew = True
            raise ChildLost(
                f"pyslurm {version} is newer than the Slurm {ours[0]:02d}.{ours[1]:02d}"
                " of this machine"
            )
        self._fits = version

    def _question(
        self, request: Mapping[str, Any], until: float, read: Callable[[Any], T]
    ) -> T | None:
        """Return what ``read`` makes of the answer, or None: ask the commands."""
        argv = ("pyslurm", str(request["do"]))
        self._sure(argv, until)
        try:
            self._ready(until)
            answer = self._child.ask(request, until)
            self._heard = time.monotonic()
            return read(answer)
        except ChildLate as error:
            raise SlurmError("timeout", argv, str(error)) from None
        except ChildLost as error:
            self._lose(argv, str(error))
        except PyslurmRefusal as error:
            self._refused(argv, error)
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
            self._lose(argv, f"its {request['do']} cannot be read: {one_line(repr(error), 200)}")
        return None

    def _order(
        self, argv: Sequence[str], request: Mapping[str, Any], until: float, *, again: bool
    ) -> bool:
        """Give the order; False: give it by the commands. ``again``: it may be given twice."""
        self._sure(argv, until)
        try:
            self._ready(until)
            self._child.ask(request, until)
        except PyslurmRefusal as error:
            # Slurm did not understand, or was lost while it answered: the order may be carried out.
            self._refused(argv, error, raises=not again)
            return False
        except ChildLost as error:
            late = isinstance(error, ChildLate)
            if error.sent and (late or not again):
                self._forget("" if late else str(error))
                said = f"{error}; the order may have been carried out"
                raise SlurmError("timeout", argv, said) from None
            if late:
                raise SlurmError("timeout", argv, str(error)) from None
            self._lose(argv, str(error))
            return False
        self._heard = time.monotonic()
        return True

    def _refused(
        self, argv: Sequence[str], refusal: PyslurmRefusal, *, raises: bool = False
    ) -> None:
        """Raise Slurm's error, unless it means that pyslurm does not fit; the commands may fit."""
        error = classify(argv, 1, "", str(refusal))
        assert error is not None  # 1 is no success
        if error.kind != "version":
            raise error from None
        version = self._child.version
        self._skew = True
        words = f"pyslurm {version} does not fit this slurmctld: {error.message}"
        if raises:
            self._forget(words)
            raise SlurmError("version", argv, words, _HINT) from None
        self._lose(argv, words)

    def _lose(self, argv: Sequence[str], why: str) -> None:
        self._forget(why)
        if self._required:
            kind: Kind = "version" if self._skew else "other"
            raise SlurmError(kind, argv, f"pyslurm cannot be used: {why}", _HINT)

    def _forget(self, why: str) -> None:
        """If there is a reason ``why``, use commands from now on and end pyslurm's process."""
        self._lost = why
        if why:
            self._child.close()


def release(version: str) -> tuple[int, int]:
    """Return (24, 11) of "24.11.0". Raises ChildLost for what is no version."""
    match = re.match(r"(\d{1,4})\.(\d{1,4})(?!\d)", version, re.ASCII)
    if match is None:
        raise ChildLost(f"its version is {version[:40]!r}")
    return int(match[1]), int(match[2])


def _job(row: Sequence[Any]) -> Sequence[Any]:
    number, uid, user, state, partition, nodes = row
    if not isinstance(number, int) or not isinstance(uid, int):
        raise ValueError(f"job {number!r} of the user {uid!r}")
    return number, uid, user, state, partition or "", nodes or ""


def _node(row: Sequence[Any]) -> SlurmNode:
    name, hostname, port, state, partitions, kinds, cpus, comment, features, why = row
    if not name:
        raise ValueError("a node without a name")
    reason, given = why or (None, None)
    gres = ",".join(f"{kind}:{int(count)}" for kind, count in (kinds or {}).items())
    return SlurmNode(
        name=str(name),
        hostname=str(hostname or name),
        port=port or None,
        state=values.state_flags(state),
        reason=values.optional(reason),
        reason_time=float(given) if given else None,
        partitions=tuple(partitions or ()),
        gres=gres or None,
        cpus=int(cpus or 0),
        comment=values.optional(comment),
        raw={},
        features=tuple(features or ()),
    )
