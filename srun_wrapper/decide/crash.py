"""Rules for the ends of ranks: a node is blamed only for an error that no other node shows (pure).

An error that a program, its data or a file server can cause too blames no node the first time; nor
does a process limit, which may be the user's or the job's.
"""

from __future__ import annotations

import signal
from dataclasses import replace

from robust_slurm.slurm.values import fold
from srun_wrapper.decide.diagnosis import (
    NEWCOMER,
    Case,
    Cause,
    Diagnosis,
    Rule,
    shared,
)
from srun_wrapper.decide.ends import (
    CERTAIN,
    LIMIT,
    EndKind,
    may_be_the_programs,
    odd_collective,
    read_end,
    signature,
)
from srun_wrapper.decide.failure import OF_THIS_JOB, Failure, how_ended, last_error
from srun_wrapper.decide.shared_cause import common
from srun_wrapper.signatures import traps

AT_START = "all-at-start"  # id of the rule for an error that all ranks show before any step
LINE_SHOWN, REASONS_SHOWN = 400, 4  # characters of a rank's line; failed starts


def _found(case: Case, root: Failure, cause: Cause, *more: str, node: bool = False) -> Diagnosis:
    """Return the diagnosis of a rank's end, with the line that names its cause."""
    hit = read_end(root, case.catalogue).hit
    line = hit.line.text.strip() if hit else last_error(root.tail)
    how = f"rank {root.rank} on {root.node}: {how_ended(root)}"
    sign = signature(root, case.catalogue)
    return Diagnosis(
        "crash",
        cause,
        (root.node,) if node else (),
        (how, *([line[:LINE_SHOWN]] if line else []), *more),
        sign,
        root,
        seen=case.alike(sign),
    )


def _meaning(case: Case, root: Failure) -> str:
    """Return what the catalogue says of the line, and the signature's id."""
    hit = read_end(root, case.catalogue).hit
    return f"{hit.signature.cause} ({hit.signature.id})" if hit else "bus error"


def _unable(case: Case) -> tuple[list[Failure], tuple[str, ...]]:
    """Return the failed starts, the first one first, and all nodes that cannot start a rank."""
    unable = [f for f, _ in case.ends if not f.launched and not LIMIT.search(f.tail)]
    return unable, tuple(dict.fromkeys(f.node for f in unable))


def _reasons(unable: list[Failure]) -> list[str]:
    """Return why ranks cannot be started; with the nodes, if there are several reasons."""
    nodes: dict[str, list[str]] = {}
    for failure in unable:
        nodes.setdefault(last_error(failure.tail)[:LINE_SHOWN], []).append(failure.node)
    if len(nodes) == 1:
        return list(nodes)
    return [f"{fold(names)}: {why}" for why, names in nodes.items()][:REASONS_SHOWN]


def _many(nodes: int, of: int) -> bool:
    """True if so many nodes lack something that none of them is to blame."""
    return common(nodes, of) or (nodes > 1 and 2 * nodes > of)


def _cannot_start_here(case: Case) -> Diagnosis | None:
    """Blame nodes that cannot start a rank; if they just joined, they are proven unfit."""
    unable, nodes = _unable(case)
    unfit = nodes if set(nodes) <= set(case.just_joined) else ()
    few = len(nodes) < case.world_nodes and not _many(len(nodes), case.world_nodes)
    if not unable or not (unfit or few):
        return None
    first = unable[0]
    lines = (f"{', '.join(nodes)} cannot start a rank", *_reasons(unable))
    return Diagnosis("crash", "node", nodes, lines, signature(first, case.catalogue), first, unfit)


def _cannot_start_on_many(case: Case) -> Diagnosis | None:
    unable, nodes = _unable(case)
    if not unable or len(nodes) >= case.world_nodes:
        return None
    lines = (
        f"{len(nodes)} of {case.world_nodes} nodes cannot start a rank: {fold(nodes)}",
        *_reasons(unable),
        "what so many nodes lack is no fault of theirs: see that they have the same mounts "
        "(state_dir, code_store) and the same programs as the others",
    )
    first = unable[0]
    return Diagnosis("crash", "shared", (), lines, signature(first, case.catalogue), first)


def _preempted(case: Case) -> Diagnosis | None:
    named = {id(end.hit): failure for failure, end in case.ends if end.hit is not None}
    found = traps.preempted([end.hit for _, end in case.ends if end.hit is not None])
    if found is None:
        return None
    root = named[id(found)]
    return _found(case, root, "shared", _meaning(case, root))


