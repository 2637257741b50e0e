"""The user's class: resume, save every step, and nothing else to think of."""

from __future__ import annotations

import atexit
import gc
import operator
import os
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, SupportsIndex

from torch.optim import Optimizer

from robust_slurm import heartbeat

from ..capture.beside.attributes import optimizers_in
from ..capture.beside.comm_hooks import hook_states
from ..capture.beside.plain_values import Extra, PlainValue
from ..capture.beside.variables import Variables
from ..capture.sections import has_state, kind_of
from ..capture.state import State
from ..capture.taken_over import ahead_of
from ..capture.unsupported import checked
from ..copying.turns import DEADLINE, Turns
from . import mesh as meshes
from .options import options
from .resuming import CheckpointError, named
from .session import SOCKET, Session
from .stats import Stats
from .warned import CheckpointWarnings, StrictError

__all__ = ["CheckpointError", "Checkpointer", "StrictError"]

FLUSH_DEADLINE = 600.0  # s for the last step to reach the durable tier at the end
NOT_FINITE = (
    "the loss is not finite: no step is saved until it is again (this is logged once; "
    "ROBUST_NAN=ignore saves at any loss)"
)
FORKED = "this Checkpointer belongs to the process that made it, not to its forks. Make one there"
CRASH_DEADLINE = 60.0  # s for the same when the script ends by an exception


