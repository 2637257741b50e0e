"""Look for the files that starting a rank needs on this node."""

from __future__ import annotations

import itertools
import shutil
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from srun_wrapper.agent.filesystems import UsedMount, mount_of, own_mounts, shared_points, silent
from srun_wrapper.protocol.file_messages import FindFiles, FoundFile, FoundFiles

MOST = 64  # words of a command that are looked at
NO_SCRIPT = ("-c", "-m")  # after these words a file is data


def find(order: FindFiles, directory: str, env: Mapping[str, str]) -> FoundFiles:
    """Return what is found. It may block as long as a file system does: call it in a thread.

    Of a command these files are needed: the program, its script, and whatever it names on file
    systems that other machines serve. What a node has on its own disks may be its own output.
    ``directory``, ``env``: of the ranks.
    """
    mounts = own_mounts()
    words = order.words[:MOST]
    program = shutil.which(words[0], path=env.get("PATH")) if words else None
    asked = [str(Path(directory, path)) for path in (*order.paths, program) if path]
    named = [str(Path(directory, value)) for word in words[1:] if (value := _value(word))]
    dead = silent(shared_points([*asked, *named], mounts), order.seconds)

    def look(paths: Iterable[str]) -> list[FoundFile]:
        on = {path: mount_of(path, mounts) or UsedMount("", "") for path in paths}
        return [
            FoundFile(path, _kind(path) != 0, mount.point, mount.shared)
            for path, mount in on.items()
            if mount.point not in dead
        ]

    plain = itertools.takewhile(lambda word: word not in NO_SCRIPT, words[1:])
    scripts = look(str(Path(directory, word)) for word in plain if not word.startswith("-"))
    script = [each for each in scripts if stat.S_ISREG(_kind(each.path))][:1]
    served = [each for each in look(named) if each.served and each.there]
    files = tuple(dict.fromkeys([*look(asked), *script, *served]))
    return FoundFiles(order.token, files, dead)


def _kind(path: str) -> int:
    """Return the mode of a file; 0 if it cannot be reached, for whatever reason."""
    try:
        return Path(path).stat().st_mode
    except (OSError, ValueError):
        return 0


def _value(word: str) -> str:
    """Return the word of a command, or the value of an option; "" where that is no path."""
    return word.partition("=")[2] if word.startswith("-") else word
