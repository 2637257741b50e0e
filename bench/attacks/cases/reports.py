"""Attacks by what a user leaves among the reports against nodes, which root reads.

In each, a job of another user has reported the node, too. The attack succeeds if that report is not
followed up, if one that is not the attacker's job's own is, if root's secret is read, if the
history fills, if a line of the log is not the gate's own, or if the sweep breaks or takes too long.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.attacks.attack import Attack, Got
from bench.attacks.room import MALLORY, VICTIM, Room
from bench.common import BenchError
from health.checks import ALL
from health.history import events
from lab import linux
from lab.machine import fuse

JOB, OTHER = 7, 8  # of the attacker, and of the other user
NAME = "n1.e3.json"
SECRET = "root:$6$never-shown"
LONGEST_S = 20.0  # a sweep under load; slurmd ends one after 60 s
MOST_EVENTS = 20
NONE = [check.name for check in ALL]
SETTINGS = f'disabled = {NONE}\n[epilog]\nleftovers = "never"\nclean_shm = false'
ESC = "\x1b]0;x\x07\x1b[2J"


def report(job: int = JOB, **changes: Any) -> str:
    """Return a report as robust-srun writes it."""
    made = {"v": 1, "node": "n1", "incident": "e3", "job": job, "user": "u", "time": time.time()}
    return json.dumps(made | {"symptom": "node_lost", "evidence": ["silent for 6 s"]} | changes)


def leave(jobs: Path, job: int) -> Path:
    """Make a job's directory as its user; return the place for its reports."""
    made = jobs / str(job) / "accusations"
    made.mkdir(parents=True)
    return made


def put(name: str, text: str) -> Callable[[Path], None]:
    """Return an attack that leaves this file among its job's reports."""
    return lambda jobs: void(leave(jobs, JOB).joinpath(name).write_text(text))


def void(_: object) -> None:
    """Return None."""


def secret(jobs: Path) -> Path:
    """Return the place of root's secret."""
    return jobs.parent.parent / "secret"


def prepared(room: Room, settings: str = SETTINGS) -> Path:
    """Make a site with root's secret and the report of the other user; return ``jobs``."""
    room.site(settings)
    jobs = room.top / "state" / "jobs"
    secret(jobs).write_text(SECRET)
    secret(jobs).chmod(0o600)
    for job, uid in ((OTHER, VICTIM), (JOB, MALLORY)):  # the attacker's ends last: read first
        ended = room.gate("epilog.cli", room.job(job, uid))
        if ended.code:
            raise BenchError(f"the epilog of job {job} ended with {ended.code}: {ended.said}")
    return jobs


def swept(room: Room, *, own: int = 0) -> Got:
    """Sweep; return what came of it. ``own``: reports of the attacker that may be followed up."""
    ended = room.gate("health.sweep", timeout=2 * LONGEST_S)
    found = events.load(str(room.top / "spool"))
    followed = [e.data.get("job") for e in found if e.kind == "accusation"]
    lines = [line for line in ended.err.splitlines() if not line.startswith("robust: ")]
    everything = ended.err + json.dumps([e._asdict() for e in found], ensure_ascii=False)
    wrong = {
        f"ended with {ended.code} after {ended.seconds:.1f} s": ended.code
        or ended.seconds > LONGEST_S,
        "the other user's report was not read": followed.count(OTHER) != 1,
        "a report that is no own one counts": followed.count(JOB) > own,
        "root's secret was read": SECRET in everything,
        "it broke": any(e.kind == "crash" for e in found),
        f"{len(found)} events": len(found) > MOST_EVENTS,
        "escapes were let through": "\x1b" in everything,
        f"a line of its own: {lines[:1]}": lines,
    }
    got = [what for what, so in wrong.items() if so]
    said = next((line for line in ended.err.splitlines() if "reject" in line), "not a word")
    what = "; ".join(got) or f"{said.removeprefix('robust: ')[:90]}, {ended.seconds:.1f} s"
    return Got(what=what, succeeded=bool(got), drained=room.drains())


def left(work: Callable[[Path], None], *, own: int = 0) -> Callable[[Room], Got]:
    """Return an attack: the user leaves something, and the sweep comes."""

    def run(room: Room) -> Got:
        jobs = prepared(room)
        room.as_user(
            lambda: void(leave(jobs, OTHER).joinpath(NAME).write_text(report(OTHER))), VICTIM
        )
        room.as_user(lambda: work(jobs))
        return swept(room, own=own)

    return run


def _closed(jobs: Path) -> None:
    leave(jobs, JOB).parent.chmod(0)


def _closed_below(jobs: Path) -> None:
    leave(jobs, JOB).chmod(0)


def _others_directory(jobs: Path) -> None:
    leave(jobs, JOB).rmdir()
    (jobs / str(JOB) / "accusations").symlink_to(jobs / str(OTHER) / "accusations")


