"""Hugging Face transformers: a TrainerCallback that saves every optimizer step and resumes there.

::

    from robust_slurm.integrations.transformers import RobustCallback

    trainer.add_callback(RobustCallback(trainer, directory="checkpoints"))
    trainer.train()

``Trainer.train`` decides where it begins before any hook is called, and a step can be restored
only when model and optimizer are wrapped, in ``on_train_begin``. So ``train`` is called again if a
step is found there, with a checkpoint directory that has a ``trainer_state.json`` and nothing else:
transformers brings epoch, batch and data to their place itself.

A step is saved when the batches after it are asked for (``get_batch_samples``): it has been logged
and evaluated then. What is overridden, on this trainer only, are public methods of Trainer, but for
``PRIVATE``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from robust_slurm import Checkpointer, phase
from robust_slurm.checkpoint.capture import rng
from robust_slurm.checkpoint.capture.loading.worker_draws import watch

from .held import Held, version_error

KNOWN = "transformers 5.23.0 and 4.57.6"
HISTORY = 1000  # entries of the log history that are carried over
LOOKS = 3  # fetches that are watched for draws from the process's generators
STATE_FILE = "trainer_state.json"  # of a checkpoint directory of transformers
OVERRIDDEN = ("train", "get_batch_samples", "training_step", "evaluate", "create_scheduler")
"""Public methods of Trainer in whose place this callback stands."""
PRIVATE = {
    "_load_from_checkpoint": "skipped for our directory: it raises where there are no weights",
    "_globalstep_last_logged": "restored: the next logged loss is the mean since that step",
    "_total_loss_scalar": "restored: train() returns the mean of all losses",
    "_initial_global_step": "restored where a release has it: the step that this mean begins at",
}
"""Private names of Trainer that are used, and why."""

WORKERS = (
    "the train dataset or data_collator draws random numbers in workers: after a restart within an "
    "epoch it draws others, as transformers skips the samples that are done. Give it a generator "
    "that is seeded by the sample"
)


class _Found(Exception):
    """A step of ours is restored: train() is to begin there."""


class RobustCallback(TrainerCallback):
    """Saves model, optimizer, schedule, scaler, trainer state, callbacks and data position."""

    def __init__(
        self, trainer: Trainer, *, extra: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """``trainer``: the one it is added to. ``extra`` and ``options``: as of
        ``robust_slurm.Checkpointer`` (``directory``, ``every``, ``keep``, ``mesh``, ...)."""
        self._trainer, self._extra, self._options = trainer, dict(extra or {}), options
        self._checkpointer: Checkpointer | None = None
        self._here = ""
        self._draws: Any = None
        for name in (*OVERRIDDEN[:-1], "_load_from_checkpoint"):
            inside = getattr(self, f"_on_{name.lstrip('_')}")
            setattr(trainer, name, partial(inside, _method(trainer, name)))

    # -- where training begins

    def _on_train(self, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        trainer = self._trainer
        _refuse(trainer)
        callbacks = trainer.callback_handler.callbacks
        # First: others begin once, and are done when a step of theirs is saved.
        callbacks[:] = [self, *(each for each in callbacks if each is not self)]
        self._pending: dict[str, Any] | None = None
        self._saved, self._epoch, self._epoch_begun, self._looks = 0, -1, 0, 0
        self._over, self._checked, self._new_workers = False, True, False
        self._total: Any = None
        self._carried: Any = None
        self._begun_rng: dict[str, Any] = {}
        start = rng.states()
        try:
            try:
                return original(*given, **named)
            except _Found:
                rng.restore(start)  # the data are made once more, as before
            return self._train_on(original, *given, **named)
        except BaseException:
            self._end(*sys.exc_info())
            raise

    def _train_on(self, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Call train() again, to begin at the step that is restored."""
        trainer, pending, checkpointer = self._trainer, self._pending, self._checkpointer
        assert pending is not None and checkpointer is not None
        theirs = given[0] if given else named.pop("resume_from_checkpoint", None)
        if theirs:
            checkpointer._say(
                f"step {self._saved} is resumed; resume_from_checkpoint={theirs!r} is not used"
            )
        # What the first call has made is used again: this object refers to it.
        make, create = trainer.model_init, trainer.create_scheduler
        trainer.create_scheduler = partial(self._on_create_scheduler, trainer.lr_scheduler)
        trainer.model_init = None
        if handle := getattr(trainer, "neftune_hook_handle", None):
            handle.remove()  # train() adds it again
        state = json.loads(pending["state"])
        state["stateful_callbacks"] = trainer.state.stateful_callbacks
        state["global_step"] = self._position(pending)
        with tempfile.TemporaryDirectory(prefix="robust-slurm-") as self._here:
            TrainerState(**state).save_to_json(str(Path(self._here) / STATE_FILE))
            try:
                return original(self._here, *given[1:], **named)
            finally:
                trainer.model_init, trainer.create_scheduler, self._here = make, create, ""

    def _position(self, pending: dict[str, Any]) -> int:
        """Return the step that transformers makes epoch and batch of."""
        if pending["over"]:
            return sys.maxsize * self._updates  # no epoch is left
        return int(pending["epoch"] * self._updates + pending["steps"])

    def _on_load_from_checkpoint(self, original: Callable[..., Any], *given: Any) -> Any:
        return None if self._here and given[0] == self._here else original(*given)

    def _on_create_scheduler(self, schedule: Any, *_: Any, **__: Any) -> Any:
        self._trainer.lr_scheduler = schedule
        return schedule

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Resume, now that model and optimizer are wrapped."""
        if state.is_hyper_param_search:
            raise TypeError("hyperparameter_search() is not supported: it trains several models")
        self._loader = more["train_dataloader"]
        self._watch(self._loader)
        if self._checkpointer is None:
            self._updates = _updates_per_epoch(more["train_dataloader"], args, state)
            self._begin()
            if self._pending is not None:
                raise _Found
        elif self._pending is not None:
            pending = self._pending
            state.global_step = self._saved
            self._epoch, self._checked = pending["epoch"] - 1, pending["over"]
            self._new_workers = True
            self._carried = pending["total"]
            for name, value in pending["counters"].items():
                setattr(self._trainer, name, value)

    def _watch(self, loader: Any) -> None:
        """Watch the workers of a loader whose samples are skipped, not read, at a resume."""
        loader = getattr(loader, "base_dataloader", loader)  # accelerate's wrap another
        streams = isinstance(getattr(loader, "dataset", None), IterableDataset)
        if getattr(loader, "num_workers", 0) and not streams:
            self._draws = watch(loader)

    def _begin(self) -> None:
        """Make the Checkpointer and resume."""
        trainer = self._trainer
        self._held = Held(self._progress, self._keep)
        extra = {"trainer": self._held, "scheduler": trainer.lr_scheduler}
        if trainer.accelerator.scaler is not None:
            extra["scaler"] = trainer.accelerator.scaler
        self._checkpointer = Checkpointer(
            model=trainer.model_wrapped,
            optimizer=trainer.optimizer,
            extra={**extra, **self._extra},
            **self._options,
        )
        before = rng.states()
        self._saved = self._checkpointer.resume()
        self._rng = rng.states()
        rng.restore(before)

    # -- what is saved

    def _progress(self) -> dict[str, Any]:
        trainer = self._trainer
        history = trainer.state.log_history[-HISTORY:]
        if self._over and history and "train_loss" in history[-1]:
            del history[-1]  # the summary: train() writes one at the end of each call
        state = dataclasses.replace(trainer.state, stateful_callbacks={}, log_history=history)
        return {
            "state": json.dumps(dataclasses.asdict(state)),
            "callbacks": json.dumps(_callback_states(trainer)),
            "counters": _counters(trainer),
            "total": None if self._total is None else self._total.clone(),
            "epoch": self._epoch,
            "steps": trainer.state.global_step - self._epoch_begun,
            "over": self._over,
            "rng": self._begun_rng,
        }

    def _keep(self, state: dict[str, Any]) -> None:
        self._pending = state

    def _save(self, *, over: bool) -> None:
        """Save the step that is done. ``over``: training is over as well."""
        step = self._trainer.state.global_step
        if self._checkpointer is not None and step > self._saved:
            self._saved, self._over = step, over
            self._held.keep()
            self._checkpointer.save(step)
            if self._draws is not None and bool(self._draws):
                self._checkpointer._say(WORKERS)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Note the generators that the order of the data comes from, or restore them."""
        pending = self._pending
        self._epoch, self._looks = self._epoch + 1, 0
        self._epoch_begun = state.global_step - (pending["steps"] if pending else 0)
        if pending is None or not pending["steps"]:
            self._make_workers()
        if pending is None:
            self._begun_rng = {"epoch": rng.states()}
        else:
            self._begun_rng = pending["rng"]
            rng.restore(self._begun_rng["epoch"])

    def _make_workers(self) -> None:
        """Make the persistent workers that an epoch after a resume would have found, once: to make
        them draws a random number."""
        loader = getattr(self._loader, "base_dataloader", self._loader)
        made, self._new_workers = self._new_workers, False
        if made and self._epoch and getattr(loader, "persistent_workers", False):
            before = rng.states()
            iter(loader)
            rng.restore(before)

    def _on_get_batch_samples(self, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        if self._checkpointer is None:
            return original(*given, **named)
        pending, self._pending = self._pending, None
        if pending is not None:
            return self._go_on(pending, partial(original, *given, **named))
        self._begun_rng.setdefault("batch", rng.states())
        # transformers 4.57 asks again where no batch is left, before it ends the epoch.
        if self._trainer.state.global_step - self._epoch_begun < self._updates:
            self._save(over=False)
        self._looks += 1
        if not 1 < self._looks <= LOOKS:  # the first one begins the pass
            return original(*given, **named)
        before = rng.states()
        batches = original(*given, **named)
        if not _same(before, rng.states()):
            self._checkpointer._say(
                "the dataset or data_collator draws from the process's random generators: "
                "what it draws for the batch after a restart differs. Give it a generator "
                "that is seeded by the sample"
            )
        return batches

    def _go_on(self, pending: dict[str, Any], fetch: Callable[[], Any]) -> Any:
        """Fetch the batches after the step that was resumed."""
        _set_callback_states(self._trainer, json.loads(pending["callbacks"]))
        if not pending["steps"]:
            rng.restore(self._rng)
            return fetch()
        rng.restore(self._begun_rng["batch"])  # the pass begins here, and batches are skipped
        with _told_once(self._loader, self._epoch):
            batches = fetch()
        rng.restore(self._rng)
        return batches

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Require that transformers has begun in the epoch that was saved."""
        if not self._checked and math.ceil(state.epoch or 0) - 1 != self._epoch:
            self._lacks("resume in the epoch of a saved step")
        self._checked = True

    def _lacks(self, what: str) -> NoReturn:
        raise version_error("transformers", transformers.__version__, what, KNOWN)

    # -- the logged loss: transformers adds up what training_step returns

    def _on_training_step(self, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        loss = original(*given, **named)
        if self._checkpointer is None:
            return loss
        if self._total is None:
            self._total = torch.zeros_like(loss, requires_grad=False)
        carried, self._carried = self._carried, None
        if carried is not None:
            self._total.copy_(carried)
        total, step = self._total.clone(), loss.detach()
        self._total += step
        if self._trainer.args.logging_nan_inf_filter:  # as transformers does it
            since = self._trainer.state.global_step - _counters(self._trainer)[LOGGED]
            finite = torch.isfinite(step)
            self._total.copy_(torch.where(finite, self._total, total + total / (1 + since)))
        return loss if carried is None else self._total.clone()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
        logs: dict[str, Any] | None = None, **more: Any,
    ) -> None:  # fmt: skip
        """Begin a new sum of losses when one is logged."""
        if logs is not None and "loss" in logs and self._total is not None:
            self._total.zero_()

    # -- the end

    def _on_evaluate(self, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        with phase("eval"):
            return original(*given, **named)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Write the last step to disk and end."""
        if self._pending is not None:  # it had ended
            _set_callback_states(self._trainer, json.loads(self._pending["callbacks"]))
        self._save(over=True)
        self._end(None, None, None)

    def _end(self, *error: Any) -> None:
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.__exit__(*error)


LOGGED = "_globalstep_last_logged"


def _method(trainer: Trainer, name: str) -> Callable[..., Any]:
    if not hasattr(trainer, name):
        raise version_error("transformers", transformers.__version__, f"Trainer.{name}", KNOWN)
    found: Callable[..., Any] = getattr(trainer, name)
    return found


def _counters(trainer: Trainer) -> dict[str, Any]:
    """Return what the trainer has counted outside its state."""
    for name in (LOGGED, "_total_loss_scalar", "current_flos"):
        _method(trainer, name)
    names = (LOGGED, "_total_loss_scalar", "current_flos", "_initial_global_step")
    return {name: getattr(trainer, name) for name in names if hasattr(trainer, name)}


def _updates_per_epoch(loader: Any, args: TrainingArguments, state: TrainerState) -> int:
    """Return how many optimizer steps transformers counts as an epoch."""
    try:
        batches = len(loader)
    except TypeError:  # a stream
        return int(state.max_steps)
    return max(math.ceil(batches / int(args.gradient_accumulation_steps)), 1)


@contextlib.contextmanager
def _told_once(loader: Any, epoch: int) -> Iterator[None]:
    """Tell samplers and data set the epoch, and nothing else until the pass has begun.

    accelerate 1.12 begins a pass that skips batches with the order of epoch 0.
    """
    found: dict[int, Any] = {}
    todo = [getattr(loader, name, None) for name in ("dataset", "batch_sampler", "sampler")]
    while todo:
        each = todo.pop()
        if each is None or id(each) in found:
            continue
        found[id(each)] = each
        todo += [getattr(each, "__dict__", {}).get(name) for name in ("batch_sampler", "sampler")]
    told = [each for each in found.values() if hasattr(each, "set_epoch")]
    for each in told:
        each.set_epoch(epoch)
        vars(each)["set_epoch"] = _keep_epoch
    try:
        yield
    finally:
        for each in told:
            vars(each).pop("set_epoch", None)


def _keep_epoch(epoch: int) -> None:
    """Stand in for a set_epoch()."""


def _refuse(trainer: Trainer) -> None:
    """Raise for whatever a resume could not restore exactly."""
    if trainer.is_deepspeed_enabled:
        raise TypeError("DeepSpeed is not supported; use FSDP2 (fsdp_version: 2) or DDP")
    if trainer.args.auto_find_batch_size:
        raise TypeError(
            "auto_find_batch_size is not supported: steps would be of another size after a "
            "restart. Set per_device_train_batch_size"
        )
    if trainer.args.ignore_data_skip:
        raise TypeError(
            "ignore_data_skip is not supported: an epoch that is resumed would begin anew"
        )


def _exportable(trainer: Trainer) -> list[Any]:
    """The callbacks that have a state. That of ``control`` is not needed once a step is saved."""
    return [
        each for each in trainer.callback_handler.callbacks if isinstance(each, ExportableState)
    ]


def _callback_states(trainer: Trainer) -> dict[str, Any]:
    """Map each class name to the states of its callbacks."""
    states: dict[str, Any] = {}
    for each in _exportable(trainer):
        states.setdefault(type(each).__name__, []).append(each.state())
    return states


def _set_callback_states(trainer: Trainer, states: dict[str, Any]) -> None:
    """Set what the callbacks have counted; transformers would put new ones in their place."""
    for each in _exportable(trainer):
        if states.get(type(each).__name__):
            for name, value in states[type(each).__name__].pop(0)["attributes"].items():
                setattr(each, name, value)


def _same(one: Any, other: Any) -> bool:
    """True if two states of generators are equal."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(v, other[k]) for k, v in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool((one == other).all()) if hasattr(one, "shape") else bool(one == other)
