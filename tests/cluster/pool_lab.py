"""robust-standby on the login node of a lab."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from jobs import REPOSITORY
from waiting import until

from health.history import events
from health.node.system import Event
from lab import Cluster


class Pool:
    """robust-standby in a lab, and a ledger in which the gate has seen nodes well."""

    def __init__(self, lab: Cluster, *well: str) -> None:
        self.lab = lab
        self.state = lab.spec.dir / "ledger"
        (self.state / "nodes").mkdir(parents=True, mode=0o755)
        self.well(*well)

    def well(self, *names: str) -> None:
        for name in names:
            line = events.line(Event(time.time() - 60, "pass", "b", {}))
            (self.state / "nodes" / f"{name}.jsonl").write_bytes(line)

    def run(
        self, *words: str, code: int | None = 0, user: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """One robust-standby on the login node, by default as root; ``code`` None: any."""
        argv = [sys.executable, "-m", "standby.cli", *words, "--state-dir", str(self.state)]
        env = {"PYTHONPATH": str(REPOSITORY)}
        done = self.lab.exec("head", argv, user=user, cwd="/", env=env)
        assert code in (None, done.returncode), done.stdout + done.stderr
        return done

    def show(self, code: int | None = None) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run("show", "--json", code=code).stdout)
        return found

    def use(self) -> dict[str, str]:
        """Return the nodes' use by node."""
        return {row["node"]: row["use"] for row in self.show()["rows"]}

    def partition(self, name: str) -> dict[str, str]:
        argv = ["scontrol", "show", "-o", "partition", name]
        done = self.lab.exec("head", argv)
        return dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)

    def wait_state(self, job: int, state: str) -> None:
        until(lambda: self.lab.job(job)["JobState"] == state, f"job {job} {state}", 20)
