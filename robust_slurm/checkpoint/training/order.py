"""Warn of an order of calls by which save() saves a state that was never the end of a step.

save() must be the last call of a step: what the script changes after it is not in the snapshot.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from ..capture.state import GROUPS, Glimpse, State
from ..copying.watch import same_bits

LAST = "Call save() last in a step, after optimizer.step(), scheduler.step() and EMA updates"


class Order:
    """Looks at the first steps. Belongs to the training thread; raises nothing that matters."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._used: dict[str, tuple[Any, int]] | None = None
        self._step = -1
        self._extra: dict[str, Glimpse] = {}
        self._versions: dict[str, int] = {}
        """The versions of extra's tensors, by name."""
        self._named: set[str] = set()
        self._settings: dict[str, Any] | None = None  # as save() found them
        self._first = False  # no save() since resume()
        self._saved = self._before = -1  # the last save(), and the one before
        self._moved: set[str] | None = None
        """The settings that changed after the last save() but one; None: it is not known."""
        self._often: set[str] = set()  # those that did after the one before, too
        self._restored: dict[str, tuple[Glimpse, dict[str, int | None]]] = {}
        self._kept: dict[str, torch.Tensor] = {}  # restored tensors that are to change again
        self._awaited = False  # the first gradient after save()
        self._handles: list[Any] = []

    def resumed(self) -> None:
        """Note that all optimizer steps are seen from now on."""
        self._used = {}
        self.found(-1)
        self._first, self._moved = True, {*self._state.between.expected}
        if expected := self._state.between.expected - {*(self._settings or ())}:
            glimpses = self._state.look_at_extra()
            self._restored = {k: (g, _versions(g)) for k, g in glimpses.items() if k in expected}
            tensors = self._state.tensors_named(expected)
            self._kept = {name: tensor.clone() for name, tensor in tensors.items()}

    def found(self, step: int) -> None:
        """Note the settings of all optimizers and schedulers, as save() or resume() finds them."""
        self._settings = self._state.look_at_settings()
        self._first, self._saved = False, step

    def switched(self, names: Collection[str]) -> bool:
        """True if these tensors are of optimizers that were put into another mode (a bool in their
        ``param_groups``) since save(), as schedule-free ones are: that changes the weights."""
        before, now = self._settings or {}, self._state.look_at_settings()
        modes = {
            name.partition(GROUPS)[0]
            for name, values in now.items()
            if GROUPS in name
            and all(isinstance(each, bool) for each in values)
            and before.get(name, values) != values
        }
        return bool(modes) and {*names} <= self._state.names_trained_by(modes)

    def stepping(self) -> list[str]:
        """Compare the settings of all optimizers and schedulers with those of save(), before an
        optimizer steps. Return which schedulers the script steps after some save(), and what the
        first step after a resume was to change again and did not."""
        before, self._settings = self._settings, None
        if before is None:
            return []
        now = self._state.look_at_settings()
        moved = {name for name, value in now.items() if before.get(name) != value}
        return [*self._stepped_late(moved, now.keys()), *self._lost(moved, now.keys())]

    def _stepped_late(self, moved: set[str], settings: Collection[str]) -> list[str]:
        """Note what changes after each save(): whether that is lost shows after a resume. Name a
        scheduler that is stepped after one save() and not after the next, as at the end of an
        epoch: few restarts are from just that step."""
        between, last, often = self._state.between, self._moved, self._often
        if self._first:
            between.early |= moved
        each = (moved if last is None else moved & last) - between.early
        between.names = between.names.difference(settings) | each
        once = {*self._state.schedulers()} & ((last or set()) - moved - often - between.early)
        once = set() if self._first else once - self._named
        self._named |= once
        step, self._before = self._before, self._saved
        # What comes before the first step alone says nothing about the steps after it.
        self._moved, self._often = (None if self._first else moved), moved & (last or set())
        return [_late(once, step, "optimizer step")] if once else []

    def _lost(self, moved: Collection[str], settings: Collection[str]) -> list[str]:
        """Return what the first step after a resume was to change again and did not."""
        between = self._state.between
        expected, between.expected = between.expected, set()
        lost = [name for name in expected if name in settings and name not in moved]
        kept, self._kept = self._kept, {}
        live = self._state.tensors_named(kept) if kept else {}
        lost += [n for n, one in kept.items() if n in live and torch.equal(one, live[n])]
        if self._restored:
            glimpses, held, self._restored = self._state.look_at_extra(), self._restored, {}
            lost += [
                key
                for key, (was, versions) in held.items()
                if key in glimpses and _is_same(was, versions, glimpses[key])
            ]
        if not lost:
            return []
        return [
            f"{some(sorted(lost))} changed after each save() in the run that saved this step, and "
            f"not between resume() and the first step: the last change is lost. {LAST}"
        ]

    def stepped(self) -> None:
        """Note that an optimizer has stepped, which used the gradients that are there now."""
        if self._used is not None:
            for name, gradient in self._state.gradients():
                self._used[name] = (weakref.ref(gradient), gradient._version)

    def saving(self, step: int) -> list[str]:
        """Return what is wrong as save() begins."""
        self._step, self._extra = step, self._state.look_at_extra()
        tensors = {name: t for one in self._extra.values() for name, t in one.tensors.items()}
        self._versions = {n: t._version for n, t in tensors.items() if not t.is_inference()}
        found = [*self._pending()]
        if unlike := self._state.unlike_saved():
            found.append(
                f"the restored state was saved otherwise: {'; '.join(unlike)}. What the script "
                "changed during training it has to change again before it goes on"
            )
        if missing := self._state.schedulers_missing():
            found.append(
                f"{', '.join(missing)}: a learning-rate scheduler steps with it and is not in "
                "extra: after a restart it would start from the beginning. Pass "
                'extra={"scheduler": scheduler}, unless the script computes it from the step'
            )
        return found

    def _pending(self) -> list[str]:
        if self._used is None:
            return []
        names = []
        for name, gradient in self._state.gradients():
            last, version = self._used.get(name, (None, 0))
            if last is not None and last() is gradient and version == gradient._version:
                return []  # used: of several optimizers the others may have their turn later
            there = gradient.detach()
            if not bool(torch.isfinite(there).all()):
                return []  # a GradScaler leaves this step out
            if bool(there.any()):
                names.append(name)
        if not names:
            return []
        return [
            f"save({self._step}) comes before an optimizer step has used the gradients of "
            f"{some(names)}: gradients are not saved, so a restart would lose them. {LAST}; "
            "with gradient accumulation, once for each optimizer step"
        ]

    def saved(self, computing: Callable[[], object]) -> None:
        """Call ``computing`` once, when the first gradient after this save() is there.

        A backward pass belongs to the next step even if no optimizer is seen to step, and an
        evaluation has none. A hook on a few parameters detects it: a hook on a module would be
        traced, scripted and pickled with the module.
        """
        self.release()
        if not self._extra:
            return
        me = weakref.ref(self)

        def first(parameter: torch.Tensor) -> None:
            this = None if torch.compiler.is_compiling() else me()
            if this is not None and this._awaited:
                this._awaited = False  # it stays registered: FSDP2 is going through them
                computing()

        self._awaited = True
        self._handles = [
            each.register_post_accumulate_grad_hook(first)  # type: ignore[no-untyped-call]
            for each in self._state.trained_ends()
        ]

    def forget(self) -> None:
        """Compare nothing with an older save(): this one may leave its step out."""
        self.release()
        self._extra, self._settings = {}, None

    def release(self) -> None:
        """Wait for no gradient any more."""
        self._awaited = False
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def computing(self, saved: Callable[[int], Mapping[str, torch.Tensor]]) -> list[str]:
        """Return what is wrong as a backward pass begins. ``saved``: returns the tensors of extra
        as save() of this step copied them; called only if torch has counted a write.

        This runs no code of the script: with pipeline stages, a collective in a backward pass would
        wait for ever.
        """
        if not self._extra:
            return []
        now = {**self._extra, **self._state.look_at_extra(foreign=False)}
        moved = {
            name
            for key, was in self._extra.items()
            if key not in self._named
            for name, tensor in now[key].tensors.items()
            if tensor is not was.tensors.get(name) or self._versions.get(name) != _version(tensor)
        }
        copies = saved(self._step) if moved else {}
        return self._say_changed(
            now, {name: copies[name] for name in moved if name in copies}, "backward pass"
        )

    def changing(self, saved: Mapping[str, torch.Tensor]) -> list[str]:
        """Return what is wrong before an optimizer steps. ``saved``: the tensors of extra by name,
        as save() copied them."""
        self._awaited = False  # the hooks stay: an optimizer may step inside of a backward pass
        if not self._extra:
            return []
        found = self._say_changed(self._state.look_at_extra(), saved, "optimizer step")
        self._extra = {}
        return found

    def _say_changed(
        self, now: Mapping[str, Glimpse], saved: Mapping[str, torch.Tensor], until: str
    ) -> list[str]:
        """Report each change of ``extra`` once: the object is not compared again."""
        early = self._state.between.early
        names = [
            key
            for key, was in self._extra.items()
            if key not in self._named | early and _changed(was, now.get(key), saved)
        ]
        self._named.update(names)
        # Whether a change of these was the end of a step shows after a restart.
        later = {key for key in names if self._state.is_recomputed(key)}
        self._state.between.names |= later
        names = [key for key in names if key not in later]
        if not names:
            return []
        return [_late(names, self._step, until)]


def _late(names: Collection[str], step: int, until: str) -> str:
    return (
        f"{some(sorted(names))} changed between save({step}) and the next {until}. If that was the "
        f"end of a step, a restart would miss it. {LAST}"
    )


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _versions(glimpse: Glimpse) -> dict[str, int | None]:
    return {name: _version(tensor) for name, tensor in glimpse.tensors.items()}


def _is_same(was: Glimpse, versions: dict[str, int | None], now: Glimpse) -> bool:
    same = all(tensor is now.tensors.get(name) for name, tensor in was.tensors.items())
    return was.values == now.values and same and versions == _versions(now)


def _changed(was: Glimpse, now: Glimpse | None, saved: Mapping[str, torch.Tensor]) -> bool:
    if now is None or was.values != now.values or was.tensors.keys() != now.tensors.keys():
        return True
    return any(
        name in saved and not same_bits(saved[name], tensor) for name, tensor in now.tensors.items()
    )


def some(names: Collection[str]) -> str:
    """The first of these names, for a message."""
    return ", ".join([*names][:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
