"""Accounts of time: what each job's time and GPUs were spent on. Pure, except ``gather.py``.

``gather.py`` reads the records and asks sacct; all else computes in whole milliseconds, so that
sums by phase, cause, node, user and partition are equal to the last digit.
"""
