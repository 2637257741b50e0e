"""Facts that a node records about a rank's end: OOM kills, kernel log, torch's error file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srun_wrapper.agent.processes import end_report, rank_facts
from srun_wrapper.agent.processes.end_report import EndReport, killed
from srun_wrapper.agent.processes.rank_facts import RankFacts, error_message, kernel_lines

PID = 4203
V2 = "/system.slice/slurmstepd.scope/job_7/step_0/user/task_1"
SLUID = "/system.slice/slurmstepd.scope/s1X1M8HJD3FG00/step_0/user/task_0"  # of 26.05
SLUIDS = SLUID.replace("slurmstepd", "n1_slurmstepd")  # of one of several slurmds
V1 = "/slurm/uid_1000/job_7/step_0/task_1"
KILLED = f"Memory cgroup out of memory: Killed process {PID} (python) total-vm:8GB, anon-rss:7GB"


class OneNode:
    """The files of a node, made in a directory."""

    def __init__(self, base: Path) -> None:
        self.kmsg, self.cgroups, self.proc = base / "kmsg", base / "cgroup", base / "proc"
        self.errors = base / "error.json"
        (self.proc / "self").mkdir(parents=True)

    def cgroup(self, line: str, file: str, text: str) -> None:
        (self.proc / "self" / "cgroup").write_text(f"1:name=systemd:/x\n{line}\n")
        path = self.cgroups / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def log(self, text: str, at: float | None = None, prio: int = 4) -> None:
        usec = int((time.monotonic() if at is None else at) * 1e6)
        with self.kmsg.open("a") as file:
            file.write(f"{prio},1,{usec},-;{text}\n SUBSYSTEM=x\n")

    @property
    def places(self) -> dict[str, Path]:
        return {"kmsg": self.kmsg, "cgroups": self.cgroups, "proc": self.proc}

    def begun(self) -> RankFacts:
        facts = RankFacts(PID, self.errors, **self.places)
        facts.begin()
        return facts


@pytest.fixture
def node(tmp_path: Path) -> OneNode:
    return OneNode(tmp_path)


@pytest.mark.parametrize(
    ("line", "file"),
    [
        (f"0::{V2}", f"{V2[1:]}/memory.events"),
        (f"0::{V2}", f"{V2[1:].rpartition('/')[0]}/memory.events"),  # none in the task's own
        (f"0::{SLUID}", f"{SLUID[1:]}/memory.events"),
        (f"0::{SLUIDS}", f"{SLUIDS[1:]}/memory.events"),
        (f"0::{SLUIDS}", f"{SLUIDS[1:].rpartition('/user')[0]}/memory.events"),
        (f"5:memory:{V1}", f"memory/{V1[1:]}/memory.oom_control"),
        (f"5:cpu,memory:{V1}", f"memory/{V1[1:]}/memory.oom_control"),
    ],
)
def test_an_oom_kill_since_the_start_is_counted(node: OneNode, line: str, file: str) -> None:
    node.cgroup(line, file, "low 0\nunder_oom 0\noom 2\noom_kill 2\noom_group_kill 0\n")
    assert node.begun().oom_kill() == ()  # older ones
    facts = node.begun()
    node.cgroup(line, file, "oom 3\noom_kill 3\n")
    (fact,) = facts.oom_kill()
    assert fact.startswith("cgroup /s") and fact.endswith(
        "oom_kill events since the rank's start: 1"
    )


class Slow:
    """A loop whose threads have no answer within any time."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def run_in_thread(self, work: Any, done: Any, default: Any) -> None:
        if work.__name__ == "begin":
            work()

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        self.due.append(call)


@pytest.mark.parametrize(("code", "said"), [(-9, True), (1, False)])
def test_an_oom_kill_is_told_although_the_rest_takes_too_long(
    node: OneNode, monkeypatch: pytest.MonkeyPatch, code: int, said: bool
) -> None:
    """Seen with real cgroups: 2 of 7 kills were not told, and the machines were tested."""
    line, file = f"0::{SLUIDS}", f"{SLUIDS[1:]}/memory.events"
    node.cgroup(line, file, "oom_kill 0\n")
    monkeypatch.setattr(end_report, "RankFacts", partial(RankFacts, **node.places))
    loop, told = Slow(), list[tuple[str, ...]]()
    report = EndReport(loop, node.errors, told.append)  # type: ignore[arg-type]
    report.begin(PID)
    node.cgroup(line, file, "oom_kill 1\n")
    report.ended(lambda facts: facts, "", code)  # type: ignore[arg-type,return-value]
    assert told == []
    for call in loop.due:
        call()
    (facts,) = told
    assert (facts != ()) is said, "an OOM kill of a helper is no reason for another end"


@pytest.mark.parametrize(
    ("code", "tail", "expected"),
    [
        (-9, "", True),
        (137, "", True),
        (1, "exitcode  : -9 (pid: 17)", True),
        (1, "Signal 9 (SIGKILL) received by PID 17", True),
        (-11, "", False),
        (1, "OSError: [Errno 5] Input/output error", False),
    ],
)
def test_only_sigkill_may_be_the_oom_killers(code: int, tail: str, expected: bool) -> None:
    assert killed(code, tail) is expected


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/system.slice/slurmd.service", "system.slice/slurmd.service/memory.events"),
        ("0::/", "memory.events"),
        ("0::/../../job_7/step_0", "memory.events"),
        (f"5:cpu:{V1}", f"memory/{V1[1:]}/memory.oom_control"),
        ("0::/slurm/job_7/step_0", "slurm/job_7/memory.events"),  # of other steps as well
        (f"0::{SLUID}", f"{SLUID[1:].rpartition('/step_0')[0]}/memory.events"),
        (
            "0::/user.slice/s1X1M8HJD3FG00/step_0/task_0",
            "user.slice/s1X1M8HJD3FG00/step_0/task_0/memory.events",
        ),
        ("rubbish", "memory.events"),
    ],
)
def test_a_cgroup_that_others_use_as_well_says_nothing(node: OneNode, line: str, file: str) -> None:
    node.cgroup(line, file, "oom_kill 0\n")
    facts = node.begun()
    node.cgroup(line, file, "oom_kill 5\n")
    assert facts.oom_kill() == ()