def _secret_by_link(jobs: Path) -> None:
    (leave(jobs, JOB) / NAME).symlink_to(secret(jobs))


def _hard_link(jobs: Path) -> None:
    place = leave(jobs, JOB)
    with contextlib.suppress(OSError):  # fs.protected_hardlinks
        (place / NAME).hardlink_to(jobs / str(OTHER) / "accusations" / NAME)


def _fifo(jobs: Path) -> None:
    os.mkfifo(leave(jobs, JOB) / NAME)


def _socket_and_device(jobs: Path) -> None:
    place = leave(jobs, JOB)
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(place)
        server.bind(NAME)
    with contextlib.suppress(PermissionError):
        os.mknod(place / "n1.e4.json", 0o20666, os.makedev(1, 5))
    (place / "n1.e5.json").symlink_to("/dev/zero")
    (place / "n1.e6.json").symlink_to("/proc/kmsg")


def _sparse(jobs: Path) -> None:
    with (leave(jobs, JOB) / NAME).open("wb") as file:
        file.truncate(1 << 42)


def _deep(jobs: Path) -> None:
    os.chdir(leave(jobs, JOB))
    for name in [NAME, *["d" * 200] * 300]:
        os.mkdir(name)  # noqa: PTH102 - the path is longer than any may be
        os.chdir(name)


def _many(jobs: Path) -> None:
    place = leave(jobs, JOB)
    for number in range(30_000):
        (place / f"n1.{number}.json").touch()


def _names(jobs: Path) -> None:
    place = os.fsencode(leave(jobs, JOB))
    for name in (
        b"n1.\x1b[2J\x1b]0;x\x07.json",
        b"n1.a\nrobust: n1 undrained: every check passes.json",
        b"n1.\xff\xfe\x80.json",
        b"n1..." + b"\xe2\x80\xae" + b".json",
        b"n1." + b"x" * 240 + b".json",
    ):
        with open(place + b"/" + name, "w") as file:
            file.write(report())


def _racing(room: Room, first: Path, second: Path) -> int:
    """Exchange two names as the attacker until the end of the room; return the process."""
    if not (pid := os.fork()):
        os.setgid(MALLORY)
        os.setuid(MALLORY)
        libc = ctypes.CDLL(None)
        one, two = os.fsencode(first), os.fsencode(second)
        while True:
            libc.renameat2(-100, one, -100, two, 2)  # AT_FDCWD, RENAME_EXCHANGE
    return pid


def _race(swap: str) -> Callable[[Room], Got]:
    """Return an attack that exchanges its report, or its directory, for a link all the time."""

    def run(room: Room) -> Got:
        jobs = prepared(room)
        room.as_user(
            lambda: void(leave(jobs, OTHER).joinpath(NAME).write_text(report(OTHER))), VICTIM
        )

        def make() -> None:
            place = leave(jobs, JOB)
            (place / NAME).write_text(report())
            link = jobs / str(JOB) / "link"
            link.symlink_to(secret(jobs) if swap == NAME else jobs / str(OTHER) / "accusations")

        room.as_user(make)
        below = jobs / str(JOB)
        target = below / "accusations" / NAME if swap == NAME else below / "accusations"
        pid = _racing(room, target, below / "link")
        try:
            rounds = [swept(room, own=1) for _ in range(3)]
        finally:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        return max(rounds, key=lambda one: (one.succeeded, one.drained))

    return run


def mount(place: Path, *, shared: bool, stale: bool) -> None:
    """Mount a FUSE file system of the attacker there, as fusermount does for any user.

    ``shared``: it lets others in (user_allow_other), and with ``stale`` it answers nobody.
    """
    device = os.open("/dev/fuse", os.O_RDWR)
    words = fuse.options(device).replace(
        "user_id=0,group_id=0", f"user_id={MALLORY},group_id={MALLORY}"
    )
    linux.mount(
        "own", str(place), "fuse", 6, words if shared else words.replace(",allow_other", "")
    )
    if not (server := os.fork()):
        fuse.serve(device)
    os.close(device)
    if shared:
        fuse.probe(str(place))
        os.chown(place, MALLORY, MALLORY)
    if stale:
        os.kill(server, 10)
        time.sleep(0.3)


def _mounted(below: str, *, shared: bool, stale: bool) -> Callable[[Room], Got]:
    def run(room: Room) -> Got:
        jobs = prepared(room)
        room.as_user(
            lambda: void(leave(jobs, OTHER).joinpath(NAME).write_text(report(OTHER))), VICTIM
        )
        room.as_user(lambda: void(leave(jobs, JOB)))
        mount(jobs / str(JOB) / below, shared=shared, stale=stale)
        return swept(room)

    return run


