"""Programs that need torch, in forks of one process that has imported it: the import is paid once.

A program runs as under ``python -c``: it is a process of its own with its own arguments and
environment, and ends as Python ends, by its last line, an exception, ``sys.exit`` or a signal.
Nothing of robust_slurm is imported in the process that forks.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType

import writer_by_fork
from places import REPOSITORY, SUPPORT

_LIMIT = 1 << 17  # bytes of a request, program and environment included


class Fork:
    """A program that runs, or ran."""

    def __init__(self, line: socket.socket, pid: int, out: int, err: int) -> None:
        self._line = line
        self._out = out
        self._err = err
        self.pid = pid
        self.returncode: int | None = None

    def wait(self, timeout: float = 200) -> int:
        """Return the exit code, or minus the signal that ended it; kill it after ``timeout`` s."""
        if self.returncode is None:
            self._line.sendall(json.dumps({"wait": self.pid}).encode())
            self._line.settimeout(timeout)
            try:
                self.returncode = int(self._line.recv(_LIMIT))
            except TimeoutError:
                os.kill(self.pid, signal.SIGKILL)
                self._line.settimeout(None)
                self.returncode = int(self._line.recv(_LIMIT))
                raise AssertionError(f"not ended after {timeout} s: {self.err()}") from None
            finally:
                self._line.settimeout(None)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def out(self) -> str:
        """Return its standard output so far."""
        return _contents(self._out)

    def err(self) -> str:
        return _contents(self._err)

    def close(self) -> None:
        self.kill()
        os.close(self._out)
        os.close(self._err)


def _contents(file: int) -> str:
    return os.pread(file, os.fstat(file).st_size, 0).decode()


class TorchForks:
    """The process that forks. Use it as a context; what still runs is killed at its end."""

    def __init__(self, *modules: str, path: str = "") -> None:
        """``modules``: what else to import in the process that forks. ``path``: a directory of
        packages that come before the installed ones."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("ROBUST_", "SLURM_"))}
        before = f"{path}:" if path else ""
        env |= {"PYTHONPATH": f"{before}{REPOSITORY}", "OMP_NUM_THREADS": "1"}
        self._dir = tempfile.TemporaryDirectory(prefix="forks-")
        self.python = writer_by_fork.stand_in(self._dir.name)
        """An interpreter whose writers of durable steps are forks, too."""
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Before the process has imported torch: a writer may be asked for at once.
        with theirs, writer_by_fork.listen(self._dir.name) as writers:
            files = theirs.fileno(), writers.fileno()
            self._server = subprocess.Popen(
                [sys.executable, __file__, *map(str, files), *modules],
                env=env, pass_fds=files, start_new_session=True,
            )  # fmt: skip
        self._env = env
        self._forks: list[Fork] = []

    def __enter__(self) -> TorchForks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for fork in self._forks:
            fork.close()
        self._line.close()
        self._server.wait()
        self._dir.cleanup()

    def start(
        self,
        code: str,
        *argv: str,
        env: Mapping[str, str] | None = None,
        stdin: int | None = None,
        stdout: int | None = None,
    ) -> Fork:
        """Run a program. ``env`` comes on top of ours without what is Slurm's or robust-slurm's.

        ``stdin`` and ``stdout`` are file descriptors; else it reads nothing, and is kept.
        """
        out, err = os.memfd_create("out"), os.memfd_create("err")
        request = {"code": code, "argv": argv, "env": {**self._env, **(env or {})}}
        request["python"] = self.python
        with open(os.devnull, "rb") as nothing:
            files = [
                nothing.fileno() if stdin is None else stdin,
                out if stdout is None else stdout,
                err,
            ]
            socket.send_fds(self._line, [json.dumps(request).encode()], files)
            fork = Fork(self._line, int(self._line.recv(_LIMIT)), out, err)
        self._forks.append(fork)
        return fork


def all_end_well(programs: Sequence[Fork], timeout: float = 200) -> None:
    """Wait for several that may wait for one another, ``timeout`` s each."""
    try:
        codes = [fork.wait(timeout) for fork in programs]
    finally:
        for fork in programs:
            fork.kill()
    assert codes == [0] * len(programs), "\n".join(fork.err() for fork in programs)


def _serve(line: socket.socket, writers: socket.socket) -> str:
    """Fork and wait as asked. Returns in the forks only, with the program."""
    awaited: dict[int, int] = {}  # pids by their file descriptors
    while True:
        ready, _, _ = select.select([line, writers, *awaited], [], [])
        for ended in [file for file in awaited if file in ready]:
            code = os.waitstatus_to_exitcode(os.waitpid(awaited.pop(ended), 0)[1])
            os.close(ended)
            line.sendall(str(code).encode())
        if writers in ready:
            program = writer_by_fork.forked(writers)
            if program is not None:
                line.close()
                return program
        if line not in ready:
            continue
        raw, files, _, _ = socket.recv_fds(line, _LIMIT, 3)
        if not raw:
            os._exit(0)
        request = json.loads(raw)
        if "wait" in request:
            awaited[os.pidfd_open(request["wait"])] = request["wait"]
            continue
        pid = os.fork()
        if pid:
            line.sendall(str(pid).encode())
            for file in files:
                os.close(file)
            continue
        line.close()
        writers.close()
        writer_by_fork.take(files)
        os.environ.clear()
        os.environ.update(request["env"])
        sys.argv = ["-c", *request["argv"]]
        sys.executable = request["python"]  # which starts a rank's writer
        return str(request["code"])


def _import_torch(modules: Sequence[str]) -> None:
    """Import torch, and what an optimizer, FSDP and torch's checkpoints import at first use."""
    gc.disable()  # what is imported is no garbage; looked through, it takes a quarter longer
    import torch
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.nn.parallel

    torch.optim.AdamW([torch.zeros(1)])
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # left alone in the forks, its memory stays shared
    gc.enable()


if __name__ == "__main__":
    sys.path[:1] = SUPPORT
    asked = socket.socket(fileno=int(sys.argv[2]))
    _import_torch(sys.argv[3:])
    program = _serve(socket.socket(fileno=int(sys.argv[1])), asked)
    exec(compile(program, "<program>", "exec", dont_inherit=True), {"__name__": "__main__"})
