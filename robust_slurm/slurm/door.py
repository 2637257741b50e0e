"""The one door to Slurm: every question and every order of the project goes through ``Slurm``.

Synchronous, each call bounded by a deadline in seconds. A call that fails raises SlurmError; none
retries beyond its deadline. With slurmctld down a command blocks 9-18 s by itself, so expect
``timeout`` or ``unreachable`` and ask ``ping()``, which answers at once.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from robust_slurm.drain_reason import PREFIX
from robust_slurm.slurm.ask import job_argument
from robust_slurm.slurm.errors import SlurmError
from robust_slurm.slurm.model import SlurmNode
from robust_slurm.slurm.objects import Objects
from robust_slurm.slurm.run import without_slurm
from robust_slurm.text import one_line

# Set by slurmctld on a node that stopped answering, cleared when it answers: nobody wrote it.
_AUTOMATIC_REASONS = frozenset({"not responding"})
_REASON_LENGTH = 200  # characters; more is unreadable in sinfo -R


@dataclass(frozen=True)
class DrainResult:
    """Result of drain() or undrain(): if the order was given, and the node as it was before."""

    done: bool
    before: SlurmNode


class Slurm(Objects):
    """Slurm as this machine's commands reach it. Safe to use from several threads."""

    # ---- orders about jobs

    def shrink(self, job_id: int | str, keep: Sequence[str]) -> None:
        """Release all nodes but ``keep`` from a running job. If that is done already, do nothing.

        Reads the job first: on a pending job the same order would pin it to these nodes.
        scontrol writes no resize scripts, because no variable says that it runs in the job.
        SlurmError ``conflict`` if the job does not run, or if this release takes no second update
        of it (see the message).
        """
        until = self._until()
        job = self._job(job_id, until)
        argv: tuple[str, ...] = ("scontrol", "update", f"JobId={job_argument(job_id)}")
        if not job.running:
            raise SlurmError("conflict", argv, f"the job is {job.state}, not RUNNING")
        wanted = set(keep)
        left = [name for name in job.nodes if name in wanted]
        if not left:
            raise SlurmError("invalid", argv, f"none of the nodes to keep is in {job.nodes}")
        if len(left) == len(job.nodes):
            return
        argv = (*argv, f"NodeList={self._folded(argv, left)}")
        try:
            self._run(argv, until=until)
        except SlurmError as error:
            if error.kind in ("unreachable", "version", "denied"):
                raise
            try:  # the order may have been carried out all the same, or a lost node be gone already
                now = self._job(job_id, self._until())
            except SlurmError:
                raise error from None
            if not (now.running and set(now.nodes) <= wanted):
                raise

    def requeue(self, job_id: int | str) -> None:
        """Put a batch job back in the queue. ``conflict`` if it is pending already."""
        self._run(("scontrol", "requeue", job_argument(job_id)))

    def cancel(self, job_id: int | str) -> None:
        """Cancel a job. A job that is gone is no error."""
        try:
            self._run(("scancel", job_argument(job_id)), retry=True)
        except SlurmError as error:
            gone = "already completing or completed" in error.message.lower()
            if not (gone or error.kind == "not_found"):
                raise

    def update_job(
        self,
        job_id: int | str,
        *,
        partition: str | None = None,
        exclude: Sequence[str] | None = None,
        start_time: float | None = None,
        requeue: bool | None = None,
        num_nodes: int | None = None,
        required: Sequence[str] | None = None,
        within: float | None = None,
    ) -> None:
        """Change a job in one request; None leaves a field as it is.

        ``partition`` may be a list "train,standby"; an empty ``exclude`` or ``required`` (nodes
        that the job insists on) clears the list; ``start_time`` is seconds since 1970. All but
        ``requeue`` are refused (``conflict``) while the job runs; ``conflict`` may take 5 s to come
        (see errors.py on the second update).
        ``within``: seconds for this request, instead of the door's deadline.
        """
        argv: tuple[str, ...] = ("scontrol", "update", f"JobId={job_argument(job_id)}")
        changes: list[str] = []
        if partition is not None:
            changes.append(f"Partition={partition}")
        if exclude is not None:
            changes.append(f"ExcNodeList={self._folded(argv, exclude)}")
        if start_time is not None:
            local = time.localtime(start_time)  # Slurm reads wall-clock times of this zone only
            changes.append(time.strftime("StartTime=%Y-%m-%dT%H:%M:%S", local))
        if requeue is not None:
            changes.append(f"Requeue={int(requeue)}")
        if num_nodes is not None:
            changes.append(f"NumNodes={num_nodes}")
        if required is not None:
            changes.append(f"ReqNodeList={self._folded(argv, required)}")
        if changes:
            until = None if within is None else time.monotonic() + within
            self._run((*argv, *changes), until=until, retry=True)

    def submit(
        self,
        script: str,
        *,
        args: Sequence[str] = (),
        cwd: Path | None = None,
    ) -> int:
        """Submit a batch script (its text begins with "#!") and return the job id.

        The job gets our environment in full, less what describes the job that we run in; values
        may hold commas and newlines, since nothing passes through --export's list. Never retried:
        after a time-out the job may exist.
        """
        argv = ("sbatch", "--parsable", "--export=ALL", *args)
        env = {"PATH": os.defpath} | without_slurm(self._environ)
        printed = self._run(argv, input=script, env=env, cwd=cwd).stdout
        match = re.search(r"^(\d+)(;|$)", printed.strip(), re.MULTILINE)
        if match is None:
            raise SlurmError("other", argv, f"sbatch printed no job id: {printed[:200]!r}")
        return int(match[1])

    # ---- orders about nodes (operators only)

    def drain(self, node: str, reason: str) -> DrainResult:
        """Drain one node, unless somebody else's reason stands there already.

        One node per call: Slurm applies a list partly and still reports failure. The reason is
        made printable, short, and starts with our prefix. Reading and writing are two requests,
        so an operator's drain in the few milliseconds between them can be overwritten.
        """
        until = self._until()
        before = self._one_node(node, until)
        if not _may_drain(before):
            return DrainResult(False, before)
        self._set_node(node, {"State": "DRAIN", "Reason": _reason(reason)}, until)
        return DrainResult(True, before)

    def undrain(self, node: str, expect_reason_prefix: str = PREFIX) -> DrainResult:
        """Take a drain back, only if the node is drained for a reason with this prefix.

        UNDRAIN, not RESUME: a node that is also DOWN stays so.
        """
        until = self._until()
        before = self._one_node(node, until)
        mine = (before.reason or "").startswith(expect_reason_prefix)
        if "DRAIN" not in before.state or not mine:
            return DrainResult(False, before)
        self._set_node(node, {"State": "UNDRAIN"}, until)
        return DrainResult(True, before)

    def _set_node(self, node: str, words: Mapping[str, str], until: float) -> None:
        argv: tuple[str, ...] = ("scontrol", "update")
        argv = (*argv, f"NodeName={self._folded(argv, [node])}")
        self._run((*argv, *(f"{k}={v}" for k, v in words.items())), until=until, retry=True)


def _may_drain(node: SlurmNode) -> bool:
    text = node.reason_in_force
    return not text or text.startswith(PREFIX) or text.lower() in _AUTOMATIC_REASONS


def _reason(text: str) -> str:
    words = printable(text, _REASON_LENGTH)
    return words if words.startswith(PREFIX) else printable(f"{PREFIX} {words}", _REASON_LENGTH)


def printable(text: str, length: int) -> str:
    """Text that can stand in a reason: one line, no control characters.

    Quotes go (scontrol strips a pair of them), and brackets become round, since Slurm signs a
    reason with "[who@when]".
    """
    table = str.maketrans({"[": "(", "]": ")", '"': None, "'": None})
    return one_line(text.translate(table), len(text) + 1)[:length].rstrip()
