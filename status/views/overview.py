"""``robust-status`` on one screen: what needs attention, the jobs, the pool. Pure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len, set_cell_size

from robust_slurm.slurm.values import folded
from standby.pool.stock import told
from status.model import NO_RECORDS, JobRow, NodeRow, StatusReport
from status.views.attention import BAD, Attention
from status.wording import about

LEAST = 5  # lines that attention and jobs each have, however low the screen
STYLES = {
    "silent": "red",
    "bad": "red",
    "failed": "red",
    "recovering": "yellow",
    "requeued": "yellow",
    "suspected": "yellow",
    "data": "yellow",
    "flapping": "yellow",
    "pool": "yellow",
    "running": "green",
}
_LESS = ("STEP TIME", "LOST", "USER", "NAME", "RESTARTS")  # left out where there is no room


@dataclass(frozen=True)
class Line:
    text: str
    style: str = ""


def overview(
    report: StatusReport, look: Sequence[Attention], width: int, height: int | None
) -> list[Line]:
    """The lines of the screen; ``height`` None: as many as there are."""
    tail = _pool(report)
    notes = [Line(f"note: {problem}", "yellow") for problem in report.problems]
    head: list[Line] = []
    if report.slurm_error:
        text = f"Slurm did not answer, only files are shown: {report.slurm_error}"
        head.append(Line(text, "red"))
    hints = _hints(report, look)
    room = None
    if height is not None:
        room = height - len(head) - len(tail) - len(notes[:2]) - len(hints) - 3
        notes = notes[:2]
    few, many = _shares(len(look), len(report.jobs), room)
    body = _attention(report, look, few)
    if report.jobs or not unread(report):
        body += job_lines(report.jobs, width, many)
    lines = [*head, *notes, *body, *tail, *hints]
    return [Line(cut(line.text, width), line.style) for line in lines]


def cut(text: str, width: int) -> str:
    """The text in at most ``width`` columns; what was cut ends in "…"."""
    return text if cell_len(text) <= width else set_cell_size(text, width - 1).rstrip() + "…"


def unread(report: StatusReport) -> bool:
    """Return whether there are no records to read, so that nothing is known of jobs."""
    return any(problem.startswith(NO_RECORDS) for problem in report.problems)


def _shares(look: int, jobs: int, room: int | None) -> tuple[int, int]:
    """Return the lines of attention and of jobs: each gets half, and what the other leaves."""
    if room is None or look + jobs <= room:
        return look, jobs
    room = max(room, 2 * LEAST)
    half = room // 2
    first = min(look, max(half, room - jobs))
    return first, min(jobs, room - first)


def _attention(report: StatusReport, look: Sequence[Attention], most: int) -> list[Line]:
    if not look:
        known = report.jobs or report.nodes
        calm = known and not report.slurm_error and not report.problems
        text = "Nothing needs attention: no bad or suspected node, no job in recovery."
        return [Line(text, "green")] if calm else []
    lines = [Line("NEEDS ATTENTION", "bold")]
    shown = look if len(look) <= most else look[: max(0, most - 1)]
    names = max((cell_len(one.name) for one in shown), default=0)
    kinds = max((len(one.kind) for one in shown), default=0)
    for one in shown:
        name = set_cell_size(one.name, names)
        lines.append(Line(f"  {name}  {one.kind:<{kinds}}  {one.text}", STYLES.get(one.kind, "")))
    if more := len(look) - len(shown):
        counts = Counter(one.kind for one in look[len(shown) :])
        said = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        lines.append(Line(f"  and {more} more ({said}): robust-status --bad"))
    return lines


def job_lines(rows: Sequence[JobRow], width: int, most: int = 1000) -> list[Line]:
    """The jobs as a table that fits ``width``, of at most ``most`` rows."""
    if not rows:
        return [Line("No robust jobs are running.")]
    shown = rows if len(rows) <= most else rows[: max(0, most - 1)]
    heads = ["JOB", "NAME", "USER", "STATUS", "NODES", "STEP", "STEP TIME", "RESTARTS", "LOST"]
    heads.append("ETTR")
    table = [heads, *([_cells(row)[head] for head in heads] for row in shown)]
    lines = layout(table, width, keep=[heads.index(h) for h in heads if h not in _LESS])
    styled = [Line(lines[0], "bold")]
    styled += [Line(t, STYLES.get(row.status, "")) for t, row in zip(lines[1:], shown, strict=True)]
    if more := len(rows) - len(shown):
        styled.append(Line(f"and {more} more jobs: robust-status | less"))
    return styled


def _cells(row: JobRow) -> dict[str, str]:
    guess = row.estimated
    silent = f"silent {row.silent_s:.0f} s" if row.status == "silent" else row.status
    return {
        "JOB": f"{row.job_id}.{row.step_id}" if row.step_id not in ("", "0") else str(row.job_id),
        "NAME": row.name,
        "USER": row.user,
        "STATUS": silent,
        "NODES": _members(row.nodes),
        "STEP": "" if row.step is None else str(row.step),
        "STEP TIME": "" if row.step_time_s is None else f"{row.step_time_s:.3g} s",
        "RESTARTS": str(row.incidents),
        "LOST": "?" if row.unproductive_s is None else about(duration(row.unproductive_s), guess),
        "ETTR": "?" if row.ettr is None else about(f"{row.ettr:.4f}", guess),
    }


def layout(table: Sequence[Sequence[str]], width: int, keep: Sequence[int]) -> list[str]:
    """Rows as lines. Columns that are not kept are left out, rightmost first, to fit ``width``;
    the widest text of what is left is cut."""
    columns = list(range(len(table[0])))
    sizes = {c: min(40, max(cell_len(row[c]) for row in table)) for c in columns}

    def needed() -> int:
        return sum(sizes[c] for c in columns) + 2 * (len(columns) - 1)

    for column in sorted((c for c in columns if c not in keep), reverse=True):
        if needed() <= width:
            break
        columns.remove(column)
    while needed() > width and max(sizes[c] for c in columns) > 8:
        sizes[max(columns, key=lambda c: sizes[c])] -= 1
    lines = []
    for row in table:
        cells = [set_cell_size(cut(row[c], sizes[c]), sizes[c]) for c in columns]
        lines.append("  ".join(cells).rstrip())
    return lines


def _members(nodes: Sequence[dict[str, Any]]) -> str:
    active = [node["name"] for node in nodes if node["role"] == "active"]
    text = folded(active)
    return text if len(text) <= 24 else f"{len(active)} nodes"


def _pool(report: StatusReport) -> list[Line]:
    """The nodes of each pool in a line: how many there are, in each state."""
    pools: dict[str, list[NodeRow]] = {}
    for row in report.nodes:
        pools.setdefault(row.pool or "?", []).append(row)
    lines = [Line("NODES", "bold")] if pools else []
    for name, rows in sorted(pools.items(), reverse=True):
        counts = Counter(node_word(row) for row in rows)
        said = ", ".join(f"{count} {word}" for word, count in counts.most_common())
        lines.append(Line(f"  {name:<8} {len(rows)}: {said}"))
    if report.pool is not None and not report.pool.short:
        lines.append(Line(f"  {told(report.pool)}"))
    return lines


def node_word(row: NodeRow) -> str:
    """The state of a node in one word of ours, as the pool and the metrics count it."""
    state = set(row.state)
    for flag, word in (("DOWN", "down"), ("NOT_RESPONDING", "down"), ("DRAIN", "drained")):
        if flag in state:
            return word
    if state & BAD:
        return "bad"
    for flag in ("ALLOCATED", "MIXED", "IDLE", "COMPLETING"):
        if flag in state:
            return {"MIXED": "allocated"}.get(flag, flag.lower())
    return "+".join(row.state).lower() or "?"


def _hints(report: StatusReport, look: Sequence[Attention]) -> list[Line]:
    parts = []
    if report.jobs:
        parts.append("robust-status JOB --why: why it restarted")
    if any(one.kind in ("bad", "suspected", "flapping") for one in look):
        parts.append("NODE: its story")
    parts += ["--nodes: all nodes", "--help"]
    return [Line("; ".join(parts), "dim")]


def duration(seconds: float) -> str:
    """Like "2 h 05 min", "3 min 07 s", "12.4 s"; never two units that do not follow."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    return f"{hours // 24} d {hours % 24} h"


def clock(when: float, unknown: str = "?", form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Return the local time; ``unknown`` for what is no time."""
    try:
        return time.strftime(form, time.localtime(when))
    except (OverflowError, OSError, ValueError):
        return unknown


def short_clock(when: float) -> str:
    """Return the local time without its year."""
    return clock(when, form="%m-%d %H:%M:%S")
