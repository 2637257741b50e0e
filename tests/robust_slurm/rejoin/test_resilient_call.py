"""``resilient`` calls the function in any case, and lets go of what it held."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from robust_slurm.auto import flights, listen
from robust_slurm.rejoin import renew
from robust_slurm.rejoin import resilient as module


def test_a_rank_that_cannot_be_asked_trains_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROBUST_BEAT_DIR", str(tmp_path / "gone"))
    monkeypatch.setattr(module, "_called", False)
    monkeypatch.setattr(renew, "checkpointers", list)  # another test may have left one behind
    assert module.resilient(lambda: 7)() == 7
    assert "runs as without resilient(): FileNotFoundError" in capfd.readouterr().err


@pytest.mark.parametrize("fails", [True, False])
def test_a_rank_that_raises_ends_without_a_search_for_garbage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """With torch loaded it takes a second, in which all other ranks wait."""
    monkeypatch.setenv("ROBUST_BEAT_DIR", str(tmp_path))
    monkeypatch.setattr(module, "_called", False)
    monkeypatch.setattr(renew, "checkpointers", list)  # another test may have left one behind

    def train() -> int:
        return 1 // (not fails)

    try:
        if fails:
            with pytest.raises(ZeroDivisionError):
                module.resilient(train)()
        else:
            assert module.resilient(train)() == 1
        assert (gc.get_freeze_count() > 0) is fails
    finally:
        gc.unfreeze()


def test_errors_that_have_each_other_as_causes_are_let_go() -> None:
    one, other, context = ValueError("one"), ValueError("other"), ValueError("context")
    one.__cause__, other.__cause__, one.__context__ = other, one, context
    try:
        raise context
    except ValueError:
        pass
    module._let_go(one)
    assert context.__traceback__ is None


def test_threads_of_the_epoch_before_end(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    listen.listen(str(tmp_path / "1-0.calls"), 1, flights._wait, None, None)
    (thread,) = set(threading.enumerate()) - before
    listen.end()
    thread.join(30.0)
    assert not thread.is_alive()


def test_a_rank_that_never_resumes_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank's weights would stay as they are, where a new process begins with fresh ones."""
    saves = SimpleNamespace(_session=object(), _resumed=False, _close=lambda _deadline: None)
    monkeypatch.setattr(renew, "checkpointers", lambda: [saves])
    with pytest.raises(RuntimeError, match=r"resume\(\)"):
        renew.close_checkpointers()
    saves._resumed = True
    renew.close_checkpointers()


def test_an_older_robust_task_names_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank's package and robust-task may be of two releases."""
    nothing = lambda *_: None  # noqa: E731
    for name in ("close_checkpointers", "let_go_loaders", "begin"):
        monkeypatch.setattr(renew, name, nothing)
    monkeypatch.setattr(module, "_offer", lambda _sockets: offer)
    monkeypatch.setattr("os._exit", lambda code: pytest.fail(f"ended with {code}"))
    order: dict[str, Any] = {"set": {}, "unset": []}
    offer: Any = SimpleNamespace(ready=nothing, going=nothing, wait=lambda: order)
    sockets: Any = SimpleNamespace(next_round=nothing)
    first: Any = SimpleNamespace(check=nothing, put_back=nothing)
    try:
        assert module._rejoin(offer, sockets, first, None)[1] <= time.monotonic()
    finally:
        gc.unfreeze()
