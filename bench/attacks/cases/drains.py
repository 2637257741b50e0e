"""Attacks that try to have healthy nodes drained as if the node itself were at fault."""

from __future__ import annotations

import array
import mmap
import os
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bench.attacks.attack import Attack, Got
from bench.attacks.room import MALLORY, QUIET, Ended, Room, become
from bench.common import BenchError
from lab import linux
from lab.machine import fuse

_FOR_EVER = 1e6
_OTHERS = [*QUIET, "services", "slurmd", "machine_check", "pcie_aer", "nvme_smart", "bmc"]
"""Checks that an attack on one of the host's leaves out."""
_LINES = (
    # A process that is called "EDAC MC0: 1 UE ", whose program is "x on y (z)", and one that is
    # called "Oops: 0[#1] SMP" in a cgroup without memory.
    "6,101,9000000000,-;EDAC MC0: 1 UE [4711]: segfault at 0 ip 0 sp 0 error 6 in x on y (z)[0,1]",
    "4,102,9000000001,-;EDAC MC0: 1 UE  invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0",
    "4,103,9000000002,-;Oops: 0[#1] SMP invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0",
    "4,104,9000000003,-;Memory failure: invoked oom-killer: due to hardware memory corruption",
)


def _apart(work: Callable[[], object], uid: int = MALLORY) -> int:
    """Start a user's process that init adopts, as it does what a job leaves; return its number."""
    read, write = os.pipe()
    if (between := os.fork()) == 0:
        if new := os.fork():
            os.write(write, b"%d" % new)
            os._exit(0)
        os.close(read)
        os.close(write)
        try:
            become(uid)
            work()
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(between, 0)
    said = os.read(read, 20)
    os.close(read)
    if not said:
        raise BenchError("no process was started")
    return int(said)


def _held(work: Callable[[Callable[[], None]], object]) -> None:
    """Start a user's process, and wait until it says that it holds what it wants to hold."""
    read, write = os.pipe()

    def ready() -> None:
        os.write(write, b".")

    def run() -> None:
        work(ready)
        time.sleep(_FOR_EVER)

    _apart(run)
    os.close(write)
    if os.read(read, 1) != b".":
        raise BenchError("the user's process did not get as far as that")
    os.close(read)


def _blamed(room: Room, ended: Ended) -> Got:
    """The attack succeeded if a node was drained as class node."""
    nodes = tuple(
        node
        for node in room.drains()
        if any(f"={node} " in line and "robust:node:" in line for line in room.orders())
    )
    reasons = [word for line in room.orders() for word in line.split() if "robust:" in word]
    return Got(
        what=" ".join(reasons)[:200] or ended.said[:200] or "no word",
        drained=nodes,
        succeeded=bool(nodes),
    )


def _tmpfs(where: str, options: str) -> None:
    linux.mount("tmpfs", where, "tmpfs", 0, f"mode=1777,{options}")


def _file(path: str, size: int) -> int:
    """Make a file that has no name any more; return its descriptor."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    Path(path).unlink()
    os.posix_fallocate(fd, 0, size)
    return fd


def _fills_tmp(ready: Callable[[], None]) -> None:
    _file("/tmp/held", 63 << 20)
    ready()


def _unlinked(room: Room) -> Got:
    """Hold a deleted file that fills the node's /tmp."""
    _tmpfs("/tmp", "size=64m")
    room.site(f"disabled = {QUIET}")
    _held(_fills_tmp)
    return _blamed(room, room.gate("health.sweep"))


def _mapped(room: Room) -> Got:
    """Map shared memory, unlink and close it, as PyTorch does."""
    _tmpfs("/dev/shm", "size=64m")
    room.site(f"disabled = {QUIET}")

    def hold(ready: Callable[[], None]) -> None:
        fd = _file("/dev/shm/torch", 63 << 20)
        kept = mmap.mmap(fd, 63 << 20)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, fd)
        ready()
        time.sleep(_FOR_EVER)
        kept.close()

    _held(hold)
    return _blamed(room, room.gate("health.sweep"))


def _in_flight(room: Room) -> Got:
    """Put the descriptor of the file into a socket that nobody reads: no process shows it."""
    _tmpfs("/tmp", "size=64m")
    room.site(f"disabled = {QUIET}")

    def hold(ready: Callable[[], None]) -> None:
        fd = _file("/tmp/held", 63 << 20)
        here, there = socket.socketpair()
        sent = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        here.sendmsg([b"x"], sent)
        os.close(fd)
        ready()
        time.sleep(_FOR_EVER)
        there.close()

    _held(hold)
    return _blamed(room, room.gate("health.sweep"))


