"""Rare things around a job: strangers, latecomers, programs that are not there, quiet progress."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import LabFactory
from holds import IN_PLACE, heard_of, held_back, let_go, roles, shims, tasks, wait_held
from jobs import Training, prepared
from rival import RIVAL, add_rival, run_as
from waiting import until

from lab import Lab
from srun_wrapper.recover.settling import SETTLE_MAX

# -- two users, one state directory -----------------------------------------------------------


@dataclass
class Mine(Training):
    """A training of the user ``uid`` with its records in a directory of all users."""

    uid: int = 0

    @property
    def state(self) -> Path:
        return self.lab.shared / "all" / "state"

    def run(self, *argv: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node as its user."""
        return run_as(self.lab, self.uid, self.dir, argv, text)

    def send(self, toy: str, sbatch: str) -> None:
        exports = [f"export {name}={value}" for name, value in self.exports().items()]
        script = ["#!/bin/bash", "#SBATCH --no-kill", *exports, self.line([], toy.split()), ""]
        argv = ["sbatch", "--parsable", "-o", str(self.dir / "out"), *sbatch.split()]
        done = self.run(*argv, text="\n".join(script))
        assert done.returncode == 0, done
        self.job = int(done.stdout)


def two_users(lab: Lab) -> tuple[Mine, Mine]:
    """The lab's own user and another one, who share a directory as all share /tmp."""
    add_rival(lab)
    (lab.shared / "all").mkdir()
    (lab.shared / "all").chmod(0o1777)
    found = []
    for uid in (lab.uid, RIVAL):
        training = prepared(lab, 2)
        os.chown(training.dir, uid, uid)
        found.append(Mine(lab, training.dir, 2, 40, uid=uid))
    return found[0], found[1]


@pytest.mark.parametrize("site", [True, False], ids=["made by root", "made by the first job"])
def test_two_users_share_a_state_directory(new_lab: LabFactory, site: bool) -> None:
    lab = new_lab(nodes=4, standby=0)
    both = two_users(lab)
    if site:
        (both[0].state / "jobs").mkdir(parents=True)
        (both[0].state / "jobs").chmod(0o1777)
    for training in both:
        training.send("--fault kill --at 8", "-N2")
    for training in both:  # as long as one runs, the nodes are not empty
        training.wait_end()
        training.check_gone()
    for training in both:
        training.check_done()
        training.only_incident(symptom="crash", action="restart")
        assert training.job_dir().stat().st_uid == training.uid
    assert [t.rosters()[-1]["user"] for t in both] == [lab.user, "rival"]
    for attacker, victim in (both, both[::-1]):
        there = victim.job_dir()
        before = sorted(there.rglob("*")), victim.records("events.jsonl")
        assert attacker.run("cat", f"{there}/incidents.jsonl").stdout  # all may read it
        for harm in (
            f"echo x >> {there}/incidents.jsonl",
            f"echo x > {there}/new",
            f"echo x > {there}/accusations/n1.x.json",
            f"rm -f {there}/events.jsonl",
            f"rm -rf {there}",
            *([f"mv {there} {there}.old"] if site else []),  # else one of them owns the parent
        ):
            assert attacker.run("sh", "-c", harm).returncode, harm
        assert before == (sorted(there.rglob("*")), victim.records("events.jsonl"))


TRAPS = {
    "directory": "mkdir -m 777 {0}",
    "link": "mkdir -m 777 $PWD/bait && ln -s $PWD/bait {0}",
    "all names": "mkdir -m 777 {0} && for n in 1 2 3 4 5 6 7; do mkdir -m 777 {0}.{1}.$n; done",
}


