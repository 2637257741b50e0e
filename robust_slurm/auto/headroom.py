"""Memory that this process may still take: of the machine, and within every cgroup around it.

Standard library only, Python 3.9 syntax.
"""

from __future__ import annotations

_ROOT = "/sys/fs/cgroup"


def headroom(proc: str = "/proc", root: str = _ROOT) -> int:
    """Return bytes. Memory that the kernel could take back (the cache of files) counts as free."""
    found = [_available(proc)]
    for line in _lines(f"{proc}/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            found += _levels(root, path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            found += _levels(f"{root}/memory", path, *names)
    return max(0, min(found))


def _available(proc: str) -> int:
    for line in _lines(f"{proc}/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 1 << 62


def _levels(root: str, path: str, most: str, used: str, prefix: str) -> list[int]:
    """Return the bytes that each level of a hierarchy still allows: each has a limit of its own."""
    found = []
    while True:
        here = f"{root}{path.rstrip('/')}"
        limit, usage = _number(f"{here}/{most}"), _number(f"{here}/{used}")
        if limit is not None and usage is not None and limit < 1 << 60:
            cache = (f"{prefix}inactive_file ", f"{prefix}active_file ")
            lines = _lines(f"{here}/memory.stat")
            back = sum(int(line.split()[1]) for line in lines if line.startswith(cache))
            found.append(limit - usage + back)
        if path in ("", "/"):
            return found
        path = path.rstrip("/").rpartition("/")[0]


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []


def _number(path: str) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None
