"""The batch script that robust-srun runs in: its text, its arguments, and its ``--no-kill``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from robust_slurm import process_stat

NO_KILL_LINE = "#SBATCH --no-kill"
# Short options of sbatch without a value may stand together; "-Jtalk" is no "-k".
_NO_KILL = re.compile(
    r"^#SBATCH[ \t]+(.*[ \t])?(--no-kill|-[hHIOQsuvVW]*k[hHIOQsuvVWk]*)(=set)?[ \t\r]*($|[ \t])",
    re.MULTILINE,
)


def batch_script(env: Mapping[str, str]) -> str | None:
    """The text of the batch script that we run in; None outside one."""
    words = script_words(env)
    try:
        return Path(words[0]).read_text(errors="replace") if words else None
    except OSError:
        return None


def script_words(env: Mapping[str, str]) -> list[str]:
    """The batch script and its arguments, from our ancestors' command lines; else empty."""
    if env.get("ENVIRONMENT") != "BATCH":
        return []
    pid = os.getppid()
    for _ in range(8):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
            parent = process_stat.read(pid).parent
        except (OSError, ValueError):
            return []
        for index, word in enumerate(words):
            if word.endswith("/slurm_script"):
                return words[index:]
        pid = parent
        if pid <= 1:
            return []
    return []


def has_no_kill(script: str, env: Mapping[str, str]) -> bool:
    if "SBATCH_NO_KILL" in env or "SLURM_NO_KILL" in env:
        return True
    return bool(_NO_KILL.search(script))