@pytest.mark.parametrize("trap", TRAPS)
def test_records_are_not_written_where_a_stranger_waits(new_lab: LabFactory, trap: str) -> None:
    lab = new_lab(nodes=2, standby=0)
    victim, attacker = two_users(lab)
    attacker.run("mkdir", "-p", "-m", "1777", str(victim.state / "jobs"))
    victim.send("", "-N2 --hold")
    assert attacker.run("sh", "-c", TRAPS[trap].format(victim.job_dir(), lab.uid)).returncode == 0
    victim.run("scontrol", "release", str(victim.job))
    assert victim.wait_end() == 0
    victim.check_done()
    assert not list(victim.job_dir().iterdir())
    warning = "the job runs without records: robust-status does not show it"
    assert victim.out().count(warning) == (trap == "all names")
    if trap == "all names":
        assert not list((victim.state / "jobs").glob("*/*"))
        return
    own = victim.state / "jobs" / f"{victim.job}.{lab.uid}.1"
    assert own.stat().st_uid == lab.uid and list(own.glob("roster.*.json"))


# -- a standby node that comes too late ----------------------------------------------------------

BAD_NODE = "--fault ecc --at 8 --save 1"


def standby_jobs(lab: Lab) -> list[str]:
    listing = ["squeue", "--noheader", "--partition=standby", "--format=%j"]
    names = lab.exec("head", listing, check=True).stdout.split()
    return [name for name in names if name.startswith("robust-standby-")]


def went_on_without(training: Training) -> None:
    """The training ended where it was, and the standby node is free."""
    training.check_done()
    training.only_incident(action="restart", suspects=["n2"], why=IN_PLACE, outcome="recovered")
    assert training.rosters()[-1]["epoch"] == 2
    assert training.says("^rank 1 done on n2 in epoch 2")


def test_standby_node_that_arrives_too_late_is_sent_away(new_lab: LabFactory) -> None:
    lab = new_lab(nodes=2)
    training = prepared(lab, 2)
    robust = ["--robust-standby-wait=10", "--robust-hang-floor=90", held_back(training, "s1")]
    training.submit(training.line(robust, [*BAD_NODE.split(), "--hold=30"]), ["-N2"])
    wait_held(training)
    # srun cannot take the task back in time: it does not get to run.
    sruns = [p.pid for p in training.processes("--job-name=robust-standby-")]
    for pid in sruns:
        os.kill(pid, signal.SIGSTOP)
    try:
        training.until(lambda: len(training.events("epoch")) == 2, "restart without it")
        let_go(training)
        training.until(lambda: ("s1", "too late") in roles(training), "standby node that reports")
        training.until(lambda: not tasks(training, "s1"), "end of its robust-task")
        assert standby_jobs(lab)  # its srun still holds the node
    finally:
        for pid in sruns:
            os.kill(pid, signal.SIGCONT)
    until(lambda: lab.nodes()["s1"] == {"IDLE"}, "release of the standby node")
    assert training.processes("toy.py", rank=0) and training.processes("toy.py", rank=1)
    training.go_on()
    went_on_without(training)
    assert not training.says("done on s1")


@pytest.mark.parametrize("slow", ["prolog", "busy"])
def test_standby_node_that_does_not_come_in_time_is_called_off(
    new_lab: LabFactory, slow: str
) -> None:
    lab = new_lab(nodes=2)
    if slow == "busy":
        hog = lab.sbatch("#!/bin/sh\nexec sleep 600\n", ["-p", "standby", "--exclusive"])
        lab.wait_job(hog, "RUNNING")
    training = prepared(lab, 2, 100)
    robust = ["--robust-standby-wait=2", held_back(training, "s1")]
    training.submit(training.line(robust, BAD_NODE.split()), ["-N2"])
    training.until(lambda: training.events("standby_requested"), "request for a standby node")
    training.until(lambda: len(training.events("epoch")) == 2, "restart without it")
    until(lambda: not standby_jobs(lab), "end of the request")
    if slow == "busy":
        lab.exec("head", ["scancel", str(hog)], check=True)
    until(lambda: lab.nodes()["s1"] == {"IDLE"}, "free standby node")
    went_on_without(training)
    assert not standby_jobs(lab)


# -- a command that not all nodes have --------------------------------------------------------

LOCAL = "/tmp/program"  # every node of the lab has a /tmp of its own


def install(lab: Lab, *nodes: str) -> None:
    script = f"printf '#!/bin/sh\\nexec python \"$@\"\\n' > {LOCAL}; chmod 755 {LOCAL}"
    for node in nodes:
        lab.exec(node, ["sh", "-c", script], check=True)


