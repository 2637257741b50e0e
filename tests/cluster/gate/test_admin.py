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
from admin_prefix import make_prefix
from waiting import until

from health.settings_file import END
from lab import Cluster
from robust_slurm import commands

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
        text = f'[gate]\nspool = "{lab.spec.node_dir}/gate"\n{END}\n'
        self.write("head", "robust.toml", text)

    @property
    def etc(self) -> Path:
        return etc(self.lab)

    def admin(self, *words: str, node: str = "head") -> subprocess.CompletedProcess[str]:
        python = str(self.prefix / "bin" / "python3")
        argv = [python, "-I", *commands.words("health.admin.cli"), *words, "--etc", str(self.etc)]
        return self.lab.exec(node, argv, user=False, timeout=120)

    def install(self, *words: str) -> subprocess.CompletedProcess[str]:
        done = self.admin("install", "--tmpfiles", "", "--yes", *words)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done

    def doctor(self) -> dict[str, dict[str, Any]]:
        """Return what is not in order, by subject."""
        done = self.admin("doctor", "--json")
        assert done.returncode in (0, 1), done.stderr
        remarks = json.loads(done.stdout)["remarks"]
        # Advice first: what must be fixed stands in place of advice on the same setting.
        remarks = sorted(remarks, key=lambda remark: str(remark["level"]))
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


def flags(lab: Cluster) -> str:
    """Return the PrologFlags that `install` wants: the last one exists from 23.02."""
    more = "" if lab.spec.slurm == "22.05" else ",ForceRequeueOnFail"
    return f"Alloc,Contain,DeferBatch{more}"


def asked_for(lab: Cluster) -> dict[str, str]:
    """Return the settings `install` wants in slurm.conf, for a lab with another prolog."""
    return {
        "Epilog": f"{etc(lab)}/epilog",
        "HealthCheckProgram": f"{etc(lab)}/healthcheck",
        "HealthCheckInterval": "300",
        "PrologFlags": flags(lab),
        "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,sched_min_interval=0,"
        "bf_interval=1,nohold_on_prolog_fail",
    }


# The doctor's advice, so that none of it is left, and GPUs.
ADVICE = {
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
        "[breaker]\nhold_down = 0\n"
        f'[nodes."n2".health.mounts]\nrequired = ["/not-there"]\n{END}\n'
    )


@pytest.fixture(scope="module")
def plain() -> Iterator[Site]:
    """A lab with slurm.conf as it is."""
    with Cluster(nodes=2, standby=1) as lab:
        yield Site(lab)


def test_doctor_before_anything(plain: Site) -> None:
    found = plain.doctor()
    lines = {remark["line"] for remark in found.values() if remark["level"] == "fix"}
    wanted = {"Prolog": f"{plain.etc}/prolog", **asked_for(plain.lab)}
    assert lines == {f"{key}={value}" for key, value in wanted.items()}
    assert found[str(plain.etc)]["level"] == "advice", "head is no node: it needs no files"
    text = plain.admin("doctor").stdout
    assert f"slurm.conf:  Prolog={plain.etc}/prolog\n" in text
    assert text.startswith(f"cluster {plain.lab.name}, Slurm 2")
    done = plain.admin("doctor", "--json", node="n1")
    subjects = {r["subject"] for r in json.loads(done.stdout)["remarks"] if r["level"] == "fix"}
    assert str(plain.etc) in subjects, "a node does"


def test_install_here_and_uninstall(plain: Site) -> None:
    looked = plain.admin("install", "--tmpfiles", "", "--dry-run")
    assert looked.returncode == 0 and not plain.read("head", plain.etc / "prolog")
    done = plain.install()
    assert f"\n  slurm.conf:  Prolog={plain.etc}/prolog\n" in done.stdout
    assert "nothing to do" in plain.install().stdout
    lines = plain.read("head", plain.etc / "slurm.conf.lines")
    assert f"\nPrologFlags={flags(plain.lab)}\n" in lines and "bf_interval=1,nohold" in lines
    gone = plain.admin("uninstall", "--yes")
    assert gone.returncode == 0, gone.stderr
    left = plain.lab.exec("head", ["ls", str(plain.etc)], user=False).stdout.split()
    assert left == ["robust.toml"], "what its admin wrote stays"


def test_doctor_without_slurmctld(plain: Site) -> None:
    conf = (plain.lab.spec.dir / "etc" / "slurm.conf").read_text()
    (plain.top / "dead.conf").write_text(conf.replace("SlurmctldPort=6817", "SlurmctldPort=6899"))
    python = str(plain.prefix / "bin" / "python3")
    argv = [python, "-I", *commands.words("health.admin.cli"), "doctor"]
    env = {"SLURM_CONF": str(plain.top / "dead.conf")}
    done = plain.lab.exec("head", argv, user=False, env=env, timeout=60)
    assert done.returncode == 2 and "no slurmctld answers" in done.stdout


# ---- the whole way


