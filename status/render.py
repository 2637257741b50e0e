"""The report as a table for a terminal. Imports rich, so it is imported only to print one."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from robust_slurm.command_line.screen import plain_table
from robust_slurm.slurm.values import folded
from robust_slurm.state_dir.records import Checkpoint, IncidentRecord
from standby.pool.stock import told
from status.accounts.segments import INCIDENT_PHASES
from status.lemons import Lemon
from status.model import JobReport, JobRow, NodeRow, StatusReport
from status.rules import RuleRow
from status.views.attention import BAD, Attention
from status.views.data import data_lines
from status.views.job import short_incidents
from status.views.overview import Line, job_lines, overview, short_clock, unread
from status.wording import about, lost

_PHASES = (*INCIDENT_PHASES, "total")
_STATUS_STYLE = {
    "running": "green",
    "recovering": "yellow",
    "silent": "red",
    "failed": "red",
}
_WIDE = 160  # columns from which a job's table has all phases
_LINES = 64  # of nodes; of more, those with equal rows share one
_HANG = 10  # lines that say who waits for whom


def print_overview(report: StatusReport, look: Sequence[Attention], out: Console) -> None:
    """The report on one screen; without a terminal, all of it."""
    height = out.height if out.is_terminal else None
    _print_lines(overview(report, look, out.width, height), out)


def _print_lines(lines: Sequence[Line], out: Console) -> None:
    for line in lines:
        out.print(Text(line.text, style=line.style), soft_wrap=True)


def print_bad(report: StatusReport, look: Sequence[Attention], out: Console) -> None:
    """The table of the nodes that need attention, then why."""
    named = [one for one in look if one.kind in ("bad", "suspected", "flapping")]
    names = [one.name for one in named]
    rows = tuple(row for row in report.nodes if row.name in names)
    if rows:
        print_report(replace(report, nodes=rows, jobs=(), pool=None), out, with_jobs=False)
    else:
        _slurm_error(report.slurm_error, out)
        if not report.problems and not report.slurm_error:
            out.print("No node is bad, suspected or flapping.")
        _problems(report.problems, out)


def print_paragraphs(told: Sequence[str], report: JobReport, out: Console) -> None:
    """Paragraphs, wrapped at the terminal's width, or 100 columns."""
    _slurm_error(report.slurm_error, out)
    width = min(out.width, 100)
    for number, text in enumerate(told):
        if number:
            out.print()
        for line in textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False):
            out.print(Text(line), soft_wrap=True)
    _problems(report.problems, out)


def print_report(report: StatusReport, out: Console, with_jobs: bool = True) -> None:
    """Nodes, then jobs, then what could not be read."""
    _slurm_error(report.slurm_error, out)
    if report.nodes:
        table = plain_table("NODE", "POOL", "STATE", "REASON", "REPORTS", "NEWEST EVIDENCE")
        for names, node in _alike(report.nodes):
            bad = bool(BAD & set(node.state))
            table.add_row(
                names,
                node.pool or "?",
                Text("+".join(node.state) or "?", style="red" if bad else ""),
                node.reason,
                Text(str(node.accusations or ""), style="yellow"),
                node.newest_evidence,
            )
        out.print(table)
    elif not report.slurm_error:
        out.print("Slurm has no nodes.")
    if report.pool is not None:
        out.print(Text(told(report.pool), style="yellow" if report.pool.short else ""))
    if with_jobs and (report.jobs or not unread(report)):
        out.print()
        out.print(_jobs(report.jobs) if report.jobs else "No robust jobs are running.")
    _problems(report.problems, out)


