"""A root to be used as a container image: a Debian with a Python of its own and nothing of ours.

Its Python is older than the one that runs robust-srun, and its C library too, as in an image that
was made for a training. Built once from Debian's archive, as the roots of Slurm's releases are.
"""

import shutil
from pathlib import Path

from lab.errors import LabError
from lab.slurm.releases import CACHE, _locked, _mirror, _prepare, _run, _unpack

SUITES = ("bullseye", "trixie")  # Python 3.9, C library 2.31; where that is gone, 3.13 and 2.41
_PACKAGES = ("python3", "coreutils", "dash")
_RECIPE = 1  # raise it when the content changes: images of another recipe are not used
_SECONDS = 600.0
_DIRECTORIES = ("dev", "proc", "sys", "tmp", "run", "root", "home")


def build() -> Path:
    """Return the image, built if there is none. Raises LabError with the error of every suite."""
    wrong = []
    for suite in SUITES:
        image = CACHE / f"image-{suite}-{_RECIPE}"
        if image.is_dir():
            return image
        try:
            _build(suite, image)
        except (LabError, OSError) as error:
            wrong.append(f"{suite}: {error}")
        else:
            return image
    raise LabError("; ".join(wrong))


def _build(suite: str, image: Path) -> None:
    CACHE.mkdir(mode=0o755, parents=True, exist_ok=True)
    with _locked(CACHE / f"{image.name}.lock"):
        if image.is_dir():  # another process built it
            return
        work = CACHE / f".{image.name}"
        shutil.rmtree(work, ignore_errors=True)  # of a build that was killed
        try:
            apt = _prepare(work / suite, _mirror(), suite)
            plan = _run(["apt-get", *apt, "-s", "install", *_PACKAGES], _SECONDS)
            names = [line.split()[1] for line in plan.splitlines() if line.startswith("Inst ")]
            debs = work / suite / "debs"
            _run(["apt-get", *apt, "-q", "download", *names], _SECONDS, cwd=debs)
            root = work / "root"
            root.mkdir(mode=0o755)
            _unpack(sorted(debs.glob("*.deb")), root)
            for name in _DIRECTORIES:
                (root / name).mkdir(exist_ok=True)
            for name in ("hosts", "passwd"):  # runtimes bind the host's over these
                (root / "etc" / name).touch()
            if not (root / "bin/sh").exists():
                (root / "bin/sh").symlink_to("dash")
            if not (root / "usr/bin/python").exists():
                (root / "usr/bin/python").symlink_to("python3")
            root.rename(image)
        finally:
            shutil.rmtree(work, ignore_errors=True)
