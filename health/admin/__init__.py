"""``robust-admin``: installs the gate on the nodes, and checks Slurm's configuration for it.

The gate does not import this package, so it may import more than the standard library.
"""
