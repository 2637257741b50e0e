"""Fault-aware checkpoints: every step in memory, a replica where the fault cannot reach.

Two halves. robust-task and the tools use the standard library only (``store``, ``transfer``,
``planning``, most of ``format`` and ``durable``). The training process and the durable tier's
writer need torch (``capture``, ``copying``, ``training``, ``durable.dcp``). Importing this package
imports neither half.
"""
