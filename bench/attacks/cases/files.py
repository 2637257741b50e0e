"""Attacks by the records of jobs that root and others read, and by the files that root clears.

In the first kind another user's job has records, too: the attack succeeds if robust-status of root
does not show that job, shows root's secret, takes long, or breaks. In the second kind the epilog
clears a directory, and the attack succeeds if a file of another user or of root's is gone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.attacks.attack import Attack, Got
from bench.attacks.cases.reports import ESC, JOB, NONE, OTHER, SECRET, mount, secret, void
from bench.attacks.room import VICTIM, Room
from bench.common import REPOSITORY, BenchError

LONGEST_S = 30.0


def roster(job: int = JOB, **changes: Any) -> str:
    """Return a roster as robust-srun writes it."""
    made = {"version": 1, "job_id": job, "step_id": "0", "job_name": "llm", "user": "u"}
    made |= {"state": "running", "epoch": 1, "updated": time.time(), "world_size": 4, "nodes": []}
    return json.dumps(made | changes)


def _recorded(jobs: Path, job: int, *files: tuple[str, str]) -> Path:
    made = jobs / str(job)
    (made / "accusations").mkdir(parents=True)
    for name, text in files:
        (made / name).write_text(text)
    return made


def _site(room: Room) -> Path:
    room.site()
    jobs = room.top / "state" / "jobs"
    secret(jobs).write_text(SECRET)
    secret(jobs).chmod(0o600)
    return jobs


def _shown(room: Room) -> Got:
    """Ask robust-status for all jobs and for their use of time, as root."""
    got, seconds = [], 0.0
    for words in (
        ["--json"],
        [],
        ["--lemons", "--json"],
        ["--accounts", "--json"],
        ["--rules", "--json"],
    ):
        argv = [sys.executable, "-m", "status.cli", *words, "--state-dir", f"{room.top}/state"]
        env = {"PYTHONPATH": str(REPOSITORY), "SLURM_CONF": f"{room.top}/slurm.conf"}
        env |= {"PATH": f"{room.top}/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
        ended = room.program(argv, env, timeout=2 * LONGEST_S)
        seconds = max(seconds, ended.seconds)
        everything = ended.out + ended.err
        wrong = {
            f"ended with {ended.code}: {ended.said}": ended.code not in (0, 1),
            "it broke": "Traceback" in everything,
            f"took {ended.seconds:.0f} s": ended.seconds > LONGEST_S,
            "root's secret was shown": SECRET in everything,
            "escapes were let through": "\x1b" in everything,
        }
        if words == ["--json"]:
            wrong["the other user's job is not shown"] = OTHER not in _jobs(ended.out)
        got += [f"{' '.join(words)}: {what}" for what, so in wrong.items() if so]
    return Got(what="; ".join(got) or f"all shown, {seconds:.1f} s at most", succeeded=bool(got))


def _jobs(text: str) -> list[Any]:
    try:
        return [one.get("job_id") for one in json.loads(text)["jobs"]]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise BenchError(f"no list of jobs: {text[:200]!r}") from error


def shown(work: Callable[[Path], object]) -> Callable[[Room], Got]:
    """Return an attack: the user leaves records, and root looks."""

    def run(room: Room) -> Got:
        jobs = _site(room)
        room.as_user(lambda: _recorded(jobs, OTHER, ("roster.0.json", roster(OTHER))), VICTIM)
        room.as_user(lambda: void(work(jobs)))
        return _shown(room)

    return run


def record(*files: tuple[str, str]) -> Callable[[Path], object]:
    """Return an attack that leaves these records."""
    return lambda jobs: _recorded(jobs, JOB, *files)


def _links(jobs: Path) -> None:
    made = _recorded(jobs, JOB)
    for name in ("roster.0.json", "incidents.jsonl", "progress.jsonl", "events.jsonl", "code.json"):
        (made / name).symlink_to(secret(jobs))
    (made / "accusations" / "n1.e1.json").symlink_to(secret(jobs))
    (made / "robust-srun.log").symlink_to(secret(jobs))
    (jobs / "6").symlink_to(jobs / str(OTHER))
    (jobs / "5").symlink_to("/")


def _pipes(jobs: Path) -> None:
    made = _recorded(jobs, JOB)
    for name in ("roster.0.json", "incidents.jsonl", "progress.jsonl", "accusations/n1.e1.json"):
        os.mkfifo(made / name)


def _sparse(jobs: Path) -> None:
    made = _recorded(jobs, JOB)
    for name in ("roster.0.json", "incidents.jsonl", "progress.jsonl", "accusations/n1.e1.json"):
        with (made / name).open("wb") as file:
            file.truncate(1 << 42)


def _closed(jobs: Path) -> None:
    made = _recorded(jobs, JOB, ("roster.0.json", roster()))
    (made / "roster.0.json").chmod(0)
    (made / "accusations").chmod(0)
    made.chmod(0)


def _names(jobs: Path) -> None:
    _recorded(jobs, JOB, ("roster.0.json", roster()))
    for name in (b"9" * 200, b"7\n8", b"\x1b[2J", b"8.\xff", b"-1", b"8.33001.1", b"..8"):
        os.mkdir(os.fsencode(jobs) + b"/" + name)  # noqa: PTH102 - bytes
    place = os.fsencode(jobs / str(JOB))
    for name in (b"roster.\x1b[2J.json", b"roster.\xff\xfe.json", b"roster.a\nb.json"):
        with open(place + b"/" + name, "w") as file:
            file.write(ESC)


def _crowd(jobs: Path) -> None:
    for job in range(100_000, 105_000):
        (jobs / str(job)).mkdir()


def _swapping(room: Room) -> Got:
    """Exchange the roster for a link to root's secret while root reads it."""
    from bench.attacks.cases.reports import _racing

    jobs = _site(room)
    room.as_user(lambda: _recorded(jobs, OTHER, ("roster.0.json", roster(OTHER))), VICTIM)

    def make() -> None:
        made = _recorded(jobs, JOB, ("roster.0.json", roster()))
        (made / "link").symlink_to(secret(jobs))

    room.as_user(make)
    pid = _racing(room, jobs / str(JOB) / "roster.0.json", jobs / str(JOB) / "link")
    try:
        return _shown(room)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def _mounted(room: Room) -> Got:
    """Mount a FUSE file system that refuses root on the job directory."""
    jobs = _site(room)
    room.as_user(lambda: _recorded(jobs, OTHER, ("roster.0.json", roster(OTHER))), VICTIM)
    room.as_user(lambda: _recorded(jobs, JOB))
    mount(jobs / str(JOB), shared=False, stale=False)
    return _shown(room)


