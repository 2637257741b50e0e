"""Hugging Face transformers: a TrainerCallback that saves every optimizer step and resumes there.

::

    from robust_slurm.integrations.transformers import RobustCallback

    trainer.add_callback(RobustCallback(trainer, directory="checkpoints"))
    trainer.train()

``Trainer.train`` fixes epoch and batch before ``on_train_begin``, and logs and evaluates after
``on_step_end``, so hooks alone resume the weights and begin the data anew. The callback therefore
wraps six methods of this trainer; batches that are done are skipped by transformers' own code.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import transformers
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from robust_slurm import Checkpointer, CheckpointError, phase
from robust_slurm.checkpoint.capture import rng
from robust_slurm.checkpoint.capture.loading.worker_draws import watch

from .held import Held, version_error

KNOWN = "transformers 5.23"
HISTORY = 1000  # entries of the log history that are carried over
LOOKS = 3  # fetches that are watched for draws from the process's generators
_WRAPPED = (
    "_init_training_state",
    "_prepare_for_training",
    "_run_epoch",
    "_load_rng_state",
    "_maybe_log_save_evaluate",
    "get_batch_samples",
    "_evaluate",
)
_COUNTERS = (
    "current_flos",
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_initial_global_step",
    "_initial_num_input_tokens_seen",
)
_HERE = "robust-slurm"  # in place of a directory to resume from


class RobustCallback(TrainerCallback):
    """Saves model, optimizer, schedule, scaler, trainer state, callbacks and data position."""

    def __init__(
        self, trainer: Trainer, *, extra: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """``trainer``: the one it is added to. ``extra`` and ``options``: as of
        ``robust_slurm.Checkpointer`` (``directory``, ``every``, ``keep``, ``mesh``, ...)."""
        self._trainer, self._extra, self._options = trainer, dict(extra or {}), options
        self._checkpointer: Checkpointer | None = None
        self._pending: dict[str, Any] | None = None
        self._saved = self._epoch = self._epoch_begun = self._updates = self._looks = 0
        self._over = False
        self._draws: Any = None
        """Set once a worker draws a random number; None: there is no worker."""
        self._model: Any = None
        for name in _WRAPPED:
            if not hasattr(trainer, name):
                raise version_error(
                    "transformers", transformers.__version__, f"Trainer.{name}", KNOWN
                )
        self._prepare = trainer._prepare_for_training
        for name in _WRAPPED:
            inside = getattr(self, f"_on_{name.lstrip('_')}")
            setattr(trainer, name, partial(inside, getattr(trainer, name)))

    # -- what is saved

    def _begin(self) -> None:
        """Make the Checkpointer, now that model and optimizer are wrapped, and resume."""
        trainer = self._trainer
        if trainer.is_deepspeed_enabled:
            raise TypeError("DeepSpeed is not supported; use FSDP2 (fsdp_version: 2) or DDP")
        self._epoch_rng: dict[str, Any] = {}
        self._tr_loss: Any = None
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

    def _progress(self) -> dict[str, Any]:
        trainer = self._trainer
        state = dataclasses.replace(
            trainer.state, stateful_callbacks={}, log_history=trainer.state.log_history[-HISTORY:]
        )
        return {
            "state": json.dumps(dataclasses.asdict(state)),
            "callbacks": json.dumps(_callback_states(trainer)),
            "counters": {name: getattr(trainer, name, 0) for name in _COUNTERS},
            "tr_loss": self._loss(),
            "epoch": self._epoch + self._over,
            "steps": 0 if self._over else trainer.state.global_step - self._epoch_begun,
            "stopped": self._over and trainer.control.should_training_stop,
            "epoch_rng": self._epoch_rng,
        }

    def _loss(self) -> Any:
        """Return a copy of the sum of losses, which the next step adds to; None: not begun."""
        total = getattr(self._trainer, "_tr_loss", None)
        if self._tr_loss is None and total is not None:
            self._tr_loss = total.clone()
        elif total is not None:
            self._tr_loss.copy_(total)  # where the last copy was: one tensor of the snapshot
        return self._tr_loss

    def _keep(self, state: dict[str, Any]) -> None:
        self._pending = state

    def _save(self, *, over: bool) -> None:
        """Save the step that is done. ``over``: the epoch is over as well."""
        step = self._trainer.state.global_step
        if self._checkpointer is not None and step > self._saved:
            self._saved, self._over = step, over
            self._held.keep()
            self._checkpointer.save(step)
            if self._draws is not None and bool(self._draws):
                self._checkpointer._say(
                    "the dataset or data_collator draws random numbers in worker processes: what "
                    "it draws after a restart within an epoch differs. Give it a generator that is "
                    "seeded by the sample"
                )

    # -- the trainer's methods; each takes the original first, and stands in its place

    def _on_init_training_state(
        self,
        original: Callable[..., Any],
        max_steps: int,
        updates: int,
        epochs: int,
        resume: Any,
        trial: Any,
    ) -> tuple[int, int]:
        trainer = self._trainer
        self._pending = None
        # Before anything is restored: what is wrapped now is not wrapped again later.
        self._model, _ = self._prepare(max_steps, None, None)
        self._begin()
        pending = self._pending
        if pending is None:
            began: tuple[int, int] = original(max_steps, updates, epochs, resume, trial)
            return began
        if resume is not None:
            raise CheckpointError(
                f"step {self._saved} is resumed, and resume_from_checkpoint={resume!r} would "
                "be loaded over it: call train() without it"
            )
        original(max_steps, updates, epochs, None, trial)
        state = json.loads(pending["state"])
        state["stateful_callbacks"] = trainer.state.stateful_callbacks
        trainer.state = TrainerState(**state)
        _set_callback_states(trainer, json.loads(pending["callbacks"]))
        trainer.state.init_training_references(trainer, max_steps, epochs, trial)
        if pending["stopped"]:
            return epochs, 0
        return pending["epoch"], pending["steps"] * trainer.args.gradient_accumulation_steps

    def _on_prepare_for_training(
        self, _original: Callable[..., Any], max_steps: int, loader: Any, resume: Any
    ) -> tuple[Any, Any]:
        trainer = self._trainer
        if self._pending is None and resume is not None:  # a checkpoint of transformers' own
            trainer._load_optimizer_and_scheduler(resume)
            trainer._load_scaler(resume)
        trainer.callback_handler.train_dataloader = loader
        self._draws = watch(getattr(loader, "base_dataloader", loader))
        return self._model, loader

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the counters and the sum of losses, which ``train`` has just reset."""
        if self._pending is not None:
            for name, value in self._pending["counters"].items():
                setattr(self._trainer, name, value)
            self._trainer._tr_loss.copy_(self._pending["tr_loss"])

    def _on_run_epoch(self, original: Callable[..., Any], **given: Any) -> None:
        pending, self._pending = self._pending, None
        self._epoch, self._epoch_begun = given["epoch"], self._trainer.state.global_step
        self._updates, self._looks = given["num_update_steps_per_epoch"], 0
        if pending is None:
            self._epoch_rng = rng.states()
        else:
            given["resume_from_checkpoint"] = _HERE
            self._epoch_begun -= pending["steps"]
            if pending["steps"]:
                self._epoch_rng = pending["epoch_rng"]
                rng.restore(self._epoch_rng)
            else:
                rng.restore(self._rng)
                self._epoch_rng = rng.states()
        original(**given)
        self._save(over=True)

    def _on_load_rng_state(self, original: Callable[[Any], None], directory: Any) -> None:
        if directory == _HERE:
            rng.restore(self._rng)
        else:
            original(directory)

    def _on_maybe_log_save_evaluate(
        self, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        original(*args, **kwargs)
        trainer, control = self._trainer, self._trainer.control
        ends = control.should_epoch_stop or control.should_training_stop
        if not ends and trainer.state.global_step - self._epoch_begun < self._updates:
            self._save(over=False)

    def _on_get_batch_samples(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._looks += 1
        if not 1 < self._looks <= LOOKS:  # the first one begins the pass
            return original(*args, **kwargs)
        before = rng.states()
        batches = original(*args, **kwargs)
        if not _same(before, rng.states()) and self._checkpointer is not None:
            self._checkpointer._say(
                "the dataset or data_collator draws from the process's random generators: "
                "what it draws for the batch after a restart differs. Give it a generator "
                "that is seeded by the sample"
            )
        return batches

    def _on_evaluate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with phase("eval"):
            return original(*args, **kwargs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the last step to disk and end."""
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close()


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
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool((one == other).all()) if hasattr(one, "shape") else bool(one == other)
