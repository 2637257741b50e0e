"""From symptoms to a cause and suspects (pure)."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Symptom = Literal["crash", "node_lost", "hang", "stuck", "nan", "differs"]
Cause = Literal["node", "shared", "user", "transient", "unknown"]


@dataclass(frozen=True, slots=True)
class Failure:
    """One observation that something is wrong. Times are monotonic seconds."""

    symptom: Symptom
    at: float  # when it was seen here
    last_good: float  # the last proof of health before it
    node: str
    rank: int | None = None
    code: int | None = None
    signal: int | None = None
    tail: str = ""
    launched: bool = True
    evidence: tuple[str, ...] = ()
    suspects: tuple[str, ...] = ()
    step: int | None = None  # of a NaN, as the training numbers it
    shared: bool = False  # the node is lost, by a cause that it shares with others


@dataclass(frozen=True, slots=True)
class Diagnosis:
    symptom: Symptom
    cause: Cause
    suspects: tuple[str, ...]  # node names
    evidence: tuple[str, ...]
    signature: str  # equal for equal errors, whatever rank or node they hit
    root: Failure
    proven: tuple[str, ...] = ()  # of the suspects: those that tests or a replay have named
    cleared: frozenset[str] = frozenset()  # nodes that have passed tests now
    seen: tuple[str, ...] = ()  # nodes on which ranks died of this very error
    unreported: frozenset[str] = frozenset()  # lost by a shared cause: nothing is held against them


# Errors that a rank reports when *another* rank has died: never the root while there is another.
CASCADE = re.compile(
    r"Connection (closed by peer|reset by peer|refused)|Broken pipe|Socket closed"
    r"|gloo.*(EnforceNotMet|IoException)|\[.*gloo/transport"
    r"|NCCL.*(remote (process|error)|unhandled system error|ncclRemoteError|connection)"
    r"|ncclRemoteError|ncclSystemError|DistNetworkError|DistStoreError|TCPStore"
    r"|recvValue failed|sendBytes failed|Watchdog caught collective operation timeout"
    r"|Timed out waiting .* for (recv|send) operation|ChildFailedError",
    re.IGNORECASE,
)


class NodeError(NamedTuple):
    """Words of the driver, the runtime or the kernel that point to the machine."""

    pattern: re.Pattern[str]
    reason: str
    sure: bool  # no program, data or file server makes this error on one node alone


NODE_ERRORS = tuple(
    NodeError(re.compile(pattern, re.IGNORECASE), reason, sure)
    for pattern, reason, sure in (
        (r"uncorrectable ECC error|ECC error encountered", "uncorrectable GPU memory error", True),
        (r"GPU (has )?fallen off the bus|GPU is lost", "GPU fell off the bus", True),
        (r"no CUDA-capable device|CUDA driver initialization failed", "no usable GPU", True),
        (r"CUDA.*(system not yet initialized|driver mismatch)", "GPU driver or fabric", True),
        (r"hardware stack error", "GPU hardware exception", True),
        (r"\bXid\b.*\b\d+", "Xid in the rank's output", False),
        (r"CUDA error: unspecified launch failure", "GPU exception", False),  # also a kernel's slip
        (r"Stale file handle|Transport endpoint is not connected", "file system mount", False),
        (r"Input/output error", "I/O error", False),
        (r"Read-only file system", "read-only file system", False),
    )
)
# With these errors a start fails also where a limit of the user or of the job is reached.
LIMIT = re.compile(r"Resource temporarily unavailable|Cannot allocate memory", re.IGNORECASE)
BUS_ERROR = "bus error"  # memory or storage of the node, or a file that was cut while mapped
NODES_SHOWN = 8
NANS_SHOWN = 8  # ranks that are named one by one


WARNING = re.compile(r"(\[rank\d+\]:?\s*)?\[[WI]\d{3,4} ")  # as torch logs them: no cause of an end


def last_error(tail: str) -> str:
    """The line that names the error: the last exception line of a traceback, else the last line."""
    lines = [line.rstrip() for line in tail.splitlines() if line.strip()]
    lines = [line for line in lines if not WARNING.match(line)]
    for line in reversed(lines):
        if re.match(r"^(\[rank\d+\]:?\s*)?[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b", line):
            return line
    return lines[-1].strip() if lines else ""


def node_error(failure: Failure) -> tuple[str, bool]:
    """Return what in a crash points to the machine ("": nothing), and whether that is sure."""
    for error in NODE_ERRORS:
        if error.pattern.search(failure.tail):
            return error.reason, error.sure
    return (BUS_ERROR, False) if killed_by(failure) == signal.SIGBUS else ("", False)


def signature(failure: Failure) -> str:
    """Equal for the same error on any rank, address or step."""
    if failure.symptom == "crash" and (reason := node_error(failure)[0]):
        return f"crash: {reason}"
    how = f"signal {failure.signal}" if failure.signal else f"exit {failure.code}"
    if killed_by(failure) == signal.SIGKILL:
        return f"{failure.symptom}: {how}"  # it cannot have said why
    text = re.sub(r"^\[rank\d+\]:?\s*", "", last_error(failure.tail))
    text = re.sub(r"0x[0-9a-fA-F]+|\d+", "#", text)
    return f"{failure.symptom}: {how}: {text}"[:300]


def killed_by(failure: Failure) -> int | None:
    """The signal that ended the program; a shell around it turns signal N into exit code 128+N."""
    if failure.signal:
        return failure.signal
    code = failure.code or 0
    return code - 128 if code > 128 and code - 128 in set(signal.Signals) else None


def is_cascade(failure: Failure) -> bool:
    """True when this rank most likely died of another's death."""
    killer = killed_by(failure)
    if failure.symptom != "crash" or killer not in (None, signal.SIGABRT):
        return False
    return bool(CASCADE.search(failure.tail if killer else failure.tail[-2000:]))


