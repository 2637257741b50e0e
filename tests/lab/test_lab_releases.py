"""Roots of other releases of Slurm: where they come from, when they are built, what they cover."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lab import host
from lab.errors import LabError
from lab.slurm import newest, pyslurm_root, releases
from lab.spec import LabSpec, cgroup_conf

SUITES = {"bookworm", "trixie", "stable"}
Fill = Callable[[str, Path, Path], None]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, on a machine of root's with Slurm 22.05."""
    monkeypatch.setattr(releases, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(releases, "host_release", lambda: "22.05")
    monkeypatch.setattr(releases.os, "geteuid", lambda: 0)
    monkeypatch.setattr(releases.shutil, "which", lambda name, path="": f"/usr/bin/{name}")
    return tmp_path / "cache"


def fill(release: str, work: Path, final: Path) -> None:
    """Make a root without a network."""
    (work / "root").mkdir(parents=True)
    (work / "root" / "release").write_text(release)


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("http://a/debian/ bookworm main\n", "http://a/debian/"),
        ("http://a/debian/ stable main\nhttp://b/ trixie main\n", "http://a/debian/"),
        ("http://s/ bookworm-security main\nhttp://a/ trixie main", "http://a/"),
        ("http://n/ nodistro main\nhttp://a/ trixie contrib\nhttp://b/ trixie main", "http://b/"),
        ("http://s/ bookworm-security main", ""),
        ("something else entirely, of an old apt", ""),
        ("", ""),
    ],
)
def test_the_mirror_is_the_one_that_apt_uses(lines: str, found: str) -> None:
    assert releases.pick_mirror(lines, SUITES) == found


def test_the_hosts_own_release_needs_no_root(cache: Path) -> None:
    for asked in ("", "22.05"):
        assert releases.find(asked) == releases.Release("22.05", None)
    assert not cache.exists()


@pytest.mark.parametrize("asked", ["23.11", "26.5", "26.05.5", "newest", "../x"])
def test_an_unknown_release_is_refused(cache: Path, asked: str) -> None:
    with pytest.raises(LabError, match=r"choose from 22\.05, 24\.11, 26\.05 \(here: 22\.05\)"):
        releases.find(asked)
    assert asked in releases.why_not(asked) and not cache.exists()


def test_the_environment_names_the_release_of_all_labs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(releases.VARIABLE, raising=False)
    assert releases.asked() == "" and releases.asked("24.11") == "24.11"
    monkeypatch.setenv(releases.VARIABLE, "26.05")
    assert releases.asked() == "26.05" and releases.asked("24.11") == "24.11"


