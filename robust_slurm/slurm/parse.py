"""Parse the text of ``scontrol show … -o`` into fields and values. Pure.

One record is one line ``Key=value Key=value …``. Values are not quoted and some are free text that
a user or an operator wrote (job name, comment, paths, reason): they may contain spaces, ``=`` and
whole fake fields such as ``NodeList=n9``. So the free-text keys are known by name, and each may
only be ended by a key that Slurm prints after it (order read in the source, 22.05 to 26.05).
"""

from __future__ import annotations

import re
from typing import Literal

from robust_slurm.slurm.values import ParseError

Record = Literal["job", "node", "partition"]

_HEAD: dict[Record, str] = {
    "job": "JobId=",
    "node": "NodeName=",
    "partition": "PartitionName=",
}
_KEY = re.compile(r"(?<!\S)([A-Z][A-Za-z0-9_]*(?:[:/][A-Za-z0-9_]+)*)=")

# The text that follows a job's name. Nothing before it in the record is free text.
_AFTER_JOB_NAME = re.compile(
    r"(?:\s+SLUID=\S*)?(?:\s+HetJobIdSet=\S*)?"
    r"\s+UserId=[^\s()]*\(\d+\) GroupId=[^\s()]*\(\d+\) MCS_label="
)
_SIGNATURE = re.compile(r"\s\[[^\s@\[\]]+@(\d+|\d{4}-\d\d-\d\dT[\d:]+|Unknown|None)\]")

# From here on a record contains free text, in the order in which Slurm prints it.
_JOB_TAIL = (
    "Command",
    "SubmitLine",
    "WorkDir",
    "AdminComment",
    "SystemComment",
    "Comment",
    "Extra",
    "StdErr",
    "StdIn",
    "StdOut",
    "SegmentSize",
    "SpreadSegments",
    "ConsolidateSegments",
    "Switches",
    "BurstBuffer",
    "BurstBufferState",
    "Power",
    "GresAllowTaskSharing",
    "GresEnforceBind",
    "GresOneTaskPerSharing",
    "KillOInInvalidDependent",
    "KillOnInvalidDependent",
    "SpreadJob",
    "ExpeditedRequeue",
    "OOMKillStep",
    "CpusPerTres",
    "MemPerTres",
    "TresBind",
    "TresFreq",
    "TresPerJob",
    "TresPerNode",
    "TresPerSocket",
    "TresPerTask",
    "MailUser",
    "MailType",
    "NtasksPerTRES",
    "ContainerType",
    "Container",
    "ContainerID",
    "SELinuxContext",
    "ResvPorts",
)
_NODE_TAIL = (
    "Reason",
    "Comment",
    "Extra",
    "InstanceId",
    "InstanceType",
    "ReservationName",
    "TLSCertTokenSet",
    "TLSCertLastRenewal",
    "Topology",
    "Parameters",
)
_RANK: dict[Record, dict[str, int]] = {
    "job": {key: index for index, key in enumerate(_JOB_TAIL)},
    "node": {key: index for index, key in enumerate(_NODE_TAIL)},
    "partition": {},
}

REASON_TIME = "Reason.time"


def split_records(text: str, kind: Record) -> list[str]:
    """The records of ``scontrol show KIND -o``. A newline inside a comment is kept in its record.

    Lines before the first record ("No jobs in the system", "Node x not found") are no record.
    """
    head = _HEAD[kind]
    found: list[str] = []
    for line in text.split("\n"):
        if line.startswith(head):
            found.append(line)
        elif found and line.strip() and not line.startswith("Node "):
            found[-1] += "\n" + line
    return found


def fields(line: str, kind: Record) -> dict[str, str]:
    """The fields of one record, values stripped. REASON_TIME is that of a node's ``[who@when]``.

    Raises ParseError when the line is no such record, or when its free text imitates a record so
    well that the two readings cannot be told apart.
    """
    if not line.startswith(_HEAD[kind]):
        raise ParseError(f"not a {kind} record: {line[:80]!r}")
    rank = _RANK[kind]
    _, *parts = _KEY.split(line)
    keys = parts[0::2]
    if kind != "job" and rank.keys().isdisjoint(keys):  # no free text in it: most nodes
        return dict(zip(reversed(keys), map(str.strip, reversed(parts[1::2])), strict=True))
    out: dict[str, str] = {}
    position = 0
    while (match := _KEY.match(line, position)) is not None:
        key, begin = match[1], match.end()
        end, resume = _value_end(line, key, begin, kind, rank, out)
        value = line[begin:end].strip()
        # Of fields of one name, Slurm prints the first before the free text, the last after it.
        if key in rank or key not in out:
            out[key] = value
        position = resume
    return out


def _value_end(
    line: str, key: str, begin: int, kind: Record, rank: dict[str, int], out: dict[str, str]
) -> tuple[int, int]:
    """Return the end of the value and the start of the next key."""
    if kind == "job" and key == "JobName":
        anchors = list(_AFTER_JOB_NAME.finditer(line, begin))
        if len(anchors) > 1:
            raise ParseError(f"free text imitates a job record: {line[:80]!r}")
        if anchors:
            end = anchors[0].start()
            return end, _next_key(line, end)
    if kind == "node" and key == "Reason":
        signed = _SIGNATURE.search(line, begin)
        if signed is not None:
            out[REASON_TIME] = signed[1]
            end = signed.start()
            return end, _after(line, signed.end(), rank, rank[key])
    if key in rank:
        end = _after(line, begin, rank, rank[key])
        return end, end
    end = _next_key(line, begin)
    return end, end


def _next_key(line: str, position: int) -> int:
    following = _KEY.search(line, position)
    return following.start() if following else len(line)


def _after(line: str, position: int, rank: dict[str, int], own: int) -> int:
    """Return the start of the first key that Slurm prints after the key of rank ``own``."""
    for match in _KEY.finditer(line, position):
        if rank.get(match[1], -1) > own:
            return match.start()
    return len(line)


def settings(text: str) -> dict[str, str]:
    """The ``Name = value`` lines of ``scontrol show config``; the first of a name wins."""
    out: dict[str, str] = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        key = name.strip()
        if equals and key and " " not in key:
            out.setdefault(key, value.strip())
    return out
