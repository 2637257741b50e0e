"""A resume from a shared file system that does not answer: reported, and it goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from checkpointed_training import Training
from isolated import isolated
from stalled_mount import stalling
from torch_forks import TorchForks, all_end_well
from waiting import until

from robust_slurm.checkpoint.capture.sharing import Share
from robust_slurm.checkpoint.training.unanswered import SILENT, reported

pytestmark = pytest.mark.slow

TRAINING = """
import sys, torch
import robust_slurm
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
ckpt = robust_slurm.Checkpointer(model=model, optimizer=optimizer, directory=sys.argv[1], every=1)
print("ready", flush=True)
sys.stdin.readline()
step = ckpt.resume()
print("resumed", step, flush=True)
if not step:
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    ckpt.save(1)
ckpt.close()
"""


def start(directory: Path) -> subprocess.Popen[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("ROBUST_", "SLURM_"))}
    return subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(directory)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
    )  # fmt: skip


@pytest.fixture
def saved(tmp_path: Path, torch_forks: TorchForks) -> Path:
    """A durable checkpoint of step 1."""
    first = torch_forks.start(TRAINING, str(tmp_path / "saved"))
    all_end_well([first])
    assert first.out().split() == ["ready", "resumed", "0"]
    return tmp_path / "saved"


@isolated
def test_resume_names_the_directory_that_does_not_answer(tmp_path: Path, saved: Path) -> None:
    mount = tmp_path / "mnt"
    mount.mkdir()
    with stalling(mount) as shared:
        shutil.copytree(saved, mount / "run7")
        with start(mount / "run7") as again:
            assert again.stdin and again.stdout and again.stderr
            assert again.stdout.readline() == "ready\n"
            shared.stall()
            began = time.monotonic()
            again.stdin.write("\n")
            again.stdin.flush()
            line = again.stderr.readline()
            assert time.monotonic() - began < 10.0
            assert line == (
                f"robust-slurm: rank 0: resume() waits: {mount}/run7 has not answered for 5 s; "
                "resume() continues when its file system answers\n"
            )
            shared.resume()
            assert f"{mount}/run7 answers again after" in again.stderr.readline()
            assert again.stdout.readline() == "resumed 1\n"
            assert again.wait(60) == 0


@isolated
def test_save_does_not_wait_for_the_others_mark_on_a_directory_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside robust-srun such a file says that ranks no longer hold the same."""
    shared_by = "robust_slurm.checkpoint.training.mesh.find_share"
    monkeypatch.setattr(shared_by, lambda *_args: Share((0, 1)))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    mount = tmp_path / "mnt"
    mount.mkdir()
    with stalling(mount) as shared:
        training = Training(mesh={"dp": 2}, directory=str(mount / "run7"), every=1)
        assert training.ckpt.resume() == 0
        shared.stall()
        save = threading.Thread(target=training.step, args=[1], daemon=True)
        save.start()
        save.join(20.0)
        waits = save.is_alive()
        shared.resume()
        training.ckpt._close(0.0)
        assert not waits


def test_a_long_resume_is_no_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error is an answer, too."""
    monkeypatch.setattr("robust_slurm.checkpoint.training.unanswered.PAUSE", SILENT / 100)
    monkeypatch.setattr("robust_slurm.checkpoint.training.unanswered.SILENT", SILENT / 10)
    said: list[str] = []
    for directory in (tmp_path, tmp_path / "missing", ""):
        with reported(str(directory), "resume()", said.append):
            time.sleep(SILENT / 5)
    asking = [t for t in threading.enumerate() if t.name == "robust-asks"]
    until(lambda: not any(t.is_alive() for t in asking), "their end")
    assert said == []