_HUGE = "1" + "0" * 400
_SHOWN: tuple[tuple[str, str, Callable[[Path], object]], ...] = (
    ("links", "its records, its log and other jobs' directories are links", _links),
    ("pipes", "its records are FIFOs", _pipes),
    ("sparse", "its records are 4 TB each, without a block on disk", _sparse),
    ("closed", "chmod 000 of its records and directories", _closed),
    ("names", "directories and rosters with ESC, line ends, bytes that are no text", _names),
    ("crowd", "5,000 directories of jobs to come", _crowd),
    ("nested", "rosters and incidents of brackets without end",
     record(("roster.0.json", "[" * 99_999), ("incidents.jsonl", '{"a":' * 9999 + "\n"))),
    ("digits", "numbers of 400 digits, infinite or none in each record",
     record(("roster.0.json", roster().replace(": 4", f": {_HUGE}").replace(": 1,", f": {_HUGE},")),
            ("roster.1.json", roster(updated=float("nan"), started=float("inf"), ettr=10**400)),
            ("incidents.jsonl", f'{{"id":"0-1","time":{_HUGE},"epoch":{_HUGE}}}\n'),
            ("progress.jsonl", f'{{"time":{time.time()},"event":"start","ranks":{_HUGE}}}\n'))),
    ("escapes", "escapes in every text", record(
        ("roster.0.json", roster(job_name=ESC, user=ESC, state=ESC, note=ESC, host=ESC)),
        ("incidents.jsonl", json.dumps({"id": ESC, "time": time.time(), "cause": ESC}) + "\n"))),
    ("twice", "each key twice: at last of another user's job",
     record(("roster.0.json", roster()[:-1] + f',"job_id":{OTHER},"user":"root"}}'))),
    ("others_job", "a roster and an incident in the name of another user's job",
     record(("roster.0.json", roster(OTHER)), ("roster.1.json", roster(-1)))),
    ("types", "lists where numbers belong, numbers where texts do",
     record(("roster.0.json", json.dumps({**json.loads(roster()), "nodes": {"a": 1}, "user": 7,
                                          "checkpoint": [1], "data": "x", "incidents": {}})))),
)  # fmt: skip


