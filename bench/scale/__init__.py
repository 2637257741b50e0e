"""Limits and costs of one machine: a large lab, a large job, a large cluster of real Slurm."""
