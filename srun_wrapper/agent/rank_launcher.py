"""Starts the rank of a slot: as a fresh process, or by fork from a warm interpreter."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from robust_slurm import layout, looked
from robust_slurm.auto import HOOK_DIR, launched
from robust_slurm.auto.learnt import SUFFIX
from robust_slurm.resizing.world import RESIZED
from srun_wrapper.agent.launch import RankLaunch as RankLaunch
from srun_wrapper.agent.launch import Running as Running
from srun_wrapper.agent.launch import begin_record, check_snapshot, world_fds
from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.processes.end_report import error_env, error_file
from srun_wrapper.agent.processes.head_start import head_start
from srun_wrapper.agent.processes.starting import Starting
from srun_wrapper.agent.snapshot_store import SnapshotStore
from srun_wrapper.agent.streams.pump import Pump
from srun_wrapper.agent.streams.sinks import are_open, open_sinks
from srun_wrapper.agent.streams.streams import Streams
from srun_wrapper.agent.warm.commands import at_start
from srun_wrapper.agent.warm.imports import Learnt
from srun_wrapper.agent.warm.interpreter import Warm
from srun_wrapper.agent.warm.preforked import Forked
from srun_wrapper.agent.warm.torchrun_broker import Tell, TorchrunBroker
from srun_wrapper.command import containers
from srun_wrapper.command.rank_env import STALE
from srun_wrapper.command.torchrun import torchrun_overrides
from srun_wrapper.protocol.code import Code
from srun_wrapper.protocol.messages import RankStart, Start
from srun_wrapper.protocol.task_options import TaskOptions

NO_THREAD: Exception | None = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
_log = logging.getLogger("robust-task")


class Launcher:
    """Starts a slot's ranks. ``started`` gets each rank that runs; ``failed`` a launch that failed,
    and why; ``ended`` a rank that ended before its pid was known.

    ``cold`` gets a launch that the warm interpreter did not answer: it may have forked after all,
    so everything must be ended before ``spawn``.
    """

    def __init__(
        self,
        loop: Loop,
        local: int,
        options: TaskOptions,
        command: tuple[str, ...],
        run_dir: Path,
        store: SnapshotStore | None,
        started: Callable[[Running], None],
        failed: Callable[[RankLaunch, Exception], None],
        cold: Callable[[RankLaunch], None],
        ended: Callable[[dict[int, int]], None],
        learnt: Tell,
        changed: Callable[[], None],
    ) -> None:
        self._loop, self._local = loop, local
        self._options, self._command = options, command
        self._run_dir, self._store = run_dir, store
        self._on_started = started
        self._on_failed = failed
        self._on_cold = cold
        self._on_ended = ended
        self._on_change = changed
        self.warm: Warm | None = None
        self.broker: TorchrunBroker | None = None
        if options.warm and not options.inherit:
            self.warm = self._make_warm(lambda own: learnt(own, 0, {}))
            self.broker = self._start_broker(learnt)
        self._forking: RankLaunch | None = None
        self._starting: Starting[Running] | None = None
        self._unclaimed: dict[int, int] = {}
        self._version = ""  # of the code that the last rank was started with

    def _make_warm(self, learnt: Callable[[Learnt], None]) -> Warm:
        packages = self._options.warm_packages
        return Warm(self._loop, self._run_dir, packages, learnt, self._changed)

    def _changed(self) -> None:
        self._loop.call(self._on_change)

    def _start_broker(self, learnt: Tell) -> TorchrunBroker | None:
        path = self._run_dir / f"warm-{self._local}.sock"
        try:
            imports = self._run_dir / f"launcher-{self._local}.modules"
            make = lambda: self._make_warm(lambda _own: None)  # noqa: E731
            return TorchrunBroker(self._loop, path, imports, make, learnt)
        except OSError as err:
            _log.warning(f"torchrun's ranks start without pre-imported modules: {err}")
            return None

    # -- starting

    def launch(self, order: Start, rank: RankStart) -> None:
        command, torchrun_env = self._command_of(order.code), dict[str, str]()
        # torchrun starts the node's other ranks; without a world each one is a job of its own.
        if len(order.ranks) == 1 and "WORLD_SIZE" in order.env:
            command, torchrun_env = torchrun_overrides(
                command,
                world_nodes=int(order.env.get("SLURM_NNODES", order.nodes)),  # in a replay: fewer
                node_rank=int(order.env.get("NODE_RANK", order.index)),
                master_addr=order.master,
                master_port=order.port,
                first_epoch=order.first and not order.moved,
                env=os.environ,
                resized="ROBUST_REPLAY" in order.env or RESIZED in order.env,
            )
        if self._store is not None:
            self._store.begin(order)
        env = self._environ(torchrun_env | order.env | rank.env, order.code)
        record = self._run_dir / f"{order.epoch}-{self._local}.beat"
        directory = order.code.directory if order.code is not None else ""
        launch = RankLaunch(order, rank, command, env, record, directory)
        try:
            begin_record(record, order, rank)
        except (OSError, ValueError) as err:
            self._on_failed(launch, err)
            return
        fits = self.warm is not None and self.warm.fits(command, env, directory)
        version = order.code.version if order.code is not None else ""
        if self.warm is not None and not fits and version != self._version:
            self.warm.stop()  # it was for other code, and no rank would replace it
        self._version = version
        if fits:
            self._fork(launch)
        else:
            self.spawn(launch)

    def renew(self, order: Start, rank: RankStart, pumps: list[Pump]) -> dict[str, str] | None:
        """Prepare an epoch for a rank that goes on; its changed variables, None if that fails."""
        record = self._run_dir / f"{order.epoch}-{self._local}.beat"
        if self._store is not None:
            self._store.begin(order)
        try:
            begin_record(record, order, rank)
        except (OSError, ValueError):
            return None
        for pump in pumps:
            pump.forget()
        return order.env | rank.env | (order.code.variables() if order.code else {})

    def _command_of(self, code: Code | None) -> list[str]:
        return list(self._command if code is None else code.command)

    def _environ(self, more: Mapping[str, str], code: Code | None) -> dict[str, str]:
        stale = STALE if "SLURM_NTASKS" in more else STALE[1:]  # observe mode: srun's own world
        env = {k: v for k, v in os.environ.items() if k not in stale} | dict(more)
        env |= code.variables() if code is not None else {}
        if self._store is not None:
            env |= self._store.env()
        env |= {"ROBUST_BEAT_DIR": str(self._run_dir), looked.SHIM: str(os.getpid())}
        env |= error_env(env, self._command, error_file(self._run_dir, self._local))
        env["ROBUST_AUTO"] = "1" if self._options.auto and not self._options.regex else "0"
        env["ROBUST_LEARN"] = "1" if self.warm is not None else "0"
        if self.broker is not None:
            env[launched.BROKER] = str(self.broker.path)
            env[launched.IMPORTS] = str(self.broker.imports)
        env |= containers.bound(env, str(Path(HOOK_DIR).parent))
        paths = [str(HOOK_DIR), env.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
        return env

    def spawn(self, launch: RankLaunch) -> None:
        """Start the rank as a fresh process."""
        if self.warm is not None:
            self.warm.cold()

        def make(start: Starting[Running]) -> Running:
            check_snapshot(launch.order.code)
            cwd, fds = launch.directory or None, world_fds(launch.order, launch.env)
            if self._options.inherit:
                process = start.popen(launch.command, launch.env, cwd=cwd, pass_fds=fds)
                return Running(launch.order.epoch, process)
            with self._streams(launch) as streams:
                process = start.popen(
                    launch.command,
                    launch.env,
                    stdout=streams.out,
                    stderr=streams.err,
                    start_new_session=True,
                    cwd=cwd,
                    pass_fds=fds,
                )
            return Running(launch.order.epoch, process, streams.pumps)

        def done(running: Running, status: int | None) -> None:
            self._started(launch, running.process, running.pumps)
            if status is not None:
                self._on_ended({running.process.pid: status})

        failed = lambda err: self._on_failed(launch, err)  # noqa: E731
        self._starting = Starting(self._loop, make, done, failed)

    def _fork(self, launch: RankLaunch) -> None:
        """Start the rank as a child of the warm interpreter; as a fresh process if that fails."""
        self._forking = launch
        plan, rank, env = self._options.output, launch.rank.rank, launch.env
        if are_open(plan, rank, env):
            self._ask(launch, None)
            return

        def open_files() -> Exception | None:
            try:
                open_sinks(plan, rank, env, truncate=launch.order.first)
            except Exception as err:  # noqa: BLE001 - raised where it is known
                return err
            return None

        self._loop.run_in_thread(open_files, lambda error: self._ask(launch, error), NO_THREAD)

    def _ask(self, launch: RankLaunch, error: Exception | None) -> None:
        """Ask the warm interpreter; ``error``: why the rank's output cannot be opened."""
        assert self.warm is not None
        pumps: list[Pump] = []

        def forked(pid: int) -> None:
            if self._forking is not launch:
                return  # cancelled
            self._forking = None
            if pid:
                self._started(launch, Forked(pid), pumps)
            else:
                self._on_cold(launch)

        if self._forking is not launch:
            return  # cancelled
        try:
            if error is not None:
                raise error
            if self.warm.fits(launch.command, launch.env, launch.directory):
                with self._streams(launch) as streams:
                    pumps += streams.pumps
                    fds, wait = (streams.out, streams.err), head_start(launch.rank)
                    words, own, place = launch.command, launch.env, launch.directory
                    if self.warm.ask(words, own, fds, forked, place, wait):
                        return
        except Exception as err:  # noqa: BLE001 - else nobody would say that it does not start
            self._forking = None
            self._on_failed(launch, err)
            return
        self._forking = None
        self.spawn(launch)

    def _streams(self, launch: RankLaunch) -> Streams:
        return Streams(
            self._options.output, launch.rank.rank, launch.env, str(launch.record),
            self._options.regex, truncate=launch.order.first,
        )  # fmt: skip

    def _started(
        self, launch: RankLaunch, process: subprocess.Popen[bytes] | Forked, pumps: list[Pump]
    ) -> None:
        ended, self._unclaimed = self._unclaimed, {}
        if self.warm is not None:
            imports = layout.beside(str(launch.record), SUFFIX)
            files = [imports, launch.env.get(launched.IMPORTS, "")]
            told = [Path(f) for f in files if f]
            words, own, place = launch.command, launch.env, launch.directory
            self.warm.watch(told, process.pid, words, own, place)
        if self.broker is not None:
            self.broker.watch(self._run_dir, launch.order.epoch, process.pid)
        self._on_started(Running(launch.order.epoch, process, pumps))
        if process.pid in ended:
            self._on_ended({process.pid: ended[process.pid]})

    # -- ahead of a start

    def warm_up(
        self,
        learnt: Learnt,
        ranks: int = 0,
        environ: Mapping[str, str] = {},
        code: Code | None = None,
    ) -> None:
        """Import and run what other nodes' ranks have: this slot has no rank yet.

        ``ranks``, ``environ``: see ``messages.Imports``.
        """
        own = self._environ({}, code)
        if not ranks:
            if self.warm is not None:
                words, place = self._command_of(code), code.directory if code is not None else ""
                self.warm.start(learnt, words, own, place, further=True)
        elif self.broker is not None:
            counts = at_start(own)
            kept = {name: value for name, value in own.items() if name not in counts}
            self.broker.warm_up(learnt, ranks, {**kept, **environ})

    def forking(self) -> bool:
        """True while a rank is being started."""
        return self._forking is not None or (self._starting is not None and not self._starting.over)

    def warm_ranks(self) -> int:
        """Number of ranks of this slot that could be forked now: torchrun's, if it is torchrun."""
        ranks = self.broker.ready() if self.broker is not None else 0
        return ranks or int(self.warm is not None and self.warm.ready)

    # -- ends

    def reaped(self, ended: dict[int, int]) -> None:
        """Children of the shim that have ended: pid → wait status."""
        if self._forking is not None:  # one of them may be the rank that is not known yet
            self._unclaimed |= ended
        if self.warm is not None:
            self.warm.reaped(ended)
        if self.broker is not None:
            self.broker.reaped(ended)

    def rank_ended(self) -> None:
        """Stop watching what the rank imports."""
        if self.warm is not None:
            self.warm.unwatch()
        if self.broker is not None:
            self.broker.unwatch()

    def cancel(self) -> None:
        """Cancel a start: all is being ended, also a process that is just being forked."""
        self._forking = None
        self._unclaimed.clear()
        if self._starting is not None:
            self._starting.cancel()
            self._starting = None
        if self.warm is not None:
            self.warm.cancel()
        if self.broker is not None:
            self.broker.cancel()

    def processes(self) -> list[int]:
        """Pids of warm interpreters, which must survive the end of a rank."""
        found = self.warm.processes() if self.warm is not None else []
        return found + (self.broker.processes() if self.broker is not None else [])

    def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            self._starting = None
        if self.warm is not None:
            self.warm.stop()
        if self.broker is not None:
            self.broker.stop()
