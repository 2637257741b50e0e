"""The parts of ``bench.checkpoint``: its cases, the ways to save, and the processes that do."""
