"""The live node: files, directories, commands, probes, time; each with what goes wrong."""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from pathlib import Path

import pytest
from waiting import until

from health import settings
from health.children import child
from health.node import probe
from health.node.probe import run
from health.node.stuck import Stuck
from health.node.system import READ_LIMIT, Context
from health.run.live import LiveSystem, context

LONG_S = 30.0
NOBODY = 65534


@pytest.fixture
def system(tmp_path: Path) -> LiveSystem:
    base = settings.defaults(())
    mine = base._replace(gate={**base.gate, "spool": str(tmp_path / "spool")})
    return LiveSystem(mine, Context("deep", "n1", 0, -1, {}))


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"SLURMD_NODENAME": "n7"}, ("n7", 0, -1)),
        (
            {"SLURMD_NODENAME": "n7", "SLURM_JOB_ID": "42", "SLURM_JOB_UID": "1000"},
            ("n7", 42, 1000),
        ),
        ({"SLURMD_NODENAME": "n7", "SLURM_JOBID": "42"}, ("n7", 42, -1)),
        ({"SLURMD_NODENAME": "n7", "SLURM_JOB_ID": "4x", "SLURM_JOB_UID": "-5"}, ("n7", 0, -1)),
        ({}, (os.uname().nodename.partition(".")[0], 0, -1)),
    ],
)
def test_the_context_is_slurms_environment(
    env: dict[str, str], expected: tuple[str, int, int]
) -> None:
    found = context("prolog", {**env, "PATH": "/bin", "SECRET": "x"})
    assert (found.node, found.job, found.uid) == expected
    assert dict(found.env) == env and found.where == "prolog"


def test_the_name_that_a_person_gives_wins() -> None:
    assert context("deep", {"SLURMD_NODENAME": "n7"}, "n8").node == "n8"


def test_files_directories_and_links(system: LiveSystem, tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"one\xff\n")
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").chmod(0o640)
    assert system.read(str(tmp_path / "a")) == "one\ufffd\n"
    assert system.names(str(tmp_path)) == ["a", "b"]
    assert system.link(str(tmp_path / "a")) == "b"
    entry = system.entry(str(tmp_path / "b"))
    assert (entry.kind, entry.mode, entry.uid, entry.size) == ("file", 0o640, os.geteuid(), 5)
    assert system.entry(str(tmp_path / "a")).kind == "link"
    assert system.entry("/dev/null").kind == "char" and system.entry("/proc").kind == "dir"


def test_a_file_is_read_up_to_the_limit(system: LiveSystem, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * (READ_LIMIT + 100))
    assert len(system.read(str(tmp_path / "big"))) == READ_LIMIT


@pytest.mark.parametrize(
    ("question", "path", "code"),
    [
        ("read", "/nowhere/file", errno.ENOENT),
        ("read", "/proc", errno.EISDIR),
        ("names", "/etc/passwd", errno.ENOTDIR),
        ("link", "/etc/passwd", errno.EINVAL),
        ("entry", "/nowhere", errno.ENOENT),
        ("disk", "/nowhere", errno.ENOENT),
    ],
)
def test_what_cannot_be_read_raises_its_errno(
    system: LiveSystem, question: str, path: str, code: int
) -> None:
    with pytest.raises(OSError) as raised:
        getattr(system, question)(path)
    assert raised.value.errno == code