def test_a_root_is_built_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []

    def count(release: str, work: Path, final: Path) -> None:
        built.append(release)
        fill(release, work, final)

    monkeypatch.setattr(releases, "_fill", count)
    threads = [threading.Thread(target=releases.build, args=("24.11",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    root = releases.find("24.11").root
    assert root and (root / "release").read_text() == "24.11" and built == ["24.11"]
    assert {path.name for path in cache.iterdir()} == {"24.11.lock", root.name}


def test_the_demo_takes_the_newest_that_can_be_had_soon(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(releases.VARIABLE, raising=False)
    looked: list[str] = []
    said: list[str] = []
    monkeypatch.setattr(newest, "_look", looked.append)
    monkeypatch.setattr(releases, "_fill", fill)
    monkeypatch.setattr(newest, "_build", releases.build)
    releases.root_of("24.11").mkdir(parents=True)
    (cache / f".{releases.root_of('26.05').name}" / "root").mkdir(parents=True)  # a build cut off
    assert newest.newest_here() == "24.11"

    for trouble in (LabError("no way to the archive"), OSError("No space left on device")):

        def away(_release: str, trouble: Exception = trouble) -> None:
            raise trouble

        with monkeypatch.context() as patch:
            patch.setattr(newest, "_look", away)
            assert newest.newest(said.append) == "24.11"
        line = said.pop()
        assert f"26.05 cannot be built here now, so this runs on 24.11: {trouble}" in line
    for _ in range(2):  # the second time it is there
        assert newest.newest(said.append) == "26.05"
    assert looked == ["26.05"] and not said


def test_a_build_for_the_demo_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newest, "_BUILD", "import time; time.sleep(60)")
    monkeypatch.setattr(newest, "_BUILD_S", 0.1)
    with pytest.raises(LabError, match="longer than 0 s"):
        newest._build("26.05")


def test_what_a_killed_build_left_is_no_root(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off(release: str, work: Path, final: Path) -> None:
        fill(release, work, final)
        raise LabError("no network")

    monkeypatch.setattr(releases, "_fill", cut_off)
    assert releases.why_not("26.05") == "no network"
    assert [path.name for path in cache.iterdir()] == ["26.05.lock"]
    (cache / f".26.05-{releases._RECIPE}" / "root").mkdir(parents=True)  # of a SIGKILL
    monkeypatch.setattr(releases, "_fill", fill)
    assert releases.why_not("26.05") == ""


def test_a_full_disk_is_a_reason(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(release: str, work: Path, final: Path) -> None:
        fill(release, work, final)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(releases, "_fill", full)
    assert "No space left" in releases.why_not("26.05")
    assert [path.name for path in cache.iterdir()] == ["26.05.lock"]


def test_a_builder_of_pyslurm_leaves_anothers_work_alone(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, source = cache / "pyslurm", cache / "source"
    work = cache / f".{root.name}"
    work.mkdir(parents=True)
    source.touch()
    monkeypatch.setattr(pyslurm_root, "_run", None)  # to build would be an error
    with ThreadPoolExecutor() as pool:
        with releases._locked(cache / f"{root.name}.lock"):
            waits = pool.submit(pyslurm_root.build, root, source)
            with pytest.raises(TimeoutError):
                waits.result(0.2)
            assert work.is_dir()
            work.rename(root)
        waits.result(20)
    pyslurm_root.build(root, None)


@pytest.mark.parametrize("source", [None, Path("/nonexistent/pyslurm.tar.gz")])
def test_pyslurm_cannot_be_built(cache: Path, source: Path | None) -> None:
    with pytest.raises(LabError, match="name the source of pyslurm"):
        pyslurm_root.build(cache / "pyslurm", source)


def test_the_archive_is_checked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No package without a signature, and no archive out of reach that is only a warning."""
    monkeypatch.setattr(releases, "_run", lambda *_: "")
    cache.mkdir()
    releases._prepare(cache / "suite", "http://a/debian/", "trixie")
    text = (cache / "suite" / "apt.conf").read_text()
    assert 'Acquire::AllowInsecureRepositories "false";' in text
    assert 'APT::Get::AllowUnauthenticated "false";' in text
    assert 'APT::Update::Error-Mode "any";' in text
    assert "trusted" not in (cache / "suite" / "sources.list").read_text()


def test_the_c_library_of_an_old_suite(tmp_path: Path) -> None:
    """The library lies in /lib, and is looked for in /usr/lib."""
    for name in ("lib/x/ld-linux.so.2", "usr/lib/x/libm.so"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "lib/x/libc.so").symlink_to("ld-linux.so.2")
    releases._merge(tmp_path)
    releases._merge(tmp_path)
    found = sorted(path.name for path in (tmp_path / "usr/lib/x").iterdir())
    assert found == ["ld-linux.so.2", "libc.so", "libm.so"]
    assert not (tmp_path / "lib").exists() and (tmp_path / "usr/lib/x/libc.so").is_symlink()


def test_a_root_that_cannot_be_built_here(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases.shutil, "which", lambda name, path="": None)
    assert "built by apt-get, on Debian" in releases.why_not("24.11")
    monkeypatch.setattr(releases.os, "geteuid", lambda: 1000)
    assert "by root only" in releases.why_not("24.11")


@pytest.mark.parametrize("names", [{}, {"slurmd": "slurmd-wlm", "slurmctld": "slurmctld-wlm"}])
def test_a_roots_programs(tmp_path: Path, names: dict[str, str]) -> None:
    """Daemons lie there under their own names, or under those of Debian's alternatives."""
    for place, program in (("sbin", "slurmd"), ("sbin", "slurmctld"), ("bin", "srun")):
        path = tmp_path / "usr" / place / names.get(program, program)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "usr/bin/squeue").symlink_to("srun")  # a link would cover its target's place
    assert {path: found.name for path, found in releases.programs_of(tmp_path).items()} == {
        "/usr/sbin/slurmctld": names.get("slurmctld", "slurmctld"),
        "/usr/sbin/slurmd": names.get("slurmd", "slurmd"),
        "/usr/bin/srun": "srun",
    }
    with pytest.raises(LabError, match="no Slurm plugins"):
        releases.overlays(tmp_path)


@pytest.mark.parametrize(
    ("release", "plugin"), [("22.05", "cgroup/v1"), ("24.11", "disabled"), ("26.05", "disabled")]
)
def test_no_cgroups_by_the_releases_own_word(release: str, plugin: str) -> None:
    assert cgroup_conf(LabSpec(name="x", slurm=release)) == f"CgroupPlugin={plugin}\n"


def test_a_lab_names_the_release_that_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown one is refused before anything is made."""
    monkeypatch.setattr(host, "check_host", lambda: None)
    with pytest.raises(LabError, match="choose from"):
        host.bring_up(LabSpec(name="never", slurm="1.0"))
    assert not (host.ROOT / "never").exists()
