"""Active tests: they load a node to find faults that no counter shows, while it has no job.

See docs/architecture.md, "Active tests", for the purpose of each file.
"""
