"""The rules for ends of ranks: which one decides, whom it blames, and the lines that it shows."""

from __future__ import annotations

from dataclasses import replace
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
        ([end(CLOSED, 0), end("", 3, 10.2, signum=9)], "killed", "unknown", ()),
        ([end(CLOSED, 0), end("", 3, 10.2, signum=11)], "signal", "unknown", ()),
        ([end("", code=3)], "exit-code", "user", ()),
        ([end("Memory cgroup out of memory: Killed process 7 (python)")], "host-oom", "user", ()),
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


KERNEL = "kernel: Memory cgroup out of memory: Killed process 4203 (python) total-vm:81920kB"
COUNTED = "cgroup /slurm/job_7/step_0/task_1: oom_kill events since the rank's start: 1"
TAKEN = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacity of 79.11 GiB of which 1.50 GiB is free. {}Process 999 has 66.00 GiB memory in use. "
    "Including non-PyTorch memory, this process has {} GiB memory in use."
)
RETRY = "NET/IB : Got completion from peer {}<41000> with status=12 opcode=0 len=0 vendor err 129"
NAMES = {"n1": "n1", "n2": "n2", "n3": "n3", "10.0.0.2": "n2"}


@pytest.mark.parametrize(
    ("failure", "rule", "cause"),
    [
        (replace(end("", signum=9), facts=(KERNEL,)), "host-oom", "user"),
        (replace(end("", signum=9), facts=(COUNTED,)), "host-oom", "user"),
        (replace(end("", signum=9), facts=(COUNTED, KERNEL)), "host-oom", "user"),
        (replace(end("", code=137), facts=(KERNEL,)), "host-oom", "user"),
        (replace(end("step 1\nstep 2\nstep 3\n", signum=9), facts=(KERNEL,)), "host-oom", "user"),
        (replace(end("RuntimeError: worker is gone"), facts=(KERNEL,)), "host-oom", "user"),
        (replace(end(CLOSED), facts=(KERNEL,)), "host-oom", "user"),
        (replace(end(CLOSED), facts=(f"kernel: {OFF}",)), "machine-error", "node"),
        (replace(end("", signum=6), facts=(f"kernel: {GRAPHICS}",)), "program-error", "user"),
        (replace(end("", signum=9), facts=("ValueError: x",)), "killed", "unknown"),
        (replace(end("", code=3), facts=("ValueError: x",)), "program-error", "user"),
        (replace(end("", signum=9), facts=("kernel: python[4203]: segfault at 0",)), "killed",
         "unknown"),
    ],
)  # fmt: skip
def test_the_nodes_facts_decide_what_a_rank_cannot_say(
    failure: Failure, rule: str, cause: str
) -> None:
    found = diagnose([failure, end(CLOSED, 4, 10.3)], 4)
    assert (found.rule, found.cause, found.root) == (rule, cause, failure)


def test_the_message_about_used_up_memory_says_what_to_do() -> None:
    found = diagnose([replace(end("", signum=9), facts=(KERNEL,))], 4)
    assert found.evidence[:2] == ("rank 0 on n1: killed by SIGKILL", KERNEL)
    assert "--mem" in found.evidence[2] and "memory was used up" in found.evidence[2]
    unsaid = diagnose([end("", signum=9)], 4)
    assert found.signature != unsaid.signature  # an end without a cause is not its first time


@pytest.mark.parametrize(
    ("failures", "rule"),
    [
        ([end(TAKEN.format("", "9.00"))], "gpu-in-use"),
        ([end(TAKEN.format("", "9.00")), end(TAKEN.format("", "8.00"), 1)], "gpu-in-use"),
        ([end(TAKEN.format("", "9.00")), end(TAKEN.format("", "8.00"), 2)], "program-error"),
        ([end(TAKEN.format("", "70.00"))], "program-error"),  # most of it is its own
        ([end(TAKEN.format("Process 998 has 1.00 GiB memory in use. " * 2, "9.00"))],
         "program-error"),  # all ranks on one GPU
        ([replace(end(TAKEN.format("", "9.00")), facts=("process 999 belongs to this job",))],
         "program-error"),  # two ranks on one GPU
    ],
)  # fmt: skip
def test_memory_that_another_job_left_on_a_gpu(failures: list[Failure], rule: str) -> None:
    found = diagnose(failures, 4)
    assert found.rule == rule
    if rule == "gpu-in-use":
        assert (found.cause, found.tests, found.root.node) == ("unknown", "now", "n1")


