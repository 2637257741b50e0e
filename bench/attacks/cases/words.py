"""Attacks by text that a user or a node writes: in Slurm's lists, in records, on a terminal."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.attacks.attack import LAB, Attack, Got
from bench.attacks.room import MALLORY, VICTIM, Room
from bench.common import REPOSITORY, BenchError

ESC = "\x1b]0;owned\x07\x1b[2J\x9b31m\x00\u202e\x1b[8mhidden\r"
CONTROLS = frozenset("\x1b\x07\x9b\x00\u202e\r")
NAMES = {
    "newline": "x\n901|PENDING|victim||robust-standby-500",
    "other line ends": "x\u2028901|RUNNING|victim|s1|robust-standby-500\r902|PENDING|victim||"
    "robust-standby-500",
    "columns": "x|PENDING|victim||robust-standby-500",
    "a record": "x\nJobId=901 JobName=robust-standby-500 UserId=victim(33002) GroupId=v(33002)"
    " MCS_label=N/A JobState=RUNNING",
    "a name in front": "robust-standby-500\n901|PENDING|victim||robust-standby-500",
}
"""Names of a job that imitate another user's."""
_CLAIMS = """import json, sys
sys.path[:0] = [{repository!r}]
from robust_slurm.slurm import Slurm
found = Slurm().standby_claims("standby")
print(json.dumps([[one.id, one.of, one.user] for one in found]))
"""


def _claims(room: Room) -> Got:
    """Give jobs names that are lines of other users' jobs."""
    lab = room.lab
    if lab is None:
        raise BenchError("no lab")
    jobs = []
    for name in (*NAMES.values(), "robust-standby-77"):
        argv = ["sbatch", "-H", "--parsable", "-p", "standby", f"--job-name={name}"]
        done = lab.exec("head", [*argv, "--wrap", "sleep 1"], check=True)
        jobs.append(int(done.stdout.split(";")[0]))
    code = _CLAIMS.format(repository=str(REPOSITORY))
    done = lab.exec("head", [sys.executable, "-c", code], check=True)
    claims = json.loads(done.stdout)
    lab.exec("head", ["scancel", *map(str, jobs)])
    if [jobs[-1], 77, lab.user] not in claims:
        raise BenchError(f"an honest claim is not found: {claims}")
    forged = [one for one in claims if one[0] not in jobs or one[2] != lab.user]
    what = f"{len(NAMES)} names: claims {claims}, of them {len(forged)} of jobs that are not there"
    return Got(what=what, succeeded=bool(forged))


# -- records


def _record(**more: Any) -> dict[str, Any]:
    now = time.time()
    texts = dict.fromkeys(
        ("step_id", "job_name", "user", "state", "note", "symptom", "cause", "action", "outcome",
         "evidence", "why", "rule", "rung", "restored", "tests", "counters", "estimate", "id",
         "incident", "withdrawn", "partition", "kind"), ESC,
    )  # fmt: skip
    return {**texts, "time": now, "updated": now, "started": now - 9, "epoch": 1, **more}


def _write(room: Room, job: int) -> Path:
    """Write a job's records with escapes in every text."""
    room.site()
    directory = room.directory(f"state/jobs/{job}", MALLORY)
    node = {"name": f"n1{ESC}", "job_id": job, "role": ESC, "ranks": [0]}
    checkpoint = {"survives": ESC, "directory": ESC, "why_every": ESC, "checked": ESC, "step": 1}
    data = {"off": [ESC], "sources": [{"name": ESC, "waited_s": 9}], "most_waited": [{"node": ESC}]}
    own = {"nodes": [node], "checkpoint": checkpoint, "data": data, "supervisor": {"host": ESC}}
    files = {
        "roster.0.json": _record(job_id=job, **own),
        "roster.1.json": _record(job_id=job, **own, state="running", step_id="1"),
        "incidents.jsonl": _record(suspects=[ESC], phases={ESC: 1.0}, swaps=[[ESC, ESC]]),
        "progress.jsonl": _record(kind="run", ranks=1, places={"0": ESC}),
        f"accusations/n1{ESC[0]}.json": _record(node=f"n1{ESC}", job=job),
        f"roster.{ESC.replace('/', '')[:20].replace(chr(0), '')}.json": {"no": "roster"},
        "robust-srun.log": {"text": ESC},
    }
    (directory / "accusations").mkdir()
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, ensure_ascii=False) + "\n")
    (directory / "job.log").write_text(f"RuntimeError: CUDA error: {ESC} out of memory {ESC}\n")
    room.own(directory)
    return directory


_VIEWS: tuple[list[str], ...] = (
    ["7"], ["7", "--why"], ["--nodes"], ["--bad"], [], ["--lemons"], ["--rules"], ["--accounts"],
    ["--accounts", "--csv"], ["--accounts", "7"], ["n1"], ["--since", "1d"], ["--watch", "0.1"],
    ["--lemons", "--format", "exclude"], ["--diagnose", "{directory}/job.log"],
)  # fmt: skip
_STATUS = """import os, sys
sys.path[:0] = [{repository!r}]
os.environ["ROBUST_SITE_CONFIG"] = {top!r} + "/robust.toml"
{more}
from status.cli import main
sys.exit(main({argv!r}))
"""


