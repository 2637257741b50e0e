"""robust-admin on a real Slurm: doctor before, install here and over SSH, doctor after, a job."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import until

from health.admin import doctor
from lab import Cluster
from tests.admin_prefix import REPOSITORY, make_prefix

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
NODES = ("n1", "n2", "s1")
NAME = f"admin{os.getpid()}"


class Site:
    """A lab with a prefix that all its nodes see, and an /etc that each has for itself."""

    def __init__(self, lab: Cluster):
        self.lab = lab
        self.top = lab.spec.dir / "site"
        self.top.mkdir(mode=0o755)
        self.prefix = make_prefix(self.top / "prefix")
        lab.exec("head", ["mkdir", str(self.etc)], user=False, check=True)
        # The spool's usual place is the same directory on all nodes, and this machine's own.
        self.write("head", "robust.toml", f'[gate]\nspool = "{lab.spec.node_dir}/gate"\n')

    @property
    def etc(self) -> Path:
        return etc(self.lab)

    def admin(self, *words: str, node: str = "head") -> subprocess.CompletedProcess[str]:
        python = str(self.prefix / "bin" / "python3")
        argv = [python, "-I", "-m", "health.admin.cli", *words, "--etc", str(self.etc)]
        return self.lab.exec(node, argv, user=False, timeout=120)

    def install(self, *words: str) -> subprocess.CompletedProcess[str]:
        done = self.admin("install", "--tmpfiles", "", "--yes", *words)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done

    def doctor(self) -> dict[str, dict[str, Any]]:
        """What is not in order, by subject."""
        done = self.admin("doctor", "--json")
        assert done.returncode in (0, 1), done.stderr
        remarks = json.loads(done.stdout)["remarks"]
        found = {r["subject"]: r for r in remarks if r["level"] != "ok"}
        assert done.returncode == int(any(r["level"] == "fix" for r in found.values()))
        return found

    def write(self, node: str, name: str, text: str) -> None:
        code = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.stdin.read())"
        argv = ["python", "-c", code, str(self.etc / name)]
        self.lab.exec(node, argv, user=False, input=text, check=True)

    def read(self, node: str, path: Path) -> str:
        return self.lab.exec(node, ["cat", str(path)], user=False).stdout


def etc(lab: Cluster) -> Path:
    return lab.spec.node_dir / "robust"


def slurm_conf(lab: Cluster) -> dict[str, str]:
    """What `install` says that slurm.conf wants, and its advice, for a lab of 22.05."""
    return {
        "Prolog": f"{etc(lab)}/prolog",
        "Epilog": f"{etc(lab)}/epilog",
        "HealthCheckProgram": f"{etc(lab)}/healthcheck",
        "HealthCheckInterval": "300",
        "PrologFlags": "Alloc,Contain,DeferBatch",
        "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,sched_min_interval=0,"
        "bf_interval=1,nohold_on_prolog_fail",
        "AuthInfo": "cred_expire=9",
        "PrologEpilogTimeout": "60",
        "UnkillableStepTimeout": "180",
        "KillWait": "30",
        "RebootProgram": "/sbin/reboot",
        "GresTypes": "gpu",
    }


def toml(lab: Cluster) -> str:
    return (
        f'state_dir = "{lab.spec.dir}/state"\n[gate]\nspool = "{lab.spec.node_dir}/gate"\n'
        '[nodes."n2".health.mounts]\nrequired = ["/not-there"]\n'
    )


@pytest.fixture(scope="module")
def plain() -> Iterator[Site]:
    """A lab with slurm.conf as it is."""
    with Cluster(nodes=2, standby=1) as lab:
        yield Site(lab)


def test_doctor_before_anything(plain: Site) -> None:
    found = plain.doctor()
    lines = {remark["line"] for remark in found.values() if remark["level"] == "fix"}
    wanted = slurm_conf(plain.lab)
    needed = [key for key in wanted if key.startswith(("Prolog", "Epilog", "Health", "Sched"))]
    needed.remove("PrologEpilogTimeout")
    assert lines == {
        *(f"{key}={wanted[key]}" for key in needed),
        f"robust-admin install --etc {plain.etc}",
    }
    text = plain.admin("doctor").stdout
    assert f"slurm.conf:  Prolog={plain.etc}/prolog\n" in text
    assert text.startswith(f"cluster {plain.lab.name}, Slurm 2")


def test_install_here_and_uninstall(plain: Site) -> None:
    looked = plain.admin("install", "--tmpfiles", "", "--dry-run")
    assert looked.returncode == 0 and not plain.read("head", plain.etc / "prolog")
    done = plain.install()
    assert f"\n  Prolog={plain.etc}/prolog\n" in done.stdout
    assert "nothing to do" in plain.install().stdout
    lines = plain.read("head", plain.etc / "slurm.conf.lines")
    assert "\nPrologFlags=Alloc,Contain,DeferBatch\n" in lines and "bf_interval=1,nohold" in lines
    gone = plain.admin("uninstall", "--yes")
    assert gone.returncode == 0, gone.stderr
    left = plain.lab.exec("head", ["ls", str(plain.etc)], user=False).stdout.split()
    assert left == ["robust.toml"], "what its admin wrote stays"


def test_doctor_without_slurmctld(plain: Site) -> None:
    conf = (plain.lab.spec.dir / "etc" / "slurm.conf").read_text()
    (plain.top / "dead.conf").write_text(conf.replace("SlurmctldPort=6817", "SlurmctldPort=6899"))
    python = str(plain.prefix / "bin" / "python3")
    argv = [python, "-I", "-m", "health.admin.cli", "doctor"]
    env = {"SLURM_CONF": str(plain.top / "dead.conf")}
    done = plain.lab.exec("head", argv, user=False, env=env, timeout=60)
    assert done.returncode == 2 and "no slurmctld answers" in done.stderr


# ---- the whole way


def answers(lab: Cluster, node: str) -> bool:
    code = "import socket, sys; socket.create_connection((sys.argv[1], 22), timeout=1)"
    return lab.exec("head", ["python", "-c", code, node]).returncode == 0


@pytest.fixture(scope="module")
def ready() -> Iterator[Site]:
    """A lab with the gate's lines in slurm.conf, and an sshd on every node."""
    if SSHD is None:
        pytest.skip("no sshd: apt-get install openssh-server")
    lab = Cluster(name=NAME, nodes=2, standby=1, gpus=2)
    lab = Cluster(name=NAME, nodes=2, standby=1, gpus=2, slurm_conf=slurm_conf(lab))
    with lab:
        site = Site(lab)
        for key in ("host", "user"):
            argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(site.top / key)]
            subprocess.run(argv, check=True, timeout=30, stdin=subprocess.DEVNULL)
        host = (site.top / "host.pub").read_text()
        (site.top / "known").write_text("".join(f"{node} {host}" for node in NODES))
        (site.top / "sshd_config").write_text(
            f"HostKey {site.top}/host\nPidFile none\nUsePAM no\nStrictModes no\n"
            f"AuthorizedKeysFile {site.top}/user.pub\nPermitRootLogin prohibit-password\n"
        )
        argv = [SSHD, "-D", "-f", str(site.top / "sshd_config")]
        for node in NODES:
            lab.exec(node, ["mkdir", "-p", "/run/sshd"], user=False, check=True)
        servers = [lab.popen(node, argv, user=False) for node in NODES]
        try:
            until(lambda: all(answers(lab, node) for node in NODES), "an sshd on every node")
            yield site
        finally:
            for server in servers:
                server.terminate()
                server.wait()


