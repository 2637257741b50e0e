"""The gate's drain in many processes at once: ``python -m bench.scale.drains``.

With four words, LETTER COUNT TOML REASON, as root where Slurm answers. COUNT processes wait until
all are there. Then each drains a node of its own (LETTER1, LETTER2 …) as the gate of that node does
when it is closed: the question to Slurm, the fleet's ledger, the circuit breaker, the order. Prints
one JSON object a node. What a gate imports for it is imported before: here all share a few cores.
With a fifth word the gate's own limits of time hold, those of a prolog.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import robust_slurm.slurm.door  # noqa: F401 - see above
from health.checks import ALL
from health.gate import act
from health.gate.act import Drainer, DrainOutcome
from health.gate.gate import budget
from health.run.live import LiveSystem, context
from health.settings import load

# A gate has a node to itself; here a hundred share a few cores, and none is to give up for that.
PATIENCE_S = 200.0
LEDGER_S = 60.0


def drain(node: str, toml: str, reason: str, patient: bool) -> dict[str, Any]:
    """Drain one node; return the result."""
    settings = load(toml, node, ALL)
    system = LiveSystem(settings, context("sweep", {}, node))
    if patient:
        act.LEDGER_S = LEDGER_S
    began = time.monotonic()
    until = began + (PATIENCE_S if patient else budget(settings, "prolog"))
    outcome = Drainer(settings, system, until).drain(reason)
    return {"node": node, "seconds": time.monotonic() - began, **told(outcome)}


def told(outcome: DrainOutcome) -> dict[str, Any]:
    """Return what the benchmark needs of an outcome."""
    how = "drained" if outcome.drained else "bound" if outcome.bound else "failed"
    return {"how": how, "error": outcome.error or outcome.kept, "note": outcome.note}


def main(letter: str, count: int, toml: str, reason: str, *own_times: str) -> int:
    gate_r, gate_w = os.pipe()
    children = []
    for number in range(1, count + 1):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(gate_w)
                os.read(gate_r, 1)  # ends when the last one is there
                found = drain(f"{letter}{number}", toml, reason, not own_times)
                os.write(write_end, json.dumps(found).encode())
                os._exit(0)
            finally:
                os._exit(1)
        os.close(write_end)
        children.append((pid, read_end))
    os.close(gate_w)
    code = 0
    for pid, read_end in children:
        with os.fdopen(read_end, "rb") as pipe:
            print(pipe.read().decode())
        code = max(code, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
