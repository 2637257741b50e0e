"""robust-slurm as a user installs it: the wheel, in a virtual environment of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from places import REPOSITORY

ROOMS = ("epilog", "health", "prolog", "srun_wrapper", "standby", "status", "templates")


def build(directory: Path) -> Path:
    """The wheel of this checkout. setuptools writes beside its sources, so from a copy of them."""
    made = subprocess.run(
        [
            "git",
            "-C",
            str(REPOSITORY),
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ],
        capture_output=True,
        check=True,
        text=True,
    )
    for name in filter(None, made.stdout.split("\0")):
        if (REPOSITORY / name).is_file():
            (directory / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, directory / "source" / name)
    pip("wheel", "--no-deps", "--wheel-dir", str(directory), str(directory / "source"))
    (wheel,) = directory.glob("*.whl")
    return wheel


def install(wheel: Path, top: Path) -> Path:
    """Install the wheel below ``top``; all else is from where we run. Return its ``bin``."""
    argv = [sys.executable, "-m", "venv", "--without-pip", str(top)]
    subprocess.run(argv, check=True, timeout=120)
    (packages,) = top.glob("lib/python*/site-packages")
    (packages / "rest.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip("--python", str(top / "bin" / "python"), "install", "--no-deps", "--no-index", str(wheel))
    return top / "bin"


def pip(*words: str) -> None:
    argv = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
