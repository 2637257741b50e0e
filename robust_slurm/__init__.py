"""API of robust-slurm for training scripts; outside robust-srun, all but Checkpointer does nothing.

Importing this package imports the standard library only; ``Checkpointer`` is loaded when it is
asked for, and needs torch. The submodules used by the shim and the supervisor are imported by
their own names (``robust_slurm.record``, ``robust_slurm.slurm``).
"""

from .heartbeat import attach, beat, epoch, phase, restart_reason, resume_step
from .standby import standby_point

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .checkpoint import Checkpointer as Checkpointer
    from .checkpoint import CheckpointError as CheckpointError

# Not Checkpointer: ``import *`` must not need torch.
__all__ = ["attach", "beat", "epoch", "phase", "restart_reason", "resume_step", "standby_point"]


def __getattr__(name: str) -> object:
    if name in ("CheckpointError", "Checkpointer"):
        from . import checkpoint

        return getattr(checkpoint, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
