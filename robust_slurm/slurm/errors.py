"""Errors of requests to Slurm, and the rules that tell its messages apart.

Slurm's exit codes say little (1 for nearly everything, 0 for some failures, the error number
modulo 256 for scancel), so the kind is read from the message. The texts are those of
``src/common/slurm_errno.c``, which kept its wording from 22.05 to 26.05; a client that is newer
than the server gets protocol errors that do not say so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, get_args

from robust_slurm.text import one_line

Kind = Literal[
    "timeout",
    "unreachable",
    "denied",
    "not_found",
    "version",
    "invalid",
    "conflict",
    "other",
]

NO_COMMAND = " is not in PATH"
KINDS: tuple[Kind, ...] = get_args(Kind)

_HINTS: dict[Kind, str] = {
    "timeout": "slurmctld is slow or down: look at `scontrol ping` and `sdiag`, then try again",
    "unreachable": "slurmctld or its network is down: look at `scontrol ping` and SLURM_CONF",
    "denied": "run it as the job's owner, or as a Slurm operator for nodes",
    "not_found": "check the name or id: finished jobs are forgotten after MinJobAge",
    "version": "the Slurm commands may be newer than slurmctld or much older (compare `scontrol "
    "version` here and on its host), or munge keys or clocks differ",
    "invalid": "correct the request: Slurm will refuse it again as it is",
    "conflict": "the job or node is not in a state that allows it: read it again before retrying",
    "other": "see the slurmctld log",
}

_NO_SECOND_UPDATE = (
    "releases before 24.11 without slurmdbd accept no update of a running job after its first "
    "resize: keep the node in the allocation unused, or requeue the job"
)

# slurmctld without slurmdbd answers a change of a job's partition by whatever errno its thread has
# left (update_job() takes a missing association for an error): seen in one try of four by 24.11 and
# in two of three by 26.05. The request was not carried out.
_STRAY = "slurmctld without slurmdbd refuses a change of partition now and then: try again"

# Printed by 22.05's scontrol both for a refused second update and where no slurmctld answers.
AMBIGUOUS = "unexpected message received for job"

# (lower-case part of a message, kind, hint or None for the kind's own). The first match wins.
_RULES: tuple[tuple[str, Kind, str | None], ...] = (
    ("munge encode failed", "unreachable", "munged is down on this host: start it"),
    ("socket timed out", "timeout", None),
    ("rate limit exceeded", "timeout", None),
    ("unable to contact slurm controller", "unreachable", None),
    ("connection refused", "unreachable", None),
    ("connection timed out", "unreachable", None),
    ("communication connection failure", "unreachable", None),
    ("can't find an address", "unreachable", None),
    ("unable to resolve", "unreachable", None),
    ("no route to host", "unreachable", None),
    ("network is unreachable", "unreachable", None),
    ("controller in standby mode", "unreachable", None),
    ("controller is in standby mode", "unreachable", None),
    ("insane message length", "version", None),
    ("zero bytes were transmitted or received", "version", None),
    (AMBIGUOUS, "conflict", _NO_SECOND_UPDATE),
    ("unexpected message received", "version", None),
    ("protocol authentication error", "version", None),
    ("invalid authentication credential", "version", None),
    ("authentication credential expired", "version", None),
    ("incompatible versions of client and server", "version", None),
    ("header lengths are longer than data received", "version", None),
    ("unable to process configuration file", "invalid", "set SLURM_CONF to the cluster's file"),
    ("could not establish a configuration source", "invalid", "set SLURM_CONF, or run slurmd here"),
    ("access/permission denied", "denied", None),
    ("invalid user id", "denied", None),
    ("not permitted to use", "denied", None),
    ("access denied", "denied", None),
    ("rejecting authentication of user", "denied", None),
    (
        "requested operation is presently disabled",
        "denied",
        "a job submitted with --no-requeue cannot be requeued: update it with Requeue=1 first",
    ),
    ("invalid account or account/partition combination", "denied", None),
    ("resource temporarily unavailable", "conflict", _STRAY),
    ("interrupted system call", "conflict", _STRAY),
    ("invalid job id", "not_found", None),
    ("job has not been found", "not_found", None),
    ("invalid node name", "not_found", None),
    ("invalid partition", "not_found", None),
    ("requested reservation is invalid", "not_found", None),
    (" not found", "not_found", None),
    ("db index is being set", "conflict", _NO_SECOND_UPDATE),
    ("job is no longer pending execution", "conflict", None),
    ("job is pending execution", "conflict", "it was requeued already, or never started"),
    ("already completing or completed", "conflict", None),
    ("transition state", "conflict", None),
    ("requested nodes are busy", "conflict", None),
    ("can not be altered now", "conflict", None),
    ("job has already", "conflict", None),
    ("job is not running", "conflict", None),
    ("job is not pending nor running", "conflict", None),
    ("required node not available", "conflict", None),
    ("partition not available", "conflict", None),
    ("partition is in use", "conflict", None),
    ("partition configuration not available now", "conflict", None),
    ("partition in down state", "conflict", None),
    ("limit reached", "conflict", None),
    ("requested node configuration is not available", "invalid", None),
    ("invalid node state", "conflict", None),
    ("node count specification invalid", "invalid", None),
    ("violates accounting/qos policy", "denied", None),
    ("update of this parameter is not supported", "invalid", None),
    ("unrecognized option", "invalid", None),
    ("unrecognised option", "invalid", None),
    ("you must specify a reason", "invalid", None),
    ("does not look like a batch script", "invalid", None),
    ("batch script is empty", "invalid", None),
    ("unknown job signal", "invalid", None),
    ("memory specification can not be satisfied", "invalid", None),
    ("time limit", "invalid", None),
    ("invalid", "invalid", None),  # option, keyword, QOS, feature, generic resource, array …
)


_RECORD = re.compile(r"[A-Z][A-Za-z]*=")  # as scontrol begins each of them


class SlurmError(Exception):
    """A call to Slurm that did not do what was asked.

    ``kind`` is for programs, ``message`` is Slurm's own words (or ours for a deadline), ``command``
    the argument list, ``hint`` what to do next. ``str()`` joins them.
    """

    def __init__(
        self,
        kind: Kind,
        command: Sequence[str],
        message: str,
        hint: str | None = None,
    ) -> None:
        super().__init__(kind, tuple(command), message)
        self.kind: Kind = kind
        self.command: tuple[str, ...] = tuple(command)
        self.message = message
        self.hint = hint or _HINTS[kind]

    @property
    def transient(self) -> bool:
        """True if the same request may succeed later without anything else changing."""
        return self.kind in ("timeout", "unreachable")

    @property
    def no_command(self) -> bool:
        """True if Slurm was not asked: its command is not installed here, or not in PATH."""
        return self.message.endswith(NO_COMMAND)

    @property
    def away(self) -> bool:
        """True if Slurm has not decided on the request: slurmctld, munge or the network is down.

        ``version`` counts: a slurmctld that is being started or upgraded, or whose own munged is
        down, answers with protocol and authentication errors, too. So does a stray refusal.
        """
        return self.kind in ("timeout", "unreachable", "version") or self.stray

    @property
    def stray(self) -> bool:
        """True if the refusal has nothing to do with the request: the next try may succeed."""
        return self.hint == _STRAY

    def __str__(self) -> str:
        shown = " ".join(self.command)
        if len(shown) > 200:
            shown = shown[:197] + "..."
        return f"`{shown}` failed ({self.kind}): {self.message}; {self.hint}"


def _rule(text: str) -> tuple[Kind, str | None] | None:
    lowered = text.lower()
    for part, kind, hint in _RULES:
        if part in lowered:
            return kind, hint
    return None


def classify(argv: Sequence[str], returncode: int, stdout: str, stderr: str) -> SlurmError | None:
    """The error in a finished command's output, or None when it succeeded. Pure.

    Exit code 0 is not proof: a message on stderr that the table knows is an error all the same,
    except for sbatch with a job id on stdout (job_submit plugins talk to the user on stderr).
    """
    name = argv[0].rsplit("/", 1)[-1] if argv else ""
    if returncode == 0:
        if name == "sbatch" and stdout.strip():
            return None
        rule = _rule(stderr)
        # Warnings may also begin with "invalid …"; an errno may be of a try that Slurm repeated.
        if rule is None or rule[0] == "invalid" or rule[1] == _STRAY:
            return None
        return SlurmError(rule[0], argv, _message(stderr), rule[1])
    # stdout counts only if stderr is empty: "Node nope not found" is printed there, behind the
    # records of the nodes that were found. Their reasons and comments are not Slurm's messages.
    text = stderr.strip() or "\n".join(x for x in stdout.splitlines() if not _RECORD.match(x))
    rule = _rule(text)
    kind, hint = rule if rule is not None else ("other", None)
    return SlurmError(kind, argv, _message(text) or f"exit code {returncode}, no message", hint)


def _message(text: str) -> str:
    """The message on one line, printable, at most 500 characters."""
    joined = "; ".join(line.strip() for line in text.splitlines() if line.strip())
    return one_line(joined, 500)
