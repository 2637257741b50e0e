"""Slurm in a lab: its records and logs as text, and its accounting."""
