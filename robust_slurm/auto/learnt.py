"""Tells the shim, at the rank's first step, what a process must have imported to get that far.

The shim has the same imported ahead of the next start (``warm``). The rank writes one small file
into the directory of the heartbeat, once; whatever goes wrong, the next start is a cold one.

Runs in the rank: standard library only, Python 3.9 syntax.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SUFFIX = ".modules"  # of the file beside a record of the heartbeat (``layout.beside``)
_changes: dict[str, Any] = {}
_told = 0
"""Pid of the process that has told."""


def importing_torch(environ: dict[str, str]) -> None:
    """Record changes to the environment since the start of the interpreter (``environ``): they must
    also be in place when ``warm`` imports torch."""
    now = os.environ
    _changes.update((k, v) for k, v in now.items() if environ.get(k) != v)
    _changes.update((k, None) for k in environ if k not in now and not k.startswith("ROBUST_"))


def tell(path: str) -> None:
    """Write the file, once in a process: to look at every module takes 7 ms. Raises OSError.

    Not from an interpreter that runs without our hook (-I, -E, -S): another one would not wait
    there, but run the script.
    """
    import json

    from robust_slurm.auto import listening

    global _told
    if _told == os.getpid() or not getattr(sys, "_robust_slurm_hook", False):
        return
    _told = os.getpid()
    with open("/proc/self/cmdline", "rb") as file:
        words = [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
    found = []
    for name, module in list(sys.modules.items()):
        origin = getattr(getattr(module, "__spec__", None), "origin", None)
        if isinstance(origin, str):
            found.append((name, origin))
    said = {"pid": os.getpid(), "words": words, "environ": _changes, "modules": found}
    said["store"] = listening.visits = listening.is_used()
    said["standby"] = getattr(sys.modules.get("robust_slurm.standby"), "passed", False)
    fd = os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(said, file)
    os.replace(path + ".new", path)  # noqa: PTH105 - pathlib may not be loaded
