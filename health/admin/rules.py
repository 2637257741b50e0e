"""What slurm.conf should say for the gate, key by key, and why. Pure.

The doctor prints what differs, the installer writes the same values down as the lines to paste.
What differs between releases was read in Slurm's source, 22.05 to 26.05.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

Level = Literal["ok", "fix", "advice"]

SLURM_CONF = "slurm.conf"
HEALTH_CHECK_LIMIT_S = 60  # slurmd's own, fixed before 26.05
SWEEP_EVERY_S = 300
# slurmd kills what overruns a time-out 10 ms after SIGTERM: our own deadlines end well before.
MARGIN_S = 2.0
_UNLIMITED = {"UNLIMITED", "INFINITE", "65534", "65535"}  # the numbers are NO_VAL16, INFINITE16


class Facts(NamedTuple):
    """``config`` is ``scontrol show config``, empty when Slurm could not be asked; ``gate`` the
    table of robust.toml; ``runs`` for Prolog, Epilog and HealthCheckProgram the files that are
    run in effect: globs expanded, and what a site's own script calls."""

    config: Mapping[str, str]
    gate: Mapping[str, Any]
    etc: str
    runs: Mapping[str, Sequence[str]] = {}


class Want(NamedTuple):
    """One setting: its value ``now`` ("": not set), the ``value`` it should have, and why.

    ``needed``: the gate does not work without; else it is advice. ``paste``: the line where it is
    not ``key=value``, and ``where`` it goes: slurm.conf, "shell", or a script of the site's.
    """

    key: str
    now: str
    value: str
    level: Level
    why: str
    needed: bool
    paste: str = ""
    where: str = SLURM_CONF

    def line(self) -> str:
        return self.paste or f"{self.key}={self.value}"


Rule = Callable[[Facts], Iterator[Want]]


def wants(facts: Facts) -> list[Want]:
    """Every setting that matters, those that are right included."""
    return [want for rule in RULES for want in rule(facts)]


def release(config: Mapping[str, str]) -> tuple[int, int] | None:
    """(22, 5) of ``SLURM_VERSION = 22.05.8``; None if it is not told."""
    match = re.match(r"(\d+)\.(\d+)", config.get("SLURM_VERSION", ""))
    return (int(match[1]), int(match[2])) if match else None


def value_of(config: Mapping[str, str], key: str) -> str:
    """A setting's value, "" when it is not set."""
    text = config.get(key, "")
    return "" if text in ("(null)", "None", "N/A") else text


def scripts_of(config: Mapping[str, str], key: str) -> list[str]:
    """The values of ``Prolog`` or ``Epilog``: from 24.05 on ``Prolog[0]``, ``Prolog[1]``, …"""
    pattern = re.compile(rf"{key}(\[\d+\])?")
    found = [value_of(config, name) for name in config if pattern.fullmatch(name)]
    return [script for script in found if script]


def seconds(text: str) -> float | None:
    """``60 sec``, ``65534`` (no limit): seconds; None when there is no number."""
    word = text.split()[0] if text.split() else ""
    if word.upper() in _UNLIMITED:
        return math.inf
    return float(word) if re.fullmatch(r"\d+", word) else None


def longest(gate: Mapping[str, Any], where: str) -> float:
    """The most that one run takes: all checks, then two calls of scontrol to drain the node."""
    return float(gate[f"{where}_deadline"]) + 2 * float(gate["scontrol_deadline"]) + MARGIN_S


# ---- the scripts


def _scripts(facts: Facts) -> Iterator[Want]:
    for key, name, why in (
        ("Prolog", "prolog", "checks the node before a job starts on it, and drains it"),
        ("Epilog", "epilog", "clears what a job left, checks the node, follows up accusations"),
    ):
        ours, now = f"{facts.etc}/{name}", scripts_of(facts.config, key)
        if ours in facts.runs.get(key, now):
            yield Want(key, ", ".join(now), ours, "ok", why, True)
            continue
        want = Want(key, ", ".join(now), ours, "fix", why, True)
        if now and _since(facts, 24, 5):
            want = want._replace(why=f"{why}; a line of its own: {key}={now[0]} stays")
        elif now:
            want = _beside(want, now[0])
        yield want


