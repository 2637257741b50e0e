"""``robust-health test`` whose worker is the fake one."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import PROGRAMS

from health import cli
from health.active.nvidia import gpu_use

PROGRAM = PROGRAMS / "fake_active_worker.py"


@pytest.fixture
def python(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An "interpreter" whose worker is the fake one; this machine is n1 and has no GPU.

    The worker is nobody. Each pytest that starts closes the directories of all pytests to others,
    so this has one elsewhere, where a test may put what the worker needs.
    """
    with tempfile.TemporaryDirectory(prefix="fake-worker-") as place:
        Path(place).chmod(0o755)
        path = Path(place, "python")
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {PROGRAM} "$@"\n')
        path.chmod(0o755)
        monkeypatch.setenv("FAKE_WORKER", "healthy")
        monkeypatch.setattr(gpu_use, "take", tuple)
        yield str(path)


def run(python: str, *words: str) -> int:
    return cli.main(["test", "--python", python, *words])
