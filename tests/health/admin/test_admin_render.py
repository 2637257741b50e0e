"""The templates: stubs that start fast, a robust.toml that is read back, lines for slurm.conf."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from admin_prefix import REPOSITORY, make_prefix, packages_of, rooms_of

from health import settings
from health.admin import cli, render
from health.admin.doctor import rules
from health.admin.install import InstallError
from health.admin.want import SiteFacts
from health.check import Check, Condition
from health.checks import ALL
from lab.pages import check_table
from robust_slurm import config

PREFIX = render.Prefix("/opt/r/bin/python3", ("/opt/r/lib/site-packages", "/opt/r/x"))
SITE = render.Site(PREFIX, "/etc/r", "/etc/tmpfiles.d", "/var/lib/r")


def files(site: render.Site = SITE) -> dict[str, str]:
    return {file.path: file.text for file in render.node_files(site, "")}


# ---- stubs


def test_what_a_node_gets() -> None:
    found = render.node_files(SITE, "# x\n")
    assert [(file.path, oct(file.mode)) for file in found] == [
        ("/etc/r/prolog", "0o755"),
        ("/etc/r/epilog", "0o755"),
        ("/etc/r/healthcheck", "0o755"),
        ("/etc/r/robust.toml", "0o644"),
        ("/etc/tmpfiles.d/robust-slurm.conf", "0o644"),
    ]
    assert [file.path for file in found if file.settings] == ["/etc/r/robust.toml"]
    assert files()["/etc/tmpfiles.d/robust-slurm.conf"].endswith(
        "\nd /var/lib/r 0755 root root -\n"
    )
    assert not [path for path in files(SITE._replace(tmpfiles="")) if "tmpfiles" in path]


def stub(tmp_path: Path, module: str, site: render.Site) -> Path:
    """A stub as it is installed, and a package of that name which says how it was started."""
    name, _, inner = module.partition(".")
    package = tmp_path / "it's a dir" / name
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    (package / f"{inner}.py").write_text(
        "import os, sys\n"
        "def main(argv=None):\n"
        "    print(sorted(m for m in sys.modules if m in ('site', 'argparse', 'typing')))\n"
        "    print(os.environ['ROBUST_SITE_CONFIG'], argv, os.environ.get('PATH'))\n"
        "    return 2\n"
    )
    prefix = render.Prefix(sys.executable, (str(package.parent),))
    texts = files(site._replace(prefix=prefix))
    (wanted,) = [s.name for s in render.STUBS if s.module == module]
    path = tmp_path / wanted
    path.write_text(texts[f"/etc/r/{wanted}"])
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("module", "arguments"),
    [("prolog.cli", "None"), ("epilog.cli", "None"), ("health.sweep", "[]")],
)
def test_a_stub_as_slurmd_starts_it(tmp_path: Path, module: str, arguments: str) -> None:
    """No PATH, nothing of Python's own start-up, our settings; its exit code is the gate's."""
    (tmp_path / "prolog").mkdir()
    (tmp_path / "prolog" / "cli.py").write_text("raise SystemExit('from the current directory')\n")
    path = stub(tmp_path / "x", module, SITE)
    hostile = {"PYTHONPATH": str(tmp_path), "PYTHONSTARTUP": "/nope", "ROBUST_SITE_CONFIG": "/bad"}
    done = subprocess.run(
        [str(path)], env=hostile, cwd=tmp_path, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == f"[]\n/etc/r/robust.toml {arguments} None\n"


def test_the_gate_of_a_stub_can_be_ended_by_its_alarm(tmp_path: Path) -> None:
    """slurmd's threads block signals, and what they start inherits that."""
    path = stub(tmp_path, "health.sweep", SITE)
    (tmp_path / "it's a dir" / "health" / "sweep.py").write_text(
        "import signal\n"
        "def main(argv):\n"
        "    print(signal.SIGALRM in signal.pthread_sigmask(signal.SIG_BLOCK, []))\n"
        "    return 0\n"
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    try:
        assert started(path).stdout == "False\n"
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def started(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(path)], env={}, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("on_missing", "code", "then"),
    [("skip", 0, "stays in service, unchecked"), ("drain", 1, "is drained")],
)
def test_a_stub_whose_packages_are_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_missing: str, code: int, then: str
) -> None:
    """The shared file system is not mounted, or does not answer, on all nodes at once."""
    monkeypatch.setattr(render, "LOAD_S", 1)
    path = stub(tmp_path, "prolog.cli", SITE._replace(on_missing=on_missing))
    cli = tmp_path / "it's a dir" / "prolog" / "cli.py"
    cli.write_text("import time\ntime.sleep(600)\n")
    hung = started(path)
    cli.unlink()
    empty = started(path)
    path.write_text(path.read_text().replace(sys.executable, "/nonexistent/python3"))
    gone = started(path)
    for done, why in (
        (hung, "not loaded within 1 s"),
        (empty, "cannot be imported"),
        (gone, "/nonexistent/python3 is not there"),
    ):
        assert done.returncode == code, done.stderr
        assert why in done.stderr and then in done.stderr
    assert "prolog.cli" in empty.stderr