def _beside(want: Want, theirs: str) -> Want:
    """Ours next to a script of the site's, where Slurm takes one value only."""
    key, ours = want.key, want.value
    where, _, pattern = theirs.rpartition("/")
    if not set(theirs) & set("*?["):
        paste = f"{ours} || exit $?" if key != "HealthCheckProgram" else ours
        why = f"{want.why}; it takes one script only: call ours from yours"
        return want._replace(why=why, paste=paste, where=f"{theirs}, on top")
    name = pattern.replace("*", "robust")
    why = f"{want.why}; {theirs} stays: ours beside yours, on every node"
    if set(f"{where}{name}") & set("*?["):  # no name that is sure to match
        why = f"{want.why}; link {ours} to a name that {theirs} matches, on every node"
        return want._replace(why=why, paste=f"ln -s {ours} {where}/<name>", where="shell")
    return want._replace(why=why, paste=f"ln -s {ours} {where}/{name}", where="shell")


def _health_program(facts: Facts) -> Iterator[Want]:
    key, ours = "HealthCheckProgram", f"{facts.etc}/healthcheck"
    now = value_of(facts.config, key)
    why = "the sweep: checks between jobs, and undrains what we drained when it passes again"
    good = ours in facts.runs.get(key, [now])
    want = Want(key, now, ours, "ok" if good else "fix", why, True)
    yield _beside(want, now) if now and not good else want


def _health_when(facts: Facts) -> Iterator[Want]:
    config, gate = facts.config, facts.gate
    now = value_of(config, "HealthCheckInterval")
    every = seconds(now) or 0
    least = longest(gate, "sweep")
    good = every >= least
    why = "seconds between sweeps; at 0 none runs, not even when slurmd starts after a boot"
    value = f"{every:g}" if good else str(max(SWEEP_EVERY_S, math.ceil(least)))
    yield Want("HealthCheckInterval", now, value, "ok" if good else "fix", why, True)

    now = value_of(config, "HealthCheckNodeState")
    states = [word for word in now.upper().split(",") if word]
    good = not states or "ANY" in states or "IDLE" in states
    why = (
        "ANY sees a GPU fail under a running job; IDLE drained nodes too; under the other values "
        "no node is ever undrained"
    )
    value = (now if good else _joined(["ANY"], [s for s in states if s == "CYCLE"])) or "ANY"
    yield Want("HealthCheckNodeState", now, value, "ok" if good else "fix", why, True)

    limit = seconds(value_of(config, "HealthCheckTimeout"))
    if limit is not None:  # 26.05, which prints its default as 0
        limit = limit or HEALTH_CHECK_LIMIT_S
        why = f"slurmd kills the sweep then; it may take {least:g} s (sweep_deadline)"
        level: Level = "ok" if limit >= least else "fix"
        value = f"{limit if level == 'ok' else math.ceil(least):g}"
        yield Want("HealthCheckTimeout", config["HealthCheckTimeout"], value, level, why, False)


def _prep(facts: Facts) -> Iterator[Want]:
    now = value_of(facts.config, "PrEpPlugins")
    if now and "prep/script" not in now:
        value = _joined(now.split(","), ["prep/script"])
        yield Want("PrEpPlugins", now, value, "fix", "without it no Prolog is run", True)
    user = value_of(facts.config, "SlurmdUser")
    if user and not user.startswith("root("):
        why = "prolog and epilog read GPUs, the kernel's log and other users' processes"
        yield Want("SlurmdUser", user, "root", "fix", why, True)


# ---- when a node is refused


def _prolog_flags(facts: Facts) -> Iterator[Want]:
    now = value_of(facts.config, "PrologFlags")
    flags = [word for word in now.split(",") if word]
    wanted = ["Alloc", "Contain", "DeferBatch"]
    why = (
        "Alloc, Contain: the prolog runs on all nodes before any step; DeferBatch: no batch "
        "script starts before all nodes passed"
    )
    if _since(facts, 23, 2):
        wanted.append("ForceRequeueOnFail")
        why += "; ForceRequeueOnFail: jobs with --no-requeue go back to the queue too"
    hurts = {"nohold", "runinjob"}
    kept = [flag for flag in flags if flag.lower() not in hurts]
    if len(kept) < len(flags):
        why += (
            "; NoHold excludes Contain, and under RunInJob the prolog is confined to the job's "
            "own devices and would miss the node's other GPUs"
        )
    value = _joined(kept, wanted)
    level: Level = "ok" if _same(value, now) else "fix"
    yield Want("PrologFlags", now, now if level == "ok" else value, level, why, True)


