"""Holds on the inside of a lab, for tests of rare cases: packets, shims, starting tasks."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from jobs import Training, command_line

from lab import Lab
from srun_wrapper.agent.connections.uplink import RETRY
from srun_wrapper.agent.processes import guardian, process_tree

IN_PLACE = "no node left to replace the suspect: restart in place"
SLURMD_PORT = 6818
# s in which a second copy of a signal would come: news that found no connection is sent again when
# the agent has made a new one, which it tries after RETRY.
SECOND_COPY = 2 * RETRY
# Classic BPF on eth0: new TCP connections to this node only for slurmd. (code, true, false, k)
_ONLY_SLURMD = (
    *((0x28, 0, 0, 12), (0x15, 0, 7, 0x800)),  # no IPv4: let it pass
    *((0x30, 0, 0, 23), (0x15, 0, 5, 6)),  # no TCP
    *((0x30, 0, 0, 47), (0x54, 0, 0, 0x12), (0x15, 0, 2, 0x02)),  # no SYN, or a SYN-ACK
    *((0x28, 0, 0, 36), (0x15, 0, 1, SLURMD_PORT)),
    *((0x06, 0, 0, 0), (0x06, 0, 0, 2)),  # TC_ACT_OK, TC_ACT_SHOT
)


def firewall(lab: Lab, node: str, way: str = "ingress") -> None:
    """Let nobody open a connection to the node from now on, slurmd's port excepted.

    ``way`` "egress": nor can the node to others.
    """
    code = ",".join(" ".join(map(str, line)) for line in _ONLY_SLURMD)
    rule = [way, "bpf", "direct-action", "bytecode", f"{len(_ONLY_SLURMD)},{code}"]
    for words in (
        ["qdisc", "add", "dev", "eth0", "clsact"],
        ["filter", "add", "dev", "eth0", *rule],
    ):
        done = lab.exec(node, ["tc", *words], user=False)
        if done.returncode:
            pytest.skip(f"no packet filter here: tc {words[0]}: {done.stderr.strip()}")


def roles(training: Training) -> set[tuple[str, str]]:
    """(node, role) of the newest roster."""
    return {(node["name"], node["role"]) for node in training.rosters()[-1]["nodes"]}


def tasks(training: Training, node: str) -> list[int]:
    """Return the pids of the job's robust-tasks on a node, and of their guardians."""
    return [
        process.pid
        for process in training.processes("srun_wrapper.agent.task")
        if process.environ.get("SLURMD_NODENAME") == node
        and not command_line(process.pid).startswith("srun ")
    ]


def shims(training: Training, node: str) -> list[int]:
    """Return the pids of the job's robust-tasks on a node, without their guardians."""
    return [pid for pid in tasks(training, node) if _name(pid) != guardian.NAME.decode()]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def ready(training: Training, node: str) -> bool:
    """Return whether its robust-tasks handle signals."""
    found = shims(training, node)
    return bool(found) and all(process_tree.expects(pid, signal.SIGUSR2) for pid in found)


def ranks(training: Training) -> list[int]:
    return [p.pid for p in training.processes() if "RANK" in p.environ]


def connection_of(training: Training, node: str) -> tuple[str, str, int]:
    """Local and peer address of the agent's connection to robust-srun, and bytes received."""
    for agent in shims(training, node):
        status = Path(f"/proc/{agent}/status").read_text()
        inside = re.search(r"^NSpid:.*\t(\d+)$", status, re.MULTILINE)
        argv = ["ss", "-HtnpiO", "state", "established"]
        for line in training.lab.exec(node, argv, user=False, check=True).stdout.splitlines():
            if inside is not None and f"pid={inside[1]}," in line:
                local, peer = line.split()[2:4]
                taken = re.search(r"bytes_received:(\d+)", line)
                return local, peer, int(taken[1]) if taken else 0
    return "", "", 0


def heard_of(training: Training, node: str) -> None:
    """Wait until robust-srun knows the node: it answers again and again."""
    seen: set[int] = set()

    def answered() -> bool:
        seen.add(connection_of(training, node)[2])
        return len(seen) > 4  # none, its preface, and acknowledgements

    training.until(answered, f"conversation with {node}")


def held_back(training: Training, node: str) -> str:
    """srun option with which no task starts on the node before ``let_go``."""
    script = training.dir / "prolog"
    wait = f"touch {training.dir}/held; until [ -e {training.dir}/go ]; do sleep 0.05; done"
    script.write_text(f"#!/bin/sh\n[ $SLURMD_NODENAME != {node} ] || {{ {wait}; }}\n")
    script.chmod(0o755)
    return f"--task-prolog={script}"


def wait_held(training: Training) -> None:
    training.until((training.dir / "held").exists, "task that is held back")


def let_go(training: Training) -> None:
    (training.dir / "go").touch()
