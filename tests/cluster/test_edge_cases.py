"""Rare things that happen around a job: firewalls, strangers, latecomers, signals too early."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import LabFactory
from jobs import Training, check_incident, command_line, prepared, reference, start, until

from lab import Lab
from srun_wrapper import proc
from srun_wrapper.watch import MUTE

# -- a firewall between the nodes -------------------------------------------------------------

SLURMD_PORT = 6818
# Classic BPF on eth0: new TCP connections to this node only for slurmd. (code, true, false, k)
_ONLY_SLURMD = (
    *((0x28, 0, 0, 12), (0x15, 0, 7, 0x800)),  # no IPv4: let it pass
    *((0x30, 0, 0, 23), (0x15, 0, 5, 6)),  # no TCP
    *((0x30, 0, 0, 47), (0x54, 0, 0, 0x12), (0x15, 0, 2, 0x02)),  # no SYN, or a SYN-ACK
    *((0x28, 0, 0, 36), (0x15, 0, 1, SLURMD_PORT)),
    *((0x06, 0, 0, 0), (0x06, 0, 0, 2)),  # TC_ACT_OK, TC_ACT_SHOT
)


def firewall(lab: Lab, node: str, way: str = "ingress") -> None:
    """From now on nobody can open a connection to the node, slurmd's port excepted.

    ``way`` "egress": nor can the node to others.
    """
    code = ",".join(" ".join(map(str, line)) for line in _ONLY_SLURMD)
    rule = [way, "bpf", "direct-action", "bytecode", f"{len(_ONLY_SLURMD)},{code}"]
    for words in (
        ["qdisc", "add", "dev", "eth0", "clsact"],
        ["filter", "add", "dev", "eth0", *rule],
    ):
        done = lab.exec(node, ["tc", *words], user=False)
        if done.returncode:
            pytest.skip(f"no packet filter here: tc {words[0]}: {done.stderr.strip()}")


def behind_firewall(training: Training, node: str) -> None:
    """Wait until robust-srun has noticed that its second way to the node is closed."""

    def noticed() -> bool:
        news = [event["text"] for event in training.events("news")]
        return any(
            text.startswith(f"{node}: port ") and "though it is well" in text for text in news
        )

    training.until(noticed, f"notice that {node} is behind a firewall")


def roles(training: Training) -> set[tuple[str, str]]:
    """(node, role) of the newest roster."""
    return {(node["name"], node["role"]) for node in training.rosters()[-1]["nodes"]}


def shims(training: Training, node: str) -> list[int]:
    """Its robust-tasks on a node."""
    return [
        process.pid
        for process in training.processes("srun_wrapper.task")
        if process.environ.get("SLURMD_NODENAME") == node
        and not command_line(process.pid).startswith("srun ")
    ]


def ready(training: Training, node: str) -> bool:
    """Whether its robust-tasks handle signals."""
    found = shims(training, node)
    return bool(found) and all(proc.expects(pid, signal.SIGUSR2) for pid in found)


def ranks(training: Training) -> list[int]:
    return [p.pid for p in training.processes() if "RANK" in p.environ]


def connection_of(training: Training, node: str) -> tuple[str, str, int]:
    """Local and peer address of the agent's connection to robust-srun, and bytes received."""
    for agent in shims(training, node):
        status = Path(f"/proc/{agent}/status").read_text()
        inside = re.search(r"^NSpid:.*\t(\d+)$", status, re.MULTILINE)
        argv = ["ss", "-HtnpiO", "state", "established"]
        for line in training.lab.exec(node, argv, user=False, check=True).stdout.splitlines():
            if inside is not None and f"pid={inside[1]}," in line:
                local, peer = line.split()[2:4]
                taken = re.search(r"bytes_received:(\d+)", line)
                return local, peer, int(taken[1]) if taken else 0
    return "", "", 0


def heard_of(training: Training, node: str) -> None:
    """Wait until robust-srun knows the node: it answers again and again."""
    seen: set[int] = set()

    def answered() -> bool:
        seen.add(connection_of(training, node)[2])
        return len(seen) > 4  # none, its preface, and acknowledgements

    training.until(answered, f"conversation with {node}")


def kill_shims(training: Training) -> None:
    for pid in shims(training, "n2"):
        os.kill(pid, signal.SIGKILL)


FATAL: dict[str, Callable[[Training], object]] = {
    "node": lambda training: training.lab.crash("n2"),
    "robust-task": kill_shims,
}


