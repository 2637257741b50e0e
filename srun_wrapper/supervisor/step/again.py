"""Begin again in the same process after the job's srun was killed: as if called once more."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, MutableMapping
from typing import NoReturn

from robust_slurm import commands

AGAIN = -1  # stands for an exit code: robust-srun is to begin again
MOST = 3  # times that it does
TIMES = "ROBUST_SRUN_TIMES"  # how often it did
_times = 0


def note(env: MutableMapping[str, str]) -> None:
    """Note how often this process has begun again; the mark is not for the ranks."""
    global _times
    times = env.pop(TIMES, "")
    _times = int(times) if times.isdecimal() else 0


def left() -> int:
    """Return how often robust-srun may still begin again."""
    return MOST - _times


def begin(argv: list[str], env: Mapping[str, str]) -> NoReturn:
    """Become a new robust-srun with these words and this environment. Raises OSError."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    own = [*commands.own_python(), "-I", *commands.own_words("srun_wrapper.cli")]
    os.execve(own[0], [*own, *argv], {**env, TIMES: str(_times + 1)})
