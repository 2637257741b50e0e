"""The last rung: the job goes back to the queue without its bad nodes, and starts at once.

Plain ``scontrol requeue`` keeps the bad nodes eligible and forces the new start to about two
minutes later. The owner may set ``StartTime=now`` only after the job's old run has completed, when
nothing of it is left that could do so: a helper job, of one CPU and a few seconds, does it.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from robust_slurm.slurm import Job, Slurm, SlurmError, job_id_for_cli
from robust_slurm.slurm.values import expand
from srun_wrapper.decide.exclusions import BadNode, able_nodes, exclusions, names
from srun_wrapper.requeue.resubmit import Limits, submit_copy

HELPER_MINUTES = 5
# A start in the very second in which the old run was ended dies of "Job credential revoked", and
# the job with it: that is what Slurm's own two minutes are for. Seconds are enough.
REVOKED = 3
# s for the last request of a job that Slurm is about to kill. 22.05 refuses it after 5 s if the job
# was shrunk, and all KillWait would be gone before robust-srun has recorded the incident.
LAST = 2.0

# Plain sh: the helper may land on a node where the user's python is not yet there. It ends as
# soon as the job is pending with its old run completed, or gone.
# Something else (a person, cron) may have started the job first.
HELPER = """#!/bin/sh
# robust-slurm: starts job {job} at once after its requeue
for i in $(seq 1 600); do
  state=$(scontrol show job -o {job} 2>/dev/null) || exit 0
  case "$state" in
    *JobState=PENDING*) scontrol update JobId={job} {changes} && exit 0 ;;
    *JobState=RUNNING*" Restarts={next} "*) exit 0 ;;
    *JobState=CANCELLED*|*JobState=COMPLETED*|*JobState=FAILED*|*JobState=TIMEOUT*) exit 0 ;;
  esac
  sleep 0.2
done
"""


def helper_script(job: str, changes: Sequence[str], restarts: int) -> str:
    """Return the helper's script; ``restarts``: that Slurm counts for the run that is ending."""
    return HELPER.format(job=shlex.quote(job), changes=shlex.join(changes), next=restarts + 1)


def partitions_for(job: Job, standby: str) -> str:
    """Return the partitions, such as ``train,standby``: the job's own first."""
    names = job.partition.split(",")
    return ",".join([*names, *([standby] if standby and standby not in names else [])])


def helper_args(job: Job, name: str, exclude: Sequence[str]) -> list[str]:
    """sbatch options of a helper job: one CPU, minutes, on the owner's account."""
    args = ["--nodes=1", "--ntasks=1", f"--time={HELPER_MINUTES}", f"--job-name={name}"]
    args += ["--output=/dev/null", "--no-requeue"]
    args += [f"--exclude={','.join(dict.fromkeys(exclude))}"] if exclude else []
    return args + ([f"--account={job.account}"] if job.account else [])


def known_partitions(slurm: Slurm, job: Job, standby: str) -> str:
    """Return ``partitions_for``, with the standby partition only if there is one."""
    return partitions_for(job, standby if standby in slurm.partitions() else "")


def limits_for(
    slurm: Slurm,
    job: Job,
    bad: Sequence[BadNode],
    partition: str,
    size: Mapping[str, str],
    report: Callable[[str], None] = lambda _text: None,
) -> Limits:
    """Choose nodes to exclude, and a delay, so that the job has enough nodes to restart.

    If a node cannot be excluded, the delay lets Slurm see by itself whether the node is dead:
    SlurmdTimeout. Raises SlurmError.
    """
    ours = set(names(bad))
    fixed = [node for node in job.exclude if node not in ours]
    able = able_nodes(slurm.nodes().values(), partition.split(","), job.features)
    wanted = max(int(size.get("SLURM_JOB_NUM_NODES", "0")), job.num_nodes)
    excluded, dropped = exclusions(bad, able.difference(fixed), wanted)
    delay = 0
    if dropped:
        delay = _seconds(slurm.config().get("SlurmdTimeout", "")) + REVOKED
        one = len(dropped) == 1
        report(
            f"{', '.join(dropped)} {'is' if one else 'are'} not excluded: too few other nodes are "
            f"left for {wanted}; the job starts in {delay} s, when Slurm knows whether "
            f"{'the node answers' if one else 'these nodes answer'}"
        )
    return Limits((*fixed, *excluded), delay)


