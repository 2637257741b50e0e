"""bench/gate.py runs and says what it measured; never how long that took."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from places import REPOSITORY

from health.checks import ALL


def test_a_quick_run_measures_the_gate_and_every_family(tmp_path: Path) -> None:
    out = tmp_path / "gate.json"
    argv = [sys.executable, "-m", "bench.gate", "--quick", "--json", str(out)]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    metrics = json.loads(out.read_text())["metrics"]
    families = {f"check.{check.name}_ms" for check in ALL if "prolog" in check.where}
    assert {"gate.total_s", "gate.interpreter_s", "check.all_ms"} | families <= set(metrics)
    assert all(0 < metric["median"] <= metric["p95"] for metric in metrics.values())