def _newcomer(case: Case) -> Diagnosis | None:
    """Blame nodes that have just joined for an error that no other node shows, whatever it is."""
    root = case.root
    end = read_end(root, case.catalogue)
    if end.kind is not EndKind.OWN or (end.killer == signal.SIGKILL and end.hit is None):
        return None  # what follows from another end, or was done to the rank, is no error of it
    sign = signature(root, case.catalogue)
    nodes = case.alike(sign)
    if not set(nodes) <= set(case.just_joined):
        return None
    alike = [f for f, _ in case.ends if f.node in nodes and f.rank is not None]
    found = _found(case, root, "node", "only nodes that have just joined the job show this error")
    ranks = tuple(dict.fromkeys(f"rank {f.rank}" for f in alike))
    return replace(found, suspects=nodes, ranks=ranks, tests="never")


def _all_at_start(case: Case) -> Diagnosis | None:
    """Blame the program for an error that all ranks show before any step, if it may be its own."""
    signs = {signature(failure, case.catalogue) for failure, _ in case.ends}
    if not case.none_started or len(signs) != 1:
        return None
    if not all(may_be_the_programs(failure, case.catalogue) for failure, _ in case.ends):
        return None
    why = "all ranks ended like this before any step was seen"
    more = (
        (why,)
        if read_end(case.root, case.catalogue).hit is None
        else (_meaning(case, case.root), why)
    )
    return replace(_found(case, case.root, "user", *more), tests="never")


def _shared(case: Case) -> Diagnosis | None:
    end = read_end(case.root, case.catalogue)
    alike = case.alike(signature(case.root, case.catalogue))
    own_kill = end.killer and end.kind is not EndKind.FOLLOWS and end.blame != "user"
    if len(alike) > 1 and (end.points or own_kill):
        return _found(case, case.root, "shared", shared(alike))
    return None


def _machine(case: Case) -> Diagnosis | None:
    if read_end(case.root, case.catalogue).kind is not EndKind.MACHINE:
        return None
    why = f"points to the node: {_meaning(case, case.root)}"
    return _found(case, case.root, "node", why, node=True)


def _odd_collective(case: Case) -> Diagnosis | None:
    end = read_end(case.root, case.catalogue)
    vague = end.kind is EndKind.FOLLOWS or end.hit is None or end.hit.weight < traps.PRECISE
    if not vague or not (odd := odd_collective(case.ends)):
        return None
    root, line = odd
    found = _found(case, root, "user")
    text = f"its collective has another kind or size than the others': {line.text.strip()}"
    return Diagnosis(
        "crash", "user", (), (found.evidence[0], text[:LINE_SHOWN]), "crash: odd collective", root
    )


def _cannot_start(case: Case) -> Diagnosis | None:
    if case.root.launched:
        return None
    return _found(case, case.root, "unknown" if LIMIT.search(case.root.tail) else "user")


def _points(case: Case) -> Diagnosis | None:
    end = read_end(case.root, case.catalogue)
    if not end.points and not end.bus_error:
        return None
    what = _meaning(case, case.root)
    why = f"points to the node, its program or what nodes share: {what}"
    return _found(case, case.root, "unknown", why)


def _follows(case: Case) -> Diagnosis | None:
    if read_end(case.root, case.catalogue).kind is not EndKind.FOLLOWS:
        return None
    return _found(case, case.root, "transient", _meaning(case, case.root))


def _named_peer(case: Case) -> Diagnosis | None:
    """Suspect the peer that all failed transfers name; it may be the victim of other links."""
    root = read_end(case.root, case.catalogue)
    if root.hit is None or root.hit.signature.layer != "ib":
        return None
    hits = [replace(end.hit, node=f.node) for f, end in case.ends if end.hit is not None]
    named, reporters = traps.named_peer(hits)
    peer = case.addresses.get(named, "")
    if not peer or reporters < 2:
        return None
    why = f"failed transfers on {reporters} nodes all name {peer}, which may be their victim"
    found = _found(case, case.root, "unknown", why)
    sign = f"crash: transfers with {peer}"
    return replace(found, suspects=(peer,), signature=sign, seen=(), tests="only")


def _gpu_in_use(case: Case) -> Diagnosis | None:
    """Diagnose a GPU whose memory a foreign process holds; on several nodes it is the program."""
    taken = [f for f, end in case.ends if end.left_over]
    if case.root not in taken or len({f.node for f in taken}) > 1:
        return None
    if any(OF_THIS_JOB in fact for f in taken for fact in f.facts):
        return None  # two ranks on one GPU
    why = "another process holds most of the GPU's memory: look for what an earlier job left there"
    return replace(_found(case, case.root, "unknown", why), tests="now")


def _host_oom(case: Case) -> Diagnosis | None:
    hit = read_end(case.root, case.catalogue).hit
    if hit is None or hit.signature.layer != "host_oom" or hit.weight < CERTAIN:
        return None
    if hit.signature.blame != "user":
        return None
    why = f"{_meaning(case, case.root)}: {hit.signature.advice}"
    return replace(_found(case, case.root, "user", why), tests="never")


def _user(case: Case) -> Diagnosis | None:
    if read_end(case.root, case.catalogue).blame != "user":
        return None
    return _found(case, case.root, "user", _meaning(case, case.root))


