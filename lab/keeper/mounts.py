"""A node's view of the file system: the directories it covers, the paths that stay reachable.

A node covers /tmp, /dev/shm and /run with its own. A directory that ordinary users cannot search
(say /root, mode 0700, with the clone or the virtual environment below it) is covered by an empty
one that they can, and the wanted paths are shown again inside it. Nothing of this leaves the
node's mount namespace.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from lab import linux
from lab.machine import plant
from lab.slurm import releases
from lab.spec import HEAD, OWN_DIRS, LabSpec

# Limited, because what `fill` writes takes the machine's memory.
_SIZES = {"/tmp": "size=256m"}
_SPOOL_SIZE = "size=64m"


class Cover(NamedTuple):
    """An empty tmpfs over `top` (octal `mode`), with each path of `shown` bound into it again."""

    top: str
    mode: int
    shown: tuple[str, ...]


def plan_covers(
    visible: Iterable[str], is_closed: Callable[[str], bool], children: Callable[[str], list[str]]
) -> list[Cover]:
    """Return the directories to cover so that an ordinary user reaches all of `visible`.

    `is_closed` tells whether others may not search a directory, `children` lists its entries.
    A visible path that is closed itself is shown entry by entry. Nested paths are shown once.
    """
    tops: dict[str, list[str]] = {top: [] for top in OWN_DIRS}
    done: list[str] = []
    for path in sorted({str(Path(p)) for p in visible}, key=lambda p: (p.count("/"), p)):
        if path == "/" or any(_below(path, other) for other in done):
            continue
        done.append(path)
        chain = [str(p) for p in reversed(Path(path).parents) if str(p) != "/"]
        top = next((d for d in [*chain, path] if d in tops or is_closed(d)), None)
        if top is None:
            continue
        shown = children(path) if is_closed(path) else [path]
        tops.setdefault(top, []).extend(shown)
    return [Cover(top, OWN_DIRS.get(top, 0o755), tuple(shown)) for top, shown in tops.items()]


def _below(path: str, top: str) -> bool:
    return path == top or path.startswith(f"{top}/")


def host_is_closed(directory: str) -> bool:
    """Return whether users other than the owner cannot search and list `directory`."""
    return Path(directory).stat().st_mode & 0o005 != 0o005


def host_children(directory: str) -> list[str]:
    return [str(p) for p in Path(directory).iterdir() if not p.is_symlink()]


def apply_cover(cover: Cover) -> None:
    """Mount `cover` in the mount namespace of this process."""
    held = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in cover.shown]
    flags = linux.MS_NOSUID | linux.MS_NODEV
    options = ",".join(filter(None, [f"mode={cover.mode:o}", _SIZES.get(cover.top)]))
    linux.mount("tmpfs", cover.top, "tmpfs", flags, options)
    for path, fd in held:
        source = f"/proc/self/fd/{fd}"
        target = Path(path)
        target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        if Path(source).is_dir():
            target.mkdir(mode=0o755, exist_ok=True)
        else:
            target.touch()
        linux.bind(source, path)
        os.close(fd)


def build_view(spec: LabSpec, node: str, covers: Iterable[Cover]) -> None:
    """Turn the mount namespace of this process into the node's view (it must be its own)."""
    linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV)
    for cover in covers:
        apply_cover(cover)
    etc = spec.dir / "etc"
    for name in ("passwd", "group", "hosts"):
        linux.bind(str(etc / name), f"/etc/{name}")
    if (etc / "fstab").exists() and Path("/etc/fstab").exists():
        linux.bind(str(etc / "fstab"), "/etc/fstab")
    if Path("/etc/slurm").is_dir():  # commands find the lab even without SLURM_CONF
        linux.bind(str(etc), "/etc/slurm")
    if spec.slurm_root:
        for source, target in releases.overlays(Path(spec.slurm_root)):
            linux.bind(source, target)
    library = plant.copy_library(spec)
    quiet = linux.MS_NOSUID | linux.MS_NODEV
    linux.mount("tmpfs", str(spec.node_dir), "tmpfs", quiet, "mode=755")
    plant.fresh_sys()
    if node != HEAD:
        spec.spool.mkdir(mode=0o755)
        linux.mount("tmpfs", str(spec.spool), "tmpfs", quiet, f"mode=755,{_SPOOL_SIZE}")
        spec.disk_dir.mkdir(mode=0o755)
        linux.bind(str(spec.disk_of(node)), str(spec.disk_dir))
        plant.plant(spec, node, library)