def print_job(report: JobReport, out: Console) -> None:
    """The job's steps and nodes, then its incidents."""
    _slurm_error(report.slurm_error, out)
    wide = out.width >= _WIDE
    if wide:
        out.print(_jobs(report.steps))
    else:
        _print_lines(job_lines(report.steps, out.width), out)
    if report.log:
        out.print(f"log: {report.log}", soft_wrap=True)
    for row in report.steps:
        if row.note:
            out.print(f"note of step {row.step_id}: {row.note}")
        if row.checkpoint is not None:
            out.print(f"checkpoints of step {row.step_id}: {_checkpoint(row.checkpoint)}")
        for line in data_lines(row.data, row.step_id) if row.data and row.live else ():
            out.print(line)
        if warm := sum(node["warm"] for node in row.nodes):
            spare = sum(node["warm"] for node in row.nodes if not node["ranks"])
            more = f" and {spare} on spare nodes" if spare else ""
            most = max(row.ranks, warm - spare)
            text = f"{warm - spare} of {most} ranks would start warm{more}"
            out.print(f"restarts of step {row.step_id}: {text}")
    out.print()
    if report.incidents and not wide:
        _print_lines(short_incidents(report.incidents, out.width), out)
        out.print(f"robust-status {report.job_id} --why explains each in a paragraph.")
    elif report.incidents:
        table = plain_table(
            "TIME", "SYMPTOM", "CAUSE", "RULE", "SUSPECTS", "ACTION", "OUTCOME", "LOST STEPS"
        )
        tested = any("test" in i.phases and i.tests for i in report.incidents)
        phases = [phase for phase in _PHASES if phase != "test" or tested]
        for phase in phases:
            table.add_column(phase.upper(), justify="right")
        for incident in report.incidents:
            table.add_row(*_incident(incident, phases))
        out.print(table)
        marked = any(i.estimate for i in report.incidents)
        out.print("phases in seconds" + ("; ~: an estimate" if marked else ""))
        for incident in report.incidents:
            stuck = incident.evidence[:_HANG] if incident.symptom == "hang" else ()
            sized = ("resized {}→{}".format(*incident.resized),) if incident.resized else ()
            told = (*sized, *stuck, *incident.amended, *incident.counters, *incident.tests)
            if incident.estimate:
                told = (*told, f"lost: {lost(incident)} (estimate: {incident.estimate})")
            for line in (*told, *incident.restored):
                out.print(f"{short_clock(incident.time)} {line}")
    else:
        out.print(f"Job {report.job_id} had no incidents.")
    _problems(report.problems, out)


def print_lemons(
    rows: Sequence[Lemon], problems: Sequence[str], slurm_error: str, out: Console
) -> None:
    """The nodes that jobs excluded, the worst first."""
    _slurm_error(slurm_error, out)
    if rows:
        table = plain_table("NODE", "EXCLUDE")
        for heading in ("JOBS", "USERS", "WENT ON", "CONFIRMED", "CLEARED", "WITHDRAWN"):
            table.add_column(heading, justify="right")
        for heading in ("NEWEST REPORT", "DRAINED"):
            table.add_column(heading, overflow="fold")
        for row in rows:
            counts = (row.jobs, row.users, row.progressed)
            verdicts = (row.confirmed, row.cleared, row.withdrawn)
            table.add_row(
                row.name,
                Text("yes" if row.exclude else "", style="red"),
                *map(str, (*counts, *verdicts)),
                short_clock(row.newest),
                row.drained,
            )
        out.print(table)
    else:
        out.print("No job has reported a node.")
    _problems(tuple(problems), out)


def print_rules(
    rows: Sequence[RuleRow], problems: Sequence[str], slurm_error: str, out: Console
) -> None:
    """Print how often each rule of diagnosis reported a node, and was wrong."""
    _slurm_error(slurm_error, out)
    if rows:
        table = plain_table("RULE")
        headings = ("REPORTED", "EVICTED", "CONFIRMED", "CLEARED", "WITHDRAWN", "REFUSED", "OPEN")
        for heading in (*headings, "FALSE ALARMS"):
            table.add_column(heading, justify="right")
        for row in rows:
            share = "" if row.false_share is None else f" ({100 * row.false_share:.0f} %)"
            counts = (row.reported, row.evicted, row.confirmed, row.cleared, row.withdrawn)
            table.add_row(
                row.rule or "(not recorded)",
                *map(str, (*counts, row.refused, row.open)),
                f"{row.false_alarms}{share}",
            )
        out.print(table)
    else:
        out.print("No rule has reported or evicted a node.")
    _problems(tuple(problems), out)


