"""A real Slurm cluster on one machine, with faults on command (development only; needs root)."""

from lab.cluster import Cluster, Lab
from lab.errors import LabError

__all__ = ["Cluster", "Lab", "LabError"]
