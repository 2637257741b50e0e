"""API of robust-slurm for training scripts; outside robust-srun, all but Checkpointer does nothing.

Importing this package imports nothing, since the node gate imports it before each job: a name is
loaded when it is first asked for. ``Checkpointer`` needs torch; all else needs the standard library
only. The submodules used by the shim and the supervisor are imported by their own
names (``robust_slurm.record``, ``robust_slurm.slurm``).
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .checkpoint import Checkpointer as Checkpointer
    from .checkpoint import CheckpointError as CheckpointError
    from .checkpoint import StrictError as StrictError
    from .checkpoint.held import held
    from .heartbeat import attach, beat, epoch, phase, restart_reason, resume_step
    from .rejoin.resilient import resilient
    from .resizing.world import accumulate, world
    from .standby import standby_point

# Not Checkpointer: ``import *`` must not need torch.
__all__ = [
    "accumulate",
    "attach",
    "beat",
    "epoch",
    "held",
    "phase",
    "resilient",
    "restart_reason",
    "resume_step",
    "standby_point",
    "world",
]


def __getattr__(name: str) -> object:
    if name not in (*__all__, "CheckpointError", "Checkpointer", "StrictError"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    homes = {
        "accumulate": "resizing.world",
        "held": "checkpoint.held",
        "resilient": "rejoin.resilient",
        "standby_point": "standby",
        "world": "resizing.world",
    }
    home = homes.get(name, "heartbeat")
    home = home if name in __all__ else "checkpoint"
    if home == "checkpoint":
        from sys import version_info

        minor = version_info[1]
        if minor < 10:  # all that imports no torch runs on 3.9
            raise ImportError(
                f"robust_slurm.{name} needs Python 3.10 or later, as new releases of torch do; "
                f"this is 3.{minor}. Heartbeats work without it"
            )
    globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
    return globals()[name]
