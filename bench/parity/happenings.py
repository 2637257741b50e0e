"""Events during a run that are harmless under srun; each mends what it breaks."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from bench.chaos.job import Job
from bench.parity.trial import REASON, ROBUST, TOKEN, ParityError, Trial
from bench.parity.way import Happening, Running
from lab.keeper.ranks import scan


def traced(seconds: float, rank: int = 0, how: str = "hold") -> Happening:
    """Return a debugger at a rank: `hold` stops it, `run` follows it from call to call."""

    def happens(run: Running) -> None:
        program = run.lab.shared / "programs" / "trace"
        words = [str(program), str(run.rank(rank)), str(int(seconds)), how]
        subprocess.run(words, check=True, capture_output=True, timeout=seconds + 30)

    return happens


def gdb(seconds: float) -> Happening:
    """Return a gdb that a person attaches to rank 1, looks around in, and leaves."""

    def happens(run: Running) -> None:
        orders = ["bt", f"shell sleep {seconds}", "bt", "detach", "quit"]
        words = [word for order in orders for word in ("-ex", order)]
        attach = ["gdb", "-nx", "-batch", "-p", str(run.rank(1)), *words]
        subprocess.run(attach, check=True, capture_output=True, timeout=seconds + 60)

    return happens


def strace(seconds: float) -> Happening:
    """Return an strace of rank 0."""

    def happens(run: Running) -> None:
        words = ["strace", "-f", "-o", "/dev/null", "-p", str(run.rank(0))]
        with subprocess.Popen(words, stderr=subprocess.DEVNULL) as tracer:
            time.sleep(seconds)
            tracer.send_signal(signal.SIGINT)

    return happens


def stopped(seconds: float, rank: int = 1) -> Happening:
    """Return a SIGSTOP of a rank, and a SIGCONT, as of a person who looks at something."""

    def happens(run: Running) -> None:
        _for_a_while([run.rank(rank)], seconds)

    return happens


def suspended(seconds: float) -> Happening:
    """Return a suspension of the job."""

    def happens(run: Running) -> None:
        run.scontrol("suspend", str(run.id))
        time.sleep(seconds)
        run.scontrol("resume", str(run.id))

    return happens


def stepd_stopped(seconds: float) -> Happening:
    """Return a stop of the launcher's own process beside rank 1: slurmstepd, or robust-task."""

    def happens(run: Running) -> None:
        pids = _shims(run) or _stepds(run)
        if not pids:
            raise ParityError(f"job {run.id}: no process of the launcher on {run.nodes[-1]}")
        _for_a_while(pids[:1], seconds)

    return happens


def launcher_stopped(seconds: float) -> Happening:
    """Return a stop of the launcher itself: srun, or robust-srun."""

    def happens(run: Running) -> None:
        assert isinstance(run, Trial)
        found = []
        for process in scan():
            if process.environ.get(TOKEN) == run.token:
                words = _words(process.pid)
                if any(Path(word).name == run.launcher for word in words[:2]):
                    found.append(process.pid)
        _for_a_while(sorted(found)[:1], seconds)

    return happens


def _for_a_while(pids: list[int], seconds: float) -> None:
    if not pids:
        raise ParityError("no process of the launcher was found")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in pids:
        with suppress(ProcessLookupError):  # robust-srun may have killed it
            os.kill(pid, signal.SIGCONT)


def _shims(run: Running) -> list[int]:
    assert isinstance(run, Trial)
    job: Job = run.job
    return job.shims(run.nodes[-1]) if run.launcher == ROBUST else []


def _stepds(run: Running) -> list[int]:
    """Return the slurmstepd of the step on the node of rank 1, which has processes of its own."""
    space = _space(run.rank(1))
    pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    title = f"slurmstepd: [{run.id}.0]"
    return [pid for pid in pids if " ".join(_words(pid)) == title and _space(pid) == space]


def _space(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""


def _words(pid: int) -> list[str]:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(word) for word in raw.split(b"\0") if word]


def daemon(name: str, seconds: float) -> Happening:
    """Return a daemon that stands still: slurmctld or munged, or slurmd of the last node."""

    def happens(run: Running) -> None:
        node = run.nodes[-1] if name == "slurmd" else "head"
        run.lab.daemon(node, name, "freeze")
        time.sleep(seconds)
        run.lab.daemon(node, name, "thaw")

    return happens


def restarted(name: str, seconds: float = 5.0) -> Happening:
    """Return a restart of a daemon, with some seconds between."""

    def happens(run: Running) -> None:
        node = run.nodes[-1] if name == "slurmd" else "head"
        run.lab.daemon(node, name, "stop")
        time.sleep(seconds)
        run.lab.daemon(node, name, "start")

    return happens


def told(*words: str, seconds: float = 0.0) -> Happening:
    """Return an order by scontrol; `JOB` and `NODE` in it are the run's."""

    def happens(run: Running) -> None:
        filled = [word.replace("JOB", str(run.id)).replace("NODE", run.nodes[-1]) for word in words]
        run.scontrol(*filled)
        time.sleep(seconds)

    return happens


def drained(run: Running) -> None:
    """Drain a node as an admin does who wants it after the job."""
    run.scontrol("update", f"nodename={run.nodes[-1]}", "state=drain", f"reason={REASON}: a disk")


def standby_drained(run: Running) -> None:
    """Drain the standby nodes for some seconds."""
    names = ",".join(run.lab.spec.standby_names)
    run.scontrol("update", f"nodename={names}", "state=drain", f"reason={REASON}")
    time.sleep(15)
    run.scontrol("update", f"nodename={names}", "state=resume")


def signalled(name: str) -> Happening:
    """Return a signal to the steps of the job, by scancel."""

    def happens(run: Running) -> None:
        words = ["scancel", f"--signal={name}", str(run.id)]
        run.lab.exec("head", words, check=True)

    return happens


def outage(seconds: float, nodes: int = 1) -> Happening:
    """Return an outage of the links of the last nodes."""

    def happens(run: Running) -> None:
        run.lab.outage(run.nodes[-nodes:], seconds)
        time.sleep(seconds + 1)

    return happens


def slow_link(seconds: float) -> Happening:
    """Return a link that delays frames by 50 ms and drops one of a hundred."""

    def happens(run: Running) -> None:
        run.lab.slow(run.nodes[-1], delay_ms=50, loss_percent=1)
        time.sleep(seconds)
        run.lab.ask("heal", node=run.nodes[-1])

    return happens


def stalled(seconds: float, nodes: int = 2) -> Happening:
    """Return a stall of the mount on the last nodes: whoever uses it waits in D state."""

    def happens(run: Running) -> None:
        run.lab.stall(run.nodes[-nodes:])
        time.sleep(seconds)
        run.lab.resume(run.nodes[-nodes:])

    return happens


def crowd(run: Running) -> None:
    """Submit sixty jobs that wait in the queue, and cancel them."""
    for _ in range(3):
        held = ["--hold", "--array=1-20", "--job-name=crowd", "-o", "/dev/null"]
        run.lab.sbatch("#!/bin/sh\ntrue\n", held)
    time.sleep(15)
    run.lab.exec("head", ["scancel", "--name", "crowd"])
