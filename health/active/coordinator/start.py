"""Ways to start workers: on this machine, or on the nodes of the job we are in (asyncio).

``python -m health.active.coordinator.start`` is the command of a Slurm step of workers. It adds to
the environment what only a task knows, from Slurm's variables: its node, its number, and the
address of the node that started the step.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO

from health.active.coordinator.account import VARIABLE, DeviceAccount, account, become
from health.active.coordinator.session import TestSession, address
from health.children.child import where_it_hangs
from robust_slurm import commands
from robust_slurm.command_line.errors import warn
from robust_slurm.hostlist import expand

TERM_S = 8.0  # for a worker, or srun and its step, to end after SIGTERM
KILL_S = 2.0  # and after SIGKILL: in state D, held by a driver, it may never
_LINES = 12  # of what was printed last
_LINE = 500  # characters

WORKER = "health.active.worker.main"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None)  # before a fork, not after it

# "srun: error: n[3-4]: tasks 2-3: Exited with exit code 1"
_ENDED = re.compile(r"srun: error: ([^\s:]+): tasks? [\d,\-\[\]]+: (.+)")


class WorkerProcess:
    """A process whose workers a session waits for. ``stop`` ends it, or reports that it cannot.

    ``log`` gets all that it prints; without one only its last line is shown, if it fails.
    """

    def __init__(
        self, session: TestSession, nodes: Sequence[str], what: str, log: IO[bytes] | None = None
    ) -> None:
        self._session = session
        self._nodes = nodes
        self._what = what
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = asyncio.Event()
        self._rest = b""
        self._last: collections.deque[str] = collections.deque(maxlen=_LINES)
        self._stopping = False

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        last: signal.Signals,
        own: DeviceAccount | None = None,
    ) -> None:
        """Start it in its own session, which Ctrl-C does not reach. Raises OSError.

        ``last``: the signal that the kernel sends it if this process is killed; ``own``: the
        account that it runs under.
        """
        loop = asyncio.get_running_loop()

        def follow_us() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, last, 0, 0, 0)

        process = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=follow_us,  # after the change of the account, which would forget it
            user=own.uid if own else None,
            group=own.gid if own else None,
            extra_groups=own.groups if own else None,
        )
        assert process.stdout is not None
        self._process = process
        os.set_blocking(process.stdout.fileno(), False)
        loop.add_reader(process.stdout.fileno(), self._read)
        threading.Thread(target=self._await_end, args=(process.pid, loop), daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        try:
            part = os.read(pipe, 1 << 16)
        except BlockingIOError:
            return
        if not part:
            asyncio.get_running_loop().remove_reader(pipe)
        try:
            if self._log is not None:
                self._log.write(part)
        except OSError as error:  # a full disk ends what is kept, not the test
            self._log = None
            warn("robust-slurm", f"what {self._what} prints is no longer kept: {error}")
        *lines, self._rest = (self._rest + (part or b"\n")).split(b"\n")
        self._rest = self._rest[-_LINE:]
        for line in lines:
            self._line(line.decode(errors="replace").strip()[:_LINE])

    def _await_end(self, pid: int, loop: asyncio.AbstractEventLoop) -> None:
        """Wait in a thread: a kernel before 5.3 has no descriptor of a process to wait for."""
        # ChildProcessError: it was waited for elsewhere; RuntimeError: the loop is closed.
        with contextlib.suppress(ChildProcessError, RuntimeError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        process, loop = self._process, asyncio.get_running_loop()
        assert process is not None and process.stdout is not None
        if process.stdout.closed:
            return  # it had been abandoned
        _kill(process.pid, signal.SIGKILL)  # what it left in its group, before its id is free
        code = process.wait()
        self._read()  # its last words
        loop.remove_reader(process.stdout.fileno())
        process.stdout.close()
        self._ended.set()
        if not self._stopping:
            for node in self._nodes:
                self._session.lost(node, self._why(f"{self._what} ended with {_status(code)}"))

    def _line(self, line: str) -> None:
        if not line:
            return
        ended = _ENDED.fullmatch(line)
        if ended is None:
            self._last.append(line)
            return
        try:
            nodes = expand(ended[1])
        except ValueError:
            return
        for node in nodes:
            self._session.lost(node, self._why(f"the worker's task on {node}: {ended[2]}"))

    def _why(self, why: str) -> str:
        said = self._last[-1] if self._last else ""
        return why + (f"; printed last: {said}" if said else "; it printed nothing")

    async def stop(self) -> None:
        """End its process group with SIGTERM, then SIGKILL; abandon it if that does not help."""
        if self._process is None:
            return
        self._stopping = True
        if not self._ended.is_set():
            _kill(self._process.pid, signal.SIGTERM)
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), TERM_S)
        finally:
            if not self._ended.is_set():
                _kill(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), KILL_S)
        if not self._ended.is_set():
            self._leave(self._process)

    def _leave(self, process: subprocess.Popen[bytes]) -> None:
        """Abandon a process that SIGKILL did not end, and print a warning."""
        assert process.stdout is not None
        asyncio.get_running_loop().remove_reader(process.stdout.fileno())
        process.stdout.close()
        where = where_it_hangs(process.pid)
        with contextlib.suppress(OSError):
            print(
                f"robust-slurm: {self._what} (process {process.pid} {where}) did not "
                f"end within {KILL_S:g} s of SIGKILL and is abandoned; the node may need a reboot",
                file=sys.stderr,
            )


def _kill(group: int, sent: signal.Signals) -> None:
    try:
        os.killpg(group, sent)
    except (ProcessLookupError, PermissionError):
        return


def _status(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def here(
    session: TestSession, node: str, python: str, log: IO[bytes] | None = None, user: str = ""
) -> WorkerProcess:
    """Start a worker on this machine; as root, under the account ``user``. Raises OSError."""
    own = account(user)
    started = WorkerProcess(session, [node], f"{python} -m health.active.worker.main", log)
    env = {**os.environ, **session.worker_env("127.0.0.1", node)}
    env |= {"HOME": own.home} if own else {}
    try:
        started.start(words_for(python, WORKER), env, signal.SIGKILL, own)
    except PermissionError as err:
        why = f"{err.strerror} for the account {user} ([active] user)" if own else err.strerror
        raise PermissionError(err.errno, why, python) from None
    return started


def step(
    session: TestSession,
    nodes: Sequence[str],
    python: str,
    log: IO[bytes] | None = None,
    user: str = "",
) -> WorkerProcess:
    """Start a worker on each of these nodes of the job, by one srun. Raises OSError.

    The key goes by the environment: arguments can be read by everybody on the node.
    """
    started = WorkerProcess(session, nodes, "srun", log)
    env = {**os.environ, **session.worker_env("", ""), VARIABLE: user}
    words = words_for(python, "health.active.coordinator.start")
    started.start(step_argv(nodes, words), env, signal.SIGTERM)  # srun then ends the step
    return started


def words_for(python: str, module: str) -> list[str]:
    """Return the words that run one of our modules in a Python: in this one, if it is the gate's
    (-S), which has looked at no other."""
    if sys.flags.no_site:
        return commands.again(module)
    return [python, flag(), *commands.words(module)]


def flag() -> str:
    """Return the flag that keeps the working directory off the child's sys.path, or isolates it
    as this process is."""
    return "-I" if sys.flags.isolated else "-P"


def step_argv(nodes: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return the srun command that runs ``words`` once per node, with all of the job's resources
    and beside its other steps."""
    return [
        "srun",
        *(f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"),
        *("--nodelist=" + ",".join(nodes), "--overlap", "--mem=0", "--cpu-bind=none"),
        *("--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--mpi=none", "--export=ALL"),
        *("--job-name=robust-test", *words),
    ]


def task_env(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that a task of the step adds for the worker. KeyError outside of a step."""
    _, _, port = env["ROBUST_TEST_SERVER"].rpartition(":")
    return {
        "ROBUST_TEST_SERVER": address(env["SLURM_LAUNCH_NODE_IPADDR"], int(port)),
        "ROBUST_TEST_NODE": env["SLURMD_NODENAME"],
        "ROBUST_TEST_LOCAL": env["SLURM_LOCALID"],
    }


def main() -> int:
    """Run the worker of a task; as root, under the account that the environment names."""
    try:
        os.environ.update(task_env(os.environ))
    except KeyError as err:
        print(
            f"health.active.coordinator.start: {err.args[0]} is not set: not started by "
            f"robust-health",
            file=sys.stderr,
        )
        return 2
    try:
        own = account(os.environ.pop(VARIABLE, ""))
        if own:
            become(own)
            os.execv(sys.executable, words_for(sys.executable, WORKER))
    except OSError as err:
        print(
            f"health.active.coordinator.start: {err.filename or ''}: {err.strerror}",
            file=sys.stderr,
        )
        return 2
    from health.active.worker.main import main as work

    return work()


if __name__ == "__main__":
    sys.exit(main())