class Checkpointer:
    """Saves the state of a training in memory at every step, and resumes it.

    ::

        ckpt = robust_slurm.Checkpointer(model=model, optimizer=opt, loader=loader)
        for step in range(ckpt.resume(), steps):
            ...
            opt.step()
            ckpt.save(step + 1)

    Make it after the model is wrapped (DDP, fully_shard) and torch.distributed is initialised;
    every rank makes one, and calls ``resume`` once and ``save`` after every optimizer step. The
    state of Python's, NumPy's and torch's random generators is saved too.
    """

    def __init__(
        self,
        *,
        model: Any = None,
        optimizer: Any = None,
        loader: Any = None,
        extra: Mapping[str, Any] | None = None,
        mesh: Any = None,
        directory: str | os.PathLike[str] | None = None,
        every: int | None = None,
        minutes: float | None = None,
        keep: int | None = None,
        replica_wait: float = 30.0,
        strict: bool = False,
    ) -> None:
        """``model``, ``optimizer``, ``loader``: one, or a list or dict of them. ``extra``: name →
        object with ``state_dict`` and ``load_state_dict``, or a plain value, which ``resume`` puts
        into ``extra`` of this object. ``mesh``: name → size of each dimension in DeviceMesh order,
        or the root DeviceMesh. ``directory``: for durable checkpoints every ``every`` steps and
        every ``minutes``, of which ``keep`` are kept; the defaults are ROBUST_CHECKPOINT_DIR,
        _EVERY, _MINUTES (else 10 if there is no ``every``) and _KEEP. Under robust-srun its own
        ``checkpoint_minutes`` counts. ``replica_wait``: s that a step may wait for the replica of
        the one before. ``strict``: raise StrictError, at the end of the call or optimizer step in
        which it is due, instead of printing a warning.

        Raises TypeError, ValueError.
        """
        if extra is not None and not isinstance(extra, Mapping):
            raise TypeError(f"extra: a dict of name to object, not {type(extra).__name__}")
        # torch's way to save one: beside the model, which has it already.
        hooks = {id(state) for state in hook_states(named(model).values())}
        extra = {n: value for n, value in (extra or {}).items() if id(value) not in hooks}
        self._options = options(directory, every, minutes, keep, replica_wait)
        self._mesh = mesh
        world = meshes.world()
        meshes.check_mesh(mesh, world.size)
        self.extra = self._values = Extra(extra)
        """Objects by name, as given; plain values are those that ``resume`` finds."""
        self.stats = Stats()
        optimizer = checked(optimizer)
        given = {"model": model, "optimizer": optimizer, "loader": loader}
        self._objects: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
        for name, value in self.extra.items():
            object_ = value if has_state(value) else PlainValue(self._values, name)
            self._objects[f"extra.{name}"] = object_
        if not self._objects:
            raise ValueError("nothing to save: pass model=, optimizer=, loader= or extra=")
        self._objects["rng"] = None
        self._values.objects = self._objects
        State(self._objects, rank=world.rank).release()  # raises for what cannot be saved
        self._variables = Variables(self._values.by_name(given), sys._getframe(1))
        self._session: Session | None = None
        self._warned = CheckpointWarnings(strict=strict)
        self._say = self._warned.say
        self._pid = os.getpid()
        self._resumed = self._closing = self._closed = False
        self._began = 0
        self._place = ""
        self._turns = Turns()
        self._handles = self._hook(named(optimizer).values())
        _alive.add(self)
        atexit.register(self._at_exit)

    def resume(self) -> int:
        """Restore the newest step that all ranks can have and return it; 0 on a fresh start.

        All ranks call it, once, before the first step. Raises CheckpointError when there is a
        checkpoint that cannot be used, and TypeError when something is given that cannot be saved.
        """
        with self._warned.raising():
            return self._resume()

    def _resume(self) -> int:
        if os.getpid() != self._pid:
            raise CheckpointError(FORKED)
        if self._resumed or self._closed or self.stats.saves:
            raise CheckpointError("call resume() once, before the first save()")
        self._resumed = True
        heartbeat._expect_saves()
        try:
            step = self._start().resume()
        except Exception:
            if self._closed:
                raise CheckpointError("closed while it resumed") from None
            raise
        heartbeat._resumed_step(step)
        self._began = step
        return step

    def save(self, step: SupportsIndex) -> None:
        """Take a snapshot of everything; ``step`` is the number of steps done, so that
        ``resume`` returns it.

        Call it after ``optimizer.step()``, on all ranks. It returns at once; the copy is made
        beside the next forward and backward. A failure to save is reported, never raised, and
        training goes on. While the newest loss passed to ``beat`` is not finite, nothing is saved:
        a restart needs the steps from before.
        """
        with self._warned.raising():
            self._save_in_turn(step)

    def _save_in_turn(self, step: SupportsIndex) -> None:
        if self._closed or heartbeat._ended:
            self._say_unless(step)
            return
        with self._turns.save() as alone:
            if alone:
                self._save(step, sys._getframe(1))
            else:
                self._say(
                    f"step {step} is not saved: save() was called while an optimizer steps in "
                    "another thread. Call both in one thread"
                )
                self._leave_out()

    def _save(self, step: SupportsIndex, caller: FrameType) -> None:
        try:
            number = operator.index(step)
            self.stats.saves += 1
            if heartbeat._nan:
                self._say(NOT_FINITE)
                self._leave_out()
                return
            heartbeat._saved_step(number)
            session = self._start()
            # Not self.extra.values(): that would count as the script's own look at all of them.
            read = [o for k, o in self._objects.items() if kind_of(k) in ("loader", "extra")]
            ahead = ahead_of(read, number, self._began)
            for text in [*self._values.check(self.extra), *ahead]:
                self._say(text)
            session.save(number)
            for text in self._replaced(caller):
                self._say(text)
        except Exception as error:  # noqa: BLE001 - a failing save must not end a training
            if not self._closed:
                self._say(f"step {step} was not saved: {type(error).__name__}: {error}")
            if self._session is None:
                # Starting is not tried again: other ranks would not take part in it.
                self._close(0.0)

    def _replaced(self, caller: FrameType) -> list[str]:
        """Return what the script has replaced in a variable of its own, and not here."""
        now = self._values.by_name(self._objects, untouched=True)
        found = []
        for name, variable, is_object in self._variables.changed(now, caller):
            kind, *keys = name.split(".")
            here = f"ckpt.extra{''.join(f'[{key!r}]' for key in keys)}"
            held = f"pass robust_slurm.held(get, put) as extra.{keys[0]}" if keys else ""
            if not is_object:
                found.append(
                    f"{name} is saved as it was given, and the script's variable {variable} has "
                    f"another value now, which a restart would miss. Set {here} = {variable} "
                    f"before save(), or {held}"
                )
            elif keys:
                found.append(
                    f"{name} is saved, and the script's variable {variable} is another object "
                    f"now, which a restart would miss. Write into the first one, or set {here} "
                    f"before save(), or {held}"
                )
            else:
                found.append(
                    f"the {kind} that was given is saved, and the script's variable {variable} is "
                    f"another one now, which a restart would miss. Make it once, before the "
                    "Checkpointer"
                )
        return found

    def close(self) -> None:
        """Write the newest step to the durable tier, wait for it, let go of all objects (``extra``
        keeps plain values), and end. Also done at exit."""
        with self._warned.raising():
            self._close(FLUSH_DEADLINE)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._close_after_crash()

    def _start(self) -> Session:
        """Find the world and the store, the first time."""
        if self._session is None:
            place = os.environ.get(SOCKET) or self._options.directory
            if self._rivals(place):
                _close_dropped(self)
            if self._rivals(place):
                raise CheckpointError(
                    "this process has another Checkpointer that saves to the same place: each "
                    "would resume from the other's steps. Give all objects to one, as in "
                    "model={...}, optimizer={...}, or close() the other one before"
                )
            self._place = place
            self._session = Session(
                self._objects, self._mesh, self._options, steady=self._steady, stats=self.stats,
                warned=self._warned,
            )  # fmt: skip
        return self._session

    def _rivals(self, place: str) -> bool:
        """True if another Checkpointer of this process saves to ``place``."""
        return any(each._place == place != "" for each in _open() if each is not self)

    def _hook(self, optimizers: Iterable[Any]) -> list[Any]:
        """Have every given optimizer call this object before and after its step."""
        me = weakref.ref(self)

        def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            this = me()
            if this is not None and not this._closed:
                with this._warned.raising():
                    before(this)

        def before(this: Checkpointer) -> None:
            if not this._turns.step():
                this._say(
                    f"a save() in another thread has not ended in {DEADLINE:.0f} s; the optimizer "
                    "steps without it"
                )
            session = this._session
            if session is None or session.saver is None:
                return
            try:
                session.saver.before_change()
            except Exception as error:  # noqa: BLE001 - as in save()
                this._say(f"waiting for a snapshot failed: {type(error).__name__}: {error}")

        def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            this = me()
            session = None if this is None or this._closed else this._session
            if session is not None and session.saver is not None:
                session.saver.after_change()
            if this is not None:
                this._turns.stepped()

        for hook in (before_step, after_step):
            hook._torchdynamo_disable = True  # type: ignore[attr-defined] # run it, never trace
        given = list(optimizers)
        # A script may step the optimizer inside of a wrapper by itself, as with SAM.
        found = [*given, *(inner for each in given for _, inner in optimizers_in(each))]
        # Where nothing tells when the state changes, all of it is copied inside save().
        self._steady = bool(given) and len(found) == len(given) and all(map(_announces, given))
        found = [each for each in {id(each): each for each in found}.values() if _has_hooks(each)]
        return [
            *(each.register_step_pre_hook(before_step) for each in found),
            *(each.register_step_post_hook(after_step) for each in found),
        ]

    def _leave_out(self) -> None:
        """Save nothing at this step."""
        if self._session is not None and self._session.saver is not None:
            self._session.saver.leave_out()

    def _say_unless(self, step: SupportsIndex) -> None:
        """Report once that this step and later ones cannot be saved."""
        if os.getpid() != self._pid:
            self._session = None  # the parent's
            self._say(f"step {step} is not saved: {FORKED}")
        elif self._closed and not heartbeat._ended and self._session is not None:
            self._session = None
            self._say(f"step {step} and later ones are not saved: the Checkpointer is closed")

    def _at_exit(self) -> None:
        if os.getpid() != self._pid or self._closed:
            return
        if getattr(sys, "last_value", None) is not None:
            self._close_after_crash()
        else:
            self._close(FLUSH_DEADLINE)
            self._warned.print_due()  # nobody is left who could catch it

    def _close_after_crash(self) -> None:
        # In robust-srun the supervisor saves what is there; other ranks may be hanging in a
        # collective, so nothing is waited for that needs them.
        session = self._session
        alone = session is not None and session.store is not None and session.world.size == 1
        self._close(CRASH_DEADLINE if alone else 0.0)
        self._warned.print_due()

    def _close(self, flush_deadline: float) -> None:
        if self._closing or os.getpid() != self._pid:
            return
        self._closing = True
        atexit.unregister(self._at_exit)
        session = self._session
        try:
            if session is not None:
                # A loss that is not finite may have been computed from the last step saved.
                session.close(0.0 if heartbeat._nan else flush_deadline)
        except Exception as error:  # noqa: BLE001 - as in save()
            self._say(f"the last step may not be saved: {type(error).__name__}: {error}")
        finally:
            self._closed = True
            for handle in self._handles:
                handle.remove()
            self._objects = self._values.objects = {}
            plain = {n: v for n, v in self.extra.items() if not has_state(v)}
            self.extra = self._values = Extra(plain)
            if session is not None:
                session.release()

    def _forked(self) -> None:
        self._closed = True
        if self._session is not None:
            self._session.forked()


