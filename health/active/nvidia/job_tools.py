"""NVIDIA's own tools on the nodes of a job: one step, whose tasks print their findings.

``python -m health.active.nvidia.job_tools LEVEL SECONDS DCGM_LEVEL TOOL…`` is a task: dcgmi and
nccl-tests where they are installed, as one line of JSON. torch is not imported: a worker of ours
would hold the GPUs that dcgmi wants to have alone.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from health.active.nvidia import dcgm, gpu_use, nccl_tests, tools
from health.active_tests import Level, Measured, finding, measured
from health.finding import Finding
from robust_slurm import commands
from robust_slurm.slurm.values import fold

TOOLS = ("dcgm", "nccl-tests")
START_S = 30.0  # of the limit: for the step, and for Python on a slow file system
# Seconds that the tools take on eight GPUs, with some to spare.
FULL_S: Mapping[Level, float] = {"quick": 120.0, "standard": 900.0, "long": 5400.0}
_SAID = re.compile(r"^(?:\s*\d+: )?ROBUST-NVIDIA (\{.*\})$", re.MULTILINE)


class ToolResults(NamedTuple):
    """The results of one node. ``ran``: names of tests that it has results of; ``gpus``: how many
    it has."""

    findings: tuple[Finding, ...] = ()
    measured: tuple[Measured, ...] = ()
    left_out: tuple[str, ...] = ()
    ran: frozenset[str] = frozenset()
    gpus: int = 0

    def of_model(self, model: str) -> ToolResults:
        """With the GPUs' kind, which its task does not know, in every measurement of them."""
        rows = (one._replace(model=model) if one.values else one for one in self.measured)
        return self._replace(measured=tuple(rows))


def on_machine(
    wanted: Sequence[str],
    level: Level,
    ends: float,
    node: str,
    *,
    use: tuple[gpu_use.GpuUse, ...],
    gpus: int,
    model: str = "",
    dcgm_level: int | None = None,
) -> ToolResults:
    """Run the tools here until ``ends`` (monotonic) at most; ``gpus``: how many the node has."""
    findings: list[Finding] = []
    rows: list[Measured] = []
    left_out: list[str] = []
    if "nccl-tests" in wanted:
        left = max(0.0, ends - time.monotonic())
        found, why = nccl_tests.run(left, gpus=gpus, level=level, node=node, model=model)
        if not found and not why:
            why = ["nccl-tests: " + ("not installed" if gpus > 1 else "fewer than two GPUs")]
        rows += found
        left_out += why
    if "dcgm" in wanted:
        begun = time.monotonic()
        found_there, why = dcgm.run(level, max(0.0, ends - begun), gpus=use, run_level=dcgm_level)
        findings += found_there
        left_out += why
        if not why:
            rows.append(Measured("dcgm", node, seconds=round(time.monotonic() - begun, 3)))
    return ToolResults(
        tuple(findings), tuple(rows), tuple(left_out), frozenset(one.test for one in rows), gpus
    )


def task(
    level: Level, seconds: float, dcgm_level: int | None, wanted: Sequence[str]
) -> ToolResults:
    """Run the tools on one node of the job: the work of one task of the step."""
    ends = time.monotonic() + seconds
    node, use = os.environ.get("SLURMD_NODENAME", ""), gpu_use.take()
    if not use:
        return ToolResults(left_out=tuple(f"{name}: no NVIDIA GPU" for name in wanted))
    held = gpu_use.busy(use)
    if held:
        text = f"{', '.join(wanted)} not run: {'; '.join(held)}"
        return ToolResults((Finding("ERROR", "tool", "active-error", "", text, "none"),))
    return on_machine(wanted, level, ends, node, use=use, gpus=len(use), dcgm_level=dcgm_level)


def argv(
    python: Sequence[str],
    level: Level,
    seconds: float,
    dcgm_level: int | None,
    wanted: Sequence[str],
) -> list[str]:
    """Return the command of a task; ``python``: the interpreter and its options."""
    words = [level, f"{seconds:.0f}", str(dcgm_level or 0), *wanted]
    return [*python, *commands.words("health.active.nvidia.job_tools"), *words]


def step(
    srun: Sequence[str], env: Mapping[str, str], nodes: Sequence[str], seconds: float
) -> dict[str, ToolResults]:
    """Run the step; return each node's results, an ERROR where its task printed none.

    ``srun``: the whole command. Takes at most ``seconds``; raises nothing.
    """
    try:
        ran = tools.run(srun, seconds, env)
    except OSError as err:
        return {node: _silent(f"{srun[0]}: {err.strerror}") for node in nodes}
    said = read(ran.out)
    last = " ".join((ran.err.strip() or ran.out.strip())[-300:].split())
    why = ran.cut or f"exit code {ran.code}: {last or 'nothing was printed'}"
    return {node: said.get(node) or _silent(f"its task gave no answer: {why}") for node in nodes}


def read(text: str) -> dict[str, ToolResults]:
    """Read what the step printed, by node; lines that are not understood are passed over. Pure."""
    found = {}
    for line in _SAID.findall(text):
        try:
            node, one = _found(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
        found[node] = one
    return found


def _found(data: Any) -> tuple[str, ToolResults]:
    node = str(data["node"])
    rows = tuple(measured(row)._replace(node=node) for row in data["measured"])
    return node, ToolResults(
        tuple(finding(row) for row in data["findings"]),
        rows,
        tuple(str(line)[:300] for line in data["left_out"]),
        frozenset(one.test for one in rows),
        int(data.get("gpus", 0)),
    )


def _silent(why: str) -> ToolResults:
    text = f"NVIDIA's tools could not be run: {why}"
    return ToolResults((Finding("ERROR", "tool", "active-error", "", text[:600], "none"),))


def left_out(found: Mapping[str, ToolResults]) -> tuple[str, ...]:
    """The lines about what was left out, each once, with its nodes unless all share it. Pure."""
    nodes: dict[str, list[str]] = {}
    for node, one in found.items():
        for line in one.left_out:
            nodes.setdefault(line, []).append(node)
    return tuple(
        line if len(where) == len(found) else f"{line} ({fold(where)})"
        for line, where in nodes.items()
    )


def main(words: Sequence[str]) -> int:
    level, seconds, dcgm_level, *wanted = words
    found = task(cast(Level, level), float(seconds), int(dcgm_level) or None, wanted)
    said = {
        "node": os.environ.get("SLURMD_NODENAME", ""),
        "findings": [one.as_dict() for one in found.findings],
        "measured": [one.as_dict() for one in found.measured],
        "left_out": list(found.left_out),
        "gpus": found.gpus,
    }
    print(f"ROBUST-NVIDIA {json.dumps(said)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