@pytest.mark.slow
@pytest.mark.parametrize("module", ["prolog.cli", "epilog.cli"])
@pytest.mark.parametrize(
    ("gate", "load_s", "why"),
    [
        ("import time; time.sleep(600)", 3, "not loaded within 3 s"),
        ("raise RuntimeError('cut off')", 60, "cannot be imported"),
    ],
)
def test_a_stub_whose_gate_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, gate: str, load_s: int, why: str
) -> None:
    """The imports of the module itself belong to loading it."""
    monkeypatch.setattr(render, "LOAD_S", load_s)
    path = stub(tmp_path, module, SITE._replace(on_missing="skip"))
    packages = tmp_path / "it's a dir"
    for name in (module.partition(".")[0], "health", "robust_slurm"):
        shutil.copytree(REPOSITORY / name, packages / name, dirs_exist_ok=True)
    (packages / "health" / "gate" / "gate.py").write_text(f"{gate}\n")
    done = started(path)
    assert done.returncode == 0 and why in done.stderr, done.stderr


def test_a_missing_package_never_fails_the_sweep(tmp_path: Path) -> None:
    path = stub(tmp_path, "health.sweep", SITE._replace(on_missing="drain"))
    (tmp_path / "it's a dir" / "health" / "sweep.py").unlink()
    assert started(path).returncode == 0


# ---- the prefix


def test_find_prefix(tmp_path: Path) -> None:
    prefix = make_prefix(tmp_path / "r")
    found = render.find_prefix(str(prefix))
    packages, rooms = packages_of(prefix), str(rooms_of(prefix))
    assert found[:2] == (f"{prefix}/bin/python3", (rooms, str(packages)))
    assert found.sites[0] == str(packages)
    (tmp_path / "other" / "x").mkdir(parents=True)
    (packages / "ClusterShell").rename(tmp_path / "other" / "ClusterShell")
    (packages / "rest.pth").write_text(f"{tmp_path}/other\n")
    again = render.find_prefix(str(prefix))
    assert again.dirs == (rooms, str(packages), f"{tmp_path}/other")


def bare(prefix: Path, program: str) -> str:
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "python3").write_text(f"#!/bin/sh\n{program}\n")
    (prefix / "bin" / "python3").chmod(0o755)
    return str(prefix)


