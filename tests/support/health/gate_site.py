"""A node for tests of the gates: real settings, ledger, spool; a fake scontrol, chosen checks."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from fake_slurm import FakeSlurm

from health.check import EVERYWHERE, Check, Condition, Setting
from health.finding import ActionName, Class, Finding, Status
from health.gate import gate
from health.history import events
from health.node import kmsg
from health.node.system import Event, System
from health.settings import BREAKER
from health.settings_file import END

BROKEN = Condition("broken", "FAIL", "node", "reboot", "when the test says so")
GONE = 4_000_123  # a uid that owns nothing here: its leftovers are none


def finding(
    status: Status = "FAIL",
    action: ActionName = "reboot",
    cls: Class = "node",
    check: str = "broken",
    device: str = "gpu3",
) -> Finding:
    return Finding(status, cls, check, device, "it was seen to be broken", action)


class GateSite:
    """``finds`` is what the only family of checks finds; ``files`` below it are the node's."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        if os.geteuid() == 0:
            # Other users must get in, and may not write above. pytest's directories are root's
            # alone: every pytest that starts on this machine makes them so again.
            path = Path(tempfile.mkdtemp(prefix="gate-site-", dir="/var/lib"))
            weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)
        self.path = path
        self.slurm = FakeSlurm(path / "slurm", *(f"n{i}" for i in range(1, 21)))
        self.spool, self.state = path / "spool", path / "state"
        (self.state / "nodes").mkdir(parents=True)
        (self.state / "jobs").mkdir()
        (self.state / "jobs").chmod(0o1777)
        for above in (self.state, path):
            above.chmod(0o755)
        self.toml = path / "robust.toml"
        # A test that does not say otherwise undrains at the first sweep that passes.
        monkeypatch.setitem(cast(Any, BREAKER), "hold_down", Setting(0.0, "", "s"))
        self.settings()
        self._finds = path / "finds.json"
        self.find()
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(gate, "ALL", (self._check(),))
        # This machine's log is long, and what is in it is not the test's.
        monkeypatch.setattr(kmsg, "read", lambda *_args: [])
        monkeypatch.setenv("ROBUST_SITE_CONFIG", str(self.toml))
        monkeypatch.setenv("PATH", os.environ["PATH"])  # the door to Slurm sets it
        for name in [name for name in os.environ if name.startswith("SLURM")]:
            monkeypatch.delenv(name)
        self.environ()

    def settings(self, text: str = "", gate: str = "", state: bool = True) -> None:
        state_dir = f"state_dir = {str(self.state)!r}\n" if state else ""
        head = (
            f"{state_dir}[gate]\nspool = {str(self.spool)!r}\nslurm_bin = {str(self.slurm.bin)!r}\n"
            f"prolog_deadline = 20.0\nscontrol_deadline = 10.0\n{gate}\n"
        )
        self.toml.write_text(f"{head}{text}\n{END}\n")
        self.toml.chmod(0o644)

    def environ(self, job: int = 7, uid: int = GONE, node: str = "n1", **more: str) -> None:
        """Set the environment that slurmd gives; job 0: as to the HealthCheckProgram."""
        given = {"SLURMD_NODENAME": node, "SLURM_CONF": str(self.path / "slurm.conf")}
        (self.path / "slurm.conf").write_text(
            f"SlurmdSpoolDir={self.path}\nNodeName=n[1-20] CPUs=1\n"
        )
        for name in ("SLURM_JOB_ID", "SLURM_JOB_UID", "SLURM_JOB_GID"):
            self._monkeypatch.delenv(name, raising=False)
        if job:
            given |= {"SLURM_JOB_ID": str(job), "SLURM_JOB_UID": str(uid), "SLURM_JOB_GID": "1"}
        for name, value in (given | more).items():
            self._monkeypatch.setenv(name, value)

    def find(self, *found: Finding) -> None:
        self._finds.write_text(json.dumps(found))

    def _check(self) -> Check:
        def run(system: System) -> list[Finding]:
            return [Finding(*one) for one in json.loads(self._finds.read_text())]

        return Check("family", run, (BROKEN,), {}, EVERYWHERE, closes_on_error=True)

    def break_with(self, error: Exception) -> None:
        """The gate itself raises where it would run the checks."""

        def run(*args: Any, **kwargs: Any) -> None:
            raise error

        self._monkeypatch.setattr(gate, "run", run)

    def remember(self, kind: str, **data: Any) -> None:
        """Write an event of now into the node's history."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        events.append(str(self.spool), [Event(time.time(), kind, boot, data)])

    # -- what came of it

    def events(self, *kinds: str) -> list[Event]:
        return [e for e in events.load(str(self.spool)) if not kinds or e.kind in kinds]

    def event(self, kind: str) -> Mapping[str, Any]:
        (one,) = self.events(kind)
        return one.data

    def shared(self, *kinds: str, node: str = "n1") -> list[Event]:
        path = self.state / "nodes" / f"{node}.jsonl"
        found = events.parse(path.read_bytes()) if path.exists() else []
        return [e for e in found if not kinds or e.kind in kinds]

    def report_node(
        self, job: int = 7, uid: int = GONE, name: str = "n1.e3.json", **changes: Any
    ) -> Path:
        """Write an accusation as robust-srun leaves it, as its user."""
        directory = self.state / "jobs" / str(job) / "accusations"
        directory.mkdir(parents=True, exist_ok=True)
        record = {"v": 1, "node": "n1", "incident": "e3", "job": job, "user": "u", "time": 1e9}
        record |= {"symptom": "node_lost", "evidence": ["no report for 6.0 s"], **changes}
        path = directory / name
        path.write_text(json.dumps(record))
        for each in (directory.parent, directory, path):
            os.chown(each, uid, uid)
        return path
