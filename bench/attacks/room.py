"""The place of an attack: a directory, mounts that nobody else sees, two users, maybe a lab."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import REPOSITORY, BenchError
from health.settings_file import END
from lab import Lab

MALLORY, VICTIM = 33001, 33002
"""The uids (and gids) of the attacker and of another user; neither is the lab's."""
QUIET = [
    "nvml",
    "gpu_count",
    "mounts",
    "clock",
    "memory",
    "ethernet",
    "cpu",
    "kernel_log",
    "topology",
]
"""Checks of the gate that an attack on another one leaves out."""
_SCONTROL = """#!/bin/sh
echo "$*" >>{top}/orders
case "$*" in
*ping*) echo 'Slurmctld(primary) at x is UP';;
*'show node'*) for n in $(seq 1 {nodes}); do echo "NodeName=n$n State=IDLE Partitions=p"; done;;
esac
"""
_ENTRY = """import os, sys
sys.path[:0] = {path!r}
os.environ['ROBUST_SITE_CONFIG'] = {top!r} + '/robust.toml'
from {module} import main
sys.exit(main([]))
"""


@dataclass(frozen=True)
class Ended:
    """A program that ended."""

    code: int
    seconds: float
    out: str
    err: str

    @property
    def said(self) -> str:
        """The last line that it wrote to standard error."""
        return (self.err.strip().splitlines() or [""])[-1]


@dataclass(frozen=True)
class Room:
    """The place of one attack. `top`: a directory of root's, mode 0755, empty at first."""

    top: Path
    lab: Lab | None = None

    def directory(self, name: str, uid: int = 0, mode: int = 0o755) -> Path:
        """Make a directory below the top."""
        made = self.top / name
        made.mkdir(parents=True, exist_ok=True)
        os.chown(made, uid, uid)
        made.chmod(mode)
        return made

    def own(self, top: Path, uid: int = MALLORY) -> None:
        """Give a directory, and all in it, to a user."""
        for where, _, files in os.walk(top):
            for path in (where, *(f"{where}/{name}" for name in files)):
                os.lchown(path, uid, uid)

    def site(
        self, settings: str = "", *, top: str = "", nodes: int = 50, fakes: bool = True
    ) -> None:
        """Write a site: robust.toml, slurm.conf, and a scontrol that only notes its orders.

        ``settings``: lines of [gate] and after it; ``top``: lines before it.
        """
        for name in ("state", "state/nodes", "spool", "slurmd", "bin"):
            self.directory(name)
        self.directory("state/jobs", mode=0o1777)
        (self.top / "slurm.conf").write_text(
            f"ClusterName=x\nAuthType=auth/none\nSlurmdSpoolDir={self.top}/slurmd\n"
            f"NodeName=n[1-{nodes}]\n"
        )
        (self.top / "robust.toml").write_text(
            f'state_dir = "{self.top}/state"\n{top}\n[gate]\nspool = "{self.top}/spool"\n'
            f'slurm_bin = "{self.top}/bin"\n{settings}\n{END}\n'
        )
        if fakes:
            made = self.top / "bin" / "scontrol"
            made.write_text(_SCONTROL.format(top=self.top, nodes=nodes))
            made.chmod(0o755)

    def gate(
        self, module: str, env: Mapping[str, str] | None = None, *, timeout: float = 60
    ) -> Ended:
        """Run the gate as slurmd does, on n1: prolog.cli, epilog.cli or health.sweep."""
        code = _ENTRY.format(path=[str(REPOSITORY)], top=str(self.top), module=module)
        own = {"SLURM_CONF": f"{self.top}/slurm.conf", "SLURMD_NODENAME": "n1", **(env or {})}
        return self.program([sys.executable, "-I", "-c", code], own, timeout=timeout)

    def job(self, number: int = 7, uid: int = MALLORY) -> dict[str, str]:
        """Return the environment of a job's prolog and epilog."""
        return {"SLURM_JOB_ID": str(number), "SLURM_JOB_UID": str(uid), "SLURM_JOB_GID": str(uid)}

    def program(
        self,
        argv: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        *,
        uid: int | None = None,
        timeout: float = 60,
        stdin: str = "",
    ) -> Ended:
        """Run a program with this environment alone, to its end or its time limit (code -9)."""
        began = time.monotonic()
        who: dict[str, Any] = {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}
        with subprocess.Popen(
            [str(word) for word in argv],
            env=dict(env or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=self.top,
            start_new_session=True,
            **who,
        ) as process:
            try:
                out, err = process.communicate(stdin, timeout=timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                out, err = process.communicate()
        return Ended(process.returncode, time.monotonic() - began, out, err)

    def as_user(self, work: Callable[[], object], uid: int = MALLORY) -> None:
        """Do something as a user, in a child, to its end. BenchError where it raises."""
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                become(uid)
                work()
                code = 0
            os._exit(code)
        if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            raise BenchError(f"the attack itself failed with {code}")

    def orders(self) -> list[str]:
        """Return the updates that were ordered of Slurm."""
        try:
            lines = (self.top / "orders").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [line for line in lines if "update" in line.lower()]

    def drains(self) -> tuple[str, ...]:
        """Return the nodes that were ordered to drain."""
        found = (word for line in self.orders() if "drain" in line.lower() for word in line.split())
        return tuple(
            dict.fromkeys(
                word.partition("=")[2] for word in found if word.lower().startswith("nodename=")
            )
        )


def become(uid: int) -> None:
    """Become a user for good."""
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
