"""The gate around jobs on a real GPU: NVIDIA's own library under slurmd's prolog and epilog."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gate_lab import FREE, gate_lab

LEAVES = """#!/bin/sh
cat > $HOME/hold.py <<'END'
import time, torch
held = torch.ones(1 << 28, device="cuda")
open("held", "w").close()
time.sleep(1000)
END
cd $HOME
setsid setsid python hold.py </dev/null >hold.out 2>&1 &
for _ in $(seq 600); do [ -e held ] && exit 0; sleep 0.1; done
cat hold.out
exit 1
"""
FAMILIES = {"gpu_count", "nvml", "gpu_ecc", "gpu_memory", "gpu_thermal", "gpu_leftovers"}


@pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA GPU here")
def test_what_a_job_leaves_on_a_gpu_is_cleared() -> None:
    """The node stays in service, and the next job gets it."""
    with gate_lab(nodes=1, gpus=0) as site:
        gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
        site.settings(more=f"[health.gpu_count]\nexpected = {gpus}\n")
        job = site.run("n1", script=LEAVES)
        (cleared,) = [each for each in site.local("n1", "cleared") if each.data["job"] == job]
        assert cleared.data["ended"] == 1
        assert site.node("n1") == FREE, site.local("n1")
        site.run("n1")
        assert site.node("n1") == FREE, site.local("n1")
        argv = ["robust-health", "check", "--json", "--config", str(site.etc / "robust.toml")]
        done = site.lab.exec("n1", argv, user=False)
        report = json.loads(done.stdout)
        assert {each["family"] for each in report["ran"]} >= FAMILIES
        assert not report["verdict"]["closed"], report
        assert not [each for each in report["findings"] if each["check"].startswith("gpu")], report