@pytest.mark.parametrize("what", FATAL)
def test_death_behind_a_firewall_is_seen(new_lab: LabFactory, what: str) -> None:
    lab = new_lab(standby=0)
    firewall(lab, "n2")
    training = start(lab, 2, spares=1)
    behind_firewall(training, "n2")
    training.wait_step(8)
    FATAL[what](training)
    assert training.wait_end() == 0, training.story()
    assert training.final() == {"step": training.steps, "loss": reference(training.steps, 2)}
    training.check_gone()
    record = training.incidents()[-1]  # rank 0 may be the first to notice
    check_incident(record, symptom="node_lost", suspects=["n2"], swaps=[["n2", "n3"]])
    assert MUTE <= record["phases"]["detect"] < 2 * MUTE
    assert "answers" not in record["evidence"][0]  # nobody has asked it


def stop_for_a_while(training: Training) -> None:
    (agent,) = shims(training, "n2")
    os.kill(agent, signal.SIGSTOP)
    time.sleep(4.0)
    os.kill(agent, signal.SIGCONT)


def cut_for_a_while(training: Training) -> None:
    training.lab.partition("n2")
    time.sleep(2.0)
    training.lab.ask("heal", node="n2")


def reset(training: Training) -> None:
    """Break the agent's connection."""
    old, peer, _ = connection_of(training, "n2")
    argv = ["ss", "-K", "-tn", "src", old, "dst", peer]
    if old not in training.lab.exec("n2", argv, user=False).stdout:
        pytest.skip("this kernel breaks no connections (CONFIG_INET_DIAG_DESTROY)")
    until(lambda: connection_of(training, "n2")[0] not in ("", old), "new connection")


STUMBLES = {"stopped": stop_for_a_while, "cut": cut_for_a_while, "reset": reset}


@pytest.mark.parametrize("how", STUMBLES)
def test_stumble_behind_a_firewall_costs_nothing(new_lab: LabFactory, how: str) -> None:
    lab = new_lab(standby=0)
    firewall(lab, "n2")
    training = start(lab, 2, spares=1, steps=200)
    behind_firewall(training, "n2")
    training.wait_step(8)
    STUMBLES[how](training)
    training.check_done()
    assert not training.incidents() and not training.accusations()
    assert training.rosters()[-1]["epoch"] == 1


@pytest.mark.parametrize("option", ["", "-s TERM"])
def test_cancelled_step_stays_cancelled_behind_a_firewall(new_lab: LabFactory, option: str) -> None:
    lab = new_lab()
    firewall(lab, "n3")
    training = start(lab, 3, steps=3000)
    behind_firewall(training, "n3")
    lab.crash("n2")
    training.until(training.incidents, "recovery")
    lab.exec("head", ["scancel", *option.split(), f"{training.job}.0"], check=True)
    assert training.wait_end(30) == 128 + (signal.SIGTERM if option else signal.SIGKILL)
    assert len(training.incidents()) == 1, training.story()
    training.check_gone()
    until(lambda: lab.nodes()["s1"] == {"IDLE"}, "end of the companion")


# -- two users, one state directory -----------------------------------------------------------

RIVAL = 20002


@dataclass
class Mine(Training):
    """A training of the user ``uid`` with its records in a directory of all users."""

    uid: int = 0

    @property
    def state(self) -> Path:
        return self.lab.shared / "all" / "state"

    def run(self, *argv: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node as its user."""
        become = ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups"]
        name = self.lab.user if self.uid == self.lab.uid else "rival"
        env = {"USER": name, "LOGNAME": name, "HOME": str(self.dir)}
        argv = (*become, *argv)
        return self.lab.exec("head", argv, user=False, env=env, input=text, cwd=self.dir)

    def send(self, toy: str, sbatch: str) -> None:
        exports = [f"export {name}={value}" for name, value in self.exports().items()]
        script = ["#!/bin/bash", "#SBATCH --no-kill", *exports, self.line([], toy.split()), ""]
        argv = ["sbatch", "--parsable", "-o", str(self.dir / "out"), *sbatch.split()]
        done = self.run(*argv, text="\n".join(script))
        assert done.returncode == 0, done
        self.job = int(done.stdout)


def two_users(lab: Lab) -> tuple[Mine, Mine]:
    """The lab's own user and another one, who share a directory as all share /tmp."""
    for name in ("passwd", "group"):  # in place: the nodes have these very files mounted
        with (lab.spec.dir / "etc" / name).open("a") as file:
            file.write(
                f"rival:x:{RIVAL}:" + (f"{RIVAL}::/:/bin/sh\n" if name == "passwd" else "\n")
            )
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
}


