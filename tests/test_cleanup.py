"""What the epilog clears: the job's processes and files, and nobody else's."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_system import FakeSystem
from hypothesis import given
from hypothesis import strategies as st
from isolated import isolated

from epilog import cleanup, files, processes
from epilog.processes import Process, claim_of, job_of, leftovers, others, stepd_of
from health import jobs

UID, OTHER = 20001, 20002
NOW = time.time

# -- pure -------------------------------------------------------------------------------------


def proc(pid: int, uid: int = UID, **more: Any) -> Process:
    return Process(pid, 1, uid, pid * 10, "S", "python", **more)._replace(
        **{k: v for k, v in more.items() if k in Process._fields}
    )


@pytest.mark.parametrize(
    ("cgroup", "job"),
    [
        ("0::/system.slice/slurmstepd.scope/job_12/step_0/user/task_0\n", 12),
        ("9:memory:/slurm/uid_20001/job_34/step_batch\n1:name=systemd:/\n", 34),
        ("0::/system.slice/slurmstepd.scope/job_12\n", 12),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", 0),
        ("0::/my_job_12/x\n", 0),
        ("", 0),
    ],
)
def test_job_of(cgroup: str, job: int) -> None:
    assert job_of(cgroup) == job


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        (b"PATH=/bin\0SLURM_JOB_ID=12\0", 12),
        (b"XSLURM_JOB_ID=12\0", 0),
        (b"SLURM_JOB_ID=12x\0SLURM_JOB_ID=13\0", 13),
        (b"SLURM_JOB_ID=" + b"9" * 5000, 0),
        (b"", 0),
    ],
)
def test_claim_of(environ: bytes, job: int) -> None:
    assert claim_of(environ) == job


@pytest.mark.parametrize(
    ("name", "uid", "title", "job"),
    [
        ("slurmstepd", 0, "slurmstepd: [123.batch]\0", 123),
        ("slurmstepd", 0, "slurmstepd: [123.0]", 123),
        ("slurmstepd", 0, "slurmstepd: [123_4.extern]", 123),
        ("slurmstepd", 0, "slurmstepd: [123+1.interactive]", 123),
        ("slurmstepd", 0, "/usr/sbin/slurmstepd infinity", -1),
        ("slurmstepd", UID, "slurmstepd: [123.batch]", 0),  # anybody can call himself so
        ("python", 0, "slurmstepd: [123.batch]", 0),
    ],
)
def test_stepd_of(name: str, uid: int, title: str, job: int) -> None:
    assert stepd_of(name, uid, title) == job


STEPD = Process(50, 1, 0, 500, "S", "slurmstepd", stepd=9)


@pytest.mark.parametrize(
    ("found", "steps", "another"),
    [
        ([], [], False),
        ([proc(1)], [], False),
        ([], [7], False),  # its own
        ([], [9], True),  # whose it is cannot be told
        ([STEPD], [], True),
        ([STEPD, proc(2, UID)._replace(parent=50)], [], True),
        ([STEPD, proc(2, OTHER)._replace(parent=50)], [9], False),
        ([STEPD, proc(2, OTHER, job=9)], [], False),
        ([STEPD, proc(2, OTHER, job=9), proc(3, UID, job=9)], [], True),
        # A leftover that names another user's job in its environment is no witness.
        ([STEPD, proc(2, OTHER, job=9), proc(3, UID, claims=9)], [], False),
        ([STEPD._replace(stepd=-1)], [], True),
        ([STEPD._replace(stepd=7)], [], False),
    ],
)
def test_others(found: list[Process], steps: list[int], another: bool) -> None:
    assert others(found, steps, 7, UID) == another


LISTED = [
    proc(1),
    proc(2, job=7),
    proc(3, claims=7),
    proc(4, job=8, claims=7),  # the kernel says: another job's
    proc(5, OTHER, job=7),
    proc(6)._replace(state="Z"),
    proc(7)._replace(state="D"),
    STEPD,
]


@pytest.mark.parametrize(
    ("uid", "mode", "alone", "pids"),
    [
        (UID, "user", True, [1, 2, 3, 4, 7]),
        (UID, "user", False, [2, 3]),
        (UID, "job", True, [2, 3]),
        (UID, "never", True, []),
        (0, "user", True, []),
        (-1, "user", True, []),
        (OTHER, "job", True, [5]),
    ],
)
def test_leftovers(uid: int, mode: str, alone: bool, pids: list[int]) -> None:
    assert [p.pid for p in leftovers(LISTED, 7, uid, mode, alone)] == pids


def test_a_system_user_never_loses_all_its_processes() -> None:
    listed = [proc(1, 999), proc(2, 999, job=7)]
    assert [p.pid for p in leftovers(listed, 7, 999, "user", True)] == [2]


@given(st.lists(st.builds(Process, *[st.integers(0, 9)] * 4, st.sampled_from("SRDZ"), st.text())))
def test_only_ever_processes_of_that_user(listed: list[Process]) -> None:
    for mode in ("user", "job"):
        assert all(p.uid == 5 for p in leftovers(listed, 3, 5, mode, True))


SHM = """ key shmid perms size cpid lpid nattch   uid   gid  cuid  cgid atime dtime ctime rss swap
   0     3   600 4096 1001 1001      0 20001 20001 20001 20001     0     0  1000   0    0
   0     4   600 4096 1001 1001      0 20002 20001 20002 20001     0     0  1000   0    0
   0     5   600 4096 1001 1001      0 20001 20001 20002 20001     0     0  1000   0    0
   0     6   600 4096 1001 1001      0 20001 20001 20001 20001     0     0  2000   0    0
