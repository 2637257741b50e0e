"""Checkpointer(strict=True): each warning is raised where the script can see it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpointed_training import CalledTraining, fake_store
from fake_checkpoint_store import FakeStore

from robust_slurm import StrictError
from robust_slurm.checkpoint.store.events import AlarmEvent


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    with fake_store(tmp_path / "s", monkeypatch) as made:
        yield made


def in_save(training: CalledTraining) -> None:
    training.step(1)


def in_an_optimizer_step(training: CalledTraining) -> None:
    training.step(1)
    training.finish("tokens")
    training.backward()
    training.optimizer.step()


def in_a_thread_and_raised_by_the_next_call(training: CalledTraining) -> None:
    session = training.ckpt._start()
    assert session.store is not None
    session.store._emit(AlarmEvent(0, "another run commits as well"))
    training.ckpt.close()


@pytest.mark.parametrize(
    ("lacks", "where", "says"),
    [
        ("schedule", in_save, "a learning-rate scheduler steps with it and is not in extra"),
        ("", in_an_optimizer_step, r"extra.tokens changed between save\(1\) and the next"),
        ("", in_a_thread_and_raised_by_the_next_call, "another run commits as well"),
    ],
)
def test_what_is_printed_is_raised_instead(
    lacks: str, where: Callable[[CalledTraining], None], says: str, tmp_path: Path,
    store: FakeStore, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    given: dict[str, Any] = {}
    if where is in_a_thread_and_raised_by_the_next_call:
        monkeypatch.delenv("ROBUST_CKPT_SOCKET")
        monkeypatch.delenv("ROBUST_EPOCH")
        given = {"directory": str(tmp_path / "d"), "minutes": 0}
    kept = [CalledTraining(lacks=lacks, **given)]
    where(kept[0])
    kept[0].ckpt.close()
    (printed,) = re.findall(r"rank 0: (.*)", capfd.readouterr().err)
    assert re.search(says, printed), printed
    kept = [CalledTraining(lacks=lacks, strict=True, **given)]
    with pytest.raises(StrictError) as raised:
        where(kept[0])
    assert str(raised.value) == printed
    kept[0].ckpt.close()
    assert capfd.readouterr().err == ""


def test_an_error_of_the_call_itself_goes_first_and_the_warning_is_printed(
    store: FakeStore, capfd: pytest.CaptureFixture[str]
) -> None:
    training = CalledTraining(strict=True)
    training.ckpt._say("something else")
    with pytest.raises(RuntimeError, match="call resume"):
        training.ckpt.resume()
    assert "something else" in capfd.readouterr().err
    training.ckpt.close()
