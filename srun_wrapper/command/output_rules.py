"""srun's output rules, for ranks that do not run in the task slot of their number.

Read in Slurm's source (22.05 and 26.05): src/srun/fname.c and src/slurmd/common/fname.c for file
patterns, src/common/write_labelled_message.c and src/slurmd/slurmstepd/io.c for labels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NO_ARRAY = "4294967294"  # what srun prints for %a outside a job array (NO_VAL)
_WILDCARD = re.compile(r"%(?:(%)|(\d*)([AabJjNnrstux]))")
_TASK_WILDCARD = frozenset("tnN")
_MAX_PAD = 10
PIECE = 1024  # bytes: srun transports at most this much of a line at once


@dataclass(frozen=True, slots=True)
class PatternContext:
    """Values for the wildcards of a file pattern; ``rank`` and ``node`` are the virtual ones.

    Ids are decimal text as in the environment; ``array_*`` empty outside a job array.
    """

    job_id: str
    step_id: str
    rank: int
    node: str
    node_index: int
    user: str = ""
    job_name: str = ""
    array_job_id: str = ""
    array_task_id: str = ""
    restart_count: str = "0"


def needs_task(pattern: str) -> bool:
    """True if the pattern names another file for each task or node (%t, %n, %N)."""
    if "\\" in pattern:
        return False
    return any(found[3] in _TASK_WILDCARD for found in _WILDCARD.finditer(pattern))


def expand(pattern: str, context: PatternContext) -> str:
    """File name for a pattern.

    ``%4t`` pads with zeros (at most 10 digits; names are never padded), ``%%`` is ``%``, unknown
    wildcards stay as they are. One backslash anywhere turns all expansion off, and all
    backslashes are removed.
    """
    if "\\" in pattern:
        return pattern.replace("\\", "")

    def value(found: re.Match[str]) -> str:
        if found[1]:
            return "%"
        width = min(int(found[2] or 0), _MAX_PAD)
        return _wildcard(found[3], width, context)

    return _WILDCARD.sub(value, pattern)


def _wildcard(letter: str, width: int, context: PatternContext) -> str:
    match letter:
        case "N":
            return context.node
        case "u":
            return context.user
        case "x":
            return context.job_name
        case "J":
            return f"{context.job_id.zfill(width)}.{context.step_id}"
        case "A":
            number = context.array_job_id or context.job_id
        case "a":
            number = context.array_task_id or _NO_ARRAY
        case "b":
            number = (context.array_task_id or _NO_ARRAY)[-1:]
        case "j":
            number = context.job_id
        case "r":
            number = context.restart_count
        case "s":
            number = context.step_id
        case "n":
            number = str(context.node_index)
        case _:
            number = str(context.rank)
    return number.zfill(width)


Mode = int | str | None
"""The one task that has the stream, or a pattern of files; None: all tasks have it, or none."""


def parse_mode(value: str | None) -> Mode:
    """Parse an ``--output``/``--error``/``--input`` value as srun does.

    Like srun, whatever starts with "all" (any case) or "-" means all tasks: ``--output=all.log``
    makes no file. A number is a task's; ``numbered_files`` has those that are file names.
    """
    if value is None or value[:3].lower() == "all" or value[:1] == "-" or value.lower() == "none":
        return None
    return int(value) if re.fullmatch(r"\d+", value, re.ASCII) else value


def label_width(ntasks: int) -> int:
    """Digits of srun's label: those of the highest task number."""
    return len(str(max(ntasks - 1, 0)))


class Labeler:
    """Puts "RANK: " before each line of one rank's stream, as ``srun --label`` does.

    Call it with bytes as they come and once with b"" at the end; it returns the bytes to write.
    A partial line waits for its newline; at the end of the stream it gets one. A line longer
    than 1,024 bytes is cut into labelled lines of that size, as srun's transport does.
    ``unbuffered`` (``srun -u``): nothing waits, each call's partial line ends in a newline.
    """

    def __init__(self, width: int, rank: int, *, unbuffered: bool = False) -> None:
        self._prefix = b"%*d: " % (width, rank)
        self._unbuffered = unbuffered
        self._rest = b""

    def __call__(self, data: bytes) -> bytes:
        buffer = self._rest + data
        flush = self._unbuffered or not data
        out: list[bytes] = []
        at = 0
        while at < len(buffer):
            end = buffer.find(b"\n", at, at + PIECE) + 1
            if end:
                out += (self._prefix, buffer[at:end])
            elif len(buffer) - at >= PIECE or flush:
                end = min(at + PIECE, len(buffer))
                out += (self._prefix, buffer[at:end], b"\n")
            else:
                break
            at = end
        self._rest = buffer[at:]
        return b"".join(out)
