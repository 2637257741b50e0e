"""The epilog ends the job's processes, and nobody else's: on this machine, in namespaces."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE

import pytest
from fake_system import FakeSystem
from isolated import isolated
from job_leftovers import (
    OTHER,
    UID,
    clear,
    make,
    run,
    running,
    sleeper,
    stepd,
    stubborn,
    wait_old_enough,
)
from waiting import until

from health.leftovers import cleanup, processes
from health.node import jobs
from robust_slurm import process_stat

# SIGTERM ends its main thread alone (60 on x86-64, 93 on others: SYS_exit).
MAIN_ENDS = """
import ctypes, os, platform, signal, threading, time
EXIT = 60 if platform.machine() == "x86_64" else 93
signal.signal(signal.SIGTERM, lambda *_: ctypes.CDLL(None).syscall(EXIT, 0))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
threading.Thread(target=time.sleep, args=(600,)).start()
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
print("on", flush=True)
"""


@isolated
def test_user_mode_ends_the_users_processes_only() -> None:
    mine, other = sleeper(), sleeper(OTHER)
    result = clear()
    assert (result.ended, result.findings) == (1, [])
    assert mine.wait(5) == -signal.SIGTERM
    assert running(other) == [True]
    assert clear() == cleanup.Cleared(0, 0, [])


@isolated
def test_stubborn_ones_are_killed() -> None:
    process = stubborn()
    assert clear().findings == []
    assert process.wait(5) == -signal.SIGKILL


@isolated
@pytest.mark.parametrize("mode", ["user", "job"])
def test_one_whose_main_thread_ends_first_is_waited_for(mode: str) -> None:
    """Another thread gives back a GPU after SIGKILL; here it stays."""
    process = run(sys.executable, "-c", MAIN_ENDS, env={"SLURM_JOB_ID": "7"}, stdout=PIPE)
    assert process.stdout.readline() == b"on\n"
    result = clear(mode)
    assert (result.ended, result.findings) == (1, [])
    assert process.poll() == -signal.SIGKILL


@isolated
def test_one_whose_main_thread_has_ended_is_ended() -> None:
    process = run(sys.executable, "-c", f"{MAIN_ENDS}os.kill(os.getpid(), 15)\n")
    until(lambda: process_stat.read(process.pid).state == "Z", "the end of its main thread")
    assert clear().ended == 1
    assert process.wait(5) == -signal.SIGKILL


def shown(proc: Path, pid: int, main: str, others: Sequence[str] = (), uid: int = UID) -> Path:
    """A process as /proc shows it. Threads: their states; "R!": in exit."""
    for number, state in enumerate([main, *others], pid):
        flags = "4" if state.endswith("!") else "0"
        rest = ["1", "0", "0", "0", "0", flags, *["0"] * 10, str(1 + len(others)), "0", "77"]
        line = " ".join([f"{number} (python) {state[0]}", *rest, *["0"] * 30])
        thread = proc / str(pid) / "task" / str(number)
        thread.mkdir(parents=True)
        for place in (thread, *([proc / str(pid)] if number == pid else [])):
            (place / "stat").write_text(line)
            (place / "cgroup").write_text("0::/\n")
            (place / "environ").touch()
    (proc / str(pid) / "status").write_text(f"Uid:\t{uid}\t0\t0\t0\n")
    return proc / str(pid)


@pytest.mark.parametrize(
    ("main", "others", "state", "ending"),
    [
        ("S", ["D"], "S", False),
        ("R!", [], "R", True),
        ("R!", ["S"], "R", False),
        ("Z!", [], "", False),
        ("Z!", ["S"], "S", False),  # the program goes on without its main thread
        ("Z!", ["S!", "D!"], "D", True),
        ("Z!", ["S!", "R"], "R", False),
    ],
)
def test_what_is_left_of_a_process(
    main: str,
    others: list[str],
    state: str,
    ending: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown(tmp_path, 50, main, others)
    monkeypatch.setattr(processes, "PROC", str(tmp_path))
    now = processes.now(processes.Process(50, 1, UID, 77, "S", "python"))
    assert (now.state if now else "", bool(now and now.ending)) == (state, ending)


BIG = """
import mmap, time
held = mmap.mmap(-1, 1 << 30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, len(held), 4096):
    held[at] = 1