def root_of(failures: Sequence[Failure]) -> Failure:
    """The failure that the others follow from: lost nodes first, then the first own death."""
    # A program that ends itself when its loss is NaN has not failed by itself.
    order = {"node_lost": 0, "stuck": 1, "differs": 2, "nan": 3, "crash": 4, "hang": 5}
    return min(failures, key=lambda f: (is_cascade(f), order[f.symptom], f.at))


def diagnose(
    failures: Sequence[Failure], world_nodes: int = 1, newcomers: Collection[str] = ()
) -> Diagnosis:
    """Name the cause and the suspect nodes of failures that were seen together.

    ``world_nodes``: on how many nodes ranks were to run. A command that cannot be run on some of
    them only is those nodes' fault (a mount that is missing), on all of them the user's.
    ``newcomers``: nodes that have just taken a place; one that cannot start a rank is proven unfit,
    since the same command ran elsewhere before.
    """
    root = root_of(failures)
    lost = tuple(dict.fromkeys(f.node for f in failures if f.symptom in ("node_lost", "stuck")))
    if root.symptom in ("node_lost", "stuck"):
        others = [line for f in failures if f.node in lost for line in f.evidence]
        evidence = tuple(dict.fromkeys([*root.evidence, *others]))
        shared = frozenset(f.node for f in failures if f.shared)
        own = tuple(node for node in lost if node not in shared)
        return Diagnosis(
            root.symptom,
            "node" if own else "shared",
            own,
            evidence,
            root.symptom,
            root,
            unreported=shared,
        )
    if root.symptom == "differs":  # tests have named the nodes, see ``verifying``
        named = root.suspects
        return Diagnosis("differs", "node", named, root.evidence, "differs", root, named)
    if root.symptom == "hang":
        return Diagnosis("hang", "unknown", root.suspects, root.evidence, "hang", root)
    if root.symptom == "nan":
        return _diagnose_nan(failures)
    unable = [f for f in failures if not f.launched and not LIMIT.search(f.tail)]
    nodes = tuple(dict.fromkeys(f.node for f in unable))
    unfit = nodes if set(nodes) <= set(newcomers) else ()
    if unable and (unfit or len(nodes) < world_nodes):
        first = unable[0]
        lines = (f"{', '.join(nodes)} cannot start a rank", last_error(first.tail))
        return Diagnosis("crash", "node", nodes, lines, signature(first), first, unfit)
    return _diagnose_crash(root, failures)


