"""``robust-admin``: puts the gate onto the nodes and says what of Slurm's configuration hinders it.

Not on the path of the gate, so it may import more than the standard library.
"""
