"""A lab whose slurmd calls the gate, installed as robust-admin installs it on a site."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from admin_prefix import make_prefix
from waiting import until

from health.history import events
from health.node.system import Event
from health.settings_file import END
from lab import Cluster
from robust_slurm import commands
from robust_slurm.slurm.model import node_from

SCHEDULER = "batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1"
FREE = (frozenset({"IDLE"}), "")  # a node in service, without a reason
HOLD = "hold_down = 0\nhold_times = 0\n"  # undrain at the first sweep that passes, each time
WIDE = "max_nodes = 100\nmax_percent = 100.0\nmax_per_job = 100\n"  # of [breaker]
HERE = "#!/bin/sh\necho $SLURM_JOB_ID $(hostname)\n"


class Hold(NamedTuple):
    """The files by which a call of the gate to Slurm says that it is there, and is let go."""

    asked: Path
    go: Path

    def wait(self) -> None:
        until(self.asked.exists, "the gate's call to Slurm", 20)

    def let_go(self) -> float:
        """Let the call go on; return when the gate had asked (wall clock)."""
        self.go.touch()
        return self.asked.stat().st_mtime


class GateLab:
    """``settings`` writes the site's robust.toml, which all nodes share as they do the stubs."""

    def __init__(self, lab: Cluster):
        self.lab = lab
        top = lab.spec.dir / "site"
        self.etc, self.state = top / "etc", top / "state"
        # Files that a guest writes into the host's file system are not root's.
        self.state_dir = lab.spec.disk_dir / "state" if lab.spec.kernel else self.state
        top.mkdir(mode=0o755)
        self.etc.mkdir(mode=0o755)
        self.state.mkdir(mode=0o755)
        self.settings()
        self.prefix = make_prefix(top / "prefix")
        self.install()
        if lab.spec.kernel:
            for node in lab.spec.compute_names:
                lab.exec(node, ["mkdir", "-p", str(self.state_dir)], user=False, check=True)
        (self.state / "jobs").mkdir(exist_ok=True)
        (self.state / "jobs").chmod(0o1777)

    # -- the site

    def install(self) -> None:
        """Write the stubs, as settings want them."""
        python = self.prefix / "bin" / "python3"
        argv = [
            str(python),
            "-I",
            *commands.words("health.admin.cli"),
            "install",
            "--etc",
            str(self.etc),
        ]
        self.lab.exec("head", [*argv, "--tmpfiles", "", "--yes"], user=False, check=True)

    def settings(
        self,
        gate: str = "",
        breaker: str = WIDE,
        more: str = "",
        *,
        spool: str = "",
        state: bool = True,
        state_dir: str = "",
        hold: str = HOLD,
    ) -> None:
        """Write robust.toml: lines of [gate] and [breaker], and other tables."""
        text = f'state_dir = "{state_dir or self.state_dir}"\n' if state else ""
        text += f'[gate]\nspool = "{spool or self.spool}"\n{gate}\n'
        text += f"[breaker]\n{hold}{breaker}\n{more}\n{END}\n"
        fresh = self.etc / "robust.toml.new"
        fresh.write_text(text)
        fresh.chmod(0o644)
        fresh.rename(self.etc / "robust.toml")

    @property
    def spool(self) -> Path:
        """The gate's spool as a node sees it: on its own disk, which outlives a crash."""
        return self.lab.disk / "gate"

    def node_spool(self, node: str) -> Path:
        """The same as this machine sees it."""
        return self.lab.spec.disk_of(node) / "gate"

    def sweep(self, node: str, *words: str, **env: str) -> str:
        """One run of the HealthCheckProgram by hand, as slurmd would call it; what it says."""
        stub = str(self.etc / "healthcheck")
        given = [f"{key}={value}" for key, value in env.items()]
        argv = ["env", "-i", f"SLURMD_NODENAME={node}", *given, stub, *words]
        done = self.lab.exec(node, argv, user=False, cwd="/", timeout=90)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def repaired(self, node: str, *words: str) -> None:
        """A person's word, given on the node."""
        argv = ["robust-health", "repaired", *words, "--config", str(self.etc / "robust.toml")]
        self.lab.exec(node, argv, user=False, check=True)

    def count_slurm_calls(self) -> Callable[[], int]:
        """Have the gate use a scontrol that counts; a function that says how often it did."""
        log = self.etc.parent / "calls"
        log.touch()
        self._wrap_scontrol(f'echo "$@" >> {log}')
        return lambda: len(log.read_text().splitlines())

    def hold_slurm_calls(self) -> Hold:
        """Have the gate use a scontrol that waits to be let go."""
        hold = Hold(self.etc.parent / "asked", self.etc.parent / "go")
        self._wrap_scontrol(f"touch {hold.asked}; while [ ! -e {hold.go} ]; do sleep 0.02; done")
        return hold

    def _wrap_scontrol(self, line: str) -> None:
        place = self.etc.parent / "bin"
        place.mkdir(exist_ok=True)
        wrapper = place / "scontrol"
        wrapper.write_text(f'#!/bin/sh\n{line}\nexec {shutil.which("scontrol")} "$@"\n')
        wrapper.chmod(0o755)
        self.settings(f'slurm_bin = "{place}"')

    def controller(self, name: str) -> None:
        """A signal to the lab's slurmctld."""
        kill = f"kill -{name} $(pidof slurmctld)"
        self.lab.exec("head", ["sh", "-c", kill], user=False, check=True)

    def admin(self, *words: str) -> None:
        """A command of Slurm's, as its administrator."""
        self.lab.exec("head", ["scontrol", *words], user=False, check=True)

    def put_last(self, *nodes: str) -> None:
        """Slurm is to take these nodes only where no other is to be had."""
        self.admin("update", f"nodename={','.join(nodes)}", "weight=100")

    def drain(self, node: str, reason: str) -> None:
        self.admin("update", f"nodename={node}", "state=drain", f"reason={reason}")

    def resume(self, *nodes: str) -> None:
        self.admin("update", f"nodename={','.join(nodes)}", "state=resume")

    def mend(self) -> None:
        """No jobs of the user, all nodes up, without faults and in service."""
        self.lab.exec("head", ["scancel", "-u", self.lab.user])
        for node in self.lab.spec.compute_names:
            if self.lab.faults()[node] != "up":
                self.lab.heal(node)
            if self.node(node) != FREE:
                self.resume(node)
        for node in self.lab.spec.compute_names:
            self.wait_node(node, *FREE)

    # -- what people see

    def node(self, node: str) -> tuple[frozenset[str], str]:
        """The flags that sinfo shows and the reason in force, without who set it and when."""
        record = node_from(self.lab.node_records()[node])
        return record.state, re.sub(r" \[[^\[\]]*\]$", "", record.reason_in_force)

    def wait_node(self, node: str, flags: frozenset[str], reason: str) -> None:
        """Wait until a node looks so: after a resume it is not responding for a second."""
        until(lambda: self.node(node) == (flags, reason), f"{node}: {'+'.join(flags)} {reason}")

    def wait_flag(self, node: str, flag: str) -> None:
        until(lambda: flag in self.node(node)[0], f"{node} {flag}", 20)

    def reason(self, node: str) -> str:
        """The drain reason; empty if the node is not drained."""
        flags, reason = self.node(node)
        return reason if "DRAIN" in flags else ""

    def wait_reason(self, node: str, reason: str, timeout: float = 20.0) -> None:
        until(lambda: self.reason(node) == reason, f"{node}: {reason or 'no drain'}", timeout)

    def others(self, *but: str) -> dict[str, tuple[frozenset[str], str]]:
        """Return the other nodes that carry a flag or a reason."""
        quiet = {"IDLE", "MIXED", "ALLOCATED", "COMPLETING"}
        found = {node: self.node(node) for node in self.lab.spec.compute_names if node not in but}
        return {n: (flags, why) for n, (flags, why) in found.items() if flags - quiet or why}

    def local(self, node: str, *kinds: str) -> list[Event]:
        """Return the events of these kinds in the node's own history."""
        path = self.node_spool(node) / events.FILE
        if self.lab.spec.kernel:  # its disk is of its own
            argv = ["cat", str(self.spool / events.FILE)]
            raw = self.lab.exec(node, argv, user=False).stdout.encode()
        else:
            raw = path.read_bytes() if path.exists() else b""
        found = events.parse(raw)
        return [event for event in found if not kinds or event.kind in kinds]

    def shared(self, node: str, *kinds: str) -> list[Event]:
        """Return the node's events in the ledger that all nodes share."""
        path = self.state / events.NODES / f"{node}.jsonl"
        found = events.parse(path.read_bytes()) if path.exists() else []
        return [event for event in found if not kinds or event.kind in kinds]

    def said(self, node: str) -> str:
        """Return slurmd's log."""
        return (self.lab.spec.dir / "log" / f"slurmd-{node}.log").read_text(errors="replace")

    def prolog_failed(self, node: str, job: int) -> bool:
        """True if slurmd says so in its log; until 25.11 it names a job "[job 7]"."""
        wanted = rf"(\[job {job}\]|JobId={job}\b[^\n]*) prolog failed"
        return re.search(wanted, self.said(node)) is not None

    def seconds_of_prologs(self, node: str) -> list[float]:
        """Return the times of prologs that slurmd found worth a line: more than a second or so."""
        pattern = r"processing time from prep_g_prolog: usec=(\d+)"
        return [int(usec) / 1e6 for usec in re.findall(pattern, self.said(node))]

    def processes(self, node: str) -> list[tuple[str, str]]:
        """State and command line of all that runs on a node."""
        done = self.lab.exec(node, ["ps", "-eo", "stat=,args="], user=False, check=True)
        rows = [line.split(None, 1) for line in done.stdout.splitlines()]
        return [(state, argv) for state, argv in rows if not argv.startswith("ps ")]

    # -- jobs

    def submit(self, *args: str, script: str = HERE) -> int:
        """A batch job of the unprivileged user."""
        return self.lab.sbatch(script, ["-o", f"{self.lab.shared}/%j.out", *args])

    def submit_on(self, *nodes: str, args: tuple[str, ...] = (), script: str = HERE) -> int:
        """A job of one node that may run on these only."""
        names = self.lab.spec.compute_names
        rest = [f"--exclude={','.join(sorted(set(names) - set(nodes)))}"]
        return self.submit("-N1", *(rest if set(names) - set(nodes) else []), *args, script=script)

    def output(self, job: int) -> str:
        path = self.lab.shared / f"{job}.out"
        return path.read_text() if path.exists() else ""

    def wait_requeued(self, job: int, timeout: float = 20.0) -> dict[str, str]:
        """Wait until a prolog has refused the job; it waits for its time then, and is not held."""
        record: dict[str, str] = {}

        def refused() -> bool:
            record.update(self.lab.job(job))
            return record["JobState"] == "PENDING" and record["Restarts"] != "0"

        try:
            until(refused, f"job {job} requeued", timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{record}") from None
        assert "Held" not in record["Reason"] and record["Priority"] != "0", record
        return record

    def start_now(self, job: int) -> None:
        """Slurm lets a requeued job wait two minutes: its administrator does not."""
        self.admin("update", f"jobid={job}", "starttime=now")

    def ended(self, job: int, timeout: float = 30.0) -> dict[str, str]:
        """Wait until the job is over, its epilogs too; its record."""
        record: dict[str, str] = {}

        def over() -> bool:
            record.update(self.lab.job(job))
            return record["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL")

        until(over, f"end of job {job}", timeout)
        until(lambda: not self.completing(job), f"epilogs of job {job}", timeout)
        return record

    def completing(self, job: int) -> bool:
        states = ["COMPLETING", "RUNNING", "PENDING", "CONFIGURING"]
        argv = ["squeue", "-h", "-j", str(job), "-t", ",".join(states)]
        return bool(self.lab.exec("head", argv).stdout.strip())

    def run(self, node: str, *args: str, script: str = HERE) -> int:
        """A job on this node, to its end; it must do well."""
        job = self.submit(f"-w{node}", *args, script=script)
        record = self.ended(job)
        assert record["JobState"] == "COMPLETED", record
        return job

    def report_node(
        self,
        node: str,
        job: int,
        incident: str = "e3",
        /,
        *,
        owner: int = 0,
        text: str = "",
        link: str = "",
        place: str = "",
        **changes: Any,
    ) -> None:
        """Leave what robust-srun leaves, as its user: a record with ``changes``.

        Or ``text`` in its place, or a link. ``owner``: whose the file is to be, 0: the user's;
        ``place``: another name of the job's directory.
        """
        directory = self.state / "jobs" / (place or str(job)) / "accusations"
        path = str(directory / f"{node}.{incident}.json")
        record = {"v": 1, "node": node, "incident": incident, "job": job, "user": "u"}
        record |= {"time": time.time(), "symptom": "node_lost", "evidence": ["no report"]}
        write = f"ln -s {link}" if link else "cat >"
        argv = ["sh", "-c", f'mkdir -p "$1" && {write} "$2"', "sh", str(directory), path]
        self.lab.exec("head", argv, input=text or json.dumps(record | changes), check=True)
        if owner:
            self.lab.exec("head", ["chown", str(owner), path], user=False, check=True)


@contextlib.contextmanager
def gate_lab(
    nodes: int,
    gpus: int = 2,
    standby: int = 0,
    slurm_conf: Mapping[str, str] | None = None,
    slurm: str = "",
    kernel: bool = False,
) -> Iterator[GateLab]:
    """Bring one up; ``slurm``: of this release, whichever the tests run on.

    ``kernel``: each node has one of its own, and state of its own, which ends with the node.
    """
    from lab.host import check_host

    check_host()
    named = Cluster(nodes=nodes)
    etc = named.spec.dir / "site" / "etc"
    conf = {
        "Prolog": f"{etc}/prolog",
        "Epilog": f"{etc}/epilog",
        "HealthCheckProgram": f"{etc}/healthcheck",
        "HealthCheckInterval": "3600",  # the tests run it when they want it
        "PrologFlags": "Alloc,Contain,DeferBatch",
        "SchedulerParameters": f"{SCHEDULER},nohold_on_prolog_fail",
        "SlurmdDebug": "debug",  # says how long a slow prolog took
        **(slurm_conf or {}),
    }
    cluster = Cluster(
        name=named.spec.name,
        nodes=nodes,
        standby=standby,
        gpus=0 if kernel else gpus,
        scratch=not kernel,
        kernel=kernel,
        slurm_conf=conf,
        slurm=slurm,
    )
    with cluster as lab:
        yield GateLab(lab)
