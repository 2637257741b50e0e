"""A plan for readers, imported by its name: its files are those of READ_PLAN, and a record may say
what becomes of the process that decodes it."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

from robust_slurm import data
from robust_slurm.data.plan import Plan

WINDOW = 8


def decode(record: dict[str, Any]) -> dict[str, Any] | None:
    what = record.get("what", "")
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "hang":
        threading.Event().wait()
    if what == "object":
        return {"tokens": [record["n"]], "text": "", "mark": {1: 2}}
    if what == "bad":
        raise ValueError(f"no tokens in {record['n']}")
    if what == "exit":
        raise SystemExit(f"{record['n']} is the last")
    return {"tokens": list(range(record["n"], record["n"] + 3)), "text": "x" * (record["n"] % 5)}


def plan() -> Plan:
    options = json.loads(os.environ.get("READ_PLAN_OPTIONS", "{}"))
    folders = sorted(each for each in Path(os.environ["READ_PLAN"]).iterdir())
    return data.Plan(
        {
            each.name: data.jsonl(f"{each}/*.jsonl", decode, window=WINDOW, lanes=2, **options)
            for each in folders
        },
        batch=4,
        collate=lambda samples: {"n": [each["tokens"][0] for each in samples]},
    )


def write(folder: Path, parts: int, records: int, what: dict[int, str] | None = None) -> None:
    """Write a source's files; ``what``: by the record's number in the source."""
    folder.mkdir(parents=True)
    for part in range(parts):
        lines = [
            {"n": number, "what": (what or {}).get(number, "")}
            for number in range(part * records, (part + 1) * records)
        ]
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
