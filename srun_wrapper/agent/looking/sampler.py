"""Sample a slot's activity: CPU, I/O, and the states and Python stacks of its processes.

Only asked for when steps stop coming, so it may cost a little. py-spy runs as the same user.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from robust_slurm.text import one_line
from srun_wrapper.agent import filesystems
from srun_wrapper.agent.looking import fallback, kernel
from srun_wrapper.agent.looking.bounds import bounded
from srun_wrapper.agent.looking.dumps import DEADLINE, Dump, dump_all
from srun_wrapper.agent.looking.roles import (
    MOST,
    TreeProcess,
    is_stopped,
    members,
    roles,
    seen_role,
    steppers,
)
from srun_wrapper.agent.looking.work import tracer, used
from srun_wrapper.agent.processes import process_tree
from srun_wrapper.protocol.looking_messages import LAUNCHER, LOADER, RANK, ROLES, Look
from srun_wrapper.protocol.messages import SlotActivity

STILL = ("T", "t", "D")  # states in which a process answers no signal
GLANCE = 1024  # bytes of a rank in a quick look
SHOWN = 12  # innermost frames beside the looks: all slots of a node come in one message


def sample(
    local: int,
    pid: int,
    epoch: int,
    tree: Sequence[int],
    window: float,
    budget: int,
    directory: Path,
    ask: bool,
) -> SlotActivity:
    """Sample the tree of ``pid`` over a window.

    ``budget``: bytes for the looks at its processes; ``directory``: of the files in which ranks
    answer; ``ask``: send a signal to processes of which py-spy gives no stack, which is not done to
    a job that may be healthy.
    """
    seen = members(tree, pid)
    named = dict(list(roles(seen, pid, steppers(directory, epoch)).items())[:MOST])
    ranks = [p for p, role in named.items() if role == RANK]
    woken = kernel.woken_in_write(ranks)
    first = dump_all(ranks)
    pids = [member.pid for member in seen]
    before = process_tree.usage(pids)
    if not is_stopped(seen, ranks):  # a stopped rank does nothing
        threading.Event().wait(window)
    after = process_tree.usage(pids)
    second = dump_all(list(named))
    # Only a rank that was read twice by the same means shows whether it moves.
    mains = [(main_of(first, p), main_of(second, p)) for p in ranks]
    for p in ranks:  # a process that runs may not be read whole the second time
        second[p] = second[p] if second[p].stacks else first[p]
    if ask:
        _ask_the_silent(second, seen, directory)
    now = members(tree, pid)
    by_pid = {member.pid: member for member in now}
    looks = [
        by_pid[p].seen(seen_role(role, second[p].stacks), second[p].stacks, second[p].failed)
        for p, role in named.items()
        if p in by_pid
    ]
    for look in looks:
        note_kernel(look)
    awake = "S" if after.state == "T" else after.state  # a stopped helper says nothing
    return SlotActivity(
        local,
        "T" if is_stopped(now, ranks) else awake,
        max(0.0, after.cpu - before.cpu),
        max(0, after.io - before.io) + kernel.drained(woken, kernel.woken_in_write(ranks)),
        next((new for old, new in mains if old and new), ())[:SHOWN],
        any(old and new and old != new for old, new in mains),
        bounded(sorted(looks, key=_weight), budget),
        used(pids, ranks),
        tracer(pids),
    )


def note_kernel(look: Look) -> None:
    """Note for which device or file a rank or its loader waits in state D, else a rank's killed
    children."""
    if look.role in (RANK, LOADER) and look.state == "D":
        device = one_line(kernel.waited_device(look.pid), kernel.WORD)
        look.device = device if look.role == RANK else ""
        if path := device or one_line(kernel.waited_file(look.pid), kernel.WORD):
            look.kernel = f"waits for {path} in state D"
    elif look.role == RANK:
        look.kernel = kernel.killed_children(look.pid)


def glance(
    local: int, pid: int, epoch: int, tree: Sequence[int], budget: int, directory: Path
) -> SlotActivity:
    """Read the innermost frames of each rank once, and no other process."""
    seen = members(tree, pid)
    named = roles(seen, pid, steppers(directory, epoch))
    named = dict([(p, r) for p, r in named.items() if r in (RANK, LAUNCHER)][:MOST])
    dumps = dump_all([p for p, role in named.items() if role == RANK])
    looks = [
        _seen_waiting(member, named[member.pid], dump)
        for member in seen
        if member.pid in named and (dump := dumps.get(member.pid, Dump()))
    ]
    own = next((member.state for member in seen if member.pid == pid), "R")
    looks.sort(key=_weight)
    return SlotActivity(local, own, 0.0, 0, looks=bounded(looks, min(budget, GLANCE * len(looks))))


def _seen_waiting(member: TreeProcess, role: str, dump: Dump) -> Look:
    """Return a quick look, with the file system for which a rank waits."""
    look = member.seen(role, dump.stacks[:1], dump.failed)
    if role == RANK and (path := kernel.waited_file(member.pid)):
        look.mount = one_line(filesystems.point_of(member.pid, path), kernel.WORD)
    return look


def _weight(look: Look) -> tuple[int, int, int]:
    return ROLES.index(look.role), look.rank, look.pid


def main_of(dumps: dict[int, Dump], pid: int) -> tuple[str, ...]:
    """Return the main thread's frames; () if they are not known."""
    found = dumps[pid].stacks if pid in dumps else ()
    return found[0].frames if found else ()


def _ask_the_silent(dumps: dict[int, Dump], seen: Sequence[TreeProcess], directory: Path) -> None:
    """Ask the processes of which py-spy has given no stack, one by one."""
    parents = {member.pid: member.parent for member in seen}
    states = {member.pid: member.state for member in seen}
    until = time.monotonic() + DEADLINE
    for pid, dump in dumps.items():
        if dump.stacks or states.get(pid, "") in STILL or time.monotonic() >= until:
            continue
        above, parent = [], parents.get(pid, 0)
        while parent in parents and parent not in above:
            above.append(parent)
            parent = parents[parent]
        if answer := fallback.ask(pid, above, directory):
            dumps[pid] = Dump(answer)
