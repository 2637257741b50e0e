"""An interpreter of the site's whose robust-slurm is a shell script: root runs no other kind."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def fake_python(top: Path, script: Path) -> Path:
    """Make an environment at ``top`` whose robust_slurm hands its words to a script."""
    base = Path(os.path.realpath(sys.executable))
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    package = top / "lib" / version / "site-packages" / "robust_slurm"
    python = top / "bin" / "python3"
    if not python.exists():
        for made in (top, top / "lib", *reversed(package.parents[:2]), package, top / "bin"):
            made.mkdir(mode=0o755, exist_ok=True)
        python.symlink_to(base)
        (top / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
        (package / "__init__.py").touch()
    (package / "commands.py").write_text(
        f"import os, sys\nos.execv({str(script)!r}, [{str(script)!r}, *sys.argv[1:]])\n"
    )
    for path in (top / "pyvenv.cfg", *package.iterdir()):
        path.chmod(0o644)
    return python
