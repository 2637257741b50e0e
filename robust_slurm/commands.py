"""The entry point of each of our processes.

An installed robust-slurm owns one import name. Its rooms, the packages at the top of a clone
(``health``, ``srun_wrapper`` …), are installed in ``robust_slurm/_rooms``, out of the way of a
user's own ``health.py``. A process that starts here searches the rooms first for a module, and
never the working directory. Commands search the user's PYTHONPATH last; a process that needs the
user's torch is started by ``python -m robust_slurm.commands MODULE …``, which leaves PYTHONPATH in
its place.

It also runs in the Python that trains (3.9 or later).
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from importlib import import_module
from pathlib import Path

_HERE = Path(__file__).absolute().parent
SITES = "robust_sites"
"""The option (-X) of our Python in an image: where our dependencies are, separated by colons."""


def rooms() -> str:
    """The directory of the rooms."""
    installed = _HERE / "_rooms"
    return str(installed if installed.is_dir() else _HERE.parent)


def enter() -> None:
    """Search modules in the rooms first, and never in the working directory.

    An empty entry of PYTHONPATH means that directory; Python has made it absolute by now.
    """
    first, named = rooms(), _user_paths()
    empty = {_absolute("")} if "" in named else set()
    empty -= {_absolute(path) for path in named if path}
    kept = [path for path in sys.path if path and path != first and _absolute(path) not in empty]
    ours = str(_HERE.parent)  # not there yet if -I ignores the PYTHONPATH by which we were found
    sites = str(sys._xoptions.get(SITES, "")).split(os.pathsep)
    more = [path for path in (ours, *sites) if path and path not in (first, *kept)]
    sys.path[:] = [first, *kept, *more]


def _user_last() -> None:
    """Search the directories of the user's PYTHONPATH after our own packages."""
    theirs = {_absolute(path) for path in _user_paths()}
    last = [path for path in sys.path if _absolute(path) in theirs]
    sys.path[:] = [*(path for path in sys.path if path not in last), *last]


def _user_paths() -> list[str]:
    said = "" if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "")
    return said.split(os.pathsep) if said else []


def _absolute(path: str) -> str:
    try:
        return str(Path(path).absolute())
    except OSError:  # the working directory is gone
        return path


def words(module: str) -> list[str]:
    """Return the words after a Python's options that run one of our modules as its program."""
    return ["-m", "robust_slurm.commands", module]


def own_words(module: str) -> list[str]:
    """Return the same for our own interpreter: it runs this installation, wherever that is."""
    return [str(_HERE / "commands.py"), module]


def own_python() -> list[str]:
    """Return the words that start our own interpreter again, before its other options.

    In an image the host's loader must start it: the kernel would start it by the image's.
    """
    said = sys._xoptions.get(SITES)
    if said is None:
        return [sys.executable]
    with open("/proc/self/cmdline", "rb") as file:
        began = file.read().decode("utf-8", "surrogateescape").split("\0")
    return began[: began.index(f"{SITES}={said}") + 1]


def again(module: str) -> list[str]:
    """Return the words that run another of our modules in this Python, without ``site`` as it is
    itself (-S): root runs no code of *.pth files."""
    searched = os.pathsep.join(sys.path)
    options = ["-I", "-S", "-X", f"{SITES}={searched}"] if sys.flags.no_site else ["-I"]
    return [sys.executable, *options, *own_words(module)]


def own_program(name: str) -> str:
    """Return the path of a program that our installation has; "" if it has none."""
    directories = [Path(sys.executable).parent]
    for site in str(sys._xoptions.get(SITES, "")).split(os.pathsep):
        if site:  # PREFIX/lib/python3.11/site-packages
            directories += [prefix / "bin" for prefix in list(Path(site).parents)[2:3]]
    found = (str(directory / name) for directory in directories if (directory / name).exists())
    return next(found, "")


def _end_quickly() -> None:
    """Skip Python's last garbage collection, which walks through all that was imported."""
    atexit.register(gc.freeze)


def _call(module: str) -> object:
    _end_quickly()
    _user_last()
    enter()
    return import_module(module).main()


def srun() -> object:
    """robust-srun."""
    return _call("srun_wrapper.cli")


def task() -> object:
    """robust-task."""
    return _call("srun_wrapper.agent.task")


def status() -> object:
    """robust-status."""
    return _call("status.cli")


def standby() -> object:
    """robust-standby."""
    return _call("standby.cli")


def update() -> object:
    """robust-update."""
    return _call("srun_wrapper.code.cli")


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
    _end_quickly()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
