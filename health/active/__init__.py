"""Active tests: work that shows what a look at counters cannot, at the moments it costs least.

What each file is for is in docs/architecture.md, "Active tests".
"""
