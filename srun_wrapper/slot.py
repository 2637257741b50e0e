"""One task slot: starts, stops and restarts the rank's process, and outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from robust_slurm.auto import HOOK_DIR
from robust_slurm.record import RecordWriter, create
from srun_wrapper import proc
from srun_wrapper.keeper import Keeper
from srun_wrapper.loop import Loop
from srun_wrapper.messages import (
    Exited,
    Finish,
    Inspect,
    Inspected,
    Message,
    RankStart,
    Signal,
    Start,
    Started,
    Stop,
    Stopped,
)
from srun_wrapper.pump import Pump, StepPattern
from srun_wrapper.sample import Sampler
from srun_wrapper.sinks import OutputPlan, open_sinks
from srun_wrapper.torchrun import torchrun_overrides
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


@dataclass(slots=True)
class _Running:
    epoch: int
    process: subprocess.Popen[bytes]
    pumps: list[Pump] = field(default_factory=list)


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
        self._next: Start | None = None
        self._stopping = False
        self._kill_at = 0.0
        self._stuck_at = 0.0
        self._next_check = loop.later(0.0, self._check_stopped)
        self._sampler = Sampler(loop)

    # -- orders

    def handle(self, order: Message) -> None:
        if isinstance(order, Start):
            self._next = order
            self._stop(order.grace)
        elif isinstance(order, Stop):
            self._next = None
            self._stop(order.grace)
        elif isinstance(order, Signal):
            if order.early:
                self._signal_when_ready(order.signum, time.monotonic() + READY)
            else:
                self.signal(order.signum)
        elif isinstance(order, Inspect):
            self._inspect(order)
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
        """End everything below this shim at once, without ceremony; the store's own stays."""
        proc.end_all(proc.descendants(os.getpid(), self._staying()))

    def _staying(self) -> list[int]:
        return self._keeper.processes() if self._keeper is not None else []

    def children_changed(self) -> None:
        """SIGCHLD: something below this shim ended."""
        ended = proc.reap()
        running = self._running
        if running is not None and running.process.pid in ended:
            status = ended[running.process.pid]
            running.process.returncode = os.waitstatus_to_exitcode(status)
            self._running = None
            if not self._stopping:
                self._exited(running)
        if self._stopping:
            self._check_stopped()

    # -- stopping

    def _stop(self, grace: float) -> None:
        now = time.monotonic()
        if self._stopping:
            self._kill_at = min(self._kill_at, now + grace)
            return
        self._stopping = True
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
        self._emit(Stopped(0, self._epoch, 0, stuck))
        order, self._next = self._next, None
        if order is not None and not stuck:
            for rank in order.ranks:
                if rank.local == self._local:
                    self._launch(order, rank)

    # -- starting

    def _launch(self, order: Start, rank: RankStart) -> None:
        self._epoch = order.epoch
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
        env = {k: v for k, v in os.environ.items() if k not in STALE}
        env |= torchrun_env | order.env | rank.env
        if self._keeper is not None:
            self._keeper.begin(order)
            env |= self._keeper.env()
        env["ROBUST_BEAT_DIR"] = str(self._run_dir)
        env["ROBUST_AUTO"] = "1" if self._options.auto and not self._options.regex else "0"
        paths = [str(HOOK_DIR), env.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
        record = self._run_dir / f"{order.epoch}-{self._local}.beat"
        try:
            create(str(record), epoch=order.epoch, local_rank=self._local, rank=rank.rank)
            process, pumps = self._spawn(command, env, order, rank, record)
        except (OSError, ValueError) as err:
            text = f"robust-task: cannot run {command[0]!r}: {err}\n"
            os.write(2, text.encode())
            self._emit(Exited(0, order.epoch, self._local, NOT_FOUND, None, 0.0, text, False))
            return
        self._running = _Running(order.epoch, process, pumps)
        self._emit(Started(0, order.epoch, self._local, process.pid))

    def _spawn(
        self,
        command: list[str],
        env: dict[str, str],
        order: Start,
        rank: RankStart,
        record: Path,
    ) -> tuple[subprocess.Popen[bytes], list[Pump]]:
        if self._options.inherit:
            return subprocess.Popen(command, env=env, preexec_fn=_die_with_shim), []
        sinks = open_sinks(self._options.output, rank.rank, env, truncate=order.first)
        watch = None
        if self._options.regex:
            watch = StepPattern(self._options.regex, RecordWriter(str(record)).beat)
        direct = sinks.direct and watch is None
        process = subprocess.Popen(
            command,
            env=env,
            stdout=None if direct else subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_die_with_shim,
        )
        pumps = []
        for stream, sink, label in (
            (process.stderr, sinks.err, sinks.label_err),
            (process.stdout, sinks.out, sinks.label_out),
        ):
            if stream is not None:
                fd = os.dup(stream.fileno())
                stream.close()
                pumps.append(Pump(fd, sink, transform=label, watch=watch))
        process.stdout = process.stderr = None
        return process, pumps

    def _exited(self, running: _Running) -> None:
        at = time.monotonic()
        # What the rank left behind can hold the pipe, the port or the GPU.
        if running.process.returncode != 0:
            self.kill()
        deadline = at + TAIL_WAIT
        for pump in running.pumps:
            pump.finish(max(0.0, deadline - time.monotonic()))
        code = running.process.returncode
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
