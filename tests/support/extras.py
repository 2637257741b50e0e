"""Packages that not every environment has: looked for, but not imported.

Every worker of pytest-xdist collects all tests, and the frameworks take 10 s of CPU to import.
"""

from __future__ import annotations

import importlib.util

import pytest


def needs(package: str, extra: str) -> pytest.MarkDecorator:
    """The mark of tests that are skipped where a package is not installed."""
    top, _, _ = package.partition(".")
    found = importlib.util.find_spec(top) and importlib.util.find_spec(package)
    return pytest.mark.skipif(not found, reason=f"the extra {extra!r} is not installed")
