"""Commands in a node with a kernel of its own, where no namespace leads: over its network.

`serve` is the node's side, in its first process. The other side is a program of its own:
`python -I -S agent.py SOCKET NODE UID CWD -- argv…`, as lab/enter.py, whose exit codes it has.

A connection carries the request, one line of JSON, and then frames both ways: a letter, a length
of four bytes, and data. `i` standard input (empty: its end), `s` a signal; `o` and `e` what the
command wrote, `x` how it ended. Only who has a port that root alone can bind is answered.
"""

import ctypes
import errno
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
from typing import NoReturn

PORT = 6899
_ROOTS = 1024  # ports below are root's
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3}
_HEAD = struct.Struct("=cI")
_PASSED_ON = ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "ALRM", "CONT")


# -- in the node ----------------------------------------------------------------------------


def serve(address: str) -> NoReturn:
    """Answer requests for ever, and reap orphans."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps what this process inherits
    listener = socket.create_server((address, PORT), backlog=64)
    while True:
        link, (_, port) = listener.accept()
        if port < _ROOTS and os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                _run(link)
            finally:
                os._exit(0)
        link.close()


def _run(link: socket.socket) -> None:
    stream = link.makefile("rb", buffering=0)
    request = json.loads(_line(stream))
    pipes = [os.pipe() for _ in range(3)]
    pid = os.fork()
    if pid == 0:
        _become(request, pipes)
    os.close(pipes[0][0])
    os.close(pipes[1][1])
    os.close(pipes[2][1])
    fed = threading.Thread(target=_feed, args=(stream, pipes[0][1], pid), daemon=True)
    fed.start()
    outs = {pipes[1][0]: b"o", pipes[2][0]: b"e"}
    ended = os.pidfd_open(pid)
    while outs:
        ready = select.select([*outs, ended], [], [])[0]
        for fd in ready:
            data = os.read(fd, 65536) if fd in outs else b""
            if data:
                _send(link, outs[fd], data)
            elif fd in outs:
                del outs[fd]
        if ready == [ended]:  # what a background process holds open is not waited for
            break
    _send(link, b"x", str(os.waitpid(pid, 0)[1]).encode())


def _become(request: dict[str, object], pipes: list[tuple[int, int]]) -> NoReturn:
    try:
        os.setsid()
        for number, (fd, end) in enumerate(((0, 0), (1, 1), (2, 1))):
            os.dup2(pipes[number][end], fd)
        os.closerange(3, 256)
        uid = int(str(request["uid"]))
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        os.chdir(str(request["cwd"]))
        for name in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(name, signal.SIG_DFL)
        argv = [str(word) for word in request["argv"]]  # type: ignore[attr-defined]
        os.environ.clear()
        os.environ.update(request["env"])  # type: ignore[call-overload]
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"lab: {error.strerror}: {error.filename}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _feed(stream: "socket.SocketIO", stdin: int, pid: int) -> None:
    """Hand the command its input and signals; SIGKILL if the asker is gone."""
    while frame := _receive(stream):
        kind, data = frame
        if kind == b"s":
            os.kill(pid, int(data))
        elif not data:
            os.close(stdin)
        else:
            try:
                os.write(stdin, data)
            except BrokenPipeError:
                continue
    os.killpg(pid, signal.SIGKILL)  # a session of its own


# -- both -----------------------------------------------------------------------------------


def _send(link: socket.socket, kind: bytes, data: bytes) -> None:
    link.sendall(_HEAD.pack(kind, len(data)) + data)


def _receive(stream: "socket.SocketIO") -> tuple[bytes, bytes] | None:
    head = _exactly(stream, _HEAD.size)
    if head is None:
        return None
    kind, size = _HEAD.unpack(head)
    data = _exactly(stream, size)
    return None if data is None else (kind, data)


def _exactly(stream: "socket.SocketIO", size: int) -> bytes | None:
    found = b""
    while len(found) < size:
        try:
            part = stream.read(size - len(found))
        except OSError:
            return None
        if not part:
            return None
        found += part
    return found


def _line(stream: "socket.SocketIO") -> bytes:
    found = b""
    while not found.endswith(b"\n"):
        part = stream.read(1)
        if not part:
            break
        found += part
    return found


# -- on the host ----------------------------------------------------------------------------


def main(argv: list[str]) -> NoReturn:
    sock, address, uid, cwd = argv[:4]
    request = {"argv": argv[5:], "env": dict(os.environ), "uid": uid, "cwd": cwd}
    watched = {signal.Signals[f"SIG{name}"] for name in _PASSED_ON}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        _enter_network(sock)
        link = _connect(address)
        link.sendall(json.dumps(request).encode() + b"\n")
    except OSError as error:
        print(f"lab: cannot enter {address}: {error.strerror or error}", file=sys.stderr)
        sys.exit(125)
    lock = threading.Lock()
    threading.Thread(target=_give_input, args=(link, lock), daemon=True).start()
    threading.Thread(target=_give_signals, args=(link, lock, watched), daemon=True).start()
    stream = link.makefile("rb", buffering=0)
    while frame := _receive(stream):
        kind, data = frame
        if kind == b"x":
            _end_as(int(data))
        _write(1 if kind == b"o" else 2, data)
    print("lab: the node ended", file=sys.stderr)
    sys.stderr.flush()
    os._exit(125)


def _enter_network(sock: str) -> None:
    """Move to the network of the lab's head."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.settimeout(10)
        link.connect(sock)
        link.send(b'{"op":"enter","node":"head"}')
        _, fds, _, _ = socket.recv_fds(link, 4096, 6)
    libc = ctypes.CDLL(None, use_errno=True)
    if len(fds) < 2 or libc.setns(fds[1], 0) != 0:  # the second one is the network
        raise OSError(ctypes.get_errno(), "no way into the lab's network")
    for fd in fds:
        os.close(fd)


def _connect(address: str) -> socket.socket:
    for port in range(_ROOTS - 1, 600, -1):
        try:
            link = socket.create_connection((address, PORT), 10, ("", port))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                raise
            continue
        link.settimeout(None)
        for option, value in _KEEP_ALIVE.items():  # a kernel that is gone says nothing
            link.setsockopt(socket.IPPROTO_TCP, option, value)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return link
    raise OSError(errno.EADDRINUSE, "no free port")


def _give_input(link: socket.socket, lock: threading.Lock) -> None:
    data = b"-"
    while data:
        try:
            data = os.read(0, 65536)
        except OSError:
            data = b""
        with lock:
            _send(link, b"i", data)


def _give_signals(link: socket.socket, lock: threading.Lock, watched: set[signal.Signals]) -> None:
    while True:
        number = signal.sigwait(watched)
        with lock:
            _send(link, b"s", str(int(number)).encode())


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _end_as(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
        os._exit(128 + number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(sys.argv[1:])
