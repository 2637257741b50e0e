"""The rules for ends of ranks: which one decides, whom it blames, and the lines that it shows."""

from __future__ import annotations

from itertools import permutations

import pytest

from srun_wrapper.decide.diagnose import RULES, diagnose
from srun_wrapper.decide.failure import Failure
from srun_wrapper.decide.ladder import Budget, suspect_nodes

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
OFF = "NVRM: Xid (PCI:0000:17:00): 79, pid=1, GPU has fallen off the bus."
GRAPHICS = "NVRM: Xid (PCI:0000:17:00): 13, pid=1, Graphics SM Warp Exception: Out Of Range Address"
CLOSED = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.3]"
ILLEGAL = (
    "Traceback (most recent call last):\n"
    '  File "train.py", line 40, in <module>\n'
    "    loss.backward()\n"
    "RuntimeError: CUDA error: an illegal memory access was encountered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call.\n"
)
LINK = "NVRM: Xid (PCI:0000:17:00): 74, pid=1, NVLink: fatal error detected on link 3"
PREEMPTED = "train: received preemption signal from the scheduler"
WORK = (
    "[rank{0}]:[E1124 10:31:40.1 ProcessGroupNCCL.cpp:629] [Rank {0}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=81, OpType=ALLREDUCE, NumelIn={1}, NumelOut={1}, "
    "Timeout(ms)=600000) ran for 600010 milliseconds before timing out."
)


def end(
    tail: str, rank: int = 0, at: float = 10.0, signum: int | None = None, code: int = 1
) -> Failure:
    """The end of a rank; two ranks a node."""
    node = f"n{rank // 2 + 1}"
    return Failure("crash", at, at - 0.1, node, rank, None if signum else code, signum, tail)


@pytest.mark.parametrize(
    ("failures", "rule", "cause", "suspects"),
    [
        ([end(OFF)], "machine-error", "node", ("n1",)),
        ([end(OFF, 0, 9.0), *(end(CLOSED, r, 8.0) for r in (1, 2, 3))], "machine-error", "node",
         ("n1",)),
        ([end(OFF, 2, 10.3), end("ValueError: x", 0, 10.0)], "machine-error", "node", ("n2",)),
        ([end(OFF, 0), end(ECC, 2)], "shared-error", "shared", ()),  # another error, same layer
        ([end(OFF, 0), end(OFF, 1)], "machine-error", "node", ("n1",)),
        ([end(GRAPHICS)], "program-error", "user", ()),
        ([end(ILLEGAL)], "program-error", "user", ()),
        ([end(f"{GRAPHICS}\n{ILLEGAL}", signum=6)], "program-error", "user", ()),
        ([end(ILLEGAL, 0), end(ILLEGAL, 2)], "program-error", "user", ()),
        ([end(LINK)], "points-to-node", "unknown", ()),
        ([end(LINK, 0), end(PREEMPTED, 2, 10.4)], "preempted", "shared", ()),
        ([end(OFF, 0), end(PREEMPTED, 2, 10.4)], "preempted", "shared", ()),
        ([end(WORK.format(r, 5 if r == 2 else 9), r, signum=6) for r in range(4)],
         "different-collectives", "user", ()),
        ([end(WORK.format(r, 9), r, signum=6) for r in range(4)], "follows", "transient", ()),
        ([end(WORK.format(r, r or 9), r, signum=6) for r in range(3)] + [end(ECC, 3)],
         "machine-error", "node", ("n2",)),
        ([end(CLOSED, 0), end("", 3, 10.2, signum=9)], "signal", "unknown", ()),
        ([end("", code=3)], "exit-code", "user", ()),
        ([end("Memory cgroup out of memory: Killed process 7 (python)")], "program-error", "user",
         ()),
        ([end("OSError: [Errno 122] Disk quota exceeded")], "program-error", "user", ()),
        ([end("OSError: [Errno 116] Stale file handle")], "points-to-node", "unknown", ()),
    ],
)  # fmt: skip
def test_the_rule_that_decides(
    failures: list[Failure], rule: str, cause: str, suspects: tuple[str, ...]
) -> None:
    for order in list(permutations(failures))[:24]:
        found = diagnose(order, 4)
        assert (found.rule, found.cause, found.suspects) == (rule, cause, suspects)
        assert found.rule in [each.id for each in RULES]
        assert found.root in failures


def test_the_line_that_matched_is_shown() -> None:
    noise = "Traceback (most recent call last):\n  File 'x.py'\n"
    found = diagnose([end(f"{noise}{OFF}\n{noise}ValueError: later", 3), end(CLOSED)], 2)
    assert found.evidence == (
        "rank 3 on n2: exit code 1",
        OFF,
        "points to the node: A GPU has fallen off the bus (xid-off-bus)",
    )


@pytest.mark.parametrize(
    "tail", [CLOSED, ILLEGAL, "NET/IB : Got completion from peer n2<5> with status=12"]
)
def test_an_echo_or_a_programs_error_never_makes_its_node_suspect(tail: str) -> None:
    budget = Budget()
    for _ in range(3):
        budget.spend(diagnose([end(tail)], 2))
    again = diagnose([end("", signum=9)], 2)
    budget.spend(again)
    assert suspect_nodes(again, budget.nodes) == ()
