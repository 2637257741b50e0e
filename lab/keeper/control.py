"""The keeper's process and its control socket: requests, one JSON object each, one at a time."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from lab import linux
from lab.errors import LabError
from lab.keeper import outages
from lab.keeper.keeper import Keeper
from lab.keeper.lab_node import LabNode, find
from lab.spec import HEAD, LabSpec

_NS_NAMES = ("pid", "net", "uts", "ipc", "mnt", "time")  # in the order lab/enter.py wants them
# Its processes are no processes of the host's kernel, and it has the hardware that it has.
_KERNEL_OPS = ("crash", "partition", "slow", "outage", "reconnect", "heal")
_WAIT_S = 10.0


def run(
    spec: LabSpec,
    listener: socket.socket,
    lifeline: int,
    ready: int,
    orphaned: Callable[[], None],
) -> NoReturn:
    """Be the keeper: PID 1 of a new PID namespace. Writes "ok" or an error text to `ready`.

    `lifeline` is a pipe that ends with the reaper; `orphaned` is called then.
    """
    try:
        linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWNET)
        linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
        linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV)
        keeper = Keeper(spec)
        keeper.build()
    except (LabError, OSError, subprocess.SubprocessError) as error:
        os.write(ready, f"{error}".encode()[:4000])
        os._exit(1)
    os.write(ready, b"ok")
    os.close(ready)
    serve(keeper, listener, lifeline)
    orphaned()
    os._exit(0)


def serve(keeper: Keeper, listener: socket.socket, lifeline: int) -> None:
    """Answer requests, and reap, until the reaper is gone: the end of the pipe `lifeline`."""
    wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    with selectors.DefaultSelector() as selector:
        for fd in (listener.fileno(), lifeline, wake_r):
            selector.register(fd, selectors.EVENT_READ)
        keeper.reap()
        while True:
            ready = {key.fd for key, _ in selector.select(outages.next_end(keeper.nodes))}
            outages.end_due(keeper.nodes)
            if wake_r in ready:
                os.read(wake_r, 4096)
            keeper.reap()
            if lifeline in ready:
                return
            if listener.fileno() in ready:
                _accept(keeper, listener)


def _accept(keeper: Keeper, listener: socket.socket) -> None:
    link, _ = listener.accept()
    with link:
        link.settimeout(_WAIT_S)
        try:
            request = json.loads(link.recv(65536))
            if request.get("op") == "enter":
                _send_namespaces(keeper, link, find(keeper.nodes, str(request.get("node"))))
                return
            reply = _answer(keeper, request)
        except KeyError as error:
            reply = {"error": f"the request says no {error}"}
        except (AttributeError, LabError, OSError, TypeError, ValueError) as error:
            reply = {"error": f"{error}"}
        try:
            link.send(json.dumps(reply).encode())
        except OSError as error:  # the asker is gone
            print(f"no one to answer: {error}", file=sys.stderr)


def _answer(keeper: Keeper, request: dict[str, Any]) -> dict[str, Any]:
    op = request["op"]
    if op == "state":
        found = keeper.nodes.values()
        return {"nodes": {n.name: {"state": n.state, "died": n.died} for n in found}}
    if keeper.spec.kernel and op not in _KERNEL_OPS and request.get("node") != HEAD:
        able = ", ".join(_KERNEL_OPS)
        raise LabError(f"{op}: a node with a kernel of its own can {able}")
    if op == "hang_rank":
        return keeper.hang_rank(str(request["job"]), str(request["rank"]))
    faults: dict[str, Callable[[LabNode], dict[str, Any]]] = {
        "crash": keeper.crash,
        "hang": keeper.hang,
        "partition": keeper.partition,
        "heal": keeper.heal,
    }
    if op in outages.OPS:
        names, seconds = [str(name) for name in request["nodes"]], float(request["seconds"])
        return {"time": outages.serve(keeper.nodes, op, names, seconds, str(request["path"]))}
    one = find(keeper.nodes, str(request["node"]))
    if op == "daemon":
        name, action = str(request["daemon"]), str(request["action"])
        return {"time": outages.daemon(one, name, action)}
    if one.name == HEAD and op != "heal":
        raise LabError("the head is what the lab stands on: no faults there, but for its daemons")
    if op in faults:
        return faults[op](one)
    if op == "slow":
        return keeper.slow(
            one, str(request["rate"]), float(request["delay"]), float(request["loss"])
        )
    one.must_run()
    at = time.time()
    assert one.gear is not None
    one.gear.serve(request)
    return {"time": at}


def _send_namespaces(keeper: Keeper, link: socket.socket, one: LabNode) -> None:
    one.must_run()
    space = Path(f"/proc/{one.pid}/ns")
    fds = [os.open(space / n, os.O_RDONLY) for n in _NS_NAMES if (space / n).exists()]
    socket.send_fds(link, [b"{}"], fds)
    for fd in fds:
        os.close(fd)
