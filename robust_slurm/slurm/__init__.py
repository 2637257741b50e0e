"""The one typed door to Slurm: commands with deadlines in, immutable values or SlurmError out."""

from robust_slurm.slurm.client import Client
from robust_slurm.slurm.door import DrainResult, Slurm
from robust_slurm.slurm.errors import Kind, SlurmError, classify
from robust_slurm.slurm.model import (
    FINISHED,
    Allotted,
    Job,
    Node,
    Partition,
    Placement,
    Step,
    job_id_for_cli,
)
from robust_slurm.slurm.run import Completed, Runner, run_command

__all__ = [
    "FINISHED",
    "Allotted",
    "Client",
    "Completed",
    "DrainResult",
    "Job",
    "Kind",
    "Node",
    "Partition",
    "Placement",
    "Runner",
    "Slurm",
    "SlurmError",
    "Step",
    "classify",
    "job_id_for_cli",
    "run_command",
]
