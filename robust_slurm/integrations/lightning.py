"""Lightning: a Callback that saves every optimizer step and resumes at the batch after it.

::

    from robust_slurm.integrations.lightning import RobustCallback

    trainer = Trainer(callbacks=[RobustCallback(directory="checkpoints")])

A step is saved when Lightning has done all that belongs to it: after the validation that follows
it, and after the hooks of an epoch that ends with it. Lightning's own hooks come too early for
that, so the callback wraps five methods of the fit loop of this trainer while it fits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from robust_slurm import Checkpointer, CheckpointError, phase
from robust_slurm.checkpoint.capture import rng
from robust_slurm.checkpoint.capture.loading.loader_state import LoaderState
from robust_slurm.checkpoint.capture.loading.passes import at_its_end, attach, loaders
from robust_slurm.checkpoint.capture.loading.worker_draws import watch

from .held import Held, version_error

KNOWN = "lightning 2.6"
UNSUPPORTED = ("FSDPStrategy", "DeepSpeedStrategy", "XLAStrategy", "XLAFSDPStrategy")
_WRAPPED = {
    "fit_loop": ("_load_combined_loader_states", "on_run_start", "on_advance_end"),
    "epoch_loop": ("on_run_start", "on_advance_end"),
}


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
        self._unwrap: list[Callable[[], None]] = []

    # -- what is saved

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Resume, before Lightning reads where to begin."""
        _refuse(trainer)
        self._trainer = trainer
        self._begun: dict[str, Any] = {}
        self._pending, self._saved, self._over = None, 0, False
        self._draws: list[Tensor] = []
        """Flags of plain loaders with persistent workers, set once a worker draws at random."""
        self._held = Held(self._progress, self._keep)
        extra: dict[str, Any] = {"lightning": self._held}
        for i, config in enumerate(trainer.lr_scheduler_configs):
            extra[f"scheduler{i}"] = config.scheduler
        if trainer.precision_plugin.state_dict():
            extra["precision"] = trainer.precision_plugin
        if trainer.datamodule is not None and is_overridden("state_dict", trainer.datamodule):
            extra["datamodule"] = trainer.datamodule
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
        self._wrap(trainer)

    def _progress(self) -> dict[str, Any]:
        """Return the state of the trainer that is in no object of its own."""
        trainer = self._trainer
        return {
            "loops": trainer.fit_loop.state_dict(),
            "over": self._over,
            "should_stop": trainer.should_stop,
            "begun": self._begun,
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
        if trainer.ckpt_path and trainer.strategy.restore_checkpoint_after_setup:
            raise CheckpointError(
                f"step {self._saved} is resumed, and ckpt_path={trainer.ckpt_path!r} would be "
                "loaded over it: call fit() without ckpt_path"
            )
        trainer._checkpoint_connector._loaded_checkpoint = {}  # of ckpt_path: the step is newer
        for each in _others(trainer):
            if each.state_key in pending["callbacks"]:
                each.load_state_dict(pending["callbacks"][each.state_key])
        trainer.should_stop = pending["should_stop"]
        loops = trainer.fit_loop
        loops.load_state_dict(pending["loops"])
        # They are loaded when the pass over the data begins anew, and not twice.
        pending["loaders"] = loops._combined_loader_states_to_load
        loops._combined_loader_states_to_load = []
        if pending["over"]:
            # The next epoch begins as after any other: nothing of the last one is repeated.
            _Loop.restarting.fset(loops, False)
            loops._resuming_from_checkpoint = False

    def _wrap(self, trainer: Trainer) -> None:
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop

        def wrap(loop: Any, name: str, inside: Callable[..., None]) -> None:
            setattr(loop, name, partial(inside, getattr(loop, name)))
            self._unwrap.append(lambda: delattr(loop, name))

        def before_first_pass(load: Callable[[], None]) -> None:
            combined = fit._combined_loader
            for each in combined.flattened if combined is not None else ():
                for stateful in loaders(each):
                    attach(stateful)
                if not _has_state(each) and getattr(each, "persistent_workers", False):
                    self._draws += [flag] if (flag := watch(each)) is not None else []
            load()
            pending = self._pending
            if pending is not None and not pending["over"] and trainer.current_epoch == 0:
                rng.restore(pending["begun"]["pass"])
            self._begun = {"pass": rng.states()}

        def run_starts(original: Callable[[], None]) -> None:
            original()
            if self._pending is not None and self._pending["over"]:
                rng.restore(self._rng)

        def epoch_begins(original: Callable[[Any], None], fetcher: Any) -> None:
            _refuse_loaders(fetcher)
            pending, self._pending = self._pending, None
            if pending is not None:
                self._reposition(fetcher, pending)
            elif trainer.current_epoch > 0:
                self._begun = {"pass": rng.states()}
            original(fetcher)
            if pending is not None and not pending["over"]:
                rng.restore(self._rng)
                fit._restarting = False  # else the schedules of this epoch's end are left out
            else:
                self._begun["batch"] = rng.states()

        def batch_ends(original: Callable[[Any], None], fetcher: Any) -> None:
            if epoch._skip_next_val:  # no batch was run: a validation that was done is skipped
                epoch._skip_next_val = False
                return
            original(fetcher)
            stops = trainer.should_stop and fit._can_stop_early
            if not epoch._is_training_done and not stops:
                self._save(trainer, over=False)

        def epoch_ends(original: Callable[[], None]) -> None:
            original()
            self._save(trainer, over=True)

        wrap(fit, "_load_combined_loader_states", before_first_pass)
        wrap(fit, "on_run_start", run_starts)
        wrap(fit, "on_advance_end", epoch_ends)
        wrap(epoch, "on_run_start", epoch_begins)
        wrap(epoch, "on_advance_end", batch_ends)

    def _reposition(self, fetcher: Any, pending: dict[str, Any]) -> None:
        """Bring the data to their position: by a loader's state, or by reading up to it."""
        loaders = fetcher.combined_loader.flattened
        stateful = [each for each in loaders if _has_state(each)]
        for loader, state in zip(stateful, pending["loaders"], strict=True):
            LoaderState("loader", loader).put(at_its_end(state) if pending["over"] else state)
        if pending["over"]:  # Lightning begins the pass
            self._begun = {"pass": rng.states()}
            return
        self._begun = pending["begun"]
        if stateful:
            iter(fetcher)
            return
        if self._trainer.current_epoch > 0:
            rng.restore(self._begun["pass"])
            iter(fetcher)
        rng.restore(self._begun["batch"])
        done = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        for _ in range(done):
            next(fetcher)
        fetcher.fetched -= done  # Lightning is about to add them

    # -- saving

    def _save(self, trainer: Trainer, *, over: bool) -> None:
        """Save the step that is done. ``over``: the epoch is over as well."""
        if self._checkpointer is not None and trainer.global_step > self._saved:
            self._saved, self._over = trainer.global_step, over
            self._held.keep()
            self._checkpointer.save(self._saved)
            if any(map(bool, self._draws)):
                self._checkpointer._say(
                    "the dataset draws random numbers in persistent workers: in an epoch after the "
                    "first, a restart draws others. Use persistent_workers=False or torchdata's "
                    "StatefulDataLoader, or seed a generator by epoch and sample"
                )

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Enter a phase in which no steps are expected."""
        self._phase = phase("eval")
        self._phase.__enter__()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave that phase."""
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
        for undo in self._unwrap:
            undo()
        self._unwrap.clear()
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.__exit__(None if error is None else type(error), error, None)


def _others(trainer: Trainer) -> list[Callback]:
    return [each for each in trainer.callbacks if not isinstance(each, RobustCallback)]


def _has_state(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _refuse(trainer: Trainer) -> None:
    """Raise for whatever a resume could not restore exactly."""
    loops = {"fit_loop": trainer.fit_loop, "epoch_loop": trainer.fit_loop.epoch_loop}
    for name, methods in _WRAPPED.items():
        for method in methods:
            if not hasattr(loops[name], method):
                raise version_error("lightning", lightning.__version__, f"{name}.{method}", KNOWN)
    strategy = type(trainer.strategy).__name__
    if strategy in UNSUPPORTED:
        raise TypeError(
            f"{strategy} is not supported; use DDPStrategy or ModelParallelStrategy (FSDP2)"
        )
    for owner in [*trainer.callbacks, trainer.lightning_module, trainer.datamodule]:
        if is_overridden("on_load_checkpoint", owner):
            raise TypeError(
                f"{type(owner).__name__} restores state in on_load_checkpoint(), from a whole "
                "checkpoint, which no step has. Use state_dict() and load_state_dict() (in a "
                "module: buffers), or pass what it keeps to RobustCallback(extra={...})"
            )


def _refuse_loaders(fetcher: Any) -> None:
    """Raise where it cannot be known which batch was trained last."""
    if type(fetcher).__name__ == "_DataLoaderIterDataFetcher":
        raise TypeError("training_step(dataloader_iter) is not supported: take a batch instead")
    states = [_has_state(each) for each in fetcher.combined_loader.flattened]
    if any(states) and not all(states):
        raise TypeError("some train dataloaders have a state_dict() and some have none")
    if any(states) and fetcher.length is None:
        raise TypeError(
            "Lightning reads one batch ahead of a train dataloader without a length, so its "
            "state_dict() is one batch late. Give its dataset a __len__"
        )
