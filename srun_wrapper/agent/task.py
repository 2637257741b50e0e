"""robust-task: the shim that robust-srun puts into every task slot of the step.

``robust-task OPTIONS -- command ...`` where OPTIONS is JSON (see ``TaskOptions``); not meant to
be typed. Its environment must hold what srun gives every task, and the address and the key that
robust-srun adds; the rank gets neither of these two.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import msgspec

from robust_slurm.checkpoint.transfer import interface
from robust_slurm.memory_dir import MemoryDir, existing
from srun_wrapper.agent import task_log
from srun_wrapper.agent.connections.link import Link
from srun_wrapper.agent.connections.silence import SilenceVerdict
from srun_wrapper.agent.data.door import DataDoor
from srun_wrapper.agent.filesystems import command_paths
from srun_wrapper.agent.last_duty import last_duty
from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.node_agent import Agent
from srun_wrapper.agent.place import SECRETS, Place, place_from, shims_socket
from srun_wrapper.agent.processes import process_tree
from srun_wrapper.agent.processes.guardian import Restart, guarded
from srun_wrapper.agent.processes.starting import never_vfork
from srun_wrapper.agent.slot import TaskSlot
from srun_wrapper.agent.snapshot_store import SnapshotStore
from srun_wrapper.agent.streams.stdin import Stdin
from srun_wrapper.agent.test_worker import SlotTests
from srun_wrapper.protocol.checkpoint_messages import Alarm, StoreReady
from srun_wrapper.protocol.messages import (
    Finish,
    Message,
    SlotHello,
    SlotWelcome,
    Start,
    StdinRead,
    Stop,
    decode_to_shim,
)
from srun_wrapper.protocol.task_options import TaskOptions

PASSED_ON = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTERM,
    signal.SIGALRM,
)
ABANDON_GRACE = 1.0
LAST_DUTY = 45.0
_USE = "use: robust-srun [options] command"
_log = logging.getLogger("robust-task")


class Shim:
    """One process: a slot, and on local id 0 the node's agent as well."""

    def __init__(
        self, place: Place, key: bytes, options: TaskOptions, command: list[str], life: int = 0
    ) -> None:
        """``life``: how many shims of this slot have died before it."""
        self._life = life
        self._finished = False
        self._orphaned = False
        self._loop = Loop()
        self._place = place
        self._key = key
        self._options = options
        self._command = tuple(command)
        self._slot: TaskSlot | None = None
        self._store: SnapshotStore | None = None
        self._data: DataDoor | None = None
        self._agent: Agent | None = None
        self._link: Link | None = None
        self._run_dir: MemoryDir | None = None
        self._exit: tuple[int, int] = (1, 0)
        self._give_up_at = time.monotonic() + options.task_start_limit / 2
        task_log.begin(lambda line: self._loop.call(lambda: self._emit(line)))
        process_tree.become_subreaper()
        self._loop.on_signals([signal.SIGCHLD], self._child)
        self._loop.on_signals(PASSED_ON, self._signalled)

    def run(self) -> tuple[int, int]:
        """Serve until told to finish. Returns the exit code and signal to end with.

        Raises Restart when the node's agent has died.
        """
        if self._place.local == 0:
            self._run_dir = MemoryDir(self._memory_name())
            run_dir = self._run_dir.path
            self._make_slot(run_dir)
            nodes = 1 << 16 if self._place.standby_request else self._place.step_nodes
            self._data = DataDoor(self._loop, run_dir, self._key, nodes)
            self._agent = Agent(
                self._loop,
                self._place,
                self._key,
                run_dir,
                self._order,
                self._abandon,
                self._paths,
                self._life,
                self._options,
            )
            self._agent.data_port, self._agent.data_news = self._data.port, self._data.news.due
            self._announce()
        else:
            self._find_agent()
        try:
            self._loop.run()
        finally:
            for part in (self._slot, self._data, self._store, self._agent, self._run_dir):
                if part is not None:
                    part.close()
        if self._orphaned:
            raise Restart
        return self._exit

    def _make_slot(self, run_dir: Path) -> None:
        if self._options.checkpoint:
            self._store = self._make_store(run_dir)
        self._slot = TaskSlot(
            self._loop,
            self._place.local,
            self._options,
            self._command,
            run_dir,
            self._emit,
            self._finish,
            self._store,
            SlotTests(self._loop, self._place, self._key, self._emit),
            None if self._options.inherit else Stdin(self._tell_stdin),
        )
        if self._life:
            local = self._place.local
            task_log.warn_only(f"the robust-task of local task {local} died and was started again")

    def _tell_stdin(self, whole: bool) -> None:
        self._loop.call(lambda: self._emit(StdinRead(0, self._place.local, whole)))

    def _make_store(self, run_dir: Path) -> SnapshotStore | None:
        try:
            return SnapshotStore(
                self._loop,
                self._place.local,
                run_dir,
                self._key,
                self._emit,
                self._options,
            )
        except OSError as err:
            _log.warning(f"{self._place.node}: no in-memory checkpoint store: {run_dir}: {err}")
            return None

    def _announce(self) -> None:
        port = self._store.port if self._store is not None else 0
        self._emit(StoreReady(0, self._place.local, port, self._snapshot_address()))

    def _snapshot_address(self) -> str:
        """Return the store's address for peers; empty: the one that the supervisor sees."""
        name = self._options.checkpoint_interface
        try:
            return interface.address(name) if name else ""
        except OSError as err:
            why = f"checkpoint_interface {name}: {err.strerror or err}"
            self._emit(Alarm(0, -1, f"{why}; snapshots use the network of the messages"))
            return ""

    def _paths(self) -> set[str]:
        """Paths that the start of a rank touches on this node."""
        directory = str(Path.cwd())
        output = [self._options.output.out, self._options.output.err]
        files = command_paths([*filter(None, output)], {}, directory)
        return files | command_paths(self._command, os.environ, directory)

    # -- a shim that is not the agent

    def _find_agent(self) -> None:
        sock = self._connected()
        if sock is None:
            if time.monotonic() >= self._give_up_at:
                sys.stderr.write(
                    f"robust-task: {self._place.node}: local task 0 of this step does not "
                    f"answer after {self._options.task_start_limit / 2:g} s\n"
                )
                self._loop.stop()
                return
            self._loop.later(0.02, self._find_agent)
            return
        self._link = Link(
            self._loop,
            sock,
            self._key,
            server=False,
            on_payload=self._from_agent,
            on_close=self._agent_gone,
        )
        self._link.send(SlotHello(self._place.local, self._place.task, os.getpid()))

    def _connected(self) -> socket.socket | None:
        """Return a connection to the node's agent; None: there is none yet."""
        for run_dir in existing(self._memory_name()):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(shims_socket(run_dir, self._place))
            except OSError:  # of an agent that has died, or has just begun
                sock.close()
                continue
            return sock
        return None

    def _memory_name(self) -> str:
        return f"{self._place.job_id}.{self._place.step_id}"

    def _from_agent(self, link: Link, payload: bytes) -> None:
        try:
            message = decode_to_shim(payload)
        except msgspec.DecodeError:
            link.close("order not understood")
            return
        if isinstance(message, SlotWelcome):
            self._make_slot(Path(message.run_dir))
            self._announce()
        else:
            self._order(message)

    def _agent_gone(self, _link: Link, _reason: str) -> None:
        if self._slot is None:
            self._find_agent()
            return
        self._orphaned = not self._finished
        self._loop.stop()

    # -- orders and messages

    def _order(self, message: Message) -> None:
        if self._slot is not None:
            self._slot.handle(message)

    def _emit(self, message: Message) -> None:
        if self._agent is not None:
            self._agent.from_slot(self._place.local, message)
        elif self._link is not None:
            self._link.send(message)

    def _finish(self, code: int, signum: int) -> None:
        self._finished = True
        self._exit = (code, signum)
        self._loop.stop()

    # -- signals

    def _child(self, _signum: int) -> None:
        if self._slot is not None:
            self._slot.children_changed()

    def _signalled(self, signum: int) -> None:
        # Slurm signals the whole step, so the rank has it already; only the news is passed on, once
        # for all shims of the node.
        if self._agent is not None:
            self._agent.signalled(signum)

    # -- alone

    def _abandon(self, verdict: SilenceVerdict, start: Start | None) -> None:
        """End everything on this node: the supervisor is gone for good."""
        assert self._agent is not None
        self._agent.broadcast(Stop(start.epoch if start else 0, ABANDON_GRACE))
        args = (self._place, self._key, self._options, verdict, start)
        work = threading.Thread(target=last_duty, args=args, daemon=True)
        work.start()

        def check() -> None:
            assert self._agent is not None
            now = time.monotonic()
            stopped = now >= stopped_at or self._agent.all_stopped()
            if now >= give_up_at or (stopped and not work.is_alive()):
                self._abandoned()
            else:
                self._loop.later(0.1, check)

        waiting = self._options.slurm_wait if verdict is SilenceVerdict.HOST_LOST else 0.0
        stopped_at = time.monotonic() + ABANDON_GRACE + 1.0
        give_up_at = time.monotonic() + LAST_DUTY + waiting
        check()

    def _abandoned(self) -> None:
        assert self._agent is not None
        self._agent.broadcast(Finish(tuple((1, 0) for _ in range(self._place.local_tasks))))


