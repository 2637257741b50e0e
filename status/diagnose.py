"""``robust-status --diagnose LOG…``: the first cause in a failed job's logs, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from robust_slurm.state_dir.records import clean
from robust_slurm.text import counted
from srun_wrapper.signatures.catalogue import Catalogue
from srun_wrapper.signatures.lines import LogLine
from srun_wrapper.signatures.verdict import LogVerdict, judge

WIDTH = 200  # characters shown of a log's line
BLAMES = {
    "node": "the node",
    "user": "the program, its settings or its data",
    "transient": "no one: a passing fault",
    "external": "something outside the job and its nodes",
    "unknown": "unknown",
}


@dataclass(frozen=True, slots=True)
class Logs:
    """The logs of one job, judged as one text."""

    names: tuple[str, ...]
    texts: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join(self.texts)

    def place(self, line: LogLine) -> str:
        """Return FILE:LINE of a line of the joined text."""
        number = line.number
        for name, text in zip(self.names, self.texts, strict=True):
            lines = text.count("\n") + 1
            if number <= lines:
                return f"{name}:{number}"
            number -= lines
        raise ValueError(f"line {line.number} is in no log")


def read_logs(paths: Sequence[Path]) -> Logs:
    """Read the logs. Raises OSError."""
    texts = tuple(path.read_text(encoding="utf-8", errors="replace") for path in paths)
    return Logs(tuple(map(str, paths)), texts)


def diagnose(logs: Logs, catalogue: Catalogue) -> tuple[LogVerdict, list[str]]:
    """Return the verdict and the lines that show it."""
    verdict = judge(logs.text, catalogue)
    shown = [f"cause:    {verdict.cause}"]
    shown.append(f"layer:    {verdict.layer}   (rule: {verdict.rule})")
    shown.append(f"blame:    {BLAMES[verdict.blame]}")
    if verdict.evict:
        shown.append(f"evict:    {', '.join(map(clean, verdict.evict))}")
    elif verdict.suspects:
        names = ", ".join(map(clean, verdict.suspects))
        shown.append(f"evict:    none; test {names} first")
    else:
        shown.append("evict:    none")
    shown.append(f"advice:   {verdict.advice}")
    if verdict.evidence:
        shown.append("evidence:")
    for line in verdict.evidence:
        mark = ">" if verdict.first and line.number == verdict.first.number else " "
        shown.append(f" {mark} {logs.place(line)}: {clean(line.text.strip())[:WIDTH]}")
    if verdict.followers:
        lines = counted(verdict.followers, "line that only follows", "lines that only follow")
        shown.append(f"   and {lines} from it")
    return verdict, shown


def as_json(logs: Logs, verdict: LogVerdict) -> dict[str, object]:
    return {
        "cause": verdict.cause,
        "layer": verdict.layer,
        "blame": verdict.blame,
        "rule": verdict.rule,
        "advice": verdict.advice,
        "first": logs.place(verdict.first) if verdict.first else None,
        "evict": verdict.evict,
        "suspects": verdict.suspects,
        "evidence": [{"at": logs.place(x), "text": x.text.strip()} for x in verdict.evidence],
    }
