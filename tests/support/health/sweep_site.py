"""A node for tests of the sweep, as slurmd's HealthCheckProgram sees it: in no job."""

from __future__ import annotations

from pathlib import Path

import pytest
from gate_site import GateSite


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GateSite:
    made = GateSite(tmp_path, monkeypatch)
    made.environ(job=0)
    return made