"""


def test_ipc_of_the_user_and_old_enough() -> None:
    assert files.ipc_of(SHM, UID, 1500.0) == [3]
    assert files.ipc_of("", UID, 1500.0) == files.ipc_of("junk\nmore", UID, 1500.0) == []


# -- on this machine, in namespaces of their own ----------------------------------------------


def run(*argv: str, uid: int = UID, env: dict[str, str] | None = None, **more: Any) -> Any:
    return subprocess.Popen(argv, user=uid, group=uid, env=env or {}, cwd="/", **more)


def sleeper(uid: int = UID, **env: str) -> subprocess.Popen[bytes]:
    return run("/bin/sleep", "600", uid=uid, env=env)  # type: ignore[no-any-return]


def stubborn(uid: int = UID) -> subprocess.Popen[bytes]:
    """Takes no SIGTERM."""
    process = run(
        "/bin/sh",
        "-c",
        'trap "" TERM; echo on; while :; do sleep 1; done',
        uid=uid,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"on\n"
    return process  # type: ignore[no-any-return]


def stepd(tmp_path: Path, job: int) -> subprocess.Popen[bytes]:
    program = tmp_path / "slurmstepd"
    if not program.exists():
        shutil.copy("/bin/sleep", program)
    return subprocess.Popen([f"slurmstepd: [{job}.batch]", "600"], executable=program)


def clear(mode: str = "user", job: int = 7, uid: int = UID, **more: Any) -> cleanup.Cleared:
    given = {"steps": [], "dirs": [], "deadline_s": 10.0} | more
    return cleanup.clear(job, uid, mode, **given)


def running(*them: subprocess.Popen[bytes]) -> list[bool]:
    return [process.poll() is None for process in them]


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
def test_another_job_of_the_user_keeps_its_processes(tmp_path: Path) -> None:
    daemon = stepd(tmp_path, 9)
    mine, next_job = sleeper(SLURM_JOB_ID="7"), sleeper(SLURM_JOB_ID="9")
    (Path("/dev/shm") / "of-9").touch()
    os.chown("/dev/shm/of-9", UID, UID)
    time.sleep(0.1)
    result = clear(dirs=["/dev/shm"])
    assert (result.ended, result.removed) == (1, 0)
    assert mine.wait(5) == -signal.SIGTERM
    assert running(next_job, daemon) == [True, True]
    assert Path("/dev/shm/of-9").exists()


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
    assert not [p for p in processes.scan(UID) if p.state not in "ZX"]


def test_a_pid_that_is_anothers_by_now_is_not_signalled() -> None:
    process = subprocess.Popen(["/bin/sleep", "600"])
    try:
        (seen,) = [processes._identity(process.pid)]
        assert processes.alive(seen)
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


def left(*rows: Process, server: list[int] | None = None) -> Any:
    said = {"ended": 0, "left": list(rows), "alone": True, "looked": 0.0, "server": server or []}
    return lambda *_: said


def test_what_stays_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [proc(4), proc(5)._replace(state="D", name="cat\x1b[2J")]
    monkeypatch.setattr(cleanup, "end_leftovers", left(*rows))
    found = clear().findings
    assert [(f.status, f.cls, f.check, f.action) for f in found] == [
        ("FAIL", "node", "leftover-processes-stuck", "reboot"),
        ("FAIL", "user", "leftover-processes", "clear-leftovers"),
    ]
    assert found[0].evidence == "left after SIGKILL: 5 (cat [2J) state D"


def test_a_file_server_that_is_away_wants_no_reboot(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [proc(4)._replace(state="D"), proc(5)._replace(state="D")]
    monkeypatch.setattr(cleanup, "end_leftovers", left(*rows, server=[5]))
    assert [(f.check, f.action) for f in clear().findings] == [
        ("leftover-processes-stuck", "reboot"),
        ("leftover-processes-stuck", "none"),
    ]


def test_a_hung_proc_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "scan", lambda uid: time.sleep(60))
    began = time.monotonic()
    (found,) = clear(deadline_s=0.3).findings
    assert (found.check, found.status, found.cls) == ("cleanup-hung", "FAIL", "node")
    assert time.monotonic() - began < 5


def test_our_own_bug_is_the_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "scan", lambda uid: 1 / 0)
    (found,) = clear().findings
    assert (found.check, found.status, found.cls) == ("cleanup-error", "ERROR", "tool")
    assert "ZeroDivisionError" in found.evidence


@isolated
def test_still_there() -> None:
    assert not cleanup.still_there(7, UID, "user", [], 10.0)
    mine = sleeper()
    assert cleanup.still_there(7, UID, "user", [], 10.0)
    mine.kill()
    mine.wait()
    assert not cleanup.still_there(7, UID, "user", [], 10.0)


# -- files ------------------------------------------------------------------------------------


def own(path: Path, uid: int = UID) -> Path:
    os.chown(path, uid, uid, follow_symlinks=False)
    return path


def make(path: Path, uid: int = UID, text: str = "x") -> Path:
    path.write_text(text)
    return own(path, uid)


def make_dir(path: Path, uid: int = UID) -> Path:
    path.mkdir()
    return own(path, uid)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")


def clear_dir(path: Path) -> tuple[int, list[str]]:
    return files.clear_dir(str(path), UID, NOW() + 5, time.monotonic() + 10)


@needs_root
def test_files_of_the_user_go_and_others_stay(tmp_path: Path) -> None:
    make(tmp_path / "mine")
    make(tmp_path / "other", OTHER)
    tree = make_dir(tmp_path / "robust-7-abc")
    make(make_dir(tree / "deep") / "file")
    os.mkfifo(tree / "fifo")
    own(tree / "fifo")
    hostile = make(tmp_path / "a\nb \x1b[2J ..")
    assert clear_dir(tmp_path) == (6, [])
    assert [p.name for p in tmp_path.iterdir()] == ["other"]
    assert not hostile.exists()


@needs_root
def test_links_are_removed_not_followed(tmp_path: Path) -> None:
    victim = make_dir(tmp_path / "victim")
    make(victim / "keep")
    base = make_dir(tmp_path / "base", 0)
    own_tree = make_dir(base / "tree")
    for place in (base / "link", own_tree / "link"):
        place.symlink_to(victim)
        own(place)
    os.link(make(tmp_path / "hard"), base / "hard")
    clear_dir(base)
    assert (victim / "keep").exists() and (tmp_path / "hard").exists()
    assert list(base.iterdir()) == []


@needs_root
def test_nothing_hides_in_the_depth(tmp_path: Path) -> None:
    levels = 3 * files._DEPTH
    fd = os.open(tmp_path, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d" * 200, dir_fd=fd)  # a path longer than PATH_MAX
        os.chown("d" * 200, UID, UID, dir_fd=fd)
        above, fd = fd, os.open("d" * 200, os.O_RDONLY, dir_fd=fd)
        os.close(above)
    os.close(fd)
    assert clear_dir(tmp_path) == (levels, [])
    assert list(tmp_path.iterdir()) == []


@needs_root
def test_what_others_put_into_the_users_directory_stays(tmp_path: Path) -> None:
    tree = make_dir(tmp_path / "tree")
    make(tree / "mine")
    inner = make_dir(tree / "others", OTHER)
    make(inner / "file", OTHER)
    removed, stayed = clear_dir(tmp_path)
    assert removed == 1 and stayed == ["tree: Directory not empty"]
    assert (inner / "file").exists()


@needs_root
def test_what_is_younger_than_the_look_stays(tmp_path: Path) -> None:
    make(tmp_path / "of-the-next-job")
    assert files.clear_dir(str(tmp_path), UID, NOW() - 5, time.monotonic() + 10) == (0, [])


@isolated
def test_no_other_file_system_is_entered() -> None:
    from lab import linux

    tree = make_dir(Path("/dev/shm/tree"))
    inside = make_dir(tree / "mounted")
    linux.mount("tmpfs", str(inside), "tmpfs", 0, f"mode=755,uid={UID}")
    make(inside / "keep")
    removed, stayed = clear_dir(Path("/dev/shm"))
    assert removed == 0 and (inside / "keep").exists()
    assert "tree/mounted/another file system" in stayed


@needs_root
def test_a_directory_exchanged_for_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user wins the race between the look and the opening."""
    victim = make_dir(tmp_path / "victim", OTHER)
    make(victim / "keep")
    base = make_dir(tmp_path / "base", 0)
    tree = make_dir(base / "tree")
    real = os.lstat

    def exchanged(path: Any, **at: Any) -> os.stat_result:
        info = real(path, **at)
        if path == "tree" and not tree.is_symlink():
            tree.rmdir()
            tree.symlink_to(victim)
            own(tree)
        return info

    monkeypatch.setattr(os, "lstat", exchanged)
    assert clear_dir(base)[0] == 0
    assert (victim / "keep").exists()

    monkeypatch.undo()
    tree.unlink()
    make_dir(tree)

    def moved(path: Any, **at: Any) -> os.stat_result:
        info = real(path, **at)
        if path == "tree" and victim.exists():
            tree.rmdir()
            victim.rename(tree)
        return info

    monkeypatch.setattr(os, "lstat", moved)
    removed, stayed = clear_dir(base)
    assert removed == 0 and "tree/not the user's" in stayed
    assert (tree / "keep").exists()


