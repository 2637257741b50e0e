"""A prefix to install from: an interpreter with this checkout in its site-packages, as on nodes."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from places import REPOSITORY

ROOMS = ("health", "prolog", "epilog", "templates")


def make_prefix(top: Path, fakes: bool = False) -> Path:
    """Make a virtual environment at ``top`` without running anything.

    What root runs of it is copied, so that it is ours whoever owns the checkout. With ``fakes``
    its prolog and epilog admit every job.
    """
    base = Path(os.path.realpath(sys.executable))
    packages = packages_of(top)
    packages.mkdir(parents=True)
    (top / "bin").mkdir()
    (top / "bin" / "python3").symlink_to(base)
    (top / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
    installed = Path(sysconfig.get_path("purelib"))
    ours = {REPOSITORY / name: rooms_of(top) / name for name in ROOMS}
    ours[REPOSITORY / "robust_slurm"] = packages / "robust_slurm"
    ours[installed / "ClusterShell"] = packages / "ClusterShell"
    for source, place in ours.items():
        # An interpreter that is writing a .pyc beside us names it *.pyc.NUMBER first.
        ignored = shutil.ignore_patterns("*.pyc.*")
        shutil.copytree(source, place, ignore=ignored, dirs_exist_ok=True)
    shutil.copy2(installed / "pynvml.py", packages)
    (packages / "rest.pth").write_text(f"{installed}\n")
    if fakes:
        for name in ("prolog", "epilog"):
            (rooms_of(top) / name / "cli.py").write_text("def main(argv=None):\n    return 0\n")
    for path in (top, *top.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & ~0o022)
    return top


def rooms_of(top: Path) -> Path:
    """The rooms of robust-slurm there."""
    return packages_of(top) / "robust_slurm" / "_rooms"


def packages_of(top: Path) -> Path:
    """Return the site-packages of a prefix."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return top / "lib" / version / "site-packages"