def end_like(code: int, signum: int) -> NoReturn:
    """End this process as the rank ended, so that srun reports it as it always does."""
    if signum:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no other disposition to begin with
            signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
    sys.stdout.flush()
    os._exit(code or (128 + signum if signum else 0))


def main() -> None:
    if sys.argv[1:2] in (["--help"], ["-h"]):
        print(f"robust-task is started by robust-srun, once per task; {_USE}")
        return
    try:
        options = msgspec.json.decode(sys.argv[1].encode(), type=TaskOptions)
        if sys.argv[2] != "--" or len(sys.argv) < 4:
            raise ValueError("no command")
        place = place_from(os.environ)
        key = bytes.fromhex(os.environ["ROBUST_STEP_KEY"])
    except (LookupError, ValueError) as err:
        lacks = f" ({err.args[0]} is not set)" if isinstance(err, KeyError) else ""
        sys.stderr.write(f"robust-task: started outside robust-srun{lacks}; {_USE}\n")
        sys.exit(2)
    for name in SECRETS:
        os.environ.pop(name, None)
    never_vfork()
    shim = lambda life: Shim(place, key, options, sys.argv[3:], life).run()  # noqa: E731
    guarded(shim, end_like, f"{place.node}: the robust-task of local task {place.local}")


if __name__ == "__main__":
    main()
