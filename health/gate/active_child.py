"""The active tests as the gate runs them: in the site's interpreter, within a time limit.

They fill the GPUs' memory, so they run only on a node without jobs, one run at a time. With
[active] python set, a prolog that starts meanwhile ends them before its checks
(``health/node_claim.py``).
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from health.gate.active_answer import (
    KIND,
    ActiveAnswer,
    answer,
    applying,
    argv,
    broken,
    lately_broken,
    passed_since,
)
from health.node.probe import run
from health.node_claim import GIVE_WAY_S, claim, error_text, noted

if TYPE_CHECKING:
    from health.finding import Finding
    from health.gate.gate import Gate
    from health.node.system import Event

_LEAST_S = 10.0  # with less time the interpreter is not started
_START_S = 4.0  # of the time: to start it, and to end tests that overrun
TRUST_S = 10.0  # to look at all files of its environment, on a slow file system


def followed_up(
    gate: Gate, why: str, free: bool, until: float
) -> tuple[list[Finding], list[Event]]:
    """Test a node that ``why`` speaks against ("": nothing does): findings, and what to record.

    ``free``: no job has a step here; ``until``: monotonic seconds. What an epilog cannot bring
    to its end is owed to the sweep.
    """
    level = str(gate.settings.active["accused"])
    if not why or level == "never" or not enabled(gate):
        return [], []
    found = test(gate, level, free, until)
    if found.result == "broken" and gate.where == "epilog":
        found = found._replace(result="owed")
    return list(found.findings), [gate.event(KIND, **found.event_data(level, why))]


def before_undrain(
    gate: Gate, drained: float, events: Iterable[Event], free: bool, until: float
) -> tuple[ActiveAnswer | None, list[Event]]:
    """Run the tests that this node must pass before an undrain; return answer and events to record.

    None: none are wanted, or it has passed each one since ``drained`` (wall clock), which may
    take several sweeps.
    """
    known = list(events)
    level = str(gate.settings.active["undrain"])
    if level == "never" or gate.dry_run:
        return None, []
    wanted = applying(bool(gate.system.nvml().get("devices")))
    missing = wanted - passed_since(known, level, drained)
    if not missing:
        return None, []
    if not enabled(gate):
        return broken("[active] undrain is set and [active] python is not"), []
    lately = lately_broken(known, drained, time.time())
    if lately:
        return ActiveAnswer("owed", (), lately), []
    found = test(gate, level, free, until, sorted(missing) if missing < wanted else ())
    left = ", ".join(sorted(missing.difference(found.ran)))
    if left and missing.intersection(found.ran) and found.result in ("passed", "broken"):
        found = found._replace(result="partly", told=f"{left} still to be run; {found.told}")
    elif left and found.result == "passed":
        found = broken(f"{left} could not be run; {found.told}")
    kept = (
        [] if found.result == "owed" else [gate.event(KIND, **found.event_data(level, "undrain"))]
    )
    return found, kept


def enabled(gate: Gate) -> bool:
    return bool(gate.settings.active["python"]) and not gate.dry_run


def test(
    gate: Gate, level: str, free: bool, until: float, tests: Sequence[str] = ()
) -> ActiveAnswer:
    """Run the tests of a level here, or some. Never raises for what the tests or a disk do."""
    until = min(until, time.monotonic() + float(gate.settings.active["deadline"]))
    if not free:
        return ActiveAnswer("owed", (), "skipped: a job is on this node")
    python = str(gate.settings.active["python"])
    wrong = distrusted(python, until - time.monotonic())
    if wrong:
        return broken(f"[active] python = {python!r} is not used: {wrong}")
    try:
        held = claim(gate.spool)
    except BlockingIOError as error:
        why = (
            error.strerror
            if error.errno == errno.EBUSY
            else "another test run is active on the node"
        )
        return ActiveAnswer("owed", (), f"skipped: {why}")
    except OSError as error:
        return broken(f"the node cannot be claimed for a test: {error_text(error)}")
    try:
        from health.children.orphans import adopted

        # Ask Slurm while the claim is held: the answer shows a job that already has the node, and
        # the prolog of a later job finds the claim.
        why = _given_away(gate)
        seconds = until - time.monotonic()
        if why or seconds < _LEAST_S:
            return ActiveAnswer("owed", (), f"skipped: {why or f'{seconds:.0f} s left'}")
        config = os.environ.get("ROBUST_SITE_CONFIG", "")
        config = config if os.path.isfile(config) else ""  # noqa: PTH113
        node = gate.system.context.node
        words = argv(python, level, node, seconds - _START_S, tests, config)
        with adopted(GIVE_WAY_S / 2):
            output = run(words, seconds, noted(held))
        os.ftruncate(held, 0)  # it has ended: no prolog need look for it
        return answer(output)
    except OSError as error:
        return broken(f"{python}: {error.strerror or error}")
    finally:
        os.close(held)


def distrusted(python: str, seconds: float) -> str:
    """The reason why others than root can change what the interpreter runs; "" if none can.
    Never raises."""
    from health.children.call import call_in_child
    from health.node.trust import interpreter

    return call_in_child(lambda: interpreter(python), min(TRUST_S, max(0.1, seconds)))[1]


def _given_away(gate: Gate) -> str:
    """The reason not to test if a job has the node, or Slurm does not say; "" if none has it."""
    from health.gate.act import open_door
    from robust_slurm.slurm import SlurmError

    node = gate.system.context.node
    deadline_s = gate.left(float(gate.settings.gate["scontrol_deadline"]))
    try:
        found = open_door(gate.settings)(deadline_s).nodes([node]).get(node)
    except SlurmError as error:
        return f"Slurm did not report whether a job has the node: {error.message}"
    taken = found.state & {"ALLOCATED", "MIXED"} if found else {"unknown to Slurm"}
    return f"the node is {'+'.join(sorted(taken))}" if taken else ""