def _checkpoint(at: Checkpoint) -> str:
    """Like "training step 120 in memory, 120 on other nodes, 100 on disk in /ckpt; …"."""
    parts = [
        f"{'no step' if step is None else f'step {step}'} {where}"
        for step, where in (
            (at.step, "in memory"),
            (at.replicated, "on other nodes"),
            (at.durable, f"on disk in {at.directory}" if at.directory else "on disk"),
        )
    ]
    text = f"training {', '.join(parts)}"
    if at.certified is not None:
        text += f"; certified: step {at.certified}"
    if at.survives:
        text += f"; {at.survives}"
    if at.every:
        text += f"; in memory {at.every}"
    size = f"{at.bytes / 1e6:.{at.bytes < 1e7:d}f} MB"
    return f"{text}; {size} a rank, blocked {1000 * at.blocked_s:.1f} ms a snapshot"


def _incident(incident: IncidentRecord, phases: Sequence[str]) -> list[str]:
    return [
        short_clock(incident.time),
        incident.symptom,
        incident.cause,
        incident.rule,
        ",".join(incident.suspects),
        incident.action,
        incident.outcome,
        lost(incident),
        *(
            "not seen"
            if phase == "first_step" and not incident.steps_seen
            else _seconds(incident.phases.get(phase))
            for phase in phases
        ),
    ]


def _jobs(rows: tuple[JobRow, ...]) -> Table:
    table = plain_table("JOB", "NAME", "USER", "STATUS", "NODES", "STEP", "STEP TIME", "STARTS")
    for heading in ("INCIDENTS", "LOST STEPS", "ETTR"):
        table.add_column(heading, justify="right")
    for row in rows:
        said = row.status
        if said == "silent":
            said = f"silent {row.silent_s:.0f} s"
        table.add_row(
            f"{row.job_id}.{row.step_id}",
            row.name,
            row.user,
            Text(said, style=_STATUS_STYLE.get(row.status, "")),
            _members(row.nodes),
            "" if row.step is None else str(row.step),
            "" if row.step_time_s is None else f"{row.step_time_s:.3g} s",
            str(row.epoch),
            str(row.incidents),
            "?" if row.lost_steps is None else about(str(row.lost_steps), row.estimated),
            "?" if row.ettr is None else about(f"{row.ettr:.4f}", row.estimated),
        )
    return table


def _alike(nodes: Sequence[NodeRow]) -> list[tuple[str, NodeRow]]:
    """The rows to show: names, and what is shown of them.

    Where there are more nodes than a screen has lines, all that would have equal rows share one.
    """
    if len(nodes) <= _LINES:
        return [(node.name, node) for node in nodes]
    rows: dict[NodeRow, list[str]] = {}
    for node in nodes:
        rows.setdefault(replace(node, name=""), []).append(node.name)
    return [
        (folded(names) + (f" ({len(names)} nodes)" if len(names) > 1 else ""), node)
        for node, names in rows.items()
    ]


def _members(nodes: tuple[Mapping[str, Any], ...]) -> str:
    """Active nodes folded, the others counted by role: "n[1-2,5] (1 spare, 1 released)"."""
    active = [node["name"] for node in nodes if node["role"] == "active"]
    text = folded(active)
    if len(text) > 60:
        text = f"{len(active)} nodes"
    others = Counter(node["role"] or "?" for node in nodes if node["role"] != "active")
    if others:
        text += f" ({', '.join(f'{count} {role}' for role, count in sorted(others.items()))})"
    return text.strip()


def _slurm_error(error: str, out: Console) -> None:
    if error:
        out.print(Text(f"Slurm did not answer, only files are shown: {error}", style="red"))
        out.print()


def _problems(problems: tuple[str, ...], out: Console) -> None:
    for problem in problems:
        out.print(Text(f"note: {problem}", style="yellow"))


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
