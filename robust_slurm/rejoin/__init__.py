"""Rejoin: a rank that is well stays, process, device and weights, when another one is replaced.

``resilient`` marks what such a rank runs again; ``offer`` is its line to robust-task,
``collectives`` gets it out of a collective, ``renew`` makes it a rank of the next epoch. Standard
library only, Python 3.9 syntax; torch is used where the training has it.
"""
