"""The reaper: the lab's one process on the host.

`python -m lab.keeper.reaper NAME LOCK READY OWNER`

It builds the fake NVML if there are GPUs, starts the keeper in a new PID namespace and waits for
the end of one of three: the keeper, the owner (a process id, or 0 for none), or itself by SIGTERM.
Then it kills the keeper, whose end is the end of every process, mount, link and namespace of the
lab, and removes the lab's directory. If the reaper itself is killed the keeper does the same.
"""

import os
import selectors
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec

from lab import linux
from lab.errors import LabError
from lab.host import remove
from lab.keeper import control
from lab.machine import fake_nvml
from lab.spec import ROOT, LabSpec


def main(name: str, lock: int, ready: int, owner: int) -> int:
    """`lock` and `ready` are inherited descriptors; returns the exit code."""
    spec = msgspec.json.decode((ROOT / name / "lab.json").read_bytes(), type=LabSpec)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    owner_fd = os.pidfd_open(owner) if owner else -1
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(spec.control_socket))
    spec.control_socket.chmod(0o600)
    listener.listen(64)
    try:
        if spec.gpus:
            fake_nvml.make_cache(fake_nvml.build(spec.node_dir / "gpu"), spec.loader_cache)
    except (LabError, OSError, subprocess.SubprocessError) as error:
        remove(spec.dir)
        os.write(ready, f"{error}".encode()[:4000])  # fails if the owner is gone
        return 1
    life_r, life_w = os.pipe()
    linux.unshare(linux.CLONE_NEWPID)
    pid = os.fork()
    if pid == 0:
        os.close(life_w)
        if owner_fd >= 0:
            os.close(owner_fd)
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, set())
            os.set_inheritable(lock, False)
            os.set_inheritable(ready, False)
            control.run(spec, listener, life_r, ready, lambda: _clear_after_murder(spec.dir))
        finally:
            os._exit(1)
    os.close(life_r)
    os.close(ready)
    listener.close()
    _wait_for_end(pid, owner_fd)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    remove(spec.dir)
    return 0


def _wait_for_end(keeper_pid: int, owner_fd: int) -> None:
    # SIGTERM goes through a pipe: the mask keeps it pending until the handler may run.
    wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_w)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    with selectors.DefaultSelector() as selector:
        selector.register(os.pidfd_open(keeper_pid), selectors.EVENT_READ)
        selector.register(wake_r, selectors.EVENT_READ)
        if owner_fd >= 0:
            selector.register(owner_fd, selectors.EVENT_READ)
        selector.select()


def _clear_after_murder(directory: Path) -> None:
    os.kill(-1, signal.SIGKILL)
    signal.alarm(10)  # the default action ends this process, and with it what would not die
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:  # nobody is left who could write
        pass
    remove(directory)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
