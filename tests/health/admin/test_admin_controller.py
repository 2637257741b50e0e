"""The controller hooks: the script that is installed, slurm.conf's lines, the doctor's remarks."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from waiting import until

from health.admin import cli, controller, render
from health.admin.doctor import controller_rules, site_rules
from health.admin.doctor import run as doctor
from health.admin.install import Present

OLD, NEW = {"SLURM_VERSION": "22.05.8"}, {"SLURM_VERSION": "24.05.1"}
HOOK = "/e/controller/hook"


@pytest.mark.parametrize(
    ("config", "runs", "lines"),
    [
        ({}, {}, [f"slurm.conf: EpilogSlurmctld={HOOK}", f"slurm.conf: PrologSlurmctld={HOOK}"]),
        ({"EpilogSlurmctld": HOOK}, {}, [f"slurm.conf: PrologSlurmctld={HOOK}"]),
        (
            {"EpilogSlurmctld[0]": "/s/e", "EpilogSlurmctld[1]": HOOK, "PrologSlurmctld": HOOK},
            {},
            [],
        ),
        # a script of the site's own stays: one only before 24.05, several from then on
        (
            OLD | {"EpilogSlurmctld": "/s/e", "PrologSlurmctld": HOOK},
            {},
            [f"/s/e, on top: {HOOK}"],
        ),
        (
            NEW | {"EpilogSlurmctld[0]": "/s/e", "PrologSlurmctld": HOOK},
            {},
            [f"slurm.conf: EpilogSlurmctld={HOOK}"],
        ),
        (
            OLD | {"EpilogSlurmctld": "/s/e", "PrologSlurmctld": HOOK},
            {"EpilogSlurmctld": ["/s/e", HOOK]},
            [],
        ),
        (
            {"EpilogSlurmctld": "(null)", "PrologSlurmctld": HOOK},
            {},
            [f"slurm.conf: EpilogSlurmctld={HOOK}"],
        ),
    ],
)
def test_lines_of_slurm_conf(
    config: Mapping[str, str], runs: Mapping[str, Sequence[str]], lines: list[str]
) -> None:
    found = controller.site_lines("/e", config, runs)
    assert [f"{line.where}: {line.line}" for line in found] == lines


@pytest.mark.parametrize(
    ("found", "own"),
    [
        ("", ""),
        ("/etc/slurm/slurm.conf", ""),
        ("/run/slurm/conf/slurm.conf", ""),
        ("/opt/slurm/etc/slurm.conf", "/opt/slurm/etc/slurm.conf"),
    ],
)
def test_own_conf(found: str, own: str) -> None:
    assert controller.own_conf({"SLURM_CONF": found} if found else {}) == own


def stub(top: Path, python: str = sys.executable, body: str = "") -> Path:
    """Install a hook below ``top`` whose module leaves what it sees in ``seen``."""
    room = top / "lib" / "health" / "controller"
    room.mkdir(parents=True)
    (top / "lib" / "health" / "__init__.py").touch()
    (room / "__init__.py").touch()
    (room / "hook.py").write_text(
        "import os, time\n"
        "def main():\n"
        f"    {body or 'pass'}\n"
        f"    with open({str(top / 'new')!r}, 'w') as file:\n"
        "        for key in ('SLURM_CONF', 'ROBUST_SITE_CONFIG', 'SLURM_JOB_ID'):\n"
        "            print(os.environ.get(key, ''), file=file)\n"
        f"    os.rename({str(top / 'new')!r}, {str(top / 'seen')!r})\n"
    )
    prefix = render.Prefix(python, (str(top / "lib"),))
    [file] = controller.files(str(top / "etc"), prefix, {"SLURM_CONF": "/opt/s x/slurm.conf"})
    path = top / "hook"
    path.write_text(file.text)
    path.chmod(file.mode)
    return path


def called(path: Path, **env: str) -> float:
    """Run the hook as slurmctld does: it waits for the output's end, then kills the group."""
    began = time.monotonic()
    process = subprocess.Popen(
        [str(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        process_group=0,
    )
    assert process.stdout is not None
    assert process.stdout.read() == b"" and process.wait(10) == 0
    took = time.monotonic() - began
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        pass
    return took


def test_the_hook_leaves_a_process_that_outlives_its_group(tmp_path: Path) -> None:
    path = stub(tmp_path, body="time.sleep(0.3)")
    called(path, SLURM_JOB_ID="12", PYTHONPATH="/nonexistent", LD_LIBRARY_PATH="")
    seen = tmp_path / "seen"
    until(seen.exists, "the process that was left behind", 20)
    conf, site, job = seen.read_text().splitlines()
    assert (conf, job) == ("/opt/s x/slurm.conf", "12")
    assert site == f"{tmp_path}/etc/robust.toml"


@pytest.mark.parametrize("python", ["/nonexistent/python3", "/etc/hostname"])
def test_slurmctld_goes_on_also_where_the_packages_are_away(tmp_path: Path, python: str) -> None:
    called(stub(tmp_path, python))
    assert not (tmp_path / "seen").exists()


# ---- the doctor

GOOD = {"EpilogSlurmctld": HOOK, "PrologSlurmctld": HOOK, "SlurmUser": "slurm(64030)"}


def remarks(
    monkeypatch: pytest.MonkeyPatch, there: Present, config: Mapping[str, str], host: bool = True
) -> list[str]:
    monkeypatch.setattr(controller_rules.install, "read_path", lambda _path: there)
    monkeypatch.setattr(controller_rules.install, "read_manifest", lambda _etc: {})
    monkeypatch.setattr(controller_rules.look, "hole", lambda _path: None)
    found = controller_rules.of_controller("/e", config, {}, host)
    return [f"{r.level} {r.subject}: {r.what}" for r in found]


def test_nobody_hears_of_hooks_that_nobody_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert remarks(monkeypatch, Present("none"), {}) == []
    assert remarks(monkeypatch, Present("none"), GOOD, host=False) == []


def test_remarks(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Present("file", "#!/bin/sh\n", 0o755, 0)
    assert remarks(monkeypatch, there, GOOD) == [f"ok {HOOK}: slurmctld runs it as slurm"]
    only = {"EpilogSlurmctld": HOOK}
    assert remarks(monkeypatch, there, only) == [f"ok {HOOK}: slurmctld runs it as SlurmUser"]
    [first, second] = remarks(monkeypatch, there, {})
    assert first.startswith("advice EpilogSlurmctld: is not named: starts requeued")
    assert second.startswith("advice PrologSlurmctld: is not named: refills")
    [gone] = remarks(monkeypatch, Present("none"), GOOD)
    assert gone.startswith(f"fix {HOOK}: is missing") and "back to the queue" in gone
    [gone] = remarks(monkeypatch, Present("none"), only)
    assert gone.startswith(f"fix {HOOK}: is missing") and "back to the queue" not in gone
    [found] = remarks(monkeypatch, there._replace(mode=0o700), GOOD)
    assert found == f"fix {HOOK}: SlurmUser cannot run it"


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"SlurmctldHost[0]": "head(10.0.0.1)", "SlurmctldHost[1]": "spare"}, True),
        ({"SlurmctldHost[0]": "other", "SlurmctldHost[1]": "head.cluster"}, True),
        ({"SlurmctldHost[0]": "header"}, False),
        ({}, False),
    ],
)
def test_is_host(config: Mapping[str, str], found: bool) -> None:
    assert controller_rules.is_host(config, "head") is found


