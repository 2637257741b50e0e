"""torchtitan: its trainer saves every step here, and resumes here first.

::

    from robust_slurm.integrations.torchtitan import attach

    trainer = config.build()
    attach(trainer, directory="checkpoints")
    trainer.train()

torchtitan's own checkpoints stay as they are configured: they are loaded where there is no step of
ours, and written as before. Nothing of torchtitan is imported here.
"""

from __future__ import annotations

import sys
from typing import Any

from robust_slurm import Checkpointer

from .held import Held, version_error

KNOWN = "torchtitan 0.3"
_NEEDED = ("model_parts", "optimizers", "lr_schedulers", "dataloader", "checkpointer")


def attach(trainer: Any, *, extra: dict[str, Any] | None = None, **options: Any) -> Checkpointer:
    """Have torchtitan's trainer save every step, and resume, by a Checkpointer; return that.

    ``trainer``: a ``torchtitan.trainer.Trainer`` before ``train()``. ``extra`` and ``options``: as
    of ``robust_slurm.Checkpointer`` (``directory``, ``every``, ``keep``, ``mesh``, ...). Saved are
    model parts, optimizers, schedules, data loader, and the trainer's counts of steps and tokens.

    Raises RuntimeError for another release of torchtitan, and what Checkpointer raises.
    """
    for name in _NEEDED:
        if not hasattr(trainer, name):
            raise version_error("torchtitan", "this release", f"Trainer.{name}", KNOWN)
    if getattr(trainer.dataloader, "snapshot_every_n_steps", 1) != 1:
        # Else its workers read all samples again since their last snapshot, or since the start.
        trainer.dataloader.snapshot_every_n_steps = 1
    counts = Held(trainer.state_dict, trainer.load_state_dict)
    checkpointer = Checkpointer(
        model=_one_or_all(trainer.model_parts),
        # Not the container: its state_dict() runs an optimizer step if there is no state yet.
        optimizer=_one_or_all(trainer.optimizers.optimizers),
        loader=trainer.dataloader,
        extra={
            "train_state": counts,
            **{f"scheduler{i}": each for i, each in enumerate(trainer.lr_schedulers.schedulers)},
            **(extra or {}),
        },
        **options,
    )
    theirs = trainer.checkpointer
    load, save, close = theirs.load, theirs.save, theirs.close

    def load_newest(step: int = -1) -> Any:
        return checkpointer.resume() > 0 or load(step=step)

    def save_both(curr_step: int, last_step: bool = False) -> Any:
        saved = save(curr_step, last_step=last_step)
        counts.keep()
        checkpointer.save(curr_step)
        return saved

    def close_both() -> None:
        # The trainer is closed for an error, too: that must not wait for the other ranks.
        checkpointer.__exit__(*sys.exc_info())
        close()

    theirs.load, theirs.save, theirs.close = load_newest, save_both, close_both
    return checkpointer


def _one_or_all(found: Any) -> Any:
    return found[0] if len(found) == 1 else list(found)
