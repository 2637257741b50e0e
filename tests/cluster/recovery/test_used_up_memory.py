"""A rank that SIGKILL ends: used-up memory is the program's, and an unknown cause evicts nobody."""

from __future__ import annotations

import os
import re
import signal

import pytest
from jobs import Training, prepared, start
from kernel_lab import kernel_lab

from lab import Cluster

pytestmark = pytest.mark.cluster


def own_pid(pid: int) -> int:
    """Return the pid that the node's kernel has for a process."""
    with open(f"/proc/{pid}/status") as status:
        line = next(line for line in status if line.startswith("NSpid:"))
    return int(line.split()[-1])


def kill_for_memory(training: Training, epoch: int) -> None:
    """Kill rank 1 as the kernel's OOM killer does."""
    training.until(lambda: (training.dir / f"asleep-{epoch}").exists(), f"rank 1 in {epoch}")
    process = training.processes("toy.py", 1)[0]
    text = f"Memory cgroup out of memory: Killed process {own_pid(process.pid)} (python)"
    training.lab.kmsg(process.environ["SLURMD_NODENAME"], text, level=3)
    os.kill(process.pid, signal.SIGKILL)


def test_memory_that_is_used_up_twice_stops_the_job_and_names_no_node(lab: Cluster) -> None:
    training = start(lab, 2, spares=1, toy="--fault asleep --at 13 --epoch 0", steps=25)
    for epoch in (1, 2):
        kill_for_memory(training, epoch)
    assert training.wait_end() == 128 + signal.SIGKILL, training.story()
    first, last = training.incidents()
    for incident in (first, last):
        assert (incident["rule"], incident["cause"]) == ("host-oom", "user"), training.story()
        assert incident["suspects"] == incident["swaps"] == []
    assert (first["action"], last["action"]) == ("restart", "stop")
    assert not training.accusations()
    assert training.says("stopped: .*out of memory.*--mem"), training.story()
    training.check_gone()


def test_a_rank_that_is_killed_at_the_same_step_on_any_node_evicts_nobody(lab: Cluster) -> None:
    """After the second time its ranks move: the kill follows the rank, so no node is to blame."""
    training = start(lab, 3, spares=1, toy="--fault kill --at 13 --epoch 0", steps=25)
    assert training.wait_end() == 128 + signal.SIGKILL, training.story()
    found = training.incidents()
    assert [i["rule"] for i in found] == ["killed"] * 4, training.story()
    assert [i["rung"] for i in found] == ["in-place", "exchange", "in-place", "no-progress"]
    assert [i["cause"] for i in found] == ["unknown", "unknown", "user", "user"]
    assert "it follows rank 1 from " in found[-1]["evidence"][-1], training.story()
    assert not training.accusations() and not any(i["swaps"] for i in found)
    assert training.says("exchanges its ranks with"), training.story()
    training.check_gone()


def test_a_node_that_kills_ranks_whatever_they_are_leaves_the_third_time(lab: Cluster) -> None:
    toy = "--fault kill --at 13 --epoch 0 --rank -1 --node n2"
    training = start(lab, 3, spares=1, toy=toy, steps=25, sbatch="-w n1,n2,n3,n4")
    training.check_done()
    found = training.incidents()
    assert [i["rung"] for i in found] == ["in-place", "exchange", "spare"], training.story()
    assert found[-1]["swaps"] == [["n2", "n4"]], training.story()
    assert list(training.accusations()) == ["n2"] and not training.withdrawals()


# -- the kernel's own OOM killer


@pytest.mark.parametrize(("release", "job"), [("26.05", "s[0-9A-Z]{13}"), ("22.05", r"job_\d+")])
def test_a_rank_beyond_the_jobs_memory_is_known_at_once(release: str, job: str) -> None:
    """Users may not read the kernel's log here, so the step's cgroup alone tells of the kill."""
    with kernel_lab(release, nodes=2) as lab:
        for node in lab.spec.compute_names:
            argv = ["sysctl", "-q", "kernel.dmesg_restrict=1"]
            lab.exec(node, argv, user=False, check=True)
        training = prepared(lab, 2, steps=25)
        line = training.line([], ["--fault", "hog", "--at", "13", "--epoch", "0"])
        # A machine that is tested would be seen.
        body = f"export ROBUST_STOP_TESTS=1\n{line}"
        training.submit(body, ["-N2", "--ntasks-per-node=1", "--mem=250"])
        assert training.wait_end(240.0) == 128 + signal.SIGKILL, training.story()
        first, last = training.incidents()
        path = rf"/system\.slice/n2_slurmstepd\.scope/{job}/step_0/user/task_\d"
        for incident in (first, last):
            assert (incident["rule"], incident["cause"]) == ("host-oom", "user"), training.story()
            assert incident["suspects"] == incident["swaps"] == incident["tests"] == []
            told = "\n".join(incident["evidence"])
            assert re.search(rf"^cgroup {path}: oom_kill events .*: 1$", told, re.MULTILINE), told
        assert (first["action"], last["action"]) == ("restart", "stop")
        assert (first["rung"], last["rung"]) == ("in-place", "same-error")
        assert not training.accusations()
        assert not any("DRAIN" in flags or "DOWN" in flags for flags in lab.nodes().values())
        assert training.says("stopped: .*used more memory.*--mem"), training.story()