print("on", flush=True)
time.sleep(600)
"""


@isolated
@pytest.mark.parametrize("mode", ["user", "job", "never"])
def test_what_is_ending_already_is_waited_for_whatever_job_it_was_of(mode: str) -> None:
    """The process is gone for Slurm: the epilog runs while memory or a GPU is still in use."""
    process = run(sys.executable, "-c", BIG, env={"SLURM_JOB_ID": "9"}, stdout=PIPE)
    assert process.stdout.readline() == b"on\n"
    mine = make(Path("/dev/shm/of-the-job"))
    wait_old_enough(mine.stat().st_ctime)
    process.kill()
    until(lambda: (stat := process_stat.read(process.pid)).ending or stat.ended, "its end to begin")
    assert clear(mode, dirs=["/dev/shm"]).findings == []
    assert process.poll() == -signal.SIGKILL
    assert mine.exists() == (mode == "never")


def test_a_process_that_ends_meanwhile_is_no_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control group of its last thread names the job, but nobody need end it."""
    at = 1 << 23  # no process has such a number
    mine = shown(tmp_path, at, "Z!", ["D!"])
    other = shown(tmp_path, at + 10, "Z!", ["D!"], OTHER)
    (tmp_path / "self").symlink_to(f"/proc/{os.getpid()}")
    (mine / "task" / str(at + 1) / "cgroup").write_text("0::/system.slice/slurm/job_7/step_0\n")
    monkeypatch.setattr(processes, "PROC", str(tmp_path))
    monkeypatch.delattr(processes, "send")
    timer = threading.Timer(0.3, mine.rename, [tmp_path / "gone"])
    timer.start()
    assert clear("job") == cleanup.Cleared(0, 0, [])
    assert other.exists() and not mine.exists()
    timer.join()


@isolated
def test_job_mode_ends_what_names_the_job() -> None:
    mine, free, next_job = sleeper(SLURM_JOB_ID="7"), sleeper(), sleeper(SLURM_JOB_ID="8")
    assert clear("job").ended == 1
    assert mine.wait(5) == -signal.SIGTERM
    assert running(free, next_job) == [True, True]


@isolated
def test_never() -> None:
    mine = sleeper(SLURM_JOB_ID="7")
    assert clear("never") == cleanup.Cleared(0, 0, [])
    assert running(mine) == [True]


@isolated
def test_files_stay_while_the_user_has_other_processes_here() -> None:
    """In the mode "job" a service or a login of the user goes on, and may use them."""
    mine, free = sleeper(SLURM_JOB_ID="7"), sleeper()
    theirs = make(Path("/dev/shm/of-the-service"))
    wait_old_enough(theirs.stat().st_ctime)
    result = clear("job", dirs=["/dev/shm"])
    assert (result.ended, result.removed) == (1, 0)
    assert running(mine, free) == [False, True] and theirs.exists()
    free.kill()
    free.wait()
    assert clear("job", dirs=["/dev/shm"]).removed == 1


@isolated
def test_another_job_of_the_user_keeps_its_processes(tmp_path: Path) -> None:
    daemon = stepd(tmp_path, 9)
    mine, next_job = sleeper(SLURM_JOB_ID="7"), sleeper(SLURM_JOB_ID="9")
    theirs = make(Path("/dev/shm/of-9"))
    wait_old_enough(theirs.stat().st_ctime)  # only the other job keeps it
    result = clear(dirs=["/dev/shm"])
    assert (result.ended, result.removed) == (1, 0)
    assert mine.wait(5) == -signal.SIGTERM
    assert running(next_job, daemon) == [True, True]
    assert theirs.exists()


