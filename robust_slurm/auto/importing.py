"""Imports ahead of the script what can be: installed modules that leave nothing a fork would lose.

Standard library only, Python 3.9 syntax.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_THREADS_END_AT_FORK = ("numpy", "scipy")  # OpenBLAS ends its pool before a fork
_NO_THREAD = ("JE_ARROW_MALLOC_CONF", "background_thread:false")
"""The variable that pyarrow's allocator reads when it is loaded, and what keeps it from starting a
thread then. So no thread has to be trusted to survive a fork; Arrow frees pages without it, too."""
_NEVER = ("__main__", "sitecustomize", "usercustomize")
_OWN = "robust_slurm"
"""Our own package. The parts that ranks import do not depend on the rank when imported."""


def import_all(modules: Sequence[Sequence[str]], named: Sequence[str]) -> None:
    """Import what is installed, and packages that are ``named``.

    Other modules of the script's are the rank's to import: they may do anything then. The
    environment is the caller's to restore.
    """
    from importlib import import_module
    from importlib.util import find_spec

    variable, off = _NO_THREAD
    os.environ[variable] = ",".join(filter(None, (os.environ.get(variable), off)))  # the last wins
    installed, threads = _installed(), _threads()
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # noqa: PTH100, PTH120
    usable: dict[str, bool] = {}
    # These first: else their threads would count as those of a module that imports them.
    first = [m for m in modules if m[0].partition(".")[0] in _THREADS_END_AT_FORK]
    for name, origin in [*first, *modules]:
        top = name.partition(".")[0]
        if name in sys.modules or top in _NEVER or not usable.get(top, True):
            continue
        ours = origin in ("built-in", "frozen") or origin.startswith(installed)
        ours = ours or (top == _OWN and origin.startswith(package))
        if not ours and top not in named:
            continue
        if top not in usable:
            found = find_spec(top)
            usable[top] = found is not None
            if name == top and (found is None or found.origin != origin):
                usable[top] = False
            if not usable[top]:
                continue
        try:
            import_module(name)
        except Exception:  # noqa: BLE001 - the rank sees it, if it imports this at all
            continue
        now = _threads()
        if now > threads and top not in _THREADS_END_AT_FORK:
            raise RuntimeError(f"importing {name} starts a thread, so it cannot be done ahead")
        threads = now
    _check_fork()


def _installed() -> tuple[str, ...]:
    """Directories of installed modules."""
    import site
    import sysconfig

    paths = [sysconfig.get_path(n) for n in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple({os.path.join(path, "") for path in paths if path})  # noqa: PTH118


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208


def _check_fork() -> None:
    """Raise RuntimeError when a child of this process could not do what a fresh one can."""
    threading = sys.modules.get("threading")
    if threading is not None and threading.active_count() > 1:
        raise RuntimeError("a thread runs after importing, so it cannot be done ahead")
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        raise RuntimeError("importing initialises CUDA, so it cannot be done ahead")
    connection = getattr(sys.modules.get("_sqlite3"), "Connection", None)
    if connection is not None:
        import gc

        if any(issubclass(type(found), connection) for found in gc.get_objects()):
            raise RuntimeError("importing opens a database, so it cannot be done ahead")
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
        except OSError:
            continue
        if target.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri")):
            raise RuntimeError(f"importing opens {target}, so it cannot be done ahead")