def test_prefixes_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match="absolute path"):
        render.find_prefix("opt/r")
    with pytest.raises(InstallError, match=r"no bin/python3; make one: python3 -m venv"):
        render.find_prefix(str(tmp_path / "nope"))
    with pytest.raises(InstallError, match="is a script, and hides what it runs"):
        render.find_prefix(bare(tmp_path / "wrapper", f"touch {tmp_path}/ran"))
    assert not (tmp_path / "ran").exists()
    prefix = make_prefix(tmp_path / "r")
    shutil.rmtree(rooms_of(prefix) / "prolog")
    with pytest.raises(InstallError, match=r"has no prolog: .*pip install"):
        render.find_prefix(str(prefix))
    shutil.rmtree(packages_of(prefix) / "robust_slurm")
    (packages_of(prefix) / "rest.pth").unlink()
    with pytest.raises(InstallError, match=r"robust-slurm is not in .*pip install"):
        render.find_prefix(str(prefix))
    finder = packages_of(prefix) / "__editable__.robust_slurm-1.pth"
    finder.write_text(f"import os; open('{tmp_path}/ran', 'w')\n")
    with pytest.raises(InstallError, match=r"by code, which root does not run .*without -e"):
        render.find_prefix(str(prefix))
    assert not (tmp_path / "ran").exists()


# ---- robust.toml


def test_robust_toml_explains_every_key() -> None:
    text = render.robust_toml(ALL)
    for name in config.FIELDS:
        assert re.search(rf"^# {name} = ", text, re.MULTILINE), name
    for table, keys in settings.TABLES.items():
        body = text.partition(f"\n[{table}]\n")[2].partition("\n[")[0]
        for name, setting in keys.items():
            assert f"\n# {name} = {render.toml_value(setting.default)}\n" in body, (table, name)
            assert setting.help.split()[0] in body
    for check in ALL:
        body = text.partition(f"\n[health.{check.name}]\n")[2].partition("\n[")[0]
        for name in check.settings:
            assert f"\n# {name} = " in body, (check.name, name)
    assert max(len(line) for line in text.splitlines() if " = " not in line) <= 100


def load(text: str, tmp_path: Path) -> settings.Settings:
    path = tmp_path / "robust.toml"
    path.write_text(text)
    path.chmod(0o644)
    return settings.load(str(path), "gpu1", ALL)


def test_robust_toml_as_it_is_written_changes_nothing(tmp_path: Path) -> None:
    text = render.robust_toml(ALL)
    assert tomllib.loads(text)["gate"] == {}
    found = load(text, tmp_path)
    assert found.problems == ()
    assert found == load("", tmp_path)
    assert config.load(
        env={}, cwd=tmp_path / "x", site_file=tmp_path / "robust.toml"
    ) == config.load(env={}, cwd=tmp_path / "x", site_file=tmp_path / "none")


def test_robust_toml_with_every_key_taken_in(tmp_path: Path) -> None:
    """Without the # of each key the file says the defaults, and says them right."""
    text = re.sub(r"^# ([a-z_]+ = )", r"\1", render.robust_toml(ALL), flags=re.MULTILINE)
    found = load(text, tmp_path)
    assert found.problems == ()
    assert found == load("", tmp_path)
    read = config.load(env={}, cwd=tmp_path / "x", site_file=tmp_path / "robust.toml")
    assert read == config.load(env={}, cwd=tmp_path / "x", site_file=tmp_path / "none")


@pytest.mark.parametrize(
    "value",
    [True, 0, -3, 2.5, 1e-6, "", 'a "quoted" \\ text', "ü", [], ["a", "b"], {}, {"x y": 1, "z": 2}],
)
def test_values_as_toml(value: object) -> None:
    assert tomllib.loads(f"key = {render.toml_value(value)}")["key"] == value


# ---- lines for slurm.conf


def fragment(slurm: dict[str, str]) -> str:
    gate = {name: setting.default for name, setting in settings.GATE.items()}
    return render.fragment(rules.wants(SiteFacts(slurm, gate, "/etc/r")), bool(slurm))