@needs_root
def test_it_ends_with_its_time(tmp_path: Path) -> None:
    make(tmp_path / "mine")
    assert files.clear_dir(str(tmp_path), UID, NOW() + 5, time.monotonic() - 1) == (
        0,
        ["no time for the rest"],
    )


@isolated
def test_memory_and_directories_go_when_the_user_is_alone(tmp_path: Path) -> None:
    _as_user(_make_ipc)
    assert _ipc() == {"shm": 1, "sem": 1, "msg": 1}
    make(Path("/dev/shm/robust-7-x"))
    scratch = make_dir(tmp_path / "scratch", 0)
    make(scratch / "mine")
    time.sleep(1.1)  # System V objects tell their time in whole seconds
    result = clear(dirs=["/dev/shm", str(scratch), str(tmp_path / "absent")])
    assert result.removed == 5
    assert _ipc() == {"shm": 0, "sem": 0, "msg": 0}
    assert [f.check for f in result.findings] == ["leftover-files"]
    assert "absent/No such file" in result.findings[0].evidence
    assert result.findings[0].status == "WARN"


def _make_ipc() -> None:
    libc = ctypes.CDLL(None)
    assert libc.shmget(0, ctypes.c_size_t(4096), 0o1600) >= 0
    assert libc.semget(0, 1, 0o1600) >= 0
    assert libc.msgget(0, 0o1600) >= 0


def _as_user(work: Any) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            os.setresgid(UID, UID, UID)
            os.setresuid(UID, UID, UID)
            work()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def _ipc() -> dict[str, int]:
    kinds = ("shm", "sem", "msg")
    return {k: len(Path(f"/proc/sysvipc/{k}").read_text().splitlines()) - 1 for k in kinds}
