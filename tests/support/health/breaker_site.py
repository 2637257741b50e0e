"""A cluster of four nodes with a shared ledger, for tests of drains within limits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm
from fake_system import FakeSystem, context

from health.gate import act
from health.gate.act import Drainer, DrainOutcome
from health.gate.reserve import parse
from health.node import rootfiles
from health.node.system import Event
from health.settings import Settings, defaults

REASON = "robust:node:xid-119:gpu3:reboot:job7"
ELSEWHERE = "robust:node:xid-119:gpu0:none:job1"
MILD = "robust:user:leftover-processes:-:clear-leftovers:job6"


class BreakerSite:
    """A cluster of four nodes with a shared ledger."""

    def __init__(self, path: Path) -> None:
        self.slurm = FakeSlurm(path / "slurm", "n1", "n2", "n3", "n4")
        self.state = path / "state"
        (self.state / "nodes").mkdir(parents=True)
        self.conf = path / "slurm.conf"
        self.conf.write_text("NodeName=n[1-4]\n")
        self.pauses: list[float] = []
        self.pause: Callable[[float], None] = self.pauses.append

    def settings(self, ledger: bool = True, **breaker: float) -> Settings:
        base = defaults(())
        limits = {"max_nodes": 5, "max_percent": 50.0, "max_per_job": 2, **breaker}
        return base._replace(
            gate={**base.gate, "slurm_bin": str(self.slurm.bin), "scontrol_deadline": 5.0},
            breaker={**base.breaker, **limits},
            state_dir=str(self.state) if ledger else "",
        )

    def drain(
        self,
        node: str = "n1",
        job: int = 7,
        reason: str = REASON,
        ledger: bool = True,
        history: tuple[Event, ...] = (),
        seconds: float = 20.0,
        **breaker: float,
    ) -> DrainOutcome:
        known = context(node=node, job=job, SLURM_CONF=str(self.conf))
        system = FakeSystem(
            files={str(self.conf): self.conf.read_text()}, context=known, history=history
        )
        settings = self.settings(ledger, **breaker)
        until = time.monotonic() + seconds
        return Drainer(settings, system, until, pause=self.pause).drain(reason)

    def reserved(self) -> list[str]:
        path = self.state / "nodes" / "drains.jsonl"
        raw = path.read_bytes() if path.exists() else b""
        return [drain.node for drain in parse(rootfiles.records(raw))]


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The door to Slurm sets this process's PATH."""
    monkeypatch.setenv("PATH", os.environ["PATH"])


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that does other things too."""
    monkeypatch.setattr(act, "LEDGER_S", 20.0)


@pytest.fixture
def site(tmp_path: Path) -> BreakerSite:
    return BreakerSite(tmp_path)