def answers(lab: Cluster, node: str) -> bool:
    code = "import socket, sys; socket.create_connection((sys.argv[1], 22), timeout=1)"
    return lab.exec("head", ["python", "-c", code, node]).returncode == 0


@pytest.fixture(scope="module")
def ready() -> Iterator[Site]:
    """A lab whose site has a directory of prologs, and an sshd on every node."""
    if SSHD is None:
        pytest.skip("no sshd: apt-get install openssh-server")
    lab = Cluster(name=NAME, nodes=2, standby=1, gpus=2)
    conf = {**ADVICE, "Prolog": f"{lab.spec.dir}/prolog.d/*"}
    with Cluster(name=NAME, nodes=2, standby=1, gpus=2, slurm_conf=conf) as lab:
        site = Site(lab)
        prologs = lab.spec.dir / "prolog.d"
        prologs.mkdir(mode=0o755)
        (prologs / "site").write_text(f"#!/bin/sh\necho ran > {lab.spec.node_dir}/site-prolog\n")
        (prologs / "site").chmod(0o755)
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
    ssh = ["--nodes", "n[1-2],s1", "--ssh"]
    ssh += ["--known-hosts", str(ready.top / "known"), "--identity", str(ready.top / "user")]
    done = ready.install(*ssh)
    assert "\nn[1-2],s1  done  " in done.stdout
    assert f"\nmade {lab.spec.dir}/state/nodes\n" in done.stdout
    for node in NODES:
        assert "/not-there" in ready.read(node, ready.etc / "robust.toml")
    assert ready.install(*ssh).stdout == "n[1-2],s1  same\nnothing to do\n"

    told = ready.install().stdout
    if lab.spec.slurm == "22.05":  # it takes one line only
        link = f"ln -s {ready.etc}/prolog {lab.spec.dir}/prolog.d/robust"
        assert f"\n  shell:  {link}\n" in told
        lab.exec("head", link.split(), user=False, check=True)
    else:
        assert f"\n  slurm.conf:  Prolog={ready.etc}/prolog\n" in told
    lines = ready.read("head", ready.etc / "slurm.conf.lines").splitlines()
    pasted = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert asked_for(lab).items() <= pasted.items()
    reconfigure(lab, pasted)
    assert "still needs" not in ready.install().stdout

    found = ready.doctor()
    assert {subject for subject, r in found.items() if r["level"] == "fix"} == set(), found
    # Advice from 23.02 and 25.11, and of releases in which slurmctld can crash.
    later = ("MaxBatchRequeue ", "SchedulerParameters ", "SlurmctldParameters ", "Slurm ")
    left = {what for what in found if lab.spec.slurm == "22.05" or not what.startswith(later)}
    assert left <= {f"state_dir {lab.spec.dir}/state", "ProctrackType = proctrack/linuxproc"}

    # Slurm runs both prologs: a job that asks for it is let in unchecked, and that is on record.
    job = lab.sbatch("#!/bin/sh\ntrue\n", ["-wn1", "--comment", "robust:skip"])
    lab.wait_job(job, "COMPLETED")
    history = ready.read("n1", spool(lab) / "history.jsonl")
    assert f'"job":{job}' in history, history
    assert ready.read("n1", lab.spec.node_dir / "site-prolog") == "ran\n"
    note = spool(lab) / "jobs" / f"{job}.json"
    until(lambda: ready.read("n1", note), "the epilog's note on the job")

    # The gate closes a bad node: the job goes elsewhere instead of being held.
    job = lab.sbatch("#!/bin/sh\ntrue\n", ["-N1", "--exclude=n1", "-ptrain,standby"])
    record = lab.wait_job(job, "COMPLETED")
    assert record["NodeList"] == "s1" and record["Restarts"] == "1"
    node = lab.node_records()["n2"]
    assert "DRAIN" in node["State"] and node["Reason"].startswith("robust:node:mount")

    # The sweep undrains it when what was wrong is right again.
    ready.write("n2", "robust.toml", toml(lab).partition("[nodes")[0] + END)
    reconfigure(lab, {"HealthCheckInterval": "2"})
    until(lambda: "DRAIN" not in lab.nodes()["n2"], "n2 undrained by the sweep")

    refused = ready.admin("uninstall", "--yes")
    assert refused.returncode == 1 and f"Epilog={ready.etc}/epilog" in refused.stderr


def spool(lab: Cluster) -> Path:
    return lab.spec.node_dir / "gate"


def reconfigure(lab: Cluster, lines: dict[str, str]) -> None:
    """Put settings into slurm.conf, as its admin does; a site's own prolog stays."""
    conf = lab.spec.dir / "etc" / "slurm.conf"
    gone = lines.keys() - {"Prolog"}
    kept = [line for line in conf.read_text().splitlines() if line.split("=")[0] not in gone]
    text = "".join(f"{line}\n" for line in [*(f"{k}={v}" for k, v in lines.items()), *kept])
    with conf.open("w") as file:  # in place: the nodes see this very file
        file.write(text)
    lab.exec("head", ["scontrol", "reconfigure"], user=False, check=True)
