"""The lines of a node's story, in words. Pure."""

from __future__ import annotations

from robust_slurm.error_counters import weight
from robust_slurm.state_dir.node_events import NodeEvent
from robust_slurm.state_dir.records import IncidentRecord, NodeReport
from robust_slurm.text import span

MOST = 5  # lines of evidence that are shown of one record


def about(text: str, estimated: bool) -> str:
    """Mark a number that is an estimate: "~12"."""
    return f"~{text}" if estimated and text != "?" else text


def lost(one: IncidentRecord) -> str:
    """Steps that were lost, in a word: "12", "~12", "~4 min" where steps are not seen, "?"."""
    if one.lost_steps is not None:
        return about(str(one.lost_steps), bool(one.estimate))
    if one.lost_s is not None:
        return about(span(one.lost_s), True)
    return "?" if one.outcome == "recovered" else ""


def _listed(lines: tuple[str, ...]) -> list[str]:
    more = len(lines) - MOST
    return [*lines[:MOST], *([f"and {more} more lines"] if more > 0 else [])]


def _joined(lines: tuple[str, ...]) -> str:
    return "; ".join(_listed(lines))


def report(one: NodeReport, rule: str) -> list[str]:
    of = f" of {one.user}" if one.user else ""
    by = f" (rule {rule}, incident {one.incident or '?'})" if rule else ""
    what = one.symptom.replace("_", " ") or "no symptom"
    head = f"job {one.job_id}{of} reported {one.node}: {what}{by}"
    return [head, *(f"evidence: {line}" for line in _listed(one.evidence))]


def unreported(job: int, node: str, incident: IncidentRecord) -> str:
    what = incident.symptom.replace("_", " ") or "no symptom"
    return f"job {job} left {node} without a report: {what}, cause {incident.cause or 'unknown'}"


def warned(job: int, node: str, incident: IncidentRecord) -> list[str]:
    what = incident.symptom.replace("_", " ") or "no symptom"
    head = f"job {job} named {node} and kept it: {what}"
    return [head, *(f"evidence: {line}" for line in _listed(incident.evidence))]


def tests(incident: IncidentRecord) -> list[str]:
    return [f"tests: {line}" for line in _listed(incident.tests)]


def counters(node: str, incident: IncidentRecord) -> list[str]:
    """The node's own error counters, without its name, the gravest first."""
    own = [line.removeprefix(f"{node}: ") for line in incident.counters if _of(node, line)]
    return [f"error counters: {line}" for line in _listed(tuple(sorted(own, key=weight)))]


def _of(node: str, line: str) -> bool:
    return line.startswith(f"{node}: ")


def evicted(job: int, node: str, incident: IncidentRecord) -> str:
    new = next((new for old, new in incident.swaps if old == node), "")
    if new:
        return f"job {job} evicted {node}; {new} took its ranks"
    return f"job {job} was requeued without {node}"


def outcome(job: int, incident: IncidentRecord) -> str:
    cost = ""
    if incident.outcome == "recovered" and lost(incident) != "?":
        cost = f"; {lost(incident)} lost"
        if incident.lost_steps is not None:
            steps = "step" if incident.lost_steps == 1 else "steps"
            cost = f"; {lost(incident)} {steps} lost"
    return f"outcome in job {job}: {incident.outcome or 'unknown'}{cost}"


def withdrawn(one: NodeReport) -> str:
    return f"job {one.job_id} withdrew the report: {one.withdrawn}"


def looked(node: str, event: NodeEvent) -> str:
    why = _joined(event.why)
    if event.result == "confirmed":
        return "the gate confirmed the report" + (f": {why}" if why else "")
    return f"the gate cleared {node}: no check found a fault" + (f" ({why})" if why else "")


def refused(event: NodeEvent) -> str:
    return f"the gate refused the report: {_joined(event.why) or 'no reason recorded'}"


def strike(event: NodeEvent) -> str:
    return f"strike: the report of job {event.job_id} is unproven and counts towards a lemon"


def dropped(event: NodeEvent) -> str:
    why = _joined(event.why) or "no reason recorded"
    return f"the strike of job {event.job_id} counts no more: the report was withdrawn ({why})"


def drained(event: NodeEvent) -> list[str]:
    lines = [f"drained: {event.reason or 'unknown reason'}"]
    if not event.placed:
        lines = [f"to be drained, but Slurm did not take it: {event.reason or 'unknown reason'}"]
    return [*lines, *([f"evidence: {event.told}"] if event.told else [])]


def undrained(node: str, event: NodeEvent) -> str:
    of = f" ({event.reason})" if event.reason else ""
    return f"undrained: every check passes on {node}{of}"


def tested(node: str, event: NodeEvent) -> str:
    if event.kind == "repaired":
        by = f" by {event.by}" if event.by else ""
        return f"{node} was reported as repaired{by}" + (f": {event.told}" if event.told else "")
    name = "burn-in" if event.kind == "burn-in" else "active tests"
    told = f": {event.told}" if event.told and event.told != event.result else ""
    return f"{name} {event.result or 'without a result'}{told}"
