"""GPUs on which the programs of different users fail alike. Pure.

An Xid 13 or 31 is the program's fault as a rule; NVIDIA's catalogue asks for field diagnostics only
where the same GPU has them again. One user's program may do so for weeks. Therefore jobs are
counted by their users, and only jobs in which no other GPU of the node had such an Xid: a program
that fails on all its GPUs proves nothing about one of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from health.node.system import Event
from health.nvidia import xid

KIND = "app-xid"
CODES = frozenset({13, 31})


def of_job(events: Iterable[Event], gpus: Collection[str], since: float) -> dict[str, list[int]]:
    """The codes of programs' Xids after ``since``, by GPU of the job that ends.

    The job that caused an Xid is the one that has the GPU in the first epilog after it; Xids that
    an earlier epilog recorded are left out.
    """
    known = list(events)
    told: dict[str, float] = {}
    for event in known:
        if event.kind == KIND:
            gpu = xid.word(event, "gpu")
            told[gpu] = max(told.get(gpu, since), event.time)
    out: dict[str, set[int]] = {}
    for event in known:
        gpu, code = xid.word(event, "gpu"), int(xid.number(event, "code"))
        mine = event.kind == "xid" and code in CODES and gpu in gpus
        if mine and xid.end(event) > told.get(gpu, since):
            out.setdefault(gpu, set()).add(code)
    return {gpu: sorted(codes) for gpu, codes in out.items()}


def suspects(events: Iterable[Event], now: float, users: int, days: float) -> Mapping[str, str]:
    """GPUs that have failed programs of at least ``users`` users in ``days``, and the evidence.

    Where several GPUs of the node have, the programs or what they share is the likelier cause.
    """
    recent = [e for e in events if e.kind == KIND and now - days * 86400 < e.time <= now]
    of: dict[float, set[str]] = {}
    for event in recent:
        of.setdefault(xid.number(event, "job"), set()).add(xid.word(event, "gpu"))
    whose: dict[str, set[float]] = {}
    jobs: dict[str, set[float]] = {}
    for event in recent:
        job, gpu = xid.number(event, "job"), xid.word(event, "gpu")
        if len(of[job]) == 1:
            whose.setdefault(gpu, set()).add(xid.number(event, "uid"))
            jobs.setdefault(gpu, set()).add(job)
    found = [gpu for gpu, uids in whose.items() if len(uids) >= users]
    if len(found) != 1:
        return {}
    (gpu,) = found
    told = f"{len(jobs[gpu])} jobs of {len(whose[gpu])} users had Xid 13 or 31 on this GPU alone"
    return {gpu: f"{told} in {days:g} days, limit {users} users"}