def _killed(case: Case) -> Diagnosis | None:
    if _killer(case) != signal.SIGKILL:
        return None
    why = "no record on the node shows why: usually the OOM killer or a person"
    return _moving(_found(case, case.root, "unknown", why))


def _signal(case: Case) -> Diagnosis | None:
    return _moving(_found(case, case.root, "unknown")) if _killer(case) else None


def _moving(found: Diagnosis) -> Diagnosis:
    rank = found.root.rank
    return replace(found, exchange=True, ranks=() if rank is None else (f"rank {rank}",))


def _killer(case: Case) -> int | None:
    return read_end(case.root, case.catalogue).killer


def _exit(case: Case) -> Diagnosis | None:
    return _found(case, case.root, "user")


RULES = (
    Rule(
        "cannot-start-here",
        "crash",
        "the command cannot be started on some nodes, and can on others",
        "these nodes are to blame; a node that has just joined is proven unfit",
        "evict",
        _cannot_start_here,
    ),
    Rule(
        "cannot-start-on-many",
        "crash",
        "likewise, on more than half of the nodes, or on more than 2 nodes and 5 %",
        "mounts or programs that these nodes lack, and no node",
        "stop now",
        _cannot_start_on_many,
    ),
    Rule(
        "preempted",
        "crash",
        "a rank reports a preemption, and no precise error more than 120 s before it",
        "no node is to blame: errors near a preemption are what its SIGKILL makes peers report",
        "restart",
        _preempted,
    ),
    Rule(
        "cannot-start",
        "crash",
        "the command cannot be started",
        "the user's error; unknown if a limit of processes or memory is reached",
        "stop now",
        _cannot_start,
    ),
    Rule(
        NEWCOMER,
        "crash",
        "an error that only nodes show that have taken a place since all ranks last stepped, and "
        "have not stepped there: of any text, but no SIGKILL without a known cause",
        "these nodes are to blame: they lack a mount, data or a library; of the second one the "
        "ranks move to another node, which shows if the program is to blame",
        "evict",
        _newcomer,
    ),
    Rule(
        AT_START,
        "crash",
        "all ranks show the same error before any step was seen, in the job's first 10 minutes, no "
        "signature says that it comes from outside the program, and it is none that passes",
        "the program, its command line or its data is to blame",
        "stop now",
        _all_at_start,
    ),
    Rule(
        "shared-error",
        "crash",
        "ranks of two or more nodes show the same error that may point to a machine, or the same "
        "signal",
        "something shared is to blame, and no node",
        "restart",
        _shared,
    ),
    Rule(
        "machine-error",
        "crash",
        "a signature with evict = yes in the output of a rank, about its own node, on no other "
        "node",
        "the node is to blame",
        "evict",
        _machine,
    ),
    Rule(
        "different-collectives",
        "crash",
        "a collective timed out, and one rank's has another kind or size than the others'",
        "the program is to blame",
        "stop",
        _odd_collective,
    ),
    Rule(
        "points-to-node",
        "crash",
        "a signature that blames a node or something outside the job, or SIGBUS",
        "unknown: no node is blamed the first time",
        "second",
        _points,
    ),
    Rule(
        "named-peer",
        "crash",
        "failed InfiniBand transfers on two or more nodes all name one node of the job",
        "unknown: that node is tested first, and may be the victim",
        "test only",
        _named_peer,
    ),
    Rule(
        "follows",
        "crash",
        "all ends of ranks only follow from another rank's end, or from the network",
        "transient: no node is to blame",
        "restart",
        _follows,
    ),
    Rule(
        "gpu-in-use",
        "crash",
        "CUDA out of memory on one node, and a process that is not the job's holds most of the "
        "GPU's memory",
        "unknown: the node is tested first",
        "test first",
        _gpu_in_use,
    ),
    Rule(
        "host-oom",
        "crash",
        "the kernel or Slurm says that it ended a rank's process because memory was used up",
        "the program is to blame, and no node: lower its memory, or ask for more (--mem)",
        "stop",
        _host_oom,
    ),
    Rule(
        "program-error",
        "crash",
        "a signature that blames the program, its settings or its data",
        "the program is to blame, and no node",
        "stop",
        _user,
    ),
    Rule(
        "killed",
        "crash",
        "a rank is killed by SIGKILL, and no record on its node shows why",
        "unknown: mostly memory that is used up, or a person",
        "exchange",
        _killed,
    ),
    Rule(
        "signal",
        "crash",
        "a rank is killed by another signal, and no known error names the cause",
        "unknown: the program, its data or the machine",
        "exchange",
        _signal,
    ),
    Rule(
        "exit-code",
        "crash",
        "a rank ends with an exit code, and no known error names the cause",
        "the program is to blame, and no node",
        "stop",
        _exit,
    ),
)