def start_local(lab: Lab, spares: int, *robust: str, steps: int = 30) -> Training:
    """The toy training on two nodes, by a program that must be on each node."""
    training = prepared(lab, 2, steps)
    options = [f"--robust-spares={spares}", *robust]
    line = training.line(options, []).replace(" python ", f" {LOCAL} ", 1)
    training.submit(line, [f"-N{2 + spares}", "--ntasks-per-node=1"])
    return training


def test_command_missing_on_one_node(new_lab: LabFactory) -> None:
    lab = new_lab(standby=0)
    install(lab, "n1", "n3")
    training = start_local(lab, 1)
    training.check_done()
    record = training.only_incident(
        symptom="crash", cause="node", action="swap_spare", suspects=["n2"], swaps=[["n2", "n3"]]
    )
    assert record["evidence"][0] == "n2 cannot start a rank"
    assert training.says(f"cannot run '{LOCAL}'")
    assert list(training.accusations()) == ["n2"]
    training.until(lambda: training.nodes() == "n[1,3]", "release of n2", 10.0)


def test_command_missing_on_the_first_spare_too(new_lab: LabFactory) -> None:
    lab = new_lab()
    install(lab, "n1", "s1")
    training = start_local(lab, 1)
    training.check_done()
    # At the first start n3 may have been asked for the program already, or not.
    asked, unasked = [[["n2", "s1"]]], [[["n2", "n3"]], [["n3", "s1"]]]
    assert [i["swaps"] for i in training.incidents()] in (asked, unasked), training.story()
    assert "n2" in training.accusations()


@pytest.mark.parametrize("late", [False, True], ids=["at once", "one later"])
def test_command_missing_on_all_nodes(new_lab: LabFactory, late: bool) -> None:
    lab = new_lab()
    training = prepared(lab, 2)
    go_on = held_back(training, "n3") if late else "--label"
    line = training.line(["--robust-spares=1", go_on], []).replace(" python ", f" {LOCAL} ", 1)
    training.submit(line, ["-N3", "--ntasks-per-node=1"])
    if late:  # n2 is too busy to start its rank when the others try
        wait_held(training)
        heard_of(training, "n2")
        (agent,) = shims(training, "n2")
        os.kill(agent, signal.SIGSTOP)
        let_go(training)
        training.wait_says("cannot run")
        time.sleep(SETTLE_MAX / 16)  # robust-srun waits longer for those who are slower
        os.kill(agent, signal.SIGCONT)
    assert training.wait_end() == 2, training.story()
    record = training.only_incident(symptom="crash", cause="user", action="stop", swaps=[])
    assert record["why"] == "the command cannot be run"
    assert not training.accusations()
    until(lambda: standby_jobs(lab) == [], "no request for a standby node")
    training.check_gone()


# -- what counts as progress where nothing is reported ----------------------------------------


@pytest.mark.parametrize("steady", [True, False])
def test_an_epoch_that_ran_long_is_progress(new_lab: LabFactory, steady: bool) -> None:
    """An hour in real life; this robust-srun takes a second for one."""
    lab = new_lab(nodes=2, standby=0)
    training = prepared(lab, 2, 20)
    words = ["import srun_wrapper.recover.recovery as r", *(["r.STEADY = 1.0"] if steady else [])]
    (training.dir / "robust.py").write_text(
        "\n".join([*words, "from srun_wrapper.cli import main", "main()", ""])
    )
    toy = "--no-beat --fault kill --at 6,11,16 --once --epoch 0 --save 1 --step-time 0.25"
    line = training.line(["--robust-max-restarts=1"], toy.split())
    training.submit(line.replace("robust-srun", "python robust.py", 1), ["-N2"])
    if steady:
        training.check_done()
        assert [i["action"] for i in training.incidents()] == ["restart"] * 3
    else:
        assert training.wait_end() == 128 + signal.SIGKILL, training.story()
        assert [i["action"] for i in training.incidents()] == ["restart", "stop"]
        assert training.says("1 recoveries in a row brought no progress")
