"""Find a job user's reports against this node; only their form is checked, nothing is believed.

robust-srun leaves ``<state_dir>/jobs/<job>/accusations/<node>.<incident>.json``. Everything below
``jobs`` belongs to users: a job's directory (under one of its names, see ``job_dirs``) is that of
the job's user, and files of others are ignored. Each directory below it must belong to that user
and be no link, the file must be small and have the fields that robust-srun writes. Anything else
becomes a rejection with its owner and the reason. ``<node>.<incident>.withdrawn.json`` beside a
report withdraws it.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

from health.node.rootfiles import closing
from health.node.silent import call_on
from robust_slurm.state_dir import job_dirs
from robust_slurm.text import one_line

VERSION = 1
SIZE_LIMIT = 64 << 10  # bytes of one file
MOST = 8  # files of one job against one node that are looked at
_NAMES_LIMIT = 20_000  # entries of a directory
_REPORTS = "accusations"  # in the job's directory
_WITHDRAWN = ".withdrawn.json"
_EVIDENCE = 20  # lines kept
_TEXT = 300  # characters of one
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_DIRECTORY = _READ | os.O_DIRECTORY
R = TypeVar("R")


class ReportingJob(NamedTuple):
    """The job and user whose reports to find: ``job`` ran here for ``uid``, as Slurm reported.

    ``of`` is the job in whose directory the reports lie: if ``job`` is a standby allocation, the
    job of the same user that it added a node to.
    """

    job: int
    uid: int
    gid: int
    of: int


class AcceptedReport(NamedTuple):
    name: str  # of the file
    job: int
    uid: int
    time: float  # when the job saw it, by its own clock
    symptom: str
    evidence: tuple[str, ...]
    rule: str = ""  # id of the rule of diagnosis behind it; "" in older records


class Rejection(NamedTuple):
    """``uid`` is the owner of what was found, -1 if that could not be told.

    ``name`` is as its maker chose it: known by it later, and to be cleaned before it is shown.
    """

    name: str
    uid: int
    why: str


class Withdrawal(NamedTuple):
    """The job's word that its report in the file ``of`` was wrong."""

    name: str  # of the file
    job: int
    uid: int
    of: str
    why: str


class ReportsFound(NamedTuple):
    reports: tuple[AcceptedReport, ...]
    rejections: tuple[Rejection, ...]
    withdrawals: tuple[Withdrawal, ...] = ()


class _Refused(Exception):
    def __init__(self, name: str, uid: int, why: str) -> None:
        super().__init__(why)
        self.rejection = Rejection(name, uid, why)


def main_job_of(comment: str) -> int:
    """The job that a standby allocation belongs to, from its comment; 0 if it is none."""
    match = re.fullmatch(r"robust: standby of job (\d{1,10})", comment.strip(), re.ASCII)
    return int(match[1]) if match else 0


def find(
    state_dir: str, node: str, reporting: ReportingJob, known: Collection[str], deadline_s: float
) -> tuple[ReportsFound, str]:
    """Return the reports against ``node`` whose names are not ``known``; or why there are none.

    A child that acts as the job's user reads them: it opens only what the user could, also where
    NFS maps root to nobody, and a dead file system costs no more than the deadline.
    """

    def work() -> dict[str, Any]:
        become(reporting.uid, reporting.gid)
        return _found(state_dir, node, reporting, known)._asdict()

    own = f"reports {state_dir}/jobs/{reporting.of} of uid {reporting.uid}"
    answer, error = call_on(state_dir, work, deadline_s, own)
    if error:
        return ReportsFound((), ()), error
    reports = tuple(
        one._replace(evidence=tuple(one.evidence))  # JSON has lists only
        for one in itertools.starmap(AcceptedReport, answer["reports"])
    )
    rejections = tuple(Rejection(*one) for one in answer["rejections"])
    withdrawals = tuple(Withdrawal(*one) for one in answer["withdrawals"])
    return ReportsFound(reports, rejections, withdrawals), ""


def become(uid: int, gid: int) -> None:
    """Act on files as this user from now on; the real user stays root, whom no user may signal."""
    if os.geteuid() != 0:
        return
    os.setgroups([])
    os.setegid(gid)
    os.seteuid(uid)