def without_returned(diagnosis: Diagnosis, vacant: Sequence[str]) -> Diagnosis:
    """The diagnosis without the lost nodes that have come back: only ``vacant`` ones are gone."""
    if diagnosis.symptom != "node_lost":
        return diagnosis
    suspects = tuple(node for node in diagnosis.suspects if node in vacant)
    cause: Cause = "node" if suspects else "shared" if vacant else "transient"
    return replace(diagnosis, suspects=suspects, cause=cause)


def _diagnose_nan(failures: Sequence[Failure]) -> Diagnosis:
    """Diagnose a NaN; its cause cannot be seen: a flipped bit, the data, a learning rate.

    One rank that had it a step before all others is a reason to test its node first, no more:
    after an all-reduce every rank has it.
    """
    found = [f for f in failures if f.symptom == "nan"]
    found.sort(key=lambda f: (f.step is None, f.step or 0, f.rank or 0))
    lines = [line for f in found[:NANS_SHOWN] for line in f.evidence]
    if len(found) > NANS_SHOWN:
        lines.append(f"and of {len(found) - NANS_SHOWN} more ranks")
    for failure in failures:
        if failure.symptom == "crash":
            crash = _diagnose_crash(failure, failures)
            if crash.cause == "node":
                return replace(crash, evidence=(*crash.evidence, *lines))
    first = found[0]
    alone = first.step is not None and [f.step for f in found].count(first.step) == 1
    root = first if alone else replace(first, node="", rank=None)
    return Diagnosis("nan", "unknown", (first.node,) if alone else (), tuple(lines), "nan", root)


def _diagnose_crash(root: Failure, failures: Sequence[Failure]) -> Diagnosis:
    """Blame the node only for what no other node shows as well.

    What also a program, its data or a file server can cause blames nobody the first time; nor does
    a process limit, which may be the user's or the job's.
    """
    how = f"killed by {signal_name(root.signal)}" if root.signal else f"exit code {root.code}"
    killer = killed_by(root)
    if killer and not root.signal:
        how += f" ({signal_name(killer)})"
    error = last_error(root.tail)
    evidence = [f"rank {root.rank} on {root.node}: {how}", *([error] if error else [])]
    sign = signature(root)
    alike = nodes_alike(failures, sign)
    reason, sure = node_error(root)
    if len(alike) > 1 and (reason or (killer and not is_cascade(root))):
        evidence.append(shared(alike))
        return Diagnosis("crash", "shared", (), tuple(evidence), sign, root, seen=alike)
    if sure:
        evidence.append(f"points to the node: {reason}")
        return Diagnosis("crash", "node", (root.node,), tuple(evidence), sign, root, seen=alike)
    if reason:
        evidence.append(f"points to the node, its program or what nodes share: {reason}")
    cause: Cause = "unknown"
    if not root.launched:
        cause = "unknown" if LIMIT.search(root.tail) else "user"
    elif is_cascade(root):
        cause = "transient"
    elif killer is None and not reason:
        cause = "user"
    return Diagnosis("crash", cause, (), tuple(evidence), sign, root, seen=alike)


def nodes_alike(failures: Sequence[Failure], sign: str) -> tuple[str, ...]:
    """The nodes on which ranks died of the error with this signature, the first death first."""
    crashes = sorted((f for f in failures if f.symptom == "crash"), key=lambda f: f.at)
    return tuple(dict.fromkeys(f.node for f in crashes if signature(f) == sign))


def shared(nodes: Collection[str]) -> str:
    """The line of evidence that acquits nodes."""
    names = ", ".join(list(nodes)[:NODES_SHOWN])
    more = f" and {len(nodes) - NODES_SHOWN} more" if len(nodes) > NODES_SHOWN else ""
    return f"the same error on {names}{more}: the program, its data or a shared service"


def signal_name(signum: int | None) -> str:
    try:
        return signal.Signals(signum or 0).name
    except ValueError:
        return f"signal {signum}"
