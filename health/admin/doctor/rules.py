"""The values that the gate needs in slurm.conf, key by key, each with its reason. Pure.

The doctor prints the values that differ; the installer writes the same values as lines to paste.
The differences between releases were read in Slurm's source, 22.05 to 26.05. The rules for the
scripts themselves are in script_rules.py; here are those for requeues, drains and time-outs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from health.admin.doctor import script_rules
from health.admin.show_config import joined, same, seconds, value_of, words_of
from health.admin.want import Level, SiteFacts, Want, longest, since


def wants(facts: SiteFacts) -> list[Want]:
    """Every setting that matters, those that are right included."""
    return [want for rule in RULES for want in rule(facts)]


# ---- when a node is refused


def _prolog_flags(facts: SiteFacts) -> Iterator[Want]:
    now = value_of(facts.config, "PrologFlags")
    flags = words_of(now)
    wanted = ["Alloc", "Contain", "DeferBatch"]
    why = (
        "Alloc, Contain: the prolog runs on all nodes before any step; DeferBatch: no batch "
        "script starts before all nodes passed"
    )
    if since(facts, 23, 2):
        wanted.append("ForceRequeueOnFail")
        why += "; ForceRequeueOnFail: jobs with --no-requeue go back to the queue too"
    hurts = {"nohold", "runinjob"}
    kept = [flag for flag in flags if flag.lower() not in hurts]
    if len(kept) < len(flags):
        why += (
            "; NoHold excludes Contain, and under RunInJob the prolog is confined to the job's "
            "own devices and would miss the node's other GPUs"
        )
    value = joined(kept, wanted)
    level: Level = "ok" if same(value, now) else "fix"
    yield Want("PrologFlags", now, now if level == "ok" else value, level, why, True)


def _scheduler(facts: SiteFacts) -> Iterator[Want]:
    now = value_of(facts.config, "SchedulerParameters")
    options = words_of(now)
    hold = "nohold_on_prolog_fail"
    value = joined(options, [hold])
    level: Level = "ok" if hold in (o.lower() for o in options) else "fix"
    why = f"{hold}: a job that met a bad node starts elsewhere instead of being held"
    yield Want("SchedulerParameters", now, value, level, why, True)

    if since(facts, 25, 11):
        delay = next((o for o in options if o.lower().startswith("requeue_delay=")), "")
        good = _option(delay) <= 30
        kept = [o for o in value.split(",") if o != delay or good]
        why = "requeue_delay: how long a requeued job waits; without it as long as cred_expire"
        value = ",".join(kept) if good else joined(kept, ["requeue_delay=10"])
        yield Want("SchedulerParameters", now, value, "ok" if good else "advice", why, False)
        yield _expedite(facts)
        return
    now = value_of(facts.config, "AuthInfo")
    options = words_of(now)
    expire = next((o for o in options if o.startswith("cred_expire=")), "")
    prolog_s = float(facts.gate["prolog_deadline"])
    least = max(30, math.ceil(3 * prolog_s))
    good = prolog_s <= _option(expire) <= 2 * least
    kept = [o for o in options if o != expire or good]
    why = (
        "cred_expire: a requeued job waits this long (Slurm: 120 s) before it starts again; it "
        "must be longer than a prolog"
    )
    value = ",".join(kept) if good else joined(kept, [f"cred_expire={least}"])
    yield Want("AuthInfo", now, value, "ok" if good else "advice", why, False)


def _expedite(facts: SiteFacts) -> Want:
    """25.11 and later."""
    key, word = "SlurmctldParameters", "enable_expedited_requeue"
    now = value_of(facts.config, key)
    options = words_of(now)
    good = word in (option.lower() for option in options)
    why = (
        f"{word}: jobs of `sbatch --requeue=expedite` start again at once, before all others, "
        "when their node failed"
    )
    value = now if good else joined(options, [word])
    return Want(key, now, value, "ok" if good else "advice", why, False)


def _requeue(facts: SiteFacts) -> Iterator[Want]:
    now = value_of(facts.config, "JobRequeue")
    level: Level = "ok" if now in ("", "1") else "fix"
    why = "0 makes every job --no-requeue: nothing goes back to the queue after a bad node"
    yield Want("JobRequeue", now, "1", level, why, True)
    now = value_of(facts.config, "MaxBatchRequeue")
    if now:  # a setting from 23.02 on; 5 before
        many = seconds(now) or 0
        why = "a job is held after so many requeues, and each bad node costs one"
        value, level = (now, "ok") if many >= 20 else ("100", "advice")
        yield Want("MaxBatchRequeue", now, value, level, why, False)


# ---- time-outs


def _timeouts(facts: SiteFacts) -> Iterator[Want]:
    config, gate = facts.config, facts.gate
    if value_of(config, "PrologTimeout") and value_of(config, "EpilogTimeout"):  # 25.05, unequal
        for key, where in (("PrologTimeout", "prolog"), ("EpilogTimeout", "epilog")):
            yield _timeout(key, config[key], longest(gate, where))
    else:
        least = max(longest(gate, "prolog"), longest(gate, "epilog"))
        yield _timeout("PrologEpilogTimeout", value_of(config, "PrologEpilogTimeout"), least)
    now = value_of(config, "BatchStartTimeout")
    limit = seconds(now) or 10
    least = float(gate["prolog_deadline"]) + 1
    good = limit >= least
    why = f"Slurm gives a batch job up that has not started then; the prolog may take {least:g} s"
    value = f"{limit if good else math.ceil(least) + 10:g}"
    yield Want("BatchStartTimeout", now, value, "ok" if good else "fix", why, True)


def _timeout(key: str, now: str, least: float) -> Want:
    limit = seconds(now) or math.inf
    why = f"slurmd kills the script then; it may take {least:g} s by robust.toml's deadlines"
    value = str(max(60, math.ceil(least)))
    if limit < least:
        return Want(key, now, value, "fix", why, False)
    if limit == math.inf:
        why = "without a limit a script that never starts (a dead disk) holds its node for ever"
        return Want(key, "" if not now else "unlimited", value, "advice", why, False)
    return Want(key, now, f"{limit:g}", "ok", why, False)


def _ends(facts: SiteFacts) -> Iterator[Want]:
    config = facts.config
    now = value_of(config, "UnkillableStepTimeout")
    limit, least = seconds(now) or 60, 5 * (seconds(value_of(config, "MessageTimeout")) or 10)
    level: Level = "ok" if limit >= max(180, least) else "fix" if limit < least else "advice"
    why = (
        "a process that is still writing when it is killed gets this long; then Slurm drains the "
        "node with a reason of its own, which the sweep never undrains"
    )
    value = f"{limit if level == 'ok' else max(180, least):g}"
    yield Want("UnkillableStepTimeout", now, value, level, why, False)

    now = value_of(config, "KillWait")
    limit = seconds(now) or 30
    level = "ok" if limit >= 30 else "advice"
    why = "between SIGTERM and SIGKILL: what a rank has to flush a checkpoint at a requeue"
    yield Want("KillWait", now, f"{max(30, limit):g}", level, why, False)

    now = value_of(config, "SlurmdTimeout")
    given = seconds(now)
    limit = 300 if given is None else given
    level = "fix" if limit == 0 else "ok" if limit <= 300 else "advice"
    why = "0: a dead node is never DOWN; long: new jobs are placed on it meanwhile"
    value = f"{limit:g}" if level == "ok" else "300"
    yield Want("SlurmdTimeout", now, value, level, why, False)


# ---- how a node comes back


def _return(facts: SiteFacts) -> Iterator[Want]:
    now = value_of(facts.config, "ReturnToService")
    level: Level = "advice" if now == "2" else "ok"
    why = "2 returns every DOWN node that registers, also one that a person or a reboot took down"
    value = "1" if level == "advice" else now or "1"
    yield Want("ReturnToService", now, value, level, why, False)
    now = value_of(facts.config, "RebootProgram")
    why = (
        "what `scontrol reboot NODE` runs; a node drained by robust-slurm stays drained across "
        "the reboot, and the sweep undrains it when it passes (ASAP and nextstate= would remove "
        "the drain)"
    )
    yield Want("RebootProgram", now, now or "/sbin/reboot", "ok" if now else "advice", why, False)
    now = value_of(facts.config, "ProctrackType")
    if now in ("proctrack/linuxproc", "proctrack/pgid"):
        why = "processes that leave their session escape Slurm; the epilog finds them by user only"
        yield Want("ProctrackType", now, "proctrack/cgroup", "advice", why, False)


def _cgroups(facts: SiteFacts) -> Iterator[Want]:
    """26.05.2 and later; 26.05.0 and 26.05.1 stop at the word and do not print it."""
    key = "CgroupJobIdPaths"
    if not since(facts, 26, 5) or key not in facts.config:
        return
    now = value_of(facts.config, key)
    why = (
        "without it a job's cgroup has the job's SLUID for its name. The gate learns the job's "
        "number from slurmd in the job's own prolog and epilog, else from its slurmstepd. Once "
        "that has ended, the owner of a process that it left is unknown, and the epilog of another "
        'job leaves the process, unless leftovers is "user" and the user has no other job there'
    )
    level: Level = "ok" if now.lower() == "yes" else "advice"
    yield Want(key, now, "yes", level, why, False, where="cgroup.conf")


def _option(text: str) -> float:
    """The number of ``cred_expire=30``; Slurm's 120 without one."""
    number = seconds(text.partition("=")[2])
    return 120 if number is None else number


RULES: tuple[Callable[[SiteFacts], Iterator[Want]], ...] = (
    script_rules.scripts,
    script_rules.health_program,
    script_rules.health_when,
    script_rules.prep,
    _prolog_flags,
    _scheduler,
    _requeue,
    _timeouts,
    _ends,
    _return,
    _cgroups,
)
