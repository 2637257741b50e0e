"""The jobs' directories as SlurmUser meets them: links, other users' files, made-up plans."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from health.controller import records
from robust_slurm.state_dir.requeue_plan import LIMIT, NAME, RequeuePlan, plan_from

ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not ROOT, reason="only root can give files to other users")
UID, OTHER = (20001, 20002) if ROOT else (os.geteuid(), os.geteuid())
PLAN = RequeuePlan(1, ("n2",), 2, 0.0)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs").chmod(0o1777)
    return tmp_path


@pytest.fixture
def jobs(state: Path) -> Iterator[int]:
    with records.opened(str(state)) as found:
        yield found


def used(state: Path, name: str = "12", uid: int = UID) -> Path:
    own = state / "jobs" / name
    (own / records.USED).mkdir(parents=True)
    keep(own / NAME, json.dumps(PLAN.as_record()), uid)
    if ROOT:
        os.chown(own, uid, uid)
    return own


def keep(path: Path, text: str, uid: int = UID) -> None:
    path.unlink(missing_ok=True)
    path.write_text(text)
    if ROOT:
        os.chown(path, uid, uid)


def test_records_of_robust_srun(state: Path, jobs: int) -> None:
    assert not records.has_run(jobs, 12, UID) and records.plan_of(jobs, 12, UID) is None
    own = used(state)
    assert records.has_run(jobs, 12, UID) and records.plan_of(jobs, 12, UID) == PLAN
    (own / NAME).unlink()
    assert records.plan_of(jobs, 12, UID) is None
    (own / records.USED).rmdir()
    assert not records.has_run(jobs, 12, UID), "an empty directory is no run of robust-srun"


@needs_root
def test_what_another_user_has_made_is_passed_by(state: Path, jobs: int) -> None:
    used(state, uid=OTHER)
    assert not records.has_run(jobs, 12, UID) and records.plan_of(jobs, 12, UID) is None
    used(state, f"12.{UID}.1")
    assert records.has_run(jobs, 12, UID) and records.plan_of(jobs, 12, UID) == PLAN


def link(own: Path) -> None:
    elsewhere = own.with_name("elsewhere")
    own.rename(elsewhere)
    own.symlink_to(elsewhere)


def a_file(own: Path) -> None:
    own.rename(own.with_name("elsewhere"))
    own.write_text("")


@pytest.mark.parametrize("trick", [link, a_file])
def test_no_directory_is_no_run(state: Path, jobs: int, trick: Callable[[Path], None]) -> None:
    trick(used(state))
    assert not records.has_run(jobs, 12, UID) and records.plan_of(jobs, 12, UID) is None


@pytest.mark.parametrize(
    "trick",
    [
        lambda path: path.symlink_to("/etc/hostname"),
        lambda path: os.mkfifo(path),
        lambda path: path.mkdir(),
        lambda path: keep(path, "x" * (LIMIT + 1)),
        lambda path: keep(path, ""),
        lambda path: keep(path, "[" * 100_000),
        lambda path: keep(path, '{"v": 2}'),
    ],
)
def test_a_plan_that_is_none_is_an_error(
    state: Path, jobs: int, trick: Callable[[Path], None]
) -> None:
    path = used(state) / NAME
    path.unlink()
    trick(path)
    if ROOT and not path.is_symlink():
        os.chown(path, UID, UID)
    with pytest.raises((OSError, ValueError)):
        records.plan_of(jobs, 12, UID)


@needs_root
def test_a_plan_of_another_user_is_an_error(state: Path, jobs: int) -> None:
    keep(used(state) / NAME, json.dumps(PLAN.as_record()), OTHER)
    with pytest.raises(ValueError, match="job's user"):
        records.plan_of(jobs, 12, UID)


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2},
        {"restarts": True},
        {"restarts": -1},
        {"restarts": 1.5},
        {"nodes": -1},
        {"nodes": "2"},
        {"exclude": "n1"},
        {"exclude": [1]},
        {"exclude": ["x" * 65]},
        {"exclude": ["n1"] * 20_001},
        {"exclude": None},
        {"not_before": "now"},
        {"not_before": float("nan")},
        {"not_before": float("inf")},
        {"not_before": -1},
        {"not_before": True},
    ],
)
def test_plan_from_refuses(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"restarts or|not_before is|exclude is|no plan"):
        plan_from(json.dumps(PLAN.as_record() | change).encode())


def test_plan_there_and_back() -> None:
    plan = RequeuePlan(3, ("n1", "n[7"), 4, 1_800_000_000.0)
    assert plan_from(json.dumps(plan.as_record()).encode()) == plan
    assert plan_from(json.dumps(plan.as_record() | {"not_before": 1.2}).encode()).not_before == 2


# ---- directories for users


@needs_root
def test_jobs_where_users_may_write_is_left_to_them(state: Path, jobs: int) -> None:
    assert records.make(jobs, 12, UID, UID) == ""
    records.remove_unused(jobs, 12, UID)
    assert list((state / "jobs").iterdir()) == []


@needs_root
def test_a_directory_for_its_user_and_gone_when_unused(state: Path) -> None:
    (state / "jobs").chmod(0o755)
    with records.opened(str(state)) as jobs:
        assert records.make(jobs, 12, UID, UID) == "12"
        info = (state / "jobs" / "12").stat()
        assert (info.st_uid, info.st_gid, info.st_mode & 0o7777) == (UID, UID, 0o755)
        assert records.make(jobs, 12, UID, UID) == "12", "a requeue"
        records.remove_unused(jobs, 12, UID)
        assert list((state / "jobs").iterdir()) == []
        records.make(jobs, 12, UID, UID)
        (state / "jobs" / "12" / records.USED).mkdir()
        records.remove_unused(jobs, 12, UID)
        assert (state / "jobs" / "12" / records.USED).is_dir()


@needs_root
@pytest.mark.parametrize("name", ["13", f"13.{UID}.1"])
def test_an_old_directory_of_another_user_stays_his(state: Path, name: str) -> None:
    """Slurm counts from 1 again where its state was lost."""
    (state / "jobs").chmod(0o755)
    for taken in ("13", name):
        (state / "jobs" / taken).mkdir(exist_ok=True)
        os.chown(state / "jobs" / taken, OTHER, OTHER)
    with records.opened(str(state)) as jobs:
        made = records.make(jobs, 13, UID, UID)
        records.remove_unused(jobs, 13, UID)
    assert made == f"13.{UID}.{1 if name == '13' else 2}"
    assert (state / "jobs" / name).stat().st_uid == OTHER


@needs_root
def test_roots_records_are_given_to_nobody(state: Path) -> None:
    (state / "jobs").chmod(0o755)
    (state / "jobs" / "14").mkdir(mode=0o755)
    (state / "jobs" / "15" / "x").mkdir(parents=True)
    (state / "jobs" / "15").chmod(0o700)
    (state / "jobs" / "16").symlink_to("/etc")
    with records.opened(str(state)) as jobs:
        made = [records.make(jobs, number, UID, UID) for number in (14, 15, 16)]
    assert made == [f"{number}.{UID}.1" for number in (14, 15, 16)]
    assert all((state / "jobs" / name).stat().st_uid == 0 for name in ("14", "15", "16"))


@needs_root
def test_a_state_directory_of_a_user_is_not_used(state: Path) -> None:
    os.chown(state / "jobs", OTHER, OTHER)
    with pytest.raises(OSError, match="belongs to uid"), records.opened(str(state)):
        pass
