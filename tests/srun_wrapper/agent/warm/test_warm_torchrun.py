"""torchrun and its ranks, started again: all forked from warm interpreters."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import slot_driver
from slot_driver import Driver

from srun_wrapper.agent.processes import process_tree
from srun_wrapper.protocol.messages import Exited, Imports, Stop, Stopped, Warmup

pytestmark = pytest.mark.slow

pytest.importorskip("torch")
drivers, drive = slot_driver.drivers, slot_driver.drive

RANK = """
import json, os, pathlib, signal, sys, time
import robust_slurm
import torch.distributed as dist
dist.init_process_group("gloo")
robust_slurm.beat(1)
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "ROBUST_EPOCH")
said = {"environ": {n: os.environ[n] for n in names}, "argv": sys.argv, "pid": os.getpid()}
said["parent"] = os.getppid()
base, which = pathlib.Path(sys.argv[1]), f"{os.environ['ROBUST_EPOCH']}.{os.environ['RANK']}"
(base / f"said.{which}").write_text(json.dumps(said))
end = base / f"end.{which}"
while not end.exists():
    time.sleep(0.01)
sys.exit(int(end.read_text()))
"""


def said(d: Driver, epoch: int) -> list[dict[str, Any]]:
    paths = [d.base / f"said.{epoch}.{rank}" for rank in range(2)]
    d.wait(lambda: all(p.exists() and p.read_text().endswith("}") for p in paths), 60.0)
    return [json.loads(path.read_text()) for path in paths]


def test_a_spare_has_torchruns_ranks_ready(job: Driver, drivers: list[Driver]) -> None:
    """Torchrun and its ranks import the same on another node: the first ones here are forked."""
    job.launch()
    said(job, 1)
    told: dict[bool, Imports] = {}
    while len(told) < 2:
        imports = job.get(Imports, seconds=90.0)
        told[imports.ranks > 0] = imports
    assert told[True].ranks == 2 and told[True].environ["OMP_NUM_THREADS"] == "1"

    base = job.base / "spare"
    base.mkdir()
    spare = Driver(base, job.command, warm=True)
    drivers.append(spare)
    for each in told.values():
        spare.order(Warmup(each.learnt, each.ranks, each.environ))
    spare.wait_warm(seconds=90.0)
    spare.wait(lambda: (base / "warm-ranks").read_text() == "2", 90.0)
    assert spare.launch(epoch=2).warm
    assert [one["parent"] for one in said(job, 2)] == [spare.process.pid] * 2


def end(d: Driver, epoch: int, *codes: int) -> None:
    for rank, code in enumerate(codes):
        path = d.base / f"end.{epoch}.{rank}"
        path.with_suffix(".new").write_text(str(code))
        path.with_suffix(".new").rename(path)


@pytest.fixture
def job(drive: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Driver:
    """A job of torchrun whose ranks run RANK; a parameter comes before that."""
    script = tmp_path / "train.py"
    script.write_text(getattr(request, "param", "") + RANK)
    torchrun = str(Path(sys.executable).parent / "torchrun")
    words = [torchrun, "--standalone", "--nproc-per-node=2", str(script), str(tmp_path)]
    driver: Driver = drive(*words, warm=True)
    return driver


@pytest.mark.parametrize("job", ["import torch._dynamo\n"], indirect=True, ids=["compiler"])
def test_torchrun_and_its_ranks_are_forked(job: Driver) -> None:
    first = job.launch()
    fresh = said(job, 1)
    assert not first.warm
    job.wait_warm(seconds=90.0)
    job.wait(lambda: (job.base / "warm-ranks").read_text() == "2", 90.0)

    second = job.launch(epoch=2)
    assert second.warm
    forked = said(job, 2)
    assert [one["parent"] for one in fresh] == [first.pid] * 2
    assert [one["parent"] for one in forked] == [job.process.pid] * 2
    for old, new in zip(fresh, forked, strict=True):
        assert new["argv"] == old["argv"]
        assert new["environ"]["ROBUST_EPOCH"] == "2"
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            assert new["environ"][name] == old["environ"][name]
    assert {one["environ"]["MASTER_PORT"] for one in forked} != {fresh[0]["environ"]["MASTER_PORT"]}

    # A rank that fails: torchrun sees its exit code, ends the other and says so.
    end(job, 2, 3)
    exited = job.get(Exited, seconds=60.0)
    assert exited.code == 1
    assert "exitcode  : 3" in exited.tail, exited.tail
    job.wait(lambda: not any(process_tree.usage([one["pid"]]).state for one in forked))

    # One that is killed, and ranks that end well.
    assert job.launch(epoch=3).warm
    killed = said(job, 3)
    os.kill(killed[1]["pid"], signal.SIGKILL)
    assert "exitcode  : -9" in job.get(Exited, seconds=60.0).tail
    assert job.launch(epoch=4).warm
    said(job, 4)
    end(job, 4, 0, 0)
    assert job.get(Exited, seconds=60.0).code == 0

    # Ended from outside, in the midst.
    assert job.launch(epoch=5).warm
    stopped = said(job, 5)
    job.order(Stop(5, 0.0))
    job.get(Stopped)
    assert not any(process_tree.usage([one["pid"]]).state for one in stopped)
