"""One task slot: starts, stops and restarts the rank's process, and outlives it."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from srun_wrapper.agent import filesystems
from srun_wrapper.agent.counters import gpus
from srun_wrapper.agent.data import data_process
from srun_wrapper.agent.looking.slot_looks import SlotLooks
from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.processes import process_tree, starting
from srun_wrapper.agent.processes.emptying import Emptying
from srun_wrapper.agent.processes.end_report import EndReport, error_file
from srun_wrapper.agent.processes.rejoining import Rejoining
from srun_wrapper.agent.processes.signals import RankSignals
from srun_wrapper.agent.processes.stop_stages import Aborts, StopStages
from srun_wrapper.agent.rank_launcher import Launcher, RankLaunch, Running
from srun_wrapper.agent.snapshot_store import SnapshotStore
from srun_wrapper.agent.streams.stdin import Stdin
from srun_wrapper.agent.test_worker import SlotTests
from srun_wrapper.agent.warm.commands import is_text
from srun_wrapper.agent.warm.imports import Learnt, pack, unpack
from srun_wrapper.agent.warm.preforked import Forked
from srun_wrapper.protocol.closer_messages import LookCloser
from srun_wrapper.protocol.messages import (
    Exited,
    Finish,
    Imports,
    Inspect,
    Message,
    RankStart,
    RunTests,
    Signal,
    Start,
    Started,
    Stop,
    Stopped,
    WarmRanks,
    Warmup,
)
from srun_wrapper.protocol.task_options import TaskOptions

TAIL_WAIT = 0.05
NOT_FOUND = 2  # srun's own exit code when a task's command is not there
_log = logging.getLogger("robust-task")


class TaskSlot:
    """Runs the rank of one slot. ``handle`` takes orders, ``emit`` takes messages.

    At most one rank runs at a time; a new Start first ends everything that the last one left.
    """

    def __init__(
        self,
        loop: Loop,
        local: int,
        options: TaskOptions,
        command: tuple[str, ...],
        run_dir: Path,
        emit: Callable[[Message], None],
        finish: Callable[[int, int], None],
        store: SnapshotStore | None = None,
        tester: SlotTests | None = None,
        stdin: Stdin | None = None,
    ) -> None:
        self._loop = loop
        self._local = local
        self._options = options
        self._run_dir = run_dir
        self._emit = emit
        self._finish = finish
        self._store = store
        self._tester = tester
        self._stdin = stdin
        self._running: Running | None = None
        self._epoch = 0
        self._rank = -1
        self._first_of_all = False
        self._told_warm = -1  # nothing yet
        self._next: Start | None = None
        self._cold: RankLaunch | None = None
        self._launcher = Launcher(
            loop, local, options, command, run_dir, store,
            started=self._started, failed=self._failed, cold=self._start_cold,
            ended=self._end_running, learnt=self._learnt, changed=self._tell_warm,
        )  # fmt: skip
        self._rejoining = Rejoining(loop, run_dir, local)
        self._signals = RankSignals(loop, self._pid, group=not options.inherit)
        self._emptying = Emptying(
            loop, running=lambda: self._running is not None, kill=self.kill, reap=self._reap,
            staying=self._staying, look=self._look, emptied=self._stopped,
        )  # fmt: skip
        self._looks = SlotLooks(loop, local, run_dir, self._below, self._now_running, emit)
        self._end = EndReport(loop, error_file(run_dir, local), emit)

    # -- orders

    def handle(self, order: Message) -> None:
        if isinstance(order, LookCloser):
            self._looks.closer(order)
        elif isinstance(order, Start):
            self._next, self._cold = order, None
            if not self._goes_on(order):
                self._stop(order.grace)
        elif isinstance(order, Stop):
            self._next = self._cold = None
            if not self._waits(order):
                self._stop(order.grace)
        elif isinstance(order, Signal):
            if order.early:
                self._signals.send_when_ready(order.signum)
            else:
                self._signals.send(order.signum)
        elif isinstance(order, Inspect):
            self._looks.inspect(order)
        elif isinstance(order, Warmup):
            self._warm_up(order)
        elif isinstance(order, RunTests):
            if self._tester is not None and self._running is None and not self._stopping:
                self._tester.run(order)
        elif isinstance(order, Finish):
            if self._local < len(order.exits):
                self._finish(*order.exits[self._local])
        elif self._store is not None:
            self._store.handle(order)

    def signal(self, signum: int) -> None:
        """Pass a signal to the rank's process group."""
        self._signals.send(signum)

    @property
    def _stopping(self) -> bool:
        return self._emptying.active

    def _pid(self) -> int:
        return self._running.process.pid if self._running is not None else 0

    def kill(self) -> None:
        """Kill the rank and all that it started, at once."""
        process_tree.end_all(self._below())

    def close(self) -> None:
        """End all processes of the slot: the shim ends."""
        self._end.flush()
        self._launcher.close()
        self.kill()

    def _below(self) -> list[int]:
        return process_tree.descendants(os.getpid(), self._staying())

    def _staying(self) -> list[int]:
        store = self._store.processes() if self._store is not None else []
        return store + self._launcher.processes() + gpus.processes() + data_process.processes()

    def children_changed(self) -> None:
        """Reap the processes below this shim that have ended (SIGCHLD)."""
        self._reap()
        self._emptying.check()

    def _reap(self) -> None:
        ended = process_tree.reap()
        starting.reaped(ended)
        self._launcher.reaped(ended)
        if self._tester is not None:
            self._tester.reaped(ended)
        self._end_running(ended)

    def _end_running(self, ended: dict[int, int]) -> None:
        running = self._running
        if running is not None and running.process.pid in ended:
            status = ended[running.process.pid]
            running.process.returncode = os.waitstatus_to_exitcode(status)
            self._running = None
            self._launcher.rank_ended()
            if self._stdin is not None and running.process.returncode == 0:
                self._stdin.finish()
            if not self._stopping:
                self._exited(running)

    # -- a rank that stays

    def _waits(self, order: Stop) -> bool:
        """Return whether the rank is asked to wait for the next epoch, or waits."""
        rejoining, options = self._rejoining, self._options
        if self._running is None or self._stopping or options.regex or options.inherit:
            return False
        if order.rejoin <= 0 or (self._stdin is not None and self._stdin.used()):
            return False

        def asked(waits: bool) -> None:
            if not waits:
                self._stop(order.grace)
                return
            self._end.flush()
            self._emit(Stopped(0, self._epoch, 0, stages={"rejoin": rejoining.seconds}))

        if rejoining.held:
            asked(True)
        if rejoining.held or rejoining.asking:
            return True
        return rejoining.ask(self._now_running(), order.rejoin, asked)

    def _goes_on(self, order: Start) -> bool:
        """Return whether the rank that waits is given the next epoch."""
        running, rank = self._running, self._rejoining.part(order)
        if rank is None or running is None or self._stopping:
            return False

        def going(well: bool) -> None:
            if not well or self._running is not running:  # it has just ended
                self._stop(order.grace)
                return
            self._emit(Stopped(0, self._epoch, 0))
            self._next, self._running = None, Running(order.epoch, running.process, running.pumps)
            self._take(order, rank)
            self._end.begin(running.process.pid)
            pid = running.process.pid
            self._emit(Started(0, order.epoch, self._local, pid, kept=True))

        return self._rejoining.send(self._launcher.renew(order, rank, running.pumps), going)

    # -- stopping

    def _stop(self, grace: float) -> None:
        self._rejoining.drop()
        self._end.flush()
        now = time.monotonic()
        if self._stopping:
            if self._emptying.stages is not None:
                self._emptying.stages.hurry(grace, now)
            return
        self._launcher.cancel()
        if self._tester is not None:
            self._tester.cancel()
        stages = None
        if self._running is not None:
            pid = self._running.process.pid
            aborts = Aborts(self._run_dir, self._running.epoch, pid)
            limit = self._options.work_limit
            stages = StopStages(pid, grace, limit, aborts, self.signal, now)
        self._emptying.begin(stages)

    def _look(self, pids: list[int], limit: float, done: Callable[[tuple[str, ...]], None]) -> None:
        look = lambda: filesystems.silent_mounts(pids, (), limit)  # noqa: E731
        self._loop.run_in_thread(look, done, filesystems.NONE)

    def _cut(self, stages: StopStages) -> tuple[str, ...]:
        if not stages.cut:
            return ()
        limit = self._options.work_limit
        what = f"was killed while it was still writing {stages.cut} {limit:g} s after its grace"
        return (f"rank {self._rank} {what}",)

    def _stopped(self, stuck: tuple[int, ...]) -> None:
        self._running = None
        self._end.drop()
        if self._stdin is not None and not stuck:
            self._stdin.rewind()
        launch, self._cold = self._cold, None
        if launch is not None and not stuck:
            self._launcher.spawn(launch)
            return
        stages, self._emptying.stages = self._emptying.stages, None
        told = Stopped(0, self._epoch, 0, stuck)
        if stages is not None:
            stages.ended(time.monotonic())
            told.stages, told.cut = stages.seconds, self._cut(stages)
        self._emit(told)
        order, self._next = self._next, None
        if order is not None and not stuck:
            for rank in order.ranks:
                if rank.local == self._local:
                    self._take(order, rank)
                    self._launcher.launch(order, rank)

    # -- starting

    def _take(self, order: Start, rank: RankStart) -> None:
        self._epoch, self._rank = order.epoch, rank.rank
        self._first_of_all = order.index == 0 and self._local == 0
        self._looks.share(len(order.ranks))
        self._rejoining.began(order, rank)

    def _started(self, running: Running) -> None:
        self._running = running
        self._end.begin(running.process.pid)
        warm = isinstance(running.process, Forked)
        self._emit(Started(0, running.epoch, self._local, running.process.pid, warm))

    def _failed(self, launch: RankLaunch, err: Exception) -> None:
        text = f"robust-task: {starting.why_not_started(launch.command[0], err, self._run_dir)}\n"
        denied = isinstance(err, PermissionError)  # then srun's exit code is the errno
        code = errno.EACCES if denied else NOT_FOUND
        self._emit(Exited(0, launch.order.epoch, self._local, code, None, 0.0, text, False))
        os.write(2, text.encode())  # last: it fails where nobody reads it

    def _start_cold(self, launch: RankLaunch) -> None:
        self._cold = launch
        self._stop(0.0)

    def _learnt(self, learnt: Learnt, ranks: int, environ: dict[str, str]) -> None:
        if self._first_of_all and is_text(environ.values()):
            self._emit(Imports(0, pack(learnt), ranks, environ))

    def _tell_warm(self) -> None:
        ready = self._launcher.warm_ranks()
        if ready != self._told_warm:
            self._told_warm = ready
            self._emit(WarmRanks(0, self._local, ready))

    def _warm_up(self, order: Warmup) -> None:
        starting = self._next is not None or self._cold is not None or self._launcher.forking()
        if self._running is not None or starting:
            return  # too late: it would only compete with the rank
        try:
            self._launcher.warm_up(unpack(order.learnt), order.ranks, order.environ, order.code)
        except (OSError, ValueError) as err:
            _log.warning(f"the first ranks of this node start without pre-imported modules: {err}")

    def _exited(self, running: Running) -> None:
        at = time.monotonic()
        # What the rank left behind can hold the pipe, the port or the GPU.
        if running.process.returncode != 0:
            self.kill()
        for pump in running.pumps:
            pump.finish(max(0.0, at + TAIL_WAIT - time.monotonic()))
        code = running.process.returncode or 0
        own, killer = (code, None) if code >= 0 else (None, -code)
        tail = running.pumps[0].tail() if running.pumps else ""

        def end(facts: tuple[str, ...]) -> Exited:
            age = time.monotonic() - at
            return Exited(
                0, running.epoch, self._local, own, killer, age, tail[-4096:], facts=facts
            )

        self._end.ended(end, tail, code)

    def _now_running(self) -> tuple[int, int]:
        """Return the pid that this slot has started, and its epoch; (0, 0) if none runs."""
        running = self._running
        return (0, 0) if running is None else (running.process.pid, running.epoch)
