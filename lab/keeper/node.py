"""A node's first process: builds the node's view, starts its daemons, reaps its orphans.

It is PID 1 of the node's own PID namespace, so when it is killed the kernel kills the node.
"""

import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence

from lab import linux
from lab.daemon import start_daemon
from lab.errors import LabError
from lab.keeper.mounts import Cover, build_view
from lab.kernel import uml
from lab.slurm import accounting
from lab.spec import HEAD, NETMASK, SLURMCTLD_PORT, UID, LabSpec, address

NAMESPACES = (
    linux.CLONE_NEWPID
    | linux.CLONE_NEWNS
    | linux.CLONE_NEWNET
    | linux.CLONE_NEWUTS
    | linux.CLONE_NEWIPC
)
STOP_ALL = signal.SIGUSR1
CONTINUE_ALL = signal.SIGUSR2
KERNEL = "kernel"
_START_S = 20.0
_ACCOUNTING_S = 60.0  # with a new database


def spawn(
    spec: LabSpec, node: str, covers: Sequence[Cover], age: float
) -> tuple[int, socket.socket]:
    """Start a node's first process, ``age`` seconds after its boot; its pid, and a socket to it.

    The process sends b"view" when its mounts are done, waits for b"go" (its eth0 is there), and
    sends b"ready" when its daemons run; anything else it sends is an error text.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # The pid has a pipe of its own: the process may send b"view" before its pid is written.
    pid_r, pid_w = os.pipe()
    middle = os.fork()
    if middle == 0:
        # unshare(NEWPID) is for children only, hence a process in between.
        try:
            ours.close()
            linux.set_uptime(age)
            linux.unshare(NAMESPACES)
            pid = os.fork()
            if pid != 0:
                os.write(pid_w, str(pid).encode())
                os._exit(0)
            _main(spec, node, covers, theirs)
        except (OSError, LabError) as error:
            theirs.send(f"{error}".encode())
        except BaseException:  # noqa: BLE001 - a forked child must never return to the caller
            theirs.send(traceback.format_exc().encode()[-4000:])
        finally:
            os._exit(1)
    theirs.close()
    os.waitpid(middle, 0)
    text = os.read(pid_r, 32) if select.select([pid_r], [], [], 0)[0] else b""
    os.close(pid_r)
    os.close(pid_w)
    ours.settimeout(spec.patience * (_ACCOUNTING_S if spec.accounting else _START_S))
    if not text:
        raise OSError(f"node {node} did not start: {ours.recv(4096).decode()}")
    return int(text), ours


def _main(spec: LabSpec, node: str, covers: Sequence[Cover], link: socket.socket) -> None:
    watched = {signal.SIGCHLD, STOP_ALL, CONTINUE_ALL}
    signal.pthread_sigmask(signal.SIG_SETMASK, watched)
    keep = link.fileno()
    os.closerange(3, keep)
    os.closerange(keep + 1, 4096)
    os.setsid()
    linux.sethostname(node)
    build_view(spec, node, covers)
    link.send(b"view")
    if link.recv(16) != b"go":  # the head's daemons start first, however long that takes
        return
    linux.set_link("lo", True)
    if not (spec.kernel and node != HEAD):  # else the guest has the address
        linux.set_address("eth0", address(node), NETMASK)
    linux.set_link("eth0", True)
    os.chdir("/")
    daemons = start_head(spec) if node == HEAD else start_compute(spec, node)
    link.send(b"ready")
    link.close()
    _serve(node, daemons, watched)


def _serve(node: str, daemons: dict[int, str], watched: set[signal.Signals]) -> None:
    while True:
        number = signal.sigwait(watched)
        # kill(-1) reaches every other process of this PID namespace in one call.
        if number == STOP_ALL:
            _kill_all(signal.SIGSTOP)
        elif number == CONTINUE_ALL:
            _kill_all(signal.SIGCONT)
        for pid, status in _reap():
            if pid in daemons:
                name = daemons.pop(pid)
                print(f"{node}: {name} ended, wait status {status}", file=sys.stderr)
                sys.stderr.flush()
                if name == KERNEL:  # it halted or panicked: the node is gone
                    os._exit(0)


def _kill_all(number: signal.Signals) -> None:
    try:
        os.kill(-1, number)
    except ProcessLookupError:  # nobody else here
        pass


def _reap() -> list[tuple[int, int]]:
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, status))


def start_compute(spec: LabSpec, node: str) -> dict[int, str]:
    if spec.kernel:
        (spec.node_dir / "uml").mkdir(mode=0o755)
        os.chown(spec.node_dir / "uml", UID, UID)
        return {start_daemon(spec, f"kernel-{node}", uml.command(spec, node)): KERNEL}
    pid = start_daemon(spec, f"slurmd-{node}.out", ["slurmd", "-D", "-N", node])
    return {pid: "slurmd"}


def start_head(spec: LabSpec) -> dict[int, str]:
    sock = spec.munge_socket
    munged = [
        "munged",
        "--foreground",
        f"--socket={sock}",
        f"--key-file={spec.dir}/etc/munge.key",
        f"--seed-file={spec.node_dir}/munge.seed",
        f"--pid-file={spec.node_dir}/munged.pid",
        "--num-threads=2",
    ]

    def start(name: str, argv: list[str], answers: Callable[[], bool]) -> int:
        pid = start_daemon(spec, name, argv)
        _wait(name, pid, answers)
        return pid

    found = {start("munged", munged, sock.exists): "munged"}
    if spec.accounting:
        found |= accounting.start(spec, start)
    pid = start("slurmctld.out", ["slurmctld", "-D"], _controller_answers)
    return found | {pid: "slurmctld"}


def _controller_answers() -> bool:
    try:
        socket.create_connection((address(HEAD), SLURMCTLD_PORT), timeout=1).close()
    except OSError:
        return False
    return True


def _wait(name: str, pid: int, answers: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _START_S
    while not answers():
        if os.waitpid(pid, os.WNOHANG)[0]:
            raise ChildProcessError(f"{name} ended at its start")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} did not answer in {_START_S:.0f} s")
        time.sleep(0.005)
