"""The process that tests: one on each node (or in each task slot), told what to do over TCP.

``python -P -m health.active.worker.main`` with ROBUST_TEST_SERVER=host:port, ROBUST_TEST_KEY=hex
and ROBUST_TEST_NODE=name, also ROBUST_TEST_LOCAL (slot, default 0) and ROBUST_TEST_LIFE (seconds
that the coordinator may be silent, default 900). It ends with its parent, with its connection, when
told to, and when its life is over, also in the middle of a test. Exit code 0, 1: the coordinator
could not be reached, 2: not started as above.

torch is imported after the first message, so that the coordinator knows which workers are coming.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from health.active.worker.env import WorkerSettings, prepare, take_environment
from health.active_tests import BY_NAME, LEVELS, Level, Measured
from robust_slurm.frames.wire import Codec, WireError

CONNECT_S = 30.0
_PR_SET_PDEATHSIG = 1


class CoordinatorLink:
    """The connection to the coordinator: JSON objects both ways. Raises OSError, WireError."""

    def __init__(self, host: str, port: int, key: bytes) -> None:
        self._socket = socket.create_connection((host, port), timeout=CONNECT_S)
        self._codec = Codec(key, server=False)
        self._got: list[bytes] = []
        self._socket.sendall(self._codec.preface())
        while not self._codec.ready:
            self._receive()
        self._socket.settimeout(None)  # from here on our life is the limit
        self.host = str(self._socket.getsockname()[0])

    def send(self, message: Mapping[str, Any]) -> None:
        self._socket.sendall(self._codec.seal(json.dumps(message).encode()))

    def next(self) -> dict[str, Any]:
        """The next message. EOFError when the coordinator has closed."""
        while not self._got:
            self._receive()
        message = json.loads(self._got.pop(0))
        if not isinstance(message, dict):
            raise WireError("not a JSON object")
        return message

    def _receive(self) -> None:
        data = self._socket.recv(1 << 16)
        if not data:
            raise EOFError("the coordinator has closed the connection")
        self._got += self._codec.feed(data)

    def end_with_it(self) -> None:
        """End this process when the coordinator goes, whatever it is doing then."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)

        def watch() -> None:
            poll.poll()
            os._exit(0)

        threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    """Serve until the end. Does not return once torch is imported: its threads may hang."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for a job's ranks, and sent to all its steps
    for number in (signal.SIGALRM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM, signal.SIGINT])
    try:
        started = take_environment()
    except ValueError as err:
        print(
            f"health.active.worker.main: {err}; start it with robust-health test", file=sys.stderr
        )
        return 2
    _live(started.life)
    where = f"{started.host} port {started.port}"
    try:
        link = CoordinatorLink(started.host, started.port, started.key)
        link.send({"hello": {"node": started.node, "local": started.local, "pid": os.getpid()}})
    except (OSError, EOFError, WireError) as err:
        print(
            f"health.active.worker.main: on {started.node}: the coordinator at {where} cannot be "
            f"reached: {err}; check that this node can connect to it",
            file=sys.stderr,
        )
        return 1
    link.end_with_it()
    prepare(link.host)
    try:
        _work(link, started)
    except (OSError, EOFError, WireError):
        pass  # the coordinator has gone
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _work(link: CoordinatorLink, started: WorkerSettings) -> None:
    try:
        worker = Worker(started.node, link.host)
    except Exception as err:  # noqa: BLE001 - whatever keeps torch from working here
        link.send({"unable": _unable(err)})
        return
    link.send({"ready": worker.about()})
    worker.serve(link, started.life)


def _unable(err: Exception) -> str:
    said = " ".join(str(err).split())[:300]
    if isinstance(err, ImportError):
        return (
            f"torch cannot be imported: {type(err).__name__}: {said}; install it for "
            f"{sys.executable}, or name the job's own Python"
        )
    return f"torch cannot be used: {type(err).__name__}: {said}"


def _live(seconds: float) -> None:
    """The kernel ends this process after so long: also when it hangs and holds Python's lock."""
    signal.setitimer(signal.ITIMER_REAL, seconds)


