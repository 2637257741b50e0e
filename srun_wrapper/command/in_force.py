"""The settings in force: those of the user, less what does not fit the kind of the job."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import msgspec

from robust_slurm.config import Config
from robust_slurm.slurm import Slurm, SlurmError
from srun_wrapper.command.kinds import for_kind
from srun_wrapper.command.srun_options import SrunCommand
from srun_wrapper.command.step_request import StepRequest
from srun_wrapper.protocol.task_options import TaskOptions

NEVER = 1e9  # s


def in_force(config: Config, command: SrunCommand | None = None) -> Config:
    """Return the settings without what a job of this kind cannot have. Raises UsageError."""
    if config.mode == "observe":
        return _observe(config)
    if command is not None:
        config = for_kind(config, command)
    if config.rank_env:
        return config
    # Independent tasks have no steps in common, and nothing to restore.
    return replace(
        config, hang=False, nan="ignore", checkpoint=False, warm=False, standby_partition=""
    )


def _observe(config: Config) -> Config:
    """Switch off all that starts, stops, tests or replaces anything; no spare is kept out."""
    return replace(
        config,
        spares=0,
        code="",
        standby_partition="",
        requeue="never",
        requeue_on="",
        drain="never",
        slow="warn" if config.slow == "replace" else config.slow,
        stop_tests=0.0,
        replay=0,
        checkpoint=False,
        warm=False,
    )


def observing(options: TaskOptions, request: StepRequest) -> TaskOptions:
    """Return the shims' options under which nothing ends a rank but Slurm and the rank itself."""
    bad = request.kill_on_bad_exit
    if bad is None:
        with contextlib.suppress(SlurmError):
            bad = int(Slurm().config().get("KillOnBadExit") == "1")
    return msgspec.structs.replace(
        options, alone=True, kill_on_bad=bool(bad), outage_wait=NEVER, suspend_limit=NEVER
    )


def checkpoint_env(config: Config) -> dict[str, str]:
    """Return a Checkpointer's defaults, as variables, for arguments that the script leaves out."""
    return {
        "ROBUST_CHECKPOINT_DIR": absolute(config.checkpoint_dir),
        "ROBUST_CHECKPOINT_EVERY": str(config.checkpoint_every),
        "ROBUST_CHECKPOINT_MINUTES": str(config.checkpoint_minutes),
        "ROBUST_CHECKPOINT_KEEP": str(config.checkpoint_keep),
    }


def absolute(directory: str) -> str:
    """Return the absolute path: tasks may run in another directory (--chdir). "" stays ""."""
    return str(Path(directory).expanduser().absolute()) if directory else ""
