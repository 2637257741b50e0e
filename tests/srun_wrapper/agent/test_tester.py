"""The slot's worker of stop-time tests: started with its secrets, its end reported."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.test_worker import SlotTests, session_key
from srun_wrapper.protocol.messages import RunTests, WorkerEnded

KEY = bytes(range(32))
PRINTS = '#!/bin/sh\necho "$@"\nenv | grep ^ROBUST_TEST | sort >&2\nexit 3\n'


class Slot:
    """The shim, as its tester sees it."""

    def __init__(self, local: int = 0, server: str = "10.0.0.1") -> None:
        self.over: list[WorkerEnded] = []
        self.loop = Loop()
        place: Any = SimpleNamespace(local=local, node="n3", server=server)
        self.tester = SlotTests(self.loop, place, KEY, self.over.append)

    @property
    def pid(self) -> int:
        """The worker's pid; 0: it has none."""
        while self.tester._starting is not None:
            self.loop.turn(1.0)
        return self.tester._worker

    def wait(self) -> WorkerEnded:
        pid, status = os.waitpid(self.pid, 0)
        self.tester.reaped({pid: status})
        (over,) = self.over
        return over


def order(python: Path | str, every: bool = False) -> RunTests:
    return RunTests(7, 4242, 90.0, str(python), every)


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Fake: says how it was called, and ends with 3."""
    path = tmp_path / "python"
    path.write_text(PRINTS)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_it_has_its_place_and_its_key_and_its_end_is_told(python: Path) -> None:
    slot = Slot()
    slot.tester.run(order(python))
    over = slot.wait()
    assert (over.token, over.local, over.code) == (7, 0, 3)
    said = over.tail.splitlines()
    assert "-P -m robust_slurm.commands health.active.worker.main" in said
    assert {line.partition("=")[0]: line.partition("=")[2] for line in said if "=" in line} == {
        "ROBUST_TEST_SERVER": "10.0.0.1:4242",
        "ROBUST_TEST_KEY": session_key(KEY, 7).hex(),
        "ROBUST_TEST_NODE": "n3",
        "ROBUST_TEST_LOCAL": "0",
        "ROBUST_TEST_LIFE": "90",
    }
    assert KEY.hex() not in json.dumps(said)


def test_keys_differ() -> None:
    keys = {session_key(KEY, 1), session_key(KEY, 2), session_key(bytes(32), 1), KEY}
    assert len(keys) == 4


def test_only_local_0_unless_every_slot_has_its_own_gpu(python: Path) -> None:
    slot = Slot(1)
    slot.tester.run(order(python))
    assert not slot.pid
    slot.tester.run(order(python, every=True))
    assert slot.wait().local == 1


def test_one_that_is_left_over_gives_way(python: Path) -> None:
    hung = python.with_name("hung")
    hung.write_text("#!/bin/sh\nexec sleep 100\n")
    hung.chmod(0o755)
    slot = Slot()
    slot.tester.run(order(hung))
    first = slot.pid
    slot.tester.run(order(python))
    assert slot.pid != first
    assert os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) == -9
    assert slot.wait().code == 3


def test_what_cannot_be_started(tmp_path: Path) -> None:
    slot = Slot()
    slot.tester.run(order(tmp_path / "none"))
    assert slot.pid == 0
    (over,) = slot.over
    assert over.code == 127 and "none" in over.tail


def test_a_long_story_is_cut(python: Path) -> None:
    python.write_text("#!/bin/sh\nhead -c 100000 /dev/zero | tr '\\0' x; echo; echo the end\n")
    slot = Slot()
    slot.tester.run(order(python))
    over = slot.wait()
    assert len(over.tail) <= 2000 and over.tail.endswith("the end\n")


def test_an_address_with_colons(python: Path) -> None:
    slot = Slot(server="fd00::1")
    slot.tester.run(order(python))
    assert "ROBUST_TEST_SERVER=[fd00::1]:4242" in slot.wait().tail
