"""One observation that something is wrong, as the watches report it, and how a rank ended."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import Literal

from robust_slurm.text import signal_name

Symptom = Literal["crash", "node_lost", "hang", "stuck", "nan", "sdc", "slow", "update", "grow"]

EXCEPTION = re.compile(r"^(\[rank\d+\]:?\s*)?[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b")
WARNING = re.compile(r"(\[rank\d+\]:?\s*)?\[[WI]\d{3,4} ")  # torch's warnings: no cause of an end


OF_THIS_JOB = "belongs to this job"  # a node's fact about a process that a rank's output names


@dataclass(frozen=True, slots=True)
class Failure:
    """One observation that something is wrong. Times are monotonic seconds."""

    symptom: Symptom
    at: float  # when the supervisor saw it
    last_good: float  # the last proof of health before it
    node: str
    rank: int | None = None
    code: int | None = None
    signal: int | None = None
    tail: str = ""  # the end of a rank's stderr
    launched: bool = True
    evidence: tuple[str, ...] = ()
    suspects: tuple[str, ...] = ()
    step: int | None = None  # step of a NaN or a spoilt state, by the training's own number
    again: bool = False  # a spoilt state: this node had one before, with other ranks
    shared: bool = False  # the node is lost, by a cause that it shares with others
    mismatch: bool = False  # of a hang: flight recorders show that the ranks' collectives differ
    facts: tuple[str, ...] = ()  # lines that the node has recorded about a rank's end


def last_error(tail: str) -> str:
    """The line that names the error: the last exception line of a traceback, else the last line."""
    lines = [line.rstrip() for line in tail.splitlines() if line.strip()]
    lines = [line for line in lines if not WARNING.match(line)]
    for line in reversed(lines):
        if EXCEPTION.match(line):
            return line
    return lines[-1].strip() if lines else ""


def killed_by(failure: Failure) -> int | None:
    """The signal that ended the program; a shell around it turns signal N into exit code 128+N."""
    if failure.signal:
        return failure.signal
    code = failure.code or 0
    return code - 128 if code > 128 and code - 128 in set(signal.Signals) else None


def how_ended(failure: Failure) -> str:
    """Describe the end of a rank: its signal or its exit code."""
    if failure.signal:
        return f"killed by {signal_name(failure.signal)}"
    killer = killed_by(failure)
    return f"exit code {failure.code}" + (f" ({signal_name(killer)})" if killer else "")
