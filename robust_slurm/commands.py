"""The door through which each process of ours starts.

An installed robust-slurm owns one import name. Its rooms (``health``, ``srun_wrapper`` …) are in
``robust_slurm/_rooms``, out of the way of a user's own ``health.py``; in a clone they are at its
top. What starts through here finds our rooms first, and nothing in the working directory. A
command finds what the user's PYTHONPATH names last of all; a process that needs the user's torch
is started by ``python -m robust_slurm.commands MODULE …``, which leaves PYTHONPATH its place.

It also runs in the Python that trains (3.9 or later).
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

_HERE = Path(__file__).absolute().parent


def rooms() -> str:
    """The directory of the rooms."""
    installed = _HERE / "_rooms"
    return str(installed if installed.is_dir() else _HERE.parent)


def enter() -> None:
    """Have modules looked for in the rooms before anywhere else."""
    first = rooms()
    sys.path[:] = [first, *(path for path in sys.path if path not in ("", first))]


def _user_last() -> None:
    """Have what the user's PYTHONPATH names looked at after our own packages."""
    said = "" if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "")
    theirs = {Path(path).absolute() for path in said.split(os.pathsep) if path}
    last = [path for path in sys.path if Path(path).absolute() in theirs]
    sys.path[:] = [*(path for path in sys.path if path not in last), *last]


def words(module: str) -> list[str]:
    """Return the words after a Python's options that run one of our modules as its program."""
    return ["-m", "robust_slurm.commands", module]


def _call(module: str) -> object:
    _user_last()
    enter()
    return import_module(module).main()


def srun() -> object:
    """robust-srun."""
    return _call("srun_wrapper.cli")


def task() -> object:
    """robust-task."""
    return _call("srun_wrapper.task")


def status() -> object:
    """robust-status."""
    return _call("status.cli")


def standby() -> object:
    """robust-standby."""
    return _call("standby.cli")


def ckpt() -> object:
    """robust-ckpt."""
    return _call("robust_slurm.checkpoint.cli")


def health() -> object:
    """robust-health."""
    return _call("health.cli")


def prolog() -> object:
    """robust-prolog."""
    return _call("prolog.cli")


def epilog() -> object:
    """robust-epilog."""
    return _call("epilog.cli")


def admin() -> object:
    """robust-admin."""
    return _call("health.admin.cli")


def _main() -> None:
    import runpy

    if len(sys.argv) < 2:
        sys.exit("usage: python -m robust_slurm.commands MODULE [ARGUMENT…]")
    if not sys.flags.isolated and not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # -m has put the working directory there
    enter()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