@pytest.mark.parametrize("trap", TRAPS)
def test_records_are_not_written_where_a_stranger_waits(new_lab: LabFactory, trap: str) -> None:
    lab = new_lab(nodes=2, standby=0)
    victim, attacker = two_users(lab)
    attacker.run("mkdir", "-p", "-m", "1777", str(victim.state / "jobs"))
    victim.send("", "-N2 --hold")
    assert attacker.run("sh", "-c", TRAPS[trap].format(victim.job_dir())).returncode == 0
    victim.run("scontrol", "release", str(victim.job))
    assert victim.wait_end() == 2
    assert (
        f"cannot write {victim.job_dir()}: it is a link or belongs to another user" in victim.out()
    )
    assert not list(victim.job_dir().iterdir())


# -- a companion that comes too late ----------------------------------------------------------

IN_PLACE = "no node left to replace the suspect: restart in place"
BAD_NODE = "--fault ecc --at 8 --save 1"


def held_back(training: Training, node: str) -> str:
    """srun option with which no task starts on the node before ``let_go``."""
    script = training.dir / "prolog"
    wait = f"touch {training.dir}/held; until [ -e {training.dir}/go ]; do sleep 0.05; done"
    script.write_text(f"#!/bin/sh\n[ $SLURMD_NODENAME != {node} ] || {{ {wait}; }}\n")
    script.chmod(0o755)
    return f"--task-prolog={script}"


def wait_held(training: Training) -> None:
    training.until((training.dir / "held").exists, "task that is held back")


def let_go(training: Training) -> None:
    (training.dir / "go").touch()


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


def test_companion_that_arrives_too_late_is_sent_away(new_lab: LabFactory) -> None:
    lab = new_lab(nodes=2)
    training = prepared(lab, 2, 200)
    robust = ["--robust-standby-wait=3", held_back(training, "s1")]
    training.submit(training.line(robust, BAD_NODE.split()), ["-N2"])
    wait_held(training)
    # srun cannot take the task back in time: it does not get to run.
    sruns = [p.pid for p in training.processes("--job-name=robust-standby-")]
    for pid in sruns:
        os.kill(pid, signal.SIGSTOP)
    try:
        training.until(lambda: len(training.events("epoch")) == 2, "restart without it")
        let_go(training)
        training.until(lambda: ("s1", "lost") in roles(training), "companion that reports")
        training.until(lambda: not shims(training, "s1"), "end of its robust-task")
        assert standby_jobs(lab)  # its srun still holds the node
    finally:
        for pid in sruns:
            os.kill(pid, signal.SIGCONT)
    until(lambda: lab.nodes()["s1"] == {"IDLE"}, "release of the standby node")
    assert training.processes("toy.py", rank=0) and training.processes("toy.py", rank=1)
    went_on_without(training)
    assert not training.says("done on s1")


@pytest.mark.parametrize("slow", ["prolog", "busy"])
def test_companion_that_does_not_come_in_time_is_called_off(new_lab: LabFactory, slow: str) -> None:
    lab = new_lab(nodes=2)
    if slow == "busy":
        hog = lab.sbatch("#!/bin/sh\nexec sleep 600\n", ["-p", "standby", "--exclusive"])
        lab.wait_job(hog, "RUNNING")
    training = prepared(lab, 2, 100)
    robust = ["--robust-standby-wait=2", held_back(training, "s1")]
    training.submit(training.line(robust, BAD_NODE.split()), ["-N2"])
    training.until(lambda: standby_jobs(lab), "request for a standby node")
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
    assert record["evidence"][0] == "n2 cannot run the command"
    assert training.says(f"cannot run '{LOCAL}'")
    assert list(training.accusations()) == ["n2"]
    training.until(lambda: training.nodes() == "n[1,3]", "release of n2", 10.0)


def test_command_missing_on_the_first_spare_too(new_lab: LabFactory) -> None:
    lab = new_lab()
    install(lab, "n1", "s1")
    training = start_local(lab, 1)
    training.check_done()
    assert [i["swaps"] for i in training.incidents()] == [[["n2", "n3"]], [["n3", "s1"]]]
    assert set(training.accusations()) == {"n2", "n3"}


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
        time.sleep(1.0)
        os.kill(agent, signal.SIGCONT)
    assert training.wait_end() == 2, training.story()
    record = training.only_incident(symptom="crash", cause="user", action="stop", swaps=[])
    assert record["why"] == "the command cannot be run"
    assert not training.accusations()
    assert standby_jobs(lab) == []
    training.check_gone()