def _status(room: Room, argv: list[str], more: str = "", timeout: float = 40) -> Any:
    code = _STATUS.format(repository=str(REPOSITORY), top=str(room.top), argv=argv, more=more)
    env = {"PATH": f"{room.top}/bin:/usr/bin:/bin", "HOME": str(room.top), "LC_ALL": "C.UTF-8"}
    return room.program([sys.executable, "-c", code], env, uid=VICTIM, timeout=timeout)


def _escapes(room: Room) -> Got:
    """Write escapes into every record that robust-status reads."""
    directory = _write(room, 7)
    hurt, silent = [], 0
    for view in _VIEWS:
        argv = [word.format(directory=directory) for word in view]
        alarm = (
            "import signal; signal.setitimer(signal.ITIMER_REAL, 8)" if "--watch" in view else ""
        )
        done = _status(room, [*argv, "--state-dir", f"{room.top}/state"], alarm)
        text = done.out + done.err
        silent += not text.strip()
        if CONTROLS & set(text):
            hurt.append(" ".join(argv) or "(overview)")
    if silent > 2:
        raise BenchError(f"{silent} of {len(_VIEWS)} views print nothing")
    what = f"{len(_VIEWS)} views; with control characters: {', '.join(hurt) or 'none'}"
    return Got(what=what, succeeded=bool(hurt))


def _always(reply: Any) -> Any:
    """Return what answers every request by this reply."""
    return lambda _requests: {"n1": reply}


def _reply(_room: Room) -> Got:
    """Answer robust-admin from a node, as its root, with escapes in every field."""
    from health.admin import flow, remote
    from health.admin.node import MARK, AdminRequest

    words: Any = remote
    said = {"error": ESC, "notes": [ESC], "identity": ESC, "changes": [["create", ESC, ESC]]}
    transport = SimpleNamespace(close=lambda: None)
    client: Any = SimpleNamespace(get_transport=lambda: transport)
    prefix = SimpleNamespace(python=sys.executable, sites=(str(REPOSITORY),), library=())
    access: Any = SimpleNamespace(prefix=prefix)
    hurt = []
    answers = {
        "a reply": (MARK + json.dumps(said), ""),
        "last words": ("", ESC),
        "a reply without an error": (MARK + json.dumps({**said, "error": ""}), ""),
    }
    for name, answer in answers.items():
        if name == "last words":
            parts = iter([ESC.encode(), b""])
            channel = SimpleNamespace(
                exec_command=lambda _w: None, sendall=lambda _d: None, shutdown_write=lambda: None,
                recv=lambda _n: b"", recv_stderr=lambda _n, parts=parts: next(parts),
                recv_exit_status=lambda: 1)  # fmt: skip
            transport.open_session = lambda timeout, channel=channel: channel
            reply = remote._command(client, "n1", access, "")
        else:
            whole, words._output = remote._output, lambda *_args, answer=answer: answer
            reply = remote._command(client, "n1", access, "")
            words._output = whole
        out = io.StringIO()
        flow.run(
            {"n1": AdminRequest("install", "/etc")},
            _always(reply),
            {},
            yes=True,
            dry_run=True,
            out=out,
        )
        if CONTROLS & set(out.getvalue()):
            hurt.append(name)
    what = f"{len(answers)} answers; with control characters: {', '.join(hurt) or 'none'}"
    return Got(what=what, succeeded=bool(hurt))


def _rosters(room: Room) -> Got:
    """Leave many large records in one's own directory."""
    room.site()
    directory = room.directory("state/jobs/9", MALLORY)
    member = b'{"name":"a","ranks":[1,2,3]}'
    first = directory / "roster.0.json"
    count = (4 << 20) // (len(member) + 1) - 10
    head = f'{{"job_id":9,"updated":{time.time()},"nodes":['.encode()
    first.write_bytes(head + b",".join([member] * count) + b"]}")
    for number in range(1, 100):
        os.link(first, directory / f"roster.{number}.json")
    (directory / "incidents.jsonl").write_bytes(b'{"time":1}\n' * 300_000)
    room.own(directory)
    worst, most, wrong = 0.0, 0.0, ""
    limit = (
        "import atexit, resource; atexit.register(lambda: print("
        "'MAXRSS', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr))"
    )
    for view in ([], ["9"], ["--accounts"], ["--lemons"]):
        done = _status(room, [*view, "--state-dir", f"{room.top}/state"], limit, timeout=60)
        sizes = [int(line.split()[1]) for line in done.err.splitlines() if "MAXRSS" in line]
        worst, most = max(worst, done.seconds), max(most, *sizes, 0)
        wrong = wrong or ("killed after 60 s" if done.code == -9 else "")
    what = f"400 MB of records: {worst:.1f} s and {most / (1 << 20):.2f} GiB at worst {wrong}"
    return Got(what=what.strip(), succeeded=bool(wrong) or worst > 20 or most > 1 << 20)


ATTACKS = [
    Attack(
        name="words_name_claims",
        row="words",
        tries="names of jobs that look like other users' jobs, to take their leases (real squeue)",
        run=_claims,
        where=LAB,
        seconds=120,
    ),
    Attack(
        name="words_escapes_in_records",
        row="words",
        tries="escapes in every record, to write on the terminal of who runs robust-status",
        run=_escapes,
        seconds=300,
    ),
    Attack(
        name="words_escapes_in_replies",
        row="words",
        tries="escapes in a node's reply, to write on the terminal of who runs robust-admin",
        run=_reply,
    ),
    Attack(
        name="words_many_rosters",
        row="words",
        tries="100 records of 4 MB, to hold up everybody's robust-status",
        run=_rosters,
        seconds=300,
    ),
]
