"""The cause that is named for each set of symptoms."""

from __future__ import annotations

import signal
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srun_wrapper.decide import ladder
from srun_wrapper.decide.budget import Budget
from srun_wrapper.decide.diagnose import diagnose
from srun_wrapper.decide.diagnosis import root_of
from srun_wrapper.decide.ends import EndKind, read_end, signature
from srun_wrapper.decide.failure import Failure, Symptom, killed_by, last_error

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 12, in <module>
    main()
ValueError: bad shape 17 at 0x7f00dead
"""
GLOO = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.3]:4242"
NCCL = "torch.distributed.DistBackendError: NCCL error: ncclRemoteError: A call failed possibly"


def crash(tail: str = "", **fields: object) -> Failure:
    values: dict[str, object] = {"code": 1, "rank": 0, "node": "n1", "at": 10.0, "last_good": 9.9}
    return Failure("crash", tail=tail, **(values | fields))  # type: ignore[arg-type]


def lost(node: str, at: float = 10.0) -> Failure:
    return Failure("node_lost", at, at - 2, node, evidence=(f"{node}: no word",))


def nan(rank: int, step: int | None = 17, node: str = "") -> Failure:
    node = node or f"n{rank // 2}"
    evidence = (f"loss of rank {rank} on {node} is nan at step {step}",)
    return Failure("nan", 10.0, 9.5, node, rank, evidence=evidence, step=step)


@pytest.mark.parametrize(
    ("failures", "root"),
    [
        ([nan(3)], ("n1", 3)),  # nothing is known of the other ranks
        ([nan(0, 18), nan(3, 17), nan(1, 18)], ("n1", 3)),  # gradients spread it
        ([nan(0), nan(3)], ("", None)),  # an all-reduced loss
        ([nan(2), nan(3)], ("", None)),
        ([nan(3, None)], ("", None)),
        ([nan(3, None), nan(0, 5)], ("n0", 0)),
        ([nan(3), crash("RuntimeError: loss is nan", rank=3)], ("n1", 3)),
        ([crash(GLOO, rank=0, at=1.0), nan(3)], ("n1", 3)),
    ],
)
def test_a_nan_reports_nobody(failures: list[Failure], root: tuple[str, int | None]) -> None:
    """The rank that had it first is the root, whose node is tested first."""
    found = diagnose(failures, 2)
    assert (found.symptom, found.cause, found.signature) == ("nan", "unknown", "nan")
    assert found.suspects == () and (found.root.node, found.root.rank) == root
    assert len(found.evidence) == sum(f.symptom == "nan" for f in failures)


def test_what_else_is_seen_with_a_nan() -> None:
    ecc = crash("CUDA error: uncorrectable ECC error encountered", node="n7")
    found = diagnose([nan(3), ecc], 8)
    assert (found.symptom, found.cause, found.suspects) == ("crash", "node", ("n7",))
    assert "loss of rank 3 on n1 is nan at step 17" in found.evidence
    assert diagnose([nan(3), lost("n5")], 8).symptom == "node_lost"
    many = diagnose([nan(r) for r in range(500)], 250)
    assert len(many.evidence) == 9 and many.evidence[-1] == "and of 492 more ranks"


@pytest.mark.parametrize(
    ("tail", "error"),
    [
        (TRACEBACK, "ValueError: bad shape 17 at 0x7f00dead"),
        (TRACEBACK + "some library: shutting down\n", "ValueError: bad shape 17 at 0x7f00dead"),
        ("[rank3]: torch.OutOfMemoryError: CUDA", "[rank3]: torch.OutOfMemoryError: CUDA"),
        ("my.module.CustomException", "my.module.CustomException"),
        ("KeyboardInterrupt\n", "KeyboardInterrupt"),
        ("line one\n  last words  \n\n", "last words"),
        ("", ""),
        (" \n\n", ""),
        ("[W1121 19:01:02.5 socket.cpp:207] [c10d] The hostname cannot be retrieved\n", ""),
        ("boom\n[rank3]:[W1121 19:01:02.5 socket.cpp:207] no hostname\n", "boom"),
    ],
)
def test_last_error(tail: str, error: str) -> None:
    assert last_error(tail) == error


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (crash(TRACEBACK), crash(TRACEBACK, rank=5, node="n7", at=99.0), True),
        (crash("ValueError: rank 3 of 8"), crash("ValueError: rank 12 of 8"), True),
        (crash("[rank0]: ValueError: x"), crash("[rank7]: ValueError: x"), True),
        (crash("E: at 0xdeadBEEF"), crash("E: at 0x1"), True),
        (crash("ValueError: a"), crash("ValueError: b"), False),
        (crash("x", code=1), crash("x", code=2), False),
        (crash("x", code=None, signal=9), crash("x", code=None, signal=11), False),
        (crash("x", code=None, signal=9), crash("y", code=None, signal=9), True),  # last words
        (crash("OSError: [Errno 5] Input/output error: '/a'"), crash("Input/output error"), True),
    ],
)
def test_signature(one: Failure, other: Failure, same: bool) -> None:
    assert (signature(one) == signature(other)) is same


@pytest.mark.parametrize(
    ("failure", "cascade"),
    [
        (crash(GLOO), True),
        (crash(NCCL), True),
        (crash("x" * 5000 + "\nConnection reset by peer"), True),
        (crash("Connection reset by peer\n" + "x" * 5000), False),  # long ago, not of its death
        (crash(TRACEBACK), False),
        (crash(GLOO, code=None, signal=signal.SIGKILL), False),
        (crash(GLOO, code=137), False),  # the same through a shell
        (crash(GLOO, code=None, signal=signal.SIGSEGV), False),
        (crash(NCCL, code=None, signal=signal.SIGABRT), True),
        (crash(NCCL, code=134), True),
        (crash("assertion failed", code=None, signal=signal.SIGABRT), False),
        (lost("n1"), False),
    ],
)
def test_an_end_that_follows_from_another(failure: Failure, cascade: bool) -> None:
    assert (read_end(failure).kind is EndKind.FOLLOWS) is cascade


@pytest.mark.parametrize(
    ("failure", "cause", "suspects"),
    [
        (crash(TRACEBACK), "user", ()),
        (crash("", code=3), "user", ()),
        (crash("", code=None, signal=9), "unknown", ()),
        (crash("", code=137), "unknown", ()),  # a shell around a program that was killed
        (crash("", code=None, signal=11), "unknown", ()),
        (crash("", code=None, signal=signal.SIGBUS), "unknown", ()),  # or a file cut while mapped
        (crash("", code=128 + signal.SIGBUS), "unknown", ()),
        (crash("RuntimeError: CUDA error: unspecified launch failure"), "unknown", ()),
        (crash("OSError: [Errno 30] Read-only file system: '/data'"), "unknown", ()),
        (crash(GLOO), "transient", ()),
        (crash("", code=2, launched=False), "user", ()),
        (crash("RuntimeError: CUDA error: uncorrectable ECC error encountered"), "node", ("n1",)),
        (crash("OSError: [Errno 116] Stale file handle: '/data/x'"), "unknown", ()),
        (crash("OSError: [Errno 5] Input/output error"), "unknown", ()),
        (crash("NVRM: Xid (PCI:0000:17:00): 79, GPU has fallen off the bus"), "node", ("n1",)),
        (crash("NVRM: Xid (PCI:0000:17:00): 13, Graphics Exception"), "user", ()),
        (crash("torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB"), "user", ()),
        (crash("", code=255), "user", ()),
    ],
)
def test_causes(failure: Failure, cause: str, suspects: tuple[str, ...]) -> None:
    found = diagnose([failure])
    assert (found.cause, found.suspects) == (cause, suspects)
    assert found.evidence[0].startswith("rank 0 on n1: ")


ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
EIO = "OSError: [Errno 5] Input/output error: '/data/{}'"
SEGV: dict[str, object] = {"code": None, "signal": 11}


@pytest.mark.parametrize(
    ("failures", "cause", "suspects"),
    [
        ([crash(ECC, node="n1"), crash(GLOO, node="n2")], "node", ("n1",)),
        ([crash(ECC, node="n1"), crash(ECC, node="n1", rank=1)], "node", ("n1",)),
        ([crash(ECC, node="n1"), crash(TRACEBACK, node="n2", at=10.1)], "node", ("n1",)),
        ([crash(ECC, node="n1"), crash(ECC, node="n2")], "shared", ()),
        ([crash(EIO.format(1), node="n1"), crash(GLOO, node="n2")], "unknown", ()),
        ([crash(EIO.format(1), node="n1"), crash(EIO.format(2), node="n2")], "shared", ()),
        ([crash("", node=n, **SEGV) for n in ("n1", "n2")], "shared", ()),
        ([crash(TRACEBACK, node=n) for n in ("n1", "n2")], "user", ()),
        ([crash(GLOO, node=n) for n in ("n1", "n2")], "transient", ()),
        ([crash(EIO.format(n), node=f"n{n}") for n in range(3)] + [lost("n9")], "node", ("n9",)),
    ],
)
def test_the_same_error_on_several_nodes_blames_none(
    failures: list[Failure], cause: str, suspects: tuple[str, ...]
) -> None:
    for order in permutations(failures):
        found = diagnose(order, 8)
        assert (found.cause, found.suspects) == (cause, suspects)


def test_the_nodes_that_share_an_error_are_named() -> None:
    found = diagnose([crash(EIO.format(n), node=f"n{n:02}") for n in range(20)], 20)
    assert found.evidence[-1].startswith("the same error on n00, n01") and len(found.seen) == 20
    assert found.evidence[-1].endswith("n07 and 12 more: the program, its data or a shared service")


def test_killed_by() -> None:
    assert killed_by(crash(code=None, signal=9)) == 9
    assert killed_by(crash(code=139)) == signal.SIGSEGV
    assert [killed_by(crash(code=c)) for c in (0, 1, 127, 128, 254, 255)] == [None] * 6


def test_a_lost_node_explains_the_others() -> None:
    seen = [crash(GLOO, rank=3, node="n2", at=9.0), lost("n3", 12.0), lost("n4", 12.1)]
    for order in permutations(seen):
        found = diagnose(order)
        assert (found.symptom, found.cause) == ("node_lost", "node")
        assert set(found.suspects) == {"n3", "n4"}
        assert set(found.evidence) == {"n3: no word", "n4: no word"}


def test_the_first_own_death_explains_later_ones() -> None:
    own = crash(TRACEBACK, rank=2, at=5.0)
    assert root_of([crash(GLOO, rank=1, at=4.0), own, crash(TRACEBACK, rank=7, at=6.0)]) is own


def test_a_hang_is_nobodys_fault_until_shown() -> None:
    hang = Failure("hang", 9.0, 1.0, "n2", 3, evidence=("no rank did anything",), suspects=("n2",))
    found = diagnose([hang])
    assert (found.cause, found.suspects, found.signature) == ("unknown", ("n2",), "hang")


SYMPTOMS: list[Symptom] = ["crash", "node_lost", "hang", "stuck"]
FAILURES = st.builds(
    Failure,
    st.sampled_from(SYMPTOMS),
    st.floats(0, 100),
    st.floats(0, 100),
    st.sampled_from(["n1", "n2", "n3"]),
    st.integers(0, 9),
    st.none() | st.integers(0, 255),
    st.none() | st.integers(1, 64),
    st.text(max_size=50) | st.sampled_from([GLOO, NCCL, TRACEBACK]),
    st.booleans(),
)


@settings(deadline=None)
@given(st.lists(FAILURES, min_size=1, max_size=6))
def test_any_failures_have_a_diagnosis(failures: list[Failure]) -> None:
    found = diagnose(failures)
    assert found.root in failures
    assert set(found.suspects) <= {f.node for f in failures} | {""}
    if any(f.symptom == "node_lost" for f in failures):
        assert found.cause == "node"
    assert len(found.signature) <= 300


def test_a_command_that_cannot_run_on_some_nodes_only_is_those_nodes_fault() -> None:
    failures = [
        Failure("crash", 1.0, 0.9, "n2", rank=r, code=2, tail="cannot run", launched=False)
        for r in (2, 3)
    ]
    found = diagnose(failures, world_nodes=2)
    assert (found.cause, found.suspects) == ("node", ("n2",))
    assert diagnose(failures, world_nodes=1).cause == "user"


@pytest.mark.parametrize(
    ("unable", "nodes", "rule"),
    [
        (1, 2, "cannot-start-here"),
        (1, 3, "cannot-start-here"),
        (2, 3, "cannot-start-on-many"),  # the one that can is the exception
        (2, 4, "cannot-start-here"),
        (2, 100, "cannot-start-here"),
        (3, 100, "cannot-start-here"),
        (5, 100, "cannot-start-here"),
        (3, 40, "cannot-start-on-many"),
        (6, 100, "cannot-start-on-many"),
        (8, 9, "cannot-start-on-many"),
        (2, 2, "cannot-start"),
        (9, 9, "cannot-start"),
    ],
)
def test_many_nodes_that_cannot_start_a_rank_lack_something_that_is_not_theirs(
    unable: int, nodes: int, rule: str
) -> None:
    failures = [
        crash(NO_MOUNT, node=f"n{number}", code=2, launched=False)
        for number in range(1, unable + 1)
    ]
    found = diagnose(failures, nodes)
    assert found.rule == rule
    if rule == "cannot-start-here":
        assert len(found.suspects) == unable and found.proven == ()
    else:
        assert found.cause in ("shared", "user") and found.suspects == ()
        plan = ladder.plan(found, (), Budget(), ladder.Means(9, 0, True, 3))
        assert (plan.action, plan.replace) == ("stop", ())
    if rule == "cannot-start-on-many":
        names = f"n[1-{unable}]"
        assert found.evidence[0] == f"{unable} of {nodes} nodes cannot start a rank: {names}"
        assert "code_store" in found.evidence[-1]
        assert diagnose(failures, nodes, {"n1"}).suspects == ()
        joined = diagnose(failures, nodes, {f"n{n}" for n in range(1, unable + 1)})
        assert joined.rule == "cannot-start-here"  # none of them has been in the job before


def test_each_reason_why_nodes_cannot_start_a_rank_is_told_with_its_nodes() -> None:
    python = NO_MOUNT.replace("'x'", "'/opt/python'")
    ends = [
        crash(text, node=f"n{rank}", code=2, launched=False)
        for rank, text in enumerate([NO_MOUNT, python, python], 1)
    ]
    found = diagnose(ends, 4)
    assert (found.rule, found.suspects) == ("cannot-start-on-many", ())
    assert found.evidence[1] == f"n1: {NO_MOUNT}"
    assert found.evidence[2] == f"n[2-3]: {python}"
    two = diagnose(ends[:2], 4)
    assert two.rule == "cannot-start-here"
    assert two.evidence[1:] == (f"n1: {NO_MOUNT}", f"n2: {python}")


EAGAIN = "robust-task: cannot run 'x': [Errno 11] Resource temporarily unavailable"
ENOMEM = "robust-task: cannot run 'x': [Errno 12] Cannot allocate memory"
NO_MOUNT = "robust-task: cannot run 'x': [Errno 2] No such file or directory: 'x'"
NO_IDS = "robust-task: no process id left on this node (32768 tasks of 32768): cannot start 'x'"


@pytest.mark.parametrize(
    ("tails", "nodes", "cause", "suspects"),
    [
        ([("n2", EAGAIN)], 2, "unknown", ()),  # or the user's processes there: ulimit -u
        ([("n2", ENOMEM)], 2, "unknown", ()),
        ([("n1", EAGAIN), ("n2", EAGAIN)], 2, "unknown", ()),
        ([("n1", EAGAIN), ("n2", NO_MOUNT)], 3, "node", ("n2",)),
        ([("n2", NO_IDS)], 2, "node", ("n2",)),
    ],
)
def test_a_limit_that_may_be_the_users_blames_no_node(
    tails: list[tuple[str, str]], nodes: int, cause: str, suspects: tuple[str, ...]
) -> None:
    failures = [crash(tail, node=node, code=2, launched=False) for node, tail in tails]
    found = diagnose(failures, nodes)
    assert (found.cause, found.suspects) == (cause, suspects)
    assert diagnose(failures, nodes, {"n1", "n2"}).proven == suspects
