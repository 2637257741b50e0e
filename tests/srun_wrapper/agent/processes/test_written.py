"""Files that ranks are writing, as /proc shows them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.processes import written
from srun_wrapper.agent.processes.written import WrittenFiles, being_written
from srun_wrapper.decide.saved_files import LARGE
from srun_wrapper.protocol.messages import RankBeat


def test_large_files_that_are_open_for_writing(tmp_path: Path) -> None:
    for name, size in (("model.bin", LARGE), ("small.bin", 10), ("train.log", LARGE)):
        (tmp_path / name).write_bytes(b"x" * size)
    read = (tmp_path / "read.pt").open("wb+")
    read.write(b"x" * LARGE)
    read.close()
    open_files = [(tmp_path / name).open("ab") for name in ("model.bin", "small.bin", "train.log")]
    reads = (tmp_path / "read.pt").open("rb")
    reads.seek(0, os.SEEK_END)
    try:
        mine = [path for path in being_written([os.getpid(), 1 << 30]) if str(tmp_path) in path]
    finally:
        for file in (*open_files, reads):
            file.close()
    assert mine == [str(tmp_path / "model.bin")]


class _Loop:
    """Does at once what a loop has a thread do."""

    def run_in_thread(
        self, work: Callable[[], Any], done: Callable[[Any], None], otherwise: object
    ) -> None:
        done(work())


def test_a_file_is_reported_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(written.time, "monotonic", lambda: now)
    seen: list[tuple[str, ...]] = []
    looks = [("/a.pt",), ("/a.pt", "/b.pt"), (), ("/a.pt",)]
    monkeypatch.setattr(written, "_look", lambda _roots: looks.pop(0))
    files = WrittenFiles(cast(Loop, _Loop()), list, seen.append)
    for _ in range(3):
        files.tick(())
        files.tick(())  # too early
        now += written.EVERY
    files.tick([RankBeat(0, 7, 7, 0.0, source="explicit")])  # steps are numbered: not needed
    now += written.AGAIN
    files.tick([RankBeat(0, 7, 7, 0.0, source="auto")])
    assert seen == [("/a.pt",), ("/b.pt",), ("/a.pt",)]