@pytest.mark.parametrize(
    ("config", "closed"),
    [
        (GOOD, False),  # slurm cannot give a directory away
        (GOOD | {"SlurmUser": "root(0)"}, True),
        ({"EpilogSlurmctld": HOOK, "SlurmUser": "root(0)"}, False),
    ],
)
def test_jobs_may_be_closed_to_users_where_the_hook_makes_directories(
    config: Mapping[str, str], closed: bool
) -> None:
    assert controller_rules.makes_directories("/e", config, {}) is closed
    state = site_rules.StateDir(
        "/s", "", "nfs", True, Present("dir", mode=0o755), Present("dir", mode=0o755)
    )
    levels = {r.level for r in site_rules.of_state_dir(state, "t", closed)}
    assert levels == ({"ok"} if closed else {"fix"})


# ---- the command line


def test_uninstall_is_refused_while_slurmctld_runs_the_hook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(cli, "_targets", lambda _args: (cli._here, [""]))
    words = ["uninstall", "--controller", "--yes", "--etc", str(tmp_path)]
    running = {"PrologSlurmctld": f"{tmp_path}/controller/hook"}
    monkeypatch.setattr(doctor, "slurm_config", lambda: running)
    assert cli.main(words, io.StringIO()) == 1
    assert "still runs PrologSlurmctld" in capsys.readouterr().err
    monkeypatch.setattr(doctor, "slurm_config", dict)
    assert cli.main(words, io.StringIO()) == 1
    assert "PrologSlurmctld names jobs may go back" in capsys.readouterr().err
    monkeypatch.setattr(doctor, "slurm_config", lambda: OLD)
    assert cli.main(words, io.StringIO()) == 0


def test_plugin_and_controller_are_two_installs() -> None:
    assert cli.main(["install", "--plugin", "--controller"], io.StringIO()) == 2
