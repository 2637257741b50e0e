"""The parts behind a Checkpointer once the world is known: state, store and the way to it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from robust_slurm import heartbeat
from robust_slurm.resizing.stages import pipelined
from robust_slurm.resizing.world import this_world

from ..capture.state import State
from ..capture.taken_over import fixed
from ..durable import tier
from ..format.layout import Snapshot
from ..planning.offered import common_step
from ..standing import PHASE
from ..store.own_store import OwnStore
from . import mesh as meshes
from .by_time import ByTime
from .client import Client, StoreGoneError
from .options import Options
from .resuming import CheckpointError, from_durable, from_memory, named
from .room import check_room, estimate
from .saver import Saver
from .stats import Stats
from .unanswered import FileLook, reported
from .warned import CheckpointWarnings, to_stderr

SOCKET = "ROBUST_CKPT_SOCKET"
STAND = 900.0  # s; robust-srun gives its word earlier, or has ended
REPLAY = "ROBUST_REPLAY"
"""Set in a replay: a few steps in a small world, of which nothing may be saved or restored."""


class Session:
    """One rank's part. Without a store ``saver`` is None, and nothing is saved."""

    def __init__(
        self, objects: Mapping[str, Any], mesh: Any, options: Options, *,
        steady: bool, stats: Stats, warned: CheckpointWarnings,
    ) -> None:  # fmt: skip
        """``steady``: see Saver. Raises TypeError, ValueError."""
        self.world = meshes.world()
        self.mesh = meshes.check_mesh(mesh, self.world.size)
        self._objects, self._options, self._steady, self._stats = objects, options, steady, stats
        self.say = warned.say
        warned.write = self._write
        self._by_time: ByTime | None = None
        self._checked = False
        self._no_room = self._attempt = self._run = ""
        self._line = 0  # see Snapshot.line
        self._look = FileLook()
        self.client: Client | None = None
        self.store: OwnStore | None = None
        self.saver: Saver | None = None
        models = named(objects.get("model")).values()
        share = meshes.find_share(models, self.mesh, self.world.rank)
        self._state = State(objects, rank=self.world.rank, share=share)
        others = [v for k, v in objects.items() if k.startswith("extra.")]
        optimizers = named(objects.get("optimizer")).values()
        self._cut = meshes.find_cut(list(models), others, optimizers, self.world.size)
        self._replay = os.environ.get(REPLAY) == "1"
        if not self._replay:
            self._connect()

    def resume(self) -> int:
        """Restore and return the step, 0 on a fresh start. Raises CheckpointError, and TypeError
        for a value that cannot be saved."""
        if self._replay:
            return 0
        if self.client is not None and self.store is None and self._options.minutes_by == "script":
            self.say(
                f"minutes={self._options.minutes:g} is not used under robust-srun, which sets the "
                "interval for all ranks: robust-srun --robust-checkpoint-minutes=..."
            )
        plan = self.client.welcome.get("restore") if self.client is not None else None
        in_memory = plan is not None and plan["tier"] == "memory"
        offered = -1 if plan is None else 2 * int(plan["step"]) + in_memory
        told = meshes.gather([self._own_line(), offered])
        self._follow(max(line for line, _ in told))
        on_disk = None
        if self._line:  # they resume from disk; a store new to its rank would still offer a plan
            plan, in_memory = None, False
        else:
            try:
                on_disk = common_step([each for _, each in told])
            except ValueError as error:
                raise CheckpointError(str(error)) from None
        rejoined, heartbeat.rejoined = heartbeat.rejoined, False
        if rejoined and not in_memory:
            raise CheckpointError(
                "the objects of this process hold a later state than the one to go on from, which "
                "is not in memory; the next start is by new processes"
            )
        if self.client is not None and plan is not None and in_memory:
            step = from_memory(self._state, self.client, plan, self._cut.lengths, self.mesh)
        else:
            with reported(self._options.directory, "resume()", self.say):
                step = from_durable(
                    self._state, self._objects, self._options.directory, self.world, self.mesh,
                    on_disk, self.say,
                    cut=self._cut != meshes.Cut(""),
                )  # fmt: skip
        for note in self._state.notes if self.world.rank == 0 else ():
            self.say(note)
        if rejoined:
            self._state.drop_gradients()  # of the step that was cut off
        if self.saver is not None:
            self._try_to_capture()
            self.saver.abandon(step, at_once=in_memory)
        if step and self._by_time is not None:
            self._by_time.resumed()
        self._began(step)
        if step and self.client is not None:
            self.client.say("resumed", step=step)
        self._leave_memory()
        self._check_shared(restored=step > 0)
        if self.saver is not None:
            self.saver.room.reserve()
        return step

    def save(self, step: int) -> None:
        """Save the step. May raise anything; the training is none the worse for it."""
        if self._replay:
            return
        if not self._checked:  # without resume(); not by a collective here: one rank may save alone
            self._checked = True
            self._follow(self._own_line())
            self._unshare()
            if self.saver is not None and self.client is not None and step > 0:
                if any(int(each["step"]) >= step for each in self.client.welcome.get("own", ())):
                    self.saver.abandon(step - 1)
                self._began(step - 1)
        self._leave_memory()
        if self._apart(step):
            self.say(
                f"ranks {self._state.share.ranks if self._state.share else ()} no longer hold the "
                f"same parameters and optimizer state: each saves its whole state from now on"
            )
            self._unshare()
        if self.saver is None:
            return
        if step <= self.saver.last:
            self.say(
                f"save({step}) ignored: step {self.saver.last} was saved already; steps must "
                f"increase"
            )
            return
        self.saver.save(step)
        for text in self._state.saved():
            self.say(text)
        if self.client is not None and self.client.stands_at(step):
            self._stand(step)

    def _began(self, step: int) -> None:
        """Report the step after which the rank begins: later steps of this epoch are given up."""
        if self.client is not None:
            self.client.say("began", step=step, line=self._line)

    def _own_line(self) -> int:
        """Number of the timeline that begins, by this rank's store alone."""
        return int(self.client.welcome.get("line", 0)) if self.client is not None else 0

    def _follow(self, line: int) -> None:
        self._line = line
        if self.saver is not None and line:
            self.saver.follow(line)

    def _stand(self, step: int) -> None:
        """Wait until robust-srun has compared this step with what other nodes computed, if it was
        saved. The optimizer must not change it, nor a next step overwrite it."""
        if self.saver is not None and self.client is not None and self.saver.took(step):
            with heartbeat.phase(PHASE):
                self.client.stand(step, STAND)

    def _write(self, text: str) -> None:
        """Report ``text``: to the supervisor, which counts the ranks that say the same, and on
        stderr, by rank 0 only if there is a supervisor. From any thread."""
        counted = self.client is not None and not self.client.dead and self.store is None
        if not counted or self.world.rank == 0:
            to_stderr(f"rank {self.world.rank}: {text}")
        if self.client is not None:
            self.client.say("alarm", text=text)

    def close(self, flush_deadline: float) -> None:
        """End; first write the newest step to the durable tier if ``flush_deadline`` > 0. Saver,
        client and store are closed in this order, each whatever the others raise."""
        saver = self.saver
        with ExitStack() as closing:
            for each in (self.store, self.client, saver):
                if each is not None:
                    closing.callback(each.close)
            if saver is not None and flush_deadline > 0 and self._options.directory:
                with heartbeat.phase("checkpoint"):  # no steps come meanwhile; it is no hang
                    why = saver.flush(flush_deadline)
                if why:
                    self.say(f"the last step is not in {self._options.directory}: {why}")

    def release(self) -> None:
        """Release the training's objects after ``close``, so that their memory is free before the
        garbage collector runs."""
        self._state.release()
        self.saver, self._objects = None, {}

    def forked(self) -> None:
        """In a child, such as a data loader worker: all of this belongs to the parent."""
        if self.client is not None:
            self.client.abandon()

    def _connect(self, *, goes_on: bool = False) -> None:
        """Enrol with the store of robust-task, or with one of our own outside robust-srun.

        ``goes_on``: the training that has enrolled before in this epoch, not a new one."""
        world, choice, share = self.world, self._options, self._state.share
        socket = os.environ.get(SOCKET, "")
        epoch = heartbeat.epoch() if socket else 0
        needs = share.needs(world.rank) if share is not None else (world.rank,)
        parts = len(share.holders) if share is not None else 1
        models = named(self._objects.get("model")).values()
        optimizers = named(self._objects.get("optimizer")).values()
        cut, pipes = self._cut, pipelined(self.mesh)
        whole, loaders = this_world(pipes), self._objects.get("loader")
        size = estimate(models, optimizers) // parts
        enrol: dict[str, Any] = {
            "rank": world.rank, "world": world.size, "local": world.local, "epoch": epoch,
            "pid": os.getpid(), "mesh": self.mesh, "needs": list(needs),
            "directory": choice.directory, "every": choice.every, "keep": choice.keep,
            "python": sys.executable, "bytes": size,
            "goes_on": goes_on, "lengths": cut.lengths, "shards": cut.shards,
            "fixed": cut.why or fixed(loaders, whole.shares, by_replica=bool(pipes)),
            "stages": whole.replica_ranks,
        }  # fmt: skip
        if not socket and not choice.directory:
            if world.rank == 0:  # there is no store that would count the ranks that say it
                where = (
                    "robust-srun runs without checkpoints in memory (--robust-no-checkpoint, or no "
                    "room)"
                    if heartbeat.epoch()
                    else "outside robust-srun there are no checkpoints in memory"
                )
                self.say(
                    f"nothing is saved: {where}, and no directory is named. Pass directory= to "
                    "Checkpointer, or set ROBUST_CHECKPOINT_DIR, to keep durable checkpoints"
                )
            return
        about = Snapshot(
            0, world.rank, world.size, epoch, self._job(not socket), self.mesh, needs, None, (),
            line=self._line,
        )  # fmt: skip
        self._attempt = about.attempt
        try:
            if not socket:
                self.store = self.store or OwnStore(self.say)
                socket = self.store.socket
            self.client = Client(socket, enrol)
        except (StoreGoneError, OSError) as error:
            self.say(f"nothing is saved: {error}")
            return
        room = partial(
            check_room, self.client.welcome["directory"], local_ranks=world.local_size,
            replicas=self.store is None,
        )  # fmt: skip
        if self.store is not None and not goes_on:
            self._by_time = self._choose_by_time(about.attempt)
        self.saver = Saver(
            self._state, self.client, about, choice,
            patient=self.store is None, steady=self._steady, stats=self._stats, say=self.say,
            expected=size, room=room, by_time=self._by_time,
        )  # fmt: skip
        rung, text = room(size, None)
        if rung is None:
            self._no_room = text  # what is there may still be needed to resume from
        else:
            self.saver.room.keep(rung)
        if rung is not None and text:
            self.say(text)

    def _choose_by_time(self, run: str) -> ByTime | None:
        """Return what chooses steps by time where no robust-srun does, and say so at the start."""
        choice, world = self._options, self.world
        if not choice.minutes:
            return None
        store = meshes.default_store() if world.size > 1 else None
        if world.size > 1 and store is None:
            self.say(
                f"no step is written to {choice.directory} before close(), as {world.size} ranks "
                "without torch.distributed cannot agree on one. Pass every= to Checkpointer"
            )
            return None
        if world.rank == 0 and choice.minutes_by == "default":
            to_stderr(
                f"checkpoints: to {choice.directory} every {choice.minutes:g} minutes, the first "
                "step of a new training, and the last one at close(). A training that is killed "
                "loses what came since. Checkpointer(minutes=...) or every=... sets the interval"
            )
        return ByTime(60 * choice.minutes, world.rank, store, run, first=True)

    def _job(self, own_store: bool) -> str:
        """Return the name of this run: the same on all ranks, another one after a requeue."""
        run = os.environ.get("ROBUST_RUN_ID", "")
        if run and not own_store:
            return run
        if self.world.size > 1 and not meshes.is_distributed():
            return "local"  # nothing tells the ranks of one run from those of another
        if not self._run:  # once: later, a rank may come here alone
            started, pid = meshes.gather([int(time.time()), os.getpid()])[0]
            self._run = f"local-{started}-{pid}"
        return self._run

    def _leave_memory(self) -> None:
        if self.saver is not None and self._no_room:
            self.saver.room.leave_memory(self._no_room)
        self._no_room = ""

    def _try_to_capture(self) -> None:
        """Fail now, not at every step, on state that can never be saved. Raises TypeError.

        Loaders are left alone: to ask for their position would begin their pass too early.
        """
        loaders = [k for k, each in self._objects.items() if hasattr(each, "_get_iterator")]
        self._state.collect([key for key in self._objects if key not in ("loader", *loaders)])

    def _check_shared(self, *, restored: bool) -> None:
        """Check that peers hold the same state, before anything is divided among them."""
        self._checked = True
        share = self._state.share
        if not meshes.is_distributed():
            return
        crc = self._state.shared_crc(restored=restored)
        all_crcs = meshes.gather([-1 if crc is None else crc])
        if share is None or len({all_crcs[rank][0] for rank in share.ranks}) == 1:
            return
        self.say(
            f"parameters or optimizer state differ between data-parallel ranks {share.ranks}: "
            f"each rank saves its whole state. If this is not intended, the model was not broadcast"
        )
        self._unshare()

    def _apart(self, step: int) -> bool:
        """True if this rank's peers were found to hold another state than this rank."""
        if self._state.share is None or self.client is None:
            return False
        if self.store is not None and self.saver is not None and self.saver.durable.due(step):
            # Outside robust-srun a commit that failed for it is all that tells the others.
            return self._look.finds(tier.apart_mark(self._options.directory, self._attempt))
        return self.client.unshare

    def _unshare(self) -> None:
        if self._state.share is None:
            return
        self._state.unshare()
        if self.saver is not None and self.client is not None:
            last, before = self.saver.last, self.saver.durable
            everywhere = self.client.everywhere
            self.saver.close()
            self.client.close()
            self.saver = self.client = None
            self._connect(goes_on=True)
            if self.saver is not None and self.client is not None:
                self.saver.durable.follow(before)
                self.saver.abandon(last, at_once=before.at_once)
                self.client.everywhere = everywhere  # not ``last``, which some may lack
