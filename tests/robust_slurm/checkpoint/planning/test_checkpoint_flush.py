"""The choice of snapshots to write before the job ends."""

from __future__ import annotations

from plan_places import healthy

from robust_slurm.checkpoint.planning.flush import flush


def test_each_rank_is_written_once_from_its_own_memory() -> None:
    result = flush(healthy(7, 8), 4, [(5, 4)])
    assert result.step == 8
    assert result.writes == tuple((f"t{r}", r, f"own-{r}-8") for r in range(4))
    assert result.committer == "t0"
    assert result.lines == ("write step 8: 4 snapshots from 2 nodes",)


def test_replicas_stand_in_for_a_lost_node() -> None:
    result = flush([p for p in healthy(8) if p.node == "n1"], 4)
    assert {(w.store, w.owner) for w in result.writes} == {
        ("t2", 2), ("t3", 3), ("t2", 0), ("t3", 1)}  # fmt: skip


def test_nothing_is_written_twice_or_in_part() -> None:
    assert flush(healthy(8), 4, [(8, 4)]).writes == ()
    assert flush(healthy(8)[:1], 4).writes == ()
    assert "no step is complete" in flush(healthy(8)[:1], 4).lines[-1]