def _found(
    state_dir: str, node: str, reporting: ReportingJob, known: Collection[str]
) -> ReportsFound:
    rejected: list[Rejection] = []
    accepted: list[AcceptedReport] = []
    withdrawn: list[Withdrawal] = []
    opened: list[int] = []
    try:
        above = os.open(f"{state_dir}/jobs", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.append(above)
        own = job_dirs.find(f"{state_dir}/jobs", reporting.of, reporting.uid)
        if own is None or _REPORTS in known:  # refused before
            return ReportsFound((), ())
        try:
            for name in (own, _REPORTS):
                above = _open_own(above, name, reporting.uid)
                opened.append(above)
            with os.scandir(above) as entries:
                names = [entry.name for entry in itertools.islice(entries, _NAMES_LIMIT)]
        except PermissionError:
            why = f"the user may not read {own}/{_REPORTS}, the user's own"
            raise _Refused(_REPORTS, reporting.uid, why) from None
        mine = sorted(n for n in names if n.startswith(f"{node}.") and n.endswith(".json"))
        for name in _next(mine, known):
            if name in [one.of for one in withdrawn]:
                continue
            try:
                raw = _content(above, name, reporting)
                if name.endswith(_WITHDRAWN):
                    withdrawn.append(_judged(parse_withdrawal, raw, name, node, reporting))
                else:
                    accepted.append(_judged(parse, raw, name, node, reporting))
            except FileNotFoundError:
                continue
            except _Refused as refused:
                rejected.append(refused.rejection)
            except OSError as error:
                rejected.append(
                    Rejection(name, _owner(above, name), error.strerror or "unreadable")
                )
    except FileNotFoundError:
        pass  # nobody was reported
    except _Refused as refused:
        rejected.append(refused.rejection)
    finally:
        for fd in opened:
            os.close(fd)
    clean = [r._replace(why=one_line(r.why, _TEXT)) for r in rejected]
    return ReportsFound(tuple(accepted), tuple(clean), tuple(withdrawn))


def _next(names: Sequence[str], known: Collection[str]) -> list[str]:
    """The files to look at: withdrawals first, as what is taken back is skipped; MOST of each."""
    found: list[str] = []
    for taken_back in True, False:
        left = MOST - sum(name.endswith(_WITHDRAWN) is taken_back for name in known)
        new = [n for n in names if n not in known and n.endswith(_WITHDRAWN) is taken_back]
        found += new[: max(0, left)]
    return found


def _owner(directory: int, name: str) -> int:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_uid
    except OSError:
        return -1


def _open_own(above: int, name: str, uid: int) -> int:
    """A directory of the user's own; _Refused if it is anything else."""
    info = os.stat(name, dir_fd=above, follow_symlinks=False)
    if not stat.S_ISDIR(info.st_mode):
        what = "a link" if stat.S_ISLNK(info.st_mode) else "no directory"
        raise _Refused(name, info.st_uid, f"{name} is {what}")
    if info.st_uid != uid:
        raise _Refused(name, info.st_uid, f"{name} belongs to uid {info.st_uid}, not {uid}")
    fd = os.open(name, _DIRECTORY, dir_fd=above)
    if os.fstat(fd).st_uid != uid:  # exchanged since
        os.close(fd)
        raise _Refused(name, -1, f"{name} was replaced by another user's")
    return fd


def _content(directory: int, name: str, reporting: ReportingJob) -> bytes:
    """A small file of the user's own; _Refused if it is anything else."""
    info = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if not stat.S_ISREG(info.st_mode):
        what = "a link" if stat.S_ISLNK(info.st_mode) else "not a regular file"
        raise _Refused(name, info.st_uid, f"it is {what}")
    fd = os.open(name, _READ, dir_fd=directory)
    with closing(fd):
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise _Refused(name, info.st_uid, "it is not a regular file")
        if info.st_uid != reporting.uid:
            why = f"it belongs to uid {info.st_uid}, not to the job's {reporting.uid}"
            raise _Refused(name, info.st_uid, why)
        raw = b""
        while len(raw) <= SIZE_LIMIT and (part := os.read(fd, SIZE_LIMIT + 1 - len(raw))):
            raw += part
    if len(raw) > SIZE_LIMIT:
        raise _Refused(name, info.st_uid, f"it is larger than {SIZE_LIMIT} bytes")
    return raw


def _judged(
    reader: Callable[[bytes, str, str, ReportingJob], R],
    raw: bytes,
    name: str,
    node: str,
    reporting: ReportingJob,
) -> R:
    """Read a file's content with ``reader``; raise _Refused with the reason if it is not valid."""
    try:
        return reader(raw, name, node, reporting)
    except ValueError as error:
        raise _Refused(name, reporting.uid, str(error)) from None


def parse_withdrawal(raw: bytes, name: str, node: str, reporting: ReportingJob) -> Withdrawal:
    """The withdrawal in a file's bytes. ValueError names what is wrong with it. Pure."""
    record = _record(raw, name, _WITHDRAWN, node, reporting)
    why = record.get("withdrawn")
    if not isinstance(why, str):
        raise ValueError("invalid reason")
    of = name.removesuffix(_WITHDRAWN) + ".json"
    return Withdrawal(name, reporting.job, reporting.uid, of, one_line(why, _TEXT))


def parse(raw: bytes, name: str, node: str, reporting: ReportingJob) -> AcceptedReport:
    """The report in a file's bytes. ValueError names what is wrong with it. Pure."""
    record = _record(raw, name, ".json", node, reporting)
    symptom, evidence = record.get("symptom"), record.get("evidence")
    if not isinstance(symptom, str) or not re.fullmatch(r"[a-z_]{1,32}", symptom, re.ASCII):
        raise ValueError("invalid symptom")
    if not isinstance(evidence, list) or not all(isinstance(text, str) for text in evidence):
        raise ValueError("invalid evidence")
    lines = tuple(one_line(text, _TEXT) for text in evidence[:_EVIDENCE])
    rule = record.get("rule")
    known = isinstance(rule, str) and re.fullmatch(r"[a-z0-9-]{1,40}", rule, re.ASCII)
    return AcceptedReport(
        name,
        reporting.job,
        reporting.uid,
        float(record["time"]),
        symptom,
        lines,
        str(rule) if known else "",
    )


def _record(raw: bytes, name: str, end: str, node: str, reporting: ReportingJob) -> dict[str, Any]:
    """Read a record, and check what both kinds share: version, node, incident, job and time."""
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        raise ValueError("not valid JSON") from None
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    if not _is(record.get("v"), int) or record["v"] != VERSION:
        raise ValueError(f"the version (v) is not {VERSION}")
    if record.get("node") != node:
        raise ValueError("it is about another node")
    incident = record.get("incident")
    if not isinstance(incident, str) or name != f"{node}.{incident}{end}":
        raise ValueError("its incident does not match the file name")
    if not _is(record.get("job"), int) or record["job"] != reporting.job:
        raise ValueError(f"it is not of job {reporting.job}")
    time: Any = record.get("time")
    if not (_is(time, int) or _is(time, float)) or not 0 <= time < 1e11:  # no NaN is
        raise ValueError("invalid time")
    return record


def _is(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
