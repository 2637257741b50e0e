"""The script that a rank runs, if it is another file than that of its warm interpreter.

Python makes the script's path absolute when it starts, long before ``sitecustomize``. A rank that
is forked for another version of the code has its script in another directory. What Python does
with that path first, after ``site``, is to check if it can be imported from, as a directory or an
archive can. ``run_instead`` makes that check succeed; when Python then calls ``runpy``, the rank's
own script is run in its place. It is run by the function that Python itself uses for
scripts, with no frame of ours below it, so that ``__main__``, ``sys.path[0]``, tracebacks and exit
codes are those of a fresh start.

Modules may read the environment when they are imported. So a script that sets it in another way
than the script with which the interpreter was started gets a cold start.

Standard library only, Python 3.9 syntax.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

NO_FILE = ("", "-", "-c", "-m")  # as ``sys.argv[0]``
_TRIED = ((3, 9), (3, 13))
"""CPython's first and last version that is known to start a script in this way."""
_SETS = frozenset(("environ", "environb", "putenv", "unsetenv"))


class Script:
    """The script of this interpreter. Made before anything changes the working directory."""

    def __init__(self) -> None:
        self._given = sys.argv[0]
        self._arguments = len(sys.argv) - 1
        here = os.path.join(os.getcwd(), self._given)  # noqa: PTH109, PTH118
        self._started = "" if self._given in NO_FILE else here
        self._settings: tuple[str, ...] = ()

    def of(self, words: Sequence[str], directory: str) -> str:
        """Return the path of the script that a rank with this command line runs in ``directory``;
        "": none, as with -m."""
        if not self._started:
            return ""
        word = words[len(words) - self._arguments - 1] if len(words) > self._arguments else ""
        # A relative word beside an absolute path was looked up in PATH.
        given = word if os.path.isabs(word) else self._given  # noqa: PTH117
        return os.path.join(os.path.realpath(directory), given)  # noqa: PTH118

    def check(self, path: str, ahead: bool) -> None:
        """Raise RuntimeError if ``path`` is another file that could not be run in its place.
        ``ahead``: none can be."""
        if path in ("", self._started):
            return
        first, last = _TRIED
        tried = sys.implementation.name == "cpython" and first <= sys.version_info[:2] <= last
        if ahead or not tried or not path.endswith(".py") or not os.path.isfile(path):  # noqa: PTH113
            raise RuntimeError(f"the script is another file, {path}")

    def begin(self, words: Sequence[str]) -> None:
        """Note what the program sets in its environment. ``words``: this process's command line."""
        self._settings = self._set(words, os.getcwd())  # noqa: PTH109

    def check_settings(self, words: Sequence[str], directory: str) -> None:
        """Raise RuntimeError if the program of a rank sets its environment otherwise than the one
        under which the modules were imported, of which one may have read it."""
        if self._set(words, directory) != self._settings:
            raise RuntimeError("the script sets its environment otherwise than at the last start")

    def _set(self, words: Sequence[str], directory: str) -> tuple[str, ...]:
        path = self.of(words, directory)
        if self._given == "-m" and len(words) > self._arguments:
            parts = words[len(words) - self._arguments - 1].split(".")
            path = os.path.join(directory, *parts)  # noqa: PTH118
            path = f"{path}.py" if os.path.isfile(f"{path}.py") else f"{path}/__main__.py"  # noqa: PTH113
        return settings(path)

    def become(self, words: Sequence[str], path: str, shown: list[str]) -> None:
        """Take the arguments of a rank with this command line, and have Python run ``path``, which
        has been checked. ``shown``: this process's command line."""
        count = self._arguments
        moved = path not in ("", self._started)
        if moved and os.path.isabs(self._given):  # noqa: PTH117
            count += 1
        taken = words[len(words) - count :]
        for each in (sys.argv, getattr(sys, "orig_argv", sys.argv), shown):
            each[len(each) - count :] = taken
        if moved:
            run_instead(self._started, path)


def settings(path: str) -> tuple[str, ...]:
    """Return what a Python file does to its environment, by statements; none if there is no
    such file."""
    import ast

    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except OSError:
        return ()
    except (SyntaxError, ValueError):
        return ("?",)
    found = []
    for statement in ast.walk(tree):
        if not isinstance(statement, ast.stmt) or hasattr(statement, "body"):
            continue
        parts = list(ast.walk(statement))
        read = [part.value for part in parts if _reads(part)]  # type: ignore[attr-defined]
        if any(_name(part) in _SETS and part not in read for part in parts):
            found.append(ast.dump(statement))
    return tuple(found)


def _name(part: object) -> str | None:
    return getattr(part, "attr", None) or getattr(part, "id", None)


def _reads(part: object) -> bool:
    """True for ``value[...]`` and ``value.get`` that change nothing."""
    if type(part).__name__ == "Subscript":
        return type(part.ctx).__name__ == "Load"  # type: ignore[attr-defined]
    return type(part).__name__ == "Attribute" and _name(part) == "get"


def run_instead(started: str, path: str) -> None:
    """Run ``path`` when Python comes to run the script with which it was ``started``."""
    import runpy

    usual = runpy.__dict__.pop("_run_module_as_main")
    real = os.path.realpath(started)
    asked = started

    def importable(entry: str) -> Any:
        nonlocal asked
        if entry != started and os.path.realpath(entry) != real:
            raise ImportError(entry)  # the next hook's
        asked = entry  # as Python spells it
        return importable

    def attribute(name: str) -> Callable[..., object]:
        """Python has put ``asked`` first in its path, and fetches what it will call."""
        if name != "_run_module_as_main":
            raise AttributeError(f"module 'runpy' has no attribute {name!r}")
        del runpy.__dict__["__getattr__"]
        runpy.__dict__[name] = usual
        sys.path_hooks.remove(importable)
        sys.path_importer_cache.pop(asked, None)
        sys.path.remove(asked)
        if not getattr(sys.flags, "safe_path", False):
            sys.path.insert(0, os.path.dirname(os.path.realpath(path)))  # noqa: PTH120
        return _runner(path)

    runpy.__dict__["__getattr__"] = attribute
    sys.path_hooks.insert(0, importable)
    sys.path_importer_cache.pop(started, None)


def _runner(path: str) -> Callable[..., object]:
    """A callable without a frame of its own that runs the file as ``__main__``."""
    import ctypes
    from functools import partial

    def ended(status: int, _function: object, _arguments: object) -> None:
        if status:
            raise SystemExit(1)  # the traceback has been printed

    name = os.fsencode(path)
    fopen = ctypes.CDLL(None, use_errno=True).fopen
    fopen.restype = ctypes.c_void_p
    file = fopen(name, b"rbe")
    if not file:
        raise OSError(ctypes.get_errno(), "cannot open the script", path)
    run = ctypes.PyDLL(None).PyRun_AnyFileExFlags
    run.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p]
    run.errcheck = ended  # type: ignore[assignment]
    return partial(run, file, name, 1, None)  # what Python adds are words for runpy
