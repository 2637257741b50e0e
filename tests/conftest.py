"""Fixtures of all tests: no time limits on generated examples, directories others can pass.

And what several files of tests need that is slow to make, or a directory.
"""

from __future__ import annotations

import collections
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from srun_wrapper.job.membership import Membership

if TYPE_CHECKING:
    from torch_forks import TorchForks

CLUSTER = Path(__file__).parent / "cluster"

# How long an example takes says nothing on a machine that does something else too.
settings.register_profile(
    "untimed", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("few", settings.get_profile("untimed"), max_examples=25)
settings.load_profile("untimed")  # make check takes "few"
Membership.strict = True  # a slip of ours must not pass unseen

# Under nohup or a CI runner they may be ignored, and so by every process that a test starts. A
# handler of Python's is not inherited: those processes begin as they do at a terminal.
for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)


# A worker's garbage may have threads of its own, as torch's process groups have, that its forked
# child lacks: who takes it apart there waits for ever.
os.register_at_fork(after_in_child=gc.freeze)

LONG = 0.75  # of the list of files: where the last file with long tests is
LONGEST = ("checkpoint", "test_torch.py", "test_releases_lab.py")
"""Folder and files of tests/cluster whose tests take half a minute each, and others ten seconds."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mix the files that wait with those that compute; what is left at the end is short.

    Tests on a real Slurm mostly wait. Four of their files at a time leave the cores idle, and four
    files of trainings or pure tests would fight for them afterwards.
    """
    tests = collections.Counter(item.path for item in items)
    cluster = [path for path in tests if path.is_relative_to(CLUSTER)]
    cluster.sort(
        key=lambda p: -tests[p] * (3 if {p.name, p.parent.name}.intersection(LONGEST) else 1)
    )
    slow = {item.path for item in items if item.get_closest_marker("slow")}.difference(cluster)
    short = [path for path in tests if path not in slow.union(cluster)]
    places = {}
    for paths, share in ((cluster, LONG), (sorted(slow), LONG), (short, 1.0)):
        places |= {path: share * n / len(paths) for n, path in enumerate(paths)}
    items.sort(key=lambda item: places[item.path])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Spare the garbage collector the 600,000 objects of all tests: each full look took 0.4 s.

    While they come to be, its looks were a third of the whole collection, in each worker.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _passable(tmp_path_factory: pytest.TempPathFactory) -> None:
    """xdist puts a directory per worker among pytest's, which tests open for other users."""
    tmp_path_factory.getbasetemp().chmod(0o711)


@pytest.fixture(scope="session")
def torch_forks() -> Iterator[TorchForks]:
    """Runs programs that need torch without importing it each time."""
    from torch_forks import TorchForks

    with TorchForks() as forks:
        yield forks


@pytest.fixture(scope="session")
def trained_state() -> dict[str, Any]:
    """Model and optimizer of a small training; not to be changed."""
    from durable_snapshots import state_of, trained

    return state_of(*trained())


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    """An empty directory for durable checkpoints."""
    path = tmp_path / "tier"
    path.mkdir()
    return path
