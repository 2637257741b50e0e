"""Lightning: a Callback that saves every optimizer step and resumes at the batch after it.

::

    from robust_slurm.integrations.lightning import RobustCallback

    trainer = Trainer(callbacks=[RobustCallback(directory="checkpoints")])

A step is saved when Lightning asks for the batch after it: then all that belongs to the step is
done, also the validation and the hooks that follow it. So the callback stands between Lightning and
the train dataloader, which ``Strategy.process_dataloader`` passes on.

Used of Lightning: the hooks of Callback, attributes of Trainer and Strategy, and methods and
attributes without an underscore of the loops ``trainer.fit_loop`` and ``fit_loop.epoch_loop``,
whose classes are internal. ``PRIVATE`` names the rest, with the reasons.
"""

from __future__ import annotations

import warnings
from inspect import signature
from operator import attrgetter
from typing import Any

import lightning
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities.model_helpers import is_overridden

from robust_slurm import Checkpointer, CheckpointError, phase
from robust_slurm.checkpoint.capture import rng

from .held import Held, version_error
from .reader import Reader, ReaderOf

try:
    from lightning.pytorch.callbacks import WeightAveraging
except ImportError:  # before 2.6
    WeightAveraging = type(None)

KNOWN = "lightning 2.6.6 and 2.5.6"
UNSUPPORTED = ("FSDPStrategy", "DeepSpeedStrategy", "XLAStrategy", "XLAFSDPStrategy")
LOADED = "_checkpoint_connector._loaded_checkpoint"
AVERAGE = "_average_model"
PRIVATE = {
    f"Trainer.{LOADED}": "emptied: Lightning loads ckpt_path= after on_fit_start, over our step",
    f"WeightAveraging.{AVERAGE}": "saved: its own hooks save it in a whole checkpoint only",
}
"""Private names of Lightning that are used, and why."""
NEEDED = (
    "strategy.process_dataloader",
    "fit_loop.state_dict",
    "fit_loop.load_state_dict",
    "fit_loop.on_iteration_done",
    "fit_loop.epoch_loop.restarting",
    "fit_loop.epoch_loop.batch_progress.current.ready",
)
"""What is looked for in a Trainer before it trains."""
NOT_RESUMABLE = "You're resuming from a checkpoint that ended before the epoch ended"