def _inodes(room: Room) -> Got:
    """Hold so many deleted files that no inode is left."""
    most = 20_000
    _tmpfs("/tmp", f"size=512m,nr_inodes={most}")
    room.site(f"disabled = {QUIET}")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    def hold(ready: Callable[[], None]) -> None:
        try:
            while True:
                os.open("/tmp/one", os.O_RDWR | os.O_CREAT)
                Path("/tmp/one").unlink()
        except OSError:  # no more inodes, or descriptors
            ready()

    for _ in range(most // (files - 50) + 1):
        _held(hold)
    return _blamed(room, room.gate("health.sweep"))


def _killed_in_d(pids: list[int], wanted: int) -> None:
    """Kill these; BenchError unless so many of them stay, in state D."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    time.sleep(1.0)
    left = []
    for pid in pids:
        try:
            left += list(Path(f"/proc/{pid}/task").iterdir())
        except OSError:
            continue
    states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in left]
    if states.count("D") < wanted:
        raise BenchError(f"{states.count('D')} threads are in state D, not {wanted}")


def _fuse_mount(room: Room) -> tuple[Path, int]:
    """Mount a user's own file system as fusermount does; return where, and its other end."""
    where = room.directory("mnt", MALLORY)
    device = os.open("/dev/fuse", os.O_RDWR)
    own = f"fd={device},rootmode=40000,user_id={MALLORY},group_id={MALLORY},default_permissions"
    linux.mount("own", str(where), "fuse", linux.MS_NOSUID | linux.MS_NODEV, own)
    return where, device


class _Deaf(fuse._Server):
    """A server that never answers a mkdir."""

    def attributes(self, node: int) -> bytes:
        return struct.pack("<QII", 3600, 0, 0) + self.attr(node)

    def entry(self, node: int) -> bytes:
        return struct.pack("<4Q2I", node, 0, 3600, 3600, 0, 0) + self.attr(node)

    def mkdir(self, node: int, body: bytes, who: tuple[int, int]) -> bytes:
        time.sleep(_FOR_EVER)
        return super().mkdir(node, body, who)


def _deadlock(room: Room) -> Got:
    """Let a FUSE server wait for itself, and another process for the lock that it holds."""
    room.site(f"disabled = {[*_OTHERS, 'disk']}")
    where, device = _fuse_mount(room)

    def serve() -> None:
        server = _Deaf(device)
        server.probed = 1
        server.nodes[1].uid = server.nodes[1].gid = MALLORY
        threading.Thread(target=server.run, daemon=True).start()
        list(where.iterdir())
        (where / "a").mkdir()

    holder = _apart(serve)
    os.close(device)
    time.sleep(1.0)
    behind = _apart(lambda: (where / "b").mkdir())
    time.sleep(0.7)
    _killed_in_d([holder, behind], 2)
    try:
        return _blamed(room, room.gate("health.sweep"))
    finally:
        room.program(["/bin/umount", "-f", where])  # else they wait for ever


def _pipe(room: Room) -> Got:
    """Hold a pipe's lock by a splice that never ends, and have another process wait for it."""
    room.site(f"disabled = {[*_OTHERS, 'disk']}")
    read, write = os.pipe()
    here, there = socket.socketpair()
    os.write(write, b"x" * 4096)

    def splice() -> None:
        here.setblocking(False)
        try:
            while True:
                here.send(b"y" * 65536)
        except BlockingIOError:
            here.setblocking(True)
        os.splice(read, here.fileno(), 4096)

    holder = _apart(splice)
    time.sleep(0.7)
    behind = _apart(lambda: os.read(read, 1))
    time.sleep(0.5)
    try:
        _killed_in_d([behind], 1)
        return _blamed(room, room.gate("health.sweep"))
    finally:
        os.kill(holder, signal.SIGKILL)
        there.close()


def _many(room: Room) -> Got:
    """Fill the disks of many nodes: their sweeps may drain few of them for one user."""
    _tmpfs("/tmp", "size=64m")
    room.site(f"disabled = {QUIET}")
    _held(_fills_tmp)
    for number in range(1, 7):
        ended = room.gate("health.sweep", {"SLURMD_NODENAME": f"n{number}"})
    drained = room.drains()
    return Got(
        what=f"{len(drained)} of 6 nodes: {ended.said}"[:200],
        drained=drained if len(drained) > 2 else (),
        succeeded=len(drained) > 2,
    )


def _names(room: Room) -> Got:
    """Have the kernel write lines that begin with a process's name, which looks like a fault."""
    log = room.top / "kmsg"
    log.write_text("".join(f"{line}\n" for line in _LINES))
    off = set(_OTHERS) - {"machine_check", "kernel_log"}
    room.site(f"disabled = {sorted(off)}")
    linux.bind(str(log), "/dev/kmsg")
    return _blamed(room, room.gate("prolog.cli", room.job()))


def _waiting() -> int:
    """The processes in state D."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            found += path.read_text().rpartition(")")[2].split()[0] == "D"
        except OSError:
            continue
    return found


def _stalled_mount(room: Room) -> Got:
    """Do the same on a mount of a kind that the gate probes."""
    return _stalled(room, "fuse.lab", "mounts")


def _stalled_killable(room: Room) -> Got:
    """Do the same so that whoever waits can be killed, and nothing of the stall is left behind."""
    return _stalled(room, stop=signal.SIGSTOP)


def _stalled(
    room: Room, kind: str = "fuse", check: str = "", stop: signal.Signals = signal.SIGUSR1
) -> Got:
    """Stall the state directory: sweeps, an epilog and a prolog must not drain for their own.

    They tell of it once, except that the check of mounts tells each time.
    """
    off = [one for one in (*_OTHERS, "disk") if one != check]
    room.site(f"disabled = {off}")
    state = room.top / "state"
    device = os.open("/dev/fuse", os.O_RDWR)
    linux.mount("lab", str(state), kind, 0, fuse.options(device))
    if (server := os.fork()) == 0:
        fuse.serve(device)
    os.close(device)
    fuse.probe(str(state))
    for name, mode in (("nodes", 0o755), ("jobs", 0o1777)):
        room.directory(f"state/{name}", mode=mode)
    state.chmod(0o755)
    room.gate("health.sweep")
    os.kill(server, stop)
    before, left, warned, code = _waiting(), [], 0, 0
    try:
        for module in ("health.sweep", "health.sweep", "health.sweep", "epilog.cli", "prolog.cli"):
            env = room.job() if module.endswith("cli") else {}
            ended = room.gate(module, env, timeout=120)
            code = code or ended.code
            warned += ended.err.count(str(state))
            left.append(_waiting() - before)
    finally:
        os.kill(server, signal.SIGKILL)
    drained = room.drains()
    return Got(
        what=f"processes left after each run {left}, exit code {code}, {warned} lines about it",
        drained=drained,
        succeeded=bool(drained) or code != 0 or max(left) > 1 or (warned > 1 and not check),
    )


def _attack(name: str, tries: str, run: Callable[[Room], Got], seconds: float = 60.0) -> Attack:
    return Attack(name=name, row="drains", tries=tries, run=run, seconds=seconds)


ATTACKS = [
    _attack(
        "disk_unlinked_file",
        "a deleted file that is still open fills a file system of the node",
        _unlinked,
    ),
    _attack(
        "disk_unlinked_mapping",
        "shared memory that is mapped, unlinked and closed fills /dev/shm",
        _mapped,
    ),
    _attack(
        "disk_file_in_flight",
        "a deleted file whose descriptor waits in a socket fills a file system",
        _in_flight,
    ),
    _attack("disk_unlinked_inodes", "open deleted files use up all inodes", _inodes),
    _attack(
        "disk_many_nodes", "one user's files have the sweeps of many nodes drain them", _many, 180.0
    ),
    _attack(
        "stuck_fuse_deadlock",
        "a FUSE server that waits for itself, and a process behind it, cannot be killed",
        _deadlock,
    ),
    _attack("stuck_pipe_lock", "a process waits for a pipe's lock and cannot be killed", _pipe),
    _attack(
        "kernel_log_names", "processes named like the kernel's messages of a broken node", _names
    ),
    _attack(
        "state_dir_stalled_mount",
        "the same on a mount of a network file system's kind",
        _stalled_mount,
        240.0,
    ),
    _attack(
        "state_dir_stalled_killable",
        "the state directory does not answer, and whoever waits for it can be killed",
        _stalled_killable,
        240.0,
    ),
    _attack(
        "state_dir_stalled",
        "the state directory does not answer: the gate's own children wait",
        _stalled,
        240.0,
    ),
]
