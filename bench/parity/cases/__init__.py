"""The battery: all ways by their names."""

from __future__ import annotations

from bench.parity.cases.waits import WAITS
from bench.parity.way import Way

WAYS: dict[str, Way] = {way.name: way for way in [*WAITS]}
