"""Containers for a lab: an image, and stand-ins for the programs that enter one.

Neither Pyxis nor Apptainer is needed here. Each stand-in (``spank_image.c``, ``apptainer``) says
what it has of the real program and what it lacks; docs/containers.md describes the real ones.
"""

import shutil
import subprocess
from pathlib import Path

from lab.containers.image import build as build_image
from lab.errors import LabError
from lab.spec import LabSpec

__all__ = ["APPTAINER", "build_image", "install_pyxis"]

HERE = Path(__file__).resolve().parent
APPTAINER = HERE / "apptainer"


def install_pyxis(spec: LabSpec) -> None:
    """Give srun and slurmstepd of a lab that is up ``--container-image``. Raises LabError."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise LabError("there is no C compiler for the stand-in for Pyxis")
    made = spec.dir / "spank_image.so"
    where = [f"-I{spec.slurm_root}/usr/include"] if spec.slurm_root else []  # the lab's release
    argv = [compiler, "-std=gnu99", "-O2", "-Wall", "-fPIC", "-shared", *where]
    done = subprocess.run(
        [*argv, "-o", str(made), str(HERE / "spank_image.c")], capture_output=True, text=True
    )
    if done.returncode:
        raise LabError(f"the stand-in for Pyxis is not compiled: {done.stderr.strip()[-500:]}")
    line = f"required {made} {HERE / 'enter.sh'}\n"
    stack = spec.dir / "etc" / "plugstack.conf"
    others = stack.read_text(encoding="utf-8") if stack.exists() else ""
    if line not in others:
        stack.write_text(others + line, encoding="utf-8")
