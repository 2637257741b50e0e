"""Lab nodes with kernels of their own: commands in them, cgroups, and how they go and come back."""

from __future__ import annotations

import signal
import subprocess

import pytest
from kernel_lab import kernel_lab
from waiting import until

from lab import LabError
from lab.slurm import releases

OWN = 'cat /proc/self/cgroup; cat /sys/fs/cgroup$(sed "s,0::,,;s,/step_.*,," /proc/self/cgroup)/'


def test_a_node_with_a_kernel_of_its_own() -> None:
    with kernel_lab(releases.host_release(), nodes=1) as lab:
        # A command, as in any other node.
        done = lab.exec("n1", ["sh", "-c", "id -u; hostname; cat; echo x >&2; exit 3"], input="in")
        assert (done.stdout, done.stderr) == (f"{lab.uid}\nn1\nin", "x\n")
        assert done.returncode == 3
        assert lab.exec("n1", ["id", "-u"], user=False).stdout == "0\n"
        assert lab.exec("n1", ["no-such-command"]).returncode == 127
        with lab.popen("n1", ["sh", "-c", "echo on; exec sleep 60"], stdout=subprocess.PIPE) as run:
            assert run.stdout is not None and run.stdout.readline() == b"on\n"
            run.terminate()
            assert run.wait(20) == -signal.SIGTERM
        host = lab.exec("head", ["uname", "-r"]).stdout
        assert lab.exec("n1", ["uname", "-r"]).stdout != host
        # A job's memory is limited by a cgroup, and its files are the user's.
        argv = ["srun", "-wn1", "--mem=100", "sh", "-c", f"{OWN}memory.max; touch made"]
        told = lab.exec("head", argv, check=True, cwd=lab.shared).stdout.splitlines()
        assert told[0].startswith("0::/system.slice/n1_slurmstepd.scope/") and "/step_0/" in told[0]
        assert told[1] == str(100 << 20)
        assert (lab.shared / "made").stat().st_uid == lab.uid
        # It crashes and boots as any other, and what cannot be done to it is refused.
        with pytest.raises(LabError, match="a node with a kernel of its own can crash"):
            lab.hang("n1")
        boot = ["cat", "/proc/sys/kernel/random/boot_id"]
        before = lab.exec("n1", boot).stdout
        lab.crash("n1")
        assert lab.exec("n1", boot).returncode == 125
        lab.heal("n1", 60)
        after = lab.exec("n1", boot).stdout
        assert after != before
        # The end of its kernel is the end of the node.
        assert lab.exec("n1", ["poweroff", "-ff"], user=False).returncode == 125
        until(lambda: lab.faults()["n1"] == "crashed", "the end of n1")
        lab.heal("n1", 60)
        assert lab.exec("n1", boot).stdout not in (before, after)
