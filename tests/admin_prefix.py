"""A prefix to install from: an interpreter that finds this checkout, as on the nodes."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def make_prefix(top: Path, first: Path | None = None) -> Path:
    """Make a virtual environment at ``top`` without running anything.

    It sees the checkout and what is installed beside the tests; packages in ``first`` win.
    """
    base = Path(os.path.realpath(sys.executable))
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = top / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    (top / "bin").mkdir()
    (top / "bin" / "python3").symlink_to(base)
    (top / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
    seen = [*([first] if first else []), REPOSITORY, Path(sysconfig.get_path("purelib"))]
    (packages / "robust.pth").write_text("".join(f"{path}\n" for path in seen))
    return top


def fake_gates(top: Path) -> Path:
    """Packages ``prolog`` and ``epilog`` that admit every job: fakes, for tests of installing."""
    for name in ("prolog", "epilog"):
        (top / name).mkdir(parents=True)
        (top / name / "__init__.py").touch()
        (top / name / "cli.py").write_text("def main(argv=None):\n    return 0\n")
    return top
