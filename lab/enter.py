"""Run one command inside a node: `python -I -S enter.py SOCKET NODE UID CWD -- argv…`.

A program of its own, with few imports, because every step into a node pays for its start. It asks
the lab's keeper for the node's namespaces, forks into them and becomes a transparent parent:
signals are passed on, and it ends as its child ended (same exit code or same signal). Exit codes
of its own: 125 no way into the node, 126 command not executable, 127 command not found.
"""

import ctypes
import os
import signal
import socket
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_SI_KERNEL = 0x80
_CLONE_NEWPID = 0x20000000
_PASSED_ON = frozenset(
    getattr(signal, f"SIG{name}")
    for name in ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "ALRM", "CONT", "WINCH")
)


def main(argv: list[str]) -> None:
    sock, node, uid, cwd = argv[:4]
    command = argv[5:]
    libc = ctypes.CDLL(None, use_errno=True)
    namespaces = _ask(sock, node)
    watched = _PASSED_ON | {signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    _setns(libc, namespaces["pid"], _CLONE_NEWPID)
    pid = os.fork()
    if pid == 0:
        for name, fd in namespaces.items():
            if name != "pid":
                _setns(libc, fd, 0)
        try:
            _run(libc, int(uid), cwd, command, before)
        except OSError as error:
            _fail(node, f"{error.strerror}: {error.filename or command[0]}", error)
    for fd in namespaces.values():
        os.close(fd)
    status = _wait(pid, watched)
    if os.WIFSIGNALED(status):
        _die_of(os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def _ask(sock: str, node: str) -> dict[str, int]:
    names = ("pid", "net", "uts", "ipc", "mnt", "time")  # an old kernel has no "time"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.settimeout(10)
        try:
            link.connect(sock)
            link.send(b'{"op":"enter","node":"%s"}' % node.encode())
            reply, fds, _, _ = socket.recv_fds(link, 4096, len(names))
        except OSError as error:
            print(f"lab: cannot enter {node}: {error.strerror or error}", file=sys.stderr)
            sys.exit(125)
    if len(fds) < len(names) - 1:
        print(f"lab: cannot enter {node}: {reply.decode()}", file=sys.stderr)
        sys.exit(125)
    return dict(zip(names, fds, strict=False))


def _setns(libc: ctypes.CDLL, fd: int, kind: int) -> None:
    if libc.setns(fd, kind) != 0:
        errno = ctypes.get_errno()
        print(f"lab: setns: {os.strerror(errno)} (did the node just die?)", file=sys.stderr)
        sys.stderr.flush()
        os._exit(125)


def _run(libc: ctypes.CDLL, uid: int, cwd: str, command: list[str], mask: set[int]) -> NoReturn:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    # After the change of user, which clears it: if the parent is killed, the command ends too.
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.chdir(cwd)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.execvp(command[0], command)


def _fail(node: str, text: str, error: OSError) -> NoReturn:
    print(f"lab: {node}: {text}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _wait(pid: int, watched: frozenset[signal.Signals]) -> int:
    while True:
        info = signal.sigwaitinfo(watched)
        if info.si_signo != signal.SIGCHLD:
            # The kernel sends a terminal's signal to the whole group, so the child has it already.
            if info.si_code != _SI_KERNEL:
                _send(pid, info.si_signo)
            continue
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended == pid:
            return status


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:  # it just ended; its SIGCHLD is next
        pass


def _die_of(number: int) -> NoReturn:
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(128 + number)


if __name__ == "__main__":
    main(sys.argv[1:])
