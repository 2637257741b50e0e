"""Recovery from the loss of the batch host: one surviving agent brings the job back.

Slurm neither lets a job go on without its batch host nor completes it before that node is DOWN
(SlurmdTimeout, 300 s by default), and the owner cannot shrink it away ("You cannot remove the
batch host from a job when resizing"). So the survivor submits the job's own script again, with
the lost host excluded, and gives up the old job: the copy starts as soon as nodes are free.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from robust_slurm.frames.wire import Codec, WireError
from robust_slurm.slurm import Job, Slurm, SlurmError
from srun_wrapper.agent.place import Place, job_of
from srun_wrapper.command.steps import standby_job_name
from srun_wrapper.decide.exclusions import BadNode, Strength, names, remembered
from srun_wrapper.protocol.messages import Peer, PeerAsk, PeerSay, Start, decode_say, encode
from srun_wrapper.protocol.task_options import TaskOptions
from srun_wrapper.requeue.requeue import helper_args, known_partitions, limits_for
from srun_wrapper.requeue.resubmit import submit_copy
from srun_wrapper.requeue.slurm_wait import Outage, call_waiting

T = TypeVar("T")
ASK = 1.0  # s for one peer to answer
AGREE = 2.0  # s; a peer that has heard nothing for this long agrees
DEADLINE = 8.0  # s per Slurm command


def elected(index: int, answers: Mapping[int, float | None], lost: int | None) -> bool:
    """True if the agent at place ``index`` is the one that acts (pure).

    ``answers``: what each asked place said, seconds since it last heard the supervisor; None if
    it did not answer. ``lost``: the place of the lost host, whose silence says nothing. One
    place that still hears the supervisor is a veto, the lost host's too: then it is we who are (or
    were) cut off. So is a majority that does not answer. Of those that agree the lowest place acts.
    """
    if vetoed(answers):
        return False
    said = {place: silent for place, silent in answers.items() if place not in (index, lost)}
    answered = [place for place, silent in said.items() if silent is not None]
    if said and 2 * (len(answered) + 1) < len(said) + 1:
        return False
    return all(index < place for place in answered)


def vetoed(answers: Mapping[int, float | None]) -> bool:
    """True if a place still hears the supervisor."""
    return any(silent is not None and silent < AGREE for silent in answers.values())


def ask_peer(peer: Peer, key: bytes, job_id: int) -> float | None:
    """Seconds since that agent last heard the supervisor; None without an authentic answer."""
    codec = Codec(key, server=False)
    try:
        with socket.create_connection((peer.host, peer.port), timeout=ASK) as sock:
            sock.sendall(codec.preface())
            end = time.monotonic() + ASK
            asked = False
            while time.monotonic() < end:
                data = sock.recv(1 << 16)
                if not data:
                    return None
                for payload in codec.feed(data):
                    said: PeerSay = decode_say(payload)
                    return said.silent
                if codec.ready and not asked:
                    asked = True
                    sock.sendall(codec.seal(encode(PeerAsk(job_id))))
    except (OSError, WireError, ValueError):
        return None
    return None


def claim(job_dir: Path | None, restarts: int) -> bool:
    """Claim the right to bring the job back by an exclusive file in its records; False if taken.

    In an outage the supervisor and the agents may both try. ``restarts``: the job's count.
    """
    if job_dir is None:
        return True  # the election alone decides
    path = job_dir / f"rescued.{restarts}"
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    except OSError:
        return True  # no shared directory: the election alone decides
    return True


def rescue(
    place: Place,
    key: bytes,
    start: Start,
    job_dir: Path | None,
    options: TaskOptions,
    report: Callable[[str], None],
) -> None:
    """Ask the peers, and if this agent is elected bring the job back.

    ``job_dir``: the job's records. Blocks for seconds, and while Slurm is away for ``slurm_wait``
    seconds at most. The peers are asked again after such a wait whether one hears the supervisor:
    what cut this node off from Slurm cut it off from them, too. They are not counted again, as
    those that were not elected have ended.
    """
    outage = Outage(options.slurm_wait)
    slurm = Slurm(deadline_s=DEADLINE)
    others = [p for p in start.peers if p.index != start.index]
    lost = next((p.index for p in others if p.host == place.server), None)
    job_id = job_of(place, start)

    def ask() -> dict[int, float | None]:
        return {p.index: ask_peer(p, key, job_id) for p in others}

    if not elected(start.index, ask(), lost):
        report("another agent brings the job back, or it is this node that is cut off")
        return
    asked, what = time.monotonic(), f"bring job {job_id} back"
    try:
        job = call_waiting(outage, what, lambda: slurm.job(job_id), report)
        if time.monotonic() - asked > AGREE and vetoed(ask()):
            report("robust-srun answers others: it is this node that was cut off")
            return
        held = job if place.job_id == job_id else slurm.job(place.job_id)
        if place.node not in held.nodes:
            report(f"this node has left job {job_id}: nothing to bring back")
            return
        if not job.running or job.restarts != options.restarts:
            report(f"job {job_id} is {job.state}: nothing to bring back")  # or Slurm has done it
            return
        if not job.batch:
            report(f"job {job_id} is interactive: it cannot be brought back")
            return
        if not claim(job_dir, job.restarts):
            report("another agent is bringing the job back")
            return
        host = [BadNode(job.batch_host, Strength.TWICE, time.time())] if job.batch_host else []
        bad = [*host, *(one for one in remembered(job_dir) if one.node != job.batch_host)]
        new = call_waiting(outage, what, lambda: bring_back(slurm, job, bad, options), report)
    except SlurmError as err:
        report(f"cannot bring job {job_id} back: {err}")
        return
    report(f"batch host {job.batch_host} of job {job_id} is lost: it goes on as job {new}")
    try:
        call_waiting(outage, f"end job {job_id}", lambda: let_go(slurm, job), report)
    except SlurmError as err:
        report(f"the nodes of job {job_id} are not free yet: {err}")


def bring_back(slurm: Slurm, job: Job, bad: Sequence[BadNode], options: TaskOptions) -> int:
    """Submit the job's script again without ``bad``, end the old job. Returns the new id.

    The old job cannot complete while its batch host is silent, and as long as it completes none
    of its nodes can be used again. So it is first shrunk to that host alone, which frees the
    others at once (and ends this very process); a helper job then cancels it.
    """
    partition = known_partitions(slurm, job, options.standby_partition)
    # Or Slurm would run it a second time, later. Refused after a resize (see SlurmError): then
    # the helper's scancel alone prevents that.
    with contextlib.suppress(SlurmError):
        slurm.update_job(job.id, requeue=False)
    limits = limits_for(slurm, job, bad, partition, options.size)
    new = submit_copy(slurm, job, limits, partition, options.size)
    name = f"robust-cancel-{job.id}"
    helper = [f"--partition={partition}", *helper_args(job, name, names(bad))]
    slurm.submit(f"#!/bin/sh\nscancel {job.id}\n", args=helper)
    return new


def let_go(slurm: Slurm, job: Job) -> None:
    """The last thing this process does for the old job: free all nodes but its batch host."""
    try:
        slurm.shrink(job.id, [job.batch_host or ""])
    finally:
        slurm.cancel(job.id)


def release_standby(
    place: Place, of: int, report: Callable[[str], None], wait: float = 0.0
) -> None:
    """Cancel this standby allocation, and the lease that holds its node if there is one: the job
    ``of`` that requested them is over. Waits for Slurm for ``wait`` seconds at most."""
    slurm, outage = Slurm(deadline_s=DEADLINE), Outage(wait)
    what = f"release the standby allocation {place.job_id}"

    def ask(request: Callable[[], T]) -> T:
        return call_waiting(outage, what, request, report) if wait else request()

    try:
        with contextlib.suppress(SlurmError):
            for job in ask(lambda: slurm.allotted(standby_job_name(of))):
                if place.node in job.nodes and job.state == "RUNNING" and job.id != place.job_id:
                    slurm.cancel(job.id)
        ask(lambda: slurm.cancel(place.job_id))
    except SlurmError as err:
        report(f"cannot {what}: {err}")
