"""Compare the runs of a loop: the outcome, and the objects that differ."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import Any

from bench.checkpoint.loops.case import Loop

RUN_DEADLINE = 240  # s; a loop takes well under one, or a few where it is large
NAMES = {
    "model": r"\bmodel\.",
    "optimizer": r"\boptimizer\.",
    "scheduler": r"\bextra\.scheduler\d|a learning-rate scheduler steps with it",
    "ema": r"\bextra\.ema\b",
    "scaler": r"\bextra\.scaler\b",
    "generator": r"\bextra\.generator\b",
    "tokens": r"\bextra\.tokens\b",
    "rng": r"\brng\b",
    "gradients": r"\bthe gradients of ",
}
"""Name of each object in a warning."""
GRADIENTS_OF = re.compile(r"(?<=the gradients of )[^:]*")  # it names parameters, and not their data
LATE_NAME = "gradients"
"""With save() before the optimizer's step, all that the script does from that step on comes after
it: the warning names the gradients that the step has yet to use."""
TOLD = "nothing can warn of changes to them that come after save()"
"""Part of the warning that the optimizer's steps are not seen: it names no object."""
OUTCOMES = ("identical", "refused", "silent", "failed")
REFUSALS = re.compile(r"CheckpointError: |TypeError: (model|optimizer|loader|extra|rng)[\w.~]*: ")
"""Errors that refuse to go on: a TypeError only where it names the object."""
INTERNAL = re.compile(
    r"\b(Assertion|Attribute|Index|Key|Name|Recursion|UnboundLocal|ZeroDivision)Error\b"
)
"""Errors of our own, also as the reason of a refusal."""
CAUGHT = re.compile(r"^robust-slurm:.*?: (?P<error>[\w.]+(Error|Exception|Expired)\b.*)")
"""An error that a Checkpointer has caught, so that the training goes on."""
ENDED = re.compile(
    r"^robust-slurm:.*(: nothing is saved: |\bis NOT saved\b|\bhangs\b|the Checkpointer is closed)"
    r"|^Exception in thread (robust|ckpt)-"
)
"""A Checkpointer, or a thread of it, that has switched itself off."""
MOST_LOST = 4
"""Steps from the resume to the crash. The last may not be complete, and writes may have torn
others; 200 loops lost at most 2."""


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome of a loop."""

    loop: Loop
    outcome: str
    """One of OUTCOMES."""
    resumed: int
    """Step that the second run began with."""
    warnings: tuple[str, ...]
    unnamed: tuple[str, ...] = ()
    """Objects that differ and that no warning names; empty too where none was found to differ."""
    by: str = ""
    """The kind of refusal: ``error`` or ``warning``."""
    why: str = ""
    """The end of a run that failed."""

    @property
    def needless(self) -> bool:
        """True if it was warned of something though nothing differed."""
        return self.outcome == "identical" and bool(self.warnings)


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One run of a loop, and its end."""

    code: int
    """Exit code, or minus the signal."""
    result: dict[str, Any] | None
    """The state that it left; ``refusal`` alone if it could not begin."""
    said: str
    """The text that it wrote to stderr."""

    @property
    def refusal(self) -> str:
        """The error that a Checkpointer refused with, "" if it did not or named nothing."""
        text = "" if self.code else str((self.result or {}).get("refusal", ""))
        return text if _refuses(text) else ""

    @property
    def done(self) -> bool:
        """True if it came to its end."""
        return self.code == 0 and self.result is not None and "refusal" not in self.result

    @property
    def slip(self) -> str:
        """The line of a failure of our own that ended nothing, "" if there was none."""
        return next(filter(_slips, self.said.splitlines()), "")

    @property
    def end(self) -> str:
        """A sentence for people on how the run ended."""
        if self.slip:
            return self.slip
        if self.code == -signal.SIGALRM:
            return f"it hung for {RUN_DEADLINE} s: {self.said[-2000:]}"
        refusal = (self.result or {}).get("refusal", "")
        return f"it ended with {self.code}: {refusal or self.said[-2000:]}"


def judge(
    loop: Loop, reference: dict[str, Any], crashed: TrainingRun, again: TrainingRun | None
) -> Found:
    """``again``: the run that resumed; None if there was none, as the one that was to crash had
    ended before."""
    before = _names(crashed.said)
    names = before | _names(again.said if again else "")
    warnings = tuple(line for line, those in names.items() if those)
    warned, named = set().union(*before.values()), set().union(*names.values())
    if crashed.slip:
        return _failed(loop, warnings, f"before its crash, {crashed.end}")
    if again is not None and again.slip:
        return _failed(loop, warnings, f"resumed, {again.end}")
    if (again or crashed).refusal:
        return Found(loop, "refused", -1, warnings, by="error")
    if again is None:
        return _failed(loop, warnings, f"before its crash, {crashed.end}")
    if not again.done:
        return _failed(loop, warnings, f"resumed, {again.end}")
    assert again.result is not None
    resumed = again.result
    began, step = int(resumed["began"]), str(resumed["step"])
    saved_once = step == "0" or step in reference["saved"]
    if not saved_once or not 0 <= loop.crash_step - began <= MOST_LOST:
        return _failed(loop, warnings, f"killed in step {loop.crash_step}, it resumed at {began}")
    if resumed["state"] == reference["state"]:
        return Found(loop, "identical", began, warnings)
    ended = reference["ended"][step]
    saved = reference["saved"].get(step, ended)  # step 0 was never saved
    lost, late = _differing(saved, resumed["resumed"]), _differing(saved, ended)
    if loop.save_at == "early" and LATE_NAME in named:
        named |= late - lost
    unnamed = tuple(sorted((lost - warned) | (late - named)))
    outcome = "refused" if lost | late and not unnamed else "silent"
    by = "warning" if outcome == "refused" else ""
    return Found(loop, outcome, began, warnings, unnamed, by)


def _failed(loop: Loop, warnings: tuple[str, ...], why: str) -> Found:
    return Found(loop, "failed", -1, warnings, why=why)


def _refuses(error: str) -> bool:
    return bool(REFUSALS.match(error)) and not INTERNAL.search(error)


def _slips(line: str) -> bool:
    caught = CAUGHT.match(line)
    return bool(ENDED.search(line)) or (caught is not None and not _refuses(caught["error"]))


def _names(said: str) -> dict[str, set[str]]:
    """The Checkpointer's lines, with the objects that each names."""
    lines = (line for line in said.splitlines() if line.startswith("robust-slurm:"))
    return {
        line: {n for n, how in NAMES.items() if re.search(how, GRADIENTS_OF.sub("", line))}
        for line in lines
    }


def _differing(one: dict[str, int], other: dict[str, int]) -> set[str]:
    return {name for name in one if one[name] != other[name]}
