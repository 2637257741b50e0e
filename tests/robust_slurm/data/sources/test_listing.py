"""Files that have to be opened to be listed."""

from __future__ import annotations

import threading
from concurrent.futures.thread import _threads_queues
from pathlib import Path
from typing import Any

import pytest

from robust_slurm.data import jsonl
from robust_slurm.data.errors import DataError, SourceStalled
from robust_slurm.data.sources import listing
from robust_slurm.data.sources.listing import list_parts


def opened(directory: Path, count: int) -> Any:
    for number in range(count):
        (directory / f"{number:03}.jsonl").write_text("[1]\n")
    source = jsonl(directory / "*.jsonl", patience=0.2)
    source.opens = True
    return source


def test_files_are_opened_by_several_threads_that_keep_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, answers = opened(tmp_path, 60), threading.Event()
    named, begun = source._named, []
    monkeypatch.setattr(source, "_named", lambda file: begun.append(file) or answers.wait(60))
    before = set(threading.enumerate())
    with pytest.raises(SourceStalled, match="web: its files are not listed"):
        list_parts("web", source)
    left = set(threading.enumerate()) - before
    assert len(left) >= len(begun) > 1 and all(thread.daemon for thread in left)
    assert not left & set(_threads_queues)  # a process waits for these, daemons or not
    monkeypatch.setattr(source, "_named", named)
    answers.set()
    for thread in left:
        thread.join(60)
    again = opened(tmp_path, 60)
    assert [part.name[-9:] for part in list_parts("web", again)] == [
        f"{number:03}.jsonl" for number in range(60)
    ]


def test_of_several_broken_files_the_first_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = opened(tmp_path, 60)
    named = source._named

    def broken(file: Any) -> Any:
        if file.name[-9:-6] in ("013", "014", "040"):
            raise DataError(file.name)
        return named(file)

    monkeypatch.setattr(source, "_named", broken)
    with pytest.raises(DataError, match=r"013\.jsonl"):
        list_parts("web", source)


def test_a_process_that_was_suspended_has_not_waited_for_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After ``scontrol resume`` a wait that was amid ends at once, whatever it was for."""
    source, answers = opened(tmp_path, 3), threading.Event()
    source.options = source.options._replace(patience=3 * listing.TURN)
    parts, join = source.parts, threading.Thread.join
    monkeypatch.setattr(source, "parts", lambda: answers.wait(60) and parts())
    waits: list[float | None] = []

    def resumed(thread: threading.Thread, timeout: float | None = None) -> None:
        waits.append(timeout)
        if len(waits) > 2:
            answers.set()
            join(thread, 60)

    monkeypatch.setattr(threading.Thread, "join", resumed)
    assert len(list_parts("web", source)) == 3
