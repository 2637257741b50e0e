"""An installation owns one import name, and no file of the user's gets in its way."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
import wheel
from wheel import REPOSITORY, ROOMS

from health.admin import render
from health.gate import active_answer
from robust_slurm import commands

pytestmark = pytest.mark.slow

COMMANDS = (
    "robust-srun",
    "robust-status",
    "robust-standby",
    "robust-ckpt",
    "robust-update",
    "robust-health",
    "robust-admin",
    "robust-prolog",
    "robust-epilog",
)
ALSO = ("json", "logging", "socket", "msgspec", "ClusterShell", "pynvml", "robust_slurm")
"""Names that a directory can have which somebody prepared for root to start in."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel.build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel.install(made, tmp_path_factory.mktemp("venv"))


def test_the_wheel_has_every_folder_of_code() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    packages = set(settings["tool"]["setuptools"]["packages"])
    rooms = {room: f"robust_slurm._rooms.{room}" for room in ROOMS} | {
        "robust_slurm": "robust_slurm"
    }
    folders = {
        ".".join((name, *path.parent.relative_to(REPOSITORY / room).parts))
        for room, name in rooms.items()
        for path in (REPOSITORY / room).rglob("*.py")
    }
    assert folders - packages == set()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's project whose files are named like our rooms."""
    for name in ROOMS:
        (tmp_path / f"{name}.py").write_text("MINE = True\n")
    (tmp_path / "rich.py").write_text("raise SystemExit('the rich of the user')\n")
    return tmp_path


def run(project: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(project), "ROBUST_STATE_DIR": str(project / "state")}
    env.pop("SLURM_JOB_ID", None)
    return subprocess.run(
        argv, cwd=project, env=env, capture_output=True, text=True, timeout=200, check=False
    )


def test_the_wheel_owns_one_name_and_has_every_file(made: Path) -> None:
    with zipfile.ZipFile(made) as archive:
        names = [
            name for name in archive.namelist() if not re.match(r"[^/]+\.(dist-info|data)/", name)
        ]
        (top,) = (name for name in archive.namelist() if name.endswith("top_level.txt"))
        assert archive.read(top).decode().split() == ["robust_slurm"]
    assert {name.partition("/")[0] for name in names} == {"robust_slurm"}
    rooms = [path for room in ROOMS for path in (REPOSITORY / room).rglob("*.py")]
    rooms += [
        *(REPOSITORY / "health" / "pages").glob("*.md"),
        *(REPOSITORY / "status" / "recorded").glob("*.json*"),
        *(REPOSITORY / "templates").iterdir(),
        REPOSITORY / "srun_wrapper" / "signatures" / "catalogue.toml",
    ]
    ours = {f"robust_slurm/_rooms/{path.relative_to(REPOSITORY)}" for path in rooms}
    ours |= {
        str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "robust_slurm").rglob("*.py")
    }
    assert set(names) == {*ours, "robust_slurm/py.typed"}


def test_man_pages_and_completion_are_installed(installed: Path) -> None:
    share = installed.parent / "share"
    for folder, place in (("man", "man/man1"), ("completion", "bash-completion/completions")):
        made = {path.name for path in (REPOSITORY / "docs" / folder).iterdir()}
        assert {path.name for path in (share / place).iterdir()} == made and len(made) > 6


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_runs_in_a_project_with_such_names(
    command: str, installed: Path, project: Path
) -> None:
    option = "--robust-help" if command == "robust-srun" else "--help"
    done = run(project, str(installed / command), option)
    assert done.returncode == 0 and command in done.stdout.splitlines()[0], done.stderr