def test_install_over_ssh_and_run_a_job(ready: Site) -> None:
    lab = ready.lab
    (lab.spec.dir / "state").mkdir(mode=0o755)
    ready.write("head", "robust.toml", toml(lab))
    told = ready.install().stdout
    assert f"made {lab.spec.dir}/state/nodes" in told and "slurm.conf still wants" not in told
    assert "nothing to do" in ready.install().stdout

    ssh = ["--nodes", "n[1-2],s1", "--ssh"]
    ssh += ["--known-hosts", str(ready.top / "known"), "--identity", str(ready.top / "user")]
    done = ready.install(*ssh)
    assert "\nn[1-2],s1  done  " in done.stdout
    for node in NODES:
        assert "/not-there" in ready.read(node, ready.etc / "robust.toml")
    assert ready.install(*ssh).stdout == "n[1-2],s1  same\nnothing to do\n"

    trusted = not doctor.untrusted(str(REPOSITORY / "health" / "gate.py"))
    found = ready.doctor()
    if not trusted:  # a clone of somebody else's: the doctor is right
        assert found.pop(str(ready.prefix))["level"] == "fix"
    assert {subject for subject, r in found.items() if r["level"] == "fix"} == set(), found
    assert set(found) <= {f"state_dir {lab.spec.dir}/state", "ProctrackType = proctrack/linuxproc"}

    # Slurm runs the stubs: a job that asks for it is let in unchecked, and that is on record.
    job = lab.sbatch("#!/bin/sh\ntrue\n", ["-wn1", "--comment", "robust:skip"])
    lab.wait_job(job, "COMPLETED")
    history = ready.read("n1", lab.spec.node_dir / "gate" / "history.jsonl")
    assert f'"job":{job}' in history, history

    # And the gate closes a bad node: the job goes elsewhere instead of being held.
    job = lab.sbatch("#!/bin/sh\ntrue\n", ["-N1", "--exclude=n1", "-ptrain,standby"])
    record = lab.wait_job(job, "COMPLETED")
    assert record["NodeList"] == "s1" and record["Restarts"] == "1"
    node = lab.node_records()["n2"]
    assert "DRAIN" in node["State"] and node["Reason"].startswith("robust:node:mount")

    refused = ready.admin("uninstall", "--yes")
    assert refused.returncode == 1 and f"Prolog={ready.etc}/prolog" in refused.stderr
