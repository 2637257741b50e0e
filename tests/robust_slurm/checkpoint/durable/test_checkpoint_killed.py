"""Writing and committing, killed before each change of a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from durable_tiers import RUN, commit_now, listed, save, tiny

from robust_slurm.checkpoint.durable import tier as durable
from robust_slurm.checkpoint.durable.dcp.write import write

pytestmark = pytest.mark.slow


def in_child(work: Callable[[], object], die_at: int) -> bool:
    """Run ``work`` in a fork that ends before its ``die_at``-th change of a file. True: it did all.

    The interpreter's audit events come before each open, mkdir, rename, remove and rmdir.
    """
    pid = os.fork()
    if pid == 0:
        count = 0

        def hook(event: str, args: tuple[Any, ...]) -> None:
            nonlocal count
            writes = event == "open" and isinstance(args[2], int) and args[2] & 3
            if writes or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"):
                count += 1
                if count == die_at:
                    os._exit(9)

        code = 1
        try:
            sys.addaudithook(hook)
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_killed_before_any_change_of_a_file(tmp_path: Path) -> None:
    """Wherever a writer dies, every committed step verifies, the older step is kept
    until the newer one is committed, and the next try succeeds."""
    torch.set_num_threads(1)
    sources = [tiny(tmp_path / f"{r}.safetensors", 20, r, 2, fill=2.0) for r in range(2)]
    replaced = 0
    for die_at in range(1, 200):
        tier = tmp_path / f"tier{die_at}"
        tier.mkdir()
        save(tier, 5)
        save(tier, 10)
        write(str(tiny(tmp_path / "old.safetensors", 20)), tier, "76.e0")

        def work(tier: Path = tier) -> None:
            for source in sources:
                write(str(source), tier, RUN)
            commit_now(tier, 20, 2, keep=1)

        finished = in_child(work, die_at)
        found = listed(tier)
        assert found in ([5, 10], [5, 10, 20], [10, 20], [20])
        replaced += found != [5, 10]
        work()
        assert listed(tier) == [20]
        if finished:
            break
    assert finished
    assert die_at > 12
    assert replaced > 2


def test_killed_while_another_attempt_replaces_a_step(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    source = tiny(tmp_path / "new.safetensors", 10, fill=2.0)
    for die_at in range(1, 200):
        tier = tmp_path / f"tier{die_at}"
        tier.mkdir()
        save(tier, 10, "77.e0")

        def work(tier: Path = tier) -> None:
            write(str(source), tier, "77.e1")
            commit_now(tier, 10, attempt="77.e1")

        finished = in_child(work, die_at)
        assert listed(tier) == [10]
        if finished:
            break
    assert finished
    assert durable.read_manifest(durable.step_dir(tier, 10)).attempt == "77.e1"