def test_the_kernels_new_lines_about_the_rank(node: OneNode) -> None:
    node.log(KILLED.replace("Killed", "Old: Killed"))
    facts = node.begun()
    node.log("usb 1-1: new device")
    node.log(KILLED)
    node.log("NVRM: Xid (PCI:0000:17:00): 79, pid='<unknown>', name=<unknown>, gone")
    assert facts.gather() == (
        f"kernel: {KILLED}",
        "kernel: NVRM: Xid (PCI:0000:17:00): 79, pid='<unknown>', name=<unknown>, gone",
    )


def test_a_long_log_is_cut(node: OneNode) -> None:
    node.log("boot")
    facts = node.begun()
    for number in range(2000):
        node.log(f"python[{PID}]: trap {number} " + "x" * 1000)
    found = facts.gather()
    assert len(found) == rank_facts.LINES and all(len(f) <= rank_facts.TEXT for f in found)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        (KILLED, True),
        (f"oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg={V1},task=python,pid=9,uid=0", True),
        (f"oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg={V1}0,task=python,pid=9,uid=0", False),
        (f"python[{PID}]: segfault at 0 ip 00007f", True),
        (f"INFO: task python:{PID} blocked for more than 120 seconds.", True),
        (f"NVRM: Xid (PCI:0000:17:00): 31, pid={PID}, name=python, MMU Fault", True),
        (f"NVRM: Xid (PCI:0000:17:00): 31, pid={PID}1, name=python, MMU Fault", False),
        ("NVRM: Xid (PCI:0000:17:00): 31, pid=77, name=python, MMU Fault", False),  # of another
        ("NVRM: Xid (PCI:0000:17:00): 79, GPU has fallen off the bus.", True),
        (f"Killed process {PID}7 (python)", False),
        (
            f"[   {PID}]  1000  {PID}   123456    python",
            False,
        ),  # the kernel's list of all processes
        (f"audit: res={PID}", False),
    ],
)
def test_lines_that_count(text: str, counts: bool) -> None:
    lines = [f"4,17,1000000,-;{text}"]
    assert kernel_lines(lines, PID, V1, 2.0) == ([text] if counts else [])
    assert kernel_lines([f"12,17,1000000,-;{text}"], PID, V1, 2.0) == []  # a program wrote it
    assert kernel_lines([text, f"4,17;{text}", f"4,x,1,-;{text}", ""], PID, V1, 2.0) == []


def test_an_old_error_of_a_gpu_is_no_fact_about_this_end() -> None:
    line = "4,17,1000000,-;NVRM: Xid (PCI:0000:17:00): 79, GPU has fallen off the bus."
    assert kernel_lines([line], PID, "", 2.0 + rank_facts.RECENT_S) == []


def test_processes_of_this_job_that_the_output_names(node: OneNode) -> None:
    """Two ranks on one GPU are the program's slip, and no other job's leftover."""
    beats = f"ROBUST_BEAT_DIR={node.errors.parent}"
    for pid, environ in ((41, f"A=1\0{beats}\0B=2\0"), (42, f"{beats}x\0"), (43, f"{beats}")):
        (node.proc / str(pid)).mkdir()
        (node.proc / str(pid) / "environ").write_text(environ)
    tail = "".join(f"Process {pid} has 66.00 GiB memory in use. " for pid in (41, 42, 43, 44, 41))
    assert node.begun().gather(tail) == (
        "process 41 belongs to this job",
        "process 43 belongs to this job",
    )


def test_nothing_readable_is_no_error(node: OneNode) -> None:
    node.errors.symlink_to("/dev/zero")
    assert node.begun().gather() == ()
    assert RankFacts(PID, node.errors).gather() == ()  # it ended before its start was seen
    node.errors.unlink()
    os.mkfifo(node.errors)
    assert node.begun().gather() == ()


def test_nothing_stays_open(node: OneNode) -> None:
    node.log("boot")
    before = {fd.name for fd in Path("/proc/self/fd").iterdir()}
    node.begun().gather()
    stopped = node.begun()
    stopped.close()
    stopped.close()
    stopped.begin()  # its thread was late
    assert {fd.name for fd in Path("/proc/self/fd").iterdir()} == before


def test_torchs_error_file(node: OneNode) -> None:
    extra = {"py_callstack": "Traceback …", "timestamp": "1"}
    text = {"message": {"message": "ValueError: bad\x1b[31m sample\n9", "extraInfo": extra}}
    facts = node.begun()
    node.errors.write_text(json.dumps(text))
    assert facts.gather() == ("ValueError: bad?[31m sample 9",)
    assert error_message(b'{"message": "RuntimeError: x"}') == "RuntimeError: x"
    node.errors.write_text(" " * (rank_facts.FILE_BYTES + 1))
    assert node.begun().gather() == ()


@given(st.binary() | st.sampled_from([b"[" * 60000, b"[]", b"1", b'{"message": [1]}', b"{}"]))
def test_any_error_file_is_endured(raw: bytes) -> None:
    assert error_message(raw) == ""
