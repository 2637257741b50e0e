"""A rank whose communicators are aborted before it ends; torch.distributed is a stub."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from waiting import until

from robust_slurm.auto import teardown

LIMIT = 30.0  # s
RANK = """
import sys, threading, types
from robust_slurm.auto import teardown

back, went_on = threading.Event(), threading.Event()
snapshot = types.SimpleNamespace(halted=threading.Event())

class Group:
    def _get_backend(self, device):
        return self

    def abort(self):
        print("aborts", snapshot.halted.is_set(), flush=True)
        back.set()  # the collective returns
        went_on.wait(0.5)

world = types.SimpleNamespace(pg_map={Group(): ("nccl", None)}, pg_names={}, pg_backend_config={})
c10d = types.SimpleNamespace(_world=world)
torch = types.SimpleNamespace(device=str)
sys.modules.update({teardown._C10D: c10d, teardown._SNAPSHOT: snapshot, "torch": torch})
teardown.offer(sys.argv[1], lambda: None)
back.wait()
print("went on with what it returned", flush=True)
went_on.set()
"""


def test_nothing_is_done_with_what_an_aborted_collective_returns(tmp_path: Path) -> None:
    """Such a step was in the log of a training on a GPU, with a loss that it never had."""
    path = tmp_path / "line"
    with subprocess.Popen(
        [sys.executable, "-c", RANK, str(path)], stdout=subprocess.PIPE, text=True
    ) as rank:
        until(path.exists, "the rank's socket", LIMIT, every=0.01)
        with socket.socket(socket.AF_UNIX) as robust_task:
            robust_task.settimeout(LIMIT)
            until(lambda: robust_task.connect_ex(str(path)) == 0, "the rank", LIMIT, every=0.01)
            robust_task.sendall(teardown.ABORT)
            assert robust_task.recv(1) == teardown.DONE
        said, _ = rank.communicate(timeout=LIMIT)
    assert said == "aborts True\n"  # what is being copied then becomes no snapshot
    assert rank.returncode == teardown.ENDED


def test_a_rank_that_cannot_be_held_is_aborted_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hardened kernel grants no callbacks, and snapshots may be imported at that moment."""

    def refused(*_types: object) -> None:
        raise MemoryError

    aborted: list[str] = []
    ended: list[int] = []
    world = SimpleNamespace(pg_map={"world": ("nccl", None)}, pg_names={}, pg_backend_config={})
    monkeypatch.setattr(ctypes, "CFUNCTYPE", refused)
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(
        teardown, "_nccl", lambda group: SimpleNamespace(abort=lambda: aborted.append(group))
    )
    monkeypatch.setitem(sys.modules, teardown._SNAPSHOT, ModuleType("half of it"))
    robust_task, rank = socket.socketpair()
    with robust_task, rank:
        robust_task.setblocking(False)
        teardown._serve(rank, SimpleNamespace(_world=world), lambda: None)
        assert robust_task.recv(1) == teardown.DONE
    assert aborted == ["world"] and ended == [teardown.ENDED]