class Worker:
    """The tests, on this process's devices. Its making imports torch, and raises what that does."""

    def __init__(self, node: str, host: str) -> None:
        gc.disable()  # what is imported is no garbage; looked through, it takes twice as long
        import torch

        from health.active.worker import bitwise, collective, device, gemm, links, memory

        gc.freeze()
        gc.enable()
        self._node = node
        self._host = host
        self._torch = torch
        self._collective = collective
        self._failed = device.failed
        self._devices = devices = device.devices()
        self._store: Any = None  # what the next pair meets at
        device.use_all_cores()

        def aligned(task: WorkerTask) -> list[Measured]:
            steps = bitwise.STEPS[task.level]
            return bitwise.run(devices, bitwise.MODELS, steps, task.seconds, task.seed)

        self._tests: dict[str, Callable[[WorkerTask], list[Measured]]] = {
            "bitwise": aligned,
            "gemm": lambda task: gemm.run(devices, task.seconds, task.seed),
            "memory": lambda task: memory.run(devices, task.level, task.seconds),
            "links": lambda task: links.run(devices, task.seconds, task.seed),
            "local": lambda task: collective.local(devices, task.seconds, task.seed, task.wait),
            "pair": self._together,
        }

    def about(self) -> dict[str, Any]:
        return {
            "torch": str(self._torch.__version__),
            "backend": self._collective.backend(self._devices),
            "devices": [device.name for device in self._devices],
            "models": [device.model for device in self._devices],
            "host": self._host,
        }

    def serve(self, link: CoordinatorLink, life: float) -> None:
        """Run the requested tests in turn, until asked to quit. Raises OSError, WireError."""
        while True:
            _live(life)
            asked = link.next()
            if asked.get("quit"):
                return
            seconds = asked.get("seconds")
            _live(life + (2 * seconds if isinstance(seconds, int | float) else 0))
            link.send({"id": asked.get("id"), **self.answer(asked)})

    def answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to one message, without its id."""
        name = str(asked.get("test", ""))
        try:
            if name == "listen":
                self._store = None  # end the one of a test that was not run
                self._store = self._collective.listen(self._host)
                return {"port": self._store.port}
            if name not in self._tests:
                known = ", ".join(self._tests)
                raise ValueError(
                    f"no such test; this version has {known}: use the same version on all nodes"
                )
            found = self._tests[name](task_of(name, asked))
        except Exception as err:  # noqa: BLE001 - a test's bug is an answer, not our end
            wrong, error = self._failed(err)
            found = [Measured(name, self._node, wrong=wrong, error=error)]
        self._release()
        return {"measured": [one._replace(node=self._node).as_dict() for one in found]}

    def _release(self) -> None:
        """Give the test's memory back to the GPU, for whoever is next."""
        try:
            if self._devices[0].cuda:
                self._torch.cuda.empty_cache()
        except RuntimeError:
            return  # the GPU has failed, which every test reports

    def _together(self, task: WorkerTask) -> list[Measured]:
        own, self._store = self._store, None
        return self._collective.pair(self._devices, task.asked, own)


class WorkerTask(NamedTuple):
    """A requested test; ``seconds`` comes from the table of tests unless the request has its own.

    ``wait``: seconds that the coordinator waits for the answer; 0: the usual time.
    """

    asked: Mapping[str, Any]
    level: Level
    seconds: float
    seed: int
    wait: float


def task_of(name: str, asked: Mapping[str, Any]) -> WorkerTask:
    """Read a request as a task. Raises ValueError."""
    level = asked.get("level", "quick")
    if level not in LEVELS:
        raise ValueError(f"level {level!r} is none of {', '.join(LEVELS)}")
    seconds = float(asked.get("seconds", BY_NAME[name].seconds[level]))
    seed = int(asked.get("seed", 0))
    wait = float(asked.get("wait", 0.0))
    return WorkerTask({**asked, "seconds": seconds, "seed": seed}, level, seconds, seed, wait)


if __name__ == "__main__":
    sys.exit(main())
