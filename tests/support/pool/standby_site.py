"""Parts of all tests of the pool: nodes as they are seen, a state directory with Slurm."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

from fake_partitions import FakeJob, FakePartitions

from health.gate.proof import Proof
from health.history import events
from health.node.system import Event
from robust_slurm.slurm.model import node_from
from standby.pool import cli
from standby.pool import file as pool_file
from standby.pool.members import Admission, Sight, Wish

NOW = 1_800_000_000.0
HOUR = 3600.0
WELL = Proof(passed=NOW - 60)
OLD = Admission(NOW - 1000)


def event(kind: str, age_s: float, **data: Any) -> Event:
    return Event(NOW - age_s, kind, "b", data)


def sight(
    nodes: str = "s1 s2 s3",
    jobs: dict[int, FakeJob] | None = None,
    proofs: dict[str, Proof] | None = None,
    unread: str = "",
    **partitions: str,
) -> Sight:
    """``nodes``: names, with their flags behind a slash."""
    found = {}
    for word in nodes.split():
        name, _, state = word.partition("/")
        found[name] = node_from({"NodeName": name, "State": state or "IDLE"})
    fake = FakePartitions(**partitions)
    fake.jobs = dict(jobs or {})
    return Sight(
        found,
        fake.door().partitions(),
        fake.door().placements(),
        dict.fromkeys(found, WELL) if proofs is None else proofs,
        NOW,
        unread,
    )


WISH = Wish("standby", ("s1", "s2", "s3"), 3)


LOW = FakeJob("low", "s1")


class Site:
    """A state directory with the gate's ledger, and Slurm."""

    def __init__(self, path: Path, **partitions: str) -> None:
        for above in (path, *path.parents):
            if "pytest" in above.name:  # writable by its owner alone, as the ledger must be
                above.chmod(0o755)
        self.state = path / "state"
        (self.state / "nodes").mkdir(parents=True, mode=0o755)
        self.slurm = FakePartitions(**(partitions or {"train": "n[1-2]", "standby": "s[1-3]"}))
        self.well(*self.slurm.nodes)

    def well(self, *names: str, age_s: float = 60.0) -> None:
        self.happened(Event(time.time() - age_s, "pass", "b", {}), *names)

    def happened(self, event: Event, *names: str) -> None:
        for name in names:
            with (self.state / "nodes" / f"{name}.jsonl").open("ab") as file:
                file.write(events.line(event))

    def run(self, *words: str) -> tuple[int, str]:
        out = io.StringIO()
        code = cli.main([*words, "--state-dir", str(self.state)], self.slurm.door(), out)
        return code, out.getvalue()

    def apply(self, *words: str, code: int = 0) -> str:
        found, text = self.run("apply", "--yes", *words)
        assert found == code, text
        return text

    @property
    def record(self) -> pool_file.PoolRecord:
        found = pool_file.load(str(self.state))
        assert found is not None
        return found