# -- signals when there are no ranks ----------------------------------------------------------

WITNESS = """
import os, signal, sys, time
rank, epoch = os.environ["SLURM_PROCID"], os.environ["ROBUST_EPOCH"]
def got(number, frame):
    with open("got." + rank, "a") as file:
        print(epoch, signal.Signals(number).name, file=file)
time.sleep(0.5)  # as imports take their time
signal.signal(signal.SIGUSR2, got)
if sys.argv[1:] == [rank] and epoch == "1":
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
while not os.path.exists("end"):
    time.sleep(0.02)
"""


def start_witness(lab: Lab, held: str, *argv: str, robust: str = "") -> Training:
    """Two ranks that write down the signals they get, and a node where nothing can start."""
    training = prepared(lab, 2)
    (training.dir / "witness.py").write_text(WITNESS)
    words = ["robust-srun", held_back(training, held), robust, "python", "witness.py", *argv]
    training.submit(" ".join(words), ["-N2", "--ntasks-per-node=1"])
    wait_held(training)
    return training


def tell(training: Training, how: str, name: str) -> None:
    """Send a signal to robust-srun, or by Slurm to the step."""
    if how == "robust-srun":
        (process,) = training.processes("/robust-srun ")
        os.kill(process.pid, getattr(signal, f"SIG{name}"))
    else:
        training.lab.exec("head", ["scancel", "-s", name, f"{training.job}.0"], check=True)


def each_got(training: Training, *expected: str) -> bool:
    paths = sorted(training.dir.glob("got.*"))
    return [path.read_text().splitlines() for path in paths] == [list(expected)] * 2


def witnessed(training: Training, *expected: str) -> None:
    """Both ranks got these signals, once each, and the job ended well."""
    training.until(lambda: each_got(training, *expected), "the signal", 20.0)
    time.sleep(0.5)  # for a second copy, if there is one
    (training.dir / "end").touch()
    assert training.wait_end() == 0, training.story()
    assert each_got(training, *expected), training.story()
    training.check_gone()
    assert not training.in_memory()


@pytest.mark.parametrize("how", ["robust-srun", "the step"])
def test_signal_before_the_first_epoch_is_kept(new_lab: LabFactory, how: str) -> None:
    lab = new_lab(nodes=2, standby=0)
    training = start_witness(lab, "n2")
    heard_of(training, "n1")
    if how == "the step":  # which kills what is not started yet: so let n2 only not be heard of
        firewall(lab, "n2", "egress")
        let_go(training)
        training.until(lambda: ready(training, "n2"), "robust-task on n2")
    tell(training, how, "USR2")
    assert not training.events("epoch")
    let_go(training)
    lab.exec("n2", ["tc", "qdisc", "del", "dev", "eth0", "clsact"], user=False)
    witnessed(training, "1 SIGUSR2")
    assert not training.incidents()


@pytest.mark.parametrize("how", ["robust-srun", "the step"])
def test_signal_during_a_recovery_is_kept(new_lab: LabFactory, how: str) -> None:
    lab = new_lab(nodes=2)
    training = start_witness(lab, "s1", "1", robust="--robust-standby-wait=3")
    training.until(lambda: not ranks(training), "end of the first epoch's ranks")
    tell(training, how, "USR2")
    witnessed(training, "2 SIGUSR2")
    training.only_incident(action="restart", why=IN_PLACE, outcome="recovered")


@pytest.mark.parametrize(
    ("how", "name", "code"),
    [("robust-srun", "TERM", 143), ("the step", "TERM", 143), ("the step", "KILL", 137)],
)
def test_job_that_is_ended_before_the_first_epoch(
    new_lab: LabFactory, how: str, name: str, code: int
) -> None:
    lab = new_lab(nodes=2, standby=0)
    training = start_witness(lab, "n2")
    heard_of(training, "n1")
    tell(training, how, name)
    assert training.wait_end(15.0) == code, training.story()
    training.check_gone()
    assert not training.events("epoch") and not list(training.dir.glob("got.*"))
    assert not training.in_memory() or name == "KILL"


# -- what counts as progress where nothing is reported ----------------------------------------


@pytest.mark.parametrize("steady", [True, False])
def test_an_epoch_that_ran_long_is_progress(new_lab: LabFactory, steady: bool) -> None:
    """An hour in real life; this robust-srun takes a second for one."""
    lab = new_lab(nodes=2, standby=0)
    training = prepared(lab, 2, 20)
    words = ["import srun_wrapper.recovery as r", *(["r.STEADY = 1.0"] if steady else [])]
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
