"""The step that all ranks resume from: what their stores name, and what cannot be read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from checkpointed_training import Training, fake_store, restart
from fake_checkpoint_store import FakeStore

from robust_slurm import CheckpointError
from robust_slurm.checkpoint.capture.state import Share, State
from robust_slurm.checkpoint.planning.offered import common_step
from robust_slurm.checkpoint.training import resuming, session


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    with fake_store(tmp_path / "s", monkeypatch) as made:
        yield made


def test_ranks_that_were_given_different_steps_do_not_go_on(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose store gave no answer read from disk: its collectives did not fit the others'."""
    restart(store, 6, "step-6")

    def gather(values: Sequence[int]) -> list[list[int]]:
        return [list(values), [0, -1]]

    monkeypatch.setattr(session.meshes, "gather", gather)
    training = Training()
    with pytest.raises(CheckpointError) as raised:
        training.ckpt.resume()
    assert str(raised.value) == (
        "the ranks were given different steps to resume from: rank 0 (of 1) step 6 in memory; "
        "rank 1 (of 1) none, as its store gives no answer"
    )
    training.ckpt.close()


@pytest.mark.parametrize(
    ("offered", "step"),
    [
        ([-1, -1], None),
        ([13, 13], None),  # step 6 in memory
        ([12, 12], 6),  # on disk
        ([12, -1], 6),  # a rank whose store is gone goes with the others
        ([0, -1], 0),
    ],
)
def test_the_step_that_all_resume_from(offered: list[int], step: int | None) -> None:
    assert common_step(offered) == step


@pytest.mark.parametrize("offered", [[13, -1], [12, 10], [13, 12], [12, 10, -1]])
def test_steps_that_do_not_go_together(offered: list[int]) -> None:
    with pytest.raises(ValueError, match="given different steps"):
        common_step(offered)


def test_a_damaged_step_is_not_named_for_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 could not read step 100, rank 1 not step 90: rank 0 named step 100 for both."""
    said: list[str] = []

    def read(_state: State, _directory: str, step: int, *_rest: Any, cut: bool) -> Any:
        if step == 100:
            raise OSError("step 100 is damaged")
        return resuming._GOOD, []

    monkeypatch.setattr(resuming, "_candidates", lambda _directory: [100, 90])
    monkeypatch.setattr(resuming, "_read", read)
    monkeypatch.setattr(resuming, "gather", lambda values: [list(values), [resuming._BAD]])
    with pytest.raises(CheckpointError, match="steps 100, 90; step 100 is damaged"):
        resuming.from_durable(MagicMock(), {}, "/d", MagicMock(), {}, None, said.append)
    assert said == [
        "durable step 100 is skipped: step 100 is damaged",
        "durable step 90 is skipped: rank 1 cannot read it",
    ]


def test_a_node_that_can_read_no_step_makes_none_doubted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is not mounted there, or its server is away: the steps are sound."""
    doubted: list[int] = []
    monkeypatch.setattr(resuming, "_candidates", lambda _directory: [100, 90])
    monkeypatch.setattr(resuming, "_read", lambda *_rest, cut: (resuming._GOOD, []))
    monkeypatch.setattr(resuming, "gather", lambda values: [list(values), [resuming._BAD]])
    monkeypatch.setattr(resuming.tier, "doubt", lambda _where, step, _why: doubted.append(step))
    rank0 = MagicMock(rank=0)
    with pytest.raises(CheckpointError, match="steps 100, 90; see the other ranks"):
        resuming.from_durable(MagicMock(), {}, "/d", rank0, {}, 100, lambda _text: None)
    assert doubted == []


def test_a_damaged_step_that_robust_srun_chose_is_doubted_and_an_older_one_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each restart chose the step again, and newer states in memory were given up for it."""
    doubted: list[int] = []

    def read(_state: State, _directory: str, step: int, *_rest: Any, cut: bool) -> Any:
        if step == 100:
            raise OSError("step 100 is damaged")
        return resuming._GOOD, []

    monkeypatch.setattr(resuming, "_candidates", lambda _directory: [110, 100, 90])
    monkeypatch.setattr(resuming, "_read", read)
    monkeypatch.setattr(resuming.tier, "doubt", lambda _where, step, _why: doubted.append(step))
    rank0 = MagicMock(rank=0)
    step = resuming.from_durable(MagicMock(), {}, "/d", rank0, {}, 100, lambda _text: None)
    assert step == 90 and doubted == [100]


def test_a_rank_that_parts_from_its_peers_alone_asks_them_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside robust-srun it gathered the run's name anew, while the others trained."""
    monkeypatch.delenv("ROBUST_CKPT_SOCKET", raising=False)
    training = Training(directory=str(tmp_path / "d"))
    training.ckpt.resume()
    one = training.ckpt._session
    assert one is not None and one.saver is not None
    before = one._attempt
    one._state.share = Share((0, 1), 0)
    monkeypatch.setattr(session.meshes, "gather", MagicMock(side_effect=AssertionError("alone")))
    one._unshare()
    assert one.saver is not None and one._attempt == before
    training.ckpt.close()
