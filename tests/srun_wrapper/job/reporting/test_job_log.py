"""robust-srun's log: its lines, its size, and file systems that do not take it."""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import until

from robust_slurm.config import Config
from robust_slurm.state_dir.job_dirs import LOG
from robust_slurm.state_dir.ledger import JobLedger
from srun_wrapper.job.reporting import job_log
from srun_wrapper.job.reporting.report import say
from srun_wrapper.protocol import messages as m

LINE = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d "
    r"(DEBUG|INFO|WARNING|ERROR) +\[\d+\] [\w-]+: .+"
)
log = logging.getLogger("robust-srun.test")


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    job_log.end()


def written(directory: Path, name: str = LOG) -> list[str]:
    job_log.end()
    return (directory / name).read_text().splitlines()


def test_lines_have_time_level_and_area(tmp_path: Path) -> None:
    job_log.begin(tmp_path, Config(spares=2))
    say("warning: this is on stderr, too")
    job_log.agent_said("n2", logging.WARNING, "no room", 3)
    JobLedger("").event("epoch", epoch=2, nodes=["n1"])
    log.info("two\nlines \x1b[31m")
    log.debug("not at this level")
    lines = written(tmp_path)
    assert all(LINE.fullmatch(line) for line in lines)
    assert "settings other than the defaults: spares = 2" in lines[0]
    assert [line.split("] ", 1)[1] for line in lines[1:]] == [
        "said: warning: this is on stderr, too",
        "agent: n2: no room (3 more messages of this node were left out)",
        "events: epoch: epoch=2, nodes=['n1']",
        r"test: two\nlines \x1b[31m",
    ]
    assert [line.split()[1] for line in lines[1:]] == ["WARNING", "WARNING", "INFO", "INFO"]


def test_wire_events_at_debug_without_environment(tmp_path: Path) -> None:
    job_log.begin(tmp_path, Config(log_level="debug"))
    job_log.heard("n1", m.Exited(4, 2, 0, 1, None, 0.5, "Traceback"))
    job_log.heard("n1", m.Imports(5, b"learnt", 1, {"WANDB_API_KEY": "secret"}))
    *_, exited, imports = written(tmp_path)
    assert "wire: n1: Exited number=4 epoch=2 local=0 code=1 signal=None" in exited
    assert imports.endswith("wire: n1: Imports number=5 ranks=1")


def test_an_exception_is_indented(tmp_path: Path) -> None:
    job_log.begin(tmp_path, Config())
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("internal error")
    lines = written(tmp_path)
    assert lines[1].endswith("test: internal error") and lines[-1] == "    ValueError: why"


def test_without_a_directory_nothing_is_logged(capfd: pytest.CaptureFixture[str]) -> None:
    job_log.begin(None, Config())
    log.error("nowhere")
    assert job_log.end() == "" and capfd.readouterr().err == ""


def test_the_size_is_bounded(tmp_path: Path) -> None:
    file = job_log.LogFile(tmp_path, most=1000)
    for number in range(100):
        file.put(b"%03d %s\n" % (number, b"x" * 95))
        wait_written(file)
    assert file.close(5.0) == 0
    sizes = [(tmp_path / name).stat().st_size for name in (LOG, job_log.OLDER)]
    assert max(sizes) <= 1100, sizes
    assert (tmp_path / LOG).read_bytes().splitlines()[-1].startswith(b"099 ")
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOG, job_log.OLDER]


def wait_written(file: job_log.LogFile) -> None:
    """The queue is empty: of a batch at most the last lines are on their way."""
    until(file._queue.empty, "an empty queue", every=0.001)


def test_a_file_system_that_stalls_costs_lines_only(tmp_path: Path) -> None:
    """A pipe without a reader: whoever opens it to write waits for ever."""
    os.mkfifo(tmp_path / LOG)
    job_log.begin(tmp_path, Config())
    for number in range(job_log.MAX_WAITING + 500):
        log.info("line %d", number)
    lost = job_log.end(deadline=0.1)
    found = re.fullmatch(
        rf"(\d+) lines of {LOG} could not be written: no answer from the file system", lost
    )
    assert found is not None and int(found[1]) == 1 + job_log.MAX_WAITING + 500, lost


def test_a_full_disk_is_noted_where_lines_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, full = os.write, threading.Event()
    tried = threading.Event()

    def limited(fd: int, data: bytes) -> int:
        if not full.is_set() or not data.startswith(b"two"):  # other threads write, too
            return write(fd, data)
        tried.set()
        if len(data) > 5:
            return write(fd, data[:5])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = job_log.LogFile(tmp_path)
    file.put(b"one\n")
    wait_written(file)
    monkeypatch.setattr(job_log.os, "write", limited)
    full.set()
    file.put(b"two is lost\n")
    assert tried.wait(5.0)
    full.clear()
    file.put(b"three\n")
    assert file.close(5.0) == 1
    lines = (tmp_path / LOG).read_text().splitlines()
    assert lines[0] == "one" and lines[-1] == "three"
    assert lines[1] == "two i" and lines[2].startswith("... 1 line is missing here: ")
