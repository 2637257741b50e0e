"""Measure how often the first cause of a failed job is named right, on logs with labels.

``python -m bench.diagnosis CORPUS_DIR [--json FILE] [--all]``: the directory has ``*.log`` files
and ``labels.json``, a list (or ``{"labels": [...]}``) of ``{"file", "layer", "also_layer",
"blame", "evict_node", "first_cause_line"}``; the line is a number from 1, or its text.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.common import Results, summarise
from srun_wrapper.signatures.catalogue import LAYERS, load
from srun_wrapper.signatures.verdict import LogVerdict, judge

ALIASES = {
    "infiniband": "ib", "rdma": "ib", "network": "tcp", "ethernet": "tcp", "gpu": "gpu_hardware",
    "sdc": "sdc_nan", "nan": "sdc_nan", "filesystem": "storage", "file_system": "storage",
    "oom": "host_oom", "cuda_oom": "gpu_oom", "usercode": "user_code", "user": "user_code",
    "configuration": "config", "gpu_driver": "driver", "slurm": "scheduler", "none": "unknown",
    "nan_sdc": "sdc_nan", "host": "host_hardware", "hardware": "host_hardware",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Score:
    file: str
    layer: str  # as labelled
    blame: str
    said: LogVerdict
    layer_right: bool
    blame_right: bool
    first_right: bool | None  # None: the label names no line
    false_evictions: tuple[str, ...]
    bad: tuple[str, ...]  # the nodes that the label wants evicted


@dataclass(slots=True)
class Totals:
    scores: list[Score] = field(default_factory=list)

    def share(self, name: str) -> float:
        values = [getattr(each, name) for each in self.scores]
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else 0.0

    @property
    def false_evictions(self) -> list[Score]:
        return [each for each in self.scores if each.false_evictions]


def normal(layer: object) -> str:
    """Return the layer's id, whatever its case, blanks, slashes and dashes."""
    name = re.sub(r"[^a-z0-9]+", "_", str(layer or "unknown").lower()).strip("_")
    return name if name in LAYERS else ALIASES.get(name, name)


def normal_blame(blame: object) -> str:
    return re.sub(r"[^a-z]+", "_", str(blame or "unknown").lower()).strip("_")


def nodes(value: object) -> tuple[str, ...]:
    names = value if isinstance(value, list) else [value]
    return tuple(short(str(name)) for name in names if name)


def short(node: str) -> str:
    """Return the host's name without its domain; an address stays whole."""
    name = node.strip().lower()
    return name if re.fullmatch(r"[\d.:a-f]+", name) else name.split(".")[0]


def same_line(log: str, label: object, verdict: LogVerdict) -> bool | None:
    """Compare the named line with the label's number or text. None: the label has neither."""
    if label is None or label == "":
        return None
    if verdict.first is None:
        return False
    lines = log.split("\n")
    mine = _words(lines[verdict.first.number - 1])
    if isinstance(label, str) and not label.strip().isdigit():
        theirs = _words(label)
        return bool(mine) and (theirs in mine or mine in theirs)
    number = int(str(label))
    if number == verdict.first.number:
        return True
    return 0 < number <= len(lines) and mine == _words(lines[number - 1])


def _words(text: str) -> str:
    return " ".join(text.split())


def score(directory: Path) -> Totals:
    """Judge every labelled log. Raises OSError or ValueError when the corpus cannot be read."""
    data: Any = json.loads((directory / "labels.json").read_text(encoding="utf-8"))
    entries: list[dict[str, Any]] = data["labels"] if isinstance(data, dict) else data
    catalogue = load()
    totals = Totals()
    for label in entries:
        log = (directory / label["file"]).read_text(encoding="utf-8", errors="replace")
        said = judge(log, catalogue)
        also = label.get("also_layer") or []
        layers = {normal(label.get("layer"))}
        layers |= {normal(each) for each in (also if isinstance(also, list) else [also])}
        bad = nodes(label.get("evict_node"))
        totals.scores.append(
            Score(
                label["file"],
                normal(label.get("layer")),
                normal_blame(label.get("blame")),
                said,
                said.layer in layers,
                said.blame == normal_blame(label.get("blame")),
                same_line(log, label.get("first_cause_line"), said),
                tuple(node for node in said.evict if short(node) not in bad),
                bad,
            )
        )
    return totals


def table(totals: Totals) -> Table:
    shown = Table("layer", "logs", "layer", "blame", "first line", "false evictions")
    groups = Counter(each.layer for each in totals.scores)
    for layer in [*sorted(groups), "all"]:
        part = Totals([each for each in totals.scores if layer in ("all", each.layer)])
        shown.add_row(
            layer,
            str(len(part.scores)),
            *(f"{part.share(x):.0%}" for x in ("layer_right", "blame_right", "first_right")),
            str(len(part.false_evictions)),
        )
    return shown


def wrong(each: Score) -> str:
    """Return what is wrong in one log's diagnosis ("": nothing)."""
    said, parts = each.said, []
    if not each.layer_right:
        parts.append(f"layer {said.layer}, not {each.layer}")
    if not each.blame_right:
        parts.append(f"blame {said.blame}, not {each.blame}")
    if each.first_right is False:
        parts.append(f"line {said.first.number if said.first else 'none'}")
    return f"{each.file}: {'; '.join(parts)} ({said.rule})" if parts else ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.diagnosis", description=__doc__)
    parser.add_argument("corpus", type=Path, metavar="CORPUS_DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the metrics to FILE")
    parser.add_argument("--all", action="store_true", help="print each wrong diagnosis")
    args = parser.parse_args(argv)
    try:
        totals = score(args.corpus)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"bench.diagnosis: {args.corpus}: {error!r}", file=sys.stderr)
        return 2
    console = Console(width=100)
    console.print(table(totals))
    for each in totals.false_evictions:
        print(f"false eviction: {each.file}: {', '.join(each.false_evictions)} ({each.said.rule})")
    bad = [each for each in totals.scores if each.bad]
    named = sum(
        any(short(node) in each.bad for node in (*each.said.evict, *each.said.suspects))
        for each in bad
    )
    print(f"bad nodes named: {named} of {len(bad)}")
    if args.all:
        for text in filter(None, map(wrong, totals.scores)):
            print(text)
    if args.json:
        results = Results("diagnosis", quick=True)
        for metric, name in (("layer", "layer_right"), ("blame", "blame_right"),
                             ("first_cause", "first_right")):  # fmt: skip
            results.metrics[f"diagnosis.{metric}"] = summarise([totals.share(name)], "share")
        results.count("diagnosis.false_evictions", len(totals.false_evictions))
        args.json.write_text(json.dumps(results.as_dict(), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