def _announces(optimizer: Any) -> bool:
    """True if hooks are called before all that it changes. A schedule-free optimizer changes the
    weights in train() and eval() too."""
    modes = hasattr(optimizer, "train") and hasattr(optimizer, "eval")
    return _has_hooks(optimizer) and not modes


def _has_hooks(optimizer: Any) -> bool:
    """True if it calls hooks before and after its step: a wrapper that never calls
    Optimizer.__init__() has none."""
    if isinstance(optimizer, Optimizer):
        return "_optimizer_step_pre_hooks" in vars(optimizer)
    return hasattr(optimizer, "register_step_pre_hook")


_alive: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


def _open() -> list[Checkpointer]:
    return [each for each in list(_alive) if not (each._closing or each._closed)]


def _close_dropped(but: Checkpointer) -> None:
    """Close Checkpointers to which the script has no reference left: a function that made one has
    raised and is called again, as accelerate does with a smaller batch."""
    gc.collect()
    found = [each for each in _open() if each is not but]
    (none,) = _references([object()])
    for each, count in zip(found, _references(found), strict=True):
        if count == none + 1:  # that of atexit
            each._close_after_crash()


def _references(objects: Sequence[object]) -> list[int]:
    return [sys.getrefcount(each) for each in objects]


def _after_fork() -> None:
    for each in list(_alive):
        each._forked()


os.register_at_fork(after_in_child=_after_fork)
