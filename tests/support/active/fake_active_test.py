"""``robust-health test`` whose worker is the fake one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from places import PROGRAMS

from health import cli
from health.active.nvidia import gpu_state

PROGRAM = PROGRAMS / "fake_active_worker.py"


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An "interpreter" whose worker is the fake one; this machine is n1 and has no GPU."""
    for above in tmp_path.parents:
        if "pytest" in above.name:  # pytest keeps its directories to root, and the worker is nobody
            above.chmod(0o755)
    tmp_path.chmod(0o755)
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {PROGRAM} "$@"\n')
    path.chmod(0o755)
    monkeypatch.setenv("FAKE_WORKER", "healthy")
    monkeypatch.setattr(gpu_state, "take", gpu_state.GpuState)
    return str(path)


def run(python: str, *words: str) -> int:
    return cli.main(["test", "--python", python, *words])
