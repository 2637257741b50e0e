"""The one typed door to Slurm: commands with deadlines in, immutable values or SlurmError out."""

from robust_slurm.slurm.client import SlurmClient
from robust_slurm.slurm.door import DrainResult, Slurm
from robust_slurm.slurm.errors import Kind, SlurmError, classify
from robust_slurm.slurm.model import (
    FINISHED,
    Allotted,
    Job,
    JobPlacement,
    Node,
    Partition,
    StandbyClaim,
    Step,
    job_id_for_cli,
)
from robust_slurm.slurm.run import Completed, Runner, run_command

__all__ = [
    "FINISHED",
    "Allotted",
    "Completed",
    "DrainResult",
    "Job",
    "JobPlacement",
    "Kind",
    "Node",
    "Partition",
    "Runner",
    "Slurm",
    "SlurmClient",
    "SlurmError",
    "StandbyClaim",
    "Step",
    "classify",
    "job_id_for_cli",
    "run_command",
]