@pytest.mark.parametrize(
    ("failures", "rule", "suspects"),
    [
        ([end(RETRY.format("n2"), 0), end(RETRY.format("n2"), 4)], "named-peer", ("n2",)),
        ([end(RETRY.format("10.0.0.2"), 0), end(RETRY.format("n2"), 4)], "follows", ()),
        ([end(RETRY.format("10.0.0.2"), r) for r in (0, 4)], "named-peer", ("n2",)),
        ([end(RETRY.format("n2"), 0), end(RETRY.format("n2"), 1)], "follows", ()),  # one node
        ([end(RETRY.format("n2"), 0), end(RETRY.format("n3"), 4)], "follows", ()),
        ([end(RETRY.format("x9"), 0), end(RETRY.format("x9"), 4)], "follows", ()),  # of no node
        ([end(RETRY.format("n2"), 0), end(RETRY.format("n2"), 4), end("ValueError: x", 2)],
         "program-error", ()),
    ],
)  # fmt: skip
def test_a_peer_that_all_name_is_tested_and_never_evicted_without(
    failures: list[Failure], rule: str, suspects: tuple[str, ...]
) -> None:
    budget = Budget()
    for _ in range(5):
        found = diagnose(failures, 4, addresses=NAMES)
        assert (found.rule, found.suspects) == (rule, suspects)
        budget.spend(found)
        assert suspect_nodes(found, budget.nodes) == ()
    assert (found.tests == "only") is (rule == "named-peer")


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


PASS = (  # by themselves, mostly before the next start
    "BlockingIOError: [Errno 11] Resource temporarily unavailable",
    "OSError: [Errno 12] Cannot allocate memory",
    "RuntimeError: The server socket has failed to bind: EADDRINUSE",
    "OSError: [Errno 98] Address already in use",
    "socket.gaierror: [Errno -3] Temporary failure in name resolution",
)
EVERYWHERE = [("ValueError: x", None, 1), ("", None, 3), ("x: not found", None, 127), ("", 6, 1)]


@pytest.mark.parametrize(("tail", "signum", "code"), EVERYWHERE)
def test_what_all_ranks_show_before_any_step_is_the_programs(
    tail: str, signum: int | None, code: int
) -> None:
    ends = [end(f"{tail} {rank}", rank, 10.0 + rank, signum, code) for rank in range(4)]
    found = diagnose(ends, 2, none_started=True)
    assert (found.rule, found.cause, found.suspects) == ("all-at-start", "user", ())
    assert found.tests == "never"
    assert found.evidence[-1] == "all ranks ended like this before any step was seen"
    assert diagnose(ends, 2).rule != "all-at-start"  # some ranks run, or have made steps


@pytest.mark.parametrize(
    "ends",
    [
        [end("ValueError: x", 0), end("ValueError: y", 1)],
        [end("ValueError: x", 0), end("ValueError: x", 1, code=2)],
        [end("ValueError: x", 0), end(CLOSED, 1)],  # one failed, the other follows
        [end(CLOSED, r) for r in range(4)],
        [end(ECC, r) for r in range(4)],  # it names a machine
        [end("OSError: [Errno 5] Input/output error", r) for r in range(4)],  # a file server
        [end("", r, signum=9) for r in range(4)],  # no memory, or a person
        [end("", r, signum=15) for r in range(4)],
        *([end(text, r) for r in range(4)] for text in PASS),
    ],
)
def test_what_may_not_be_the_programs_is_judged_as_ever(ends: list[Failure]) -> None:
    found = diagnose(ends, 2, none_started=True)
    assert found == diagnose(ends, 2) and found.rule != "all-at-start"
