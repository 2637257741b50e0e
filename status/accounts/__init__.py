"""Accounts of time: what each job's time and GPUs were spent on. Pure, but for two edges.

``sacct.py`` asks Slurm, ``gather.py`` reads the records; all else computes in whole milliseconds,
so that sums by phase, cause, node, user and partition are equal to the last digit.
"""
