"""The doctor's words on the site: release, partitions, GPUs, state directory, files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from slurm_configs import ETC

from health.admin import show_config
from health.admin.doctor import site_rules, state_dir
from health.admin.doctor.site_rules import Installed, NodeGpus, StateDir
from health.admin.install import Present
from health.admin.trust import Hole
from health.node import mountinfo


def test_release() -> None:
    assert site_rules.of_release((22, 5), "22.05.8").level == "ok"
    assert site_rules.of_release((21, 8), "21.08.1").level == "advice"
    assert "22.05 to 26.05" in site_rules.of_release(None, "").what


@pytest.mark.parametrize(
    ("version", "fixed"),
    [
        ("24.11.5", "24.11.6"),
        ("24.11.6", ""),
        ("26.05.0", "26.05.4"),
        ("26.05.3-rc1", "26.05.4"),
        ("26.05.4", ""),
        ("26.05.12", ""),
        ("22.05.8", ""),
        ("25.11.2", ""),
        ("26.05", ""),
        ("", ""),
    ],
)
def test_a_requeue_that_may_crash_slurmctld(version: str, fixed: str) -> None:
    found = site_rules.of_crashes(version)
    assert [remark.level for remark in found] == (["advice"] if fixed else [])
    assert all(f"update Slurm to {fixed} or later" in remark.what for remark in found)
    assert show_config.release({"SLURM_VERSION": "26.05.5"}) == (26, 5)


PARTITIONS: dict[str, tuple[Sequence[str], str]] = {
    "train": (["n1", "n2"], "UP"),
    "standby": (["s1"], "UP"),
    "empty": ([], "UP"),
    "down": (["s2"], "DOWN"),
}


@pytest.mark.parametrize(
    ("name", "configured", "level"),
    [
        ("standby", True, "ok"),
        ("", True, "ok"),
        ("spare", False, "advice"),
        ("spare", True, "fix"),
        ("empty", True, "fix"),
        ("down", True, "fix"),
        ("down", False, "advice"),
    ],
)
def test_standby_partition(name: str, configured: bool, level: str) -> None:
    found = site_rules.of_standby(name, configured, PARTITIONS)
    assert found.level == level
    assert bool(found.line) is (level != "ok")


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([("n1", "gpu:h100:8", -1), ("n2", None, -1)], ["ok"]),
        ([("n1", "gpu:h100:8(S:0-1)", 8)], ["ok"]),
        ([("n1", "gpu:h100:4", 8), ("n2", "gpu:h100:4", 8), ("n3", "gpu:8", 8)], ["fix n[1-2]"]),
        ([("n1", None, 8)], ["fix n1"]),
        ([("n1", None, -1), ("n2", "nic:2", -1)], ["advice"]),
        ([("n1", "gpu:a100_1g.5gb:7", 1)], ["ok"]),  # slices of a GPU
    ],
)
def test_gpus(nodes: list[tuple[str, str | None, int]], expected: list[str]) -> None:
    found = site_rules.of_gpus([NodeGpus(*node) for node in nodes], "robust.toml")
    assert [
        f"{r.level}{r.subject.removeprefix('GPUs').removeprefix(' of')}" for r in found
    ] == expected


DIR = Present("dir", mode=0o755)
OPEN_DIR = Present("dir", mode=0o1777)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (StateDir(""), [("advice", 'state_dir = "/shared/robust-slurm"')]),
        (StateDir("/s", "", "nfs4", True, DIR, OPEN_DIR), [("ok", "")]),
        (StateDir("/s", "", "xfs", False, DIR, OPEN_DIR), [("advice", "")]),
        (
            StateDir("/s", "", "nfs4", True),
            [
                ("fix", "install -d -o root -g root -m 0755 /s/nodes"),
                ("fix", "install -d -o root -g root -m 1777 /s/jobs"),
            ],
        ),
        (
            StateDir("/s", "", "nfs4", True, DIR._replace(mode=0o777), OPEN_DIR._replace(uid=9)),
            [
                ("fix", "install -d -o root -g root -m 0755 /s/nodes"),
                ("fix", "install -d -o root -g root -m 1777 /s/jobs"),
            ],
        ),
        (StateDir("/s", "no answer in 5 s"), [("fix", "install -d -m 0755 /s")]),
    ],
)
def test_state_dir(state: StateDir, expected: list[tuple[str, str]]) -> None:
    found = site_rules.of_state_dir(state, "robust.toml")
    assert [(remark.level, remark.line) for remark in found] == expected


def test_nodes_that_were_not_drained_are_named() -> None:
    hung, gone = "robust:node:mount-hung:/x:none:job0", "robust:node:xid-79:gpu0:reboot:job0"
    rows = [
        [1.0, "n2", "mounts", hung, "5 other nodes", False],
        [2.0, "n2", "hard", gone, "20 other nodes stand", True],
        [1.5, "n1", "mounts", hung, "5 other nodes", False],
    ]
    first, second = site_rules.of_refused(rows)
    assert (first.subject, second.subject) == ("n1 was NOT drained", "n2 was NOT drained")
    assert f"for {gone}: 20 other nodes stand; the node accepts jobs" in second.what
    assert second.level == "advice" and "nodename=n2" in second.line
    assert site_rules.of_refused([]) == []


def test_the_state_directory_itself(tmp_path: Path) -> None:
    assert state_dir.inspect("") == StateDir("")
    assert "No such file" in state_dir.inspect(str(tmp_path / "nope")).problem
    (tmp_path / "nodes").mkdir(mode=0o755)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs").chmod(0o1777)
    found = state_dir.inspect(str(tmp_path))
    assert found.problem == "" and found.fstype
    assert found.nodes == Present("dir", "", 0o755, os.getuid())
    assert found.jobs.mode == 0o1777


def test_the_state_directory_is_prepared(tmp_path: Path) -> None:
    assert state_dir.make("") == []
    assert "No such file" in state_dir.make(str(tmp_path / "not-mounted"))[0]
    made = [f"made {tmp_path}/nodes", f"made {tmp_path}/jobs"]
    assert state_dir.make(str(tmp_path))[:2] == made
    assert (tmp_path / "jobs").stat().st_mode & 0o7777 == 0o1777
    (tmp_path / "nodes").chmod(0o777)
    (again,) = [line for line in state_dir.make(str(tmp_path)) if "/nodes" in line]
    assert "mode 0777" in again and "install -d" in again


PROLOG = f"{ETC}/prolog"
FILE = Present("file", "x", 0o755)


@pytest.mark.parametrize(
    ("file", "level", "line"),
    [
        (Installed(PROLOG, FILE, False), "ok", ""),
        (Installed(PROLOG, Present("none"), True), "fix", "robust-admin install"),
        (Installed(PROLOG, FILE._replace(mode=0o644), False), "fix", f"chmod 0755 {PROLOG}"),
        (
            Installed(PROLOG, FILE, False, Hole("/etc", "belongs to uid 7")),
            "fix",
            "chown -h root:root /etc && chmod go-w /etc",
        ),
        (Installed(PROLOG, FILE, True), "advice", "robust-admin install"),
        # an edited robust.toml is as it should be
        (Installed(f"{ETC}/robust.toml", FILE, True), "ok", ""),
        (Installed(f"{ETC}/robust.toml.new", Present("none"), True), "ok", ""),
    ],
)
def test_files(file: Installed, level: str, line: str) -> None:
    (found,) = site_rules.of_files(ETC, True, [file], ["prolog"], True)
    assert (found.level, found.line) == (level, line)


def test_nothing_installed() -> None:
    (found,) = site_rules.of_files("/e", False, [], ["prolog"], True)
    assert (found.level, found.line) == ("fix", "robust-admin install --etc /e")
    (found,) = site_rules.of_files(ETC, False, [], ["prolog"], False)
    assert found.level == "advice", "a login node needs none"
    assert found.line == "robust-admin install --nodes <nodes> --ssh --dry-run"


@pytest.mark.parametrize(
    ("kind", "remote"),
    [("nfs4", True), ("virtiofs", True), ("pvfs2", True), ("fuse.cvmfs2", True), ("xfs", False)],
)
def test_a_state_directory_that_all_nodes_see(
    tmp_path: Path, kind: str, remote: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = mountinfo.visible(f"22 1 0:26 / / rw - {kind} server:/ rw\n")["/"]
    monkeypatch.setattr(mountinfo, "holding", lambda *_: mount)
    found = state_dir.inspect(str(tmp_path))
    assert (found.fstype, found.remote) == (kind, remote)
