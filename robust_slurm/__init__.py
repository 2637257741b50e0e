"""What a training script may use of robust-slurm; everything here does nothing outside it.

Importing this package imports the standard library only. The submodules used by the shim and the
supervisor are imported by their own names (``robust_slurm.record``, ``robust_slurm.slurm``).
"""

from .heartbeat import attach, beat, epoch, phase, restart_reason, resume_step

__all__ = ["attach", "beat", "epoch", "phase", "restart_reason", "resume_step"]
