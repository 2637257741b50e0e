"""Trainings in an image with a Python of its own, entered by the stand-ins of lab/containers."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import TOY, Training, check_incident, prepared
from slot_driver import drive, drivers

from lab import Cluster, LabError, containers
from robust_slurm.auto import HOOK_DIR
from robust_slurm.record import BeatReader
from srun_wrapper.protocol.looking_messages import RANK
from srun_wrapper.protocol.messages import Inspect, Inspected

__all__ = ["drive", "drivers"]
HEADERS = Path("/usr/include/slurm/spank.h").exists() and shutil.which("cc") is not None
PACKAGE = str(Path(HOOK_DIR).parent)
REAL = pytest.param(
    "apptainer",
    id="installed",
    marks=pytest.mark.skipif(
        shutil.which("apptainer") is None, reason="Apptainer itself is not installed"
    ),
)
QUICK = "--robust-hang-floor=2 --robust-hang-limit=4 --robust-interval=0.2"


@pytest.fixture(scope="module")
def image() -> Path:
    try:
        return containers.build_image()
    except LabError as error:
        pytest.skip(f"no image can be built here: {error}")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    with Cluster(nodes=2, standby=0) as lab:
        yield lab


def toy(training: Training) -> Path:
    """A copy of the toy training beside its files, which says at its end which Python ran it."""
    copy = training.dir / "toy.py"
    says = "print(f'rank {rank} by {sys.executable} {sys.version_info[:2]}', flush=True)"
    copy.write_text(f"{TOY.read_text()}{says}\n")
    return copy


def crash_and_hang(training: Training, robust: str, enter: str, version: str) -> None:
    """A rank is killed, then one sleeps: each time all start again, and the stacks are read."""
    script = f"{toy(training)} --dir {training.dir} --steps {training.steps}"
    faults = "--hold 6 --fault sleep --at 30 --epoch 2"
    line = f"robust-srun {QUICK} {robust} {enter} /usr/bin/python3 {script} {faults}"
    training.submit(line, ["-N2", "--ntasks-per-node=1"])
    training.wait_step(6)
    training.kill(str(training.dir / "toy.py"), rank=1)
    training.check_done()
    crash, hang = training.incidents()
    check_incident(crash, symptom="crash", action="restart", outcome="recovered")
    check_incident(hang, symptom="hang", action="restart", outcome="recovered")
    assert any("in fault (toy.py:" in line for line in hang["evidence"]), hang["evidence"]
    assert training.says(rf"^rank 1 by /usr/bin/python3 {version}$"), training.story()


def version_of(image: Path) -> str:
    code = "import sys; print(sys.version_info[:2])"
    done = subprocess.run(
        ["chroot", str(image), "python3", "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout.strip().replace("(", r"\(").replace(")", r"\)")


@pytest.mark.skipif(not HEADERS, reason="libslurm-dev and a C compiler build the stand-in")
def test_pyxis_starts_robust_task_in_the_image(nodes: Cluster, image: Path) -> None:
    """The host's Python starts robust-task, as the image has none of it; ranks use the image's."""
    containers.install_pyxis(nodes.spec)
    training = prepared(nodes, 2, 40)
    options = f"--container-image={image} --container-mounts={training.dir}:{training.dir}"
    crash_and_hang(training, options, "", version_of(image))


@pytest.mark.parametrize("program", [pytest.param(str(containers.APPTAINER), id="stand-in"), REAL])
def test_apptainer_is_started_by_robust_task(nodes: Cluster, image: Path, program: str) -> None:
    training = prepared(nodes, 2, 40)
    crash_and_hang(training, "", f"{program} exec {image}", version_of(image))


def test_the_ranks_side_imports_in_the_images_python(image: Path) -> None:
    """Python 3.9 without any package imports all that needs no torch."""
    code = (
        "import importlib, pkgutil, robust_slurm, robust_slurm.auto as auto\n"
        "hooks = ['auto.' + m.name for m in pkgutil.iter_modules(auto.__path__)]\n"
        "others = 'commands looked record checkpoint.format.layout checkpoint.training.client'\n"
        "for name in [*hooks, *others.split()]:\n"
        "    if name != 'auto.sitecustomize':  # it has run\n"
        "        importlib.import_module('robust_slurm.' + name)\n"
        "print(robust_slurm.__file__, robust_slurm.epoch())\n"
        "robust_slurm.beat(1, loss=1.0)\n"
        "try:\n"
        "    robust_slurm.Checkpointer\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    enter = 'sh "$0" "$1" "$2" && exec chroot /mnt python3 -c "$3"'
    mounts = f"{PACKAGE}:{PACKAGE}"
    script = str(containers.HERE / "enter.sh")
    argv = ["unshare", "--mount", "sh", "-c", enter, script, str(image), mounts, code]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": HOOK_DIR}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.startswith(f"{PACKAGE}/__init__.py ")
    wanted = "needs Python 3.10 or later" if version_of(image).startswith(r"\(3, 9") else "torch"
    assert wanted in " ".join(rest)


STUCK = """\
import pathlib, sys, time, robust_slurm
def stuck():
    pathlib.Path(sys.argv[1], "stuck").write_text(robust_slurm.__file__)
    time.sleep(3600)
robust_slurm.beat(7, loss=1.0)
stuck()
"""


def test_a_rank_in_apptainer_beats_and_shows_its_stack(
    drive: Any, tmp_path: Path, image: Path
) -> None:
    """One slot without Slurm: the record, the bind variable and py-spy reach into the image."""
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    command = (str(containers.APPTAINER), "exec", str(image), "/usr/bin/python3", str(script))
    d = drive(*command, str(tmp_path))
    d.launch(rank=3)
    said = tmp_path / "stuck"
    d.wait(lambda: said.exists() and said.read_text() == f"{PACKAGE}/__init__.py")
    beats = [BeatReader(str(path)).read() for path in tmp_path.glob("**/*.beat")]
    assert [(beat.rank, beat.step) for beat in beats if beat is not None] == [(3, 7)]
    d.order(Inspect(3, 0.05))
    [look] = [look for look in d.get(Inspected).samples[0].looks if look.role == RANK]
    assert look.main()[0].startswith("stuck (stuck.py:"), look
