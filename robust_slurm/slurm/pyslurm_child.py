"""Program that answers requests about Slurm through pyslurm: one JSON line for each one it reads.

It is the only code that imports pyslurm, and runs in a process of its own: importing pyslurm ends
the process where Slurm has no configuration, a call to an absent slurmctld blocks 9 s and cannot
be interrupted, and pyslurm's licence is the GPL. It needs the standard library and pyslurm only, so
that the Python that has pyslurm need not have robust-slurm. Its API is that of 23.11 and later.

Requests: {"do": "nodes"}, {"do": "jobs"}, {"do": "set_node", "nodes", "state", "reason"},
{"do": "requeue", "job"}, each with a "number" that its answer has, too. Answers: {"value": …},
{"slurm_error": Slurm's words}, or {"error": what went wrong here}. The first line is
{"value": {"pyslurm": its version}}, unasked.
"""

from __future__ import annotations

import json
import os
import pwd
import signal
import sys
from collections.abc import Callable
from typing import Any

NOT_TEXT = "(not UTF-8)"  # in place of a comment or reason that pyslurm cannot decode


def nodes(pyslurm: Any, request: dict[str, Any]) -> list[list[Any]]:
    """Return name, hostname, port, state, partitions, gres, CPUs, comment and features of each
    node, and the reason with its time."""
    return [_node(node) for node in pyslurm.Nodes.load().values()]


def _node(node: Any) -> list[Any]:
    name = node.name
    try:
        return [
            name,
            node.hostname,
            node.slurmd_port,
            node.state,
            node.partitions,
            node.configured_gres,
            node.total_cpus,
            _text(node, "comment"),
            node.available_features,
            _reason(node),
        ]
    except Exception as error:
        raise ValueError(f"node {name}: {type(error).__name__}: {error}") from error


def _text(node: Any, what: str) -> Any:
    """Return text that people wrote. If one node's cannot be decoded, the others still count."""
    try:
        return getattr(node, what)
    except UnicodeDecodeError:
        return NOT_TEXT


def _reason(node: Any) -> tuple[Any, Any] | None:
    reason = _text(node, "reason")
    return (reason, node.reason_time) if reason else None


def jobs(pyslurm: Any, request: dict[str, Any]) -> list[list[Any]]:
    """Id, uid, user, state, partition and nodes of every job."""
    users: dict[int, str] = {}
    return [
        [
            job.id,
            job.user_id,
            _user(job.user_id, users),
            job.state,
            job.partition,
            job.allocated_nodes or "",
        ]
        for job in pyslurm.Jobs.load().values()
    ]


def set_node(pyslurm: Any, request: dict[str, Any]) -> None:
    changes = {"state": request["state"]}
    if request.get("reason"):
        changes["reason"] = request["reason"]
    # Slurm reads a host list where the name of one node would stand.
    pyslurm.Node(request["nodes"]).modify(pyslurm.Node(**changes))


def requeue(pyslurm: Any, request: dict[str, Any]) -> None:
    pyslurm.Job(request["job"]).requeue()


DOES: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "nodes": nodes,
    "jobs": jobs,
    "set_node": set_node,
    "requeue": requeue,
}


def _user(uid: int, known: dict[int, str]) -> str:
    if uid not in known:
        try:
            known[uid] = pwd.getpwuid(uid).pw_name
        except KeyError:
            known[uid] = str(uid)
    return known[uid]


def _answer(pyslurm: Any, line: bytes) -> str:
    number = None
    try:
        request = json.loads(line)
        number = request["number"]
        value = DOES[request["do"]](pyslurm, request)
        return json.dumps({"number": number, "value": value})
    except pyslurm.RPCError as error:
        return json.dumps({"number": number, "slurm_error": str(error)})
    except Exception as error:  # noqa: BLE001 - whatever it was, the parent must hear of it
        return json.dumps({"number": number, "error": f"{type(error).__name__}: {error}"})


def _pyslurm() -> Any:
    import pyslurm

    if not hasattr(pyslurm, "Nodes"):
        raise ImportError(f"pyslurm {pyslurm.__version__} has no Nodes: 23.11 or later is needed")
    return pyslurm


def main() -> int | None:
    # A requeue signals the whole job, Ctrl-C the whole terminal. This process ends with its input.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # what libraries print must not mix with the answers

        def say(answer: str) -> None:
            out.write(answer.encode() + b"\n")
            out.flush()

        try:
            pyslurm = _pyslurm()
        except ImportError as error:
            say(json.dumps({"error": str(error)}))
            return 1
        say(json.dumps({"value": {"pyslurm": pyslurm.__version__}}))
        for line in sys.stdin.buffer:
            say(_answer(pyslurm, line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
