"""A prefix that hangs, breaks or vanishes under the stubs, on all nodes at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from bench.attacks.attack import Attack, Got
from bench.attacks.cases.trust import prefix
from bench.attacks.room import QUIET, Ended, Room
from lab import linux

_MOST_S = 15.0  # for a stub to give up: 10 s to load, and a loaded machine


def _stub(room: Room, name: str, settings: str = "", on_missing: str = "skip") -> tuple[Path, Path]:
    """Write a stub as robust-admin does; return it, and its prefix's site-packages."""
    from health.admin import render

    room.site(settings)
    top, packages = prefix(room)
    site = render.Site(
        render.find_prefix(str(top)), str(room.top), "", f"{room.top}/spool", on_missing
    )
    (text,) = (f.text for f in render.node_files(site, "") if f.path == str(room.top / name))
    path = room.top / name
    path.write_text(text)
    path.chmod(0o755)
    return path, packages


def _run(room: Room, stub: Path) -> Ended:
    own = {"SLURM_CONF": f"{room.top}/slurm.conf", "SLURMD_NODENAME": "n1", **room.job()}
    return room.program([stub], own, timeout=40)


def _got(room: Room, ended: Ended) -> Got:
    """The node is healthy: a stub that ends with 1 has Slurm drain it, and nothing counts that."""
    drained = room.drains() or (("n1",) if ended.code else ())
    return Got(
        what=f"exit code {ended.code} after {ended.seconds:.1f} s; {ended.said[-140:]}",
        succeeded=ended.seconds > _MOST_S,
        drained=drained,
        silent=not ended.code and not ended.said,
    )


def _broken(change: Callable[[Room, Path], object], name: str = "prolog") -> Callable[[Room], Got]:
    """A prefix that is changed after its install."""

    def attack(room: Room) -> Got:
        stub, packages = _stub(room, name, f"disabled = {QUIET}")
        change(room, packages)
        return _got(room, _run(room, stub))

    return attack


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _fifo_in_library(room: Room, packages: Path) -> None:
    """Mount a FIFO over a file that Python reads before its first line."""
    os.mkfifo(room.top / "fifo")
    linux.mount(str(room.top / "fifo"), _encodings(), "", linux.MS_BIND)


def _encodings() -> str:
    import encodings

    return str(encodings.__file__)


def _no_library(room: Room, packages: Path) -> None:
    empty = room.directory("empty")
    _encodings()
    linux.mount(str(empty), str(Path(os.__file__).parent), "", linux.MS_BIND)


def _vanishes(room: Room, on_missing: str = "skip") -> Got:
    """The prefix goes while the checks run, and one of them has found a fault."""
    gone = room.top / "gone"
    command = room.top / "bin" / "unmount"
    settings = (
        f"disabled = {QUIET}\n[health.site.commands.own]\nargv = ['{command}']\n"
        "where = ['prolog']\n"
    )
    stub, packages = _stub(room, "prolog", settings, on_missing)
    command.write_text(f"#!/bin/sh\nsleep 0.5\nmv {packages} {gone}\necho bad\nexit 1\n")
    command.chmod(0o755)
    ended = _run(room, stub)
    own = bool(room.drains())
    return Got(
        what=f"exit code {ended.code}, {'our own reason' if own else 'no reason of ours'}; "
        f"{ended.said[-120:]}",
        succeeded=bool(ended.code) and not own,
    )


def _by_hand(name: str) -> Callable[[Room], Got]:
    """A person types the program, with no job: it must not record a run of one."""

    def attack(room: Room) -> Got:
        room.site(f"disabled = {QUIET}\n[health.disk]\nmin_free_percent = 99.9\n")
        ended = room.gate(f"{name}.cli")
        history = room.top / "spool" / "history.jsonl"
        told = history.exists() and '"kind":"run"' in history.read_text()
        return Got(
            what=f"exit code {ended.code}, {'a run' if told else 'nothing'} recorded; {ended.said}",
            succeeded=bool(told) or not ended.code,
        )

    return attack


def _of_packages(name: str, text: str) -> Callable[[Room, Path], object]:
    return lambda room, packages: (packages / "robust_slurm" / "_rooms" / name).write_text(text)


def _attack(name: str, tries: str, run: Callable[[Room], Got]) -> Attack:
    return Attack(name=f"stub_{name}", row="drains", tries=tries, run=run)


ATTACKS = [
    _attack(
        "pyvenv_hangs",
        "pyvenv.cfg does not answer",
        _broken(lambda room, packages: _fifo(packages.parents[2] / "pyvenv.cfg")),
    ),
    _attack("library_fifo", "a file of the standard library is a FIFO", _broken(_fifo_in_library)),
    _attack("library_gone", "the standard library is gone", _broken(_no_library)),
    _attack(
        "packages_hang",
        "a package does not answer",
        _broken(_of_packages("prolog/__init__.py", "import time\ntime.sleep(600)\n")),
    ),
    _attack(
        "crashes",
        "Python dies of a signal as it loads",
        _broken(_of_packages("prolog/__init__.py", "import os\nos.kill(os.getpid(), 11)\n")),
    ),
    _attack(
        "late_import",
        "a module that is imported late is gone, in the epilog too",
        _broken(
            lambda room, packages: (packages / "robust_slurm/_rooms/health/run/worker.py").unlink(),
            "epilog",
        ),
    ),
    _attack("vanishes", "the prefix vanishes while the checks run", _vanishes),
    _attack("prolog_by_hand", "robust-prolog typed by hand", _by_hand("prolog")),
    _attack("epilog_by_hand", "robust-epilog typed by hand", _by_hand("epilog")),
]