def _squat(room: Room) -> Got:
    """Make the other user's job directory first, with a report in it."""
    jobs = prepared(room)

    def take() -> None:
        (leave(jobs, OTHER) / NAME).write_text(report(OTHER, evidence=["a lie"]))

    room.as_user(take)
    mine = jobs / f"{OTHER}.{VICTIM}.1" / "accusations"

    def other() -> None:
        mine.mkdir(parents=True)
        (mine / NAME).write_text(report(OTHER))

    room.as_user(other, VICTIM)
    got = swept(room)
    told = [e for e in events.load(str(room.top / "spool")) if e.data.get("said") == ["a lie"]]
    return Got(what="a lie counts", succeeded=True) if told else got


def _withdraw(room: Room) -> Got:
    """Take the other user's report back."""
    jobs = prepared(room)
    room.as_user(lambda: void(leave(jobs, OTHER).joinpath(NAME).write_text(report(OTHER))), VICTIM)
    first = swept(room)

    def take_back() -> None:
        place = leave(jobs, JOB)
        for job in (JOB, OTHER):
            (place / f"n1.e{job}.withdrawn.json").write_text(
                report(job, incident=f"e{job}", withdrawn="it was well")
            )
        (place / "n1.e3.withdrawn.json").write_text(report(OTHER, withdrawn="it was well"))

    room.as_user(take_back)
    room.gate("health.sweep")
    back = [e for e in events.load(str(room.top / "spool")) if e.kind == "withdrawn"]
    what = f"{len(back)} withdrawals of another's strike" if back else first.what
    return Got(what=what, succeeded=bool(back) or first.succeeded, drained=room.drains())


_LEFT: tuple[tuple[str, str, Callable[[Path], None], int], ...] = (
    ("closed", "chmod 000 of its own job directory", _closed, 0),
    ("closed_below", "chmod 000 of its own directory of reports", _closed_below, 0),
    (
        "others_directory",
        "its directory of reports is a link to another user's",
        _others_directory,
        0,
    ),
    ("secret_by_link", "a report is a link to a file of root's", _secret_by_link, 0),
    ("hard_link", "a report is a hard link to another user's", _hard_link, 0),
    ("fifo", "a report is a FIFO that nobody writes to", _fifo, 0),
    (
        "devices",
        "reports are a socket, a device, links to /dev/zero and /proc/kmsg",
        _socket_and_device,
        0,
    ),
    ("sparse", "a report of 4 TB without a block on disk", _sparse, 0),
    ("deep", "a report is a directory 300 levels deep: a path of 60 KB", _deep, 0),
    ("many", "30,000 empty reports against the node", _many, 0),
    ("names", "names with ESC, line ends, bytes that are no text, 240 letters", _names, 0),
    ("nested", "JSON with 30,000 open brackets", put(NAME, "[" * 30_000), 0),
    ("not_a_number", "a report whose time is NaN", put(NAME, report(time=float("nan"))), 0),
    ("digits", "a time of 400 digits", put(NAME, report(time=10**400)), 0),
    (
        "huge_digits",
        "a time of 60,000 digits",
        put(NAME, report().replace("n1", "n1").replace('"v": 1', '"v": ' + "1" * 60_000)),
        0,
    ),
    (
        "twice",
        "each key twice: first of another node and job",
        put(NAME, '{"node":"n2","job":8,' + report(OTHER)[1:]),
        0,
    ),
    (
        "other_node",
        "a report against another node under this one's name",
        put(NAME, report(node="n2")),
        0,
    ),
    ("other_job", "a report in the name of another user's job", put(NAME, report(OTHER)), 0),
    (
        "no_symptom",
        "a symptom that continues the log",
        put(NAME, report(symptom="x\nrobust: n1 drained")),
        0,
    ),
    (
        "escapes",
        "escapes in 30 long lines of evidence",
        put(NAME, report(evidence=[ESC * 40] * 30)),
        1,
    ),
    (
        "types",
        "lists and numbers where texts belong",
        put(NAME, report(evidence=[[1], {}], incident=3)),
        0,
    ),
)

ATTACKS = [
    *(
        Attack(name=f"report_{name}", row="files", tries=tries, run=left(work, own=own))
        for name, tries, work, own in _LEFT
    ),
    *(
        Attack(name=f"report_{name}", row="files", tries=tries, run=run, seconds=120)
        for name, tries, run in (
            (
                "mount_refuses",
                "a FUSE mount on its job directory refuses root",
                _mounted("", shared=False, stale=False),
            ),
            (
                "mount_silent",
                "a FUSE mount on its directory of reports never answers",
                _mounted("accusations", shared=True, stale=True),
            ),
            (
                "race_file",
                "exchanges its report for a link to root's file while it is read",
                _race(NAME),
            ),
            (
                "race_directory",
                "exchanges its directory for a link to another user's while it is read",
                _race("accusations"),
            ),
            (
                "squat",
                "makes the directory of another user's job first, with a report in it",
                _squat,
            ),
            ("withdraw", "withdraws the report of another user's job", _withdraw),
        )
    ),
]
