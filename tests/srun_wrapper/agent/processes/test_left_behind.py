"""Processes that an earlier life of a shim left: the next rank waits until they have ended."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from test_proc import alone

from srun_wrapper.agent.processes import emptying, guardian, process_tree


@pytest.fixture
def stuck() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is not below the shim, and stands for one that SIGKILL does not end."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


class Shim:
    """A slot without a rank that ends its processes."""

    def __init__(self) -> None:
        self.emptied: list[tuple[int, ...]] = []
        timer = SimpleNamespace(cancel=lambda: None)
        loop: Any = SimpleNamespace(later=lambda _seconds, _call: timer)
        self.emptying = emptying.Emptying(
            loop,
            running=lambda: False,
            kill=lambda: None,
            reap=lambda: None,
            staying=list,
            look=lambda _pids, _limit, _found: None,
            emptied=self.emptied.append,
        )

    def stop(self, checks: int) -> list[tuple[int, ...]]:
        self.emptied.clear()
        self.emptying.begin(None)
        for _ in range(checks):
            time.sleep(0.02)
            self.emptying.check()
        return list(self.emptied)


def test_a_rank_waits_until_it_has_ended(stuck: subprocess.Popen[bytes]) -> None:
    told, tell = os.pipe()

    def work() -> None:
        shim = Shim()
        assert shim.stop(0) == [()], "nothing was left"
        process_tree.note_left_behind([stuck.pid, 1 << 22])
        assert shim.stop(5) == []
        os.write(tell, b"k")
        deadline = time.monotonic() + 10
        while not shim.emptied and time.monotonic() < deadline:
            time.sleep(0.01)
            shim.emptying.check()
        assert shim.emptied == [()]

    def end() -> None:
        os.read(told, 1)
        stuck.kill()
        stuck.wait()

    ending = threading.Thread(target=end, daemon=True)
    ending.start()
    alone(work)
    ending.join(10)


def test_no_rank_waits_for_ever_and_the_node_is_not_blamed(
    stuck: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emptying, "KILL_DEADLINE", 0.1)

    def work() -> None:
        shim = Shim()
        process_tree.note_left_behind([stuck.pid])
        assert shim.stop(2) == []
        assert shim.stop(10)[0] == (), "no pid that survives SIGKILL: it is not this life's"
        assert shim.stop(0) == [()], "nor is it waited for again"

    alone(work)


def test_the_guardian_notes_what_its_shim_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guardian, "CLEAN", 0.05)
    monkeypatch.setattr(guardian, "LOCAL", ())
    monkeypatch.setattr(process_tree, "end_all", lambda _pids: None)

    def work() -> None:
        child = os.fork()
        if child == 0:
            time.sleep(60)
        guardian._clean_up()
        assert process_tree.left_behind()
        os.kill(child, 9)
        os.waitpid(child, 0)
        assert not process_tree.left_behind()

    alone(work)
