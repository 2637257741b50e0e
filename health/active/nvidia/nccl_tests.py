"""NVIDIA's nccl-tests on one node's GPUs, where they are installed: run them, read what they print.

Their text output is read, which is the same from 2.9 to 2.19 but for spaces (src/common.cu,
src/util.cu); their JSON (2.17 and later) goes to a file and has the whole environment in it.
Bandwidths are in 1e9 bytes/s and follow their definition (doc/PERFORMANCE.md), as ours do.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from typing import NamedTuple

from health.active.nvidia import tools
from health.active_tests import Level, Measured
from robust_slurm.text import counted

# By program: the prefix of its values' names. Not those of our own test "local": other messages,
# other code, so other baselines.
PROGRAMS = {"all_reduce_perf": "nccl_tests_", "alltoall_perf": "nccl_tests_alltoall_"}
PLACES = ("/opt/nccl-tests/build", "/usr/local/nccl-tests/build", "/opt/nccl-tests/bin")
_SIZES = {"quick": "256M", "standard": "1G", "long": "4G"}
_ITERATIONS = {"quick": 20, "standard": 100, "long": 1000}
_LEAST_S = 5.0  # NCCL needs some seconds to start on eight GPUs
_MIN_BW = "NCCL_TESTS_MIN_BW"  # a limit of the user's own: it would turn into the exit code

_WRONG = re.compile(r"^#\s*Out of bounds values\s*:\s*(\d+)\s+(\w+)", re.MULTILINE)
_AVERAGE = re.compile(r"^#\s*Avg bus bandwidth\s*:\s*(\S+)", re.MULTILINE)
# A line of text that tells of a failure, best first: NCCL's own, CUDA's, the program's.
_SAID = (
    re.compile(r"Test (NCCL|CUDA) failure.*"),
    re.compile(r"NCCL WARN.*"),
    re.compile(r"Test timeout.*|Invalid number of GPUs.*|error while loading.*|.*: Test failure.*"),
)


class NcclRow(NamedTuple):
    """One line of results. Bandwidths of both ways that there are: out of place, in place."""

    size: int  # bytes
    algbw: tuple[float, ...]
    busbw: tuple[float, ...]
    wrong: int


def run(
    limit_s: float,
    *,
    gpus: int,
    level: Level = "quick",
    node: str = "",
    model: str = "",
    directories: Sequence[str] = (),
) -> tuple[list[Measured], list[str]]:
    """One Measured for each program that is installed, all over within ``limit_s``; and a line
    for each for which no time was left.

    ``gpus``: how many the node has; with fewer than two there is nothing to measure.
    """
    found = [(name, tools.find(name, (*directories, *PLACES))) for name in PROGRAMS]
    found = [(name, path) for name, path in found if path] if gpus > 1 else []
    env = {key: value for key, value in os.environ.items() if key != _MIN_BW}
    deadline = time.monotonic() + limit_s
    out: list[Measured] = []
    left_out: list[str] = []
    for number, (name, path) in enumerate(found):
        share_s = (deadline - time.monotonic()) / (len(found) - number)
        empty = Measured("local", node, model=model)
        if share_s < _LEAST_S:
            left_s = max(0.0, share_s)
            left_out.append(f"nccl-tests {name}: {left_s:.0f} s left, it needs {_LEAST_S:.0f}")
            continue
        began = time.monotonic()
        try:
            ran = tools.run(_command(path, gpus, level), share_s, env)
        except OSError as err:
            out.append(empty._replace(error=f"{path}: {err.strerror}"))
            continue
        one = read(name, ran.out, ran.err, ran.code, ran.cut)
        took = round(time.monotonic() - began, 3)
        out.append(one._replace(node=node, model=model, seconds=took))
    return out, left_out


def _command(path: str, gpus: int, level: Level) -> list[str]:
    """One size: its average is then that of the two ways, and every GPU is in one process."""
    size, iterations = _SIZES[level], str(_ITERATIONS[level])
    return [path, "-g", str(gpus), "-b", size, "-e", size, "-w", "5", "-n", iterations, "-c", "1"]


def read(name: str, out: str, err: str = "", code: int | None = 0, cut: str = "") -> Measured:
    """Read a program's output. Wrong values are proof, whatever happened after."""
    prefix = PROGRAMS[name]
    lines = rows(out)
    total, average = _WRONG.search(out), _AVERAGE.search(out)
    wrong = [
        f"nccl-tests {name}: {row.wrong} wrong values at {row.size} bytes (#wrong)"
        for row in lines
        if row.wrong
    ]
    if not wrong and total and (int(total[1]) or total[2] == "FAILED"):
        wrong.append(f"nccl-tests {name}: {counted(int(total[1]), 'value')} out of bounds")
    values = {}
    if lines:
        row = max(lines, key=lambda line: (line.size, max(line.busbw)))
        values = {f"{prefix}algbw_gbps": max(row.algbw), f"{prefix}busbw_gbps": max(row.busbw)}
    error = ""
    if not wrong and (cut or code != 0 or not values or average is None):
        reason = cut or _reason(out, err) or f"exit code {code}, no results"
        error = f"nccl-tests {name}: {reason}"
        values = {}
    return Measured("local", "", values=values, wrong=tuple(wrong[:8]), error=error)


def rows(out: str) -> list[NcclRow]:
    """The table's lines, by the names in its head; the columns of measurements end each line."""
    names: list[str] = []
    found = []
    for line in out.splitlines():
        words = line.lstrip("# ").split()
        if line.startswith("#") and "size" in words and "busbw" in words:
            first = next((i for i, w in enumerate(words) if w in ("time", "cputime")), None)
            names = [] if first is None else words[first:]
        elif names and not line.startswith("#") and len(words) > len(names):
            row = _row(words[0], _columns(names, words[-len(names) :]))
            found += [row] if row else []
    return found


def _columns(names: Sequence[str], words: Sequence[str]) -> dict[str, list[str]]:
    """Each name's words, in order: a table names its columns twice."""
    out: dict[str, list[str]] = {}
    for name, word in zip(names, words, strict=True):
        out.setdefault(name, []).append(word)
    return out


def _row(size: str, columns: dict[str, list[str]]) -> NcclRow | None:
    """None: not a line of results (NCCL's own words are between them)."""
    try:
        algbw = tuple(float(word) for word in columns["algbw"])
        busbw = tuple(float(word) for word in columns["busbw"])
        checked = [float(word) for word in columns.get("#wrong", []) if word != "N/A"]
        return NcclRow(int(size), algbw, busbw, int(sum(checked)))
    except (KeyError, ValueError, OverflowError):
        return None


def _reason(out: str, err: str) -> str:
    text = f"{out}\n{err}"
    for pattern in _SAID:
        if match := pattern.search(text):
            return " ".join(match[0].split())[:200]
    last = [line for line in err.splitlines() if line.strip()][-1:]
    return " ".join(" ".join(last).split())[:200]
