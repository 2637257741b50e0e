"""Processes whose main thread has ended, and whose others are still there."""

from __future__ import annotations

from typing import Any

import pytest
from fake_host import healthy, process
from fake_system import context

from health.checks.host.processes import CHECK
from health.node.system import Context
from robust_slurm.process_stat import PF_EXITING

SWEEP = context("sweep", job=0)


@pytest.mark.parametrize(
    ("state", "flags", "where", "found"),
    [
        ("D", PF_EXITING, SWEEP, [("FAIL", "process-stuck")]),
        # Eight ranks that give back much memory at once may wait for one another.
        ("D", PF_EXITING, context("epilog"), [("WARN", "process-blocked")]),
        ("R", PF_EXITING, SWEEP, []),
        ("D", 0x400000, SWEEP, [("WARN", "process-blocked")]),  # its program goes on
    ],
)
def test_a_thread_in_state_d_that_outlives_the_main_thread(
    state: str, flags: int, where: Context, found: list[Any]
) -> None:
    main = process(4000, "python3", "Z", threads=2)
    rest = process(4001, "python3", state, flags=flags, wchan="uvm_va_space_destroy")
    stat = rest["files"]["/proc/4001/stat"]
    system = healthy((main, rest), more={"/proc/4000/task/4001/stat": stat}, context=where)
    names = system.names
    system.names = lambda path: [  # type: ignore[method-assign] # /proc lists no threads
        name for name in names(path) if (path, name) != ("/proc", "4001")
    ]
    system.pause = lambda _seconds: None  # type: ignore[attr-defined]
    seen = CHECK.run(system)
    assert [(one.status, one.check) for one in seen] == found
    assert all("4001 (python3), a thread of 4000 (python3)" in one.evidence for one in seen)


def test_one_that_ends_while_its_threads_are_read_is_no_error() -> None:
    assert CHECK.run(healthy((process(4000, "python3", "Z", threads=2),), context=SWEEP)) == []
