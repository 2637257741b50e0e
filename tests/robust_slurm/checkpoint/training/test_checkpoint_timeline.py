"""Real ranks that start anew within an epoch agree on a number for it, also one that was moved."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from checkpoint_stores import Events, stores
from torch_forks import TorchForks
from waiting import until

from robust_slurm.checkpoint.store.events import Restore
from robust_slurm.checkpoint.store.store import Store

RANK = """
import runpy
runpy.run_module("tests.support.checkpoint.anew_rank", run_name="__main__", alter_sys=True)
"""


def _run(forks: TorchForks, where: list[tuple[Store, Events]], rendezvous: Path) -> list[str]:
    """Start rank ``n`` at store ``where[n]``. Returns what each printed."""
    ranks = [
        forks.start(
            RANK, str(n), str(len(where)), str(rendezvous),
            env={"ROBUST_CKPT_SOCKET": str(store.socket_path), "ROBUST_RUN_ID": "77",
                 "ROBUST_EPOCH": "0", "RANK": str(n), "WORLD_SIZE": str(len(where)),
                 "LOCAL_RANK": "0"},
        )
        for n, (store, _) in enumerate(where)
    ]  # fmt: skip
    ended = [rank.wait() for rank in ranks]
    assert ended == [-signal.SIGKILL] * len(where), [rank.err() for rank in ranks]
    return [rank.out().strip() for rank in ranks]


def _lines(where: list[tuple[Store, Events]]) -> set[int]:
    """Timelines of the newest step of all ranks."""
    found: set[int] = set()

    def whole() -> bool:
        held = [[h for h in s.stock() if (h.owner, h.step) == (n, 3)] for n, (s, _) in where_at]
        found.update(h.line for each in held for h in each)
        return all(held)

    where_at = list(enumerate(where))
    until(whole, "step 3 of all ranks", 30)
    return found


@pytest.mark.slow
def test_all_ranks_follow_the_store_that_has_seen_the_epoch_before(
    tmp_path: Path, torch_forks: TorchForks
) -> None:
    with stores(tmp_path, 3) as made:
        assert _run(torch_forks, made[:2], tmp_path / "first") == ["0", "0"]
        assert _lines(made[:2]) == {0}
        # Rank 1 moves to a store that would have it restored from the step the epoch began with.
        made[2][0].begin(0, Restore(3, "memory", {0: "none", 1: "none"}))
        assert _run(torch_forks, [made[0], made[2]], tmp_path / "second") == ["0", "0"]
        (line,) = _lines([made[0], made[2]])
        assert line > 0
