"""``robust-status JOB --why``: each restart as one plain paragraph. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from robust_slurm.state_dir.records import NOT_STOPPED, IncidentRecord, stays
from robust_slurm.text import counted, listed, span
from srun_wrapper.decide.diagnose import RULES
from srun_wrapper.decide.diagnosis import REPLAYED, TESTED
from status.accounts.segments import INCIDENT_PHASES, PHASE_NAMES
from status.accounts.sums import hours
from status.accounts.timeline import JobAccount, blamed
from status.views.overview import clock, duration

LINES = 4  # of evidence in a paragraph; --html and --json have all
LEAST = 0.05  # of an incident's time: a shorter phase is not named

_KNOWN = {rule.id: rule.evidence for rule in RULES}
_KNOWN |= {TESTED: "tests of the machines named it", REPLAYED: "a replay of the job named it"}
_WHAT = {
    "node_lost": "{nodes} stopped answering",
    "stuck": "ranks on {nodes} could not be ended",
    "crash": "a rank failed on {nodes}",
    "hang": "no rank made a step any more; {nodes} stood out",
    "nan": "the loss was not finite",
    "sdc": "a rank on {nodes} held other bits than the ranks that share its state",
    "slow": "steps became slow; the others waited for {nodes}",
    "update": "the code was updated",
}
_ALONE = {  # where no node is named
    "node_lost": "nodes stopped answering together",
    "crash": "ranks failed",
    "hang": "no rank made a step any more",
    "slow": "steps became slow",
}
_BLAME = {
    "node": "The node is to blame.",
    "shared": "Something that the nodes share is to blame, and no node.",
    "user": "The program, its settings or its data are to blame.",
    "transient": "The fault has passed; no node and no program is to blame.",
    "unknown": "The cause is not known.",
    "ordered": "It was ordered.",
}
_ADVICE = {
    "node": "nothing; {nodes} left the job, and `robust-status {node}` shows what became of it.",
    "shared": "ask the operators about the service or mount that these lines name; restarts go on "
    "without you.",
    "user": "correct the program, its settings or its data; the same error a second time without "
    "progress ends the job.",
    "transient": "nothing; if it returns within minutes, tell the operators.",
    "unknown": "watch whether it returns on the same node; `robust-status {node}` shows its "
    "reports.",
    "ordered": "nothing.",
}


def paragraphs(job: JobAccount, log: str = "", recovering: bool = False) -> list[str]:
    """One paragraph for each incident, oldest first; and one if the job recovers now."""
    told = [paragraph(job, number, log) for number in range(len(job.incidents))]
    if recovering:
        told.append(
            f"Job {job.job_id} is recovering now. Its record is written when training goes on; "
            f"until then {log or 'robust-srun.log'} has the diagnosis."
        )
    if not told:
        told = [f"Job {job.job_id} was never restarted."]
    return told


def paragraph(job: JobAccount, number: int, log: str = "") -> str:
    """The paragraph of one incident."""
    one = job.incidents[number]
    when = clock(one.time, "at an unknown time")
    head = f"Restart {number + 1} of job {job.job_id}, {when}"
    if one.outcome.startswith(NOT_STOPPED):
        head = f"Warning {number + 1} of job {job.job_id}, {when}"
    parts = (
        f"{head}: {_what(one)}.",
        _known(one),
        _blame(one),
        _done(one),
        _cost(job, number),
        _advice(one, log),
    )
    return " ".join(part for part in parts if part)


def _blame(one: IncidentRecord) -> str:
    if one.cause == "node" and stays(one.outcome, one.symptom):
        return "That points to the node; it stayed in the job."
    return _BLAME.get(one.cause, "")


def _what(one: IncidentRecord) -> str:
    nodes = blamed(one)
    if (text := _WHAT.get(one.symptom)) is None:  # text of a record: no format string
        return one.symptom.replace("_", " ") or "something failed"
    if not nodes:
        text = _ALONE.get(one.symptom, text.replace(" on {nodes}", ""))
    return text.format(nodes=_listed(nodes))


def _known(one: IncidentRecord) -> str:
    after = one.phases.get("detect", 0.0)
    seen = f"It was seen {duration(after)} after the last sign of health" if after > 0 else ""
    rule = _KNOWN.get(one.rule, "")
    how = f"rule {one.rule} applied: {rule}" if rule else ""
    lines = [f"“{line}”" for line in one.evidence[:LINES]]
    more = len(one.evidence) - LINES
    if more > 0:
        lines.append(f"and {counted(more, 'more line')}")
    proof = f"The lines that prove it: {'; '.join(lines)}." if lines else ""
    first = "; ".join(part for part in (seen, how) if part)
    tests = f"Tests of the machines: {'; '.join(one.tests[:LINES])}." if one.tests else ""
    amended = f"Since then: {'; '.join(one.amended[:LINES])}." if one.amended else ""
    return " ".join(p for p in (f"{first}." if first else "", proof, tests, amended) if p)


def _done(one: IncidentRecord) -> str:
    if one.outcome.startswith("warned"):
        return "Nothing was done: the job went on."
    if one.outcome.startswith("observed"):
        return f"Nothing was done (mode = observe); {one.outcome.partition(': ')[2]}."
    swaps = [f"{new} took the ranks of {old}" for old, new in one.swaps[:LINES]]
    if more := max(0, len(one.swaps) - LINES):
        swaps.append(f"and {more} more")
    did = {
        "requeue": "The job was requeued" + (f" without {_listed(blamed(one))}" if one.suspects
                                             else ""),
        "stop": "The job was ended",
        "shrink": "The job went on with fewer ranks",
    }.get(one.action, "The ranks were restarted")  # fmt: skip
    why = f" ({one.why})" if one.why and not swaps else ""
    text = f"{did}{why}" + (f"; {', '.join(swaps)}" if swaps else "")
    if one.resized:
        text += f"; resized {one.resized[0]}→{one.resized[1]}"
    if one.restored:
        text += f"; restored: {one.restored[0]}"
    ended = "" if one.outcome in ("recovered", "requeued") else f" Outcome: {one.outcome}."
    return f"{text}.{ended}"


def _cost(job: JobAccount, number: int) -> str:
    one = job.incidents[number]
    mine = [s for s in job.segments if s.incident == number and not s.productive]
    lost = sum(s.ms for s in mine)
    known = one.lost_steps is not None or one.lost_s is not None
    if not lost:
        if known or one.outcome != "recovered":
            return "It cost no time."
        return "What it cost is not known: no step was seen."
    phases: dict[str, int] = {}
    for s in mine:
        phases[s.phase] = phases.get(s.phase, 0) + s.ms
    named = [p for p in (*INCIDENT_PHASES, "redone", "queued", "start_up", "ending") if p in phases]
    shown = [f"{PHASE_NAMES.get(p, p)} {duration(phases[p] / 1000)}" for p in named
             if phases[p] >= LEAST * lost]  # fmt: skip
    if not one.steps_seen:
        shown.append("first step not seen")
    steps = one.lost_steps
    again = "steps done twice not known"
    if steps is not None:
        again = f"{counted(steps, 'step') if steps else 'no step'} done twice"
    elif one.lost_s is not None:
        again = f"{span(one.lost_s)} of training done twice"
    if one.estimate:
        again = f"about {again} (estimate: {one.estimate})"
    about = "about " if one.estimate else ""
    return (
        f"It cost {about}{duration(lost / 1000)} without new steps ({', '.join(shown)}), {again}, "
        f"{hours(sum(s.gpu_ms for s in mine)):.2f} GPU-hours."
    )


def _advice(one: IncidentRecord, log: str) -> str:
    nodes = blamed(one)
    unsure = one.cause == "node" and stays(one.outcome, one.symptom)
    text = _ADVICE.get("unknown" if unsure else one.cause, "")
    if "{node" in text and not nodes:
        text = "watch whether it returns." if text == _ADVICE["unknown"] else "nothing."
    text = text.format(nodes=_listed(nodes), node=nodes[0] if nodes else "")
    if one.cause in ("user", "unknown") and log:
        text += f" The log: {log}."
    return f"What you can do: {text}" if text else ""


def _listed(names: Sequence[str], most: int = 4) -> str:
    if len(names) > most:
        return f"{', '.join(names[:most])} and {counted(len(names) - most, 'more node')}"
    return listed(names, "and")
