"""The time from a fault until training goes on, here and in other launchers."""
