"""The processes that import torch are not root's, whoever starts the tests."""

from __future__ import annotations

import asyncio
import os
import pwd
import subprocess
import sys
from pathlib import Path

import fake_active_test
import health_site
import pytest
from job_leftovers import OTHER, needs_root

from health.active.coordinator import account
from health.active.coordinator.session import TestSession
from health.active.coordinator.start import WorkerProcess, here, task_env

site, python = health_site.site, fake_active_test.python
pytestmark = needs_root
NOBODY = pwd.getpwnam("nobody").pw_uid


def test_whose_the_devices_are(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    os.chown(tmp_path / "nvidia0", 0, OTHER)
    (tmp_path / "nvidiactl").touch()  # of root's group: nothing to join
    found = account.account("nobody", tmp_path)
    assert found and (found.uid, found.groups) == (NOBODY, (OTHER,))
    assert account.account("root") is account.account("") is None
    with pytest.raises(OSError, match="no such account"):
        account.account("no-such-account")


def test_a_user_stays_who_he_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert account.account("nobody") is None


def uids(pid: int) -> set[int]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {int(uid) for line in lines if line.startswith("Uid:") for uid in line.split()[1:]}


@pytest.mark.parametrize(("user", "uid"), [("nobody", NOBODY), ("root", 0)])
def test_a_worker_on_this_machine(python: str, user: str, uid: int) -> None:
    async def body() -> set[int]:
        session = TestSession({"n1": 1})
        await session.open("127.0.0.1")
        worker: WorkerProcess | None = None
        try:
            worker = here(session, "n1", python, None, user)
            await session.gather(60)
            assert worker._process is not None and session.ready("n1")
            return uids(worker._process.pid)
        finally:
            await session.close()
            if worker is not None:
                await worker.stop()

    assert asyncio.run(body()) == {uid}


def test_a_task_of_a_step() -> None:
    """The task becomes the account by itself, and is a new program then."""
    step = {"ROBUST_TEST_SERVER": "x:1", "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"}
    step |= {"SLURMD_NODENAME": "n1", "SLURM_LOCALID": "0"}
    assert task_env(step)
    code = (
        "import os, sys\n"
        "from health.active.coordinator import start\n"
        "code = 'import os; print(os.getresuid(), os.getgroups())'\n"
        "start.words_for = lambda python, module: [python, '-c', code]\n"
        "sys.exit(start.main())\n"
    )
    env = os.environ | step | {account.VARIABLE: "nobody"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.startswith(f"({NOBODY}, {NOBODY}, {NOBODY})"), done.stderr
    env |= {account.VARIABLE: "no-such-account"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "no such account" in done.stderr