def test_fragment() -> None:
    text = fragment({"SLURM_VERSION": "24.11.5", "SchedulerParameters": "defer"})
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert lines == [
        "Prolog=/etc/r/prolog",
        "Epilog=/etc/r/epilog",
        "HealthCheckProgram=/etc/r/healthcheck",
        "HealthCheckInterval=300",
        "HealthCheckNodeState=ANY",
        "PrologFlags=Alloc,Contain,DeferBatch,ForceRequeueOnFail",
        "SchedulerParameters=defer,nohold_on_prolog_fail",
        "JobRequeue=1",
        "BatchStartTimeout=10",
    ]
    assert "\n#RebootProgram=/sbin/reboot\n" in text
    assert "Slurm did not answer" not in text and "Slurm did not answer" in fragment({})
    assert max(map(len, text.splitlines())) <= 100


def test_fragment_without_slurm_lowers_nothing() -> None:
    """Values that may well be right already are comments then."""
    lines = [line for line in fragment({}).splitlines() if line and not line.startswith("#")]
    assert [line.partition("=")[0] for line in lines] == [
        "Prolog",
        "Epilog",
        "HealthCheckProgram",
        "HealthCheckInterval",
        "PrologFlags",
        "SchedulerParameters",
    ]


@pytest.mark.slow
def test_without_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The doctor and --help do without it; the others say what to install."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for name in ("jinja2", "paramiko", "health.admin.remote"):
        monkeypatch.setitem(sys.modules, name, None)
    pip = f"{sys.executable} -m pip install 'robust-slurm[admin]'"
    make_prefix(tmp_path / "r")
    words = ["install", "--prefix", f"{tmp_path}/r", "--etc", f"{tmp_path}/e", "--dry-run"]
    assert cli.main(words, io.StringIO()) == 2
    assert pip in capsys.readouterr().err
    assert cli.main([*words, "--nodes", "n1", "--ssh"], io.StringIO()) == 2
    assert pip in capsys.readouterr().err
    assert cli.main(["--help"]) == 0 and "exit codes" in capsys.readouterr().out


def test_only_root_installs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cli.main(["install", "--yes"]) == 2
    assert "use sudo" in capsys.readouterr().err


def test_uninstall_where_slurm_cannot_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    out = io.StringIO()
    assert cli.main(["uninstall", "--etc", str(tmp_path), "--yes"], out) == 0
    assert "scontrol is not in PATH: whether Slurm still runs" in capsys.readouterr().err
    assert "nothing is installed" in out.getvalue()


def test_templates_hold_what_the_wheel_has() -> None:
    """Jinja, and the sources of the plugin."""
    kinds = {path.suffix for path in (REPOSITORY / "templates").iterdir()}
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    packed = project["tool"]["setuptools"]["package-data"]["robust_slurm._rooms.templates"]
    assert (
        kinds
        == {pattern.removeprefix("*") for pattern in packed}
        == {".c", ".j2", ".json", ".lua", ".sh", ".yml"}
    )


def test_stubs_are_for_any_shell() -> None:
    for path, text in files().items():
        if path.endswith(("prolog", "epilog", "healthcheck")):
            assert text.startswith("#!/bin/sh\n")
            done = subprocess.run(["/bin/sh", "-n"], input=text, text=True, capture_output=True)
            assert done.returncode == 0, done.stderr


# ---- the table of the pages


def test_the_table_of_errors_is_the_data() -> None:
    text = check_table.README.read_text()
    assert check_table.filled(text, ALL) == text, "write it anew: python -m lab.pages.check_table"


def test_table_of_errors() -> None:
    conditions = (
        Condition("one-unreadable", "ERROR", "node", "reboot", "x"),
        Condition("one-bad", "FAIL", "node", "reboot", "x"),
    )
    first = Check("one", lambda system: [], conditions, {}, deadline_s=0.5)
    second = Check(
        "two", lambda system: [], (), {}, frozenset({"deep", "sweep"}), closes_on_error=False
    )
    assert check_table.table([first, second]).splitlines()[2:] == [
        "| [one](one.md) | everywhere | 0.5 s | `one-error`, `one-unreadable` | **yes** |",
        "| [two](two.md) | sweep, deep | 2 s | `two-error` | no |",
    ]
    with pytest.raises(ValueError, match="generated"):
        check_table.filled("no marks", [])
