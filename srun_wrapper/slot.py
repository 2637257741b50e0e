"""One task slot: starts, stops and restarts the rank's process, and outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from robust_slurm.auto import HOOK_DIR, launched
from robust_slurm.auto.learnt import path_beside
from robust_slurm.record import create
from srun_wrapper import proc
from srun_wrapper.keeper import Keeper
from srun_wrapper.loop import Loop
from srun_wrapper.messages import (
    Exited,
    Finish,
    Imports,
    Inspect,
    Inspected,
    Message,
    RankStart,
    Signal,
    Start,
    Started,
    Stop,
    Stopped,
    Warmup,
)
from srun_wrapper.pump import Pump
from srun_wrapper.sample import Sampler
from srun_wrapper.sinks import OutputPlan
from srun_wrapper.streams import Streams
from srun_wrapper.torchrun import torchrun_overrides
from srun_wrapper.warm import Forked, Learnt, Warm, pack, unpack
from srun_wrapper.warm_door import WarmDoor
from srun_wrapper.world import STALE

KILL_DEADLINE = 10.0  # a process that survives SIGKILL this long is stuck in the kernel
CHECK = 0.01
TAIL_WAIT = 0.05
READY = 30.0  # s for a new rank to get ready for a signal that came before it
NOT_FOUND = 2  # srun's own exit code when a task's command cannot be run
SECRETS = ("ROBUST_STEP_KEY", "ROBUST_PORT", "ROBUST_COMPANION")


@dataclass(frozen=True, slots=True)
class SlotOptions:
    """What robust-srun told the shim about its command and output, by argv."""

    command: tuple[str, ...]
    output: OutputPlan
    auto: bool = True
    regex: str = ""
    inherit: bool = False  # --pty: the rank gets the terminal itself
    warm: bool = True
    warm_packages: tuple[str, ...] = ()


@dataclass(slots=True)
class _Running:
    epoch: int
    process: subprocess.Popen[bytes] | Forked
    pumps: list[Pump] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Launch:
    """All that is needed to run a rank."""

    order: Start
    rank: RankStart
    command: list[str]
    env: dict[str, str]
    record: Path


class Slot:
    """Runs the rank of one slot. ``handle`` takes orders, ``emit`` gives events.

    At most one rank runs at a time; a new Start first ends everything that the last one left.
    """

    def __init__(
        self,
        loop: Loop,
        local: int,
        options: SlotOptions,
        run_dir: Path,
        emit: Callable[[Message], None],
        finish: Callable[[int, int], None],
        keeper: Keeper | None = None,
    ) -> None:
        self._loop = loop
        self._local = local
        self._options = options
        self._run_dir = run_dir
        self._emit = emit
        self._finish = finish
        self._keeper = keeper
        self._running: _Running | None = None
        self._epoch = 0
        self._first_of_all = False
        self._next: Start | None = None
        self._warm: Warm | None = None
        self._door: WarmDoor | None = None
        if options.warm and not options.inherit:
            self._warm = Warm(loop, run_dir, options.warm_packages, self._learnt)
            self._door = self._open_door()
        self._forking: _Launch | None = None
        self._unclaimed: dict[int, int] = {}
        self._cold: _Launch | None = None
        self._stopping = False
        self._kill_at = 0.0
        self._stuck_at = 0.0
        self._next_check = loop.later(0.0, self._check_stopped)
        self._sampler = Sampler(loop)

    def _open_door(self) -> WarmDoor | None:
        def make() -> Warm:
            packages = self._options.warm_packages
            return Warm(self._loop, self._run_dir, packages, lambda _learnt: None)

        try:
            return WarmDoor(self._loop, self._run_dir / f"warm-{self._local}.sock", make)
        except OSError as err:
            os.write(2, f"robust-task: torchrun starts its ranks cold: {err}\n".encode())
            return None

    # -- orders

    def handle(self, order: Message) -> None:
        if isinstance(order, Start):
            self._next, self._cold = order, None
            self._stop(order.grace)
        elif isinstance(order, Stop):
            self._next = self._cold = None
            self._stop(order.grace)
        elif isinstance(order, Signal):
            if order.early:
                self._signal_when_ready(order.signum, time.monotonic() + READY)
            else:
                self.signal(order.signum)
        elif isinstance(order, Inspect):
            self._inspect(order)
        elif isinstance(order, Warmup):
            self._warmup(order)
        elif isinstance(order, Finish):
            for local, (code, signum) in enumerate(order.exits):
                if local == self._local:
                    self._finish(code, signum)
        elif self._keeper is not None:
            self._keeper.handle(order)

    def signal(self, signum: int) -> None:
        """Pass a signal to the rank's process group."""
        if self._running is not None:
            try:
                if self._options.inherit:  # it shares our group, to keep the terminal
                    os.kill(self._running.process.pid, signum)
                else:
                    os.killpg(self._running.process.pid, signum)
            except (ProcessLookupError, PermissionError):
                pass

    def _signal_when_ready(self, signum: int, give_up_at: float) -> None:
        # In its first moments a rank would die of a signal that it is going to handle.
        running = self._running
        ready = running is not None and proc.expects(running.process.pid, signum)
        if ready or time.monotonic() >= give_up_at:
            self.signal(signum)
        else:
            self._loop.later(0.1, lambda: self._signal_when_ready(signum, give_up_at))

    def kill(self) -> None:
        """End the rank and all it started at once, without ceremony."""
        proc.end_all(proc.descendants(os.getpid(), self._staying()))

    def close(self) -> None:
        """The shim ends: nothing stays."""
        if self._warm is not None:
            self._warm.stop()
        if self._door is not None:
            self._door.stop()
        self.kill()

    def _staying(self) -> list[int]:
        others = (self._keeper, self._warm, self._door)
        return [pid for other in others if other is not None for pid in other.processes()]

    def children_changed(self) -> None:
        """SIGCHLD: something below this shim ended."""
        ended = proc.reap()
        if self._warm is not None:
            self._warm.reaped(ended)
        if self._door is not None:
            self._door.reaped(ended)
        if self._forking is not None:  # one of them may be the rank that is not known yet
            self._unclaimed |= ended
        self._end_running(ended)
        if self._stopping:
            self._check_stopped()

    def _end_running(self, ended: dict[int, int]) -> None:
        running = self._running
        if running is not None and running.process.pid in ended:
            status = ended[running.process.pid]
            running.process.returncode = os.waitstatus_to_exitcode(status)
            self._running = None
            if self._warm is not None:
                self._warm.unwatch()
            if self._door is not None:
                self._door.unwatch()
            if not self._stopping:
                self._exited(running)

    # -- stopping

    def _stop(self, grace: float) -> None:
        now = time.monotonic()
        if self._stopping:
            self._kill_at = min(self._kill_at, now + grace)
            return
        self._stopping = True
        if self._warm is not None:
            self._warm.cancel()
        if self._door is not None:
            self._door.cancel()
        self._kill_at = now + grace if self._running is not None else now
        self._stuck_at = self._kill_at + KILL_DEADLINE
        if self._running is not None and grace > 0:
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGCONT)
        self._check_stopped()

    def _check_stopped(self) -> None:
        if not self._stopping:
            return
        now = time.monotonic()
        if self._running is None or now >= self._kill_at:
            # The rank itself is gone, or has had its time: nothing it started may stay.
            self.kill()
            for pid, status in proc.reap().items():
                if self._running is not None and pid == self._running.process.pid:
                    self._running.process.returncode = os.waitstatus_to_exitcode(status)
                    self._running = None
        if proc.childless(self._staying()):
            self._stopped(())
        elif now >= self._stuck_at:
            self._stopped(tuple(proc.descendants(os.getpid(), self._staying()))[:16])
        else:
            self._next_check.cancel()  # also every child that ends leads here
            self._next_check = self._loop.later(CHECK, self._check_stopped)

    def _stopped(self, stuck: tuple[int, ...]) -> None:
        self._stopping = False
        self._running = None
        launch, self._cold = self._cold, None
        if launch is not None and not stuck:
            self._spawn(launch)
            return
        self._emit(Stopped(0, self._epoch, 0, stuck))
        order, self._next = self._next, None
        if order is not None and not stuck:
            for rank in order.ranks:
                if rank.local == self._local:
                    self._launch(order, rank)

    # -- starting

    def _launch(self, order: Start, rank: RankStart) -> None:
        self._epoch = order.epoch
        self._first_of_all = order.index == 0 and self._local == 0
        command, torchrun_env = list(self._options.command), dict[str, str]()
        if len(order.ranks) == 1:  # torchrun starts the node's other ranks
            command, torchrun_env = torchrun_overrides(
                command,
                world_nodes=order.nodes,
                node_rank=order.index,
                master_addr=order.master,
                master_port=order.port,
                first_epoch=order.first,
                env=os.environ,
            )
        if self._keeper is not None:
            self._keeper.begin(order)
        env = self._environ(torchrun_env | order.env | rank.env)
        record = self._run_dir / f"{order.epoch}-{self._local}.beat"
        launch = _Launch(order, rank, command, env, record)
        try:
            create(str(record), epoch=order.epoch, local_rank=self._local, rank=rank.rank)
        except (OSError, ValueError) as err:
            self._failed(launch, err)
            return
        if self._warm is None or not self._warm.fits(command, env) or not self._fork(launch):
            self._spawn(launch)

    def _environ(self, more: dict[str, str]) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if k not in STALE} | more
        if self._keeper is not None:
            env |= self._keeper.env()
        env["ROBUST_BEAT_DIR"] = str(self._run_dir)
        env["ROBUST_AUTO"] = "1" if self._options.auto and not self._options.regex else "0"
        env["ROBUST_LEARN"] = "1" if self._warm is not None else "0"
        if self._door is not None:
            env[launched.DOOR] = str(self._door.path)
            env[launched.IMPORTS] = str(self._run_dir / f"launcher-{self._local}.modules")
        paths = [str(HOOK_DIR), env.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
        return env

    def _failed(self, launch: _Launch, err: Exception) -> None:
        text = f"robust-task: cannot run {launch.command[0]!r}: {err}\n"
        os.write(2, text.encode())
        self._emit(Exited(0, launch.order.epoch, self._local, NOT_FOUND, None, 0.0, text, False))

    def _spawn(self, launch: _Launch) -> None:
        """A fresh process."""
        try:
            if self._options.inherit:
                process = subprocess.Popen(
                    launch.command, env=launch.env, preexec_fn=_die_with_shim
                )
                self._started(launch, process, [])
                return
            with self._streams(launch) as streams:
                process = subprocess.Popen(
                    launch.command,
                    env=launch.env,
                    stdout=streams.out,
                    stderr=streams.err,
                    start_new_session=True,
                    preexec_fn=_die_with_shim,
                )
        except (OSError, ValueError) as err:
            self._failed(launch, err)
            return
        self._started(launch, process, streams.pumps)

    def _fork(self, launch: _Launch) -> bool:
        """A child of the warm interpreter; False when it cannot be asked."""
        assert self._warm is not None
        pumps: list[Pump] = []

        def forked(pid: int) -> None:
            self._forking = None
            ended, self._unclaimed = self._unclaimed, {}
            if self._stopping:
                return
            if not pid:
                self._cold = launch
                self._stop(0.0)  # it may have become a process after all
                return
            self._started(launch, Forked(pid), pumps)
            self._end_running(ended)

        try:
            with self._streams(launch) as streams:
                pumps += streams.pumps
                fds = (streams.out, streams.err)
                if not self._warm.ask(launch.command, launch.env, fds, forked):
                    return False
        except (OSError, ValueError) as err:
            self._failed(launch, err)
            return True
        self._forking = launch
        return True

    def _streams(self, launch: _Launch) -> Streams:
        options, first = self._options, launch.order.first
        return Streams(
            options.output, launch.rank.rank, launch.env, str(launch.record), options.regex,
            truncate=first,
        )  # fmt: skip

    def _learnt(self, learnt: Learnt) -> None:
        if self._first_of_all:
            self._emit(Imports(0, pack(learnt)))

    def _warmup(self, order: Warmup) -> None:
        if self._warm is None or self._running is not None:
            return
        try:
            learnt, env = unpack(order.learnt), self._environ({})
            self._warm.start(learnt, self._options.command, env, further=True)
        except (OSError, ValueError) as err:
            os.write(2, f"robust-task: this node starts its first ranks cold: {err}\n".encode())

    def _started(
        self, launch: _Launch, process: subprocess.Popen[bytes] | Forked, pumps: list[Pump]
    ) -> None:
        self._running = _Running(launch.order.epoch, process, pumps)
        warm = isinstance(process, Forked)
        self._emit(Started(0, launch.order.epoch, self._local, process.pid, warm))
        if self._warm is not None:
            files = [path_beside(str(launch.record)), launch.env.get(launched.IMPORTS, "")]
            self._warm.watch([Path(f) for f in files if f], process.pid, launch.command, launch.env)
        if self._door is not None:
            self._door.watch(self._run_dir, launch.order.epoch, process.pid)

    def _exited(self, running: _Running) -> None:
        at = time.monotonic()
        # What the rank left behind can hold the pipe, the port or the GPU.
        if running.process.returncode != 0:
            self.kill()
        deadline = at + TAIL_WAIT
        for pump in running.pumps:
            pump.finish(max(0.0, deadline - time.monotonic()))
        code = running.process.returncode or 0
        tail = running.pumps[0].tail() if running.pumps else ""
        self._emit(
            Exited(
                0,
                running.epoch,
                self._local,
                code if code >= 0 else None,
                -code if code < 0 else None,
                time.monotonic() - at,
                tail[-4096:],
            )
        )

    # -- looking

    def _inspect(self, order: Inspect) -> None:
        pid = self._running.process.pid if self._running is not None else 0
        self._sampler.sample(
            self._local,
            pid,
            order.window,
            lambda sample: self._emit(Inspected(order.token, order.window, (sample,))),
        )


def _die_with_shim() -> None:
    proc.die_with_parent(signal.SIGKILL)
