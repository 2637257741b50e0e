"""``standby_point``: the point up to which a spare node runs the script before it has ranks."""

from __future__ import annotations

import sys

passed = False
"""True once this process has called ``standby_point``."""


def standby_point() -> None:
    """Mark the point up to which the script is the same on every rank; spares may run it ahead.

    Call it once, at the top level of the script, before anything that depends on the rank: read
    the data's index, build the model, compile. A rank goes on at once. A spare node runs the
    script up to here as soon as it knows the script, without RANK, MASTER_ADDR and the like in
    the environment and with its output discarded; there it waits until it takes over a rank.
    It then gets that rank's environment, but keeps the variables that the script has set or
    removed, its directory and its seeds. A rank is started as always instead if the script has
    set a variable that ranks are given, or if its code has changed. Outside robust-srun this does
    nothing.
    """
    global passed
    passed = True
    warm = sys.modules.get("robust_slurm.auto.warm")
    if warm is not None:
        warm.standby()