@isolated
def test_steps_that_slurmd_knows_count_too(tmp_path: Path) -> None:
    free = sleeper()
    assert clear(steps=[9]).ended == 0
    assert running(free) == [True]
    assert clear(steps=[7]).ended == 1


@isolated
def test_where_nobody_knows_what_runs_here_only_the_jobs_own_go(tmp_path: Path) -> None:
    process = sleeper()
    assert clear(steps=jobs.maybe(FakeSystem())).ended == 0
    assert running(process) == [True]
    process.kill()
    process.wait()


@isolated
def test_the_own_step_daemon_does_not_count(tmp_path: Path) -> None:
    daemon = stepd(tmp_path, 7)
    free = sleeper()
    assert clear().ended == 1
    assert running(free, daemon) == [False, True]


@isolated
def test_a_user_cannot_pose_as_a_step_daemon() -> None:
    fake = run("slurmstepd: [9.batch]", "600", executable="/bin/sleep")
    assert clear().ended == 1
    assert fake.wait(5) == -signal.SIGTERM


@isolated
def test_what_forks_as_it_is_killed_is_ended_too() -> None:
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('on', flush=True)\n"
        "for _ in range(1000):\n"
        "    time.sleep(0.01)\n"
        "    if os.fork():\n"
        "        os._exit(0)\n"
    )
    process = run(sys.executable, "-c", code, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"on\n"
    assert clear(deadline_s=20.0).findings == []
    assert not [p for p in processes.scan(UID) if p.uid == UID and p.state not in "ZX"]


def test_what_was_forked_behind_the_look_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list has one that has ended by now, and not yet the one that it has forked."""
    mine = str(os.getpid())
    lists = [[str(2**22 + 1), "self"], [mine]]
    monkeypatch.setattr(os, "listdir", lambda _path: lists.pop(0))
    monkeypatch.setattr(processes, "_identity", fake_identity)
    assert [p.pid for p in processes.scan(UID)] == [os.getpid()] and not lists


def test_what_a_zombie_has_forked_behind_the_look_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The zombie ended after the list was made, and is still there to be looked at."""
    dead, forked = os.getpid(), os.getppid()
    lists = [[str(dead)], [str(dead), str(forked)]]

    def identity(pid: int) -> processes.Process:
        return processes.Process(pid, 1, UID, 5, "Z" if pid == dead else "S", "python")

    monkeypatch.setattr(os, "listdir", lambda _path: lists.pop(0))
    monkeypatch.setattr(processes, "_identity", identity)
    assert [p.pid for p in processes.scan(UID)] == [dead, forked] and not lists


def fake_identity(pid: int) -> processes.Process:
    """Return a user's identity for this process."""
    if pid != os.getpid():
        raise ProcessLookupError(pid)
    return processes.Process(pid, 1, UID, 5, "S", "python")


def test_a_pid_that_is_anothers_by_now_is_not_signalled() -> None:
    process = subprocess.Popen(["/bin/sleep", "600"])
    try:
        (seen,) = [processes._identity(process.pid)]
        assert processes.now(seen)
        assert not processes.send(seen._replace(start=seen.start - 1), signal.SIGKILL)
        assert not processes.send(seen._replace(uid=seen.uid + 1), signal.SIGKILL)
        assert process.poll() is None
        assert processes.send(seen, signal.SIGKILL)
        process.wait(5)
        assert not processes.send(seen, signal.SIGKILL)
    finally:
        process.kill()


def test_without_pidfds(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", none)
    process = subprocess.Popen(["/bin/sleep", "600"])
    try:
        assert processes.send(processes._identity(process.pid), signal.SIGTERM)
        assert process.wait(5) == -signal.SIGTERM
    finally:
        process.kill()
