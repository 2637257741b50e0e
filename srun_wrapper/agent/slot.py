"""One task slot: starts, stops and restarts the rank's process, and outlives it."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from srun_wrapper.agent import filesystems
from srun_wrapper.agent.counters import gpus
from srun_wrapper.agent.looking.slot_looks import SlotLooks
from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.processes import process_tree, starting
from srun_wrapper.agent.processes.end_report import EndReport, error_file
from srun_wrapper.agent.processes.signals import RankSignals
from srun_wrapper.agent.processes.starting import why_not_started
from srun_wrapper.agent.processes.stop_stages import Aborts, StopStages
from srun_wrapper.agent.rank_launcher import Launcher, RankLaunch, Running, SlotOptions
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
    RunTests,
    Signal,
    Start,
    Started,
    Stop,
    Stopped,
    WarmRanks,
    Warmup,
)

KILL_DEADLINE = 10.0  # a process that survives SIGKILL this long is stuck in the kernel
CHECK = 0.01
UNBORN = 1.0  # s for a process that is killed in its start to end, until nobody waits for it
ANSWER = 1.0  # s for a file system to answer, when a process survives SIGKILL
TAIL_WAIT = 0.05
NOT_FOUND = 2  # srun's own exit code when a task's command cannot be run
_log = logging.getLogger("robust-task")


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
        self._told_warm = 0
        self._next: Start | None = None
        self._cold: RankLaunch | None = None
        self._launcher = Launcher(
            loop, local, options, run_dir, store,
            started=self._started, failed=self._failed, cold=self._start_cold,
            ended=self._end_running, learnt=self._learnt, changed=self._tell_warm,
        )  # fmt: skip
        self._signals = RankSignals(loop, self._pid, group=not options.inherit)
        self._stopping = False
        self._stages: StopStages | None = None
        self._kill_at = math.inf
        self._stuck_at = math.inf
        self._asking = False
        self._next_check = loop.later(0.0, self._check_stopped)
        self._looks = SlotLooks(loop, local, run_dir, self._below, self._now_running, emit)
        self._end = EndReport(loop, error_file(run_dir, local), emit)

    # -- orders

    def handle(self, order: Message) -> None:
        if isinstance(order, LookCloser):
            self._looks.closer(order)
            return
        self._looks.cancel()  # whatever else is due
        if isinstance(order, Start):
            self._next, self._cold = order, None
            self._stop(order.grace)
        elif isinstance(order, Stop):
            self._next = self._cold = None
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
            for local, (code, signum) in enumerate(order.exits):
                if local == self._local:
                    self._finish(code, signum)
        elif self._store is not None:
            self._store.handle(order)

    def signal(self, signum: int) -> None:
        """Pass a signal to the rank's process group."""
        self._looks.cancel()
        self._signals.send(signum)

    def _pid(self) -> int:
        return self._running.process.pid if self._running is not None else 0

    def kill(self) -> None:
        """End the rank and all it started at once, without ceremony."""
        process_tree.end_all(self._below())

    def close(self) -> None:
        """The shim ends: nothing stays."""
        self._looks.cancel()
        self._end.flush()
        self._launcher.close()
        self.kill()

    def _below(self) -> list[int]:
        return process_tree.descendants(os.getpid(), self._staying())

    def _staying(self) -> list[int]:
        store = self._store.processes() if self._store is not None else []
        return store + self._launcher.processes() + gpus.processes()

    def children_changed(self) -> None:
        """SIGCHLD: something below this shim ended."""
        self._reap()
        if self._stopping:
            self._check_stopped()

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

    # -- stopping

    def _stop(self, grace: float) -> None:
        self._end.flush()
        now = time.monotonic()
        if self._stopping:
            if self._stages is not None:
                self._stages.hurry(grace, now)
            return
        self._stopping = True
        self._launcher.cancel()
        if self._tester is not None:
            self._tester.cancel()
        self._kill_at = self._stuck_at = math.inf
        if self._running is not None:
            pid = self._running.process.pid
            aborts = Aborts(self._run_dir, self._running.epoch, pid)
            limit = self._options.work_limit
            self._stages = StopStages(pid, grace, limit, aborts, self.signal, now)
        self._check_stopped()

    def _check_stopped(self) -> None:
        self._next_check.cancel()  # also every child that ends leads here
        if not self._stopping:
            return
        self._next_check = self._loop.later(CHECK, self._check_stopped)  # whatever fails below
        now = time.monotonic()
        if self._running is None or self._stages is None or self._stages.due(now):
            # The rank itself is gone, or has had its time: nothing it started may stay.
            if self._kill_at == math.inf:
                self._kill_at, self._stuck_at = now, now + KILL_DEADLINE
            self.kill()
            self._reap()
        spared = self._staying()
        if now >= self._kill_at + UNBORN:
            spared += starting.unborn()
        if process_tree.childless(spared):
            self._stopped(())
        elif now >= self._stuck_at:
            self._stuck(process_tree.descendants(os.getpid(), spared))

    def _stuck(self, pids: list[int]) -> None:
        """They survive SIGKILL: wait on while a file system that they use does not answer."""
        if self._asking:
            return

        def answered(silent: tuple[str, ...]) -> None:
            self._asking = False
            if not self._stopping:
                return
            if silent:
                self._stuck_at = time.monotonic() + ANSWER
                self._check_stopped()
            elif pids and not process_tree.childless([*self._staying(), *starting.unborn()]):
                self._stopped(tuple(pids)[:16])
            else:
                self._check_stopped()

        self._asking = True
        self._loop.run_in_thread(
            lambda: filesystems.look(pids, (), ANSWER), answered, filesystems.NONE
        )

    def _cut(self, stages: StopStages) -> tuple[str, ...]:
        if not stages.cut:
            return ()
        limit = self._options.work_limit
        what = f"was killed while it was still writing {stages.cut} {limit:g} s after its grace"
        return (f"rank {self._rank} {what}",)

    def _stopped(self, stuck: tuple[int, ...]) -> None:
        self._stopping = False
        self._running = None
        self._end.drop()
        if self._stdin is not None and not stuck:
            self._stdin.rewind()
        launch, self._cold = self._cold, None
        if launch is not None and not stuck:
            self._launcher.spawn(launch)
            return
        stages, self._stages = self._stages, None
        told = Stopped(0, self._epoch, 0, stuck)
        if stages is not None:
            stages.ended(time.monotonic())
            told.stages, told.cut = stages.seconds, self._cut(stages)
        self._emit(told)
        order, self._next = self._next, None
        if order is not None and not stuck:
            for rank in order.ranks:
                if rank.local == self._local:
                    self._epoch, self._rank = order.epoch, rank.rank
                    self._first_of_all = order.index == 0 and self._local == 0
                    self._looks.share(len(order.ranks))
                    self._launcher.launch(order, rank)

    # -- starting

    def _started(self, running: Running) -> None:
        self._running = running
        self._end.begin(running.process.pid)
        warm = isinstance(running.process, Forked)
        self._emit(Started(0, running.epoch, self._local, running.process.pid, warm))

    def _failed(self, launch: RankLaunch, err: Exception) -> None:
        text = f"robust-task: {why_not_started(launch.command[0], err, self._run_dir)}\n"
        os.write(2, text.encode())
        self._emit(Exited(0, launch.order.epoch, self._local, NOT_FOUND, None, 0.0, text, False))

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
        deadline = at + TAIL_WAIT
        for pump in running.pumps:
            pump.finish(max(0.0, deadline - time.monotonic()))
        code = running.process.returncode or 0
        tail = running.pumps[0].tail() if running.pumps else ""

        def end(facts: tuple[str, ...]) -> Exited:
            return Exited(
                0,
                running.epoch,
                self._local,
                code if code >= 0 else None,
                -code if code < 0 else None,
                time.monotonic() - at,
                tail[-4096:],
                facts=facts,
            )

        self._end.ended(end, tail, code)

    def _now_running(self) -> tuple[int, int]:
        """Return the pid that this slot has started, and its epoch; (0, 0) if none runs."""
        running = self._running
        return (0, 0) if running is None else (running.process.pid, running.epoch)