def test_processes_of_ours_run_in_such_a_project(installed: Path, project: Path) -> None:
    """robust-task, the tests' worker, the writer: started alone, they say what they lack."""
    python = str(installed / "python")
    door = ("-m", "robust_slurm.commands")
    done = run(project, python, *door, "health.active.worker.main")
    assert done.returncode == 2 and "start it with robust-health test" in done.stderr, done.stderr
    door_of_ours = next(installed.parent.glob("lib/*/site-packages/robust_slurm/commands.py"))
    for way in (door, (str(door_of_ours),)):
        done = run(project, python, "-I", *way, "srun_wrapper.agent.task", "{}", "--", "true")
        assert "robust-task: started outside robust-srun" in done.stderr, done.stderr
    done = run(project, python, *door, "robust_slurm.checkpoint.durable.writer")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A directory in which every name that root's processes import is a file of somebody else."""
    for name in (*ROOMS, *ALSO, "rich"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the {name} of somebody else')\n")
    return tmp_path


@pytest.mark.parametrize("name", ["prolog", "epilog", "healthcheck"])
def test_a_stub_of_roots_runs_the_gate_that_is_installed(
    name: str, installed: Path, trap: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    etc = tmp_path_factory.mktemp("etc")
    prefix = render.find_prefix(str(installed.parent))
    site = render.Site(prefix, str(etc), "", str(etc))
    texts = {file.path: file.text for file in render.node_files(site, "[gate]\nenabled = false\n")}
    for path, text in texts.items():
        Path(path).write_text(text)
        Path(path).chmod(0o755)
    job = ("env", "SLURM_JOB_ID=1")
    done = run(
        trap, *job, str(etc / name)
    )  # switched off: it has read its settings, and does nothing
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    if name == "healthcheck":
        done = run(trap, str(etc / name), "--help")
        assert done.returncode == 0 and "usage" in done.stdout, done.stderr


def test_the_children_of_the_gate_are_those_that_are_installed(installed: Path, trap: Path) -> None:
    """The active tests of one node, their worker's start, and the process that asks NVML."""
    python = str(installed / "python")
    done = run(trap, *active_answer.argv(python, "quick", "n1", 1.0), "--help")
    assert done.returncode == 0 and "robust-health test" in done.stdout, done.stderr
    done = run(trap, python, "-I", *commands.words("health.active.nvidia.gpu_nvml"))
    assert done.returncode == 0 and not done.stderr, done.stderr
    done = run(trap, python, "-I", *commands.words("health.active.coordinator.start"))
    assert done.returncode == 2 and "not started by robust-health" in done.stderr, done.stderr


def test_the_working_directory_is_no_place_for_modules(installed: Path, project: Path) -> None:
    """An empty entry of PYTHONPATH, as ``$PYTHONPATH:/x`` has if it was not set, is none either."""
    (project / "msgspec.py").write_text("raise SystemExit('the msgspec of the user')\n")
    for path in (":/nowhere", ":", "/nowhere:"):
        env = {**os.environ, "PYTHONPATH": path}
        argv = [str(installed / "robust-srun"), "--robust-help"]
        done = subprocess.run(
            argv, cwd=project, env=env, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr


def test_an_installation_that_only_pythonpath_names(
    made: Path, project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Put the package on PYTHONPATH like an environment module: robust-task still runs isolated."""
    top = tmp_path_factory.mktemp("module")
    with zipfile.ZipFile(made) as archive:
        archive.extractall(top)
    code = (
        "from robust_slurm import commands; commands.enter();"
        "from srun_wrapper.command import steps;"
        "from srun_wrapper.protocol.task_options import TaskOptions; import os, sys;"
        "words = steps.task_argv('', TaskOptions(), ['true']); os.execv(words[0], words)"
    )
    env = {**os.environ, "PYTHONPATH": f"{top}:{sysconfig.get_path('purelib')}"}
    for name in ("msgspec", "ClusterShell"):  # an environment module brings what we depend on
        (top / name).symlink_to(Path(sysconfig.get_path("purelib")) / name)
    python = os.path.realpath(sys.executable)  # an interpreter that has nothing installed
    done = subprocess.run(
        [python, "-c", code], cwd=project, env=env, capture_output=True, text=True, timeout=200
    )
    assert "robust-task: started outside robust-srun" in done.stderr, done.stderr


def test_the_users_own_names_are_theirs(installed: Path, project: Path) -> None:
    code = f"import robust_slurm, {', '.join(ROOMS)}\nprint(health.MINE)"
    done = run(project, str(installed / "python"), "-c", code)
    assert done.stdout == "True\n", done.stderr