def test_a_fifo_without_a_writer_does_not_hang_the_reader(
    system: LiveSystem, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert system.read(str(tmp_path / "fifo")) == ""


def test_the_disk_is_as_df_shows_it(system: LiveSystem) -> None:
    found = system.disk("/")
    told = os.statvfs("/")
    assert found.total == told.f_blocks * told.f_frsize and 0 <= found.free <= found.total
    assert not found.read_only and system.disk("/proc").total == 0


def test_time_stands_still_during_one_look(system: LiveSystem) -> None:
    now, uptime = system.now(), system.uptime()
    assert abs(now - time.time()) < 60 and uptime > 0
    limit = time.monotonic() + 1
    while time.time() == now and time.monotonic() < limit:
        pass
    assert (system.now(), system.uptime()) == (now, uptime)
    assert len(system.boot_id()) == 36


def test_the_clock_offset_is_a_number_or_nobody_keeps_it(system: LiveSystem) -> None:
    offset = system.clock_offset()
    assert offset is None or 0 <= offset < 1e6


def test_without_a_record_the_fleet_says_nothing(system: LiveSystem, tmp_path: Path) -> None:
    assert system.fleet() == {}
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool/fleet.json").write_text(json.dumps({"driver": ["1"]}))
    assert system.fleet() == {"driver": ["1"]}


@pytest.mark.parametrize("text", ["[]", "{", "\xff", "[" * 100_000])
def test_a_fleet_record_that_is_none_is_an_error(
    system: LiveSystem, tmp_path: Path, text: str
) -> None:
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool/fleet.json").write_text(text, encoding="latin-1")
    with pytest.raises(OSError):
        system.fleet()


def test_a_fleet_record_that_others_can_write_is_not_read(
    system: LiveSystem, tmp_path: Path
) -> None:
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool/fleet.json").write_text("{}")
    (tmp_path / "spool/fleet.json").chmod(0o666)
    with pytest.raises(PermissionError):
        system.fleet()


# Commands.


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo out; echo err >&2; exit 3", (3, "out\n", "err\n")),
        ("kill -9 $$", (-9, "", "")),
        ("cat; echo ended", (0, "ended\n", "")),  # no standard input
        ("echo ${SECRET-none} $LC_ALL", (0, "none C\n", "")),
        ("sleep 60 & echo ended", (0, "ended\n", "")),  # it holds the streams open
    ],
)
def test_a_command(
    script: str, expected: tuple[int, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "x")
    begin = time.monotonic()
    assert run(["/bin/sh", "-c", script], LONG_S) == expected
    assert time.monotonic() - begin < LONG_S / 2


def test_a_command_that_says_much_is_cut() -> None:
    size = 3 * probe._OUTPUT_LIMIT
    output = run(["/bin/sh", "-c", f"head -c {size} /dev/zero"], LONG_S)
    assert output.code == 0 and len(output.out) == probe._OUTPUT_LIMIT


@pytest.mark.parametrize("argv", [["/nowhere/program"], ["sh", "-c", "true"], []])
def test_a_command_that_is_not_there(argv: list[str]) -> None:
    with pytest.raises(FileNotFoundError):
        run(argv, LONG_S)


def test_a_command_ends_at_its_deadline_with_all_it_started(tmp_path: Path) -> None:
    script = f"sleep 3600 & echo $! > {tmp_path}/pid; wait"
    with pytest.raises(TimeoutError, match="within 3 s"):
        run(["/bin/sh", "-c", script], 3.0)
    pid = int((tmp_path / "pid").read_text())
    until(lambda: _gone(pid), "the end of what the command started", 5)


def _gone(pid: int) -> bool:
    try:
        child.start_time(pid)
    except OSError:
        return True
    return False


# Probes.


def test_a_probe_proves_and_leaves_nothing(tmp_path: Path) -> None:
    probe.probe(str(tmp_path), True, LONG_S)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "write", "code", "step"),
    [
        ("/nowhere", False, errno.ENOENT, "stat"),
        ("/etc/passwd", False, errno.ENOTDIR, "list"),
        ("/proc", True, errno.ENOENT, "write"),
    ],
)
def test_a_probe_says_what_failed(path: str, write: bool, code: int, step: str) -> None:
    with pytest.raises(OSError, match=step) as raised:
        probe.probe(path, write, LONG_S)
    assert raised.value.errno == code and raised.value.filename == path


def _hangs(fd: int, path: str, write: bool) -> None:
    time.sleep(3600)


def test_a_probe_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(probe, "_probe", _hangs)
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"within 3 s, state S"):
        probe.probe(str(tmp_path), False, 3.0)
    assert time.monotonic() - begin < 20


def test_a_probe_that_is_left_behind_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stuck = Stuck(str(tmp_path / "stuck"))
    pids: list[int] = []

    def stop(self: child.Child, grace_s: float = 0.05) -> bool:
        pids.append(self.pid)
        return False

    with monkeypatch.context() as held:
        held.setattr(probe, "_probe", _hangs)
        held.setattr(child.Child, "stop", stop)
        with pytest.raises(TimeoutError):
            probe.probe("/tmp", False, 0.5, stuck)
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=f"process {pids[0]} still hangs"):
        probe.probe("/tmp", False, LONG_S, stuck)
    assert time.monotonic() - begin < 5
    probe.probe(str(tmp_path), False, LONG_S, stuck)  # another path is another matter
    os.kill(pids[0], 9)
    os.waitpid(pids[0], 0)
    probe.probe("/tmp", False, LONG_S, stuck)
    assert not list((tmp_path / "stuck").iterdir())


def test_where_nothing_can_be_written_nothing_is_remembered(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o700)
    (tmp_path / "open").chmod(0o777)
    for directory in (tmp_path / "open", tmp_path / "a/b", "/proc/robust-slurm"):
        stuck = Stuck(str(directory))
        stuck.remember("key", os.getpid(), "hangs")
        assert stuck.still("key") == ""


def test_what_is_remembered_is_roots_alone(tmp_path: Path) -> None:
    stuck = Stuck(str(tmp_path / "stuck"))
    stuck.remember("probe /a b", os.getpid(), "no answer")
    (file,) = (tmp_path / "stuck").iterdir()
    assert not stat.S_IMODE(file.stat().st_mode) & 0o022
    assert stuck.still("probe /a b") == f"no answer (process {os.getpid()} still hangs)"
    assert stuck.still("probe /a_b") == ""
    if os.geteuid() == 0:
        os.chown(file, NOBODY, NOBODY)
        assert stuck.still("probe /a b") == ""
