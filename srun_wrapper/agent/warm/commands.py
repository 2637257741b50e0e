"""Commands and their environments, as a warm interpreter compares and receives them (pure)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from robust_slurm.auto.snapshot_paths import TREE

_AT_START = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OMP_", "KMP_", "MKL_", "OPENBLAS_")
"""Environment that counts when an interpreter starts or a library is loaded."""

Command = tuple[Sequence[str], Mapping[str, str]]
"""The words of a command line, and its environment."""


def at_start(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that count when an interpreter starts."""
    return {name: value for name, value in env.items() if name.startswith(_AT_START)}


def same_start(one: Command, other: Command, arguments: int) -> bool:
    """True if both start the same interpreter with the same script; the last ``arguments`` words,
    the script's own, may differ. The same script is also the same file of another snapshot."""
    (words, env), (other_words, other_env) = one, other
    count = len(other_words) - arguments
    same = len(words) == len(other_words) and count > 0
    same = same and list(words[: count - 1]) == list(other_words[: count - 1])
    same = same and _inside(words[count - 1], env) == _inside(other_words[count - 1], other_env)
    return same and at_start(env) == at_start(other_env)


def _inside(word: str, env: Mapping[str, str]) -> tuple[bool, str]:
    """Return True and the path below the snapshot that this environment names, if the word is a
    path in it; else False and the word."""
    tree = env.get(TREE, "")
    inside = bool(tree) and word.startswith(tree + "/")
    return inside, word.removeprefix(tree + "/") if inside else word


def same_path(env: Mapping[str, str], started: str, directory: str) -> bool:
    """True if PYTHONPATH means the same in ``directory`` as in ``started``, an interpreter's own;
    "": this process's directory."""
    path, here = env.get("PYTHONPATH", "").split(os.pathsep), str(Path.cwd())
    absolute = all(entry.startswith("/") for entry in path)
    return absolute or (directory or here) == (started or here)


def request_of(command: Sequence[str], env: Mapping[str, str], directory: str) -> dict[str, object]:
    """Return the request for a rank; ``directory``: default this process's."""
    directory = directory or str(Path.cwd())
    return {"words": list(command), "environ": dict(env), "directory": directory}


def is_text(values: Iterable[str]) -> bool:
    """True if they can be sent as text; an old file name may not be UTF-8."""
    try:
        "".join(values).encode()
    except UnicodeEncodeError:
        return False
    return True
