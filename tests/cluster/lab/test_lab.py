"""The lab against the real thing: what its nodes are, and what runs on them."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator

import pytest
from lab_nodes import hostnames

from lab import Cluster, LabError


@pytest.fixture(scope="module")
def lab() -> Iterator[Cluster]:
    with Cluster(nodes=4, standby=1, gpus=2) as cluster:
        yield cluster


def test_user_runs_on_all_train_nodes(lab: Cluster) -> None:
    assert hostnames(lab, 4) == ["n1", "n2", "n3", "n4"]
    assert set(lab.nodes()) == {"n1", "n2", "n3", "n4", "s1"}
    done = lab.exec("head", ["srun", "-p", "standby", "id", "-un"], check=True)
    assert done.stdout.strip() == lab.user


def test_gres_gives_devices(lab: Cluster) -> None:
    show = "echo $CUDA_VISIBLE_DEVICES"
    argv = ["srun", "-N2", "--gres=gpu:h100:2", "bash", "-c", show]
    assert lab.exec("head", argv, check=True).stdout.split() == ["0,1", "0,1"]


def test_each_node_has_its_own_everything(lab: Cluster) -> None:
    for node in ("n1", "n2"):
        make = 'for d in /tmp /dev/shm; do echo "$0" > $d/mine; done; cat /tmp/mine /dev/shm/mine'
        assert lab.exec(node, ["bash", "-c", make, node]).stdout.split() == [node, node]
        assert lab.exec(node, ["hostname"]).stdout.strip() == node
        pids = lab.exec(node, ["bash", "-c", "cd /proc && echo [0-9]*"]).stdout.split()
        assert len(pids) < 10
    assert lab.exec("n1", ["hostname", "-i"]).stdout.strip() == "10.77.0.1"
    (lab.shared / "note").write_text("seen")
    assert lab.exec("n4", ["cat", str(lab.shared / "note")]).stdout == "seen"


def test_exec_is_transparent(lab: Cluster) -> None:
    assert lab.exec("n1", ["cat"], input="in and out").stdout == "in and out"
    assert lab.exec("n1", ["bash", "-c", "exit 7"]).returncode == 7
    assert lab.exec("n1", ["bash", "-c", "kill -USR1 $$"]).returncode == -signal.SIGUSR1
    assert lab.exec("n1", ["no-such-command"]).returncode == 127
    assert lab.exec("n1", ["/etc/passwd"]).returncode == 126
    assert lab.exec("n1", ["id", "-u"], user=False).stdout.strip() == "0"
    assert lab.exec("n1", ["bash", "-c", "echo $A"], env={"A": "b"}).stdout.strip() == "b"
    with pytest.raises(LabError, match="head n1 n2 n3 n4 s1"):
        lab.exec("n9", ["true"])


def test_signals_pass_to_the_command(lab: Cluster) -> None:
    script = "trap 'echo got; exit 5' TERM; echo on; while :; do sleep 0.05; done"
    with lab.popen("n1", ["bash", "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "got\n"
        assert process.wait(10) == 5


def test_batch_job(lab: Cluster) -> None:
    job = lab.sbatch("#!/bin/sh\nhostname\n", ["-o", "batch.out"])
    assert lab.wait_job(job, "COMPLETED", 30)["Partition"] == "train"
    assert (lab.shared / "batch.out").read_text() == "n1\n"


_ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(x)
print(x.item(), flush=True)
dist.destroy_process_group()
"""


def test_gloo_between_nodes_without_tuning(lab: Cluster) -> None:
    pytest.importorskip("torch")
    (lab.shared / "reduce.py").write_text(_ALL_REDUCE)
    run = (
        "export MASTER_ADDR=n1 MASTER_PORT=29500 RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS; "
        "python reduce.py"
    )
    argv = ["srun", "-N2", "-w", "n1,n2", "bash", "-c", run]
    assert lab.exec("head", argv, check=True, timeout=120).stdout.split() == ["3.0", "3.0"]
