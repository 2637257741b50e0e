"""The closer look at real processes: torch's flight recorder over gloo, py-spy, the kernel."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from places import PROGRAMS
from slot_driver import Driver, drive, drivers

from srun_wrapper.agent.looking import kernel
from srun_wrapper.agent.processes import process_tree
from srun_wrapper.locate.recorded import ALL_IN, MISMATCH, MISSING, OLD, findings
from srun_wrapper.protocol.closer_messages import LookCloser, LookedCloser
from srun_wrapper.protocol.messages import Inspect, Inspected

__all__ = ["drive", "drivers"]
RANKS = range(4)


def looked(d: Driver, *pids: int, token: int = 3) -> LookedCloser:
    d.order(LookCloser(token, pids))
    return d.get(LookedCloser)


@pytest.mark.parametrize(
    ("mode", "kind", "text"),
    [
        ("skip", MISSING, "rank 1 has not entered all_reduce #4 of group 0 (default_pg); "
                          "the other 3 have waited in it for "),
        ("size", MISMATCH, "rank 1 calls all_reduce of 4 (Float), ranks 0,2-3 call all_reduce of 8 "
                           "(Float) in collective #4 of group 0 (default_pg): "),
        ("op", MISMATCH, "rank 1 calls broadcast of 8 (Float), ranks 0,2-3 call all_reduce of 8 "),
        ("held", ALL_IN, "ranks 0,2-3 in all_reduce #4 of group 0 (default_pg) for "),
    ],
)  # fmt: skip
def test_the_flight_recorder_over_gloo(
    drive: Any, tmp_path: Path, mode: str, kind: str, text: str
) -> None:
    pytest.importorskip("torch")
    d = drive(sys.executable, str(PROGRAMS / "gloo_parted.py"), mode, str(tmp_path))
    d.launch()
    d.wait(lambda: all((tmp_path / f"ready-{n}").exists() for n in RANKS), 60.0)
    until = time.monotonic() + OLD + 5.0
    while True:  # until the others have waited long enough
        seen = looked(d).recorded
        found = findings(seen, RANKS)
        if found or time.monotonic() > until:
            break
    assert [finding.kind for finding in found] == [kind], (seen, found)
    assert found[0].text.startswith(text), found
    if mode == "held":
        assert found[0].text.endswith("; rank 1 did not answer")