def _scheduler(facts: Facts) -> Iterator[Want]:
    now = value_of(facts.config, "SchedulerParameters")
    options = [word for word in now.split(",") if word]
    hold = "nohold_on_prolog_fail"
    value = _joined(options, [hold])
    level: Level = "ok" if hold in (o.lower() for o in options) else "fix"
    why = f"{hold}: a job that met a bad node starts elsewhere instead of being held"
    yield Want("SchedulerParameters", now, value, level, why, True)

    if _since(facts, 25, 11):
        delay = next((o for o in options if o.lower().startswith("requeue_delay=")), "")
        good = _option(delay) <= 30
        kept = [o for o in value.split(",") if o != delay or good]
        why = "requeue_delay: how long a requeued job waits; without it as long as cred_expire"
        value = ",".join(kept) if good else _joined(kept, ["requeue_delay=10"])
        yield Want("SchedulerParameters", now, value, "ok" if good else "advice", why, False)
        yield _expedite(facts)
        return
    now = value_of(facts.config, "AuthInfo")
    options = [word for word in now.split(",") if word]
    expire = next((o for o in options if o.startswith("cred_expire=")), "")
    prolog_s = float(facts.gate["prolog_deadline"])
    least = max(30, math.ceil(3 * prolog_s))
    good = prolog_s <= _option(expire) <= 2 * least
    kept = [o for o in options if o != expire or good]
    why = (
        "cred_expire: a requeued job waits this long (Slurm: 120 s) before it starts again; it "
        "must be longer than a prolog"
    )
    value = ",".join(kept) if good else _joined(kept, [f"cred_expire={least}"])
    yield Want("AuthInfo", now, value, "ok" if good else "advice", why, False)


def _expedite(facts: Facts) -> Want:
    """25.11 and later."""
    key, word = "SlurmctldParameters", "enable_expedited_requeue"
    now = value_of(facts.config, key)
    options = [option for option in now.split(",") if option]
    good = word in (option.lower() for option in options)
    why = (
        f"{word}: jobs of `sbatch --requeue=expedite` start again at once, before all others, "
        "when their node failed"
    )
    value = now if good else _joined(options, [word])
    return Want(key, now, value, "ok" if good else "advice", why, False)


def _requeue(facts: Facts) -> Iterator[Want]:
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


def _timeouts(facts: Facts) -> Iterator[Want]:
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


def _ends(facts: Facts) -> Iterator[Want]:
    config = facts.config
    now = value_of(config, "UnkillableStepTimeout")
    limit, least = seconds(now) or 60, 5 * (seconds(value_of(config, "MessageTimeout")) or 10)
    level: Level = "ok" if limit >= max(180, least) else "fix" if limit < least else "advice"
    why = (
        "a process that is still writing when it is killed gets this long; then Slurm drains the "
        "node with a reason of its own, which the sweep never takes back"
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


def _return(facts: Facts) -> Iterator[Want]:
    now = value_of(facts.config, "ReturnToService")
    level: Level = "advice" if now == "2" else "ok"
    why = "2 returns every DOWN node that registers, also one that a person or a reboot took down"
    value = "1" if level == "advice" else now or "1"
    yield Want("ReturnToService", now, value, level, why, False)
    now = value_of(facts.config, "RebootProgram")
    why = (
        "what `scontrol reboot NODE` runs; a node that we drained keeps its drain over it, and "
        "the sweep undrains it when it passes (ASAP and nextstate= would take the drain away)"
    )
    yield Want("RebootProgram", now, now or "/sbin/reboot", "ok" if now else "advice", why, False)
    now = value_of(facts.config, "ProctrackType")
    if now in ("proctrack/linuxproc", "proctrack/pgid"):
        why = "processes that leave their session escape Slurm; the epilog finds them by user only"
        yield Want("ProctrackType", now, "proctrack/cgroup", "advice", why, False)


RULES: tuple[Rule, ...] = (
    _scripts,
    _health_program,
    _health_when,
    _prep,
    _prolog_flags,
    _scheduler,
    _requeue,
    _timeouts,
    _ends,
    _return,
)


def _since(facts: Facts, major: int, minor: int) -> bool:
    """Whether Slurm is this new. Not known: no, since an old one stops at a word it lacks."""
    known = release(facts.config)
    return known is not None and known >= (major, minor)


def _option(text: str) -> float:
    """The number of ``cred_expire=30``; Slurm's 120 without one."""
    number = seconds(text.partition("=")[2])
    return 120 if number is None else number


def _joined(first: Sequence[str], then: Sequence[str]) -> str:
    """Both lists as one, nothing twice (Slurm reads these words in any case)."""
    seen: dict[str, str] = {}
    for word in [*first, *then]:
        seen.setdefault(word.lower(), word)
    return ",".join(seen.values())


def _same(one: str, other: str) -> bool:
    return {w.lower() for w in one.split(",")} == {w.lower() for w in other.split(",")}
