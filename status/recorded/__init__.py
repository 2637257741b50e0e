"""A sample cluster in files, for ``robust-status --demo``: no Slurm and no record is needed.

``state.jsonl`` holds the records that robust-srun and the node gate would have written,
``slurm.json`` the answers of Slurm. All times are shifted to the present. Nodes, users and errors
are made up; the records have the real format and are read by the same code as real ones.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from robust_slurm.slurm import Completed, Slurm

_HERE = Path(__file__).parent
_TIMES = (1.79e9, 1.81e9)  # all numbers between are times of the recording
_TIME_IN_TEXT = re.compile(r"@(1[78]\d{8})\b")


def write(directory: Path, now: float | None = None) -> Slurm:
    """Write the records below ``directory`` and return a Slurm that answers as recorded."""
    answers = json.loads((_HERE / "slurm.json").read_text(encoding="utf-8"))
    by = (time.time() if now is None else now) - answers["now"]
    for line in (_HERE / "state.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        path = directory / record["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        content = shifted(record.get("line", record.get("content")), by)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(content, separators=(",", ":")) + "\n")
    (directory / "jobs").chmod(0o700)
    return Slurm(_RecordedAnswers(shifted(answers, by)), environ={})


def shifted(value: Any, by: float) -> Any:
    """The value with all times in it moved by ``by`` seconds. Pure."""
    if isinstance(value, dict):
        return {key: shifted(one, by) for key, one in value.items()}
    if isinstance(value, list):
        return [shifted(one, by) for one in value]
    if isinstance(value, str):
        return _TIME_IN_TEXT.sub(lambda found: f"@{int(int(found[1]) + by)}", value)
    if isinstance(value, (int, float)) and _TIMES[0] < value < _TIMES[1]:
        return value + by
    return value


class _RecordedAnswers:
    """Runs no command: answers those that robust-status uses."""

    def __init__(self, recorded: Mapping[str, Any]) -> None:
        self._recorded = recorded

    def __call__(
        self,
        argv: Sequence[str],
        deadline_s: float,
        input: str | None,
        env: Mapping[str, str],
        cwd: Path | None,
    ) -> Completed:
        words = " ".join(argv)
        jobs, now = self._recorded["jobs"], self._recorded["now"]
        if argv[0] == "squeue":
            columns = argv[-1]
            lines = [self._job(job, columns) for job in jobs]
            return Completed(0, "\n".join(lines) + "\n", "")
        if argv[0] == "sacct":
            rows = self._recorded["sacct"]
            ends = ["Unknown" if end is None else str(int(end)) for _, _, end in rows]
            told = [f"{r[0]}|{int(r[1])}|{end}" for r, end in zip(rows, ends, strict=True)]
            return Completed(0, "\n".join(told) + "\n", "")
        for word, key in (("ping", "ping"), ("partition", "partitions"), ("node", "nodes")):
            if word in words:
                return Completed(0, self._recorded[key], "")
        return Completed(1, "", f"not recorded ({now:.0f}): {words}")

    def _job(self, job: Mapping[str, Any], columns: str) -> str:
        keys = {"%A": "id", "%T": "state", "%U": "uid", "%P": "partition", "%u": "user"}
        keys["%N"] = "nodes"
        told = [str(job[keys[column]]) for column in columns.split("|")]
        # Whoever runs the demonstration owns the records, so Slurm must name no owner.
        return "" if "%U" in columns else "|".join(told)
