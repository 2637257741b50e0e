"""robust-health test --nodes in a user's job: pairs and rings by the switches that Slurm knows."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest
from jobs import REPOSITORY
from places import PROGRAMS

from lab import Cluster

pytest.importorskip("torch")

BRIEF = PROGRAMS / "wrong"  # the tests are short; no machine computes wrongly


@pytest.fixture
def lab() -> Iterator[Cluster]:
    with Cluster(nodes=6, standby=0, switches=["n[1,3,5]", "n[2,4,6]"]) as made:
        yield made


def test_rings_of_each_switch_then_through_both(lab: Cluster) -> None:
    out = lab.shared / "out"
    words = f"{sys.executable} -m health.cli test --nodes all --json pair ring"
    script = f"#!/bin/sh\nexport PYTHONPATH={BRIEF}:{REPOSITORY} LAB_BRIEF=1\n{words} > {out}\n"
    job = lab.sbatch(script, ["-N6", "--exclusive", "-o", str(lab.shared / "log")])
    record = lab.wait_job(job, ("COMPLETED", "FAILED"), 200)
    said = out.read_text() + (lab.shared / "log").read_text()
    assert record["ExitCode"] == "0:0", said
    found = json.loads(out.read_text())
    assert found["named"] == {} and len(found["cleared"]) == 6, said
    rings = {frozenset(m["peers"]) for m in found["measured"] if m["test"] == "ring"}
    odd, even = frozenset({"n1", "n3", "n5"}), frozenset({"n2", "n4", "n6"})
    assert rings == {odd, even, odd | even}, said
    speeds = [m["values"]["busbw_gbps"] for m in found["measured"] if m["test"] == "ring"]
    assert len(speeds) == 12 and min(speeds) > 0