class RobustCallback(Callback):
    """Saves model, optimizers, schedulers, precision plugin, loops, callbacks and data position.

    The position of a data loader with ``state_dict`` (torchdata's ``StatefulDataLoader``) is
    saved; with any other, the batches of the epoch that are done are read once more at a resume.
    """

    def __init__(self, *, extra: dict[str, Any] | None = None, **options: Any) -> None:
        """``extra`` and ``options``: as of ``robust_slurm.Checkpointer`` (``directory``,
        ``every``, ``keep``, ``mesh``, ...); model, optimizer and loader are the trainer's."""
        self._extra, self._options = dict(extra or {}), options
        self._checkpointer: Checkpointer | None = None
        self._pending: dict[str, Any] | None = None
        self._phase: phase | None = None
        self._readers: list[Reader] = []
        self._limit_val: int | float | None = None
        self._metrics: dict[str, Any] | None = None

    # -- what is saved

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot be resumed, and have the train dataloaders pass through here."""
        if stage != "fit":
            return
        _refuse(trainer)
        self._trainer, self._readers = trainer, []
        process = trainer.strategy.process_dataloader

        def processed(loader: object) -> object:
            loader = process(loader)
            return ReaderOf(self._reader(loader)) if trainer.training else loader

        trainer.strategy.process_dataloader = processed
        # First: callbacks are restored before their own on_fit_start, as Lightning does it.
        trainer.callbacks = [self, *_others(trainer)]

    def _reader(self, loader: object) -> Reader:
        if any(each.fetched for each in self._readers):
            self._readers = []  # Trainer(reload_dataloaders_every_n_epochs=1) has made new ones
        reader = Reader(loader, self._before_batch)
        if self._pending is not None and not self._pending["over"]:
            position = self._pending["readers"][len(self._readers)]
            reader.resume(position)
        self._readers.append(reader)
        return reader

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Resume, before Lightning reads where to begin."""
        self._pending, self._saved, self._over = None, 0, False
        self._held = Held(self._progress, self._keep)
        extra: dict[str, Any] = {"lightning": self._held}
        for i, config in enumerate(trainer.lr_scheduler_configs):
            extra[f"scheduler{i}"] = config.scheduler
        if trainer.precision_plugin.state_dict():
            extra["precision"] = trainer.precision_plugin
        if trainer.datamodule is not None and is_overridden("state_dict", trainer.datamodule):
            extra["datamodule"] = trainer.datamodule
        for each in trainer.callbacks:
            if isinstance(each, WeightAveraging):
                extra[f"callback {each.state_key}"] = _private(each, AVERAGE)
        self._checkpointer = Checkpointer(
            model=trainer.strategy.model,
            optimizer=list(trainer.optimizers),
            extra={**extra, **self._extra},
            **self._options,
        )
        before = rng.states()  # the script's own draws until the first batch come out as before
        self._saved = self._checkpointer.resume()
        self._rng = rng.states()
        rng.restore(before)
        if self._saved:
            self._resume(trainer)

    def _progress(self) -> dict[str, Any]:
        """Return the state of the trainer that is in no object of its own."""
        trainer = self._trainer
        if not self._readers:  # no batch is read: callbacks may not have a state yet
            return {}
        ahead = 0 if self._over else self._ahead()
        return {
            "loops": _counts(trainer),
            "over": self._over,
            "should_stop": trainer.should_stop,
            "ahead": ahead,
            "readers": [] if self._over else [each.position(ahead) for each in self._readers],
            "metrics": _monitored(trainer),
            "callbacks": {
                each.state_key: state for each in _others(trainer) if (state := each.state_dict())
            },
        }

    def _keep(self, state: dict[str, Any]) -> None:
        self._pending = state

    # -- where training goes on

    def _resume(self, trainer: Trainer) -> None:
        pending = self._pending
        assert pending is not None
        if trainer.ckpt_path:
            if trainer.strategy.restore_checkpoint_after_setup:
                raise CheckpointError(
                    f"step {self._saved} is resumed, and ckpt_path={trainer.ckpt_path!r} would be "
                    "loaded over it: call fit() without ckpt_path"
                )
            connector, name = LOADED.split(".")
            _private(trainer, LOADED)
            setattr(getattr(trainer, connector), name, {})  # the step is newer
        for each in _others(trainer):
            if each.state_key in pending["callbacks"]:
                each.load_state_dict(pending["callbacks"][each.state_key])
        trainer.should_stop = pending["should_stop"]
        trainer.fit_loop.load_state_dict(pending["loops"])
        if pending["over"]:
            # The next epoch begins as after any other: nothing of the last one is repeated.
            trainer.fit_loop.on_iteration_done()
            trainer.fit_loop.epoch_loop.restarting = False
        # The positions of all loaders are exact.
        warnings.filterwarnings("ignore", message=NOT_RESUMABLE)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare the first batch after a resume."""
        trainer.callbacks = [*_others(trainer), self]  # last: others are done when a fit ends
        pending = self._pending
        if pending is None or pending["over"]:
            return
        # Lightning would go through the end of the last batch again if a validation was due there.
        self._limit_val, trainer.limit_val_batches = trainer.limit_val_batches, 0
        for each in trainer.callbacks:
            if isinstance(each, StochasticWeightAveraging):
                # It makes its scheduler at the start of an epoch, which has been.
                groups = [dict(group) for group in trainer.optimizers[0].param_groups]
                each.on_train_epoch_start(trainer, pl_module)
                for group, saved in zip(trainer.optimizers[0].param_groups, groups, strict=True):
                    group.update(saved)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin an epoch after one that was over."""
        if self._pending is not None and self._pending["over"]:
            self._pending = None
            rng.restore(self._rng)

    def _before_batch(self, reader: Reader) -> None:
        """Save the step that is done; after a resume, be where it was saved."""
        if reader is not self._readers[0]:  # Lightning reads from them in this order
            return
        pending = self._pending
        if pending is None:
            # The batch that is read ahead when a pass begins comes before hooks of Lightning's.
            if self._ahead() or all(each.has_length for each in self._readers):
                self._save(over=False)
        elif not pending["over"] and reader.fetched >= pending["ahead"]:
            self._go_on(pending)

    def _go_on(self, pending: dict[str, Any]) -> None:
        trainer, self._pending = self._trainer, None
        for each in self._readers:
            each.go_to_position()
        self._unlimit_val()
        trainer.fit_loop.on_iteration_done()  # it is no restart to the end of this epoch
        trainer.callback_metrics.update(pending["metrics"])
        if _batches(_counts(trainer)) != _batches(pending["loops"]):
            raise version_error(
                "lightning", lightning.__version__, "resume at the batch after a saved step", KNOWN
            )
        if trainer.fit_loop.epoch_loop.batch_progress.current.ready and _monitors(trainer):
            self._metrics = {}
        rng.restore(self._rng)

    def _unlimit_val(self) -> None:
        if self._limit_val is not None:
            self._trainer.limit_val_batches, self._limit_val = self._limit_val, None

    def _ahead(self) -> int:
        """Return how many batches are read and not trained: 1 where the length is unknown."""
        if all(each.has_length for each in self._readers):
            return 0
        done: int = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return self._readers[0].taken - done

    # -- saving

    def _save(self, *, over: bool) -> None:
        """Save the step that is done. ``over``: the epoch is over as well."""
        trainer = self._trainer
        if self._checkpointer is not None and trainer.global_step > self._saved:
            self._saved, self._over = trainer.global_step, over
            self._held.keep()
            self._checkpointer.save(self._saved)
            for text in dict.fromkeys(text for each in self._readers for text in each.remarks()):
                self._checkpointer._say(text)

    def on_train_batch_end(self, trainer: Trainer, *given: Any, **named: Any) -> None:
        """Note the metrics of an epoch that was resumed, before its means are taken."""
        if self._metrics is not None:
            self._metrics = _monitored(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count the passes of a new epoch."""
        for each in self._readers:
            each.end_epoch()
        before, self._metrics = self._metrics, None
        if before is None or self._checkpointer is None:
            return
        means = [k for k, v in _monitored(trainer).items() if k not in before or v != before[k]]
        if means:
            self._checkpointer._say(
                f"the mean of {', '.join(means)} over this epoch is that of the batches since the "
                "restart, as Lightning saves none, and a callback or a schedule monitors it. "
                "Monitor a metric of the validation instead"
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step."""
        self._save(over=True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Enter a phase in which no steps are expected."""
        self._phase = phase("eval")
        self._phase.__enter__()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave that phase."""
        if self._metrics is not None:
            self._metrics = _monitored(trainer)
        if self._phase is not None:
            self._phase.__exit__()
            self._phase = None

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """End without waiting for other ranks."""
        self._end(exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the last step to disk and end."""
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        if "_trainer" in vars(self):
            vars(self._trainer.strategy).pop("process_dataloader", None)
            self._unlimit_val()
        self._readers = []
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.__exit__(None if error is None else type(error), error, None)


def _others(trainer: Trainer) -> list[Callback]:
    return [each for each in trainer.callbacks if not isinstance(each, RobustCallback)]


def _counts(trainer: Trainer) -> dict[str, Any]:
    """Return what the loops have counted, without the loaders' states, which the readers have."""
    found: dict[str, Any] = trainer.fit_loop.state_dict()
    found["state_dict"].pop("combined_loader", None)
    return found


def _batches(counts: dict[str, Any]) -> list[Any]:
    names = ("epoch_progress", "epoch_loop.batch_progress", "epoch_loop.state_dict")
    return [counts[name] for name in names]


def _monitors(trainer: Trainer) -> set[str]:
    """Return the names of the metrics that schedules and callbacks look at."""
    found = {config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau}
    found |= {getattr(each, "monitor", None) for each in trainer.callbacks}
    return {name for name in found if isinstance(name, str)}


def _monitored(trainer: Trainer) -> dict[str, Any]:
    """Return the present values of these metrics."""
    names = _monitors(trainer)
    found = trainer.callback_metrics if names else {}
    return {name: found[name].clone() for name in sorted(names) if name in found}


def _private(owner: Any, name: str) -> Any:
    """Return a private attribute. Raises RuntimeError if this release has none of that name."""
    try:
        return attrgetter(name)(owner)
    except AttributeError:
        lacking = f"{type(owner).__name__}.{name}"
        raise version_error("lightning", lightning.__version__, lacking, KNOWN) from None


def _refuse(trainer: Trainer) -> None:
    """Raise for whatever a resume could not restore exactly."""
    for name in NEEDED:
        _private(trainer, name)
    strategy = type(trainer.strategy).__name__
    if strategy in UNSUPPORTED:
        raise TypeError(
            f"{strategy} is not supported; use DDPStrategy or ModelParallelStrategy (FSDP2)"
        )
    if trainer.reload_dataloaders_every_n_epochs > 1:
        raise TypeError(
            "reload_dataloaders_every_n_epochs counts from the epoch that is resumed, so data "
            "would be reloaded in other epochs. Use 0 or 1"
        )
    if "dataloader_iter" in signature(trainer.lightning_module.training_step).parameters:
        raise TypeError("training_step(dataloader_iter) is not supported: take a batch instead")
    for owner in [*trainer.callbacks, trainer.lightning_module, trainer.datamodule]:
        if isinstance(owner, (LearningRateFinder, BatchSizeFinder)):
            raise TypeError(
                f"{type(owner).__name__} trains steps that are undone. Run it, or Tuner, with a "
                "Trainer that has no RobustCallback, and pass what it found to this one"
            )
        theirs = getattr(type(owner), "on_load_checkpoint", None)
        if theirs is getattr(WeightAveraging, "on_load_checkpoint", owner):
            continue  # what it saves there is in extra
        if is_overridden("on_load_checkpoint", owner):
            raise TypeError(
                f"{type(owner).__name__} restores state in on_load_checkpoint(), from a whole "
                "checkpoint, which no step has. Use state_dict() and load_state_dict() (in a "
                "module: buffers), or pass what it keeps to RobustCallback(extra={...})"
            )
