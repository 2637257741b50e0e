"""robust-standby on the login node of a lab."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from jobs import REPOSITORY
from waiting import until

from health.admin.controller import KEYS
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

        tries: list[subprocess.CompletedProcess[str]] = []

        def ran() -> bool:
            tries.append(self.lab.exec("head", argv, user=user, cwd="/", env=env))
            return "another robust-standby is running" not in tries[-1].stderr

        until(ran, "the end of the one that slurmctld runs", 20)
        done = tries[-1]
        assert code in (None, done.returncode), done.stdout + done.stderr
        return done

    def install_hooks(self) -> None:
        """Install the hooks of slurmctld, and give Slurm the lines that robust-admin asks for."""
        site, lab = self.lab.spec.dir / "site", self.lab
        site.mkdir(mode=0o755)
        (site / "robust.toml").write_text(f'state_dir = "{self.state}"\n')
        (self.state / "jobs").mkdir(mode=0o755)
        admin = str(Path(sys.prefix) / "bin" / "robust-admin")
        argv = [admin, "install", "--controller", "--yes", "--json", "--etc", str(site)]
        found = json.loads(lab.exec("head", argv, user=False, check=True).stdout)
        lines = [line.removeprefix("slurm.conf:  ") for line in found["slurm_needs"]]
        assert [line.partition("=")[0] for line in lines] == list(KEYS)
        conf = lab.spec.dir / "etc" / "slurm.conf"
        conf.write_text("\n".join([conf.read_text(), *lines, ""]))
        lab.daemon("head", "slurmctld", "stop")
        lab.daemon("head", "slurmctld", "start")
        ping = ["scontrol", "ping"]
        until(lambda: lab.exec("head", ping).returncode == 0, "slurmctld", 20)
        lab.wait_ready()

    def missing_since(self) -> float:
        """Return the time of the apply that found the pool short; 0.0: it is not."""
        found = json.loads((self.state / "standby" / "pool.json").read_text())
        return float(found["short_since"])

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
