"""The cost of saving every step, the speed of restoring, and the processes that measure them."""
