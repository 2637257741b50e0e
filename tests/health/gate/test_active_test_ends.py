"""robust-health test is ended, by a person or by a job that begins: it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import fake_active_test
import health_site
import pytest
import waiting

from health import node_claim

pytestmark = pytest.mark.slow

site, python, run = health_site.site, fake_active_test.python, fake_active_test.run


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_end_leaves_no_worker(sent: signal.Signals, python: str) -> None:
    noted = note(python)
    env = os.environ | {"FAKE_WORKER": "hangs", "FAKE_PID": str(noted)}
    argv = [sys.executable, "-m", "health.cli", "test", "gemm", "--python", python]
    with subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True) as mine:
        waiting.until(lambda: noted.exists() and noted.read_text(), "a task")
        worker = Path(f"/proc/{noted.read_text()}")
        mine.send_signal(sent)
        _, err = mine.communicate(timeout=30)
        waiting.until(lambda: gone(worker), "the worker's end")
    if sent is not signal.SIGKILL:
        assert mine.returncode == 130 and err.splitlines()[-1].endswith("judged or recorded")
        assert "Traceback" not in err


def test_a_job_that_begins_ends_what_a_person_started(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root has the node's claim")
    noted, spool = note(python), str(tmp_path / "spool")
    env = os.environ | {"FAKE_WORKER": "hangs", "FAKE_PID": str(noted)}
    argv = [sys.executable, "-m", "health.cli", "test", "gemm", "--python", python]
    with subprocess.Popen(argv, env=env, stderr=subprocess.DEVNULL) as mine:
        waiting.until(lambda: noted.exists() and noted.read_text(), "a task")
        assert run(python, "bitwise") == 3
        assert "not tested: another test run is active on this machine" in capsys.readouterr().err
        assert node_claim.give_way(spool) == ""
        assert mine.wait(30) == -signal.SIGKILL
        waiting.until(lambda: gone(Path(f"/proc/{noted.read_text()}")), "the worker's end")
    assert run(python, "bitwise") == 0
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with node_claim.claimed(spool):
        assert run(python, "bitwise") == 0, "as a user there is nothing to claim"


def test_a_spool_that_is_not_roots_alone_is_said(
    python: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root has the node's claim")
    (tmp_path / "spool").chmod(0o777)
    assert run(python, "bitwise") == 0
    assert "a job that starts here cannot stop the tests: " in capsys.readouterr().err


def note(python: str) -> Path:
    """Return a file where the worker can write its number: it is nobody, also if root tests."""
    place = Path(python).parent / "notes"
    place.mkdir()
    place.chmod(0o1777)
    return place / "pid"


def gone(process: Path) -> bool:
    """Ended; whoever reaps orphans here may take its time."""
    try:
        return ") Z " in (process / "stat").read_text()
    except OSError:
        return True