def _seconds(text: str) -> int:
    """Slurm's "300 sec"; its default where that cannot be read."""
    word = text.partition(" ")[0]
    return int(word) if word.isdecimal() else 300


class Returned(NamedTuple):
    """The id that the job goes on under, and the nodes that it excludes."""

    job: int
    exclude: tuple[str, ...]


def put_back(
    slurm: Slurm,
    job_id: int,
    bad: Sequence[BadNode],
    standby: str,
    size: Mapping[str, str],
    restarts: int,
    silent: Sequence[str] = (),
    report: Callable[[str], None] = lambda _text: None,
) -> Returned:
    """Requeue a running batch job of ours without the nodes ``bad``.

    ``restarts``: of this run. Slurm counts one more as soon as somebody has requeued the job.
    ``silent``: nodes that do not answer and are not bad: released, but not excluded.
    ``size``: the variables ``resubmit.SIZE``, as before lost nodes were released from the job.
    The caller is part of the job and gets SIGTERM soon after. Raises SlurmError when the job
    cannot be requeued; a helper that cannot be submitted only costs the two minutes.

    Some releases take no second update of a job (see SlurmError). Requeued with a dead node in
    it, it would not complete for SlurmdTimeout: a copy of it is submitted instead, the job
    itself cancelled, and the copy's id returned. A job that no longer runs is never copied: it is
    in the queue already, or somebody has ended it.

    It may be called again after an error with ``away``: what was done before is not done twice.
    """
    job = slurm.job(job_id)
    if job.state == "PENDING":  # an earlier request was carried out, but its answer was lost
        return Returned(job.id, tuple(job.exclude))
    if not job.batch:
        raise SlurmError(
            "conflict", ("scontrol", "requeue"), "only batch jobs (sbatch) can be requeued"
        )
    name = job_id_for_cli(job)
    partition = known_partitions(slurm, job, standby)
    limits, lost = limits_for(slurm, job, bad, partition, size, report), names(bad)
    exclude = limits.exclude
    # A lost node that is still in the job would hold its completion up until SlurmdTimeout. The
    # batch host cannot be released, and lives.
    gone = {*lost, *silent} - {job.batch_host}
    keep = [n for n in job.nodes if n not in gone]
    wanted = max(int(size.get("SLURM_JOB_NUM_NODES", "0")), job.num_nodes)
    required: list[str] | None = [] if set(lost) & set(expand(job.raw.get("ReqNodeList"))) else None
    if job.running:
        try:
            if not job.requeue:
                slurm.update_job(name, requeue=True)
            if keep and len(keep) < len(job.nodes):
                slurm.shrink(job_id, keep)
        except SlurmError as err:
            if err.kind != "conflict" or err.away:
                raise
            job = slurm.job(job_id)
            if job.running:
                new = submit_copy(slurm, job, limits, partition, size)
                with contextlib.suppress(SlurmError):  # scancel may die of the signal it asks for
                    slurm.cancel(job.id)
                return Returned(new, exclude)
    helper_error: SlurmError | None = None
    if job.running:
        changes = [f"Partition={partition}", f"ExcNodeList={','.join(exclude)}"]
        changes += [f"NumNodes={wanted}", *(["ReqNodeList="] if required is not None else [])]
        changes += [f"StartTime=now+{limits.delay or REVOKED}"]
        helper = helper_args(job, f"robust-requeue-{job.id}", [*exclude, *lost, *silent])
        args = [f"--partition={partition}", *helper]
        try:
            slurm.submit(helper_script(name, changes, job.restarts), args=args)
        except SlurmError as err:
            if err.away:
                raise
            helper_error = err
        try:
            slurm.requeue(name)
        except SlurmError:  # scontrol may die of the signal that it asks for, as part of this job
            if slurm.job(job_id).running:
                raise
    elif job.restarts <= restarts:
        message = f"the job does not run any more ({job.state})"
        raise SlurmError("conflict", ("scontrol", "requeue", name), message)
    with contextlib.suppress(SlurmError):  # the helper does the same; SIGTERM may be quicker
        slurm.update_job(
            name,
            partition=partition,
            exclude=exclude,
            num_nodes=wanted,
            required=required,
            within=LAST,
        )
    if helper_error is not None:
        report(
            "the requeued job starts only in about two minutes: the job that would start it at "
            f"once was not accepted: {helper_error.message}"
        )
    return Returned(job.id, exclude)
