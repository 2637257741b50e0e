"""torchtitan: a CheckpointManager that saves every step here as well, and resumes here first.

::

    from robust_slurm.integrations.torchtitan import RobustCheckpointManager

    trainer = Trainer.Config(
        checkpoint=RobustCheckpointManager.Config(directory="checkpoints"), ...
    ).build()
    trainer.train()

torchtitan's own checkpoints are as its fields configure them (``enable``, ``interval``, ...): they
are loaded where there is no step of ours, and written as before.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from robust_slurm import Checkpointer

from .held import Held, version_error

KNOWN = "torchtitan 0.3.0"

try:
    from torchtitan.components.checkpoint import CheckpointManager
except ImportError as err:
    raise version_error(
        "torchtitan", version("torchtitan"), "components.checkpoint.CheckpointManager", KNOWN
    ) from err


class RobustCheckpointManager(CheckpointManager):
    """Saves model parts, optimizers, schedules, data loader, and the counts of steps and tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """The fields of CheckpointManager, and these."""

        directory: str | None = None
        """Directory of the durable checkpoints, as of ``robust_slurm.Checkpointer``."""

        every: int | None = None
        """Steps between durable checkpoints, as of ``robust_slurm.Checkpointer``."""

        keep: int | None = None
        """How many durable checkpoints are kept, as of ``robust_slurm.Checkpointer``."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: Any,
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        **more: Any,
    ) -> None:
        train_state = states["train_state"]
        given = {"dataloader": dataloader, "model_parts": model_parts, "optimizers": optimizers}
        super().__init__(config, **given, lr_schedulers=lr_schedulers, states=states, **more)
        if getattr(dataloader, "snapshot_every_n_steps", 1) != 1:
            # Else its workers read all samples again since their last snapshot, or since the start.
            dataloader.snapshot_every_n_steps = 1
        self._counts = Held(train_state.state_dict, train_state.load_state_dict)
        self._objects = {
            "model": _one_or_all(model_parts),
            # Not the container: its state_dict() runs an optimizer step if there is no state yet.
            "optimizer": _one_or_all(optimizers.optimizers),
            "loader": dataloader,
        }
        self._schedules = {f"scheduler{i}": x for i, x in enumerate(lr_schedulers.schedulers)}
        self._config = config
        self._checkpointer: Checkpointer | None = None

    def options(self) -> dict[str, Any]:
        """Return more keywords for ``robust_slurm.Checkpointer``; override it for ``mesh``."""
        config = self._config
        return {"directory": config.directory, "every": config.every, "keep": config.keep}

    # torchtitan's methods do nothing unless its own checkpoints are enabled; these do.

    def load(self, step: int = -1) -> bool:
        """Resume here; where there is no step, load torchtitan's checkpoint."""
        options = self.options()
        extra = {"train_state": self._counts, **self._schedules, **options.pop("extra", {})}
        self._checkpointer = Checkpointer(**self._objects, extra=extra, **options)
        return self._checkpointer.resume() > 0 or bool(super().load(step))

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save torchtitan's checkpoint if it is due, and this step here."""
        saved = bool(super().save(curr_step, last_step))
        if self._checkpointer is not None:  # else it is a seed checkpoint
            self._counts.keep()
            self._checkpointer.save(curr_step)
        return saved

    def close(self) -> None:
        """Write the last step to disk and end."""
        checkpointer = getattr(self, "_checkpointer", None)
        if checkpointer is not None:
            # The trainer is closed for an error, too: that must not wait for the other ranks.
            checkpointer.__exit__(*sys.exc_info())
        super().close()


def _one_or_all(found: Any) -> Any:
    return found[0] if len(found) == 1 else list(found)
