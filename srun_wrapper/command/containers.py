"""Steps in container images: mounts for robust-task, and for ranks that enter an image themselves.

Pyxis (``srun --container-image``) enters the image before it starts the task, so robust-task runs
inside, where there is none of our packages and mostly no Python that it could use. The host's
Python is mounted for it below ``ROOT``, with its C library, by whose loader it is started. So it
needs nothing of the image, hides nothing of it, and the ranks' Python is the image's own.

Apptainer and others are a part of the rank's command line: robust-task runs outside of the image,
and the rank needs one directory of ours inside.
"""

from __future__ import annotations

import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from robust_slurm.commands import SITES
from srun_wrapper.command.srun_options import SrunCommand, UsageError
from srun_wrapper.protocol.task_options import OutputPlan

ROOT = "/.robust-slurm"
"""Directory in the image below which the host's directories are mounted."""
MOUNTS = "container-mounts"
_ENTERS = ("container-image", "container-name")
_OPTION = "SLURM_SPANK__SLURM_SPANK_OPTION_pyxis_"  # of sbatch, for the srun lines of its job
_LOADER = re.compile(r"/ld(-linux[^/]*|64|-[\d.]+)\.so[\d.]*$")
_LIBRARY = re.compile(r"\.so(\.[\d.]+)?$")
_BIND = ("APPTAINER_BINDPATH", "SINGULARITY_BINDPATH")


@dataclass(frozen=True, slots=True)
class OwnPython:
    """Paths of the Python that runs robust-srun, without symbolic links."""

    executable: str
    prefix: str
    """The virtual environment, if there is one; else the same as ``base``."""
    base: str
    stdlib: str
    package: str
    """The directory that holds the package robust_slurm."""
    sites: tuple[str, ...]
    libraries: tuple[str, ...]
    """The libraries that the process has mapped, its loader too."""


class CarriedPython(NamedTuple):
    """Our Python as it is in an image."""

    words: tuple[str, ...]
    """Words that start it, before its other options."""
    package: str
    """The directory robust_slurm."""
    mounts: tuple[str, ...]
    """The host's directories that it needs below ``ROOT``."""


def own_python() -> OwnPython:
    """Look at this process."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        mapped = {line.split(maxsplit=5)[5].rstrip("\n") for line in file if "/" in line}
    ours = {*site.getsitepackages(), site.getusersitepackages()}
    theirs = {*os.environ.get("PYTHONPATH", "").split(os.pathsep)} - ours
    sites = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    return OwnPython(
        os.path.realpath(sys.executable),
        os.path.realpath(sys.prefix),
        os.path.realpath(sys.base_prefix),
        os.path.realpath(sysconfig.get_path("stdlib")),
        str(Path(sys.modules["robust_slurm"].__path__[0]).resolve().parent),
        tuple(os.path.realpath(path) for path in sites if path not in theirs),
        tuple(sorted(path for path in mapped if _LIBRARY.search(path))),
    )


def carried(own: OwnPython) -> CarriedPython:
    """Return what starts this Python in any image, and what must be mounted for that (pure)."""
    loader = next((path for path in own.libraries if _LOADER.search(path)), "")
    modules = (own.stdlib, *own.sites)
    directories = sorted({_parent(path) for path in own.libraries if not _below(path, modules)})
    needed = [own.base, own.prefix, own.package, *own.sites, _parent(own.executable), *directories]
    words = [f"{ROOT}{own.executable}"]
    if loader:
        found = ":".join(f"{ROOT}{path}" for path in directories)
        words = [f"{ROOT}{loader}", "--inhibit-cache", "--library-path", found, *words]
    # -S: sites' own sitecustomize and .pth files name paths of the host.
    words += ["-S", "-X", f"{SITES}={':'.join(f'{ROOT}{site}' for site in own.sites)}"]
    return CarriedPython(tuple(words), f"{ROOT}{own.package}/robust_slurm", tuple(_tops(needed)))


def in_image(
    command: SrunCommand, env: Mapping[str, str], output: OutputPlan, python: str
) -> tuple[SrunCommand, OutputPlan, CarriedPython | None]:
    """Return the command and output for tasks that srun starts in an image, and our Python there.

    ``python``: the user's choice for robust-task, which is the image's own. Raises UsageError.
    """
    bundle = command.get("container")
    if (bundle is not None or "SLURM_CONTAINER" in env) and not python:
        raise UsageError(
            "--container: nothing can be mounted into an OCI bundle from here; set task_python to "
            "a Python of the bundle that has robust-slurm, or use --container-image (Pyxis)"
        )
    if not any(_given(name, command, env) for name in _ENTERS):
        return command, output, None
    output = absolute_output(output, command)
    carry = None if python else carried(own_python())
    return with_mounts(command, env, carry.mounts if carry else (), output), output, carry


def with_mounts(
    command: SrunCommand, env: Mapping[str, str], hosts: Sequence[str], output: OutputPlan
) -> SrunCommand:
    """Return the command with what robust-task needs in the image, beside the user's own mounts.

    Pyxis gets the last value of the option only. ``output``: see ``absolute_output``.
    """
    mounts = [f"{path}:{ROOT}{path}:ro" for path in hosts]
    files = filter(None, (output.out, output.err))
    mounts += [f"{path}:{path}" for path in sorted({_parent(file.split("%")[0]) for file in files})]
    users = _given(MOUNTS, command, env)
    if not mounts:
        return command
    return command.with_option(MOUNTS, ",".join([*filter(None, [users]), *mounts]))


def absolute_output(output: OutputPlan, command: SrunCommand) -> OutputPlan:
    """Return the patterns of files that robust-task opens as paths that are the same in the image.

    srun would have opened them outside of it.
    """
    chdir = command.get("chdir")
    here = Path.cwd() / ((chdir.value if chdir is not None else "") or "")
    paths = (str(here / pattern) if pattern else "" for pattern in (output.out, output.err))
    out, err = paths
    return msgspec.structs.replace(output, out=out, err=err)


def bound(env: Mapping[str, str], package: str) -> dict[str, str]:
    """Return variables by which Apptainer and Singularity show a rank the package robust_slurm.

    Without them it is visible only below $HOME, /tmp and the working directory. They are added to
    what the user's own variables and options bind.
    """
    if re.search(r"[,:\\]", package):
        return {}
    mount = f"{package}:{package}:ro"
    users = {name: env[name] for name in _BIND if env.get(name)}
    either = next(iter(users.values()), "")
    return {name: ",".join(filter(None, [users.get(name, either), mount])) for name in _BIND}


def _given(option: str, command: SrunCommand, env: Mapping[str, str]) -> str:
    """Return the value of one of Pyxis's options: srun's, then sbatch's, then Pyxis's variable."""
    found = command.get(option)
    if found is not None:
        return found.value or ""
    name = option.replace("-", "_")
    return env.get(_OPTION + name) or env.get(f"PYXIS_{name.upper()}") or ""


def _tops(paths: Iterable[str]) -> list[str]:
    """Return the directories below which all of ``paths`` are, each once."""
    tops: list[str] = []
    for path in sorted(set(paths), key=lambda path: (path.count("/"), path)):
        if not _below(path, tops):
            tops.append(path)
    return tops


def _below(path: str, tops: Iterable[str]) -> bool:
    return any(path == top or path.startswith(f"{top}/") for top in tops)


def _parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"