# -- files that root clears -------------------------------------------------------------------


def cleared(work: Callable[[Path, Path], None], race: bool = False) -> Callable[[Room], Got]:
    """Return an attack: the user leaves files in a directory that the epilog clears."""

    def run(room: Room) -> Got:
        scratch, theirs = room.directory("scratch", mode=0o1777), room.directory("theirs", VICTIM)
        room.site(
            f'disabled = {NONE}\n[epilog]\nleftovers = "user"\nclean_shm = false\n'
            f'clean_dirs = ["{scratch}"]'
        )
        kept = [theirs / "a", theirs / "b", room.top / "secret"]
        for path in kept:
            path.write_text(SECRET)
        room.own(theirs, VICTIM)
        theirs.chmod(0o777)
        room.as_user(lambda: work(scratch, theirs))
        pid = 0
        if race:
            from bench.attacks.cases.reports import _racing

            pid = _racing(room, scratch / "inner", scratch / "link")
        time.sleep(1.1)  # younger files than the job's end stay
        try:
            ended = room.gate("epilog.cli", room.job(), timeout=60)
        finally:
            if pid:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
        gone = [path.name for path in kept if not path.exists()]
        late = ended.seconds > LONGEST_S
        what = f"gone: {gone}" if gone else f"nothing of others is gone, {ended.seconds:.1f} s"
        return Got(what=what, succeeded=bool(gone) or late or ended.code != 0, drained=())

    return run


def _link_to_others(scratch: Path, theirs: Path) -> None:
    (scratch / "link").symlink_to(theirs)
    (scratch / "own").mkdir()
    (scratch / "own" / "up").symlink_to(theirs.parent)


def _deep(scratch: Path, _theirs: Path) -> None:
    os.chdir(scratch)
    for name in ["d" * 200] * 600:
        os.mkdir(name)  # noqa: PTH102 - the path is longer than any may be
        os.chdir(name)


def _exchanged(scratch: Path, theirs: Path) -> None:
    (scratch / "inner").mkdir()
    for number in range(2000):
        (scratch / "inner" / f"f{number}").touch()
    (scratch / "inner" / "a").touch()
    (scratch / "link").symlink_to(theirs)


def _named_like_others(scratch: Path, theirs: Path) -> None:
    for name in (b"..\n", b"\xff", b"\x1b[2J", b"-rf", b"a b;rm"):
        os.mkdir(os.fsencode(scratch) + b"/" + name)  # noqa: PTH102 - bytes
    (scratch / "x").mkdir()
    (scratch / "x" / "a").symlink_to(theirs / "a")


ATTACKS = [
    *(
        Attack(name=f"record_{name}", row="files", tries=tries, run=shown(work), seconds=120)
        for name, tries, work in _SHOWN
    ),
    *(
        Attack(name=f"record_{name}", row="files", tries=tries, run=run, seconds=120)
        for name, tries, run in (
            ("race", "exchanges its roster for a link to root's file while it is read", _swapping),
            ("mount", "a FUSE mount on its job directory refuses root", _mounted),
        )
    ),
    *(
        Attack(name=f"clear_{name}", row="files", tries=tries, run=run, seconds=90)
        for name, tries, run in (
            (
                "links",
                "links to another user's files where the epilog clears",
                cleared(_link_to_others),
            ),
            ("names", "names made to hurt where the epilog clears", cleared(_named_like_others)),
            ("deep", "a path of 120 KB where the epilog clears", cleared(_deep)),
            (
                "race",
                "exchanges its directory for a link to another user's while the epilog clears",
                cleared(_exchanged, race=True),
            ),
        )
    ),
]
