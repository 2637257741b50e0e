"""``robust-status NODE``, ``--lemons`` and ``--rules``: what is suspected of nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from robust_slurm.command_line.errors import CommandError, warn
from robust_slurm.slurm.model import SlurmNode
from robust_slurm.slurm.values import ParseError, fold
from robust_slurm.state_dir.files import JobRecord, read_jobs
from robust_slurm.state_dir.node_events import NodeEvent, published, read_events
from robust_slurm.state_dir.records import clean
from robust_slurm.text import counted
from status.by_node import by_node
from status.lemons import Lemon, lemon, order
from status.model import SlurmView
from status.rules import rule_rows
from status.show import print_json
from status.story import Suspicion, proven_good, suspicions
from status.views.overview import clock

SHOWN = 20  # suspicions of a node in words; JSON has all


@dataclass
class Records:
    """The records of the state directory about nodes, read once."""

    state_dir: Path
    view: SlurmView
    jobs: dict[str, list[JobRecord]]
    problems: list[str]

    def events(self, node: str) -> list[NodeEvent]:
        found, problems = read_events(self.state_dir, node)
        self.problems += problems
        return found

    def known(self, names: Iterable[str]) -> list[str]:
        """Return the names that Slurm knows as nodes: a file may call anything a node."""
        nodes = self.view.nodes
        return [n for n in dict.fromkeys(names) if (is_node(n) if nodes is None else n in nodes)]

    def drained(self, node: str, found: Sequence[Suspicion]) -> str:
        """The reason of the drain that stands, as Slurm says; else as the records do."""
        if self.view.nodes is not None:
            return drain_of(self.view.nodes.get(node))
        return next((one.drained for one in reversed(found) if one.drained), "")


def is_node(name: str) -> bool:
    """True if a node of Slurm can have this name."""
    try:
        return name[:1].isalnum() and fold([name]) == name
    except ParseError:
        return False


def drain_of(node: SlurmNode | None) -> str:
    if node is None or "DRAIN" not in node.state:
        return ""
    return clean(node.reason or "") or "no reason"


def read(state_dir: Path, view: SlurmView) -> Records:
    jobs, problems = read_jobs(state_dir, view.owners)
    return Records(state_dir, view, by_node(jobs), problems)


# -- a node's story ---------------------------------------------------------------------------


def show_node(node: str, state_dir: Path, view: SlurmView, as_json: bool, out: IO[str]) -> int:
    """Print what is suspected of a node, and what became of it; return the exit code."""
    records = read(state_dir, view)
    found = suspicions(node, records.jobs.get(node, []), records.events(node))
    if not found and node not in (view.nodes or {}):
        why = view.error or "Slurm has no node of this name"
        _complain(records.problems)
        raise CommandError(
            f"no record of node {node} under {state_dir / 'jobs'} and {state_dir / 'nodes'}, "
            f"and {why}"
        )
    known = (view.nodes or {}).get(node)
    if as_json:
        data = {
            "node": node,
            "time": time.time(),
            "slurm_error": view.error,
            "state": sorted(known.state) if known else [],
            "drained": records.drained(node, found),
            "suspicions": [asdict(one) for one in found],
            "problems": records.problems,
        }
        print_json(data, out)
    else:
        print("\n".join(story(node, known, found, view.error, state_dir)), file=out)
        _complain(records.problems)
    return 1 if view.error else 0


def story(
    node: str, known: SlurmNode | None, found: Sequence[Suspicion], error: str, state_dir: Path
) -> list[str]:
    """The lines of a node's story."""
    lines = [f"{node}: {'+'.join(sorted(known.state))}"] if known else [f"{node}: not in Slurm"]
    if error:
        lines = [f"{node}: Slurm did not answer, only files are shown: {error}"]
    if drain := drain_of(known):
        lines.append(f"drained: {drain}")
    if not found:
        return [*lines, f"No job and no check has suspected {node} ({state_dir})."]
    lines.append(_count(found))
    if len(found) > SHOWN:
        lines.append(f"The newest {SHOWN} follow; --json prints all.")
    for one in found[-SHOWN:]:
        lines += ["", _head(one)]
        lines += [f"  {clock(line.time)}  {line.text}" for line in one.lines]
    return lines


def _head(one: Suspicion) -> str:
    rule = one.rule or "not recorded"
    if one.source == "gate":
        return f"found by the gate, check {rule}: {'drained' if one.drained else 'over'}"
    stands = ", drained" if one.drained else ""
    return f"suspected by job {one.of_job}, rule {rule}: {one.verdict}{stands}"


def _count(found: Sequence[Suspicion]) -> str:
    """Like "3 reports: 1 confirmed, 2 cleared; 1 drain by the gate's own checks"."""
    verdicts = [one.verdict for one in found if one.reported]
    each = ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts))
    parts = [counted(len(verdicts), "report") + (f": {each}" if each else "")]
    if own := sum(one.source == "gate" for one in found):
        parts.append(f"{counted(own, 'drain')} by the gate's own checks")
    if silent := sum(one.verdict == "unreported" for one in found):
        parts.append(f"{counted(silent, 'replacement')} without a report")
    if named := sum(one.verdict == "warned" for one in found):
        parts.append(counted(named, "warning"))
    return "; ".join(parts)


# -- lemons and rules -------------------------------------------------------------------------


def show_lemons(
    state_dir: Path, view: SlurmView, as_json: bool, as_list: bool, out: IO[str]
) -> int:
    """Print the nodes that jobs excluded, the worst first, or the list of those to exclude."""
    records = read(state_dir, view)
    rows: list[Lemon] = []
    for node in records.known(records.jobs):
        events = records.events(node)
        found = suspicions(node, records.jobs[node], events)
        drained = records.drained(node, found)
        row = lemon(found, proven_good(events), drained, os.getuid(), time.time())
        if row is not None:
            rows.append(row)
    rows = order(rows)
    if as_list:
        # Without Slurm nobody knows which names are nodes: sbatch would refuse the whole list.
        names = fold(row.name for row in rows if row.exclude) if view.nodes is not None else ""
        if names:
            print(names, file=out)
        _complain([*([view.error] if view.error else []), *records.problems])
    elif as_json:
        _print_table_json("nodes", rows, records, out)
    else:
        from robust_slurm.command_line.screen import console
        from status.render import print_lemons

        print_lemons(rows, records.problems, view.error, console(out))
    return 1 if view.error else 0


def show_rules(state_dir: Path, view: SlurmView, as_json: bool, out: IO[str]) -> int:
    """Print for each rule of diagnosis how often it reported a node, and was wrong."""
    records = read(state_dir, view)
    found: list[Suspicion] = []
    for node in records.known([*records.jobs, *published(state_dir)]):
        found += suspicions(node, records.jobs.get(node, []), records.events(node))
    rows = rule_rows(found)
    if as_json:
        _print_table_json("rules", rows, records, out)
    else:
        from robust_slurm.command_line.screen import console
        from status.render import print_rules

        print_rules(rows, records.problems, view.error, console(out))
    return 1 if view.error else 0


def _print_table_json(key: str, rows: Iterable[Any], records: Records, out: IO[str]) -> None:
    data = {
        "time": time.time(),
        "slurm_error": records.view.error,
        key: [asdict(row) for row in rows],
        "problems": records.problems,
    }
    print_json(data, out)


def _complain(problems: Iterable[str]) -> None:
    for problem in problems:
        warn("robust-status", problem)
